"""The rows of the tables: one ``Row`` per link and variant. Data only; each row states what it needs to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from raytorchrpc.errors import ConfigurationError

Device = Literal["cpu", "cuda"]
DEVICES: tuple[Device, ...] = ("cpu", "cuda")
Kind = Literal["lane", "peer", "limit"]

#: What a row may need; ``site.obstacle`` defines when each is met.
Need = Literal[
    "one host", "two hosts", "two GPUs", "RDMA", "GPUDirect", "NCCL", "NCCL RDMA", "NCCL GPUDirect", "pynng", "nixl"
]

KIND_TEXT: Mapping[Kind, str] = {"lane": "raytorchrpc", "peer": "for comparison", "limit": "limit"}


@dataclass(frozen=True, eq=False)
class Row:
    """One link in one variant. Rows with the same ``pair`` share two actors."""

    name: str
    kind: Kind
    transport: str
    """A key of ``links.LINKS``."""
    what: str
    devices: tuple[Device, ...] = DEVICES
    needs: tuple[Need, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    """The group's settings (``GroupConfig``), for rows that form a group."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Additional environment of all actors."""
    bare_ends: Sequence[int] = ()
    """The ranks whose actors start without the environment of ``runtime_env()``."""
    around: Callable[[Any], AbstractContextManager[Any]] | None = None
    """Makes of the group a context for each of the row's turns; with ``own_turn``."""
    carries: tuple[str, ...] = ()
    """The lanes that may carry the tensor; a sample over any other lane does not count. Empty: any lane."""
    over: str = ""
    """What the route must say about carrying CPU tensors, for lanes that choose that themselves."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the link."""
    pair: str = ""
    max_bytes: int | None = None
    host_copies: int = 5
    """Upper bound of the host memory that both ends need, in sizes of the tensor."""
    gpu_copies: int = 4
    """Upper bound of the memory needed on one GPU, in sizes of the tensor."""
    in_store: bool = False
    """Uses Ray's object store, which must hold two of the tensors."""
    own_turn: bool = False
    """Keeps a core busy while it waits, so it is active only during one turn per size."""
    one_gpu: bool = False
    """Works only between two actors on the same GPU, so both are placed on one."""
    published: tuple[str, str] | None = None
    """(scope, transport) of the published figures."""

    @property
    def actors(self) -> str:
        """The name of the pair of actors that takes the samples."""
        return self.pair or self.name


_CPU: dict[str, Any] = {"devices": ("cpu",)}
_CUDA: dict[str, Any] = {"devices": ("cuda",)}
_NNG: dict[str, Any] = {**_CPU, "host_copies": 8}
_WITHIN, _BETWEEN = "intranode", "internode"
_NO_P2P = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
#: In-band limit of the socket lane (bytes); larger tensors travel out of band.
SOCKET_IN_BAND = 256 * 1024


def _lane(name: str, what: str, *lanes: str, published: str = "", **more: Any) -> Row:
    """A row with one lane forced, by default the first of ``lanes``; ``published``: scope of the published figures."""
    config = {**({"lanes": lanes} if lanes else {}), **more.pop("config", {})}
    more.setdefault("carries", lanes[:1])
    return Row(name, "lane", "group", what, config=config, published=(published, name) if published else None, **more)


def _torchrpc(name: str, what: str, transports: tuple[str, ...], channels: tuple[str, ...], **more: Any) -> Row:
    config = {"transports": transports, "channels": channels}
    return _lane(name, what, "torchrpc", config=config, published=_BETWEEN, **more)


def _nccl(name: str, what: str, *needs: str, **more: Any) -> Row:
    lanes = ("socket", "nccl", "torchrpc")
    return _lane(name, what, *lanes, needs=("two GPUs", "NCCL", *needs), carries=("nccl",), **_CUDA, **more)


def _rdt(name: str, what: str, tensor_transport: str, **more: Any) -> Row:
    what = f"Ray Direct Transport over {what}"
    return _peer(name, "rdt", what, options={"tensor_transport": tensor_transport}, **more)


def _peer(name: str, transport: str, what: str, **more: Any) -> Row:
    return Row(name, "peer", transport, what, **more)


def _limit(name: str, transport: str, what: str, **more: Any) -> Row:
    return Row(name, "limit", transport, what, **more)


#: Every row, in the order of the tables.
# fmt: off
ROWS: tuple[Row, ...] = (
    _lane("auto", "what raytorchrpc chooses by itself"),
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
          config={"always_tcp": True}, over="tcp", needs=("pynng",), published=_BETWEEN, **_NNG),
    _lane("nng-ipc", "nng (pynng) within one host", "nng", over="ipc", needs=("one host", "pynng"), **_NNG),
    _lane("nixl", "NIXL: one-sided reads through UCX", "socket", "nixl", "torchrpc",
          needs=("nixl",), carries=("nixl",)),
    _peer("ray", "ray", "Ray's object store", pair="plain", host_copies=8, in_store=True),
    _peer("ray-zero-copy", "ray", "Ray's object store with zero-copy tensors",
          env={"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}, host_copies=6, in_store=True),
    _rdt("ray-rdt-gloo", "Gloo", "gloo", **_CPU),
    _rdt("ray-rdt-nccl", "NCCL", "nccl", needs=("two GPUs", "NCCL"), **_CUDA),
    _rdt("ray-rdt-torchrpc", "raytorchrpc", "TORCHRPC"),
    _rdt("ray-rdt-nixl", "NIXL", "nixl", needs=("nixl",)),
    _rdt("ray-rdt-cuda-ipc", "CUDA IPC: both actors on one GPU, the only way it works", "cuda_ipc",
         needs=("one host",), one_gpu=True, **_CUDA),
    _peer("bare-torchrpc", "torchrpc", "torch.distributed.rpc as torch sets it up", own_turn=True),
    _peer("bare-nccl", "nccl", "NCCL send and receive, no call", needs=("two GPUs", "NCCL"), **_CUDA),
    _peer("bare-nng", "nng", "nng (pynng) over TCP, no call",
          needs=("pynng",), published=(_BETWEEN, "nng-TCP"), **_NNG),
    _limit("bare-socket", "socket", "a TCP socket", pair="plain", **_CPU),
    _limit("bare-socket-x4", "socket", "four TCP sockets in parallel", pair="plain", options={"streams": 4}, **_CPU),
    _limit("memcpy", "copy", "a copy into warm memory, in one process", pair="plain", **_CPU),
    _limit("gpu-copy", "copy", "a copy between the GPUs, in one process",
           needs=("one host",), options={"alone": True}, **_CUDA),
)
# fmt: on

#: What ``--quick`` measures: one row of each sort, with few enough actors for two cores.
QUICK: tuple[str, ...] = (
    *("auto", "torchrpc-TCP", "nccl-nvlink", "nng-TCP"),
    *("ray", "ray-zero-copy", "bare-nccl", "bare-socket", "memcpy", "gpu-copy"),
)
#: The same where there are at most ``FEW_CORES``: two pairs of actors for CPU tensors.
QUICK_FEW: tuple[str, ...] = ("auto", "ray", "bare-socket", "memcpy", "gpu-copy")
FEW_CORES = 4

OURS, FLOOR = "auto", "floor"
#: The rows of patterns, in the order of their tables.
PATTERN_ROWS: tuple[Row, ...] = (
    _lane(OURS, "raytorchrpc, with the lanes it chooses by itself"),
    _peer("bare-torchrpc", "torchrpc", "torch.distributed.rpc as torch sets it up", own_turn=True),
    _peer("ray", "ray", "Ray actor calls"),
    _peer("ray-graph", "graph", "a Ray Compiled Graph, called by the driver", own_turn=True),
    _peer("bare-nccl", "nccl", "NCCL send and receive with an acknowledgement, no call"),
    _limit(FLOOR, "echo", "a bare echo of as many bytes over a Unix socket, paced alike, no call", **_CPU),
)


def choose(wanted: Sequence[str], rows: Sequence[Row] = ROWS, more: str = "") -> tuple[Row, ...]:
    """The rows with these names or patterns (``nccl-*``), in table order. Raises ConfigurationError."""
    names = matching("row", wanted, [row.name for row in rows], more)
    return tuple(row for row in rows if row.name in names)


def matching(kind: str, wanted: Sequence[str], known: Sequence[str], more: str = "") -> list[str]:
    """The known names that match, in their own order. Raises ConfigurationError for one that matches nothing."""
    for name in wanted:
        if not any(fnmatchcase(one, name) for one in known):
            raise ConfigurationError(f"no {kind} {name!r}; {kind}s: {', '.join(known)}{more}")
    return [one for one in known if any(fnmatchcase(one, name) for name in wanted)]
