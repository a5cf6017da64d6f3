"""The contestants: ways to bring a tensor to another actor, each forced, and what they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from raytorchrpc.bench import site
from raytorchrpc.bench.cases import Device, show_size
from raytorchrpc.bench.patterns import Turn
from raytorchrpc.bench.site import Site
from raytorchrpc.errors import ConfigurationError

#: Upper bound of the memory that both ends need, in sizes of the tensor, and the share of free memory that may be used.
COPIES, USABLE = 8, 0.8

#: Largest payload (bytes) for patterns that count calls per second: many payloads exist at once.
MOST_AT_RATE = 1_000_000

Need = Callable[[Site], str | None]
"""Returns why the site does not have what is needed; None if it has."""


@dataclass(frozen=True, eq=False)
class Contestant:
    """One link in one variant."""

    name: str
    link: str
    """A key of ``actors.KINDS``."""
    meaning: str
    devices: tuple[Device, ...] = ("cpu", "cuda")
    needs: Sequence[Need] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    """The group's settings (``GroupConfig``), for those that form a group."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Additional environment of all actors."""
    bare_ends: Sequence[int] = ()
    """The ranks whose actors start without the environment of ``runtime_env()``."""
    around: Callable[[Any], AbstractContextManager[Any]] | None = None
    """Makes of the group a context for each turn."""
    carries: tuple[str, ...] = ()
    """The lanes that may carry the tensor; a sample over any other lane does not count. Empty: any lane."""
    transport: str | None = None
    """Of Ray Direct Transport."""
    in_store: bool = False
    """Uses Ray's object store, which must hold two of the tensors."""
    alone: bool = False
    """Has one actor, with two GPUs if there are two."""
    one_gpu: bool = False
    """Works only between two actors on the same GPU, so both are placed on one."""
    published: tuple[str, str] | None = None
    """(scope, transport) of the published figures."""

    def obstacle(self, turn: Turn, where: Site) -> str | None:
        """Why it cannot take that turn there; None if no reason is known."""
        pattern, device, size, _ = turn
        if device == "cuda" and not where.has_gpus:
            return "Ray has no GPU" if where.same_host else "Ray has no GPU on one of the nodes"
        if reason := next(filter(None, (need(where) for need in self.needs)), None):
            return reason
        if pattern.unit == "calls/s" and size > MOST_AT_RATE:
            return f"calls/s are measured up to {show_size(MOST_AT_RATE)}"
        is_plain = pattern.members == 2 and not (pattern.in_flight or pattern.busy)
        if self.link == "nccl" and not (device == "cuda" and size and is_plain and not pattern.interval_s):
            return "measured only for CUDA tensors in a tight loop"
        if self.link == "socket" and not is_plain:
            return "a socket has no calls beside each other"
        if device == "cuda" and not self.in_store:
            return None  # CUDA itself says if a GPU has too little memory
        free = min(where.a.free_bytes, where.b.free_bytes) * USABLE
        if COPIES * size > free:
            return f"may need {show_size(COPIES * size)} of memory, {show_size(free)} is usable"
        if self.in_store and 2 * size > (store := min(where.a.store_bytes, where.b.store_bytes)):
            return f"two of them do not fit into Ray's object store of {show_size(store)}"
        return None


_CPU: dict[str, Any] = {"devices": ("cpu",)}
_CUDA: dict[str, Any] = {"devices": ("cuda",)}
_WITHIN, _BETWEEN = "intranode", "internode"
_NO_P2P = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def _lane(name: str, meaning: str, *lanes: str, published: str = "", **more: Any) -> Contestant:
    """One lane forced, by default the first of ``lanes``; ``published``: scope of the published figures."""
    config = {**({"lanes": lanes} if lanes else {}), **more.pop("config", {})}
    more.setdefault("carries", lanes[:1])
    return Contestant(name, "group", meaning, config=config, published=(published, name) if published else None, **more)


def _torchrpc(name: str, meaning: str, transports: Sequence[str], channels: Sequence[str], **more: Any) -> Contestant:
    config = {"transports": tuple(transports), "channels": tuple(channels)}
    return _lane(name, meaning, "torchrpc", config=config, published=_BETWEEN, **more)


def _nccl(name: str, meaning: str, *needs: Need, **more: Any) -> Contestant:
    lanes = ("socket", "nccl", "torchrpc")
    return _lane(name, meaning, *lanes, needs=(site.two_gpus, *needs), carries=("nccl",), **_CUDA, **more)


def rdt(name: str, meaning: str, transport: str | None, *needs: Need, **more: Any) -> Contestant:
    """An actor's result as another's argument, by Ray Direct Transport, or through the object store."""
    return Contestant(name, "rdt", meaning, transport=transport, needs=(site.object_refs, *needs), **more)


# fmt: off
#: Every contestant for sizes, in the order of the tables.
LINKS: tuple[Contestant, ...] = (
    _lane("raytorchrpc", "what raytorchrpc chooses by itself"),
    _lane("socket", "in the message of a call", "socket", "torchrpc", **_CPU),
    _lane("shm", "shared memory", "socket", "shm", needs=(site.one_host,), carries=("shm",), published=_WITHIN, **_CPU),
    _lane("cuda-shared-tensor", "CUDA IPC: mapped GPU memory", "socket", "cuda_ipc", "torchrpc",
          needs=(site.one_host,), carries=("cuda_ipc",), published=_WITHIN, **_CUDA),
    _lane("torchrpc", "torchrpc, transports and channels as routing chooses", "torchrpc"),
    _torchrpc("torchrpc-TCP", "torchrpc forced to TCP", ("uv",), ("mpt_uv", "basic", "cuda_basic")),
    _torchrpc("torchrpc-IB", "torchrpc forced to RDMA, GPU tensors staged through the CPU",
              ("ibv", "uv"), ("basic", "cuda_basic"), needs=(site.tensorpipe_rdma,)),
    _torchrpc("torchrpc-GDR", "torchrpc forced to GPUDirect RDMA", ("ibv", "uv"), ("basic", "cuda_gdr", "cuda_basic"),
              needs=(site.tensorpipe_rdma, site.tensorpipe_gpudirect), **_CUDA),
    _nccl("nccl-nvlink", "NCCL from GPU to GPU of one host", site.one_host, published=_WITHIN),
    _nccl("nccl-TCP", "NCCL forced to TCP", env={**_NO_P2P, "NCCL_IB_DISABLE": "1"}, published=_BETWEEN),
    _nccl("nccl-IB", "NCCL forced to RDMA through CPU memory", site.nccl_rdma,
          env={**_NO_P2P, "NCCL_NET": "IB", "NCCL_NET_GDR_LEVEL": "LOC"}, published=_BETWEEN),
    _nccl("nccl-GDR", "NCCL forced to GPUDirect RDMA", site.nccl_gpudirect,
          env={**_NO_P2P, "NCCL_NET": "IB", "NCCL_NET_GDR_LEVEL": "SYS"}, published=_BETWEEN),
    _lane("nng-TCP", "nng (pynng) over TCP", "nng", config={"always_tcp": True}, published=_BETWEEN, **_CPU),
    _lane("nng-ipc", "nng (pynng) within one host", "nng", needs=(site.one_host,), **_CPU),
    _lane("nixl", "NIXL: one-sided reads through UCX", "socket", "nixl", "torchrpc",
          needs=(site.nixl,), carries=("nixl",)),
    Contestant("ray", "ray", "Ray's object store", in_store=True),
    Contestant("ray-zero-copy", "ray", "Ray's object store with zero-copy tensors",
               env={"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}, in_store=True),
    rdt("ray-rdt-gloo", "Ray Direct Transport over Gloo", "gloo", **_CPU),
    rdt("ray-rdt-nccl", "Ray Direct Transport over NCCL", "nccl", site.two_gpus, **_CUDA),
    rdt("ray-rdt-torchrpc", "Ray Direct Transport over raytorchrpc", "TORCHRPC"),
    rdt("ray-rdt-nixl", "Ray Direct Transport over NIXL", "nixl", site.nixl),
    rdt("ray-rdt-cuda-ipc", "Ray Direct Transport over CUDA IPC: both actors on one GPU, the only way it works",
        "cuda_ipc", site.one_host, one_gpu=True, **_CUDA),
    Contestant("bare-torchrpc", "torchrpc", "torch.distributed.rpc as torch sets it up"),
    Contestant("bare-nccl", "nccl", "NCCL send and receive, no call", needs=(site.two_gpus,), **_CUDA),
    Contestant("bare-socket", "socket", "a TCP socket", **_CPU),
    Contestant("memcpy", "copy", "a copy into warm memory, in one process", alone=True, **_CPU),
    Contestant("gpu-copy", "copy", "a copy between the GPUs, in one process",
               needs=(site.one_host,), alone=True, **_CUDA),
)
# fmt: on
_BY_NAME = {one.name: one for one in LINKS}

#: The contestants for patterns of use, in the order of the tables.
CALLS: tuple[Contestant, ...] = (
    *(_BY_NAME[name] for name in ("raytorchrpc", "bare-torchrpc")),
    Contestant("ray", "ray", "Ray actor calls"),
    *(_BY_NAME[name] for name in ("bare-nccl", "bare-socket")),
)

#: The contestants of ``--peers``, with those that it may name.
PEERS: tuple[Contestant, ...] = (
    CALLS[0],
    CALLS[2],
    Contestant("monarch", "monarch", "actor calls of Monarch 0.7", alone=True, **_CPU),
)

#: What ``--quick`` measures: one of each sort, with few enough actors for two cores without GPUs.
QUICK = ("raytorchrpc", "nccl-nvlink", "ray", "bare-nccl", "bare-socket", "memcpy", "gpu-copy")


def choose(wanted: Sequence[str], known: Sequence[Contestant] = LINKS) -> tuple[Contestant, ...]:
    """Those with these names or patterns (``nccl-*``), in the order of the tables. Raises ConfigurationError."""
    names = matching("row", wanted, [one.name for one in known])
    return tuple(one for one in known if one.name in names)


def matching(kind: str, wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    """The known names that match, in their own order. Raises ConfigurationError for one that matches nothing."""
    for name in wanted:
        if not any(fnmatchcase(one, name) for one in known):
            raise ConfigurationError(f"no {kind} {name!r}; {kind}s: {', '.join(known)}")
    return [one for one in known if any(fnmatchcase(one, name) for name in wanted)]
