"""Weights from one publisher to several readers at once, against a broadcast by torch.distributed and one reader."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import ray
import torch

import raytorchrpc as rtr
from benchmarks._harness import Row, local_ray, show

#: Tensors of 32 MiB on GPUs, of 4 MiB on CPUs.
TENSORS, SIDES = {"cuda": 128, "cpu": 16}, {"cuda": (4096, 4096), "cpu": (2048, 1024)}
READERS = (1, 2, 3)
#: From one round to the next (seconds).
ROUND_S = {"cuda": 0.2, "cpu": 1.0}


@ray.remote(num_cpus=0)
class End:
    """The publisher, or a reader."""

    def load(self, store: rtr.WeightStore, device: str, value: float) -> int:
        """Make the model; returns its bytes."""
        self.store, self.device = store, device
        shape = SIDES[device]
        self.model = {
            f"{number}": torch.full(shape, value, dtype=torch.bfloat16, device=device)
            for number in range(TENSORS[device])
        }
        return sum(tensor.nbytes for tensor in self.model.values())

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def publish(self) -> int:
        return self.store.publish(self.model)

    def pull(self, rounds: int, begin: float) -> list[float]:
        """Seconds of each round, of which the first begins at ``begin`` (``time.monotonic``)."""
        took = []
        for number in range(rounds):
            at = begin + number * ROUND_S[self.device]
            time.sleep(max(0.0, at - time.monotonic()))
            self.store.pull(self.model)
            self.synchronize()
            took.append(time.monotonic() - at)
        return took

    def values(self) -> set[float]:
        """What has arrived."""
        return {value for tensor in self.model.values() for value in (float(tensor.min()), float(tensor.max()))}

    def broadcast(self, rounds: int) -> float:
        """Median seconds of a broadcast of the model, in one tensor."""
        group: Any = rtr.process_group()
        whole = torch.cat([tensor.view(-1) for tensor in self.model.values()])
        took = []
        for _ in range(rounds + 1):
            began = time.monotonic()
            torch.distributed.broadcast(whole, group_src=0, group=group)
            self.synchronize()
            took.append(time.monotonic() - began)
        return statistics.median(took[1:])


def main(quick: bool = False) -> None:
    with local_ray():
        gpus = int(ray.cluster_resources().get("GPU", 0))
        device = "cuda" if gpus > 1 else "cpu"
        rows = _measure(device, gpus, 5 if quick else 15)
    show(f"Weights from one publisher to readers that pull at once, {device}, {gpus} GPUs (medians)", rows)


def _measure(device: str, gpus: int, rounds: int) -> list[Row]:
    def end(number: int) -> Any:
        # Readers on all GPUs but the publisher's.
        gpu = 1 + (number - 1) % (gpus - 1) if number and gpus > 1 else 0
        env = rtr.runtime_env()["env_vars"] | ({"CUDA_VISIBLE_DEVICES": str(gpu)} if device == "cuda" else {})
        return End.options(num_gpus=0.1 if device == "cuda" else 0, runtime_env={"env_vars": env}).remote()

    ends = {"publisher": end(0)} | {f"reader{number}": end(number) for number in range(1, 1 + max(READERS))}
    publisher, *readers = ends.values()
    with rtr.init_group(ends) as group:
        store = rtr.WeightStore("whole", home="publisher")
        size, *_ = ray.get([actor.load.remote(store, device, float(actor is publisher)) for actor in ends.values()])
        ray.get(publisher.publish.remote())
        took: dict[int, float] = {}
        for count in READERS:
            for repeats in (3, rounds):  # at first they get to know one another
                begin = time.monotonic() + 0.5
                pulls = ray.get([reader.pull.remote(repeats, begin) for reader in readers[:count]])
            took[count] = statistics.median(map(max, zip(*pulls, strict=True)))
        if any(values != {1.0} for values in ray.get([reader.values.remote() for reader in readers])):
            raise RuntimeError("the weights arrived changed")
        alone = max(1, min(len(readers), gpus - 1)) if device == "cuda" else len(readers)
        members = ["publisher", *(f"reader{number}" for number in range(1, 1 + alone))]
        group.process_group("nccl" if device == "cuda" else "gloo", members=members)
        broadcast = max(ray.get([ends[name].broadcast.remote(rounds) for name in members]))
    gigabytes = f"{size / 1e9:.3g} GB"
    peer = f"broadcast to {alone}"
    whats = [f"{count} reader{'s' if count > 1 else ''}, {gigabytes}" for count in READERS]
    rows = [
        Row(what, took[count] * 1e3, broadcast * 1e3, "ms", peer) for what, count in zip(whats, READERS, strict=True)
    ]
    if device == "cuda":
        rows[-1] = replace(rows[-1], target=1.2)
    return [*rows, Row(whats[-1], took[READERS[-1]] * 1e3, took[1] * 1e3, "ms", "one reader")]
