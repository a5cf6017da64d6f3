"""Patterns of use: what the members of a group do in a turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from raytorchrpc.bench.cases import Device

Busy = Literal["Python", "torch", "sleep"]


@dataclass(frozen=True)
class Pattern:
    """What members do in a turn: by default, one caller calls one callee in a tight loop."""

    name: str = "quiet"
    unit: str = "ms"
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
    is_idle: bool = False
    """Nobody calls; the figure is CPU time."""
    is_together: bool = False
    """Every member calls every other."""


#: The rows of ``--peers``, and the start of the turn of each.
BESIDE_PEERS: dict[str, tuple[Pattern, Device, int]] = {
    "empty call, ms": (Pattern(), "cpu", 0),
    "empty call every 2 ms, ms": (Pattern(interval_s=0.002), "cpu", 0),
    "1.25 KB, ms": (Pattern(), "cpu", 1_250),
    "10 MB, ms": (Pattern(), "cpu", 10_000_000),
    "40 MB, ms": (Pattern(), "cpu", 40_000_000),
    "64 empty calls in flight, calls/s": (Pattern(unit="calls/s", in_flight=64), "cpu", 0),
}


def known_patterns(quick: bool) -> dict[str, list[Pattern]]:
    """Every pattern in its variants, by name."""
    callers, groups, idle = (3, (4,), 4) if quick else (8, (4, 8), 8)
    pauses = (2,) if quick else (0.5, 2, 10)
    kinds: tuple[Busy, ...] = ("Python",) if quick else ("Python", "torch", "sleep")
    fan_in = {f"fan-in, {callers} callers": 0, f"fan-in, {callers} callers, 8 in flight each": 8}
    return {
        "quiet": [Pattern()],
        "paced": [Pattern(f"paced, every {ms:g} ms", interval_s=ms / 1e3) for ms in pauses],
        "in-flight": [Pattern("in-flight, 64", "calls/s", in_flight=64)],
        # Paced: in a tight loop, calls that follow each other within a switch interval are fast, and hide the others.
        "busy-callee": [Pattern(f"busy-callee, callee runs {kind}", busy=kind, interval_s=0.01) for kind in kinds],
        "all-to-all": [
            Pattern(f"all-to-all, {n} members, {kind}", members=n, asynchronous=kind == "async", is_together=True)
            for n in groups
            for kind in ("sync", "async")
        ],
        "idle": [Pattern(f"idle, {idle} members", "% of a core", members=idle, is_idle=True)],
        "fan-in": [Pattern(name, "calls/s", members=callers + 1, in_flight=n) for name, n in fan_in.items()],
    }


class Turn(NamedTuple):
    """What the actors of a contestant are asked for."""

    pattern: Pattern
    device: Device
    size: int
    """Bytes of the payload."""
    window_s: float
    """Seconds, after a lead-in."""
