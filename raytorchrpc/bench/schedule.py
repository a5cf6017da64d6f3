"""Which sample when: warm-up, turns, repeats by size, within the memory and the time there is.

Sizes go up. At a size that all rows can hold at once, rows take turns in blocks, so that the machine's drift hits
all alike and each road is as warm as in a loop of its own. Larger sizes are measured row by row, and what a row
needed is given back before the next one's turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import quantiles

from raytorchrpc.bench.options import Options, show_size
from raytorchrpc.bench.pairs import Failed, Pair, Stuck, Track, open_row
from raytorchrpc.bench.results import Cell
from raytorchrpc.bench.site import Room, Site, needed, size_obstacle

#: Samples of one row before it is the next one's turn.
BLOCK = 10
#: Fewer give no figure.
FEWEST = 3
#: (bytes up to which, samples at most).
_REPEATS = ((2_000_000, 100), (50_000_000, 30), (math.inf, 10))
#: A block of samples shorter than this begins with some that do not count: after another row's turn caches are cold.
_LEAD_IN_S = 0.02
#: How long, about, and how many at most: a small call's first four are up to ten times slower than the rest.
_LEAD_IN_FOR_S = 0.005
_LEAD_IN_MOST = 10
#: Of the memory there is, what rows may hold together while they take turns.
_TOGETHER = 0.5
#: The least patience with one answer, in seconds; samples that are expected to take long get ten times that.
_PATIENCE_S = 15.0
#: Of the time that is left, what one row at one size may take if it is that slow; the last ones may take more.
_GREED = 0.2
_GREED_OF_LAST = 0.8

OUT_OF_TIME = "the time budget was used up"

Tell = Callable[[str, float], None]
"""``tell(what is going on, part of the work done)``."""


class Measuring:
    """One run's samples. ``cells`` grows as they come, and is complete after ``run``."""

    def __init__(
        self, options: Options, tracks: Sequence[Track], site: Site, room: Room, deadline: float, tell: Tell
    ) -> None:
        """``deadline``: of time.monotonic(); no sample begins that is known to end later."""
        self._options, self._tracks, self._site, self._room = options, list(tracks), site, room
        self._deadline, self._tell = deadline, tell
        self._repeats_part = 0.3 if options.budget_s <= 60 else 1.0
        self.cells: list[Cell] = []
        self._via: dict[int, str | None] = {}
        self._done: set[tuple[str, str, int]] = set()
        self._greed = _GREED

    def run(self) -> None:
        """Take every sample there is time and memory for; a row that fails keeps its figures so far."""
        together = [size for size in self._options.sizes if self._fits_together(size)]
        apart = [size for size in self._options.sizes if size not in together]
        for number, size in enumerate(together):
            # Later sizes are larger, but the time they take is dominated by roads that may be skipped.
            self._in_turns(size, self._left() / (len(together) - number + 2 * len(apart)), number)
            if size >= 50_000_000:
                self._drop_all()
        self._row_by_row(apart, len(together))
        for track in self._tracks:
            for size in self._options.sizes:
                self._note(track, size, reason=track.reason or OUT_OF_TIME)

    # --- all rows at one size ------------------------------------------------------------------------------------

    def _fits_together(self, size: int) -> bool:
        able = [track for track in self._tracks if track.alive and not self._too_big(track, size)]
        each = [needed(track.row, track.device, size) for track in able]
        host, gpu = sum(host for host, _ in each), sum(gpu for _, gpu in each)
        return host <= self._room.host * _TOGETHER and gpu <= self._room.gpu * _TOGETHER

    def _in_turns(self, size: int, allotted: float, number: int) -> None:
        warm: list[Track] = []
        for track in self._tracks:
            self._say(f"{show_size(size)}: warming up {track.row.name}", number)
            if self._warm_up(track, size):
                warm.append(track)
        counts = self._counts(warm, size, allotted)
        seconds: dict[int, list[float]] = {id(track): [] for track in warm}
        via = {id(track): self._via.get(id(track)) for track in warm}
        rounds = max((math.ceil(n / self._block(n, t)) for t, n in counts), default=0)
        for turn in range(rounds):
            for track, count in counts:
                block = self._block(count, track)
                due = min(block, count - turn * block)
                if due > 0 and track.alive:
                    self._say(f"{show_size(size)}: {track.row.name}", number + (turn + 1) / (rounds + 1))
                    self._guarded(track, size, seconds[id(track)], due)
        for track, _ in counts:
            self._note(track, size, seconds[id(track)], via[id(track)])

    def _block(self, count: int, track: Track) -> int:
        return count if track.row.own_turn else min(BLOCK, count)

    def _counts(self, tracks: Sequence[Track], size: int, allotted: float) -> list[tuple[Track, int]]:
        """How many samples each: all that make sense, or as many as fit into the time."""
        most = max(FEWEST, round(next(n for up_to, n in _REPEATS if size <= up_to) * self._repeats_part))
        share = allotted / max(1, len(tracks))
        spare = sum(max(0.0, share - most * _seconds(track, size)) for track in tracks)
        slow = sum(most * _seconds(track, size) > share for track in tracks)
        share += spare / max(1, slow)
        counts = []
        for track in tracks:
            count = min(most, int(share / _seconds(track, size)))
            if count < FEWEST and FEWEST * _seconds(track, size) > self._left() * self._greed:
                self._note(track, size, reason=f"one takes about {_seconds(track, size):.2g} s: {OUT_OF_TIME}")
                continue
            counts.append((track, max(FEWEST, count)))
        return counts

    # --- row by row ------------------------------------------------------------------------------------------------

    def _row_by_row(self, sizes: Sequence[int], number: int) -> None:
        """The quickest rows first: where the time does not suffice for all, it does for most."""
        waiting = sorted(self._tracks, key=lambda track: track.expected(sizes[0]) or 0.0) if sizes else []
        steps = max(1, len(waiting) * len(sizes))
        while waiting:
            track = waiting.pop(0)
            for index, size in enumerate(sizes):
                done = steps - (len(waiting) + 1) * len(sizes) + index
                self._say(f"{show_size(size)}: {track.row.name}", number + len(sizes) * done / steps)
                left = (1 + sum(other.alive for other in waiting)) * (len(sizes) - index)
                self._greed = max(_GREED, _GREED_OF_LAST / left)
                if not self._warm_up(track, size):
                    continue
                for _, count in self._counts([track], size, self._left() / left):
                    seconds: list[float] = []
                    self._guarded(track, size, seconds, count)
                    self._note(track, size, seconds, self._via.get(id(track)))
            if any(other.pair is track.pair for other in waiting):
                self._drop(track)
            elif track.pair is not None:  # nobody needs its memory warm any more
                track.pair.end("its turn is over")

    # --- one row at one size ------------------------------------------------------------------------------------

    def _warm_up(self, track: Track, size: int) -> bool:
        """Two samples that do not count, the first of them looked at. False, with the reason noted, if that is all."""
        if reason := track.reason or self._too_big(track, size) or self._too_long(track, size):
            self._note(track, size, reason=reason)
            return False
        pair = track.pair
        assert pair is not None  # a track without one has a reason
        try:
            if pair.failed is not None:
                raise Failed(pair.failed)
            open_row(pair, track.row, self._site, self._patience(None))
            with self._turn(track):
                via = track.check(size, self._patience(track.expected(size)))
                self._via[id(track)] = via
                if via is not None and track.row.carries and via not in track.row.carries:
                    self._note(track, size, reason=f"goes by {via} at this size", via=via)
                    return False
                if reason := self._too_long(track, size):  # larger sizes can be far slower than smaller ones
                    self._note(track, size, reason=reason)
                    return False
                track.send(size, 1, self._patience(track.expected(size)))
        except Failed as failure:
            self._fail(track, size, failure)
            return False
        return True

    def _guarded(self, track: Track, size: int, seconds: list[float], count: int) -> None:
        try:
            with self._turn(track):
                lead = lead_in(_seconds(track, size))
                expected = _seconds(track, size) * (count + lead)
                if expected > self._left():
                    return
                seconds += track.send(size, count + lead, self._patience(expected))[lead:]
        except Failed as failure:
            self._fail(track, size, failure)

    @contextmanager
    def _turn(self, track: Track) -> Iterator[None]:
        if not track.row.own_turn:
            yield
            return
        track.wake(self._patience(None))
        try:
            yield
        finally:
            track.rest(self._patience(None))

    def _fail(self, track: Track, size: int, failure: Failed) -> None:
        """The row is over, and so are its actors if one of them may still be busy with it."""
        track.reason = reason = str(failure)
        self._note(track, size, reason=reason)
        pair = track.pair
        stuck = isinstance(failure, Stuck)
        if pair is not None and (stuck or not any(other.pair is pair and other.alive for other in self._tracks)):
            pair.end(f"its actors were ended because {track.row.name} with {track.device} tensors failed: {reason}")

    def _too_big(self, track: Track, size: int) -> str | None:
        return size_obstacle(track.row, track.device, size, self._room)

    def _too_long(self, track: Track, size: int) -> str | None:
        """Looking at one, warming up and the fewest samples, if it is as slow as the smaller size lets expect."""
        if self._left() <= 0:
            return OUT_OF_TIME
        expected = track.expected(size)
        if expected is not None and expected * (FEWEST + 2) > self._left() * self._greed:
            return f"one may take {expected:.2g} s, and the time budget leaves {self._left():.0f} s"
        return None

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _patience(self, expected: float | None) -> float:
        return min(max(_PATIENCE_S, 10 * (expected or 0.0)), self._left() + 2.0)

    def _drop(self, track: Track) -> None:
        with suppress(Failed):
            track.drop(self._patience(None))

    def _drop_all(self) -> None:
        pairs: list[Pair] = []
        for track in self._tracks:
            if track.alive and track.pair is not None and track.pair not in pairs:
                pairs.append(track.pair)
                self._drop(track)

    # --- what came out -----------------------------------------------------------------------------------------

    def _note(
        self,
        track: Track,
        size: int,
        seconds: Sequence[float] = (),
        via: str | None = None,
        *,
        reason: str | None = None,
    ) -> None:
        key = (track.row.name, track.device, size)
        if key in self._done:
            return
        self._done.add(key)
        cell = Cell(row=track.row.name, device=track.device, bytes=size, via=via, reason=reason or OUT_OF_TIME)
        if len(seconds) >= FEWEST:
            low, median, high = quantiles(seconds, n=4, method="inclusive")
            figures = {"median_s": median, "low_s": low, "high_s": high, "samples": len(seconds)}
            cell = cell.model_copy(update={**figures, "reason": None})
        self.cells.append(cell)

    def _say(self, text: str, steps: float) -> None:
        self._tell(text, steps / max(1, len(self._options.sizes)))


def lead_in(seconds: float) -> int:
    """Samples of a block that do not count, by the time one took at the warm-up."""
    return min(_LEAD_IN_MOST, max(1, round(_LEAD_IN_FOR_S / seconds))) if seconds < _LEAD_IN_S else 0


def _seconds(track: Track, size: int) -> float:
    """Of one sample, as the warm-up saw it; never 0."""
    return max(track.took.get(size, 0.0), 1e-6)
