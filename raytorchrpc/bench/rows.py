"""What is measured: one ``Row`` per road. Data only; a lane that this version lacks becomes a row that says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from raytorchrpc.errors import ConfigurationError

Device = Literal["cpu", "cuda"]
DEVICES: tuple[Device, ...] = ("cpu", "cuda")
Kind = Literal["lane", "peer", "limit"]

#: What a row may need; see ``site.obstacle`` for when each is met.
Need = Literal[
    "one host", "two hosts", "two GPUs", "RDMA", "GPUDirect", "NCCL", "NCCL RDMA", "NCCL GPUDirect", "pynng", "nixl"
]

KIND_TEXT: Mapping[Kind, str] = {"lane": "raytorchrpc", "peer": "for comparison", "limit": "limit"}


@dataclass(frozen=True)
class Row:
    """One road. Rows with the same ``pair`` share two actors."""

    name: str
    kind: Kind
    road: str
    """The class of ``roads`` that takes a sample, or ``rdt``, which only a driver can ask for."""
    what: str
    devices: tuple[Device, ...] = DEVICES
    needs: tuple[Need, ...] = ()
    cuda_needs: tuple[Need, ...] = ()
    """As ``needs``, for CUDA tensors alone."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the group (``GroupConfig``), for rows that are one."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of both actors."""
    carries: tuple[str, ...] = ()
    """Lanes one of which has to have carried the tensor; a figure of any other lane is not this row's. Empty: any."""
    over: str = ""
    """What the route has to say of how it carries CPU tensors, for lanes that choose that themselves."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """For the road."""
    pair: str = ""
    max_bytes: int | None = None
    host_copies: int = 5
    """Memory that both ends together may need, in sizes of the tensor: a bound, not a measurement."""
    gpu_copies: int = 4
    """Likewise, of one GPU's memory."""
    in_store: bool = False
    """Passes through Ray's object store, which must hold two of them."""
    own_turn: bool = False
    """Keeps a core busy while it waits, so it is woken for one turn per size."""
    one_gpu: bool = False
    """Works only between two actors on the same GPU, so both are put on one."""
    published: tuple[str, str] | None = None
    """(scope, transport) of the published figures."""

    @property
    def actors(self) -> str:
        """Which pair of actors takes the samples."""
        return self.pair or self.name


_NO_P2P = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
_TCP_CHANNELS = ("mpt_uv", "basic", "cuda_basic")
#: In-band limit of the socket lane (bytes); from here on tensors travel beside the message.
SOCKET_IN_BAND = 256 * 1024


def _lane(name: str, what: str, *lanes: str, **more: Any) -> Row:
    config = {**({"lanes": lanes} if lanes else {}), **more.pop("config", {})}
    return Row(name=name, kind="lane", road="group", what=what, config=config, **more)


def _peer(name: str, road: str, what: str, **more: Any) -> Row:
    return Row(name=name, kind="peer", road=road, what=what, **more)


#: Every row, in the order of the tables.
ROWS: tuple[Row, ...] = (
    _lane("auto", "what raytorchrpc chooses by itself"),
    _lane(
        "socket",
        "in the message of a call",
        "socket",
        "torchrpc",
        devices=("cpu",),
        carries=("socket",),
        max_bytes=SOCKET_IN_BAND,
    ),
    _lane(
        "shm",
        "shared memory",
        "socket",
        "shm",
        devices=("cpu",),
        needs=("one host",),
        carries=("shm",),
        published=("intranode", "shm"),
    ),
    _lane(
        "cuda-shared-tensor",
        "CUDA IPC: mapped GPU memory",
        "socket",
        "cuda_ipc",
        "torchrpc",
        devices=("cuda",),
        needs=("one host",),
        carries=("cuda_ipc",),
        published=("intranode", "cuda-shared-tensor"),
    ),
    _lane("torchrpc", "torchrpc, transports and channels as routing chooses", "torchrpc", carries=("torchrpc",)),
    _lane(
        "torchrpc-TCP",
        "torchrpc forced to TCP",
        "torchrpc",
        config={"transports": ("uv",), "channels": _TCP_CHANNELS},
        over="uv",
        carries=("torchrpc",),
        published=("internode", "torchrpc-TCP"),
    ),
    _lane(
        "torchrpc-IB",
        "torchrpc forced to RDMA, GPU tensors staged through the CPU",
        "torchrpc",
        config={"transports": ("ibv", "uv"), "channels": ("basic", "cuda_basic")},
        needs=("two hosts", "RDMA"),
        carries=("torchrpc",),
        published=("internode", "torchrpc-IB"),
    ),
    _lane(
        "torchrpc-GDR",
        "torchrpc forced to GPUDirect RDMA",
        "torchrpc",
        config={"transports": ("ibv", "uv"), "channels": ("basic", "cuda_gdr", "cuda_basic")},
        devices=("cuda",),
        needs=("two hosts", "RDMA", "GPUDirect"),
        carries=("torchrpc",),
        published=("internode", "torchrpc-GDR"),
    ),
    _lane(
        "nccl-nvlink",
        "NCCL from GPU to GPU of one host",
        "socket",
        "nccl",
        "torchrpc",
        devices=("cuda",),
        needs=("one host", "two GPUs", "NCCL"),
        carries=("nccl",),
        published=("intranode", "nccl-nvlink"),
    ),
    _lane(
        "nccl-TCP",
        "NCCL forced to TCP",
        "socket",
        "nccl",
        "torchrpc",
        devices=("cuda",),
        env={**_NO_P2P, "NCCL_IB_DISABLE": "1"},
        needs=("two GPUs", "NCCL"),
        carries=("nccl",),
        published=("internode", "nccl-TCP"),
    ),
    _lane(
        "nccl-IB",
        "NCCL forced to RDMA through CPU memory",
        "socket",
        "nccl",
        "torchrpc",
        devices=("cuda",),
        env={**_NO_P2P, "NCCL_NET": "IB", "NCCL_NET_GDR_LEVEL": "LOC"},
        needs=("two GPUs", "NCCL", "NCCL RDMA"),
        carries=("nccl",),
        published=("internode", "nccl-IB"),
    ),
    _lane(
        "nccl-GDR",
        "NCCL forced to GPUDirect RDMA",
        "socket",
        "nccl",
        "torchrpc",
        devices=("cuda",),
        env={**_NO_P2P, "NCCL_NET": "IB", "NCCL_NET_GDR_LEVEL": "SYS"},
        needs=("two GPUs", "NCCL", "NCCL GPUDirect"),
        carries=("nccl",),
        published=("internode", "nccl-GDR"),
    ),
    _lane(
        "nng-TCP",
        "nng (pynng) over TCP",
        "nng",
        config={"always_tcp": True},
        over="tcp",
        devices=("cpu",),
        needs=("pynng",),
        carries=("nng",),
        host_copies=8,
        published=("internode", "nng-TCP"),
    ),
    _lane(
        "nng-ipc",
        "nng (pynng) within one host",
        "nng",
        over="ipc",
        devices=("cpu",),
        needs=("one host", "pynng"),
        carries=("nng",),
        host_copies=8,
    ),
    _lane(
        "nixl", "NIXL: one-sided reads through UCX", "socket", "nixl", "torchrpc", needs=("nixl",), carries=("nixl",)
    ),
    _peer("ray", "ray", "Ray's object store", pair="plain", host_copies=8, in_store=True),
    _peer(
        "ray-zero-copy",
        "ray",
        "Ray's object store with zero-copy tensors",
        env={"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"},
        host_copies=6,
        in_store=True,
    ),
    _peer("ray-rdt-gloo", "rdt", "Ray Direct Transport over Gloo", devices=("cpu",), options={"transport": "gloo"}),
    _peer(
        "ray-rdt-nccl",
        "rdt",
        "Ray Direct Transport over NCCL",
        devices=("cuda",),
        needs=("two GPUs", "NCCL"),
        options={"transport": "nccl"},
    ),
    _peer("ray-rdt-torchrpc", "rdt", "Ray Direct Transport over raytorchrpc", options={"transport": "TORCHRPC"}),
    _peer("ray-rdt-nixl", "rdt", "Ray Direct Transport over NIXL", needs=("nixl",), options={"transport": "nixl"}),
    _peer(
        "ray-rdt-cuda-ipc",
        "rdt",
        "Ray Direct Transport over CUDA IPC: both actors on one GPU, the only way it works",
        devices=("cuda",),
        needs=("one host",),
        options={"transport": "cuda_ipc"},
        one_gpu=True,
    ),
    _peer(
        "bare-torchrpc",
        "torchrpc",
        "torch.distributed.rpc as torch sets it up",
        own_turn=True,
    ),
    _peer(
        "bare-nccl",
        "nccl",
        "NCCL send and receive, no call",
        devices=("cuda",),
        needs=("two GPUs", "NCCL"),
    ),
    _peer(
        "bare-nng",
        "nng",
        "nng (pynng) over TCP, no call",
        devices=("cpu",),
        needs=("pynng",),
        host_copies=8,
        published=("internode", "nng-TCP"),
    ),
    Row("bare-socket", "limit", "socket", "a TCP socket", devices=("cpu",), pair="plain"),
    Row(
        "bare-socket-x4",
        "limit",
        "socket",
        "four TCP sockets in parallel",
        devices=("cpu",),
        pair="plain",
        options={"streams": 4},
    ),
    Row("memcpy", "limit", "memcpy", "a copy into warm memory, in one process", devices=("cpu",), pair="plain"),
    Row(
        "gpu-copy",
        "limit",
        "gpu_copy",
        "a copy between the GPUs, in one process",
        devices=("cuda",),
        needs=("one host",),
        options={"alone": True},
    ),
)

#: What ``--quick`` measures: one pair of each sort, few enough actors for two cores.
QUICK: tuple[str, ...] = (
    *("auto", "torchrpc-TCP", "nccl-nvlink", "nng-TCP"),
    *("ray", "ray-zero-copy", "bare-nccl", "bare-socket", "memcpy", "gpu-copy"),
)


def choose(wanted: Sequence[str], rows: Sequence[Row] = ROWS) -> tuple[Row, ...]:
    """The rows of these names or patterns (``nccl-*``), in the tables' order. Raises ConfigurationError."""
    chosen: set[str] = set()
    for pattern in wanted:
        found = {row.name for row in rows if fnmatchcase(row.name, pattern)}
        if not found:
            raise ConfigurationError(f"no row {pattern!r}; rows: {', '.join(row.name for row in rows)}")
        chosen |= found
    return tuple(row for row in rows if row.name in chosen)
