"""``raytorchrpc demo``: asynchronous SGD with a parameter server and its workers, then what the calls cost.

Every worker pulls the newest parameters, computes gradients on its own share of the images and pushes them back,
without waiting for the others. Ray creates and places the actors; direct calls carry parameters and gradients.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

import ray
import torch
import typer
from ray.exceptions import RayError
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as ProgressBar
from rich.table import Column, Table
from torch import Tensor, nn
from torch.nn import functional

import raytorchrpc as rtr
from raytorchrpc.process.ray_session import ray_session

_LEARNING_RATE, _BATCH, _EVALUATE_EVERY = 0.1, 32, 25


class Progress(NamedTuple):
    steps: int
    accuracy: float


def load_split(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's 1797 handwritten digits: training images and labels, and those of a quarter for the test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = torch.as_tensor(digits.data / 16).float(), torch.as_tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    test, training = order[: len(order) // 4], order[len(order) // 4 :]
    return images[training], labels[training], images[test], labels[test]


def make_model(seed: int) -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


class ParameterServer:
    """Holds the parameters, applies gradients as they arrive, and decides when to stop."""

    def __init__(self, images: Tensor, labels: Tensor, seed: int, target: float, max_steps: int) -> None:
        self.images, self.labels = images, labels
        self.model = make_model(seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=_LEARNING_RATE)
        self.target, self.max_steps = target, max_steps
        self.state = Progress(steps=0, accuracy=0.0)

    @rtr.method
    def pull(self) -> dict[str, Tensor]:
        """The current parameters; a copy, because the next push changes the originals."""
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    @rtr.method
    def push(self, gradients: dict[str, Tensor]) -> bool:
        """Take one step of gradient descent; returns False when training has ended."""
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients[name]
        self.optimizer.step()
        steps, accuracy = self.state.steps + 1, self.state.accuracy
        if steps % _EVALUATE_EVERY == 0:
            with torch.no_grad():
                accuracy = (self.model(self.images).argmax(1) == self.labels).float().mean().item()
        self.state = Progress(steps, accuracy)
        return accuracy < self.target and steps < self.max_steps

    @rtr.method(concurrent=True)
    def progress(self) -> Progress:
        """The state; ``concurrent`` lets it run beside a ``push``."""
        return self.state

    @rtr.method(concurrent=True)
    def stop(self) -> None:
        """End training at the next push of each worker."""
        self.max_steps = 0


class Worker:
    """Computes gradients on its share of the training images."""

    def __init__(self, images: Tensor, labels: Tensor, seed: int) -> None:
        self.images, self.labels = images, labels
        self.model = make_model(seed)
        self.random = torch.Generator().manual_seed(seed)

    def train(self, server: Any) -> None:
        """Started by a Ray call; from here on, the two actors call each other directly."""
        training = True
        while training:
            self.model.load_state_dict(rtr.rpc_sync(server).pull())
            batch = torch.randint(len(self.images), (_BATCH,), generator=self.random)
            loss = functional.cross_entropy(self.model(self.images[batch]), self.labels[batch])
            names, values = zip(*self.model.named_parameters(), strict=True)
            training = rtr.rpc_sync(server).push(dict(zip(names, torch.autograd.grad(loss, values), strict=True)))

    def compare(self, server: Any, exchanges: int) -> dict[str, list[float]]:
        """Seconds per exchange (one pull, one push of the same size) over either path, alternating."""
        nothing = {name: torch.zeros_like(value) for name, value in self.model.named_parameters()}
        seconds: dict[str, list[float]] = {"direct": [], "object store": []}
        for number in range(2 * exchanges):
            start = time.perf_counter()
            if number % 2:
                ray.get(server.pull.remote())
                ray.get(server.push.remote(nothing))
            else:
                rtr.rpc_sync(server).pull()
                rtr.rpc_sync(server).push(nothing)
            seconds["object store" if number % 2 else "direct"].append(time.perf_counter() - start)
        return seconds


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
            images, labels, *test = load_split(seed)
            server = ray.remote(ParameterServer).remote(*test, seed, target, max_steps)
            team: list[Any] = []
            for rank in range(workers):
                share = images[rank::workers], labels[rank::workers]
                team.append(ray.remote(Worker).remote(*share, seed + rank))
            members = {"server": server} | {f"worker-{rank}": worker for rank, worker in enumerate(team)}
            with rtr.init_group(members) as group:
                final = _train(console, server, team, target)
                if final.accuracy >= target:
                    console.print("\n[bold]Routes[/bold]: the lane between each pair of members, and why")
                    console.print(str(group.routes()), markup=False, highlight=False, soft_wrap=True)
                    console.print("\n[bold]Statistics[/bold] of the training calls")
                    console.print(str(group.stats()), markup=False, highlight=False, soft_wrap=True)
                    _show_comparison(console, ray.get(team[0].compare.remote(server, exchanges)))
    except (rtr.RayTorchRpcError, RayError, ConnectionError) as error:
        raise _failure(str(error)) from error
    if final.accuracy < target:
        reached = f"test accuracy {final.accuracy:.1%} after {final.steps} steps"
        raise _failure(f"{reached}, below the target of {target:.1%}")


def _train(console: Console, server: Any, team: list[Any], target: float) -> Progress:
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


def _show_comparison(console: Console, seconds: dict[str, list[float]]) -> None:
    """One row per path, with its median and its ratio to the direct calls."""
    count = len(seconds["direct"])
    console.print(f"\n[bold]Direct or through Ray[/bold]: one pull and one push, {count} of each, alternating")
    table = Table("path", Column("median ms", justify="right"), Column("ratio", justify="right"))
    for path, values in seconds.items():
        table.add_row(path, f"{median(values) * 1e3:.2f}", f"{median(values) / median(seconds['direct']):.1f}")
    console.print(table)


def _failure(reason: str) -> typer.Exit:
    typer.echo(f"raytorchrpc demo: {reason}", err=True)
    return typer.Exit(1)
