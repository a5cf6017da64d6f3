"""The commands and their options; what a command does lives in the module of its name."""

from __future__ import annotations

from typing import Annotated

import typer

from raytorchrpc import __version__

app = typer.Typer(
    name="raytorchrpc",
    help="Direct calls between Ray actors, tensors by the fastest road.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"raytorchrpc {__version__}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Direct calls between Ray actors, tensors by the fastest road."""


@app.command()
def demo(
    workers: Annotated[int, typer.Option(min=1, help="Worker actors.")] = 2,
    target: Annotated[float, typer.Option(min=0.0, max=1.0, help="Test accuracy to reach.")] = 0.95,
    max_steps: Annotated[int, typer.Option(min=1, help="Give up after that many steps.")] = 5000,
    seed: Annotated[int, typer.Option(help="Seed of the data split, the model and the batches.")] = 0,
    address: Annotated[str | None, typer.Option(help="A running Ray cluster; none starts one here.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Time fewer exchanges at the end.")] = False,
) -> None:
    """Train a classifier over direct calls between Ray actors, then time the same calls through Ray."""
    from raytorchrpc.cli.demo import run  # here: Ray and torch are slow to load, and --help needs neither

    exchanges = 50 if quick else 200
    run(workers=workers, target=target, max_steps=max_steps, seed=seed, address=address, exchanges=exchanges)
