"""The commands and their options; the module of the same name implements each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal, get_origin

import typer

from raytorchrpc import __version__, manifest


def _option(metavar: str, text: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, **limits)


@contextmanager
def _reported(command: str) -> Iterator[None]:
    """Report an error in one line. The exit code is 2 for ConfigurationError, else 1."""
    from raytorchrpc.errors import ConfigurationError, RayTorchRpcError

    try:
        yield
    except BrokenPipeError:
        raise  # typer ends the command, without a word
    except (RayTorchRpcError, OSError) as error:
        typer.echo(f"raytorchrpc {command}: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigurationError) else 1) from error


_AddressOrLocal = Annotated[
    str | None, _option("HOST:PORT", "Address of a running Ray cluster; default: start a local one.")
]
_Address = Annotated[
    str | None, _option("HOST:PORT", "The cluster's address; default: RAY_ADDRESS, or the one on this machine.")
]

app = typer.Typer(
    name="raytorchrpc",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text
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
    """Ray actors that call each other directly; tensors cross by shared memory, NVLink, RDMA or TCP."""


@app.command()
def demo(
    workers: Annotated[int, _option("N", "Number of worker actors.", min=1)] = 2,
    target: Annotated[float, _option("SHARE", "Test accuracy to reach.", min=0.0, max=1.0)] = 0.95,
    max_steps: Annotated[int, _option("N", "Fail after that many steps.", min=1)] = 5000,
    seed: Annotated[int, _option("N", "Seed of the data split, the model and the batches.")] = 0,
    address: _AddressOrLocal = None,
    quick: Annotated[bool, typer.Option("--quick", help="Time fewer exchanges.")] = False,
) -> None:
    """Train a classifier with direct calls between Ray actors. Then time the same calls through Ray."""
    given = {name: value for name, value in locals().items() if name != "quick"}
    from raytorchrpc.cli.demo import run  # here, as in each command: the others do not need it

    with _reported("demo"):
        run(**given, exchanges=50 if quick else 200)


@app.command()
def bench(
    pattern: Annotated[
        list[str] | None,
        _option(
            "NAMES",
            "Measure patterns of use instead of sizes: quiet, paced, in-flight, busy-callee, all-to-all, fan-in, idle "
            "(names or patterns, comma-separated), or all.",
        ),
    ] = None,
    rows: Annotated[
        list[str] | None, _option("NAMES", "Rows to measure: names or patterns (nccl-*), comma-separated.")
    ] = None,
    sizes: Annotated[
        list[str] | None, _option("SIZES", "Sizes, such as 20KB,1.25MB; default: the published ones.", "--sizes")
    ] = None,
    peers: Annotated[
        list[str] | None, _option("NAMES", "Measure calls beside Ray and these libraries instead: monarch.")
    ] = None,
    device: Annotated[str, _option("NAME", "Device of the tensors: cpu, cuda or all.")] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rows and sizes, under a minute of measuring.")] = False,
    budget_s: Annotated[
        float | None, _option("SECONDS", "Time limit of measuring, once actors are up.", "--budget", min=10.0)
    ] = None,
    hosts: Annotated[
        tuple[str, str] | None, _option("NODE NODE", "Measure between these two Ray nodes (id, address or host name).")
    ] = None,
    address: _AddressOrLocal = None,
    against: Annotated[str | None, _option("published", "Also show the field's published figures.")] = None,
    json: Annotated[Path | None, _option("FILE", "Write the whole result, as input for --from.")] = None,
    plot: Annotated[Path | None, _option("FILE", "Draw every figure of every case (PNG).")] = None,
    markdown: Annotated[
        Path | None, _option("FILE", "Write a report: tables, how to reproduce them, what is missing.")
    ] = None,
    results: Annotated[
        list[Path] | None, _option("FILE", "Show results of --json instead of measuring; repeatable.", "--from")
    ] = None,
) -> None:
    """Time every transport between two actors.

    These are raytorchrpc's lanes, Ray's transports and bare libraries.

    Exits with 0, with 2 for options that cannot work, or with 1 if the run fails.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    from raytorchrpc.cli.bench import run

    with _reported("bench"):
        run(**given)


@app.command()
def doctor(
    cluster: Annotated[bool, typer.Option("--cluster", help="Examine every node of a Ray cluster.")] = False,
    address: _Address = None,
    actors: Annotated[
        str | None, _option("NAMES", "Examine these actors from inside: NAME or NAMESPACE/NAME, comma-separated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the whole report, as JSON.")] = False,
    sysfs_root: Annotated[
        Path | None, _option("FOLDER", "Examine a tree with proc, sys and dev instead of this machine.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Count warnings as problems.")] = False,
    timeout_s: Annotated[float, _option("SECONDS", "How long to wait for nodes and actors.", "--timeout")] = 60.0,
) -> None:
    """Report what this machine means for the lanes, and what to do.

    It examines GPUs, RDMA adapters, limits and software.
    """
    given = dict(locals())
    from raytorchrpc.doctor.command import run

    raise typer.Exit(run(**given))


@app.command()
def top(
    address: _Address = None,
    group: Annotated[str | None, _option("NAME", "Show only groups of this name.")] = None,
    interval_s: Annotated[float, _option("SECONDS", "Time between two updates.", "--interval")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table, covering one interval.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only one line of JSON per update.")] = False,
) -> None:
    """Show a cluster's groups live. Calls by pair, lane and method, queues, weights, and lost members."""
    given = dict(locals())
    from raytorchrpc.cli.top import run

    with _reported("top"):
        run(**given)


@app.command()
def dashboard() -> None:
    """Print a dashboard for Ray's Grafana, as JSON to import there."""
    import json

    from raytorchrpc.cli.dashboard import build

    typer.echo(json.dumps(build(), indent=1))


manifests = typer.Typer(help="Write Kubernetes manifests for KubeRay.", no_args_is_help=True)
app.add_typer(manifests, name="manifest")
_Output = Annotated[Path | None, _option("FILE", "File to write; default: print it.")]


def _add_manifest(options: type[manifest.ClusterOptions], about: str) -> None:
    """Add the command that writes a manifest of these options, with an option for each of their fields."""
    kind = options.kind.lower()

    def write(*, output: Path | None, **values: Any) -> None:
        with _reported(f"manifest {kind}"):
            text = manifest.to_yaml(options(**{name: value for name, value in values.items() if value is not None}))
            if output is None:
                typer.echo(text, nl=False)
            else:
                output.write_text(text)

    parameters = []
    for name, field in options.model_fields.items():
        given_as = str if get_origin(field.annotation) is Literal else field.annotation  # the model's error is one line
        option = _option(field.title or "", field.description or "", f"--{name.replace('_', '-')}")
        default = Parameter.empty if field.is_required() else None if field.default_factory else field.default
        parameters.append(
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[given_as, option])
        )
    parameters.append(Parameter("output", Parameter.KEYWORD_ONLY, default=None, annotation=_Output))
    write.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    manifests.command(kind, help=about)(write)


_add_manifest(manifest.ClusterOptions, "Write a RayCluster, to which jobs are submitted.")
_add_manifest(manifest.JobOptions, "Write a RayJob: one command on a cluster of its own. The cluster ends with it.")


examples = typer.Typer(help="List the examples, and copy one to start from.", no_args_is_help=True)
app.add_typer(examples, name="examples")


@examples.command("list")
def list_examples() -> None:
    """List the examples that come with the package."""
    from raytorchrpc.cli.examples import listed
    from raytorchrpc.text import paragraph

    for example in listed():
        typer.echo(paragraph(f"{example.name:24}", example.shows.replace("`", ""), indent=24))


@examples.command()
def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `raytorchrpc examples list` shows it.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to put it; made if need be.")] = Path("."),
) -> None:
    """Copy an example into a folder, and name the command that runs it. Overwrites nothing."""
    from raytorchrpc.cli.examples import copy

    with _reported("examples copy"):
        example = copy(name, folder)
    copied, command = folder / example.file, example.command
    if copied.is_dir():  # run there, it writes its files there
        folder, command = copied, command.replace(f"{example.file}/", "")
    typer.echo(f"copied to {copied}; next:\n\n    cd {quote(str(folder))}\n    {command}")
