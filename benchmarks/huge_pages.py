"""What ``runtime_env()`` is worth to large CPU tensors: the same calls between actors that were started with it and
without it. One way plus an acknowledgement; the receiver takes every tensor into fresh memory and drops it again.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import ray
import torch

import raytorchrpc as rtr
from benchmarks._harness import Row, show, start_ray

SIZES = {10_000_000: 30, 40_000_000: 30, 640_000_000: 6}
#: Calls from one sender to one receiver before it is the next two's turn.
BLOCK = 3

TORCHRPC = ("socket", "torchrpc")
#: By which road. The second is how torchrpc sends between hosts, here over loopback.
ROADS = {
    "torchrpc": rtr.GroupConfig(lanes=TORCHRPC),
    "its TCP": rtr.GroupConfig(lanes=TORCHRPC, transports=("uv",), channels=("mpt_uv", "basic")),
    "shm": rtr.GroupConfig(),
}
#: Who has the environment. The last is what all the others are compared with.
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
        direct.take(tensor)  # caches are as after a call of the same kind
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
    start_ray()
    try:
        rows = [row for name in ROADS for row in _road(name, quick, matters="[madvise]" in mode)]
    finally:
        ray.shutdown()
    show("runtime_env(): large CPU tensors, one host (medians)", rows)


def _road(name: str, quick: bool, matters: bool) -> list[Row]:
    """Senders P and H, receivers p and h; H and h were started with ``runtime_env()``.

    ``matters``: the kernel gives huge pages to those who ask, and to nobody else.
    """
    plain, huge = Peer, Peer.options(runtime_env=rtr.runtime_env())
    actors = {"P": plain.remote(), "H": huge.remote(), "p": plain.remote(), "h": huge.remote()}
    rows = []
    with rtr.init_group(actors, config=ROADS[name]):
        for size, repeats in SIZES.items():
            seconds: dict[str, list[float]] = {who: [] for who in WITH}
            for _ in range(0, repeats, BLOCK):
                for who, (sender, receiver) in WITH.items():
                    seconds[who] += ray.get(actors[sender].send.remote(receiver, size, 1 if quick else BLOCK))
            ms = {who: statistics.median(values) * 1e3 for who, values in seconds.items()}
            for who in list(WITH)[:-1]:
                target = 0.7 if matters and name != "shm" and who == "both" and size > 1e8 else None
                what = f"{name}, {size / 1e6:g} MB, {who}"
                rows.append(Row(what, ms[who], ms["neither"], "ms", "neither was started with it", target))
    for actor in actors.values():
        ray.kill(actor)
    return rows


if __name__ == "__main__":
    main()
