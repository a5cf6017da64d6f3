"""One pull of a version: from one publisher or several, into whole tensors of a model or its shards."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property, partial
from typing import Any

import torch

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.errors import ConfigurationError, Empty, NotFound, PeerLost
from raytorchrpc.patterns.handle import Handle
from raytorchrpc.patterns.weights.model_tensors import (
    ModuleState,
    Targets,
    check_lasting,
    check_writable,
    shards_of,
)
from raytorchrpc.patterns.weights.plan import KnownLayout, Options, Request, plan
from raytorchrpc.patterns.weights.publishers import Committed, look, publishers_of, sources_of
from raytorchrpc.patterns.weights.pull_plan import ModelSelection, PullPlan, make_plan
from raytorchrpc.patterns.weights.source_pull import Requests, Source, SourcePull
from raytorchrpc.process.locks import Lock
from raytorchrpc.tensors.cuda_streams import SideStreams
from raytorchrpc.tensors.dtypes import DTYPE_NAMES

#: How many pulled versions a process remembers, the last ones.
_REMEMBERED = 1024


class PulledVersions:
    """The versions that this process has pulled, by the instance of their store. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._versions: OrderedDict[tuple[int, int, tuple[str, ...], Hashable], None] = OrderedDict()
        self.failures = 0  # how many pulls have failed and may have left a model with tensors of several versions

    def add(self, instance_id: int, version: int, options: Options, failures: int) -> None:
        """Note a pull. No effect if another has failed since there were ``failures``: it may have torn this model."""
        pulled = instance_id, version, options.only, options.form
        with self._lock:
            if failures != self.failures:
                return
            self._versions[pulled] = None
            self._versions.move_to_end(pulled)
            if len(self._versions) > _REMEMBERED:
                self._versions.popitem(last=False)

    def has(self, instance_id: int, version: int, options: Options) -> bool:
        """Whether a model of this process may have this version in this form, or these tensors of it."""
        with self._lock:
            return any((instance_id, version, only, options.form) in self._versions for only in ((), options.only))

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


class _Unexpected(Exception):
    """The newest version of the publishers is not the one to pull. Never leaves a pull."""


class UsableSources:
    """The sources that one pull uses, by the thread that pulls."""

    def __init__(self, local: LocalMember, silent: set[Source]) -> None:
        """``silent``: publishers that have not answered earlier pulls, and have not since; shared by all pulls."""
        self._local, self._silent = local, silent
        self._lost: dict[Source, NotFound | PeerLost] = {}
        self._version: int | None = None
        self._several = self._waits = self._leaves_out = False
        self.asked: Source | None = None  # the source that raises what is raised now; None: it is not one of them

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
            if not self._waits and source in self._silent:
                self._leaves_out = True
                return UNUSED
        if source in self._lost:
            return UNUSED
        if route.member.rank == self._local.me.rank:
            return 0
        return 1 if route.member.node_id == self._local.me.node_id else 2

    def silent(self, pulls: Sequence[SourcePull]) -> list[SourcePull]:
        """Wait for ``PATIENCE_S`` for the leases that were asked for, if there is a choice; the pulls without."""
        if self._waits or not self._several:
            return []
        until = time.monotonic() + PATIENCE_S
        return [pull for pull in pulls if not pull.answers_within(max(0.0, until - time.monotonic()))]

    def leave_out(self, pulls: Sequence[SourcePull]) -> None:
        """Do without these from now on, until they have answered. Raises Silent."""
        for pull in pulls:
            self._silent.add(pull.source)
            pull.abandon(partial(self._silent.discard, pull.source))
        raise Silent

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


#: Less is not brought on a stream of its own: to have one takes a tenth of a millisecond (bytes).
_WORTH_A_STREAM = 256 << 20
#: Of a source that is not asked.
_NOTHING = KnownLayout(0, [])
#: How many plans a handle remembers, of the last pulls of different models, or with different options.
_MOST_PLANS = 4

#: Moves tensors by other means than the group's lanes, such as a collective: ``carry(version, tensors)`` sends them at
#: the home, and fills them at the readers.
Carry = Callable[[int, Sequence[torch.Tensor]], None]


class PullMemory:
    """What the pulls of one handle leave for the next ones."""

    def __init__(self) -> None:
        self.plans: tuple[PullPlan, ...] = ()  # the one of the last pull first
        self.silent: set[Source] = set()  # publishers that have not answered
        self.committed: Committed | None = None  # what the last pull has found

    def expected(self, options: Options, near: tuple[int, ...]) -> list[ModelSelection] | None:
        """See ``PullPlan.expected``; of the plan that was used last."""
        return next((its for plan in self.plans if (its := plan.expected(options, near)) is not None), None)

    def remember(self, plan: PullPlan) -> None:
        """Note that a plan was used; forgets the one that was used before all others."""
        self.plans = (plan, *[one for one in self.plans if one is not plan][: _MOST_PLANS - 1])


class ModelPull:
    """One pull into a model, by the thread that uses it."""

    def __init__(
        self,
        requests: Requests,
        store: Handle,
        memory: PullMemory,
        model: Any,
        options: Options,
        lending: Callable[[Any], Any],
        wait: Callable[[int, float], Any],
        carry: Carry | None,
    ) -> None:
        """``lending``: see ``keep_admission``. ``wait``: blocks until that version or a newer one is there."""
        self._requests, self._local, self._handle, self._store = requests, requests.local, store, store.name
        self._memory, self._options, self._carry = memory, options, carry
        self._lending, self._wait = lending, lending(wait)
        self._model = model
        self.has_begun = False  # whether some tensors may have been written
        self._usable = UsableSources(self._local, memory.silent)
        self._publishers: list[str] = []
        self._layouts: list[KnownLayout | None] = []

    # The model is looked at while the homes answer: that takes as long.

    @cached_property
    def _state(self) -> ModuleState | None:
        return ModuleState.of(self._model) if isinstance(self._model, torch.nn.Module) else None

    @cached_property
    def _values(self) -> Any:
        return self._model if self._state is None else self._state.saved

    @cached_property
    def _targets(self) -> Targets | None:
        return Targets.of(self._values)

    @cached_property
    def _request(self) -> Request:
        """What the model wants. Raises ConfigurationError for an invalid model."""
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
        if version is None and (found := self._bring_expected(since)) is not None:
            return found
        while True:
            committed = self._committed(version)
            if committed is not None and committed.version == since:
                return committed.version
            chosen = version if committed is None else committed.version
            try:
                return self._bring(chosen, since, sources_of(self._handle, committed))
            except (NotFound, PeerLost, Silent) as error:
                left = self._requests.until - time.monotonic()
                if not self._usable.can_do_without(error):
                    if isinstance(error, PeerLost) or version is not None or committed is None or left <= 0:
                        raise
                    # A publisher has retired or lost it, and no other has the same: only a newer one helps.
                    self._wait(committed.version + 1, left)
            since = None

    def _bring_expected(self, since: int | None) -> int | None:
        """Bring the newest version of the publishers that the last pull has found, asking all of them at once.

        Returns None if that is not the version to pull, or fails.
        """
        last = self._memory.committed
        if last is None or publishers_of(self._handle) is None:
            return None
        newest = look(self._handle, self._local, None, self._requests.left())

        def is_committed(pulls: Iterable[SourcePull]) -> bool:
            found = newest()
            if found is None or found.instances != last.instances:
                return False
            return all(pull.lease is not None and pull.lease.version == found.version for pull in pulls)

        try:
            return self._bring(None, since, sources_of(self._handle, last), is_committed)
        except (NotFound, PeerLost, Silent, _Unexpected) as error:
            if self.has_begun:  # the publishers that it has lost are not asked again
                self._usable.can_do_without(error)
            self._usable.asked = None
            return None

    def _committed(self, version: int | None) -> Committed | None:
        """Wait for the version to pull; None if the home alone decides."""
        if publishers_of(self._handle) is None:
            return None
        while True:
            asked = look(self._handle, self._local, version, self._requests.left())
            found: Committed | None = self._lending(asked)()
            if found is not None:
                self._memory.committed = found
                return found
            shards_of(self._values, self._store)  # raises what would be wrong at any version
            self._wait(1, self._requests.left())

    def _bring(
        self,
        version: int | None,
        since: int | None,
        sources: Sequence[Handle],
        confirm: Callable[[Iterable[SourcePull]], bool] | None = None,
        expects: bool = True,
    ) -> int:
        """Bring a version from these sources: lease, find the plan or make one, and move the tensors.

        ``confirm``: whether what was leased is to be pulled. ``expects``: ask for what the last pull has brought.
        """
        self._requests.counter.begin_again()
        self._publishers = [source.home for source in sources]
        near = self._usable.begin(version, sources)
        expected = self._memory.expected(self._options, near) if expects and self._carry is None else None
        planned = expected or self._planned(near)
        pulls = self._pulls(sources, near, planned)
        try:
            self._ask(pulls, version, since)
            if expected is not None:
                planned = self._planned(near)
                if planned is None or not all(map(ModelSelection.agrees, planned, expected)):
                    return self._bring(version, since, sources, confirm, expects=False)
                for number, pull in pulls.items():
                    pull.planned = planned[number]
            found = self._lease(pulls, version, since, near)
            if confirm is not None and not confirm(pulls.values()):
                raise _Unexpected
            if found == since:
                return found
            if planned is None or any(pull.planned is None for pull in pulls.values()):
                if planned is not None:  # some layout is another now; the others may be, and those of other plans
                    self._memory.plans = ()
                    return self._bring(version or found, None, sources)
                self._make_plan(pulls, near)
            for pull in pulls.values():
                with self._asking(pull):
                    pull.check_ties()
            self.has_begun = True
            self._move(pulls, found)
            return found
        finally:
            for pull in pulls.values():
                pull.release()

    def _pulls(
        self, sources: Sequence[Handle], near: Sequence[int], planned: Sequence[ModelSelection] | None
    ) -> dict[int, SourcePull]:
        """The pulls from the sources that are needed, by the source's number."""
        self._layouts = [its.plan.layout for its in planned] if planned else self._known_layouts(len(sources))
        probable = self._device_type() if planned is None and self._carry is None else None
        pulls: dict[int, SourcePull] = {}
        for number, source in enumerate(sources):
            its = None if planned is None else planned[number]
            if near[number] < UNUSED and (its is None or len(sources) == 1 or its.transfers):
                known = None if its is None or its.converts or self._carry is not None else its.device_type
                pulls[number] = SourcePull(source, self._requests, self._layouts[number], its, known or probable)
        return pulls

    def _device_type(self) -> str | None:
        """Of one of the tensors: others are probably on the same type of device."""
        tensors = [] if self._targets is None else self._targets.tensors.values()
        return next((tensor.device.type for tensor in tensors), None)

    def _known_layouts(self, count: int) -> list[KnownLayout | None]:
        """The layouts of so many sources, as a pull before found them."""
        plans = (known.sources for known in self._memory.plans if len(known.sources) == count)
        return [source.layout for source in next(plans, ())] or [None] * count

    def _ask(self, pulls: Mapping[int, SourcePull], version: int | None, since: int | None) -> None:
        """Ask each source for a lease."""
        for at, pull in enumerate(pulls.values()):
            self._usable.asked = pull.source
            pull.ask(version, since, caller_waits=not at)  # this thread waits for the first

    def _lease(
        self, pulls: Mapping[int, SourcePull], version: int | None, since: int | None, near: Sequence[int]
    ) -> int:
        """Take the lease of each source. Nothing is written before all have agreed. Returns the version."""
        alone, is_planned = len(pulls) == 1, all(pull.planned is not None for pull in pulls.values())
        if not is_planned:
            _ = self._request  # raises if the model is invalid, though there may be nothing to pull
        silent: list[SourcePull] = []
        while (still := self._usable.silent(silent or list(pulls.values()))) and self._requests.left():
            if still != silent and self._can_plan(still, pulls, near):
                self._usable.leave_out(still)
            silent = still  # the others may only be slow
        found = version or 0
        for pull in pulls.values():
            self._usable.asked = pull.source
            lease = pull.answer()
            while lease is None and alone:  # nothing is published yet
                self._wait(1, self._requests.left())
                pull.ask(version, since, caller_waits=True)
                lease = pull.answer()
            found = found if lease is None else lease.version
        return found

    def _move(self, pulls: Mapping[int, SourcePull], version: int) -> None:
        """Bring the tensors that are planned into the model."""
        if self._carry is not None:
            pulls[0].expect()
            self._carry_to_model(self._carry, pulls[0])
            return
        bringing: dict[SourcePull, Iterator[None]] = {}
        for at, pull in enumerate(pulls.values()):
            bringing[pull] = pull.bring(caller_waits=not at)
            with self._asking(pull):
                next(bringing[pull], None)
        # The most comes on this stream, and first: a side stream follows only what is queued here before this.
        streams = self._side_streams() if len(pulls) > 1 else None
        ordered = sorted(pulls.values(), key=SourcePull.expect, reverse=True)
        try:
            for pull in ordered:
                is_aside = pull is not ordered[0] and pull.selection.nbytes >= _WORTH_A_STREAM
                with streams.one() if is_aside and streams is not None else nullcontext():
                    self._bring_from(pull, bringing[pull], version)
        finally:
            if streams is not None:
                streams.join()

    def _bring_from(self, pull: SourcePull, bringing: Iterator[None], version: int) -> None:
        try:
            with self._asking(pull):
                next(bringing, None)
        except NotFound as error:
            raise PeerLost(pull.home, f"it has lost version {version}: {error}", True) from error

    def _side_streams(self) -> SideStreams | None:
        """Streams for several sources: one comes over NVLink while another is copied within the GPU."""
        if self._targets is None or not self._targets.tensors:
            return None
        device = next(iter(self._targets.tensors.values())).device
        return SideStreams(device) if device.type == "cuda" else None

    @contextmanager
    def _asking(self, pull: SourcePull) -> Iterator[None]:
        """Whatever is raised within comes from this source."""
        self._usable.asked = pull.source
        try:
            yield
        except PeerLost as lost:
            if lost.peer != pull.home:
                raise
            raise pull.store._home_lost(lost) from lost

    # --- the plan ------------------------------------------------------------------------------------------------

    def _planned(self, near: tuple[int, ...]) -> list[ModelSelection] | None:
        """What the plan of a pull before brings into this model from each source; None if none applies."""
        if self._targets is None:
            return None
        for known in self._memory.plans:
            if known.near == near and (found := known.fill(self._targets, self._options, self._check)) is not None:
                if self._state is not None and self._state.made:  # by state_dict(), perhaps in memory known before
                    self._check(known.names)
                self._memory.remember(known)
                return found
        return None

    def _check(self, names: set[str]) -> None:
        """Raise ConfigurationError for a tensor of the model that cannot be written, or to no effect."""
        assert self._targets is not None
        check_writable(self._store, {name: its for name, its in self._targets.tensors.items() if name in names})
        if self._state is not None:
            check_lasting(self._store, self._model, self._state, names)

    def _can_plan(self, silent: Collection[SourcePull], pulls: Mapping[int, SourcePull], near: Sequence[int]) -> bool:
        """Whether the other sources, as far as they are used, have all that the model wants."""
        if not self._options.strict:  # what those alone have would be left out unseen
            return False
        layouts: list[KnownLayout] = []
        for number, known in enumerate(self._layouts):
            pull = pulls.get(number)
            layout = known if pull is None else pull.layout
            layouts.append(_NOTHING if layout is None or pull in silent or near[number] == UNUSED else layout)
        with suppress(ConfigurationError):
            plan(self._request, layouts, near, self._local.me.rank)
            return True
        return False

    def _make_plan(self, pulls: Mapping[int, SourcePull], near: tuple[int, ...]) -> None:
        """Plan anew for the layouts that the sources have now. Raises ConfigurationError, or why some are left out."""
        used = [pulls.get(number) for number in range(len(near))]
        layouts = [_NOTHING if pull is None or pull.lease is None else pull.layout or _NOTHING for pull in used]
        if UNUSED in near and not self._options.strict:  # what those alone have would be left out unseen
            self._usable.check_whole()
        request = self._request
        if self._targets is None:  # some tensor has no memory of its own
            check_writable(self._store, {name: shard.tensor for name, shard in request.targets.items()})
        assert self._targets is not None
        try:
            made = make_plan(request, self._options, layouts, near, self._local.me.rank, self._targets)
        except ConfigurationError:
            if UNUSED in near:
                self._usable.check_whole()
            raise
        selections = made.fill(self._targets, self._options, self._check)
        self._memory.remember(made)
        for number, selection in enumerate(selections or ()):
            if number in pulls:
                pulls[number].planned = selection

    def _carry_to_model(self, carry: Carry, pull: SourcePull) -> None:
        """Have ``carry`` fill the model. Raises ConfigurationError unless the model has all tensors as published."""
        assert pull.layout is not None and pull.lease is not None
        targets, rows = self._request.targets, pull.layout.rows
        for name, dtype, *_ in rows:
            its = targets.get(name)
            if its is None or not its.is_whole or DTYPE_NAMES[its.tensor.dtype] != dtype:
                raise ConfigurationError(
                    f"carry= brings whole tensors as published: the model needs all of {name!r}, as {dtype}"
                )
        with torch.no_grad():
            carry(pull.lease.version, [targets[name].tensor for name, *_ in rows])
        self._requests.counter.add(self._requests.counter.expected)
