"""Effect of ``runtime_env()`` on large CPU tensors: the same calls between actors started with and without it.

One way plus an acknowledgement; the receiver allocates new memory for every tensor and frees it.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import ray
import torch

import raytorchrpc as rtr
from benchmarks._harness import Row, local_ray, show

SIZES = {10_000_000: 30, 40_000_000: 30, 640_000_000: 6}
#: Consecutive calls of one pair of actors.
BLOCK = 3

TORCHRPC = ("socket", "torchrpc")
#: The routes. The second is torchrpc's route between hosts, here over loopback.
ROUTES = {
    "torchrpc": rtr.GroupConfig(lanes=TORCHRPC),
    "its TCP": rtr.GroupConfig(lanes=TORCHRPC, transports=("uv",), channels=("mpt_uv", "basic")),
    "shm": rtr.GroupConfig(),
}
#: Which actors have the environment; the last case is the baseline.
WITH = {"both": "Hh", "receiver only": "Ph", "sender only": "Hp", "neither": "Pp"}


@ray.remote(num_cpus=0)
class Peer:
    """Both ends."""

    def __init__(self) -> None:
        self.tensor = torch.ones(0)

    @rtr.method
    def take(self, tensor: torch.Tensor) -> int:
        return tensor.nbytes

    def send(self, receiver: str, size: int, repeats: int) -> list[float]:
        """Seconds of each call."""
        if self.tensor.nbytes != size:
            self.tensor = torch.ones(size // 4)
        tensor, direct = self.tensor, rtr.rpc_sync(receiver)
        direct.take(tensor)  # warms the caches with a call of the same kind
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            direct.take(tensor)
            seconds.append(time.perf_counter() - start)
        return seconds


def main(quick: bool = False) -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = enabled.read_text().strip() if enabled.exists() else "missing"
    print(f"  {enabled}: {mode}")
    with local_ray():
        rows = [row for name in ROUTES for row in _route(name, quick, matters="[madvise]" in mode)]
    show("runtime_env(): large CPU tensors, one host (medians)", rows)


def _route(name: str, quick: bool, matters: bool) -> list[Row]:
    """Rows of one route. Senders P and H, receivers p and h; H and h were started with ``runtime_env()``.

    ``matters``: the kernel provides huge pages only on request.
    """
    plain, huge = Peer, Peer.options(runtime_env=rtr.runtime_env())
    actors = {"P": plain.remote(), "H": huge.remote(), "p": plain.remote(), "h": huge.remote()}
    rows = []
    with rtr.init_group(actors, config=ROUTES[name]):
        for size, repeats in SIZES.items():
            seconds: dict[str, list[float]] = {case: [] for case in WITH}
            for _ in range(0, repeats, BLOCK):
                for case, (sender, receiver) in WITH.items():
                    seconds[case] += ray.get(actors[sender].send.remote(receiver, size, 1 if quick else BLOCK))
            ms = {case: statistics.median(values) * 1e3 for case, values in seconds.items()}
            for case in list(WITH)[:-1]:
                target = 0.7 if matters and name != "shm" and case == "both" and size > 1e8 else None
                what = f"{name}, {size / 1e6:g} MB, {case}"
                rows.append(Row(what, ms[case], ms["neither"], "ms", "neither started with it", target))
    for actor in actors.values():
        ray.kill(actor)
    return rows
