"""What a member of a group holds: memory, descriptors, threads, and what the package itself keeps for calls."""

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

from raytorchrpc.calls import gates
from raytorchrpc.calls.current import process_member

_COUNTED_ELSEWHERE = ("_Alarm", "_Counter")
_MAPPED = "raytorchrpc.lanes.cuda_ipc.mappings.Mapped"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Held:
    """One member at one moment. Memory in bytes."""

    anonymous: int
    """Heaps and stacks: all that is neither a file nor shared memory."""
    rss: int
    pss: int
    uss: int
    arena_used: int
    """Of the shm lane's arena, by its own account: out, and not given back."""
    arena_pages: int
    """Of the arena, ever touched: they stay warm until the group ends."""
    fds: int
    threads: int
    python_threads: tuple[str, ...]
    in_flight: int
    """Calls under way from here, methods running or waiting here, exports of CUDA tensors."""
    kept: int
    deadlines: int
    objects: int
    """Living instances of the package's classes, but for deadlines, ``mapped``, and counters (one a peer and lane)."""
    mapped: int
    """Segments of peers' GPU memory that the cuda_ipc lane keeps mapped."""
    by_class: Counter[str] = field(repr=False)
    gpu_allocated: int = 0
    gpu_reserved: int = 0


def held() -> Held:
    """Measure this process. Collects garbage and has the C library give free memory back first."""
    gc.collect()
    _trim()
    memory = _smaps()
    member = process_member()
    by_class = _objects()
    arena = _arena()
    on_gpu = torch.cuda.is_initialized()
    return Held(
        anonymous=memory["Anonymous"],
        rss=memory["Rss"],
        pss=memory["Pss"],
        uss=memory["Private_Clean"] + memory["Private_Dirty"],
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
    """What is under way in this process, in either direction; 0 when it is at rest."""
    member = process_member()
    lanes = {lane.name: lane for lane in member.lanes}
    connections: list[Any] = list(lanes["socket"]._by_fd.values())  # type: ignore[attr-defined]
    ipc: Any = member.tensor_lanes.get("cuda_ipc")
    if ipc is not None:
        ipc.reap()
    return (
        sum(len(connection._pending) for connection in connections)
        + sum(len(gate._admitted) + len(gate._queue) for gate in gates._gates.values())
        + len(member.incoming.callee.tasks)
        + (len(ipc._out) if ipc is not None else 0)
    )


def settle(seconds: float) -> str:
    """Wait until nothing is under way here and peers have given back what they got; returns what is left, if any."""
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
    """Have the C library map large pieces one by one, so that what is freed goes back to the kernel at once.

    Left alone it keeps up to 64 MiB at the end of each of its arenas (8 a core), whoever asks: that would hide a leak.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            libc.mallopt(option, 128 << 10)


def _trim() -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _smaps() -> dict[str, int]:
    with open("/proc/self/smaps_rollup") as file:
        lines = [line.split() for line in file if line.endswith("kB\n")]
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
