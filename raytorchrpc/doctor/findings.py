"""The doctor's result type: one ``Finding`` for each fact that it checked."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Literal

from pydantic import BaseModel, ConfigDict

from raytorchrpc.doctor.catalogue import FINDINGS

Level = Literal["ok", "note", "warning", "problem"]
#: From best to worst.
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "problem")


class Finding(BaseModel):
    """A fact about a process or its machine, with its consequence and remedy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    """A key of ``catalogue.FINDINGS``; stable between releases."""
    level: Level
    """ok: as it should be. note: worth knowing, nothing to do. warning: works, but slower or over another lane.
    problem: something the machine has cannot be used, or will fail."""
    seen: str
    meaning: str = ""
    remedy: str = ""
    """Empty where there is nothing to do."""
    lanes: tuple[str, ...] = ()
    """The lanes that are affected; empty means all."""


def finding(
    level: Level, name: str, seen: str, meaning: str = "", remedy: str = "", *, lanes: tuple[str, ...] | None = None
) -> Finding:
    """A ``Finding`` with the id ``name``; it affects the catalogue's lanes unless ``lanes`` names others."""
    lanes = FINDINGS[name].lanes if lanes is None else lanes
    return Finding(id=name, level=level, seen=seen, meaning=meaning, remedy=remedy, lanes=lanes)


ok, note, warning, problem = (partial(finding, level) for level in LEVELS)


def worst(findings: Iterable[Finding]) -> Level:
    """The highest level among them; ok if there are none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def some(names: Iterable[object], limit: int = 4) -> str:
    """``a, b, c, d and 5 more``."""
    listed = [str(name) for name in names]
    rest = len(listed) - limit
    return ", ".join(listed[:limit]) + (f" and {rest} more" if rest > 0 else "")
