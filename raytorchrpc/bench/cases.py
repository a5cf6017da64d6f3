"""A comparison of contestants, and the only way in which they are measured: in turn, in one run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel

Device = Literal["cpu", "cuda"]
#: As tables name them.
DEVICES: Mapping[Device, str] = {"cpu": "CPU", "cuda": "CUDA"}
Size = int | str
"""Bytes of the tensor (0: a call without arguments), or another name of a column."""
OUT_OF_TIME = "the time budget is used up"


class Failed(Exception):
    """A contestant cannot be measured at this size, nor at larger ones; the message is the reason, in one line."""


class Skipped(Failed):
    """A contestant cannot be measured at this size; another size may work."""


class Figure(BaseModel, frozen=True, extra="forbid"):
    """What a contestant takes at one size, or the reason why there is no figure."""

    case: str
    device: Device = "cpu"
    contestant: str
    size: Size
    unit: str = "ms"
    median: float | None = None
    """Of the turns; so are the lowest and the highest."""
    low: float | None = None
    high: float | None = None
    turns: int = 0
    via: str | None = None
    """The lane that carried the tensor, where the group's statistics show it."""
    reason: str | None = None

    @property
    def place(self) -> int:
        """Where its size is among those of other figures; 0 leaves their order."""
        return self.size if isinstance(self.size, int) else 0

    @property
    def label(self) -> str:
        """The size as text."""
        return self.size if isinstance(self.size, str) else show_size(self.size) if self.size else "nothing"


@dataclass(frozen=True)
class Case:
    """What each contestant does at each size."""

    name: str
    contestants: Sequence[str]
    """The first is the one to which tables compare the others."""
    sizes: Sequence[Size]
    """In ascending order."""
    body: Callable[[str, Size], float]
    """One turn of a contestant at a size; returns its figure in ``unit``. Raises Failed."""
    unit: str = "ms"
    device: Device = "cpu"
    via: Mapping[str, str | None] = field(default_factory=dict)
    """By contestant, the lane by which its last turn went, where the body keeps it."""
    slow_s: float = math.inf
    """A contestant with a turn that took longer is not measured at larger sizes."""


def measure(
    case: Case,
    rounds: int,
    figures: list[Figure],
    *,
    deadline: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
    report: Callable[[Size], None] = lambda size: None,
) -> None:
    """Measure every contestant at every size, and append a figure, or a reason, for each.

    Contestants alternate, so that drift of the machine affects all of them. The first turn of each warms up and does
    not count. What an exception other than Failed interrupts has the figures of the turns so far.

    Args:
        deadline: no turn begins later, by ``clock``.
    """
    gone: dict[str, str] = {}
    for size in case.sizes:
        report(size)
        taken: dict[str, list[float]] = {name: [] for name in case.contestants}
        reasons, via = dict(gone), dict[str, str | None]()
        try:
            for name in [*case.contestants] * (rounds + 1):
                if name in reasons:
                    continue
                if (began := clock()) >= deadline:
                    break
                try:
                    taken[name].append(case.body(name, size))
                    via[name] = case.via.get(name)
                except Failed as failure:
                    reasons[name] = str(failure)
                    if not isinstance(failure, Skipped):
                        gone[name] = reasons[name]
                if (took := clock() - began) > case.slow_s:
                    gone.setdefault(name, f"a turn with a smaller size took {took:.1f} s")
        finally:
            for name, turns in taken.items():
                values: dict[str, Any] = {"reason": reasons.get(name, OUT_OF_TIME)}
                if counted := turns[1:]:
                    values = {"median": median(counted), "low": min(counted), "high": max(counted)}
                    values |= {"turns": len(counted), "via": via[name]}
                values |= {"case": case.name, "device": case.device, "unit": case.unit, "size": size}
                figures.append(Figure(contestant=name, **values))


def show_size(size: float) -> str:
    """Format bytes as the published tables do: ``1.25 KB``, ``640 MB``."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:g} B"
