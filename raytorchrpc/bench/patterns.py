"""Patterns of use: what the members of a group do in a turn; and the user's options, checked before anything starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Literal, NamedTuple

from raytorchrpc.bench.cases import Device, Size, show_size
from raytorchrpc.bench.contestants import CALLS, LINKS, PEERS, QUICK, Contestant, choose, matching
from raytorchrpc.bench.results import published
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.text import size_in_bytes

Busy = Literal["Python", "torch", "sleep"]
PATTERNS = ("quiet", "paced", "in-flight", "busy-callee", "all-to-all", "idle", "fan-in")
MAX_SIZE = 64 * 10**9
#: Default limits of measuring (seconds) of sizes and of patterns, usually and with ``--quick``.
BUDGETS_S, PATTERN_BUDGETS_S = (300.0, 40.0), (900.0, 75.0)
MIN_BUDGET_S, MAX_BUDGET_S = 10.0, 86400.0
_QUICK_SIZES = (1_250, 1_250_000, 40_000_000)
_PAYLOADS, _QUICK_PAYLOADS = (0, 1_250, 10_000_000), (0, 1_250)
#: Largest payload (bytes) for patterns that count calls per second: many payloads exist at once.
MOST_AT_RATE = 1_000_000
#: Methods that a threaded Ray actor may run at once, so that members can be called while they call.
RAY_THREADS = 16


@dataclass(frozen=True)
class Pattern:
    """What members do in a turn: by default, one caller calls one callee in a tight loop."""

    name: str = "quiet"
    unit: str = "ms"
    size: int | None = None
    """Bytes of the payload, where one table shows patterns of different sizes."""
    tensors: int = 1
    """The argument is a list of so many, if more than one."""
    members: int = 2
    """The last member is the callee, except in all-to-all."""
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
    is_idle: bool = False
    """Nobody calls; the figure is CPU time."""
    is_together: bool = False
    """Every member calls every other."""

    @property
    def is_beside(self) -> bool:
        """Whether the called method must run while another method of its actor runs."""
        return self.busy is not None or self.is_together


#: The rows of ``--peers``.
_BESIDE_PEERS = (
    Pattern("empty call, ms", size=0),
    Pattern("empty call every 2 ms, ms", size=0, interval_s=0.002),
    Pattern("1.25 KB, ms", size=1_250),
    Pattern("10 MB, ms", size=10_000_000),
    Pattern("40 MB, ms", size=40_000_000),
    Pattern("64 empty calls in flight, calls/s", "calls/s", size=0, in_flight=64),
)


class Shape(NamedTuple):
    """The actors of one contestant for one pattern."""

    members: int = 2
    threads: int = 1
    """``max_concurrency``."""


def variants(name: str, quick: bool) -> list[Pattern]:
    """The pattern in its variants."""
    if name == "paced":
        return [Pattern(f"paced, every {ms:g} ms", interval_s=ms / 1e3) for ms in ((2,) if quick else (0.5, 2, 10))]
    if name == "in-flight":
        return [Pattern("in-flight, 64", "calls/s", in_flight=64)]
    if name == "busy-callee":
        kinds: tuple[Busy, ...] = ("Python",) if quick else ("Python", "torch", "sleep")
        # Paced: in a tight loop, calls that follow each other within a switch interval are fast, and hide the others.
        made = [Pattern(f"busy-callee, callee runs {kind}", busy=kind, interval_s=0.01) for kind in kinds]
        return made if quick else [*made, replace(made[0], name="busy-callee, both run Python", is_caller_busy=True)]
    if name == "all-to-all":
        counts = [(n, kind) for n in ((4,) if quick else (4, 8)) for kind in ("sync", "async")]
        return [Pattern(f"all-to-all, {n} members, {kind}", members=n, asynchronous=kind == "async", is_together=True)
                for n, kind in counts]  # fmt: skip
    if name == "idle":
        return [Pattern(f"idle, {n} members", "% of a core", members=n, is_idle=True) for n in ([4] if quick else [8])]
    if name == "fan-in":
        n = 3 if quick else 8
        widths = {f"{n} callers": 0, f"{n} callers, 8 in flight each": 8}
        return [Pattern(f"fan-in, {text}", "calls/s", members=n + 1, in_flight=k) for text, k in widths.items()]
    return [Pattern(name)]


def shape(contestant: Contestant, pattern: Pattern) -> Shape:
    """The actors that the contestant needs for the pattern."""
    if contestant.options.get("alone"):
        return Shape(1)
    return Shape(pattern.members, RAY_THREADS if contestant.link == "ray" and pattern.is_beside else 1)


def obstacle(contestant: Contestant, pattern: Pattern, device: Device, size: int) -> str | None:
    """Why the contestant has no such calls; None if it does."""
    if pattern.unit == "calls/s" and size > MOST_AT_RATE:
        return f"calls/s are measured up to {show_size(MOST_AT_RATE)}"
    is_plain = pattern.members == 2 and not (pattern.in_flight or pattern.busy)
    if contestant.link == "nccl" and not (device == "cuda" and size and is_plain and not pattern.interval_s):
        return "measured only for CUDA tensors in a tight loop"
    if contestant.link == "socket" and not is_plain:
        return "a socket has no calls beside each other"
    return None


@dataclass(frozen=True)
class Options:
    """The options of a run, before the limits of the machine apply."""

    contestants: tuple[Contestant, ...]
    devices: tuple[Device, ...]
    patterns: tuple[Pattern, ...]
    sizes: tuple[int, ...]
    """Bytes, ascending."""
    budget_s: float
    hosts: tuple[str, str] | None = None
    rounds: int = 5
    window_s: float = 0.3
    """Seconds of one turn, after a lead-in."""

    def cases(self) -> dict[str, dict[Size, tuple[Pattern, int]]]:
        """By the name of a table: for each of its columns, what members do and the bytes of a payload."""
        if self.patterns[0].size is not None:
            return {"calls beside peers": {one.name: (one, one.size or 0) for one in self.patterns}}
        return {
            one.name: {size: (one, size) for size in ((0,) if one.is_idle else self.sizes)} for one in self.patterns
        }


def make_options(
    *,
    pattern: Sequence[str] = (),
    rows: Sequence[str] = (),
    sizes: Sequence[str] = (),
    device: str = "all",
    quick: bool = False,
    budget_s: float | None = None,
    hosts: Sequence[str] = (),
    peers: Sequence[str] = (),
) -> Options:
    """Parse the user's options; items of lists may hold commas. Raises ConfigurationError with one line."""
    known: tuple[Device, ...] = ("cpu", "cuda")
    if device not in (*known, "all"):
        raise ConfigurationError(f"device {device!r} is not one of {', '.join(known)}, all")
    devices = tuple(each for each in known if device in (each, "all"))
    budget_s = (PATTERN_BUDGETS_S if pattern or peers else BUDGETS_S)[quick] if budget_s is None else budget_s
    if not MIN_BUDGET_S <= budget_s <= MAX_BUDGET_S:
        raise ConfigurationError(f"the budget must be {MIN_BUDGET_S:g} to {MAX_BUDGET_S:g} seconds, not {budget_s:g}")
    if pattern and hosts:
        raise ConfigurationError("--pattern measures within one host; leave out --hosts")
    if hosts and (len(hosts) != 2 or hosts[0] == hosts[1]):
        raise ConfigurationError("hosts must be two different Ray nodes, each given by id, address or host name")
    if peers:
        if pattern or rows or sizes or hosts or device == "cuda":
            raise ConfigurationError(
                "--peers measures rows of its own, with CPU tensors on one host; leave out the rest"
            )
        chosen = choose(["raytorchrpc", "ray", *_split(peers)], PEERS)
        check_monarch()
        return Options(chosen, ("cpu",), _BESIDE_PEERS, (), budget_s, None, *((3, 0.1) if quick else (5, 0.3)))
    usual = ("*",) if pattern or not quick else QUICK
    chosen = choose(_split(rows) or usual, *((CALLS, " with --pattern") if pattern else (LINKS,)))
    if not any(set(one.devices) & set(devices) for one in chosen):
        raise ConfigurationError(f"none of the rows {', '.join(one.name for one in chosen)} carries {device} tensors")
    given = sorted({0 if pattern and text in ("0", "nothing") else parse_size(text) for text in _split(sizes)})
    if not pattern:
        usual_sizes = _QUICK_SIZES if quick else sorted({size for curve in published()[1].values() for size in curve})
        places = (hosts[0], hosts[1]) if hosts else None
        effort = (3, 0.1) if quick else (5, 0.05)
        return Options(chosen, devices, (Pattern("tensors"),), tuple(given or usual_sizes), budget_s, places, *effort)
    wanted = ["*" if name == "all" else name for name in _split(pattern)]
    patterns = [one for name in matching("pattern", wanted, PATTERNS, ", all") for one in variants(name, quick)]
    payloads = tuple(given or (_QUICK_PAYLOADS if quick else _PAYLOADS))
    return Options(chosen, devices, tuple(patterns), payloads, budget_s, None, *((3, 0.1) if quick else (5, 0.3)))


def check_monarch() -> None:
    """Raises ConfigurationError, with the remedy, if Monarch cannot be imported here."""
    if find_spec("monarch") is None:
        raise ConfigurationError("--peers monarch needs Monarch: pip install '.[peers]' in a checkout")
    tried = subprocess.run([sys.executable, "-c", "import monarch.actor"], capture_output=True, text=True, check=False)
    if tried.returncode:
        why = (tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"])[-1]
        raise ConfigurationError(
            f"Monarch cannot be imported beside torch {version('torch')} ({why}); releases of both belong together: "
            "pip install 'torchmonarch==0.7.*' 'torch==2.13.*'"
        )


def _split(texts: Sequence[str]) -> list[str]:
    """The items of lists with commas."""
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def parse_size(text: str) -> int:
    """Bytes of ``1250``, ``1.25KB``, ``2.5 GB`` (powers of 1000) or ``8MiB`` (of 1024). Raises ConfigurationError."""
    size = size_in_bytes(text)
    if size is None or not 1 <= size <= MAX_SIZE:
        raise ConfigurationError(f"size {text!r} is not a number of bytes up to {show_size(MAX_SIZE)}, such as 1.25MB")
    return size
