"""A whole run: the actors of each case are started, take their turns, and end when no later case needs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import NamedTuple

from raytorchrpc.bench import patterns
from raytorchrpc.bench.cases import Case, Device, Failed, Figure, Size, Skipped, Stuck, measure
from raytorchrpc.bench.contestants import Contestant
from raytorchrpc.bench.patterns import Options, Pattern, Shape, shape
from raytorchrpc.bench.results import Result, tree
from raytorchrpc.bench.site import Site, examine, obstacle, size_obstacle
from raytorchrpc.bench.teams import START_S, Place, Team

#: Bytes from which a payload is freed at the end of each turn: memory is needed for one contestant at a time.
_LARGE = 200_000_000
#: A contestant with a turn that took longer is not measured at larger sizes (seconds).
_SLOW_S = 20.0
#: Longest time to wait for an answer of an actor (seconds).
_ANSWER_S = 60.0

Report = Callable[[str, float], None]
"""``report(current step, share of the work that is done)``."""
Key = tuple[Contestant, Device, Shape]


class Job(NamedTuple):
    """A case on a device."""

    device: Device
    name: str
    steps: dict[Size, tuple[Pattern, int]]
    """See ``Options.cases``; all need the same actors."""

    def key(self, one: Contestant) -> Key:
        pattern, _ = next(iter(self.steps.values()))
        return one, self.device, shape(one, pattern)


def run(options: Options, command: str, report: Report = lambda text, part: None) -> Result:
    """Take all measurements on an initialised Ray. Always ends the actors it started.

    Blocks until the actors are up, and then for about ``options.budget_s`` at most. Raises ConfigurationError for a
    host that Ray does not have, BootstrapError if a host does not answer. Ctrl-C ends it with the figures so far.
    """
    started, began = datetime.now(timezone.utc), time.monotonic()
    report("examining the hosts", 0.0)
    site = examine(options.hosts)
    place = Place.at(site, options.patterns[0].name != "tensors", options.hosts is not None)
    runner = Runner(options, site, place, report)
    interrupted = False
    try:
        runner.run()
    except KeyboardInterrupt:
        interrupted = True
        if not any(figure.median for figure in runner.figures):
            raise
    finally:
        runner.end()
    known = {one.name: one for one in options.contestants}
    return Result(
        title="Between two hosts" if options.hosts else "On one host",
        tree=tree(),
        started=started.isoformat(timespec="seconds"),
        command=command,
        machine=site.facts(sorted(runner.gpu_names)),
        seconds=round(time.monotonic() - began, 1),
        interrupted=interrupted,
        contestants={name: one.meaning for name, one in known.items()},
        published={name: one.published for name, one in known.items() if one.published is not None},
        figures=tuple(runner.figures),
    )


@dataclass
class Runner:
    """Measures the cases of one run."""

    options: Options
    site: Site
    place: Place
    report: Report
    figures: list[Figure] = field(default_factory=list)
    gpu_names: set[str] = field(default_factory=set)
    _teams: dict[Key, Team] = field(default_factory=dict)
    _active: Team | None = None
    """Whose turns have begun, of those that have their own."""

    def run(self) -> None:
        budget_s = self.options.budget_s
        jobs = [Job(device, *case) for device in self.options.devices for case in self.options.cases().items()]
        jobs.sort(key=lambda job: not self._able(job))  # what has only reasons comes last, and takes no time
        for number, job in enumerate(jobs):
            self._prepare(job, number / len(jobs))
            began = time.monotonic()
            case = self._case(job)
            progress = partial(self._report, case, (number / len(jobs), 1 / len(jobs)))
            deadline = began + budget_s / max(1, sum(bool(self._able(later)) for later in jobs[number:]))
            measure(case, self.options.rounds, self.figures, deadline=deadline, report=progress)
            self._pause()
            budget_s -= time.monotonic() - began

    def _case(self, job: Job) -> Case:
        known = {one.name: one for one in self.options.contestants if job.device in one.devices}
        units = {pattern.unit for pattern, _ in job.steps.values()}
        return Case(
            name=job.name,
            contestants=tuple(known),
            sizes=tuple(job.steps),
            body=lambda name, size: self._turn(known[name], job.device, *job.steps[size]),
            unit=units.pop() if len(units) == 1 else "",
            device=job.device,
            apart=[name for name, one in known.items() if one.own_turn],
            via=lambda name: self._teams[job.key(known[name])].via,
            slow_s=_SLOW_S,
        )

    def _report(self, case: Case, done: tuple[float, float], name: str, size: Size) -> None:
        before, share = done
        self.report(f"{case.device}, {case.name}: {name}", before + share * case.sizes.index(size) / len(case.sizes))

    def _able(self, job: Job) -> list[Contestant]:
        return [
            one
            for one in self.options.contestants
            if job.device in one.devices
            and obstacle(one, job.device, self.site) is None
            and not all(patterns.obstacle(one, pattern, job.device, size) for pattern, size in job.steps.values())
        ]

    def _prepare(self, job: Job, done: float) -> None:
        """Start the actors that this case needs and do not run yet, and end the others."""
        needed = [job.key(one) for one in self._able(job)]
        for key in [key for key, team in self._teams.items() if key not in needed or team.failed]:
            self._teams.pop(key).end("no case needs it")
        place = self.place if job.device == "cuda" else self.place._replace(gpus=())
        fresh = {key: Team(key[0], place, key[2]) for key in needed if key not in self._teams}
        self._teams |= fresh
        waiting, limit = list(fresh.values()), time.monotonic() + START_S
        while waiting and time.monotonic() < limit:
            more = f" and {len(waiting) - 5} more" if len(waiting) > 5 else ""
            names = ", ".join(team.one.name for team in waiting[:5]) + more
            self.report(f"starting actors of {len(fresh)} contestants; waiting for {names}", done)
            waiting = [team for number, team in enumerate(waiting) if team.starts(0.0 if number else 1.0)]
        for team in waiting:
            team.end(f"Ray did not start its actors within {START_S:.0f} s")
        for team in fresh.values():
            if not team.failed:
                self.report(f"connecting the actors of {team.one.name}", done)
                with suppress(Failed):  # again in its first turn
                    team.open()
        self.gpu_names |= {ready.gpu_name for team in fresh.values() for ready in team.ready if ready.gpu_name}

    def _turn(self, one: Contestant, device: Device, pattern: Pattern, size: int) -> float:
        if (reason := obstacle(one, device, self.site)) is not None:
            raise Failed(reason)
        if (reason := patterns.obstacle(one, pattern, device, size)) is not None:
            raise Skipped(reason)
        team = self._teams[one, device, shape(one, pattern)]
        if team.failed:
            raise Failed(team.failed)
        free = min((ready.gpu_free for ready in team.ready if ready.gpu), default=None)
        if (reason := size_obstacle(one, device, size, self.site, free)) is not None:
            raise Failed(reason)
        try:
            team.open()
            if team is not self._active:
                self._pause()
                if one.own_turn:
                    team.resume()
                    self._active = team
            return team.turn(device, pattern, size, self.options.window_s, _ANSWER_S)
        except Stuck as failure:
            self._active = None
            team.end(f"its actors were killed because it failed: {failure}")
            raise
        finally:
            if size >= _LARGE and not team.failed:
                team.drop()

    def _pause(self) -> None:
        if self._active is not None:
            team, self._active = self._active, None
            try:
                team.pause()
            except Failed as failure:
                team.end(f"its turn did not end: {failure}")

    def end(self) -> None:
        for team in self._teams.values():
            team.end("the run has ended")
