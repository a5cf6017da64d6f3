"""One pull of a version: from one publisher or several, into whole tensors of a model or its shards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, NamedTuple

import torch

from raytorchrpc.calls.counters import PullCounter
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.errors import ConfigurationError, Empty, NotFound, PeerLost
from raytorchrpc.patterns.handle import Handle
from raytorchrpc.patterns.weights.coordinator import Committed
from raytorchrpc.patterns.weights.match import LayoutMatch
from raytorchrpc.patterns.weights.plan import Options, Request
from raytorchrpc.patterns.weights.planned import Filled, Planned, make_plan, signature_of
from raytorchrpc.patterns.weights.pull import Pull, Source
from raytorchrpc.patterns.weights.selection import KnownLayout
from raytorchrpc.patterns.weights.shards import Shard, local_tensor, shards_of
from raytorchrpc.patterns.weights.targets import KnownTargets, Targets, check_lasting, values_of
from raytorchrpc.patterns.weights.ties import ties_of
from raytorchrpc.patterns.weights.usable import UNUSED, Silent, UsableSources
from raytorchrpc.patterns.weights.versions import VersionLease
from raytorchrpc.tensors.dtypes import DTYPE_NAMES

#: Of a source that is not asked.
_NOTHING = KnownLayout(0, [], [])


#: Moves tensors by other means than the group's lanes, such as a collective: ``carry(version, tensors)`` sends them at
#: the home, and fills them at the readers.
Carry = Callable[[int, Sequence[torch.Tensor]], None]


class Remembered(NamedTuple):
    """What a pull leaves for the next ones."""

    planned: Planned
    targets: KnownTargets


#: What a handle remembers: the last pulls of different models, or with different options.
MOST_REMEMBERED = 4


class ModelPull:
    """One pull into a model, by the thread that uses it."""

    def __init__(
        self,
        local: LocalMember,
        store: str,
        model: Any,
        options: Options,
        until: float,
        look: Callable[[int | None], Committed | None],
        sources: Callable[[Committed | None], Sequence[Handle]],
        wait: Callable[[int, float], Any],
        remembered: tuple[Remembered, ...],
        silent: set[Source],
        counter: PullCounter,
        carry: Carry | None = None,
    ) -> None:
        """
        Args:
            store: the name of the store.
            look: the version to pull; None if the home alone decides.
            sources: handles of the members that have it.
            wait: ``wait(version, seconds)`` blocks until that version or a newer one is there.
            remembered: by the pulls before, the last one first.
            silent: see ``UsableSources``.
            carry: see ``WeightStore.pull``.
        """
        self._local, self._store, self._options, self._until = local, store, options, until
        self._look, self._sources, self._wait = look, sources, wait
        self._model, self._values = model, values_of(model)
        self.remembered, self._counter, self._carry = remembered, counter, carry
        self.has_begun = False
        """Whether some tensors may have been written."""
        self._usable = UsableSources(local, silent)
        self._publishers: list[str] = []

    @cached_property
    def _request(self) -> Request:
        shards = shards_of(self._values, self._store)
        request = Request.of(self._store, shards, self._options, self._publishers)
        if isinstance(self._values, Mapping) and len(shards) < len(self._values):  # this process has nothing of some
            absent = (str(name) for name in self._values if str(name) not in shards)
            parts = (part for name in absent for part in self._options.mapping.get(name, (name,)))
            request = request._replace(elsewhere=request.elsewhere.union(parts))
        return request

    def bring(self, version: int | None, since: int | None) -> int:
        """Bring a version into the model; returns its number. See ``WeightStore.pull``."""
        try:
            return self._bring_newest(version, since)
        except (NotFound, Empty) as error:
            if (lost := self._usable.peer_lost()) is not None:  # other errors would be wrong: something may be written
                raise lost from error
            raise

    def _bring_newest(self, version: int | None, since: int | None) -> int:
        while True:
            committed = self._look(version)
            if committed is not None and committed.version == since:
                return committed.version
            chosen = version if committed is None else committed.version
            try:
                return self._bring(chosen, since, self._sources(committed))
            except (NotFound, PeerLost, Silent) as error:
                left = self._until - time.monotonic()
                if not self._usable.can_do_without(error):
                    if isinstance(error, PeerLost) or version is not None or committed is None or left <= 0:
                        raise
                    # A publisher has retired or lost it, and no other has the same: only a newer one helps.
                    self._wait(committed.version + 1, left)
            since = None

    def _bring(self, version: int | None, since: int | None, sources: Sequence[Handle]) -> int:
        self._counter.begin_again()
        self._publishers = [source.home for source in sources]
        near = self._usable.begin(version, sources)
        planned = self._fill_again(near)
        to_prepare = _device_type_of(self._values) if planned is None and self._carry is None else None
        layouts = self._known_layouts(len(sources)) if planned is None else planned[0].layouts
        matches: list[LayoutMatch] = []
        pulls: list[tuple[int, Pull]] = []
        try:
            for number, source in enumerate(sources):
                filled = None if planned is None else planned[1][number]
                matches.append(LayoutMatch(self._store, layouts[number], filled, to_prepare))
                is_needed = planned is None or len(sources) == 1 or planned[0].sources[number].brings
                if near[number] < UNUSED and is_needed:
                    pulls.append((number, Pull(source, self._local, matches[number], self._until, self._counter)))
            found = self._lease(pulls, version, since, matches, near)
            if found == since:
                return found
            if any(match.planned is None for match in matches):
                if planned is not None:  # some layout is another now; the others may be, and those of other plans
                    self.remembered = ()
                    return self._bring(version, None, sources)
                self._plan_anew(matches, near)
            for _, pull in pulls:
                with self._asking(pull):
                    pull.check_ties()
            self.has_begun = True
            for at, (number, pull) in enumerate(pulls if self._carry is None else ()):
                with self._asking(pull):
                    pull.begin(matches[number].selection(), caller_waits=not at)
            for number, pull in pulls:
                pull.expect(matches[number].selection())
            if self._carry is not None:
                self._carry_to_model(self._carry, matches[0])
                return found
            for number, pull in pulls:
                try:
                    with self._asking(pull):
                        pull.bring(matches[number].selection())
                except NotFound as error:
                    raise PeerLost(pull.home, f"it has lost version {found}: {error}", True) from error
            return found
        finally:
            self.has_begun |= any(match.filled for match in matches)
            for _, pull in pulls:
                pull.release()

    @contextmanager
    def _asking(self, pull: Pull) -> Iterator[None]:
        """Whatever is raised within comes from this source."""
        self._usable.asked = pull.source
        try:
            yield
        except PeerLost as lost:
            if lost.peer != pull.home:
                raise
            raise pull.loss_of(lost) from lost

    def _lease(
        self,
        pulls: Sequence[tuple[int, Pull]],
        version: int | None,
        since: int | None,
        matches: Sequence[LayoutMatch],
        near: tuple[int, ...],
    ) -> int:
        """Lease a version at each source. Nothing is written before all have agreed. Returns the version."""
        usable, alone = self._usable, len(pulls) == 1
        answers: list[VersionLease | None] = []
        is_planned = all(match.planned is not None for match in matches)
        in_place = alone and is_planned and self._carry is None  # the same request brings the tensors
        for at, (_, pull) in enumerate(pulls):
            usable.asked = pull.source
            pull.ask(version, since, in_place, caller_waits=not at)  # this thread waits for the first
        if not is_planned:
            _ = self._request  # raises if the model is invalid, though there may be nothing to pull
        silent = usable.silent([pull for _, pull in pulls])
        if silent and self._can_plan({number for number, pull in pulls if pull in silent}, matches, near):
            usable.leave_out(silent)
        for _, pull in pulls:
            usable.asked = pull.source
            answers.append(pull.answer())
        if alone and answers[0] is None:  # nothing is published yet
            return pulls[0][1].lease(version, since, in_place, self._wait).version
        return next((answer.version for answer in answers if answer is not None), version or 0)

    def _fill_again(self, near: tuple[int, ...]) -> tuple[Planned, list[Filled]] | None:
        """The plan of a pull before, and what it brings into this model; None if none applies."""
        there = [one for one in self.remembered if one.planned.near == near]
        for one in there:
            planned, targets = one.planned, one.targets.found_in(self._values, self._options)
            if targets is not None and not targets.known:  # the tensors have other memory since
                one.planned.check_writable(self._store, targets.tensors)
                targets = targets if ties_of(targets.tensors) == planned.tied else None
            if targets is not None:
                self._remember(one)
                return planned, planned.fill(targets)
        asked = signature_of(self._request) if there else None
        same = next((one.planned for one in there if one.planned.asked == asked), None)
        return None if same is None else (same, self._follow(same))

    def _remember(self, one: Remembered) -> None:
        others = [other for other in self.remembered if other is not one and not other.targets.are_gone]
        self.remembered = (one, *others[: MOST_REMEMBERED - 1])

    def _known_layouts(self, count: int) -> Sequence[KnownLayout | None]:
        """The layouts of so many sources, as a pull before found them."""
        known = (one.planned.layouts for one in self.remembered)
        return next((layouts for layouts in known if len(layouts) == count), (None,) * count)

    def _follow(self, planned: Planned) -> list[Filled]:
        """Remember the plan; returns what it brings into this model. Raises ConfigurationError."""
        planned.check_writable(self._store, {name: shard.tensor for name, shard in self._request.targets.items()})
        brought = dict.fromkeys(bring.target for source in planned.sources for bring in source.brings)
        check_lasting(self._store, self._model, {name: self._values[name] for name in brought})
        known = KnownTargets(self._values, self._options)
        targets = known.found_in(self._values, self._options)
        if targets is None:  # the model makes its tensors anew whenever it is asked
            targets = Targets({name: shard.tensor for name, shard in self._request.targets.items()}, {})
        filled = planned.fill(targets)
        both = zip(planned.layouts, filled, strict=True)
        layouts = tuple(layout._replace(alike=its.selection.alike(layout, its.nbytes)) for layout, its in both)
        self._remember(Remembered(planned._replace(layouts=layouts), known))
        return filled

    def _can_plan(self, without: set[int], matches: Sequence[LayoutMatch], near: tuple[int, ...]) -> bool:
        """Whether the other sources have all that the model wants. ``without``: by number."""
        if not self._options.strict:  # what those alone have would be left out unseen
            return False
        known = [match.known for match in matches]
        layouts = [_NOTHING if its is None or number in without else its for number, its in enumerate(known)]
        with suppress(ConfigurationError):
            make_plan(self._request, layouts, near, self._local.me.rank)
            return True
        return False

    def _plan_anew(self, matches: Sequence[LayoutMatch], near: tuple[int, ...]) -> None:
        layouts = [_NOTHING if match.known is None or match.lease is None else match.known for match in matches]
        if UNUSED in near and not self._options.strict:  # what those alone have would be left out unseen
            self._usable.check_whole()
        try:
            planned = make_plan(self._request, layouts, near, self._local.me.rank)
        except ConfigurationError:
            if UNUSED in near:
                self._usable.check_whole()
            raise
        for match, filled in zip(matches, self._follow(planned), strict=True):
            match.planned = filled

    def _carry_to_model(self, carry: Carry, match: LayoutMatch) -> None:
        """Have ``carry`` fill the model. Raises ConfigurationError unless the model has all tensors as published."""
        targets, rows = self._request.targets, match.layout.rows
        if any(name not in targets or DTYPE_NAMES[targets[name].tensor.dtype] != dtype for name, dtype, *_ in rows):
            raise ConfigurationError(
                "carry= brings all tensors as they were published: the model needs each of them, under the same dtype"
            )
        with torch.no_grad():
            carry(match.leased.version, [targets[name].tensor for name, *_ in rows])
        self._counter.add(self._counter.expected)


def _device_type_of(values: Any) -> str | None:
    """Of one of the tensors: others are probably on the same type of device."""
    value = next(iter(values.values()), None) if isinstance(values, Mapping) else None
    value = value.tensor if isinstance(value, Shard) else value
    return local_tensor(value).device.type if isinstance(value, torch.Tensor) else None
