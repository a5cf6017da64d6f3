"""What struck a group, what each fault led to, and what came of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.faults.faults import Fault, Kill
from tests.faults.judging import runs_again
from tests.faults.records import Record
from tests.faults.scenarios import NEWER


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
    """When the process or its host was struck."""
    detected: float | None = None
    """From the kill until the group said so."""
    caller_told: float | None = None
    """From the kill until the pending call to the member had failed, without the time that the caller stood still."""
    rejoined: float | None = None
    born: float | None = None
    """From the kill until Ray had the next process run."""
    sent: Counter[str] = field(default_factory=Counter)
    """What strangers have said, by door and kind."""
    unsent: Counter[str] = field(default_factory=Counter)

    @property
    def kind(self) -> tuple[str, str]:
        return type(self.fault).__name__, self.fault.at


class GoingOn(NamedTuple):
    """How one thread of a survivor went on (seconds after a fault, without those that its process stood still)."""

    member: str
    op: str
    how: str
    answered: float
    """Until an operation that began after the fault had returned or raised, and so any that it met on its way."""
    done: float
    """Until such an operation had returned."""


def survivals(struck: Sequence[Struck], records: Iterable[Record]) -> list[GoingOn]:
    """How each thread of each survivor went on with shards after faults that struck at about the same time.

    Of operations that do not wait for anything new: a lost publisher publishes nothing.
    """
    at, victims = max(one.at or 0.0 for one in struck), {one.fault.member for one in struck}
    threads: dict[tuple[str, str, str], list[Record]] = {}
    for record in sorted(records, key=lambda record: record.began):
        if "shards" in record.op and record.handle != NEWER and record.member not in victims and record.began > at:
            threads.setdefault((record.member, record.op, record.handle), []).append(record)
    found = []
    for thread, its in threads.items():
        for place, record in enumerate(its):
            if record.verdict == "ok":
                still = sum(one.still for one in its[: place + 1])
                found.append(GoingOn(*thread, its[0].ended - at - its[0].still, record.ended - at - still))
                break
    return found


@dataclass
class Report:
    """What many rounds came to."""

    struck: list[Struck] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)
    """Of operations."""
    violations: list[str] = field(default_factory=list)
    repeated: int = 0
    """Calls with retry= that ran more than once, as they may."""
    latest: float = 0.0
    """The most that a call lasted beyond its deadline (seconds)."""
    went_on: list[GoingOn] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, records: Sequence[Record]) -> None:
        """Of one round."""
        self.verdicts.update(f"{record.op} {record.verdict.partition(':')[0]}" for record in records)
        runs = Counter(record.object for record in records if record.op == "ran")
        self.repeated += sum(count > 1 for call, count in runs.items() if runs_again(call))
        beyond = [r.ended - r.began - (r.allowed or 0.0) - r.still for r in records if r.op == "call"]
        self.latest = max([self.latest, *beyond])

    def __str__(self) -> str:
        """What came of each kind of fault, and of the operations."""
        lines = [
            f"{' '.join(kind)}: {len(of)}, of which {sum(one.landed for one in of)} struck at their moment"
            for kind in sorted({one.kind for one in self.struck})
            if (of := [one for one in self.struck if one.kind == kind])
        ]
        times = {
            what: [value for one in self.struck if (value := getattr(one, what)) is not None]
            for what in ("detected", "caller_told", "born", "rejoined")
        }
        for op in sorted({row.op for row in self.went_on}):
            times[f"survivors answered in {op}"] = [row.answered for row in self.went_on if row.op == op]
            times[f"survivors succeeded in {op}"] = [row.done for row in self.went_on if row.op == op]
        for what, values in times.items():
            if values:
                values.sort()
                middle, late = values[len(values) // 2], values[int(len(values) * 0.95)]
                lines.append(f"  {what}: median {middle:.3f} s, 95 % {late:.3f} s, worst {values[-1]:.3f} s")
        sent = sum(sum(one.sent.values()) for one in self.struck)
        if sent:
            unsent = sum((one.unsent for one in self.struck), Counter[str]())
            lines.append(f"  strangers sent {sent} messages; not sent: {dict(unsent)}")
        lines.append(f"  no call ended more than {self.latest:.3f} s after its deadline and its caller's standstill")
        lines.append("operations: " + ", ".join(f"{kind} {count}" for kind, count in self.verdicts.most_common()))
        lines.append(f"with retry= ran again {self.repeated}; violations {len(self.violations)}")
        kills = sum(isinstance(one.fault, Kill) for one in self.struck)
        lines.append(f"{len(self.struck)} faults, {kills} of them kills, in {self.seconds:.0f} s")
        return "\n".join([*lines, *(f"  {text[:700]}" for text in self.violations)])
