"""Times of updating ranks as SGLang has them: ``python -m tests.integrations.sglang_times [--rounds 15]``.

100 MB of float32, and two ranks on CPUs. In one run and in turn: whole tensors handed over as SGLang's
``update_weights_from_tensor`` does (in shared memory, each rank loads its part), and ``Updates.bring``, into the
parameters and by ``load_weights``. What the trainer's process has to do before is ``publish``, or ``ray.put`` of the
tensors for the process of the engine. Medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import ray

import raytorchrpc as rtr
from tests.integrations.sglang_engine import Holder, Publisher, checkpoint

HIDDEN, LAYERS = 1250, 4


class TimedPublisher(Publisher):
    """Keeps a checkpoint, and says how long it takes to give it away."""

    def make(self) -> None:
        self.weights = checkpoint(*self.size, seed=1)
        self.store = rtr.WeightStore("policy", keep=2)

    def nbytes(self) -> int:
        return sum(its.nbytes for its in self.weights.values())

    def timed_publish(self) -> float:
        began = time.perf_counter()
        self.store.publish(self.weights)
        return time.perf_counter() - began

    def timed_put(self) -> tuple[float, list[Any]]:
        began = time.perf_counter()
        put = ray.put({name: its.numpy() for name, its in self.weights.items()})
        return time.perf_counter() - began, [put]


class TimedHolder(Holder):
    def timed_bring(self) -> float:
        began = time.perf_counter()
        self.updates.bring()
        return time.perf_counter() - began

    def timed_load(self, put: list[Any]) -> float:
        import torch

        began = time.perf_counter()
        arrays = ray.get(put[0])
        self.engine.begin_weight_update()
        self.engine.update_weights_from_tensor([(name, torch.from_numpy(its)) for name, its in arrays.items()])
        self.engine.end_weight_update()
        return time.perf_counter() - began


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--rounds", type=int, default=15)
    rounds = asked.parse_args().rounds
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
    publisher = ray.remote(TimedPublisher).options(num_cpus=0).remote(HIDDEN, LAYERS)
    holders = {
        name: ray.remote(TimedHolder).options(num_cpus=0).remote(tp_size=2, hidden=HIDDEN, layers=LAYERS)
        for name in ("parameters", "load_weights", "tensors")
    }
    times: dict[str, list[float]] = {}
    with rtr.init_group({"publisher": publisher, **holders}):
        ray.get(publisher.make.remote())
        print(f"{ray.get(publisher.nbytes.remote()) / 1e6:.0f} MB, two ranks, {rounds} rounds")
        ray.get(publisher.timed_publish.remote())
        for name, into in (("parameters", "auto"), ("load_weights", "load_weights")):
            ray.get(holders[name].connect.remote(into=into))
        for number in range(rounds + 1):  # the first one is not counted
            row = {"publish": ray.get(publisher.timed_publish.remote())}
            for name in ("parameters", "load_weights"):
                row[f"update, {name}"] = ray.get(holders[name].timed_bring.remote())
            row["ray.put"], put = ray.get(publisher.timed_put.remote())
            row["update_weights_from_tensor"] = ray.get(holders["tensors"].timed_load.remote(put))
            if number:
                for name, seconds in row.items():
                    times.setdefault(name, []).append(1e3 * seconds)
    for name, its in times.items():
        print(f"{name:32}{statistics.median(its):9.1f}   fastest {min(its):9.1f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
