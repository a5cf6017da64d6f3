"""What is measured: rows, which are links in a variant; cases, which are sizes or patterns of use; and the user's
options, checked before anything starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from raytorchrpc.bench.results import Device, Unit, label_of, published_sizes, show_size
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.text import size_in_bytes

DEVICES: tuple[Device, ...] = ("cpu", "cuda")

#: What a row may need; ``site.obstacle`` defines when each is met.
Need = Literal[
    "one host",
    "two hosts",
    "two GPUs",
    "RDMA",
    "GPUDirect",
    "NCCL",
    "NCCL RDMA",
    "NCCL GPUDirect",
    "pynng",
    "nixl",
    "ObjectRefs",
]


@dataclass(frozen=True, eq=False)
class Row:
    """One link in one variant. Rows with the same ``pair`` share two actors."""

    name: str
    transport: str
    """A key of ``links.LINKS``."""
    what: str
    kind: Literal["raytorchrpc", "for comparison", "limit"] = "for comparison"
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
    known = (published, name) if published else None
    return Row(name, "group", what, "raytorchrpc", config=config, published=known, **more)


def _torchrpc(name: str, what: str, transports: tuple[str, ...], channels: tuple[str, ...], **more: Any) -> Row:
    config = {"transports": transports, "channels": channels}
    return _lane(name, what, "torchrpc", config=config, published=_BETWEEN, **more)


def _nccl(name: str, what: str, *needs: str, **more: Any) -> Row:
    lanes = ("socket", "nccl", "torchrpc")
    return _lane(name, what, *lanes, needs=("two GPUs", "NCCL", *needs), carries=("nccl",), **_CUDA, **more)


def _rdt(name: str, what: str, tensor_transport: str, **more: Any) -> Row:
    what = f"Ray Direct Transport over {what}"
    needs = ("ObjectRefs", *more.pop("needs", ()))
    return Row(name, "rdt", what, options={"tensor_transport": tensor_transport}, needs=needs, **more)


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
    Row("ray", "ray", "Ray's object store", pair="plain", host_copies=8, in_store=True),
    Row("ray-zero-copy", "ray", "Ray's object store with zero-copy tensors",
        env={"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}, host_copies=6, in_store=True),
    _rdt("ray-rdt-gloo", "Gloo", "gloo", **_CPU),
    _rdt("ray-rdt-nccl", "NCCL", "nccl", needs=("two GPUs", "NCCL"), **_CUDA),
    _rdt("ray-rdt-torchrpc", "raytorchrpc", "TORCHRPC"),
    _rdt("ray-rdt-nixl", "NIXL", "nixl", needs=("nixl",)),
    _rdt("ray-rdt-cuda-ipc", "CUDA IPC: both actors on one GPU, the only way it works", "cuda_ipc",
         needs=("one host",), one_gpu=True, **_CUDA),
    Row("bare-torchrpc", "torchrpc", "torch.distributed.rpc as torch sets it up", own_turn=True),
    Row("bare-nccl", "nccl", "NCCL send and receive, no call", needs=("two GPUs", "NCCL"), **_CUDA),
    Row("bare-nng", "nng", "nng (pynng) over TCP, no call",
        needs=("pynng",), published=(_BETWEEN, "nng-TCP"), **_NNG),
    Row("bare-socket", "socket", "a TCP socket", "limit", pair="plain", **_CPU),
    Row("bare-socket-x4", "socket", "four TCP sockets in parallel", "limit",
        pair="plain", options={"streams": 4}, **_CPU),
    Row("memcpy", "copy", "a copy into warm memory, in one process", "limit", pair="plain", **_CPU),
    Row("gpu-copy", "copy", "a copy between the GPUs, in one process", "limit",
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
    Row("bare-torchrpc", "torchrpc", "torch.distributed.rpc as torch sets it up", own_turn=True),
    Row("ray", "ray", "Ray actor calls"),
    Row("ray-graph", "graph", "a Ray Compiled Graph, called by the driver", own_turn=True),
    Row("bare-nccl", "nccl", "NCCL send and receive with an acknowledgement, no call", needs=("two GPUs", "NCCL")),
    Row(FLOOR, "echo", "a bare echo of as many bytes over a Unix socket, paced alike, no call", "limit", **_CPU),
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


# --- cases -----------------------------------------------------------------------------------------------------------

Busy = Literal["Python", "torch", "sleep"]

PATTERNS = ("quiet", "paced", "history", "in-flight", "busy-callee", "all-to-all", "idle", "fan-in")
MAX_SIZE = 64 * 10**9
#: Default limits of measuring (seconds), usually and with ``--quick``; ``--budget`` overrides them.
BUDGETS_S, PATTERN_BUDGETS_S = (300.0, 40.0), (900.0, 75.0)
MIN_BUDGET_S, MAX_BUDGET_S = 10.0, 86400.0
_QUICK_SIZES = (1_250, 1_250_000, 40_000_000)
_PAYLOADS, _QUICK_PAYLOADS = (0, 1_250, 10_000_000), (0, 1_250)
#: Largest payload (bytes) for patterns that count calls per second: many payloads exist at once.
MOST_AT_RATE = 1_000_000
#: Upper bound of the host memory that a call of a pattern needs in all its processes, in sizes of the payload.
_COPIES = 8
#: Methods that a threaded Ray actor may run at once, so that members can be called while they call.
RAY_THREADS = 16


@dataclass(frozen=True)
class Case:
    """A pattern in one variant with one payload; without a pattern one size, of which samples are counted."""

    pattern: str = ""
    variant: str = ""
    size: int = 0
    """Bytes of the tensor argument; 0: a call without arguments."""
    unit: Unit = "ms"
    tensors: int = 1
    """The argument is a list of so many, if more than one."""
    members: int = 2
    """The last member is the callee, except in all-to-all."""
    concurrency: int = 1
    """``max_concurrency`` of the callee; 0: an async actor."""
    interval_s: float = 0.0
    """Time from the start of one call to the start of the next; 0: none between them."""
    in_flight: int = 0
    """Calls that each caller keeps in flight; 0: it waits for each call."""
    asynchronous: bool = False
    """All calls of a round are sent before the first is awaited."""
    busy: Busy | None = None
    """What another method of the callee does meanwhile."""
    is_caller_busy: bool = False
    """Another thread of the caller does the same."""
    slow_calls: int = 0
    """Calls of 5 ms each before the measured ones."""

    @property
    def together(self) -> bool:
        """Every member calls every other."""
        return self.pattern == "all-to-all"

    @property
    def beside(self) -> bool:
        """The called method must run while another method of its actor runs."""
        return self.busy is not None or self.together

    @property
    def label(self) -> str:
        """The variant and the payload."""
        return label_of(self.variant, self.size)


class Shape(NamedTuple):
    """The actors of one row for one case."""

    members: int = 2
    callers: int = 1
    """``max_concurrency`` of all but the last."""
    callee: int = 1
    """``max_concurrency`` of the last; 0: an async actor."""


def _variants(pattern: str, quick: bool) -> list[Case]:
    """The pattern's cases without a payload."""
    if pattern == "paced":
        return [Case(pattern, f"every {ms:g} ms", interval_s=ms / 1e3) for ms in ((2,) if quick else (0.5, 2, 10))]
    if pattern == "history":
        return [Case(pattern, "before slow calls"), Case(pattern, "after slow calls", slow_calls=40)]
    if pattern == "in-flight":
        widths = {"max_concurrency 1": 1} | ({} if quick else {"max_concurrency 4": 4, "async actor": 0})
        return [Case(pattern, name, unit="calls/s", in_flight=64, concurrency=n) for name, n in widths.items()]
    if pattern == "busy-callee":
        kinds: tuple[Busy, ...] = ("Python",) if quick else ("Python", "torch", "sleep")
        # Paced: in a tight loop, calls that follow each other within a switch interval are fast, and hide the others.
        found = [Case(pattern, f"callee runs {kind}", busy=kind, interval_s=0.01) for kind in kinds]
        return found if quick else [*found, replace(found[0], variant="both run Python", is_caller_busy=True)]
    if pattern == "all-to-all":
        counts = [(n, kind) for n in ((4,) if quick else (4, 8)) for kind in ("sync", "async")]
        return [Case(pattern, f"{n} members, {kind}", members=n, asynchronous=kind == "async") for n, kind in counts]
    if pattern == "idle":
        n = 4 if quick else 8
        return [Case(pattern, f"{n} members", unit="% of a core", members=n)]
    if pattern == "fan-in":
        n = 3 if quick else 8
        widths = {f"{n} callers": 0, f"{n} callers, 8 in flight each": 8}
        return [Case(pattern, name, unit="calls/s", members=n + 1, in_flight=k) for name, k in widths.items()]
    return [Case(pattern)]


def cases(pattern: str, sizes: Sequence[int], quick: bool) -> list[Case]:
    """The cases of a pattern, each variant with every payload."""
    variants = _variants(pattern, quick)
    return variants if pattern == "idle" else [replace(case, size=size) for case in variants for size in sizes]


def shape(row: Row, case: Case) -> Shape:
    """The actors that the row needs for the case."""
    if row.transport == "graph":
        return Shape(1, 1, case.concurrency)
    if row.options.get("alone"):
        return Shape(1)
    if row.transport == "ray" and case.beside:
        return Shape(case.members, RAY_THREADS if case.together else 1, RAY_THREADS)
    return Shape(case.members, 1, case.concurrency)


def case_obstacle(row: Row, case: Case, device: Device, memory: int) -> str | None:
    """Why the row cannot have a figure for the case of a pattern; ``memory``: usable bytes of the host."""
    pairs = case.members * (case.members - 1) if case.together else 1
    if (device == "cpu" or row.transport == "ray") and (needed := _COPIES * case.size * pairs) > memory:
        return f"needs {show_size(needed)} of memory, {show_size(memory)} is usable"
    if case.unit == "calls/s" and case.size > MOST_AT_RATE:
        return f"calls/s are measured up to {show_size(MOST_AT_RATE)}"
    if row.name == FLOOR and (case.pattern != "paced" or case.size > SOCKET_IN_BAND):
        return "measured only in the paced pattern, for what travels in the message of a call"
    if row.transport == "torchrpc" and case.concurrency != 1:
        return "torch.distributed.rpc calls functions, not actors with their concurrency"
    if row.transport == "graph":
        if case.pattern in ("all-to-all", "fan-in", "idle"):
            return "a compiled graph is called by the driver alone"
        if case.concurrency != 1:
            return "a compiled graph runs one call at a time"
        if device == "cuda":
            return "the driver has no GPU"
    if row.transport == "nccl" and (device == "cpu" or case.pattern != "quiet" or not case.size):
        return "measured only for CUDA tensors in the quiet pattern"
    return None


@dataclass(frozen=True)
class Options:
    """The options of a run, before the limits of the machine apply."""

    rows: tuple[Row, ...]
    devices: tuple[Device, ...]
    cases: tuple[Case, ...]
    """In the order of the tables; sizes ascend."""
    budget_s: float
    hosts: tuple[str, str] | None = None
    repeats: int = 5
    """How often every case of a pattern is measured."""
    window_s: float = 0.3
    """Seconds of one measurement of a pattern, after a lead-in."""


def make_options(
    *,
    pattern: Sequence[str] = (),
    rows: Sequence[str] = (),
    sizes: Sequence[str] = (),
    device: str = "all",
    quick: bool = False,
    budget_s: float | None = None,
    hosts: Sequence[str] = (),
) -> Options:
    """Parse the user's options; items of lists may hold commas. Raises ConfigurationError with one line."""
    if device not in (*DEVICES, "all"):
        raise ConfigurationError(f"device {device!r} is not one of {', '.join(DEVICES)}, all")
    devices = tuple(each for each in DEVICES if device in (each, "all"))
    budget_s = (PATTERN_BUDGETS_S if pattern else BUDGETS_S)[quick] if budget_s is None else budget_s
    if not MIN_BUDGET_S <= budget_s <= MAX_BUDGET_S:
        raise ConfigurationError(f"the budget must be {MIN_BUDGET_S:g} to {MAX_BUDGET_S:g} seconds, not {budget_s:g}")
    if pattern and hosts:
        raise ConfigurationError("--pattern measures within one host; leave out --hosts")
    if hosts and (len(hosts) != 2 or hosts[0] == hosts[1]):
        raise ConfigurationError("hosts must be two different Ray nodes, each given by id, address or host name")
    few = (os.cpu_count() or 1) <= FEW_CORES
    usual = ("*",) if pattern or not quick else QUICK_FEW if few else QUICK
    chosen = choose(split(rows) or usual, *((PATTERN_ROWS, " with --pattern") if pattern else ()))
    if not any(set(row.devices) & set(devices) for row in chosen):
        raise ConfigurationError(f"none of the rows {', '.join(row.name for row in chosen)} carries {device} tensors")
    given = sorted({0 if pattern and text in ("0", "nothing") else parse_size(text) for text in split(sizes)})
    if not pattern:
        found = [Case(size=size) for size in given or (_QUICK_SIZES if quick else published_sizes())]
        return Options(chosen, devices, tuple(found), budget_s, (hosts[0], hosts[1]) if hosts else None)
    wanted = ["*" if name == "all" else name for name in split(pattern)]
    payloads = given or (_QUICK_PAYLOADS if quick else _PAYLOADS)
    found = [case for name in matching("pattern", wanted, PATTERNS, ", all") for case in cases(name, payloads, quick)]
    return Options(chosen, devices, tuple(found), budget_s, None, *((3, 0.1) if quick else (5, 0.3)))


def split(texts: Sequence[str]) -> list[str]:
    """The items of lists with commas."""
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def parse_size(text: str) -> int:
    """Bytes of ``1250``, ``1.25KB``, ``2.5 GB`` (powers of 1000) or ``8MiB`` (of 1024). Raises ConfigurationError."""
    size = size_in_bytes(text)
    if size is None or not 1 <= size <= MAX_SIZE:
        raise ConfigurationError(f"size {text!r} is not a number of bytes up to {show_size(MAX_SIZE)}, such as 1.25MB")
    return size
