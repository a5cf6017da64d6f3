"""What the benchmarks share: the engine of ``raytorchrpc bench``, actors of their own, timing, one table."""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import ray
import torch

import raytorchrpc as rtr
from raytorchrpc.bench.cases import Case, Options, Row
from raytorchrpc.bench.reports import Table, not_measured, plain
from raytorchrpc.bench.results import Device, Run
from raytorchrpc.bench.schedule import BLOCK, measure, rounds

T = TypeVar("T")
Pick = Callable[[T, T, T], T]
"""Chooses of (full, quick, tiny); a tiny run only shows that the benchmark works."""
TIMEOUT_S = 300.0
#: With what actors start.
environment: Mapping[str, str] = rtr.runtime_env()["env_vars"]


class Skipped(Exception):
    """The benchmark cannot run here; the message says why."""


@dataclass(frozen=True)
class Line:
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

    def cells(self) -> tuple[str, ...]:
        met = "ok" if self.target is None or self.ratio <= self.target else "MISSED"
        target = "" if self.target is None else f"<= {self.target:g} {met}"
        figures = f"{self.ours:.4g}", f"{self.peer:.4g}", self.unit, f"{self.ratio:.3f}"
        return self.what, *figures, target, self.peer_name


def show(title: str, lines: Sequence[Line]) -> None:
    """Print a table, and append each line as a row of JSON to the file that BENCH_JSON names."""
    heads = ("", "ours", "peer", "", "ratio", "target", "")
    print(f"\n{plain(Table(title, heads, tuple(line.cells() for line in lines)))}")
    if path := os.environ.get("BENCH_JSON"):
        with open(path, "a") as file:
            for line in lines:
                file.write(json.dumps({"title": title, **asdict(line), "ratio": line.ratio}) + "\n")


def machine() -> str:
    """One line about this machine."""
    gpus = f", {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, Ray {ray.__version__}"
    return f"{os.cpu_count()} cores{gpus}, {versions}"


# --- timing ----------------------------------------------------------------------------------------------------------


def timed(run: Callable[[], object]) -> float:
    """Seconds of one run, and of the GPU's work that it queued."""
    await_gpu()
    begun = time.perf_counter()
    run()
    await_gpu()
    return time.perf_counter() - begun


def await_gpu() -> None:
    """Block until this process's GPU has done what was queued."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def interleaved(
    runs: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 3, block: int = BLOCK
) -> dict[str, float]:
    """Median milliseconds of each function.

    They alternate, so that drift of the machine affects all of them, in blocks, so that each is as warm as in its own
    loop: after another one's run, cold caches and idle cores cost more than a small call itself.
    """
    for run in runs.values():
        for _ in range(warmup):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in rounds(dict.fromkeys(runs, repeats), block):
        for name, count in turn:
            seconds[name] += [timed(runs[name]) for _ in range(count)]
    return {name: statistics.median(values) * 1e3 for name, values in seconds.items()}


def engine(
    rows: Sequence[Row], cases: Sequence[Case], device: Device = "cpu", *, budget_s: float = 1800.0, **effort: Any
) -> Run:
    """Measure these rows by the engine of ``raytorchrpc bench``; prints what has no figure."""
    if not environment:
        rows = [replace(row, bare_ends=range(99)) for row in rows]
    run = measure(Options(tuple(rows), (device,), tuple(cases), budget_s, **effort), "", lambda text, part: None)
    for line in not_measured(run):
        print(f"  not measured: {line}")
    return run


def ratios(
    run: Run, ours: str, peers: Mapping[str, str], targets: Mapping[tuple[str, str], float] | None = None
) -> list[Line]:
    """A line for each case and peer (row -> name) that were measured. ``targets``: by (case, peer's row)."""
    lines = []
    for cell in run.cells:
        for row, name in peers.items():
            peer = run.cell(row, cell.device, cell.label, cell.pattern)
            if cell.row == ours and cell.median is not None and peer is not None and peer.median is not None:
                what = ", ".join(filter(None, (cell.pattern, cell.label)))
                target = (targets or {}).get((what, row))
                lines.append(Line(what, cell.median, peer.median, cell.unit, name, target))
    return lines


# --- Ray and actors --------------------------------------------------------------------------------------------------


@contextmanager
def local_ray(cpus: int = 4) -> Iterator[None]:
    """Run a local Ray without a dashboard for the duration of the block."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def gpu_count() -> int:
    """GPUs that Ray has and torch sees."""
    return min(int(ray.cluster_resources().get("GPU", 0)), torch.cuda.device_count())


class End:
    """The actor of most benchmarks: runs their functions, which keep what they need in it."""

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self, *args)

    @rtr.method
    def take(self, value: Any = None) -> None:
        """A call with a payload, or without."""
        await_gpu()


@contextmanager
def actors(count: int, *, gpus: Sequence[str] = (), **env: str) -> Iterator[list[Any]]:
    """So many living actors, started with ``runtime_env()``; they end with the block.

    ``gpus``: CUDA_VISIBLE_DEVICES of each actor in turn.
    """
    ends = []
    for rank in range(count):
        visible = {"CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)]} if gpus else {}
        options = {"num_cpus": 0, "num_gpus": 0.05 if gpus else 0}
        variables = {"env_vars": {**environment, **env, **visible}}
        ends.append(ray.remote(End).options(**options, runtime_env=variables).remote())
    try:
        each(ends, lambda end: None)  # wait until they have started
        yield ends
    finally:
        for end in ends:
            ray.kill(end)


@contextmanager
def group_of(
    *names: str, gpus: Sequence[str] = (), config: rtr.GroupConfig | None = None, **env: str
) -> Iterator[tuple[rtr.Group, dict[str, Any]]]:
    """A group of ``actors`` with these names."""
    with actors(len(names), gpus=gpus, **env) as found:
        members = dict(zip(names, found, strict=True))
        with rtr.init_group(members, name=f"bench-{os.getpid()}", config=config) as group:
            yield group, members


def each(ends: Sequence[Any], function: Callable[..., T], *args: Any) -> list[T]:
    """Run a function in all of these actors at once; returns the results."""
    return list(ray.get([end.run.remote(function, *args) for end in ends], timeout=TIMEOUT_S))


def on(end: Any, function: Callable[..., T], *args: Any) -> T:
    """Run a function in one actor."""
    return each([end], function, *args)[0]
