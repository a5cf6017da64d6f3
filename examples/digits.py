"""Asynchronous SGD on handwritten digits, and what its calls cost beside the same calls through Ray.

Every worker pulls the newest parameters, computes gradients on its own share of the images and pushes them back,
without waiting for the others. ``raytorchrpc demo`` runs this program. It needs the extra ``demo``.

    python examples/digits.py                             # two workers, about 15 seconds
    python examples/digits.py --workers 1 --exchanges 20  # the short form

The last line reports what was checked. If a check fails, the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

import ray
import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as ProgressBar
from rich.table import Column, Table
from torch import Tensor, nn
from torch.nn import functional

import raytorchrpc as rtr

_LEARNING_RATE, _BATCH, _EVALUATE_EVERY = 0.1, 32, 25


class Progress(NamedTuple):
    steps: int
    accuracy: float


def load_split(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's 1797 handwritten digits: training images and labels, and those of a quarter for the test."""
    from sklearn.datasets import load_digits  # imported here, because workers need no data sets

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


def run(workers: int, target: float, max_steps: int, seed: int, exchanges: int) -> Progress:
    """Train on a Ray that runs, then show the routes of the calls and their cost, unless the target was missed."""
    if find_spec("sklearn") is None:
        sys.exit("digits: it needs scikit-learn: pip install '.[demo]' in a checkout")
    console = Console()
    console.print(f"Starting a parameter server and {workers} worker(s) as Ray actors ...")
    images, labels, *test = load_split(seed)
    server = ray.remote(ParameterServer).remote(*test, seed, target, max_steps)
    shares = ((images[rank::workers], labels[rank::workers], seed + rank) for rank in range(workers))
    team = [ray.remote(Worker).remote(*share) for share in shares]
    with rtr.init_group({"server": server, **{f"worker-{rank}": worker for rank, worker in enumerate(team)}}) as group:
        final = _train(console, server, team, target)
        if final.accuracy >= target:
            for heading, text in (
                ("[bold]Routes[/bold]: the lane between each pair of members, and why", group.routes()),
                ("[bold]Statistics[/bold] of the training calls", group.stats()),
            ):
                console.print(f"\n{heading}")
                console.print(str(text), markup=False, highlight=False, soft_wrap=True)
            _show_comparison(console, ray.get(team[0].compare.remote(server, exchanges)))
    return final


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


def main(arguments: list[str] | None = None) -> Progress:
    parser = argparse.ArgumentParser(description="Asynchronous SGD on handwritten digits.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--target", type=float, default=0.95, help="test accuracy to reach, 0 to 1")
    parser.add_argument("--steps", type=int, default=5000, dest="max_steps", help="fail after that many")
    parser.add_argument("--seed", type=int, default=0, help="of the data split, the model and the batches")
    parser.add_argument("--exchanges", type=int, default=200, help="to time on either path")
    options = parser.parse_args(arguments)
    if options.workers < 1 or options.max_steps < 1 or options.exchanges < 1:
        parser.error("--workers, --steps and --exchanges must be at least 1")

    ray.init(ignore_reinit_error=True, include_dashboard=False, logging_level="error")
    final = run(**vars(options))
    if final.accuracy < options.target:
        sys.exit(f"digits: test accuracy {final.accuracy:.1%}, below {options.target:.1%}")
    print(f"checked: test accuracy {final.accuracy:.1%} is at least {options.target:.1%}")
    return final


if __name__ == "__main__":
    main()
