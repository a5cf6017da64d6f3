"""What the doctor says: one finding for each thing that it looked at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict

Level = Literal["ok", "note", "warning", "problem"]
#: From what is well to what is not.
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "problem")


class Finding(BaseModel):
    """One thing that was seen, what it means and what to do about it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    """One of ``catalogue.FINDINGS``; stays the same between releases."""
    level: Level
    """ok: as it should be. note: good to know, nothing to do. warning: it works, but slower or by another lane.
    problem: something that the machine has cannot be used, or will fail."""
    seen: str
    meaning: str = ""
    remedy: str = ""
    """Empty where there is nothing to do."""
    lanes: tuple[str, ...] = ()
    """Whom it concerns; empty: everything."""


def worst(findings: Iterable[Finding]) -> Level:
    """The highest level among them; ok for none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def some(names: Iterable[object], limit: int = 4) -> str:
    """``a, b, c, d and 5 more``."""
    listed = [str(name) for name in names]
    rest = len(listed) - limit
    return ", ".join(listed[:limit]) + (f" and {rest} more" if rest > 0 else "")
