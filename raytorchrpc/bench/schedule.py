"""A whole run: the order of samples and turns, within the limits of memory and time.

Cases are measured block by block. In a block, rows alternate: drift of the machine affects all of them, and each link
is as warm as in its own loop. Of sizes, samples are counted, and a block is one size, in ascending order; sizes that do
not fit into memory for all rows at once are measured row by row, and each row frees its memory before the next one's
turn. Of patterns, windows of time are measured, and a block is a pattern's cases for which rows need the same actors.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import groupby
from statistics import median, quantiles
from typing import Any, ClassVar, TypeVar

from raytorchrpc import __version__
from raytorchrpc.bench.actors import Window
from raytorchrpc.bench.cases import Case, Options, Row, Shape, case_obstacle, shape
from raytorchrpc.bench.links import Failed, Stuck
from raytorchrpc.bench.results import INTERRUPTED, Cell, Device, RowResult, Run
from raytorchrpc.bench.site import MemoryLimits, Site, examine, needed, obstacle, size_obstacle
from raytorchrpc.bench.teams import Place, Team, Turn

#: Samples of one row per turn.
BLOCK = 10
#: Fewer samples give no figure.
FEWEST = 3
#: (largest size in bytes, most samples).
_REPEATS = ((2_000_000, 100), (50_000_000, 30), (math.inf, 10))
#: Blocks of samples shorter than this begin with uncounted ones, because other rows displaced the caches.
_LEAD_IN_S = 0.02
#: Their approximate total time and largest number: a small call's first four take up to ten times as long.
_LEAD_IN_TOTAL_S, _LEAD_IN_MOST = 0.005, 10
#: Share of memory that rows may use together while they alternate.
_SHARED_MEMORY = 0.5
#: Share of the remaining time that a slow row may use at one size; the last rows may use more.
_TIME_SHARE, _LAST_TIME_SHARE = 0.2, 0.8
#: Most seconds per byte assumed for a link of which only one size has been measured.
_SLOWEST_BYTE = 1e-8
#: Bytes from which the memory of a size is freed after it.
_LARGE = 50_000_000
#: Longest time until actors have started, and what each of them adds (seconds); not part of the budget.
_START_S, _START_EACH_S = 60.0, 15.0
#: Reserved for ending the actors and Ray (seconds).
_SHUTDOWN_S = 4.0

OUT_OF_TIME = "the time budget is used up"

Report = Callable[[str, float], None]
"""``report(current step, share of the work that is done)``."""

Key = TypeVar("Key", bound=Hashable)


def measure(options: Options, command: str, report: Report) -> Run:
    """Take all measurements on an initialised Ray. Always ends the actors it started.

    Blocks until the actors are up, and then for about ``options.budget_s`` at most. KeyboardInterrupt ends it with the
    figures so far, and leaves it only if there are none. Raises ConfigurationError for a
    host that Ray does not have, BootstrapError if a host does not answer.
    """
    started, began = datetime.now(timezone.utc), time.monotonic()
    report("examining the hosts", 0.0)
    site = examine(options.hosts)
    patterns = any(case.pattern for case in options.cases)
    place = Place.at(site, patterns, chosen=options.hosts is not None)
    runner: Runner = (PatternsRunner if patterns else SizesRunner)(options, site, place, report)
    try:
        runner.run()
        gpus = sorted({ready.gpu_name for team in runner.teams for ready in team.ready if ready.gpu_name})
    finally:
        for team in runner.teams:
            team.end("the run has ended")
    rows = []
    for device in options.devices:
        for row in (row for row in options.rows if device in row.devices):
            known: Any = {"what": row.what, "published": row.published, "comparable": not row.one_gpu}
            rows.append(RowResult(row=row.name, device=device, kind=row.kind, **known))
    return Run(
        version=__version__,
        started=started.isoformat(timespec="seconds"),
        command=command,
        scope="one host" if site.same_host else "two hosts",
        machine=site.facts(gpus),
        seconds=round(time.monotonic() - began, 1),
        rows=tuple(rows),
        cells=tuple(runner.cells),
    )


def rounds(counts: Mapping[Key, int], blocks: Mapping[Key, int] | int) -> Iterator[list[tuple[Key, int]]]:
    """How many samples each takes, round by round, until each has taken its count: in blocks, so that all alternate."""
    left = dict(counts)
    while left := {key: count for key, count in left.items() if count > 0}:
        most = {key: blocks if isinstance(blocks, int) else blocks[key] for key in left}
        yield [(key, min(most[key], count)) for key, count in left.items()]
        left = {key: count - most[key] for key, count in left.items()}


@dataclass(eq=False)
class Series:
    """The measurements of one row with tensors on one device."""

    row: Row
    device: Device
    team: Team | None = None
    took: dict[int, float] = field(default_factory=dict)
    """Seconds of the fastest recent sample, by bytes."""
    via: str | None = None
    """The lane that carried the last verified sample, if known."""

    def expected(self, size: int) -> float | None:
        """Estimated seconds of a sample of that size, from smaller sizes; None before the first."""
        if size in self.took or not self.took:
            return self.took.get(size)
        *before, last = sorted(self.took)
        # A small tensor's time is overhead; a large one's is an upper bound per byte.
        slope = min(_SLOWEST_BYTE, self.took[last] / last)
        if before:
            slope = max(0.0, self.took[last] - self.took[before[-1]]) / (last - before[-1])
        return self.took[last] + slope * max(0, size - last)

    def seconds(self, size: int) -> float:
        """Seconds of one sample at the last measurement; never 0."""
        return max(self.took.get(size, 0.0), 1e-6)


Job = tuple[Series, Case]


@dataclass
class Runner(ABC):
    """Takes the measurements of one run. ``cells`` is complete after ``run``."""

    options: Options
    site: Site
    place: Place
    report: Report
    start: Callable[[Row, Place, Shape], Team] = Team
    clock: Callable[[], float] = time.monotonic
    teams: list[Team] = field(default_factory=list)
    """All that were started."""
    cells: list[Cell] = field(default_factory=list)
    _patience_s: ClassVar[float]
    """Shortest timeout of one answer; slow samples get ten times their expected time."""

    def __post_init__(self) -> None:
        self._deadline = self.clock() + self.options.budget_s - _SHUTDOWN_S
        self._by_device = [
            [Series(row, device) for row in self.options.rows if device in row.devices]
            for device in self.options.devices
        ]
        self._jobs = [(one, case) for them in self._by_device for case in self.options.cases for one in them]
        self._todo: dict[Job, None] = dict.fromkeys(self._jobs)
        self._found: dict[Job, dict[str, Any] | str] = {}
        self._taken: dict[Job, list[Any]] = {}
        self._living: dict[tuple[str, Device, Shape], Team] = {}

    def run(self) -> None:
        """Take every measurement that fits into time and memory."""
        missing = OUT_OF_TIME
        try:
            self._run_blocks()
        except KeyboardInterrupt:
            missing = INTERRUPTED
            for job, taken in self._taken.items():
                self._note(job, self._figures(job[0], taken) or missing)
            if all(isinstance(found, str) for found in self._found.values()):
                raise
        for series, case in self._jobs:
            found = self._found.get((series, case), missing)
            known: Any = {"pattern": case.pattern, "variant": case.variant, "bytes": case.size, "unit": case.unit}
            known |= {"reason": found, "via": series.via} if isinstance(found, str) else found
            self.cells.append(Cell(row=series.row.name, device=series.device, **known))

    def _run_blocks(self) -> None:
        for job in self._jobs:
            if (reason := self._obstacle(*job)) is not None:
                self._note(job, reason)
        for them in self._by_device:
            for some, cases in self._blocks(them):
                self._block(some, cases)
                needed_yet = {self._key(*job) for job in self._todo}
                for key in [key for key in self._living if key not in needed_yet]:
                    self._living.pop(key).end("no case needs it", wait=True)
                for team in self._living.values() if cases[-1].size >= _LARGE else ():
                    team.drop(self._timeout())

    # --- what sizes and patterns differ in -----------------------------------------------------------------------

    @abstractmethod
    def _obstacle(self, series: Series, case: Case) -> str | None:
        """Why it cannot be measured; None if no reason is known."""

    @abstractmethod
    def _blocks(self, them: Sequence[Series]) -> Iterator[tuple[Sequence[Series], Sequence[Case]]]:
        """What to measure together, in this order."""

    @abstractmethod
    def _counts(self, them: Sequence[Series], cases: Sequence[Case], allotted: float) -> tuple[dict[Series, int], int]:
        """How much to take of each, in about that time, and how much of it in one turn."""

    @abstractmethod
    def _take(self, series: Series, case: Case, count: int) -> list[Any]:
        """Measure. Raises Failed."""

    @abstractmethod
    def _figures(self, series: Series, taken: Sequence[Any]) -> dict[str, Any]:
        """The figures of a cell; empty if too little was taken."""

    # --- a block -------------------------------------------------------------------------------------------------

    def _block(self, them: Sequence[Series], cases: Sequence[Case]) -> None:
        self._taken = {(one, case): [] for one in them for case in cases if (one, case) in self._todo}
        self._open(them, cases)
        allotted = self._left() * len(self._taken) / max(1, len(self._todo))
        stop_at = self.clock() + allotted
        able = [one for one in them if any((one, case) in self._todo for case in cases)]
        counts, most = self._counts(able, cases, allotted)
        took = 0.0
        for due in rounds(counts, {one: count if one.row.own_turn else most for one, count in counts.items()}):
            began = self.clock()
            if took and began + took > stop_at:
                break
            for one, count in due:
                self._report(one, cases[0])
                self._visit(one, cases, count)
            took = self.clock() - began
        for (one, case), taken in self._taken.items():
            why = (one.team.failed if one.team is not None else None) or OUT_OF_TIME
            self._note((one, case), self._figures(one, taken) or why)

    def _open(self, them: Sequence[Series], cases: Sequence[Case]) -> None:
        """Connect the actors of each row; all that have to start do so at once."""
        wanted = [one for one in them if any((one, case) in self._todo for case in cases) and self._left() > 0]
        fresh = []
        for one in wanted:
            key = self._key(one, cases[0])
            if key not in self._living or self._living[key].failed:
                place = self.place if one.device == "cuda" else self.place._replace(gpus=())
                self._living[key] = self.start(one.row, place, shape(one.row, cases[0]))
                fresh.append(self._living[key])
            one.team = self._living[key]
        self._await(fresh)
        for one in wanted:
            if one.team is not None and one.team.failed is None:
                try:
                    one.team.open(one.row, min(self._timeout(), self._left()))
                except Failed as failure:
                    self._fail(one, cases, failure)

    def _visit(self, series: Series, cases: Sequence[Case], count: int) -> None:
        """Measure so much of each case in one turn. A case that fails is not tried again."""
        team, due = series.team, [case for case in cases if (series, case) in self._todo]
        if team is None or team.failed or self._left() <= 0 or not due:
            return
        try:
            with self._turn(team, series.row):
                for case in due:
                    if self._left() <= 0:
                        break
                    try:
                        self._taken[series, case] += self._take(series, case, count)
                    except Failed as failure:
                        self._note((series, case), str(failure) if self._left() > 0 else OUT_OF_TIME)
                        if isinstance(failure, Stuck) or not case.pattern:
                            raise
        except Failed as failure:
            self._fail(series, due, failure)

    def _fail(self, series: Series, cases: Sequence[Case], failure: Failed) -> None:
        """Give up these cases, of sizes all larger ones too; and the actors if one of them may still be busy."""
        for job in [job for job in self._todo if job[0] is series and not self._taken.get(job)]:
            if job[1] in cases or not job[1].pattern:
                self._note(job, str(failure))
        if isinstance(failure, Stuck) and series.team is not None:
            whose = f"{series.row.name} with {series.device} tensors"
            series.team.end(f"its actors were killed because {whose} failed: {failure}")

    def _note(self, job: Job, found: dict[str, Any] | str) -> None:
        """Record figures, or the reason why there are none. The first record counts."""
        self._found.setdefault(job, found)
        self._todo.pop(job, None)

    def _await(self, teams: Sequence[Team]) -> None:
        """Wait for actors to start, outside the budget; those of teams that fail are ended."""
        began = self.clock()
        self.teams += teams
        limit = began + _START_S + _START_EACH_S * sum(team.shape.members for team in teams)
        waiting = list(teams)
        while waiting and self.clock() < limit:
            more = f" and {len(waiting) - 5} more" if len(waiting) > 5 else ""
            names = ", ".join(team.name for team in waiting[:5]) + more
            up = f"{len(teams) - len(waiting)} of {len(teams)} rows"
            self.report(f"starting actors: those of {up} are up; waiting for {names}", self._done)
            waiting = [team for number, team in enumerate(waiting) if team.starts(0.0 if number else 1.0)]
        for team in waiting:
            team.failed = f"Ray did not start its actors within {limit - began:.0f} s"
        for team in teams:
            if team.failed is not None:
                team.end(team.failed)  # one that still starts would disturb the others
        self._deadline += self.clock() - began

    @contextmanager
    def _turn(self, team: Team, row: Row) -> Iterator[None]:
        if not row.own_turn:
            yield
            return
        team.resume(row, self._timeout())
        stuck = False
        try:
            yield
        except Stuck:
            stuck = True
            raise
        finally:
            if not stuck:
                team.pause(row, self._timeout())

    @staticmethod
    def _key(series: Series, case: Case) -> tuple[str, Device, Shape]:
        return series.row.actors, series.device, shape(series.row, case)

    def _timeout(self, expected_s: float = 0.0) -> float:
        """Longest time to wait for an answer."""
        return min(max(self._patience_s, 10 * expected_s), self._left() + 2.0)

    def _left(self) -> float:
        return max(0.0, self._deadline - self.clock())

    @property
    def _done(self) -> float:
        return 1 - len(self._todo) / len(self._jobs)

    def _report(self, series: Series, case: Case) -> None:
        self.report(f"{series.device}, {case.pattern or case.label}: {series.row.name}", self._done)


class SizesRunner(Runner):
    """Counts samples of sizes; a row that fails keeps its earlier figures."""

    _patience_s = 15.0
    _gpu_free: int | None = None

    def _obstacle(self, series: Series, case: Case) -> str | None:
        known = obstacle(series.row, series.device, self.site)
        return known or size_obstacle(series.row, series.device, case.size, self._limits)

    @property
    def _limits(self) -> MemoryLimits:
        return MemoryLimits.of(self.site, self._gpu_free)

    def _blocks(self, them: Sequence[Series]) -> Iterator[tuple[Sequence[Series], Sequence[Case]]]:
        apart = list(self.options.cases)
        self._open(them, apart[:1])
        free = [ready.gpu_free for team in self._living.values() for ready in team.ready if ready.gpu]
        self._gpu_free = min(free, default=None)
        while apart and self._fits_together(them, apart[0]):
            yield them, [apart.pop(0)]
        # Fastest rows first, so that limited time covers most of them.
        for series in sorted(them, key=lambda series: series.expected(apart[0].size) or 0.0) if apart else ():
            for case in apart:
                yield [series], [case]

    def _fits_together(self, them: Sequence[Series], case: Case) -> bool:
        each = [needed(one.row, one.device, case.size) for one in them
                if (one, case) in self._todo and not self._obstacle(one, case)]  # fmt: skip
        host, gpu = sum(host for host, _ in each), sum(gpu for _, gpu in each)
        return host <= self._limits.host * _SHARED_MEMORY and gpu <= self._limits.gpu * _SHARED_MEMORY

    def _counts(self, them: Sequence[Series], cases: Sequence[Case], allotted: float) -> tuple[dict[Series, int], int]:
        """The useful maximum for each, or as many as fit into the time."""
        (case,) = cases
        of_most = 0.3 if self.options.budget_s <= 60 else 1.0
        most = max(FEWEST, round(next(n for up_to, n in _REPEATS if case.size <= up_to) * of_most))
        each = {one: one.seconds(case.size) for one in them if self._warm_up(one, case)}
        share = allotted / max(1, len(each))
        spare = sum(max(0.0, share - most * one) for one in each.values())
        share += spare / max(1, sum(most * one > share for one in each.values()))
        counts = {}
        for series, one in each.items():
            count = min(most, int(share / one))
            if count < FEWEST and FEWEST * one > self._left() * self._time_share():
                self._note((series, case), f"a sample takes about {one:.2g} s: {OUT_OF_TIME}")
            else:
                counts[series] = max(FEWEST, count)
        return counts, BLOCK

    def _warm_up(self, series: Series, case: Case) -> bool:
        """Verify one uncounted sample and take another. Returns False, and notes the reason, if there is no figure."""
        self._report(series, case)
        team, row, series.via = series.team, series.row, None
        reason = self._obstacle(series, case) or self._too_long(series, case)
        if reason is None and (team is None or team.failed):
            reason = team.failed if team is not None else OUT_OF_TIME
        try:
            if reason is None and team is not None:
                with self._turn(team, row):
                    timeout_s = self._timeout(series.expected(case.size) or 0.0)
                    series.via, series.took[case.size] = team.check(row, series.device, case, timeout_s)
                    if series.via is not None and row.carries and series.via not in row.carries:
                        reason = f"uses {series.via} at this size"
                    # Large sizes can be much slower than extrapolated.
                    reason = reason or self._too_long(series, case)
                    if reason is None:
                        self._sample(series, case, Window(0.0, fewest=1, lead=0))
        except Failed as failure:
            self._fail(series, cases=[case], failure=failure)
        if reason is not None:
            self._note((series, case), reason)
        return (series, case) in self._todo

    def _take(self, series: Series, case: Case, count: int) -> list[float]:
        window = Window(0.0, fewest=count, lead=lead_in(series.seconds(case.size)))
        if series.seconds(case.size) * (window.fewest + window.lead) > self._left():
            return []
        return self._sample(series, case, window)

    def _sample(self, series: Series, case: Case, window: Window) -> list[float]:
        assert series.team is not None
        timeout_s = self._timeout((series.expected(case.size) or 0.0) * (window.fewest + window.lead))
        (sample,) = series.team.measure(series.row, series.device, case, window, timeout_s)
        series.took[case.size] = min(sample.seconds)
        return sample.seconds

    def _figures(self, series: Series, taken: Sequence[Any]) -> dict[str, Any]:
        if len(taken) < FEWEST:
            return {}
        low, middle, high = (each * 1e3 for each in quantiles(taken, n=4, method="inclusive"))
        return {"median": middle, "low": low, "high": high, "samples": len(taken), "via": series.via}

    def _too_long(self, series: Series, case: Case) -> str | None:
        """Whether verification, warm-up and the fewest samples exceed the time, extrapolated from smaller sizes."""
        if self._left() <= 0:
            return OUT_OF_TIME
        expected = series.expected(case.size)
        if expected is not None and expected * (FEWEST + 2) > self._left() * self._time_share():
            return f"a sample may take {expected:.2g} s, and the time budget leaves {self._left():.0f} s"
        return None

    def _time_share(self) -> float:
        """Share of the remaining time that one row may use at one size."""
        return max(_TIME_SHARE, _LAST_TIME_SHARE / max(1, len(self._todo)))


def lead_in(seconds: float) -> int:
    """Number of uncounted samples at the start of a block, given the seconds of one sample."""
    return min(_LEAD_IN_MOST, max(1, round(_LEAD_IN_TOTAL_S / seconds))) if seconds < _LEAD_IN_S else 0


class PatternsRunner(Runner):
    """Measures windows of time in patterns of use."""

    _patience_s = 60.0

    def _obstacle(self, series: Series, case: Case) -> str | None:
        usable = MemoryLimits.of(self.site, None).host
        known = case_obstacle(series.row, case, series.device, usable)
        return known or obstacle(series.row, series.device, self.site)

    def _blocks(self, them: Sequence[Series]) -> Iterator[tuple[Sequence[Series], Sequence[Case]]]:
        groups = groupby(self.options.cases, lambda case: (case.pattern, case.members, case.concurrency))
        return ((them, list(block)) for _, block in groups)

    def _counts(self, them: Sequence[Series], cases: Sequence[Case], allotted: float) -> tuple[dict[Series, int], int]:
        return dict.fromkeys(them, self.options.repeats), 1

    def _take(self, series: Series, case: Case, count: int) -> list[Turn]:
        assert series.team is not None
        window_s = self.options.window_s
        return [series.team.turn(series.row, series.device, case, window_s, self._timeout()) for _ in range(count)]

    def _figures(self, series: Series, taken: Sequence[Any]) -> dict[str, Any]:
        return summarize(taken) if taken else {}


def summarize(turns: Sequence[Turn]) -> dict[str, Any]:
    """The figures of a cell."""
    values, samples = [turn.value for turn in turns], [sample for turn in turns for sample in turn.samples]
    figures: dict[str, Any] = {
        "median": median(values),
        "low": min(values),
        "high": max(values),
        "p95": quantiles(samples, n=20, method="inclusive")[-1] if len(samples) > 1 else None,
        "repeats": len(turns),
        "samples": len(samples),
    }
    for side, name in enumerate(("caller", "callee")):
        for what, of in (("switches", [t.switches[side] for t in turns]), ("cpu_ms", [t.cpu_ms[side] for t in turns])):
            known = [value for value in of if value is not None]
            figures[f"{name}_{what}"] = median(known) if known else None
    return figures
