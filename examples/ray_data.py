"""A Ray Data pipeline feeds a member: Ray prepares the rows, and the group's lanes
carry the batches to the trainer.

Ray Data runs its stages in its own workers. They are not members of the group, so
they cannot make direct calls. Members called feeders each iterate over a share of the
dataset and put batches into a queue. The queue's home is the trainer, where tensors
arrive by shared memory. It blocks the pipeline when the trainer is slower. A single
trainer that has the time can call ``iter_torch_batches`` directly; feeders take that
work, and the object store, off it.

    pip install '.[data]' in a checkout
    python examples/ray_data.py               # 8,000 rows, about twenty seconds
    python examples/ray_data.py --rows 2000   # the short form

The last line reports that every row was seen once per epoch, and how the loss fell.
Otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import logging
import sys
from importlib.util import find_spec
from typing import Any

import ray
import torch
from torch import nn

import raytorchrpc as rtr

WIDTH, FEEDERS = 64, 2


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
        """Returns the loss of each batch, and the ids of rows in order of arrival."""
        optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        losses, seen = [], []
        for batch in batches:  # ends when all feeders have closed the queue
            output = self.model(batch["features"]).squeeze(1)
            loss = nn.functional.mse_loss(output, batch["target"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seen += batch["id"].tolist()
        return losses, seen


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Feed a member from Ray Data.")
    parser.add_argument("--rows", type=int, default=8_000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args(arguments)
    if options.rows < 500 or min(options.epochs, options.batch) < 1:
        parser.error("--rows must be at least 500, --epochs and --batch at least 1")
    missing = [name for name in ("numpy", "pandas", "pyarrow") if not find_spec(name)]
    if missing:
        needs = f"Ray Data needs {' and '.join(missing)}"
        sys.exit(f"ray_data: {needs}: pip install '.[data]' in a checkout")

    ray.init(ignore_reinit_error=True, include_dashboard=False, logging_level="error")
    from ray import data  # imported here, because it needs the packages checked above

    data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    dataset = data.range(options.rows).map_batches(prepare)
    shares = dataset.streaming_split(FEEDERS)
    trainer, feeders = Trainer.remote(), [Feeder.remote() for _ in range(FEEDERS)]
    with rtr.init_group([trainer, *feeders]):
        batches = rtr.Queue("batches", home=trainer, maxsize=8, producers=FEEDERS)
        training = trainer.train.remote(batches)
        pairs = zip(feeders, shares, strict=True)
        how = batches, options.epochs, options.batch
        ray.get([feeder.feed.remote(share, *how) for feeder, share in pairs])
        losses, seen = ray.get(training)
    first, last = (sum(part) / len(part) for part in (losses[:4], losses[-4:]))
    print(f"{len(losses)} batches with {len(seen)} rows came from {FEEDERS} feeders")
    if sorted(seen) != sorted(list(range(options.rows)) * options.epochs):
        sys.exit("ray_data: not every row was seen once in each epoch")
    if last > first / 2:
        sys.exit(f"ray_data: the loss went from {first:.3f} to {last:.3f}")
    print("checked: every row was seen once in each epoch, and the loss has halved")


if __name__ == "__main__":
    main()
