"""What the benchmarks share: the engine of ``raytorchrpc bench``, and actors of their own."""

from __future__ import annotations

import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch

import raytorchrpc as rtr
from raytorchrpc._compat import ray_internals
from raytorchrpc.bench import runs
from raytorchrpc.bench.cases import Case, Device, Failed, Figure, Size, measure
from raytorchrpc.bench.contestants import Contestant
from raytorchrpc.bench.options import Options, make_jobs
from raytorchrpc.bench.patterns import Pattern

T = TypeVar("T")
Pick = Callable[[T, T, T], T]
"""Chooses of (full, quick, tiny); a tiny run only shows that the benchmark works."""
TIMEOUT_S = 300.0
#: How often is looked for what Ray has no event for (seconds).
POLL_S = 0.05
#: With what actors start.
environment: Mapping[str, str] = rtr.runtime_env()["env_vars"]


class Unavailable(Failed):
    """The benchmark cannot run here; the message says why."""


def machine() -> str:
    """One line about this machine."""
    gpus = f", {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, Ray {ray.__version__}"
    return f"{os.cpu_count()} cores{gpus}, {versions}"


def compare(
    name: str,
    body: Callable[[str, Any], float],
    contestants: Sequence[str],
    sizes: Sequence[Size],
    rounds: int,
    **more: Any,
) -> list[Figure]:
    """The figures of a case; ``more``: its other fields."""
    figures: list[Figure] = []
    measure(Case(name, contestants, sizes, body, **more), rounds, figures)
    return figures


def engine(
    contestants: Sequence[Contestant],
    patterns: Sequence[Pattern],
    sizes: Sequence[int],
    device: Device = "cpu",
    *,
    rounds: int = 5,
    window_s: float = 0.3,
) -> list[Figure]:
    """Figures by the engine of ``raytorchrpc bench``."""
    if not environment:
        contestants = [replace(one, bare_ends=range(99)) for one in contestants]
    options = Options(contestants, make_jobs([device], patterns, sizes, window_s), 1800.0, rounds=rounds)
    return list(runs.run(options, "").figures)


def timed(run: Callable[[], object]) -> float:
    """Milliseconds of one run, and of the GPU's work that it queued."""
    await_gpu()
    begun = time.perf_counter()
    run()
    await_gpu()
    return (time.perf_counter() - begun) * 1e3


def median_of(run: Callable[[], object], count: int) -> float:
    """Median milliseconds of so many runs in a row: each is as warm as in its own loop."""
    return statistics.median(timed(run) for _ in range(count))


def await_gpu() -> None:
    """Block until this process's GPU has done what was queued."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


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
def actors(
    count: int,
    *,
    gpus: Sequence[str] = (),
    cls: type[End] = End,
    restarts: int = 0,
    until: float | None = None,
    **env: str,
) -> Iterator[list[Any]]:
    """So many living actors, started with ``runtime_env()``; their processes end with the block.

    They start a few at a time, as they compete for the cores. ``gpus``: CUDA_VISIBLE_DEVICES of each actor in turn.
    ``cls``: their class. ``restarts``: see Ray's ``max_restarts``. ``until``: when they have started
    (``time.monotonic``), else TimeoutError.
    """
    ends: list[Any] = []
    starting: list[Any] = []
    until = time.monotonic() + TIMEOUT_S if until is None else until
    try:
        for rank in range(count):
            visible = {"CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)]} if gpus else {}
            options = {"num_cpus": 0, "num_gpus": 0.05 if gpus else 0, "max_restarts": restarts}
            variables = {"env_vars": {**environment, **env, **visible}}
            ends.append(ray.remote(cls).options(**options, runtime_env=variables).remote())
            starting.append(ends[-1].run.remote(lambda end: None))
            if (ready := len(starting) - 2 * (os.cpu_count() or 1)) > 0:
                ray.wait(starting, num_returns=ready, timeout=max(0.0, until - time.monotonic()))
        ray.get(starting, timeout=max(0.0, until - time.monotonic()))
        yield ends
    finally:
        pids = [ray_internals.actor_state(ray_internals.actor_id_of(end)).pid for end in ends]
        for end in ends:
            ray.kill(end)
        limit = time.monotonic() + TIMEOUT_S
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < limit:
            time.sleep(POLL_S)  # their memory is free when they have exited


@contextmanager
def group_of(
    *names: str, gpus: Sequence[str] = (), config: rtr.GroupConfig | None = None, cls: type[End] = End, **env: str
) -> Iterator[tuple[rtr.Group, dict[str, Any]]]:
    """A group of ``actors`` with these names."""
    with actors(len(names), gpus=gpus, cls=cls, **env) as ends:
        members = dict(zip(names, ends, strict=True))
        with rtr.init_group(members, name=f"bench-{os.getpid()}", config=config) as group:
            yield group, members


def each(ends: Sequence[Any], function: Callable[..., T], *args: Any) -> list[T]:
    """Run a function in all of these actors at once; returns the results."""
    return list(ray.get([end.run.remote(function, *args) for end in ends], timeout=TIMEOUT_S))


def on(end: Any, function: Callable[..., T], *args: Any) -> T:
    """Run a function in one actor."""
    return each([end], function, *args)[0]
