"""The resources that a member holds: memory, descriptors, threads, and the package's own state for calls."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks._process import smaps
from raytorchrpc.calls.member import process_member
from raytorchrpc.calls.server import gates

_COUNTED_ELSEWHERE = ("_Deadline", "_Counter", "_Thread", "_Started", "_Boot")
_MAPPED = "raytorchrpc.lanes.cuda_ipc.mappings.Mapped"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Held:
    """The resources of one member at one moment. Memory in bytes."""

    anonymous: int
    """Heaps and stacks: memory that is neither a file nor shared."""
    rss: int
    pss: int
    uss: int
    arena_used: int
    """Bytes of the shm lane's arena that are in use, by its own count."""
    arena_pages: int
    """Bytes of the arena that were ever used; they stay allocated until the group ends."""
    fds: int
    threads: int
    python_threads: tuple[str, ...]
    in_flight: int
    """Outgoing calls in flight, methods that run or wait here, exports of CUDA tensors."""
    kept: int
    deadlines: int
    objects: int
    """Live instances of the package's classes, except deadlines, ``mapped``, and counters (one per peer and lane)."""
    mapped: int
    """Segments of peers' GPU memory that the cuda_ipc lane keeps mapped."""
    by_class: Counter[str] = field(repr=False)
    gpu_allocated: int = 0
    gpu_reserved: int = 0


def held() -> Held:
    """Measure this process, after collecting garbage and returning free memory to the kernel."""
    gc.collect()
    _trim()
    memory, member = smaps(), process_member()
    by_class = _objects()
    arena = _arena()
    on_gpu = torch.cuda.is_initialized()
    return Held(
        anonymous=memory["Anonymous"],
        rss=memory["Rss"],
        pss=memory["Pss"],
        uss=memory["Private"],
        arena_used=_arena_used(),
        arena_pages=os.fstat(arena.address.fd).st_blocks * 512 if arena else 0,
        fds=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        python_threads=tuple(sorted(thread.name for thread in threading.enumerate())),
        in_flight=in_flight(),
        kept=member.replies.kept(),
        deadlines=len(member.deadlines._heap),
        objects=sum(by_class.values()) - by_class[_MAPPED],
        mapped=by_class[_MAPPED],
        by_class=by_class,
        gpu_allocated=torch.cuda.memory_allocated() if on_gpu else 0,
        gpu_reserved=torch.cuda.memory_reserved() if on_gpu else 0,
    )


def in_flight() -> int:
    """Number of calls in flight in this process, in both directions; 0 at rest."""
    member = process_member()
    lanes = {lane.name: lane for lane in member.lanes}
    connections: list[Any] = list(lanes["socket"]._listeners.connections.values())  # type: ignore[attr-defined]
    ipc: Any = member.tensor_lanes.get("cuda_ipc")
    if ipc is not None:
        ipc.reap()
    return (
        sum(len(connection._pending) for connection in connections)
        + sum(len(gate._admitted) + len(gate._queue) for gate in gates._gates.values())
        + len(member.incoming.callee.tasks)
        + (ipc.outstanding if ipc is not None else 0)
    )


def settle(seconds: float) -> str:
    """Wait until no call is in flight here and peers have released their buffers; returns what remains, or ""."""
    deadline = time.monotonic() + seconds
    while True:
        gc.collect()
        left = {"in flight": in_flight(), "kept": process_member().replies.kept(), "arena": _arena_used()}
        if not any(left.values()):
            return ""
        if time.monotonic() > deadline:
            return ", ".join(f"{what}: {count}" for what, count in left.items() if count)
        threading.Event().wait(0.01)


def _arena() -> Any:
    lane: Any = process_member().tensor_lanes.get("shm")
    return lane._arena if lane is not None else None


def _arena_used() -> int:
    lane: Any = process_member().tensor_lanes.get("shm")
    return lane.in_use() if lane is not None else 0


def _objects() -> Counter[str]:
    classes = (type(thing) for thing in gc.get_objects())
    return Counter(f"{cls.__module__}.{cls.__qualname__}" for cls in classes if _ours(cls))


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


def _trim() -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
