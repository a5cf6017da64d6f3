"""A whole run: the actors of each case are started, take their turns, and end when no later case needs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from typing import Any

from raytorchrpc.bench.cases import Case, Failed, Figure, Size, Skipped, measure
from raytorchrpc.bench.contestants import Contestant
from raytorchrpc.bench.options import Job, Options
from raytorchrpc.bench.results import Result, tree
from raytorchrpc.bench.site import examine
from raytorchrpc.bench.teams import Team

#: Bytes from which a payload is freed at the end of each turn: memory is needed for one contestant at a time.
_LARGE = 200_000_000
#: A contestant with a turn that took longer is not measured at larger sizes (seconds).
_SLOW_S = 20.0
#: Longest time until the actors of a case have started and connected, beside those of so many others (seconds).
_START_S = 240.0

Report = Callable[[str], None]
"""``report(current step)``."""


def run(options: Options, command: str, report: Report = lambda text: None) -> Result:
    """Take all measurements on an initialised Ray. Always ends the actors it started.

    Blocks until the actors are up, and then for about ``options.budget_s`` at most. Raises ConfigurationError for a
    host that Ray does not have, BootstrapError if a host does not answer. Ctrl-C ends it with the figures so far.
    """
    started, began = datetime.now(timezone.utc), time.monotonic()
    report("examining the hosts")
    runner = _Runner(options, report)
    interrupted = False
    try:
        runner.run()
    except KeyboardInterrupt:
        interrupted = True
        if not any(figure.median for figure in runner.figures):
            raise
    finally:
        for team in runner.teams.values():
            team.end()
    return Result(
        title="Between two hosts" if options.hosts else "On one host",
        tree=tree(),
        started=started.isoformat(timespec="seconds"),
        command=command,
        machine=runner.site.facts,
        seconds=round(time.monotonic() - began, 1),
        interrupted=interrupted,
        contestants={one.name: one.meaning for one in options.contestants},
        published={one.name: one.published for one in options.contestants if one.published is not None},
        figures=tuple(runner.figures),
    )


class _Runner:
    """Measures the cases of one run."""

    def __init__(self, options: Options, report: Report) -> None:
        self.options, self.site, self.report = options, examine(options.hosts), report
        self.contestants = {one.name: one for one in options.contestants}
        self.figures: list[Figure] = []
        self.teams: dict[Any, Team] = {}
        """The actors that run now."""
        self.via: dict[str, str | None] = {}

    def run(self) -> None:
        budget_s, rounds = self.options.budget_s, self.options.rounds
        # What has only reasons comes last, and takes no time.
        jobs = sorted(self.options.jobs, key=lambda job: not self._able(job))
        for number, job in enumerate(jobs):
            self._prepare(job)
            case = Case(
                name=job.name,
                contestants=[name for name, one in self.contestants.items() if job.device in one.devices],
                sizes=[*job.turns],
                body=partial(self._turn, job),
                unit=job.unit,
                device=job.device,
                via=self.via,
                slow_s=_SLOW_S,
            )
            began = time.monotonic()
            deadline = began + budget_s / max(1, sum(bool(self._able(later)) for later in jobs[number:]))
            measure(case, rounds, self.figures, deadline=deadline, report=partial(self._report, job))
            budget_s -= time.monotonic() - began

    def _report(self, job: Job, size: Size) -> None:
        self.report(f"{job.device}, {job.name}: size {[*job.turns].index(size) + 1} of {len(job.turns)}")

    def _able(self, job: Job) -> list[Contestant]:
        """The contestants that have a figure, as far as is known."""
        some = [one for one in self.contestants.values() if job.device in one.devices]
        return [one for one in some if not all(one.obstacle(turn, self.site) for turn in job.turns.values())]

    def _prepare(self, job: Job) -> None:
        """Start the actors that this case needs and do not run yet, and end the others."""
        needed = {job.actors(one): one for one in self._able(job)}
        for key in self.teams.keys() - needed.keys():
            self.teams.pop(key).end()
        fresh = {key: Team(one, self.site, *key[1:]) for key, one in needed.items() if key not in self.teams}
        self.teams |= fresh
        limit = time.monotonic() + _START_S
        for number, team in enumerate(fresh.values(), 1):
            self.report(f"starting actors of contestant {number} of {len(fresh)}, {team.one.name}")
            team.open(max(1.0, limit - time.monotonic()))

    def _turn(self, job: Job, name: str, size: Size) -> float:
        one, turn = self.contestants[name], job.turns[size]
        if (reason := one.obstacle(turn, self.site)) is not None:
            raise Skipped(reason)
        team = self.teams[job.actors(one)]
        if team.failed:
            raise Failed(team.failed)
        try:
            figure, self.via[name] = team.turn(turn)
        except Skipped:
            raise
        except Failed:
            self.teams.pop(job.actors(one)).end()  # one of the actors may be busy, or dead
            raise
        finally:
            if turn.size >= _LARGE:
                team.drop()
        return figure
