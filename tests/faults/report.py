"""What struck a group, what each fault led to, and what came of all of them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.faults.faults import Fault


class Change(NamedTuple):
    """As the group told it, and when."""

    at: float
    kind: str
    members: tuple[str, ...]


@dataclass
class Struck:
    """One fault, and what it led to; times in seconds."""

    fault: Fault
    landed: bool = True
    """The moment came."""
    at: float | None = None
    """When it was killed."""
    detected: float | None = None
    """From the kill until the group said so."""
    caller_told: float | None = None
    """From the kill until the pending call to the member had failed, without the time that the caller stood still."""
    caller: str = ""
    rejoined: float | None = None
    born: float | None = None
    """From the kill until Ray had the next process run."""


@dataclass
class Report:
    """What many rounds came to."""

    struck: list[Struck] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    repeated: int = 0
    """Calls with retry= that ran more than once, as they may."""
    latest: float = -math.inf
    """The most that a call lasted beyond its deadline (seconds)."""
    seconds: float = 0.0
