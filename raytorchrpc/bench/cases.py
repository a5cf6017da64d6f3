"""What is measured: cases, alone or in patterns of use, and the user's options, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from raytorchrpc.bench.results import Unit, published_sizes, show_payload, show_size
from raytorchrpc.bench.rows import (
    DEVICES,
    FEW_CORES,
    FLOOR,
    PATTERN_ROWS,
    QUICK,
    QUICK_FEW,
    ROWS,
    SOCKET_IN_BAND,
    Device,
    Row,
    choose,
    matching,
)
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.text import size_in_bytes

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
        return ", ".join(filter(None, (self.variant, show_payload(self.size))))


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
        return [Case(pattern, f"callee runs {kind}", busy=kind, interval_s=0.01) for kind in kinds]
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


def case_obstacle(row: Row, case: Case, device: Device, gpus: int, memory: int) -> str | None:
    """Why the row has no figure for the case of a pattern, given the usable bytes of host memory; None if it can be
    measured.
    """
    if device == "cuda" and not gpus:
        return "Ray has no GPU"
    pairs = case.members * (case.members - 1) if case.together else 1
    if (device == "cpu" or row.transport == "ray") and (needed := _COPIES * case.size * pairs) > memory:
        return f"needs {show_size(needed)} of memory, {show_size(memory)} is usable"
    if case.unit == "calls/s" and case.size > MOST_AT_RATE:
        return f"calls/s are measured up to {show_size(MOST_AT_RATE)}"
    if row.name == FLOOR and (case.pattern != "paced" or device == "cuda" or case.size > SOCKET_IN_BAND):
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
    if row.transport == "nccl":
        if device == "cpu" or case.pattern != "quiet" or not case.size:
            return "measured only for CUDA tensors in the quiet pattern"
        if gpus < 2:
            return "needs two GPUs, and there is one"
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
    if pattern:
        if hosts:
            raise ConfigurationError("--pattern measures within one host; leave out --hosts")
        payloads = sorted({0 if text in ("0", "nothing") else parse_size(text) for text in split(sizes)})
        payloads = payloads or list(_QUICK_PAYLOADS if quick else _PAYLOADS)
        wanted = ["*" if name == "all" else name for name in split(pattern)]
        names = matching("pattern", wanted, PATTERNS, ", all")
        found = tuple(case for name in names for case in cases(name, payloads, quick))
        chosen = choose(split(rows) or ["*"], PATTERN_ROWS, " with --pattern")
        return Options(chosen, devices, found, budget_s, None, *((3, 0.1) if quick else (5, 0.3)))
    few = (os.cpu_count() or 1) <= FEW_CORES
    chosen = choose(names) if (names := split(rows)) else choose(QUICK_FEW if few else QUICK) if quick else ROWS
    if not any(set(row.devices) & set(devices) for row in chosen):
        raise ConfigurationError(f"none of the rows {', '.join(row.name for row in chosen)} carries {device} tensors")
    given = sorted({parse_size(text) for text in split(sizes)}) or (_QUICK_SIZES if quick else published_sizes())
    if hosts and (len(hosts) != 2 or hosts[0] == hosts[1]):
        raise ConfigurationError("hosts must be two different Ray nodes, each given by id, address or host name")
    ends = (hosts[0], hosts[1]) if hosts else None
    return Options(chosen, devices, tuple(Case(size=size) for size in given), budget_s, ends)


def split(texts: Sequence[str]) -> list[str]:
    """The items of lists with commas."""
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def parse_size(text: str) -> int:
    """Bytes of ``1250``, ``1.25KB``, ``2.5 GB`` (powers of 1000) or ``8MiB`` (of 1024). Raises ConfigurationError."""
    size = size_in_bytes(text)
    if size is None or not 1 <= size <= MAX_SIZE:
        raise ConfigurationError(f"size {text!r} is not a number of bytes up to {show_size(MAX_SIZE)}, such as 1.25MB")
    return size
