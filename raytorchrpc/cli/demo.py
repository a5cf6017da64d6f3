"""``raytorchrpc demo``: starts Ray, shows the progress while digits.py trains, then what the calls cost."""

from __future__ import annotations

import time
from importlib.util import find_spec
from statistics import median

import ray
import typer
from ray.actor import ActorHandle
from ray.exceptions import RayError
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as ProgressBar
from rich.table import Column, Table

import raytorchrpc as rtr
from raytorchrpc.cli.digits import ParameterServer, Progress, Worker
from raytorchrpc.process.ray_session import ray_session


def run(*, workers: int, target: float, max_steps: int, seed: int, address: str | None, exchanges: int) -> None:
    """Train, then show the routes of the calls and their cost.

    Raises typer.Exit with code 1, and prints the reason on stderr, if a package or Ray is missing or the target
    accuracy is not reached.
    """
    if find_spec("sklearn") is None:
        raise _failure("the demo needs scikit-learn: pip install '.[demo]' in a checkout")
    console = Console()
    console.print(f"Starting a parameter server and {workers} worker(s) as Ray actors ...")
    try:
        with ray_session(address, cpus=workers + 1):
            # mypy does not see what a class decorator adds.
            server = ParameterServer.remote(seed, target, max_steps)  # type: ignore[attr-defined]
            team = [Worker.remote(rank, workers, seed) for rank in range(workers)]  # type: ignore[attr-defined]
            members = {"server": server} | {f"worker-{rank}": worker for rank, worker in enumerate(team)}
            with rtr.init_group(members) as group:
                final = _train(console, server, team, target)
                if final.accuracy >= target:
                    console.print("\n[bold]Routes[/bold]: the lane between each pair of members, and why")
                    console.print(str(group.routes()), markup=False, highlight=False, soft_wrap=True)
                    _show_stats(console, group)
                    _show_comparison(console, ray.get(team[0].compare.remote(server, exchanges)))
    except (rtr.RayTorchRpcError, RayError, ConnectionError) as error:
        raise _failure(str(error)) from error
    if final.accuracy < target:
        raise _failure(
            f"test accuracy {final.accuracy:.1%} after {final.steps} steps, below the target of {target:.1%}"
        )


def _train(
    console: Console, server: ActorHandle[ParameterServer], team: list[ActorHandle[Worker]], target: float
) -> Progress:
    """Run the workers and show their progress; returns the final state."""
    console.print(f"Training until {target:.1%} of the test images are recognised ...")
    columns = TextColumn("Training"), BarColumn(), TextColumn("{task.description}")
    with ProgressBar(*columns, console=console) as bar:
        task = bar.add_task("", total=target)
        start = time.perf_counter()
        running = [worker.train.remote(server) for worker in team]
        try:
            while True:
                done, running = ray.wait(running, timeout=0.1)
                ray.get(done)  # raises a worker's exception
                now: Progress = ray.get(server.progress.remote())
                speed = now.steps / (time.perf_counter() - start)
                text = f"test accuracy {now.accuracy:.1%}  {now.steps} steps  {speed:.0f} steps/s"
                bar.update(task, completed=min(now.accuracy, target), description=text)
                if not running:
                    return now
        except BaseException:  # also Ctrl-C: the workers leave their loops, so the group ends at once
            server.stop.remote()
            raise


def _show_stats(console: Console, group: rtr.Group) -> None:
    console.print("\n[bold]Statistics[/bold] of the training calls")
    numbers = (Column(heading, justify="right") for heading in ("calls", "MB out", "MB in", "ms per call"))
    table = Table("caller", "peer", "lane", *numbers)
    for row in group.stats():
        sizes = (f"{size / 1e6:.1f}" for size in (row.bytes_out, row.bytes_in))
        per_call = f"{row.seconds / row.calls * 1e3:.2f}"
        table.add_row(row.caller, row.peer, row.lane, str(row.calls), *sizes, per_call)
    console.print(table)


def _show_comparison(console: Console, seconds: dict[str, list[float]]) -> None:
    """One row per path, with its median and its ratio to the direct calls."""
    medians = {path: median(values) for path, values in seconds.items()}
    count = len(seconds["direct"])
    console.print(f"\n[bold]Direct or through Ray[/bold]: one pull and one push, {count} of each, alternating")
    table = Table("path", Column("median ms", justify="right"), Column("ratio", justify="right"))
    for path, value in medians.items():
        table.add_row(path, f"{value * 1e3:.2f}", f"{value / medians['direct']:.1f}")
    console.print(table)


def _failure(reason: str) -> typer.Exit:
    typer.echo(f"raytorchrpc demo: {reason}", err=True)
    return typer.Exit(1)
