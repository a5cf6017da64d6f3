"""The contestants: ways to bring a tensor to another actor, each forced, and what they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from raytorchrpc.bench.cases import Device
from raytorchrpc.errors import ConfigurationError

#: What a contestant may need; ``site.obstacle`` defines when each is met.
# fmt: off
Need = Literal["one host", "two hosts", "two GPUs", "RDMA", "GPUDirect", "NCCL", "NCCL RDMA", "NCCL GPUDirect", "pynng",
               "nixl", "ObjectRefs", "Monarch"]
# fmt: on


@dataclass(frozen=True, eq=False)
class Contestant:
    """One link in one variant."""

    name: str
    link: str
    """A key of ``links.LINKS``."""
    meaning: str
    devices: tuple[Device, ...] = ("cpu", "cuda")
    needs: tuple[Need, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    """The group's settings (``GroupConfig``), for those that form a group."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Additional environment of all actors."""
    bare_ends: Sequence[int] = ()
    """The ranks whose actors start without the environment of ``runtime_env()``."""
    around: Callable[[Any], AbstractContextManager[Any]] | None = None
    """Makes of the group a context for each turn; with ``own_turn``."""
    carries: tuple[str, ...] = ()
    """The lanes that may carry the tensor; a sample over any other lane does not count. Empty: any lane."""
    over: str = ""
    """What the route must say about carrying CPU tensors, for lanes that choose that themselves."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the link."""
    max_bytes: int | None = None
    copies: int = 5
    """Upper bound of the memory that both ends need, in sizes of the tensor."""
    in_store: bool = False
    """Uses Ray's object store, which must hold two of the tensors."""
    own_turn: bool = False
    """Keeps a core busy while it waits, so it is active only during its turns."""
    one_gpu: bool = False
    """Works only between two actors on the same GPU, so both are placed on one."""
    published: tuple[str, str] | None = None
    """(scope, transport) of the published figures."""


_CPU: dict[str, Any] = {"devices": ("cpu",)}
_CUDA: dict[str, Any] = {"devices": ("cuda",)}
_WITHIN, _BETWEEN = "intranode", "internode"
_NO_P2P = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
#: In-band limit of the socket lane (bytes); larger tensors travel out of band.
SOCKET_IN_BAND = 256 * 1024


def _lane(name: str, meaning: str, *lanes: str, published: str = "", **more: Any) -> Contestant:
    """One lane forced, by default the first of ``lanes``; ``published``: scope of the published figures."""
    config = {**({"lanes": lanes} if lanes else {}), **more.pop("config", {})}
    more.setdefault("carries", lanes[:1])
    return Contestant(name, "group", meaning, config=config, published=(published, name) if published else None, **more)


def _torchrpc(name: str, meaning: str, transports: Sequence[str], channels: Sequence[str], **more: Any) -> Contestant:
    config = {"transports": tuple(transports), "channels": tuple(channels)}
    return _lane(name, meaning, "torchrpc", config=config, published=_BETWEEN, **more)


def _nccl(name: str, meaning: str, *needs: str, **more: Any) -> Contestant:
    lanes = ("socket", "nccl", "torchrpc")
    return _lane(name, meaning, *lanes, needs=("two GPUs", "NCCL", *needs), carries=("nccl",), **_CUDA, **more)


def rdt(name: str, meaning: str, transport: str | None, **more: Any) -> Contestant:
    """An actor's result as another's argument, by Ray Direct Transport, or through the object store."""
    needs = ("ObjectRefs", *more.pop("needs", ()))
    return Contestant(name, "rdt", meaning, options={"tensor_transport": transport}, needs=needs, **more)


# fmt: off
#: Every contestant for sizes, in the order of the tables.
LINKS: tuple[Contestant, ...] = (
    _lane("raytorchrpc", "what raytorchrpc chooses by itself"),
    _lane("socket", "in the message of a call", "socket", "torchrpc", max_bytes=SOCKET_IN_BAND, **_CPU),
    _lane("shm", "shared memory", "socket", "shm", needs=("one host",), carries=("shm",), published=_WITHIN, **_CPU),
    _lane("cuda-shared-tensor", "CUDA IPC: mapped GPU memory", "socket", "cuda_ipc", "torchrpc",
          needs=("one host",), carries=("cuda_ipc",), published=_WITHIN, **_CUDA),
    _lane("torchrpc", "torchrpc, transports and channels as routing chooses", "torchrpc"),
    _torchrpc("torchrpc-TCP", "torchrpc forced to TCP", ("uv",), ("mpt_uv", "basic", "cuda_basic"), over="uv"),
    _torchrpc("torchrpc-IB", "torchrpc forced to RDMA, GPU tensors staged through the CPU",
              ("ibv", "uv"), ("basic", "cuda_basic"), needs=("two hosts", "RDMA")),
    _torchrpc("torchrpc-GDR", "torchrpc forced to GPUDirect RDMA",
              ("ibv", "uv"), ("basic", "cuda_gdr", "cuda_basic"), needs=("two hosts", "RDMA", "GPUDirect"), **_CUDA),
    _nccl("nccl-nvlink", "NCCL from GPU to GPU of one host", "one host", published=_WITHIN),
    _nccl("nccl-TCP", "NCCL forced to TCP", env={**_NO_P2P, "NCCL_IB_DISABLE": "1"}, published=_BETWEEN),
    _nccl("nccl-IB", "NCCL forced to RDMA through CPU memory", "NCCL RDMA",
          env={**_NO_P2P, "NCCL_NET": "IB", "NCCL_NET_GDR_LEVEL": "LOC"}, published=_BETWEEN),
    _nccl("nccl-GDR", "NCCL forced to GPUDirect RDMA", "NCCL GPUDirect",
          env={**_NO_P2P, "NCCL_NET": "IB", "NCCL_NET_GDR_LEVEL": "SYS"}, published=_BETWEEN),
    _lane("nng-TCP", "nng (pynng) over TCP", "nng",
          config={"always_tcp": True}, over="tcp", needs=("pynng",), published=_BETWEEN, copies=8, **_CPU),
    _lane("nng-ipc", "nng (pynng) within one host", "nng", over="ipc", needs=("one host", "pynng"), copies=8, **_CPU),
    _lane("nixl", "NIXL: one-sided reads through UCX", "socket", "nixl", "torchrpc",
          needs=("nixl",), carries=("nixl",)),
    Contestant("ray", "ray", "Ray's object store", copies=8, in_store=True),
    Contestant("ray-zero-copy", "ray", "Ray's object store with zero-copy tensors",
               env={"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}, copies=6, in_store=True),
    rdt("ray-rdt-gloo", "Ray Direct Transport over Gloo", "gloo", **_CPU),
    rdt("ray-rdt-nccl", "Ray Direct Transport over NCCL", "nccl", needs=("two GPUs", "NCCL"), **_CUDA),
    rdt("ray-rdt-torchrpc", "Ray Direct Transport over raytorchrpc", "TORCHRPC"),
    rdt("ray-rdt-nixl", "Ray Direct Transport over NIXL", "nixl", needs=("nixl",)),
    rdt("ray-rdt-cuda-ipc", "Ray Direct Transport over CUDA IPC: both actors on one GPU, the only way it works",
        "cuda_ipc", needs=("one host",), one_gpu=True, **_CUDA),
    Contestant("bare-torchrpc", "torchrpc", "torch.distributed.rpc as torch sets it up", own_turn=True),
    Contestant("bare-nccl", "nccl", "NCCL send and receive, no call", needs=("two GPUs", "NCCL"), **_CUDA),
    Contestant("bare-socket", "socket", "a TCP socket", **_CPU),
    Contestant("memcpy", "copy", "a copy into warm memory, in one process", options={"alone": True}, **_CPU),
    Contestant("gpu-copy", "copy", "a copy between the GPUs, in one process",
               needs=("one host",), options={"alone": True}, **_CUDA),
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
    Contestant("monarch", "monarch", "actor calls of Monarch 0.7", needs=("Monarch",), options={"alone": True}, **_CPU),
)

#: What ``--quick`` measures: one of each sort, with few enough actors for two cores without GPUs.
QUICK = ("raytorchrpc", "nccl-nvlink", "ray", "bare-nccl", "bare-socket", "memcpy", "gpu-copy")


def choose(wanted: Sequence[str], known: Sequence[Contestant] = LINKS, more: str = "") -> tuple[Contestant, ...]:
    """Those with these names or patterns (``nccl-*``), in the order of the tables. Raises ConfigurationError."""
    names = matching("row", wanted, [one.name for one in known], more)
    return tuple(one for one in known if one.name in names)


def matching(kind: str, wanted: Sequence[str], known: Sequence[str], more: str = "") -> list[str]:
    """The known names that match, in their own order. Raises ConfigurationError for one that matches nothing."""
    for name in wanted:
        if not any(fnmatchcase(one, name) for one in known):
            raise ConfigurationError(f"no {kind} {name!r}; {kind}s: {', '.join(known)}{more}")
    return [one for one in known if any(fnmatchcase(one, name) for name in wanted)]
