"""The resources that a process holds: memory, descriptors, threads, and the package's own state for calls."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from raytorchrpc.calls.member import process_member
from raytorchrpc.calls.server import exposed

_COUNTED_ELSEWHERE = ("_Deadline", "PairStats", "_Thread", "_Started", "_Boot", "_Listener")
_MAPPED = "raytorchrpc.lanes.cuda_ipc.mappings.Mapped"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def smaps() -> dict[str, int]:
    """Bytes by field of ``smaps_rollup``, and ``Private``, the sum of the private fields."""
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.endswith("kB")]
    fields = {name.rstrip(":"): int(size) * 1024 for name, size, _ in lines}
    return fields | {"Private": sum(size for name, size in fields.items() if name.startswith("Private_"))}


def footprint() -> dict[str, int]:
    """Private bytes and PSS (with a share of shared memory), and the number of descriptors, sockets and threads."""
    memory, targets = smaps(), []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return {
        "private": memory["Private"],
        "pss": memory["Pss"],
        "descriptors": len(targets),
        "sockets": sum(target.startswith("socket:") for target in targets),
        "threads": len(os.listdir("/proc/self/task")),
    }


def held() -> dict[str, int]:
    """What this process holds, after collecting garbage and returning free memory to the kernel. Memory in bytes."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    member, ours = process_member(), objects()
    return {
        "anonymous": smaps()["Anonymous"],  # heaps and stacks: memory that is neither a file nor shared
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "arena": _arena_used(),
        "in flight": in_flight(),
        "deadlines": len(member.deadlines._clock._heap),
        "objects": sum(ours.values()) - ours[_MAPPED],
        "mapped": ours[_MAPPED],
        "gpu": torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0,
    }


def objects() -> Counter[str]:
    """Live instances by class of the package, except deadlines, threads, and counters (one per peer and lane)."""
    return Counter(f"{cls.__module__}.{cls.__qualname__}" for cls in map(type, gc.get_objects()) if _ours(cls))


def in_flight() -> int:
    """Outgoing calls in flight, methods that run or wait here, exports of CUDA tensors; 0 at rest."""
    member = process_member()
    lanes = {lane.name: lane for lane in member.lanes}
    connections: list[Any] = list(lanes["socket"].selector.connections.values())  # type: ignore[attr-defined]
    ipc: Any = member.tensor_lanes.get("cuda_ipc")
    if ipc is not None:
        ipc.reap()
    return (
        sum(len(connection._pending) for connection in connections)
        + sum(len(gate._admitted) + len(gate._queue) for gate in exposed._gates.values())
        + len(member.incoming.callee.tasks)
        + (ipc.outstanding if ipc is not None else 0)
    )


def settle(seconds: float) -> str:
    """Wait until no call is in flight here and peers have released their buffers; returns what remains, or ""."""
    deadline = time.monotonic() + seconds
    while True:
        gc.collect()
        rest = {"in flight": in_flight(), "arena": _arena_used()}
        if not any(rest.values()):
            return ""
        if time.monotonic() > deadline:
            return ", ".join(f"{name}: {count}" for name, count in rest.items() if count)
        threading.Event().wait(0.01)


def _arena_used() -> int:
    """By the shm lane's own count."""
    lane: Any = process_member().tensor_lanes.get("shm")
    return lane.in_use() if lane is not None else 0


def _ours(cls: type) -> bool:
    module = cls.__dict__.get("__module__", "")
    return isinstance(module, str) and module.startswith("raytorchrpc.") and cls.__qualname__ not in _COUNTED_ELSEWHERE


def measurable_memory() -> None:
    """Make the C library map large blocks one by one, so that freed memory returns to the kernel at once.

    By default it keeps up to 64 MiB in each of its arenas (8 per core), which would hide a leak.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            libc.mallopt(option, 128 << 10)
