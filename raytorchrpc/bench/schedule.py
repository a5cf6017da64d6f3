"""The order of samples: warm-up, turns and repeats by size, within the limits of memory and time.

Sizes ascend. At sizes that fit into memory for all rows at once, rows alternate in blocks: drift of the machine affects
all of them, and each transport is as warm as in its own loop. Larger sizes are measured row by row, and each row frees
its memory before the next one's turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

from raytorchrpc.bench.options import Options, show_size
from raytorchrpc.bench.pairs import Failed, Series, Stuck, open_row
from raytorchrpc.bench.results import Cell
from raytorchrpc.bench.site import MemoryLimits, Site, needed, size_obstacle

#: Samples of one row per turn.
BLOCK = 10
#: Fewer samples give no figure.
FEWEST = 3
#: (largest size in bytes, most samples).
_REPEATS = ((2_000_000, 100), (50_000_000, 30), (math.inf, 10))
#: Blocks of samples shorter than this begin with uncounted ones, because other rows displaced the caches.
_LEAD_IN_S = 0.02
#: Their approximate total time and largest number: a small call's first four take up to ten times as long.
_LEAD_IN_TOTAL_S = 0.005
_LEAD_IN_MOST = 10
#: Share of memory that rows may use together while they alternate.
_SHARED_MEMORY = 0.5
#: Shortest timeout of one answer, in seconds; slow samples get ten times their expected time.
_TIMEOUT_S = 15.0
#: Share of the remaining time that a slow row may use at one size; the last rows may use more.
_TIME_SHARE = 0.2
_LAST_TIME_SHARE = 0.8

OUT_OF_TIME = "the time budget is used up"

Report = Callable[[str, float], None]
"""``report(current step, share of the work that is done)``."""


@dataclass
class Sampler:
    """Takes the samples of one run. ``cells`` is complete after ``run``."""

    options: Options
    all_series: Sequence[Series]
    site: Site
    memory: MemoryLimits
    deadline: float
    """By time.monotonic(); no sample starts that is expected to end later."""
    report: Report
    _time_share: float = _TIME_SHARE
    _cells: dict[tuple[str, str, int], Cell] = field(default_factory=dict)

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(self._cells.values())

    def run(self) -> None:
        """Take every sample that fits into time and memory; a row that fails keeps its earlier figures."""
        together = [size for size in self.options.sizes if self._fits_together(size)]
        apart = [size for size in self.options.sizes if size not in together]
        for number, size in enumerate(together):
            # Later sizes are larger, but slow transports, which dominate their time, may be skipped.
            self._in_turns(size, self._left() / (len(together) - number + 2 * len(apart)), number)
            if size >= 50_000_000:
                for series in {series.pair: series for series in self.all_series if series.alive}.values():
                    self._drop(series)
        self._row_by_row(apart, len(together))
        for series in self.all_series:
            for size in self.options.sizes:
                self._record(series, size, reason=series.reason or OUT_OF_TIME)

    # --- all rows at one size ------------------------------------------------------------------------------------

    def _fits_together(self, size: int) -> bool:
        able = [series for series in self.all_series if series.alive and not self._too_big(series, size)]
        each = [needed(series.row, series.device, size) for series in able]
        host, gpu = sum(host for host, _ in each), sum(gpu for _, gpu in each)
        return host <= self.memory.host * _SHARED_MEMORY and gpu <= self.memory.gpu * _SHARED_MEMORY

    def _in_turns(self, size: int, allotted: float, number: int) -> None:
        warm = []
        for series in self.all_series:
            self._progress(f"{show_size(size)}: warming up {series.row.name}", number)
            if self._warm_up(series, size):
                warm.append(series)
        counts = self._counts(warm, size, allotted)
        seconds: dict[Series, list[float]] = {series: [] for series in counts}
        blocks = {series: count if series.row.own_turn else min(BLOCK, count) for series, count in counts.items()}
        rounds = max((math.ceil(count / blocks[series]) for series, count in counts.items()), default=0)
        for turn in range(rounds):
            for series, count in counts.items():
                due = min(blocks[series], count - turn * blocks[series])
                if due > 0 and series.alive:
                    self._progress(f"{show_size(size)}: {series.row.name}", number + (turn + 1) / (rounds + 1))
                    seconds[series] += self._sample(series, size, due)
        for series, taken in seconds.items():
            self._record(series, size, taken, via=series.via)

    def _counts(self, all_series: Sequence[Series], size: int, allotted: float) -> dict[Series, int]:
        """The number of samples for each series: the useful maximum, or as many as fit into the time."""
        of_most = 0.3 if self.options.budget_s <= 60 else 1.0
        most = max(FEWEST, round(next(n for up_to, n in _REPEATS if size <= up_to) * of_most))
        each = {series: _seconds(series, size) for series in all_series}
        share = allotted / max(1, len(each))
        spare = sum(max(0.0, share - most * one) for one in each.values())
        share += spare / max(1, sum(most * one > share for one in each.values()))
        counts = {}
        for series, one in each.items():
            count = min(most, int(share / one))
            if count < FEWEST and FEWEST * one > self._left() * self._time_share:
                self._record(series, size, reason=f"a sample takes about {one:.2g} s: {OUT_OF_TIME}")
            else:
                counts[series] = max(FEWEST, count)
        return counts

    # --- row by row ------------------------------------------------------------------------------------------------

    def _row_by_row(self, sizes: Sequence[int], number: int) -> None:
        """Fastest rows first, so that limited time covers most of them."""
        waiting = sorted(self.all_series, key=lambda series: series.expected(sizes[0]) or 0.0) if sizes else []
        steps = max(1, len(waiting) * len(sizes))
        while waiting:
            series = waiting.pop(0)
            for index, size in enumerate(sizes):
                done = steps - (len(waiting) + 1) * len(sizes) + index
                self._progress(f"{show_size(size)}: {series.row.name}", number + len(sizes) * done / steps)
                left = (1 + sum(other.alive for other in waiting)) * (len(sizes) - index)
                self._time_share = max(_TIME_SHARE, _LAST_TIME_SHARE / left)
                if not self._warm_up(series, size):
                    continue
                for count in self._counts([series], size, self._left() / left).values():
                    self._record(series, size, self._sample(series, size, count), via=series.via)
            if any(other.pair is series.pair for other in waiting):
                self._drop(series)
            elif series.pair is not None:  # no other row uses its memory
                series.pair.end("its turn has ended")

    # --- one row at one size ------------------------------------------------------------------------------------

    def _warm_up(self, series: Series, size: int) -> bool:
        """Take two uncounted samples and verify the first. Returns False, and records the reason, if the row ends."""
        series.via = None
        reason = series.reason or self._too_big(series, size) or self._too_long(series, size)
        try:
            if reason is None:
                open_row(series.actors(), series.row, self.site, self._timeout())
                reason = self._verify(series, size)
        except Failed as failure:
            self._fail(series, size, failure)
            return False
        if reason is not None:
            self._record(series, size, via=series.via, reason=reason)
        return reason is None

    def _verify(self, series: Series, size: int) -> str | None:
        """Verify one sample and take another; returns why the row has no figure at this size, if so."""
        with self._turn(series):
            series.via = series.check(size, self._timeout(series.expected(size)))
            if series.via is not None and series.row.carries and series.via not in series.row.carries:
                return f"uses {series.via} at this size"
            if reason := self._too_long(series, size):  # large sizes can be much slower than extrapolated
                return reason
            series.send(size, 1, self._timeout(series.expected(size)))
        return None

    def _sample(self, series: Series, size: int, count: int) -> list[float]:
        try:
            with self._turn(series):
                lead = lead_in(_seconds(series, size))
                expected = _seconds(series, size) * (count + lead)
                if expected > self._left():
                    return []
                return series.send(size, count + lead, self._timeout(expected))[lead:]
        except Failed as failure:
            self._fail(series, size, failure)
            return []

    @contextmanager
    def _turn(self, series: Series) -> Iterator[None]:
        if not series.row.own_turn:
            yield
            return
        series.actors().call("resume", self._timeout(), series.row.name)
        try:
            yield
        finally:
            series.actors().call("pause", self._timeout(), series.row.name)

    def _fail(self, series: Series, size: int, failure: Failed) -> None:
        """End the row, and its actors if one may still be busy or no other row needs them."""
        series.reason = reason = str(failure)
        self._record(series, size, reason=reason)
        pair = series.pair
        stuck = isinstance(failure, Stuck)
        if pair is not None and (stuck or not any(other.pair is pair and other.alive for other in self.all_series)):
            pair.end(f"its actors were killed because {series.row.name} with {series.device} tensors failed: {reason}")

    def _too_big(self, series: Series, size: int) -> str | None:
        return size_obstacle(series.row, series.device, size, self.memory)

    def _too_long(self, series: Series, size: int) -> str | None:
        """Whether verification, warm-up and the fewest samples exceed the time, extrapolated from smaller sizes."""
        if self._left() <= 0:
            return OUT_OF_TIME
        expected = series.expected(size)
        if expected is not None and expected * (FEWEST + 2) > self._left() * self._time_share:
            return f"a sample may take {expected:.2g} s, and the time budget leaves {self._left():.0f} s"
        return None

    def _left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _timeout(self, expected: float | None = None) -> float:
        return min(max(_TIMEOUT_S, 10 * (expected or 0.0)), self._left() + 2.0)

    def _drop(self, series: Series) -> None:
        with suppress(Failed):
            series.drop(self._timeout())

    # --- results -----------------------------------------------------------------------------------------

    def _record(
        self,
        series: Series,
        size: int,
        seconds: Sequence[float] = (),
        *,
        via: str | None = None,
        reason: str = OUT_OF_TIME,
    ) -> None:
        """Record the figures, or without enough samples the reason. The first record of a row and size counts."""
        figures: dict[str, Any] = {"via": via, "reason": reason}
        if len(seconds) >= FEWEST:
            low, median, high = quantiles(seconds, n=4, method="inclusive")
            figures |= {"median_s": median, "low_s": low, "high_s": high, "samples": len(seconds), "reason": None}
        name, device = series.row.name, series.device
        self._cells.setdefault((name, device, size), Cell(row=name, device=device, bytes=size, **figures))

    def _progress(self, text: str, steps: float) -> None:
        self.report(text, steps / max(1, len(self.options.sizes)))


def lead_in(seconds: float) -> int:
    """Number of uncounted samples at the start of a block, given the seconds of one sample."""
    return min(_LEAD_IN_MOST, max(1, round(_LEAD_IN_TOTAL_S / seconds))) if seconds < _LEAD_IN_S else 0


def _seconds(series: Series, size: int) -> float:
    """Seconds of one sample at the last measurement; never 0."""
    return max(series.took.get(size, 0.0), 1e-6)
