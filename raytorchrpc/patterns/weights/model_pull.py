"""One pull of a version: from one publisher or several, into whole tensors of a model or its shards."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, NamedTuple

import torch

from raytorchrpc.calls.counters import PullCounter
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.errors import ConfigurationError, Empty, NotFound, PeerLost
from raytorchrpc.patterns.handle import Handle
from raytorchrpc.patterns.weights.model_tensors import (
    KnownTargets,
    Targets,
    check_lasting,
    local_tensor,
    shards_of,
    ties_of,
    values_of,
)
from raytorchrpc.patterns.weights.plan import Options, Request
from raytorchrpc.patterns.weights.published import VersionLease
from raytorchrpc.patterns.weights.publishers import Committed
from raytorchrpc.patterns.weights.pull_plan import Filled, KnownLayout, Planned, make_plan, signature_of
from raytorchrpc.patterns.weights.shards import Shard
from raytorchrpc.patterns.weights.source_pull import LayoutMatch, Pull, Source
from raytorchrpc.tensors.dtypes import DTYPE_NAMES

#: How many pulled versions a process remembers, the last ones.
_REMEMBERED = 1024


class PulledVersions:
    """The versions that this process has pulled, by the instance of their store. Thread-safe.

    A version number alone does not identify weights: another store of the same name has the same numbers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: OrderedDict[tuple[int, int, tuple[str, ...], Hashable], None] = OrderedDict()
        self.failures = 0
        """How many pulls have failed and may have left a model with tensors of several versions."""

    def add(
        self, instance_id: int, version: int, failures: int, only: tuple[str, ...] = (), form: Hashable = None
    ) -> None:
        """Note that a version has been pulled.

        Args:
            failures: when the pull began; no effect if there are more now. Otherwise it would count for the model of
                another thread, whose pull has failed meanwhile.
            only: the globs of its tensors; none for all.
            form: see ``Options.form``.
        """
        with self._lock:
            if failures != self.failures:
                return
            self._versions[instance_id, version, only, form] = None
            self._versions.move_to_end((instance_id, version, only, form))
            if len(self._versions) > _REMEMBERED:
                self._versions.popitem(last=False)

    def has(self, instance_id: int, version: int, only: tuple[str, ...] = (), form: Hashable = None) -> bool:
        """Whether a model of this process may have this version in this form, or these tensors of it."""
        with self._lock:
            pulled = self._versions
            return (instance_id, version, (), form) in pulled or (instance_id, version, only, form) in pulled

    def forget(self, instance_id: int) -> None:
        """Forget a store's versions: a pull has failed and may have left a model with tensors of several versions."""
        with self._lock:
            self.failures += 1
            for pulled in [pulled for pulled in self._versions if pulled[0] == instance_id]:
                del self._versions[pulled]


#: A publisher that has not answered after this time is silent: the pull tries to do without it (seconds).
PATIENCE_S = 0.25
#: The distance of a source that is not used.
UNUSED = 9


class Silent(Exception):
    """A publisher does not answer. Never leaves a pull."""


class UsableSources:
    """The sources that one pull uses, by the thread that pulls."""

    def __init__(self, local: LocalMember, silent: set[Source]) -> None:
        """``silent``: publishers that have not answered earlier pulls, and have not since; shared by all pulls."""
        self._local, self._silent = local, silent
        self._silent_here: set[Source] = set()
        self._lost: dict[Source, NotFound | PeerLost] = {}
        self._version: int | None = None
        self._several = self._waits = self._leaves_out = False
        self.asked: Source | None = None
        """The source that raises what is raised now; None: it is not one of them."""

    def begin(self, version: int | None, sources: Sequence[Handle]) -> tuple[int, ...]:
        """Begin to bring a version; returns the distance of each source."""
        if version != self._version:  # a source that has lost one version may have the next
            self._lost = {source: error for source, error in self._lost.items() if isinstance(error, PeerLost)}
        self._version, self._several, self._leaves_out = version, len(sources) > 1, False
        return tuple(map(self._distance, sources))

    def _distance(self, handle: Handle) -> int:
        source, peers = (handle.home, handle._instance_id), self._local.peers
        route = peers.route(handle.home)
        if self._several:
            try:
                peers.check_present(route)
            except PeerLost as error:
                self._lost.setdefault(source, handle._home_lost(error))
            if not self._waits and (source in self._silent_here or source in self._silent):
                self._leaves_out = True
                return UNUSED
        if source in self._lost:
            return UNUSED
        if route.member.rank == self._local.me.rank:
            return 0
        return 1 if route.member.node_id == self._local.me.node_id else 2

    def silent(self, pulls: Sequence[Pull]) -> list[Pull]:
        """Wait for the answers to requests for leases that were sent just now; returns the pulls without one.

        Waits for ``PATIENCE_S``. Does not wait at all if there is no choice: then it returns none.
        """
        if self._waits or not self._several:
            return []
        until = time.monotonic() + PATIENCE_S
        return [pull for pull in pulls if not pull.answers_within(max(0.0, until - time.monotonic()))]

    def leave_out(self, pulls: Sequence[Pull]) -> None:
        """Do without these from now on, until they have answered. Raises Silent."""
        for pull in pulls:
            self._leave_out(pull.source, pull)
        raise Silent

    def _leave_out(self, source: Source, pull: Pull) -> None:
        self._silent_here.add(source)
        self._silent.add(source)
        pull.abandon(lambda: self._silent.discard(source))

    def can_do_without(self, error: Exception) -> bool:
        """Note what a source has raised, or that the others do not have it all; whether to try once more."""
        asked, self.asked = self.asked, None
        if isinstance(error, Silent):
            self._waits = asked is None
            return True
        if asked is None or asked in self._lost or not self._several:
            return False
        assert isinstance(error, (NotFound, PeerLost))
        self._lost[asked] = error
        return True

    def peer_lost(self) -> PeerLost | None:
        """The first loss of a publisher in this pull, which may have left something written."""
        return next((error for error in self._lost.values() if isinstance(error, PeerLost)), None)

    def check_whole(self) -> None:
        """The sources in use do not have it all: raise the reason, if others were left out."""
        self.asked = None
        if self._leaves_out:
            raise Silent
        if (error := self.peer_lost() or next(iter(self._lost.values()), None)) is not None:
            raise error.with_traceback(None)


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
