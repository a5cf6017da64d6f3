"""Times of updating vLLM, beside Ray's object store: ``python -m tests.integrations.vllm_times [--rounds 15]``.

A Llama of 231 MB in float32, on CPUs. Each round publishes new weights, and the engine brings them; then the same with
``ray.put`` of numpy arrays, which vLLM loads without a copy of its own. Medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

import raytorchrpc as rtr
from tests.integrations.vllm_actors import Engine, Trainer, save_config

#: By name: the arguments of the engine.
CASES: dict[str, dict[str, Any]] = {
    "actor, layer by layer": {},
    "actor, into parameters": {"keep_layout": True},
    "child process": {"in_process": False},
    "child, 2 ranks": {"in_process": False, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
}


class TimedTrainer(Trainer):
    """Says how long it takes to give the weights away."""

    def timed_step(self) -> tuple[int, float]:
        self.change()
        began = time.perf_counter()
        version = self.publish()
        return version, time.perf_counter() - began

    def timed_put(self) -> tuple[list[Any], float]:
        self.change()
        began = time.perf_counter()
        self.put = ray.put({name: its.numpy() for name, its in self.model.state_dict().items()})
        return [self.put], time.perf_counter() - began


def load(engine: Engine, held: list[Any]) -> float:
    """Have vLLM load the arrays of an object; returns the seconds."""

    def work(worker: Any) -> None:
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = worker.model_runner.model
        arrays = ray.get(held[0])
        with set_current_vllm_config(worker.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights((name, torch.from_numpy(its)) for name, its in arrays.items())
            finalize_layerwise_reload(model, worker.model_config)

    began = time.perf_counter()
    engine.llm.collective_rpc(work)
    return time.perf_counter() - began


def measure(path: str, options: dict[str, Any], rounds: int) -> tuple[list[list[float]], str]:
    """Seconds to publish, to update, to put and to load, of each round; and how the update went."""
    trainer = ray.remote(TimedTrainer).options(num_cpus=0).remote(path)
    engine = ray.remote(Engine).options(num_cpus=0).remote(path, **options)
    try:
        ray.get(engine.start_s.remote(), timeout=300)
        with rtr.init_group({"trainer": trainer, "engine": engine}):
            ray.get(trainer.open.remote())
            ray.get(trainer.step.remote())
            ray.get(engine.connect.remote())
            times = []
            for _ in range(rounds):
                version, publish_s = ray.get(trainer.timed_step.remote())
                row = [publish_s, ray.get(engine.update.remote(version), timeout=60)]
                if ray.get(trainer.greedy.remote()) != ray.get(engine.greedy.remote(), timeout=120):
                    raise RuntimeError("vLLM does not generate what the published model does")
                if options.get("in_process", True):
                    held, put_s = ray.get(trainer.timed_put.remote())
                    row += [put_s, ray.get(engine.run.remote(load, held))]
                times.append(row)
            return times, ray.get(engine.how.remote())
    finally:
        ray.kill(engine)
        ray.kill(trainer)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--rounds", type=int, default=15)
    asked.add_argument("--only", default="", help="part of a case's name")
    given = asked.parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's 15, ranks that wait for one another take minutes
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=2 << 30)
    print(f"{'':24}{'publish':>9}{'update':>9}{'fastest':>9}{'ray.put':>9}{'load':>9}")
    with tempfile.TemporaryDirectory() as folder:
        path = save_config(Path(folder), hidden=1024, layers=6)
        for name, options in CASES.items():
            if given.only in name:
                times, how = measure(path, options, given.rounds)
                publish, update, *others = ([1e3 * value for value in column] for column in zip(*times, strict=True))
                columns = [statistics.median(publish), statistics.median(update), min(update)]
                columns += [statistics.median(column) for column in others]
                print(f"{name:24}" + "".join(f"{value:9.1f}" for value in columns), f"  {how}", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
