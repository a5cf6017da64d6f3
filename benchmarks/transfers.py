"""Benchmarks by the engine of ``raytorchrpc bench``: huge pages, ObjectRefs, metrics and traces."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ray

from benchmarks._harness import Pick, Unavailable, engine, gpu_count
from raytorchrpc._compat import requirements
from raytorchrpc.bench import site
from raytorchrpc.bench.cases import Figure
from raytorchrpc.bench.contestants import Contestant, rdt
from raytorchrpc.bench.patterns import Pattern


def _ours(name: str, **more: Any) -> Contestant:
    return Contestant(name, "group", name, **more)


def huge_pages(pick: Pick) -> list[Figure]:
    """Effect of ``runtime_env()`` on large CPU tensors: the same calls between actors started with and without it.

    The receiver allocates new memory for every tensor and frees it.
    """
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    print(f"  {enabled}: {enabled.read_text().strip() if enabled.exists() else 'missing'}")
    torchrpc: dict[str, Any] = {"lanes": ("socket", "torchrpc")}
    # The second is torchrpc's route between hosts, here over loopback.
    tcp = {**torchrpc, "transports": ("uv",), "channels": ("mpt_uv", "basic")}
    routes = {"torchrpc": torchrpc, "torchrpc's TCP": tcp, "shm": {}}
    # By the ends that have the environment, those that start without it.
    without = {"both": (), "receiver only": (0,), "sender only": (1,), "neither": (0, 1)}
    sizes = pick((10_000_000, 40_000_000, 640_000_000), (10_000_000, 40_000_000), (1_000_000,))
    figures = []
    for name in pick([*routes], [*routes], ["shm"]):
        ends = [
            _ours(have, config=routes[name], bare_ends=without[have]) for have in pick([*without], [*without], ["both"])
        ]
        figures += engine(
            ends, [Pattern(f"runtime_env(), {name}")], sizes, rounds=pick(10, 3, 1), window_s=pick(0.3, 0.1, 0)
        )
    return figures


def objectrefs(pick: Pick) -> list[Figure]:
    """``ray.get(b.take.remote(a.produce.remote()))`` over every tensor transport of Ray, and its object store.

    ``produce`` returns existing tensors, so that neither allocation nor filling is timed.
    """
    if missed := requirements.obstacle("objectrefs", ray.__version__):
        raise Unavailable(missed)
    ours, store = (
        rdt("raytorchrpc", "TORCHRPC", "TORCHRPC"),
        rdt("object store", "Ray's object store", None, in_store=True),
    )
    gloo, nccl = rdt("RDT gloo", "Gloo", "gloo"), rdt("RDT nccl", "NCCL", "nccl")
    nixl = rdt("RDT nixl", "NIXL", "nixl", site.nixl)
    zero = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
    zero_copy = rdt("object store, zero-copy", "Ray's object store, zero-copy", None, in_store=True, env=zero)
    patterns = [Pattern("ObjectRefs")]
    effort: dict[str, Any] = {"rounds": pick(5, 3, 1), "window_s": pick(0.5, 0.2, 0.01)}
    sizes = pick((20_000, 1_250_000, 40_000_000), (20_000, 40_000_000), (20_000,))
    figures = engine(
        [ours, store, *pick([zero_copy, gloo, nixl], [zero_copy, gloo, nixl], [])], patterns, sizes, **effort
    )
    sizes = pick((1_250, 1_250_000, 10_000_000, 640_000_000), (1_250, 10_000_000), (1_250,))
    if (gpus := gpu_count()) > 1:
        figures += engine([ours, nccl, nixl, store], patterns, sizes, "cuda", **effort)
    elif gpus:
        one = [
            rdt("raytorchrpc", "TORCHRPC", "TORCHRPC", one_gpu=True),
            rdt("RDT cuda_ipc", "IPC", "cuda_ipc", one_gpu=True),
        ]
        figures += engine(one, patterns, sizes, "cuda", **effort)
    return figures


def observability(pick: Pick) -> list[Figure]:
    """What metrics and tracing cost an empty call, beside the same call with all off."""
    with tempfile.TemporaryDirectory() as folder:

        def traced(group: Any) -> AbstractContextManager[Any]:
            return group.trace(Path(folder, "trace.json"))

        ends = [_ours("all off"), _ours("metrics_period_s=1", config={"metrics_period_s": 1.0})]
        ends.append(_ours("traced", around=traced))
        return engine(ends, [Pattern("an empty call")], [0], rounds=pick(60, 15, 1), window_s=pick(0.1, 0.1, 0.01))
