"""What all benchmarks share: interleaved timing, medians, tables with targets."""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import ray
import torch

from raytorchrpc.bench.tables import Table, plain


@dataclass(frozen=True)
class Row:
    """One line: our figure against that of a named peer, from the same run."""

    what: str
    ours: float
    peer: float
    unit: str
    peer_name: str
    target: float | None = None
    """Upper bound of the ratio ours / peer."""

    @property
    def ratio(self) -> float:
        return self.ours / self.peer if self.peer else float("inf")

    @property
    def verdict(self) -> str:
        """The target and whether it is met; empty without one."""
        return "" if self.target is None else f"<= {self.target:g} {'ok' if self.ratio <= self.target else 'MISSED'}"


#: Consecutive runs of one function.
BLOCK = 10


def interleaved(runs: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 3) -> dict[str, float]:
    """Median seconds of each function.

    They alternate, so that drift of the machine affects all of them, in blocks, so that each is as warm as in its own
    loop: after another one's run, cold caches and idle cores cost more than a small call itself.
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


@contextmanager
def local_ray(cpus: int = 4) -> Iterator[None]:
    """Run a local Ray without a dashboard for the duration of the block."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def show(title: str, rows: Sequence[Row]) -> None:
    """Print a table, and append each row as a line of JSON to the file that BENCH_JSON names."""
    heads = ("", "ours", "peer", "", "ratio", "target", "")
    lines = [
        (row.what, f"{row.ours:.4g}", f"{row.peer:.4g}", row.unit, f"{row.ratio:.3f}", row.verdict, row.peer_name)
        for row in rows
    ]
    print(f"\n{plain(Table(title, heads, tuple(lines)))}")
    if path := os.environ.get("BENCH_JSON"):
        with open(path, "a") as file:
            for row in rows:
                file.write(json.dumps({"title": title, **asdict(row), "ratio": row.ratio}) + "\n")


def machine() -> str:
    """One line about this machine."""
    gpus = f", {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    return (
        f"{os.cpu_count()} cores{gpus}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"Ray {ray.__version__}"
    )
