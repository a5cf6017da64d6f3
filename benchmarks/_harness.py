"""What every benchmark shares: interleaved timing, medians, a table with the target beside the ratio."""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import ray
import torch


@dataclass(frozen=True)
class Row:
    """One line: what we took against what a named peer took, in the same run."""

    what: str
    ours: float
    peer: float
    unit: str
    peer_name: str
    target: float | None = None
    """The ratio ours / peer must not exceed."""

    @property
    def ratio(self) -> float:
        return self.ours / self.peer if self.peer else float("inf")


#: Runs of one road before it is the next one's turn.
BLOCK = 10


def interleaved(runs: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 3) -> dict[str, float]:
    """Median seconds of each.

    Taken in turns, so that the machine's drift hits all alike, and in blocks, so that each road is as warm as in
    a loop of its own: after another road's run, caches and sleeping cores cost more than a small call itself.
    """
    for run in runs.values():
        for _ in range(warmup):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for done in range(0, repeats, BLOCK):
        for name, run in runs.items():
            for _ in range(min(BLOCK, repeats - done)):
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def start_ray(cpus: int = 4) -> None:
    """A local Ray without a dashboard."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)


def show(title: str, rows: list[Row]) -> None:
    """Print a table, and each row as a line of JSON where BENCH_JSON names a file."""
    print(f"\n{title}")
    print(f"  {'':<34}{'ours':>12}{'peer':>12}  {'':<6}{'ratio':>8}{'target':>9}   peer")
    for row in rows:
        target = f"<= {row.target:g}" if row.target is not None else ""
        verdict = "" if row.target is None else ("ok" if row.ratio <= row.target else "MISSED")
        print(
            f"  {row.what:<34}{row.ours:>12.4g}{row.peer:>12.4g}  {row.unit:<6}{row.ratio:>8.3f}{target:>9}"
            f"   {row.peer_name} {verdict}"
        )
    if path := os.environ.get("BENCH_JSON"):
        with open(path, "a") as file:
            for row in rows:
                file.write(json.dumps({"title": title, **asdict(row), "ratio": row.ratio}) + "\n")


def machine() -> str:
    """One line about where this runs."""
    gpus = f", {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    return (
        f"{os.cpu_count()} cores{gpus}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"Ray {ray.__version__}"
    )
