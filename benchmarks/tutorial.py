"""PyTorch's tutorial on device-to-device RPC on two GPUs: as published (torchrpc's default options, staged through the
CPU or direct), and over a group (staged or direct).

The group's rows come from ``examples/pipeline_autograd.py``, run as a user runs it.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn

from benchmarks._harness import Line, Pick, Skipped, show, timed

SIZE, ROUNDS, REPEATS = 1000, 10, 5
EXAMPLE = Path(__file__).parent.parent / "examples" / "pipeline_autograd.py"


class Layer(nn.Module):
    """One layer on one GPU; ``staged`` sends its output through the CPU."""

    def __init__(self, device: str, staged: bool) -> None:
        super().__init__()
        self.device, self.staged = device, staged
        self.linear = nn.Linear(SIZE, SIZE).to(device)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.to(self.device))
        return y.cpu() if self.staged else y


def _train(local: Layer, remote: Any, x: Tensor) -> None:
    for _ in range(ROUNDS):
        with dist_autograd.context() as context:
            y = remote.rpc_sync().forward(local(x))
            dist_autograd.backward(context, [y.sum()])


def _published(rank: int, meeting: str, results: Any) -> None:
    """One process of the published form: both GPUs visible, torch's own defaults."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting)
    if rank == 0:
        options.set_device_map("w1", {0: 1})
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        x, medians = torch.randn(SIZE, SIZE, device="cuda:0"), {}
        for path, staged in (("staged", True), ("direct", False)):
            local, remote = Layer("cuda:0", staged), rpc.remote("w1", Layer, args=("cuda:1", staged))
            _train(local, remote, x)  # connections and GPU start-up
            seconds = [timed(lambda local=local, remote=remote: _train(local, remote, x)) for _ in range(REPEATS)]
            medians[path] = statistics.median(seconds)
            del remote
        results.put(medians)
    rpc.shutdown()


def _run_published() -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        processes = [spawn.Process(target=_published, args=(rank, meeting, results)) for rank in range(2)]
        for process in processes:
            process.start()
        try:
            medians: dict[str, float] = results.get(timeout=90)
        finally:
            for process in processes:
                process.join(20)
                if process.is_alive():
                    process.kill()
    return medians


def main(pick: Pick) -> None:
    if torch.cuda.device_count() < 2:
        raise Skipped(f"it needs two GPUs, and torch sees {torch.cuda.device_count()}")
    published = _run_published()
    command = [sys.executable, str(EXAMPLE), "--json", "--rounds", str(ROUNDS), "--repeats", str(REPEATS)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    ours = json.loads(printed.strip().splitlines()[-1])
    lines = [
        Line("direct / published staged", ours["direct_s"], published["staged"], "s", "tutorial, CPU RPC", 0.25),
        Line("direct / own staged", ours["direct_s"], ours["staged_s"], "s", "the example, staged", 0.25),
        Line("direct / published direct", ours["direct_s"], published["direct"], "s", "tutorial, CUDA RPC"),
        Line("staged / published staged", ours["staged_s"], published["staged"], "s", "tutorial, CPU RPC"),
    ]
    show(f"{ROUNDS} x forward and backward over two GPUs (gradients match: {ours['gradients_match']})", lines)
