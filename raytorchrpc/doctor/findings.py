"""The doctor's result type: one ``Finding`` for each fact that it checked. docs/doctor.md lists the ids."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Literal

from pydantic import BaseModel

Level = Literal["ok", "note", "warning", "problem"]
#: From best to worst.
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "problem")

#: By lanes, the ids of the findings that affect only these.
_AFFECTED = {
    "nixl": "nixl nixl-missing",
    "nixl nccl": "rdma memlock",
    "nixl nccl torchrpc": (
        "gpu-bar1-small rdma-none rdma-efa rdma-no-verbs-device rdma-first-unusable rdma-no-routed-gid rdma-gpudirect "
        "rdma-no-gpudirect memlock-small together-rdma-uneven together-no-common-fabric"
    ),
    "nccl": "rdma-link-layers-mixed nccl-values nccl-value-unfit shm-small together-gid-index-differs",
    "torchrpc": (
        "gpu-resource1-missing rdma-port-down rdma-roce rdma-dma-buf-only huge-pages huge-pages-unused "
        "own-name-loopback own-name-unknown interface-variable-wrong"
    ),
    "torchrpc nccl": "address-unknown",
    "torchrpc nixl": "fork-unsafe",
    "cuda_ipc nccl": "gpu-mig gpu-links gpu-no-peer-access",
    "cuda_ipc torchrpc": "gpu-partly-in-container",
    "cuda_ipc torchrpc shm": "together-containers-apart",
    "cuda_ipc nccl nixl torchrpc": (
        "gpu gpu-cuda-fails gpu-torch-without-cuda gpu-not-in-container gpu-driver-missing"
    ),
}
LANES = {name: tuple(lanes.split()) for lanes, names in _AFFECTED.items() for name in names.split()}


class Finding(BaseModel, frozen=True, extra="forbid"):
    """A fact about a process or its machine, with its consequence and remedy."""

    id: str
    """Stable between releases."""
    level: Level
    """ok: as it should be. note: worth knowing, nothing to do. warning: works, but slower or over another lane.
    problem: something the machine has cannot be used, or will fail."""
    seen: str
    meaning: str = ""
    remedy: str = ""
    """Empty where there is nothing to do."""
    lanes: tuple[str, ...] = ()
    """The lanes that are affected; empty means all."""


def finding(
    level: Level, name: str, seen: str, meaning: str = "", remedy: str = "", *, lanes: tuple[str, ...] | None = None
) -> Finding:
    """A ``Finding`` with the id ``name``; ``lanes``: other ones than it usually affects."""
    lanes = LANES.get(name, ()) if lanes is None else lanes
    return Finding(id=name, level=level, seen=seen, meaning=meaning, remedy=remedy, lanes=lanes)


ok, note, warning, problem = (partial(finding, level) for level in LEVELS)


def some(names: Iterable[object], limit: int = 4) -> str:
    """``a, b, c, d and 5 more``."""
    listed = [str(name) for name in names]
    rest = len(listed) - limit
    return ", ".join(listed[:limit]) + (f" and {rest} more" if rest > 0 else "")
