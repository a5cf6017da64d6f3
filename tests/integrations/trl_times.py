"""Times of TRL's update of a vLLM server: ``python -m tests.integrations.trl_times [--rounds 15]``.

A Llama of 100 MB in float32, on CPUs. TRL's own transfer needs NCCL, and so GPUs. Beside it stands, in one run and in
turn, a file: ``save_pretrained``, and ``reload_weights`` of vLLM. Medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch

from raytorchrpc.integrations.trl import RayTorchRpcWeightTransfer
from tests.integrations.trl_actors import save_model
from tests.integrations.vllm_actors import Server, Trainer


class TimedTransfer(RayTorchRpcWeightTransfer):
    """Notes when the server pauses."""

    def init_weight_transfer(self) -> None:
        super().init_weight_transfer()
        pause = self._vllm.pause

        def noted(**options: Any) -> None:
            self.paused_at = time.perf_counter()
            pause(**options)

        self._vllm.pause = noted


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--rounds", type=int, default=15)
    rounds = asked.parse_args().rounds
    torch.set_num_threads(1)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 28)
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> None:
        began = time.perf_counter()
        work()
        times.setdefault(name, []).append(1e3 * (time.perf_counter() - began))

    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder), hidden=512, layers=12)
        trainer = Trainer(path)
        server = Server(path, options=("--load-format", "auto"))
        transfer = TimedTransfer("http://{}:{}".format(*server.address()))
        reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        try:
            print(f"{trainer.nbytes() / 1e6:.0f} MB, {rounds} rounds")
            transfer.init_weight_transfer()
            for number in range(rounds + 1):
                if number == 1:
                    times.clear()  # the first round prepares
                trainer.change()
                timed("update", lambda: transfer.send_weights(iter(trainer.model.state_dict().items())))
                timed("resume", transfer.resume)
                times.setdefault("server paused", []).append(1e3 * (time.perf_counter() - transfer.paused_at))
                trainer.change()
                timed("file: save", lambda: trainer.model.save_pretrained(path))
                timed("file: reload_weights", lambda: server.ask("POST", "/collective_rpc", reload))
        finally:
            transfer.destroy()
            server.stop()
    for name, its in times.items():
        print(f"{name:24}{statistics.median(its):9.1f}   fastest {min(its):9.1f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
