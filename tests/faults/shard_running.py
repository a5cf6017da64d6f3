"""Kills and stops publishers and readers of shards at random moments, and judges what they have noted."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

import raytorchrpc as rtr
from tests.faults.hands import Here
from tests.faults.shard_roles import KINDS, LATE_S, NEWER, PUBLISHERS, READERS, TIMEOUT_S, Role
from tests.faults.shard_timing import Fault, lines

#: Everybody goes on within this after a fault; Ray's restart of an actor is part of it (seconds).
PATIENCE_S = 30.0
#: A publisher has at most so many: two that are kept, two ahead of the others, one on its way, and one in vain.
MOST_KEPT = 6
#: A process may take this much more than it did (bytes).
MORE_MEMORY = 64 << 20


@dataclass
class Run:
    """One run, and what came of it."""

    directory: Path
    actors: dict[str, Any]
    group: rtr.Group
    violations: list[str] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    """How long it took after each fault until all went on (seconds)."""
    faults: list[Fault] = field(default_factory=list)
    kills: int = 0
    notes: list[dict[str, Any]] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    def look(self) -> list[dict[str, Any]]:
        """Take what has been noted since; returns it."""
        new: list[dict[str, Any]] = []
        for path in self.directory.glob("*.records"):
            begin = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(begin)
                lines = file.read()
            whole = lines[: lines.rfind(b"\n") + 1]  # its process may have died within a line
            self._read[path] = begin + len(whole)
            new += [{**json.loads(line), "process": path.stem} for line in whole.splitlines()]
        self.notes += new
        return new

    def strike(self, hand: Here, draw: random.Random) -> None:
        """One fault or two at random moments; then all go on."""
        victims = draw.sample((*PUBLISHERS, *READERS), draw.choice((1, 1, 2)))
        pids = [self.pid(victim) for victim in victims]
        for victim, pid in zip(victims, pids, strict=True):
            time.sleep(draw.uniform(0, 0.3))
            if draw.random() < 0.65:
                self.kill(hand, victim, pid, victims)
            else:
                self.stop(hand, victim, pid, draw.choice((0.05, 0.5, 1.5)), victims)
        self.await_progress(time.monotonic())

    def kill(self, hand: Here, name: str, pid: int, victims: Sequence[str]) -> None:
        """``victims``: all of this time; the others survive."""
        self.faults.append(Fault(name, True, hand.signal("", pid, signal.SIGKILL), tuple(victims)))
        self.kills += 1

    def stop(self, hand: Here, name: str, pid: int, seconds: float, victims: Sequence[str]) -> None:
        with self.stopped(hand, name, pid, victims):
            time.sleep(seconds)

    @contextmanager
    def stopped(self, hand: Here, name: str, pid: int, victims: Sequence[str]) -> Iterator[None]:
        """The process is suspended meanwhile."""
        self.faults.append(Fault(name, False, hand.signal("", pid, signal.SIGSTOP), tuple(victims)))
        try:
            yield
        finally:
            hand.signal("", pid, signal.SIGCONT)

    def await_note(self, name: str, verdict: str, since: float) -> float:
        """When this process of ``name`` has noted this, after that time."""
        while True:
            self.look()
            for note in self.notes:
                if (note["name"], note["verdict"]) == (name, verdict) and note["began"] > since:
                    return float(note["ended"])
            assert time.monotonic() < since + PATIENCE_S, f"{name} has not {verdict}"
            time.sleep(0.02)

    def pid(self, name: str) -> int:
        until = time.monotonic() + PATIENCE_S
        while True:
            with suppress(ray.exceptions.RayError):
                return int(ray.get(self.actors[name].pid.remote(), timeout=PATIENCE_S))
            assert time.monotonic() < until, f"{name} did not come back"
            time.sleep(0.1)

    def await_progress(self, since: float) -> None:
        """Until every thread has done something that began after this; readers have pulled a newer version, too."""
        missing = {(name, "publish") for name in PUBLISHERS} | {(name, kind) for name in READERS for kind in KINDS}
        until = since + PATIENCE_S
        while missing:
            for note in self.look():
                if note["verdict"] == "ok" and note["began"] > since and (note["kind"] != NEWER or note["is_new"]):
                    missing.discard((note["name"], note["kind"]))
            if time.monotonic() > until:
                self.violations.append(f"{sorted(missing)} did not go on within {PATIENCE_S} s")
                return
            time.sleep(0.05)
        self.recoveries.append(time.monotonic() - since)

    def judge(self) -> list[str]:
        """What is wrong with what was noted."""
        found = list(self.violations)
        first: dict[str, list[int]] = {}
        for note in self.notes:
            if note["verdict"] == "wrong":
                found.append(f"{note['process']}: {note['what']}")
            if note["verdict"] != "ok":
                continue
            if note.get("kept", 0) > MOST_KEPT:
                found.append(f"{note['process']} keeps {note['kept']} versions")
            memory = first.setdefault(note["process"], [])
            memory.append(note["memory"])
            if len(memory) > 50 and note["memory"] > max(memory[:50]) + MORE_MEMORY:
                found.append(f"{note['process']} has {note['memory'] >> 20} MB, and had {max(memory[:50]) >> 20}")
        return found

    def late(self, stopped_s: float) -> list[str]:
        """Operations that took longer than their timeout, beside what a stopped process slept."""
        most = 2 * TIMEOUT_S + LATE_S + stopped_s  # each looks or waits before
        took = [(note["ended"] - note["began"], note) for note in self.notes]
        return [
            f"{note['process']}: {note['verdict']} after {seconds:.1f} s" for seconds, note in took if seconds > most
        ]


@contextmanager
def running(directory: Path) -> Iterator[Run]:
    """A group of three publishers and two readers at work."""
    remote = ray.remote(Role)
    actors = {
        name: remote.options(num_cpus=0, max_restarts=-1).remote(name, str(directory))
        for name in (*PUBLISHERS, *READERS)
    }
    try:
        with rtr.init_group(actors) as group:
            run = Run(directory, actors, group)
            run.await_progress(time.monotonic())
            run.recoveries.clear()
            yield run
            (directory / "end").touch()
            time.sleep(0.2)
            run.look()
    finally:
        for actor in actors.values():
            ray.kill(actor)


def summary(run: Run) -> str:
    """What happened, and how long it took to go on."""
    verdicts: dict[str, int] = {}
    for note in run.notes:
        verdicts[note["verdict"]] = verdicts.get(note["verdict"], 0) + 1
    times: Sequence[float] = sorted(run.recoveries) or [0.0]
    first = (
        f"{len(times)} times faults, {run.kills} kills; "
        f"all went on after {times[len(times) // 2]:.1f} s (median), {times[-1]:.1f} s (longest); {verdicts}"
    )
    return "\n".join((first, *lines(run.faults, run.notes)))
