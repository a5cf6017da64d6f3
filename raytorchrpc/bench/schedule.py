"""A whole run: the order of samples and turns, within the limits of memory and time.

Of sizes, samples are counted. Sizes ascend. At sizes that fit into memory for all rows at once, rows alternate in
blocks: drift of the machine affects all of them, and each link is as warm as in its own loop. Larger sizes are measured
row by row, and each row frees its memory before the next one's turn. Of patterns, windows of time are measured: rows
take turns with the cases for which they need the same actors, several times over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import groupby
from statistics import median, quantiles
from typing import Any, TypeVar

from raytorchrpc import __version__
from raytorchrpc.bench.actors import Window
from raytorchrpc.bench.cases import KIND_TEXT, Case, Options, Row, Shape, case_obstacle, shape
from raytorchrpc.bench.links import Failed, Stuck
from raytorchrpc.bench.results import Cell, Device, RowResult, Run
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
#: Shortest timeout of one answer, in seconds; slow samples get ten times their expected time.
_TIMEOUT_S = 15.0
#: Share of the remaining time that a slow row may use at one size; the last rows may use more.
_TIME_SHARE, _LAST_TIME_SHARE = 0.2, 0.8
#: Most seconds per byte assumed for a link of which only one size has been measured.
_SLOWEST_BYTE = 1e-8
#: Longest time of one measurement of a pattern, and of connecting the actors of one row (seconds).
_TURN_S = 60.0
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

    Blocks until the actors are up, and then for about ``options.budget_s`` at most. Raises ConfigurationError for a
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
            rows.append(RowResult(row=row.name, device=device, kind=KIND_TEXT[row.kind], **known))
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


@dataclass
class Runner:
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

    def __post_init__(self) -> None:
        self._deadline = self.clock() + self.options.budget_s - _SHUTDOWN_S
        self._done = 0.0

    def run(self) -> None:
        """Take every measurement that fits into time and memory."""
        raise NotImplementedError

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
    def _turn(self, team: Team, row: Row, timeout_s: float) -> Iterator[None]:
        if not row.own_turn:
            yield
            return
        team.resume(row, timeout_s)
        stuck = False
        try:
            yield
        except Stuck:
            stuck = True
            raise
        finally:
            if not stuck:
                team.pause(row, timeout_s)

    def _left(self) -> float:
        return max(0.0, self._deadline - self.clock())

    def _record(self, row: Row, device: Device, case: Case, figures: dict[str, Any], reason: str | None) -> None:
        """Record the figures, or without them the reason."""
        known: Any = {"pattern": case.pattern, "variant": case.variant, "bytes": case.size, "unit": case.unit}
        why = None if "median" in figures else reason or "unknown"
        self.cells.append(Cell(row=row.name, device=device, **known, **figures, reason=why))


# --- sizes -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Series:
    """The samples of one row with tensors on one device."""

    row: Row
    device: Device
    team: Team | None = None
    reason: str | None = None
    """Why it ended, or did not start."""
    took: dict[int, float] = field(default_factory=dict)
    """Seconds of the fastest recent sample, by bytes."""
    via: str | None = None
    """The lane that carried the last verified sample, if known."""

    @property
    def alive(self) -> bool:
        """True while samples can be taken."""
        return self.reason is None and self.team is not None and self.team.failed is None

    def actors(self) -> Team:
        """The team that takes the samples. Raises Failed if it cannot."""
        if self.team is None or self.team.failed is not None:
            raise Failed(self.team.failed or "" if self.team else "the row has no actors")
        return self.team

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


class SizesRunner(Runner):
    """Counts samples of sizes; a row that fails keeps its earlier figures."""

    def run(self) -> None:
        devices, rows = self.options.devices, self.options.rows
        pairs = [(row, device) for device in devices for row in rows if device in row.devices]
        self._all = [Series(row, device, reason=obstacle(row, device, self.site)) for row, device in pairs]
        self._start_all()
        gpu_free = min((ready.gpu_free for team in self.teams for ready in team.ready if ready.gpu), default=0)
        self._memory = MemoryLimits.of(self.site, gpu_free)
        self._time_share = _TIME_SHARE
        self._recorded: set[tuple[Series, Case]] = set()
        together = [case for case in self.options.cases if self._fits_together(case)]
        apart = [case for case in self.options.cases if case not in together]
        for number, case in enumerate(together):
            self._done = number / len(self.options.cases)
            # Later sizes are larger, but slow links, which dominate their time, may be skipped.
            self._measure(self._all, case, self._left() / (len(together) - number + 2 * len(apart)))
            if case.size >= 50_000_000:
                for team in {series.team for series in self._all if series.alive}:
                    if team is not None:
                        team.drop(self._timeout())
        # Fastest rows first, so that limited time covers most of them.
        waiting = sorted(self._all, key=lambda series: series.expected(apart[0].size) or 0.0) if apart else []
        while waiting:
            series = waiting.pop(0)
            for index, case in enumerate(apart):
                left = (1 + sum(other.alive for other in waiting)) * (len(apart) - index)
                self._time_share = max(_TIME_SHARE, _LAST_TIME_SHARE / left)
                self._done = 1 - left / (len(self._all) * len(self.options.cases))
                self._measure([series], case, self._left() / left)
            if series.team is not None and series.team.failed is None:
                if any(other.team is series.team for other in waiting):
                    series.team.drop(self._timeout())
                else:  # no other row uses its memory
                    series.team.end("its turn has ended")
        for series in self._all:
            for case in self.options.cases:
                self._note(series, case, reason=series.reason or OUT_OF_TIME)

    def _start_all(self) -> None:
        """Start the actors of every series that can run."""
        able = [series for series in self._all if series.reason is None]
        with_gpu = {series.row.actors for series in able if series.device == "cuda"}
        teams: dict[str, Team] = {}
        for series in able:
            if (name := series.row.actors) not in teams:
                place = self.place if name in with_gpu else self.place._replace(gpus=())
                teams[name] = self.start(series.row, place, shape(series.row, Case()))
            series.team = teams[name]
        self._await([*teams.values()])
        for series in able:
            series.reason = series.team.failed if series.team is not None else None

    def _fits_together(self, case: Case) -> bool:
        able = [series for series in self._all if series.alive and not self._too_big(series, case)]
        each = [needed(series.row, series.device, case.size) for series in able]
        host, gpu = sum(host for host, _ in each), sum(gpu for _, gpu in each)
        return host <= self._memory.host * _SHARED_MEMORY and gpu <= self._memory.gpu * _SHARED_MEMORY

    def _measure(self, them: Sequence[Series], case: Case, allotted: float) -> None:
        """Measure these series at a size, in turns, in about that time."""
        warm = []
        for series in them:
            self.report(f"{case.label}: warming up {series.row.name}", self._done)
            if self._warm_up(series, case):
                warm.append(series)
        counts = self._counts(warm, case, allotted)
        seconds: dict[Series, list[float]] = {series: [] for series in counts}
        blocks = {series: count if series.row.own_turn else BLOCK for series, count in counts.items()}
        for due in rounds(counts, blocks):
            for series, count in due:
                if series.alive:
                    self.report(f"{case.label}: {series.row.name}", self._done)
                    seconds[series] += self._sample(series, case, count)
        for series, taken in seconds.items():
            self._note(series, case, taken)

    def _counts(self, able: Sequence[Series], case: Case, allotted: float) -> dict[Series, int]:
        """The number of samples for each series: the useful maximum, or as many as fit into the time."""
        of_most = 0.3 if self.options.budget_s <= 60 else 1.0
        most = max(FEWEST, round(next(n for up_to, n in _REPEATS if case.size <= up_to) * of_most))
        each = {series: series.seconds(case.size) for series in able}
        share = allotted / max(1, len(each))
        spare = sum(max(0.0, share - most * one) for one in each.values())
        share += spare / max(1, sum(most * one > share for one in each.values()))
        counts = {}
        for series, one in each.items():
            count = min(most, int(share / one))
            if count < FEWEST and FEWEST * one > self._left() * self._time_share:
                self._note(series, case, reason=f"a sample takes about {one:.2g} s: {OUT_OF_TIME}")
            else:
                counts[series] = max(FEWEST, count)
        return counts

    def _warm_up(self, series: Series, case: Case) -> bool:
        """Take two uncounted samples and verify the first. Returns False, and notes the reason, if the row ends."""
        series.via = None
        reason = series.reason or self._too_big(series, case) or self._too_long(series, case)
        try:
            if reason is None:
                series.actors().open(series.row, self._timeout())
                reason = self._verify(series, case)
        except Failed as failure:
            self._fail(series, case, failure)
            return False
        if reason is not None:
            self._note(series, case, reason=reason)
        return reason is None

    def _verify(self, series: Series, case: Case) -> str | None:
        """Verify one sample and take another; returns why the row has no figure at this size, if so."""
        team, row = series.actors(), series.row
        with self._turn(team, row, self._timeout()):
            timeout_s = self._timeout(series.expected(case.size))
            series.via, series.took[case.size] = team.check(row, series.device, case, timeout_s)
            if series.via is not None and row.carries and series.via not in row.carries:
                return f"uses {series.via} at this size"
            if reason := self._too_long(series, case):  # large sizes can be much slower than extrapolated
                return reason
            self._take(series, case, Window(0.0, fewest=1, lead=0), self._timeout(series.expected(case.size)))
        return None

    def _take(self, series: Series, case: Case, window: Window, timeout_s: float) -> list[float]:
        (sample,) = series.actors().measure(series.row, series.device, case, window, timeout_s)
        series.took[case.size] = min(sample.seconds)
        return sample.seconds

    def _sample(self, series: Series, case: Case, count: int) -> list[float]:
        try:
            with self._turn(series.actors(), series.row, self._timeout()):
                lead = lead_in(series.seconds(case.size))
                expected = series.seconds(case.size) * (count + lead)
                if expected > self._left():
                    return []
                return self._take(series, case, Window(0.0, fewest=count, lead=lead), self._timeout(expected))
        except Failed as failure:
            self._fail(series, case, failure)
            return []

    def _fail(self, series: Series, case: Case, failure: Failed) -> None:
        """End the row, and its actors if one may still be busy or no other row needs them."""
        series.reason = reason = str(failure)
        self._note(series, case, reason=reason)
        team = series.team
        needed_yet = any(other.team is team and other.alive for other in self._all)
        if team is not None and (isinstance(failure, Stuck) or not needed_yet):
            team.end(f"its actors were killed because {series.row.name} with {series.device} tensors failed: {reason}")

    def _too_big(self, series: Series, case: Case) -> str | None:
        return size_obstacle(series.row, series.device, case.size, self._memory)

    def _too_long(self, series: Series, case: Case) -> str | None:
        """Whether verification, warm-up and the fewest samples exceed the time, extrapolated from smaller sizes."""
        if self._left() <= 0:
            return OUT_OF_TIME
        expected = series.expected(case.size)
        if expected is not None and expected * (FEWEST + 2) > self._left() * self._time_share:
            return f"a sample may take {expected:.2g} s, and the time budget leaves {self._left():.0f} s"
        return None

    def _timeout(self, expected: float | None = None) -> float:
        return min(max(_TIMEOUT_S, 10 * (expected or 0.0)), self._left() + 2.0)

    def _note(self, series: Series, case: Case, seconds: Sequence[float] = (), reason: str = OUT_OF_TIME) -> None:
        """Record a series at a size. The first record counts."""
        if (series, case) in self._recorded:
            return
        self._recorded.add((series, case))
        figures: dict[str, Any] = {"via": series.via}
        if len(seconds) >= FEWEST:
            low, middle, high = (each * 1e3 for each in quantiles(seconds, n=4, method="inclusive"))
            figures |= {"median": middle, "low": low, "high": high, "samples": len(seconds)}
        self._record(series.row, series.device, case, figures, reason)


def lead_in(seconds: float) -> int:
    """Number of uncounted samples at the start of a block, given the seconds of one sample."""
    return min(_LEAD_IN_MOST, max(1, round(_LEAD_IN_TOTAL_S / seconds))) if seconds < _LEAD_IN_S else 0


# --- patterns --------------------------------------------------------------------------------------------------------


class PatternsRunner(Runner):
    """Measures windows of time in patterns of use."""

    def run(self) -> None:
        """Measure block by block. A block is a pattern's cases for which the rows need the same actors."""
        self._living: dict[tuple[str, Device, Shape], Team] = {}
        left = every = len(self.options.cases) * len(self.options.devices)
        for device in self.options.devices:
            groups = groupby(self.options.cases, lambda case: (case.pattern, case.members, case.concurrency))
            blocks = [list(block) for _, block in groups]
            for number, block in enumerate(blocks):
                self._block(block, device, self.clock() + self._left() * len(block) / left)
                left -= len(block)
                self._done = 1 - left / every
                later = {self._key(row, case, device) for later in blocks[number + 1 :] for case in later
                         for row in self.options.rows if not self._obstacle(row, case, device)}  # fmt: skip
                for key in [key for key in self._living if key not in later]:
                    self._living.pop(key).end("no case needs it", wait=True)

    @staticmethod
    def _key(row: Row, case: Case, device: Device) -> tuple[str, Device, Shape]:
        return row.actors, device, shape(row, case)

    def _obstacle(self, row: Row, case: Case, device: Device) -> str | None:
        usable = MemoryLimits.of(self.site, 0).host
        return case_obstacle(row, case, device, len(self.place.gpus), usable)

    def _block(self, block: Sequence[Case], device: Device, stop_at: float) -> None:
        turns = {(row, case): list[Turn]() for case in block for row in self.options.rows}
        found = {key: self._obstacle(*key, device) for key in turns}
        reasons = self._reasons = {key: reason for key, reason in found.items() if reason is not None}
        able = {row: [case for case in block if (row, case) not in reasons] for row in self.options.rows}
        teams = self._open({row: cases for row, cases in able.items() if cases}, device)
        took = 0.0
        for due in rounds(dict.fromkeys(teams, self.options.repeats), 1):
            began = self.clock()
            if took and began + took > stop_at:
                break
            for row, _ in due:
                self.report(f"{device}, {block[0].pattern}: {row.name}", self._done)
                for case, turn in self._measure(teams[row], row, able[row], device):
                    turns[row, case].append(turn)
            took = self.clock() - began
        for (row, case), some in turns.items():
            reason = reasons.get((row, case))
            if not some and reason is None:
                reason = (teams[row].failed if row in teams else None) or OUT_OF_TIME
            self._record(row, device, case, {} if reason else summarize(some), reason)

    def _open(self, wanted: Mapping[Row, Sequence[Case]], device: Device) -> dict[Row, Team]:
        """The connected actors of each row; all start at once."""
        teams: dict[Row, Team] = {}
        if self._left() <= 0:
            return teams
        place, fresh = self.place if device == "cuda" else self.place._replace(gpus=()), []
        for row, cases in wanted.items():
            key = self._key(row, cases[0], device)
            if key not in self._living or self._living[key].failed:
                self._living[key] = self.start(row, place, shape(row, cases[0]))
                fresh.append(self._living[key])
            teams[row] = self._living[key]
        self._await(fresh)
        for row, team in teams.items():
            if team.failed is None:
                try:
                    team.open(row, min(_TURN_S, self._left()))
                except Failed as failure:
                    team.end(str(failure))
        return teams

    def _measure(self, team: Team, row: Row, cases: Sequence[Case], device: Device) -> Iterator[tuple[Case, Turn]]:
        """Measure each case of one row once. A case that fails is not tried again."""
        due = [case for case in cases if (row, case) not in self._reasons]
        if team.failed or self._left() <= 0 or not due:
            return
        try:
            with self._turn(team, row, self._timeout()):
                for case in due:
                    if self._left() <= 0:
                        break
                    try:
                        yield case, team.turn(row, device, case, self.options.window_s, self._timeout())
                    except Failed as failure:
                        self._reasons[row, case] = str(failure) if self._left() > 0 else OUT_OF_TIME
                        if isinstance(failure, Stuck):
                            raise
        except Failed as failure:
            team.end(str(failure))

    def _timeout(self) -> float:
        return min(_TURN_S, self._left() + 2.0)


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
