"""Effect of ``runtime_env()`` on large CPU tensors: the same calls between actors started with and without it.

One way plus an acknowledgement; the receiver allocates new memory for every tensor and frees it.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks._harness import Pick, engine, ratios, show
from raytorchrpc.bench.cases import Case, Row

TORCHRPC = ("socket", "torchrpc")
#: The routes. The second is torchrpc's route between hosts, here over loopback.
ROUTES = {
    "torchrpc": {"lanes": TORCHRPC},
    "its TCP": {"lanes": TORCHRPC, "transports": ("uv",), "channels": ("mpt_uv", "basic")},
    "shm": {},
}
#: The ends that start without the environment.
WITHOUT = {"both": (), "receiver only": (0,), "sender only": (1,), "neither": (0, 1)}


def main(pick: Pick) -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = enabled.read_text().strip() if enabled.exists() else "missing"
    print(f"  {enabled}: {mode}")
    sizes = pick((10_000_000, 40_000_000, 640_000_000), (10_000_000, 40_000_000, 640_000_000), (1_000_000,))
    ends = pick(list(WITHOUT), list(WITHOUT), ["both", "neither"])
    for name in pick(list(ROUTES), list(ROUTES), ["shm"]):
        rows = [Row(case, "lane", "group", case, config=ROUTES[name], bare_ends=WITHOUT[case]) for case in ends]
        run = engine(
            rows, [Case("quiet", size=size) for size in sizes], repeats=pick(10, 3, 1), window_s=pick(0.3, 0.1, 0)
        )
        for case in ends[:-1]:
            # Where the kernel provides huge pages only on request.
            matters = "[madvise]" in mode and name != "shm" and case == "both"
            targets = {("quiet, 640 MB", "neither"): 0.7} if matters else {}
            lines = ratios(run, case, {"neither": "neither"}, targets)
            show(f"runtime_env(), {case}: large CPU tensors by {name}, one host (medians)", lines)
