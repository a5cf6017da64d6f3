"""A Ray Data pipeline feeds a member: Ray prepares the rows, and the group's lanes carry the batches to the trainer.

Ray Data runs its stages in its own workers. They are not members of the group, so they cannot make direct calls.
Members called feeders each iterate over a share of the dataset and put batches into a queue. The queue's home is the
trainer, where tensors arrive by shared memory. It blocks the pipeline when the trainer is slower. A single trainer that
has the time can call ``iter_torch_batches`` directly; feeders take that work, and the object store, off it.

    pip install '.[data]' in a checkout
    python examples/ray_data.py               # 8,000 rows, about twenty seconds
    python examples/ray_data.py --rows 2000   # the short form

The last line reports that every row was seen once per epoch, and how the loss fell. Otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from torch import nn

import raytorchrpc as rtr

WIDTH, FEEDERS = 64, 2


@dataclass
class Result:
    rows_seen: int
    each_once: bool  # in each epoch
    first_loss: float
    last_loss: float


def prepare(batch: dict[str, Any]) -> dict[str, Any]:
    """Turns row numbers into features and targets, in Ray Data's workers."""
    import numpy as np

    numbers = batch["id"]
    features = np.sin(np.outer(numbers, np.arange(1, WIDTH + 1))).astype(np.float32)
    return {"id": numbers, "features": features, "target": features[:, :4].sum(1)}


@ray.remote
class Feeder:
    def feed(self, share: Any, batches: rtr.Queue, epochs: int, size: int) -> None:
        for _ in range(epochs):
            for batch in share.iter_torch_batches(batch_size=size):
                batches.put(batch)  # blocks while the trainer is slower
        batches.close()  # this producer is done


@ray.remote
class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 1))

    def train(self, batches: rtr.Queue) -> tuple[list[float], list[int]]:
        """Returns the loss of each batch, and the ids of all rows in the order of arrival."""
        optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        losses, seen = [], []
        for batch in batches:  # ends when all feeders have closed the queue
            loss = nn.functional.mse_loss(self.model(batch["features"]).squeeze(1), batch["target"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seen += batch["id"].tolist()
        return losses, seen


def main(arguments: list[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description="Feed a member from a Ray Data pipeline.")
    parser.add_argument("--rows", type=int, default=8_000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args(arguments)
    if options.rows < 500 or options.epochs < 1 or not 1 <= options.batch <= options.rows // 10:
        parser.error("--rows must be at least 500, --epochs at least 1, and --batch 1 to a tenth of --rows")
    if missing := [name for name in ("numpy", "pandas", "pyarrow") if find_spec(name) is None]:
        sys.exit(f"ray_data: Ray Data needs {' and '.join(missing)}: pip install '.[data]' in a checkout")

    if not ray.is_initialized():  # a caller may have initialised Ray already
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    from ray import data  # imported here, because it needs the packages checked above

    data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    dataset = data.range(options.rows).map_batches(prepare)
    shares = dataset.streaming_split(FEEDERS)
    trainer, feeders = Trainer.remote(), [Feeder.remote() for _ in range(FEEDERS)]
    with rtr.init_group({"trainer": trainer} | {f"feeder_{number}": one for number, one in enumerate(feeders)}):
        batches = rtr.Queue("batches", home="trainer", maxsize=8, producers=FEEDERS)
        training = trainer.train.remote(batches)
        feeding = [
            feeder.feed.remote(share, batches, options.epochs, options.batch)
            for feeder, share in zip(feeders, shares, strict=True)
        ]
        ray.get(feeding)
        losses, seen = ray.get(training)
    each_once = sorted(seen) == sorted(list(range(options.rows)) * options.epochs)
    first, last = (sum(part) / len(part) for part in (losses[:4], losses[-4:]))
    print(f"{len(losses)} batches with {len(seen)} rows came from {FEEDERS} feeders")
    if not each_once:
        sys.exit(f"ray_data: not every row was seen once in each of {options.epochs} epochs")
    if last > first / 2:
        sys.exit(f"ray_data: the loss went from {first:.3f} to {last:.3f}, but must halve")
    print(f"checked: every row was seen once in each epoch, and the loss fell from {first:.3f} to {last:.3f}")
    return Result(len(seen), each_once, first, last)


if __name__ == "__main__":
    try:
        main()
    except (rtr.RayTorchRpcError, RayError, ConnectionError) as error:
        reason = error.cause if isinstance(error, RayTaskError) else error
        sys.exit(f"ray_data: {type(reason).__name__}: {str(reason).splitlines()[0]}")
