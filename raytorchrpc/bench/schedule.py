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
from statistics import quantiles

from raytorchrpc.bench.options import Options, show_size
from raytorchrpc.bench.pairs import Failed, Pair, Series, Stuck, open_row
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


class Sampler:
    """Takes the samples of one run. ``cells`` is complete after ``run``."""

    def __init__(
        self,
        options: Options,
        all_series: Sequence[Series],
        site: Site,
        memory: MemoryLimits,
        deadline: float,
        report: Report,
    ) -> None:
        """``deadline``: by time.monotonic(); no sample starts that is expected to end later."""
        self._options, self._series, self._site, self._memory = options, list(all_series), site, memory
        self._deadline, self._report = deadline, report
        self._repeats_share = 0.3 if options.budget_s <= 60 else 1.0
        self.cells: list[Cell] = []
        self._via: dict[int, str | None] = {}
        self._recorded: set[tuple[str, str, int]] = set()
        self._time_share = _TIME_SHARE

    def run(self) -> None:
        """Take every sample that fits into time and memory; a row that fails keeps its earlier figures."""
        together = [size for size in self._options.sizes if self._fits_together(size)]
        apart = [size for size in self._options.sizes if size not in together]
        for number, size in enumerate(together):
            # Later sizes are larger, but slow transports, which dominate their time, may be skipped.
            self._in_turns(size, self._left() / (len(together) - number + 2 * len(apart)), number)
            if size >= 50_000_000:
                self._drop_all()
        self._row_by_row(apart, len(together))
        for series in self._series:
            for size in self._options.sizes:
                self._record(series, size, reason=series.reason or OUT_OF_TIME)

    # --- all rows at one size ------------------------------------------------------------------------------------

    def _fits_together(self, size: int) -> bool:
        able = [series for series in self._series if series.alive and not self._too_big(series, size)]
        each = [needed(series.row, series.device, size) for series in able]
        host, gpu = sum(host for host, _ in each), sum(gpu for _, gpu in each)
        return host <= self._memory.host * _SHARED_MEMORY and gpu <= self._memory.gpu * _SHARED_MEMORY

    def _in_turns(self, size: int, allotted: float, number: int) -> None:
        warm: list[Series] = []
        for series in self._series:
            self._progress(f"{show_size(size)}: warming up {series.row.name}", number)
            if self._warm_up(series, size):
                warm.append(series)
        counts = self._counts(warm, size, allotted)
        seconds: dict[int, list[float]] = {id(series): [] for series in warm}
        via = {id(series): self._via.get(id(series)) for series in warm}
        rounds = max((math.ceil(n / self._block(n, t)) for t, n in counts), default=0)
        for turn in range(rounds):
            for series, count in counts:
                block = self._block(count, series)
                due = min(block, count - turn * block)
                if due > 0 and series.alive:
                    self._progress(f"{show_size(size)}: {series.row.name}", number + (turn + 1) / (rounds + 1))
                    self._sample(series, size, seconds[id(series)], due)
        for series, _ in counts:
            self._record(series, size, seconds[id(series)], via[id(series)])

    def _block(self, count: int, series: Series) -> int:
        return count if series.row.own_turn else min(BLOCK, count)

    def _counts(self, all_series: Sequence[Series], size: int, allotted: float) -> list[tuple[Series, int]]:
        """The number of samples for each series: the useful maximum, or as many as fit into the time."""
        most = max(FEWEST, round(next(n for up_to, n in _REPEATS if size <= up_to) * self._repeats_share))
        share = allotted / max(1, len(all_series))
        spare = sum(max(0.0, share - most * _seconds(series, size)) for series in all_series)
        slow = sum(most * _seconds(series, size) > share for series in all_series)
        share += spare / max(1, slow)
        counts = []
        for series in all_series:
            count = min(most, int(share / _seconds(series, size)))
            if count < FEWEST and FEWEST * _seconds(series, size) > self._left() * self._time_share:
                self._record(series, size, reason=f"a sample takes about {_seconds(series, size):.2g} s: {OUT_OF_TIME}")
                continue
            counts.append((series, max(FEWEST, count)))
        return counts

    # --- row by row ------------------------------------------------------------------------------------------------

    def _row_by_row(self, sizes: Sequence[int], number: int) -> None:
        """Fastest rows first, so that limited time covers most of them."""
        waiting = sorted(self._series, key=lambda series: series.expected(sizes[0]) or 0.0) if sizes else []
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
                for _, count in self._counts([series], size, self._left() / left):
                    seconds: list[float] = []
                    self._sample(series, size, seconds, count)
                    self._record(series, size, seconds, self._via.get(id(series)))
            if any(other.pair is series.pair for other in waiting):
                self._drop(series)
            elif series.pair is not None:  # no other row uses its memory
                series.pair.end("its turn has ended")

    # --- one row at one size ------------------------------------------------------------------------------------

    def _warm_up(self, series: Series, size: int) -> bool:
        """Take two uncounted samples and verify the first. Returns False, and records the reason, if the row ends."""
        if reason := series.reason or self._too_big(series, size) or self._too_long(series, size):
            self._record(series, size, reason=reason)
            return False
        pair = series.pair
        assert pair is not None  # a series without a pair has a reason
        try:
            if pair.failed is not None:
                raise Failed(pair.failed)
            open_row(pair, series.row, self._site, self._timeout(None))
            with self._turn(series):
                via = series.check(size, self._timeout(series.expected(size)))
                self._via[id(series)] = via
                if via is not None and series.row.carries and via not in series.row.carries:
                    self._record(series, size, reason=f"uses {via} at this size", via=via)
                    return False
                if reason := self._too_long(series, size):  # large sizes can be much slower than extrapolated
                    self._record(series, size, reason=reason)
                    return False
                series.send(size, 1, self._timeout(series.expected(size)))
        except Failed as failure:
            self._fail(series, size, failure)
            return False
        return True

    def _sample(self, series: Series, size: int, seconds: list[float], count: int) -> None:
        try:
            with self._turn(series):
                lead = lead_in(_seconds(series, size))
                expected = _seconds(series, size) * (count + lead)
                if expected > self._left():
                    return
                seconds += series.send(size, count + lead, self._timeout(expected))[lead:]
        except Failed as failure:
            self._fail(series, size, failure)

    @contextmanager
    def _turn(self, series: Series) -> Iterator[None]:
        if not series.row.own_turn:
            yield
            return
        series.resume(self._timeout(None))
        try:
            yield
        finally:
            series.pause(self._timeout(None))

    def _fail(self, series: Series, size: int, failure: Failed) -> None:
        """End the row, and its actors if one may still be busy or no other row needs them."""
        series.reason = reason = str(failure)
        self._record(series, size, reason=reason)
        pair = series.pair
        stuck = isinstance(failure, Stuck)
        if pair is not None and (stuck or not any(other.pair is pair and other.alive for other in self._series)):
            pair.end(f"its actors were killed because {series.row.name} with {series.device} tensors failed: {reason}")

    def _too_big(self, series: Series, size: int) -> str | None:
        return size_obstacle(series.row, series.device, size, self._memory)

    def _too_long(self, series: Series, size: int) -> str | None:
        """Whether verification, warm-up and the fewest samples exceed the time, extrapolated from smaller sizes."""
        if self._left() <= 0:
            return OUT_OF_TIME
        expected = series.expected(size)
        if expected is not None and expected * (FEWEST + 2) > self._left() * self._time_share:
            return f"a sample may take {expected:.2g} s, and the time budget leaves {self._left():.0f} s"
        return None

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _timeout(self, expected: float | None) -> float:
        return min(max(_TIMEOUT_S, 10 * (expected or 0.0)), self._left() + 2.0)

    def _drop(self, series: Series) -> None:
        with suppress(Failed):
            series.drop(self._timeout(None))

    def _drop_all(self) -> None:
        pairs: list[Pair] = []
        for series in self._series:
            if series.alive and series.pair is not None and series.pair not in pairs:
                pairs.append(series.pair)
                self._drop(series)

    # --- results -----------------------------------------------------------------------------------------

    def _record(
        self,
        series: Series,
        size: int,
        seconds: Sequence[float] = (),
        via: str | None = None,
        *,
        reason: str | None = None,
    ) -> None:
        key = (series.row.name, series.device, size)
        if key in self._recorded:
            return
        self._recorded.add(key)
        cell = Cell(row=series.row.name, device=series.device, bytes=size, via=via, reason=reason or OUT_OF_TIME)
        if len(seconds) >= FEWEST:
            low, median, high = quantiles(seconds, n=4, method="inclusive")
            figures = {"median_s": median, "low_s": low, "high_s": high, "samples": len(seconds)}
            cell = cell.model_copy(update={**figures, "reason": None})
        self.cells.append(cell)

    def _progress(self, text: str, steps: float) -> None:
        self._report(text, steps / max(1, len(self._options.sizes)))


def lead_in(seconds: float) -> int:
    """Number of uncounted samples at the start of a block, given the seconds of one sample."""
    return min(_LEAD_IN_MOST, max(1, round(_LEAD_IN_TOTAL_S / seconds))) if seconds < _LEAD_IN_S else 0


def _seconds(series: Series, size: int) -> float:
    """Seconds of one sample at the last measurement; never 0."""
    return max(series.took.get(size, 0.0), 1e-6)
