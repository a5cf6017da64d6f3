"""How long survivors of a fault take to go on, and how long the restart of what was killed takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tests.faults.shard_roles import COPIES, LAST, PUBLISHERS

Note = Mapping[str, Any]
#: Operations that do not wait for anything new. ``NEWER`` does, and a lost publisher publishes nothing.
PROMPT = ("publish", LAST, COPIES)


#: By what they keep others from, least first.
_WEIGHTS = tuple(
    f"{role} {struck}" for role in ("reader", "publisher", "coordinator") for struck in ("killed", "stopped")
)


class Fault(NamedTuple):
    """What was done to one process."""

    victim: str
    killed: bool
    at: float
    victims: tuple[str, ...]
    """All that were struck at about this time, ``victim`` among them."""

    @property
    def what(self) -> str:
        role = "coordinator" if self.victim == PUBLISHERS[0] else ("reader", "publisher")[self.victim in PUBLISHERS]
        return f"{role} {'killed' if self.killed else 'stopped'}"


class GoingOn(NamedTuple):
    """How one thread of a survivor went on (seconds after the fault)."""

    fault: Fault
    name: str
    kind: str
    answered: float
    """Until an operation that began after the fault had returned or raised, and so any that it met on its way."""
    done: float
    """Until such an operation had returned."""
    why: str
    """The error, if ``done`` is later."""


class Restart(NamedTuple):
    """How a killed process came back (seconds, each after the one before)."""

    fault: Fault
    started: float
    """After the kill: its ``__init__`` runs."""
    member: float
    operated: float
    version: float | None
    """After the kill, of a publisher: a version is there which all publishers began after it."""


def strikes(faults: Sequence[Fault]) -> list[Sequence[Fault]]:
    """The faults of each time; within each, those that keep others from most come last."""
    found, left = [], list(faults)
    while left:
        size = len(left[0].victims)
        found.append(sorted(left[:size], key=lambda fault: _WEIGHTS.index(fault.what)))
        left = left[size:]
    return found


def survivals(faults: Sequence[Fault], notes: Iterable[Note]) -> list[GoingOn]:
    """How each thread of each survivor went on after the fault of each time that kept others from most."""
    threads: dict[tuple[str, str], list[Note]] = {}
    for note in notes:
        if note.get("kind") in PROMPT:
            threads.setdefault((note["name"], note["kind"]), []).append(note)
    found = []
    for (name, kind), its in threads.items():
        its.sort(key=_began)
        for *_, fault in strikes(faults):
            if name not in fault.victims:
                after = [note for note in its if fault.at < note["began"] < fault.at + 60]
                done = next((note["ended"] for note in after if note["verdict"] == "ok"), None)
                if done is not None:
                    why = "" if after[0]["verdict"] == "ok" else f"{after[0]['verdict']}: {after[0].get('why')}"
                    found.append(GoingOn(fault, name, kind, after[0]["ended"] - fault.at, done - fault.at, why))
    return found


def restarts(faults: Sequence[Fault], notes: Sequence[Note]) -> list[Restart]:
    """How each process that was killed came back, if it lived until it had."""
    published = _published(notes)
    found = []
    for fault in faults:
        if not fault.killed:
            continue
        after = [note for note in notes if note["name"] == fault.victim and note["began"] > fault.at]
        started = min((note for note in after if note["verdict"] == "started"), key=_began, default=None)
        if started is None:
            continue
        its = [note for note in after if note["process"] == started["process"]]
        member = min((note["ended"] for note in its if note["verdict"] == "member"), default=None)
        operated = min((note["ended"] for note in its if note["verdict"] == "ok"), default=None)
        if member is None or operated is None:
            continue
        new = [
            note["ended"] - fault.at
            for note in notes
            if note.get("is_new") and note["began"] > fault.at and note["ended"] < fault.at + 60
            if published.get((note["store"], note["version"]), 0.0) > fault.at
        ]
        version = min(new, default=None) if fault.victim in PUBLISHERS else None
        found.append(Restart(fault, started["began"] - fault.at, member - started["began"], operated - member, version))
    return found


def _began(note: Note) -> float:
    return float(note["began"])


def _published(notes: Iterable[Note]) -> dict[tuple[int, int], float]:
    """When the first publisher of each version of each store began."""
    began: dict[tuple[int, int], float] = {}
    for note in notes:
        if note.get("kind") == "publish" and "version" in note:
            key = note["store"], note["version"]
            began[key] = min(began.get(key, note["began"]), note["began"])
    return began


def spread(times: Iterable[float]) -> str:
    """Median, ninth decile and longest."""
    sorted_times = sorted(times) or [0.0]
    last = len(sorted_times) - 1
    return " / ".join(f"{sorted_times[round(last * share)]:.2f}" for share in (0.5, 0.9, 1.0))


def lines(faults: Sequence[Fault], notes: Sequence[Note]) -> list[str]:
    """A table of all of it, for people."""
    rows, back = survivals(faults, notes), restarts(faults, notes)
    told = ["seconds, as median / ninth decile / longest; of two faults at a time, the worse one:"]
    for what in _WEIGHTS:
        for kind in PROMPT:
            its = [row for row in rows if (row.fault.what, row.kind) == (what, kind)]
            if its:
                answered, done = spread(row.answered for row in its), spread(row.done for row in its)
                told.append(f"  {what}: {kind} answered after {answered}, done after {done} ({len(its)})")
    kills = [row for row in rows if row.fault.killed]
    pulls = [row for row in kills if row.kind != "publish"]
    copies = [row.done for row in pulls if row.kind == COPIES and row.fault.victim != PUBLISHERS[0]]
    told += [
        f"survivors of a kill: readers have an answer after {spread(row.answered for row in pulls)}",
        f"  and what other publishers have, while the coordinator lives, after {spread(copies)}",
        f"  publish() answered after {spread(row.answered for row in kills if row.kind == 'publish')}; if it waited "
        f"for a lost publisher, {spread(_after_return(kills, back))} after that was a member again",
        f"{len(back)} restarts: __init__ after {spread(row.started for row in back)}, "
        f"member {spread(row.member for row in back)} later, "
        f"first operation {spread(row.operated for row in back)} later; "
        f"publishers': first version {spread(row.version for row in back if row.version is not None)} after the kill",
    ]
    return told


def _after_return(rows: Iterable[GoingOn], back: Iterable[Restart]) -> list[float]:
    """Of survivors in ``publish`` when a lost publisher came back: how long they stayed there."""
    returned = {restart.fault: restart.started + restart.member for restart in back}
    waited = [(row.answered, returned[row.fault]) for row in rows if row.kind == "publish" and row.fault in returned]
    return [max(0.0, answered - member) for answered, member in waited if answered > member - 0.05]
