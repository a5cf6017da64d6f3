"""What ``--pattern`` measures: rows, patterns and their cases, and the user's options for them. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from raytorchrpc.bench.options import checked_budget, chosen_devices, parse_size, show_size, split
from raytorchrpc.bench.rows import Device
from raytorchrpc.errors import ConfigurationError

Unit = Literal["ms", "calls/s", "% of a core"]
Busy = Literal["Python", "torch", "sleep"]

OURS = "auto"
#: Every row with what it is, in the order of the tables.
ROWS: Mapping[str, str] = {
    OURS: "raytorchrpc, with the lanes it chooses by itself",
    "bare-torchrpc": "torch.distributed.rpc as torch sets it up",
    "ray": "Ray actor calls",
    "ray-graph": "a Ray Compiled Graph, called by the driver",
    "bare-nccl": "NCCL send and receive with an acknowledgement, no call",
}
SIZES, QUICK_SIZES = (0, 1_250, 10_000_000), (0, 1_250)
#: Largest payload (bytes) for patterns that count calls per second: many payloads exist at once.
MOST_AT_RATE = 1_000_000
#: Upper bound of the host memory that a call needs in all its processes, in sizes of the payload.
_COPIES = 8
#: Methods that a threaded Ray actor may run at once, so that members can be called while they call.
RAY_THREADS = 16
#: Default limits of a whole run (seconds); ``--budget`` overrides them.
BUDGET_S, QUICK_BUDGET_S = 900.0, 85.0


@dataclass(frozen=True)
class Case:
    """One line of a table: a pattern in one variant with one payload."""

    pattern: str
    variant: str = ""
    size: int = 0
    """Bytes of the tensor argument; 0: a call without arguments."""
    unit: Unit = "ms"
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
    def beside(self) -> bool:
        """The called method must run while another method of its actor runs."""
        return self.busy is not None or self.pattern == "all-to-all"


class Shape(NamedTuple):
    """The actors of one row for one case."""

    members: int
    callers: int
    """``max_concurrency`` of all but the last."""
    callee: int
    """``max_concurrency`` of the last; 0: an async actor."""


def show_payload(size: int) -> str:
    """``nothing``, or the size."""
    return show_size(size) if size else "nothing"


PATTERNS = ("quiet", "paced", "history", "in-flight", "busy-callee", "all-to-all", "idle", "fan-in")


def _variants(pattern: str, quick: bool) -> list[Case]:
    """The pattern's cases without a payload."""
    if pattern == "paced":
        return [Case(pattern, f"every {ms:g} ms", interval_s=ms / 1e3) for ms in ((2,) if quick else (0.5, 2, 10))]
    if pattern == "history":
        return [Case(pattern, "before slow calls"), Case(pattern, "after slow calls", slow_calls=40)]
    if pattern == "in-flight":
        widths = (
            {"max_concurrency 1": 1} if quick else {"max_concurrency 1": 1, "max_concurrency 4": 4, "async actor": 0}
        )
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
        kinds_of_calls = {f"{n} callers": 0, f"{n} callers, 8 in flight each": 8}
        return [Case(pattern, name, unit="calls/s", members=n + 1, in_flight=k) for name, k in kinds_of_calls.items()]
    return [Case(pattern)]


def cases(pattern: str, sizes: Sequence[int], quick: bool) -> list[Case]:
    """The cases of a pattern, each variant with every payload."""
    variants = _variants(pattern, quick)
    return variants if pattern == "idle" else [replace(case, size=size) for case in variants for size in sizes]


def shape(row: str, case: Case) -> Shape:
    """The actors that the row needs for the case."""
    if row == "ray-graph":
        return Shape(1, 1, case.concurrency)
    if row == "ray" and case.beside:
        callers = RAY_THREADS if case.pattern == "all-to-all" else 1
        return Shape(case.members, callers, RAY_THREADS)
    return Shape(case.members, 1, case.concurrency)


def obstacle(row: str, case: Case, device: Device, gpus: int, memory: int) -> str | None:
    """Why the row has no figure for the case, given the usable bytes of host memory; None if it can be measured."""
    if device == "cuda" and not gpus:
        return "Ray has no GPU"
    pairs = case.members * (case.members - 1) if case.pattern == "all-to-all" else 1
    if (device == "cpu" or row == "ray") and (needed := _COPIES * case.size * pairs) > memory:
        return f"needs {show_size(needed)} of memory, {show_size(memory)} is usable"
    if case.unit == "calls/s" and case.size > MOST_AT_RATE:
        return f"calls/s are measured up to {show_size(MOST_AT_RATE)}"
    if row == "bare-torchrpc" and case.concurrency != 1:
        return "torch.distributed.rpc calls functions, not actors with their concurrency"
    if row == "ray-graph":
        if case.pattern in ("all-to-all", "fan-in", "idle"):
            return "a compiled graph is called by the driver alone"
        if case.concurrency != 1:
            return "a compiled graph runs one call at a time"
        if device == "cuda":
            return "the driver has no GPU"
    if row == "bare-nccl":
        if device == "cpu" or case.pattern != "quiet" or not case.size:
            return "measured only for CUDA tensors in the quiet pattern"
        if gpus < 2:
            return "needs two GPUs, and there is one"
    return None


@dataclass(frozen=True)
class PatternOptions:
    """The options of a run."""

    patterns: tuple[str, ...]
    rows: tuple[str, ...]
    devices: tuple[Device, ...]
    sizes: tuple[int, ...]
    """Bytes, ascending; 0: no payload."""
    quick: bool
    budget_s: float

    @property
    def repeats(self) -> int:
        """How often every case of every row is measured."""
        return 3 if self.quick else 5

    @property
    def window_s(self) -> float:
        """Seconds of one measurement, after a lead-in."""
        return 0.1 if self.quick else 0.3

    def cases(self) -> list[Case]:
        """All cases, in the order of the tables."""
        return [case for pattern in self.patterns for case in cases(pattern, self.sizes, self.quick)]


def make_options(
    patterns: Sequence[str],
    *,
    rows: Sequence[str] = (),
    sizes: Sequence[str] = (),
    device: str = "all",
    quick: bool = False,
    budget_s: float | None = None,
    hosts: Sequence[str] = (),
) -> PatternOptions:
    """Parse the user's options; items of lists may hold commas. Raises ConfigurationError with one line."""
    if hosts:
        raise ConfigurationError("--pattern measures within one host; leave out --hosts")
    devices = chosen_devices(device)
    budget_s = checked_budget(budget_s, QUICK_BUDGET_S if quick else BUDGET_S)
    given = sorted({0 if text in ("0", "nothing") else parse_size(text) for text in split(sizes)})
    return PatternOptions(
        patterns=_chosen("pattern", ["*" if name == "all" else name for name in split(patterns)], PATTERNS),
        rows=_chosen("row", split(rows) or ["*"], tuple(ROWS)),
        devices=devices,
        sizes=tuple(given) or (QUICK_SIZES if quick else SIZES),
        quick=quick,
        budget_s=budget_s,
    )


def _chosen(kind: str, wanted: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The known names that match, in their own order. Raises ConfigurationError for one that matches nothing."""
    for name in wanted:
        if not any(fnmatchcase(one, name) for one in known):
            more = ", all" if kind == "pattern" else " with --pattern"
            raise ConfigurationError(f"no {kind} {name!r}; {kind}s: {', '.join(known)}{more}")
    return tuple(one for one in known if any(fnmatchcase(one, name) for name in wanted))
