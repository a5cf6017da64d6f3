"""One pull of a version: from one publisher or several, into whole tensors of a model or its shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from enum import Enum
from functools import cached_property
from typing import Any

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.errors import ConfigurationError, Empty, NotFound, PeerLost
from raytorchrpc.patterns.handle import Handle
from raytorchrpc.patterns.weights.model_tensors import ModelTensors
from raytorchrpc.patterns.weights.publishers import Committed, look, publishers_of, sources_of
from raytorchrpc.patterns.weights.pull_memory import PullMemory
from raytorchrpc.patterns.weights.pull_plan import SourceCopies, make_plan
from raytorchrpc.patterns.weights.slices import KnownLayout, Options, Request
from raytorchrpc.patterns.weights.source_lease import Requests, Source
from raytorchrpc.patterns.weights.source_pull import SourcePull
from raytorchrpc.tensors.cuda_streams import SideStreams
from raytorchrpc.tensors.kept_errors import again, untraced

#: The distance of a source that is not used.
UNUSED = 9
#: Less is not brought on a stream of its own: to have one takes a tenth of a millisecond (bytes).
_WORTH_A_STREAM = 256 << 20
#: Of a source that is not asked.
_NOTHING = KnownLayout(0, [])


class UsableSources:
    """The sources that one pull uses, by the thread that pulls: not those that it has lost."""

    def __init__(self, local: LocalMember) -> None:
        self._local = local
        self._lost: dict[Source, NotFound | PeerLost] = {}
        self._version: int | None = None

    def distances(self, version: int | None, sources: Sequence[Handle]) -> tuple[int, ...]:
        """Begin to bring a version; returns how far each source is."""
        if version != self._version:  # a source that has lost one version may have the next
            self._lost = {source: error for source, error in self._lost.items() if isinstance(error, PeerLost)}
        self._version = version
        return tuple([self._distance(source, len(sources) > 1) for source in sources])

    def _distance(self, handle: Handle, is_one_of_several: bool) -> int:
        source, peers = (handle.home, handle._instance_id), self._local.peers
        route = peers.route(handle.home)
        if is_one_of_several:
            try:
                peers.check_present(route)
            except PeerLost as error:
                self._lost.setdefault(source, handle._home_lost(error))
        if source in self._lost:
            return UNUSED
        if route.member.rank == self._local.me.rank:
            return 0
        return 1 if route.member.node_id == self._local.me.node_id else 2

    def leave_out(self, source: Source, error: NotFound | PeerLost) -> bool:
        """Do without a source from now on; False if that is so already."""
        return self._lost.setdefault(source, error) is untraced(error)

    def peer_lost(self) -> PeerLost | None:
        """The first loss of a publisher in this pull, which may have left something written."""
        return next((error for error in self._lost.values() if isinstance(error, PeerLost)), None)

    def check_whole(self) -> None:
        """The sources in use do not have it all: raise the reason, if others were lost."""
        if (error := self.peer_lost() or next(iter(self._lost.values()), None)) is not None:
            raise again(error)


class PullState(Enum):
    """What a pull does next; see ``ModelPull.advance``."""

    FIND = "find the version, and who has it"
    LEASE = "lease it at each source, as the last plan needs them"
    PLAN = "plan what comes from where, if the last plan does not apply"
    MOVE = "move the tensors into the model"
    DONE = "nothing"


class ModelPull:
    """One pull into a model, by the thread that uses it: a state after the other, until it is done."""

    def __init__(
        self,
        requests: Requests,
        store: Handle,
        memory: PullMemory,
        model: Any,
        options: Options,
        lending: Callable[[Any], Any],
        wait: Callable[[int, float], Any],
    ) -> None:
        """``lending``: see ``keep_admission``. ``wait``: blocks until that version or a newer one is there."""
        self._requests, self._local, self._store, self._name = requests, requests.local, store, store.name
        self._memory, self._options = memory, options
        self._lending, self._wait = lending, lending(wait)
        self._model = ModelTensors(model, store.name)  # looked at while the homes answer: that takes as long
        self._usable = UsableSources(self._local)
        self.state = PullState.FIND
        self.has_begun = False  # whether some tensors may have been written
        self.version = 0  # as soon as it is leased

        # What is to be pulled.
        self._wanted: int | None = None  # the version; None: the newest
        self._since: int | None = None
        self._has_coordinator = publishers_of(store) is not None  # else the home alone decides which versions exist
        self._may_guess = self._has_coordinator and memory.committed is not None
        self._is_newest: Callable[[], bool] | None = None
        """Of a guess: whether the version that the sources have leased is the newest one of the store."""
        self._committed: Committed | None = None
        self._sources: Sequence[Handle] = ()

        # Of the leases that it has, or is about to have.
        self._asks_for: int | None = None  # the version; None: the newest
        self._distances: tuple[int, ...] = ()  # how far each source is
        self._may_expect = True  # that the model is the last one, in the same memory
        self._planned: list[SourceCopies] | None = None
        self._pulls: dict[int, SourcePull] = {}  # by the source's number

    def bring(self, version: int | None, since: int | None) -> int:
        """Bring a version into the model; returns its number. See ``WeightStore.pull``."""
        self._wanted, self._since = version, since
        self._may_guess = self._may_guess and version is None
        try:
            while self.state is not PullState.DONE:
                self.advance()
        except (NotFound, Empty) as error:
            if (lost := self._usable.peer_lost()) is not None:  # other errors would be wrong: something may be written
                raise again(lost) from error
            raise
        finally:
            self._release()
        return self.version

    def advance(self) -> None:
        """Do what ``state`` says, and note what comes next."""
        if self.state is PullState.FIND:
            self.state = self._find()
            return
        try:
            if self.state is PullState.LEASE:
                self.state = self._lease()
            elif self.state is PullState.PLAN:
                self.state = self._plan()
            elif self.state is PullState.MOVE:
                self.state = self._move()
        except (NotFound, PeerLost) as error:
            self.state = self._begin_again(error)

    def _begin_again(self, error: NotFound | PeerLost) -> PullState:
        """A source has failed, or what it has: do without it, or with a newer version. Raises the error otherwise."""
        failed = next((pull.lease.source for pull in self._pulls.values() if pull.failure is error), None)
        self._release()
        is_guess, self._is_newest = self._has_coordinator and self._committed is None, None
        if is_guess and not self.has_begun:  # the coordinator may know better
            return PullState.FIND
        self._since = None
        if failed is not None and len(self._sources) > 1 and self._usable.leave_out(failed, error):
            return PullState.FIND
        if is_guess:
            return PullState.FIND
        seconds = self._requests.seconds_left()
        if isinstance(error, PeerLost) or self._wanted is not None or self._committed is None or not seconds:
            raise error
        # A publisher has retired or lost it, and no other has the same: only a newer one helps.
        self._wait(self._committed.version + 1, seconds)
        return PullState.FIND

    def _release(self) -> None:
        pulls, self._pulls = self._pulls, {}
        for pull in pulls.values():
            pull.release()

    # --- the version ---------------------------------------------------------------------------------------------

    def _find(self) -> PullState:
        """Find out which version to pull, and who has it. Waits for the first one."""
        self._asks_for, self._may_expect = self._wanted, True
        if not self._has_coordinator:
            self._sources = [self._store]
            return PullState.LEASE
        if self._may_guess and self._memory.committed is not None:
            self._may_guess = False
            return self._guess(self._memory.committed)
        self._committed = self._await_version()
        if self._committed.version == self._since:
            self.version = self._committed.version
            return PullState.DONE
        self._asks_for, self._sources = self._committed.version, sources_of(self._store, self._committed)
        return PullState.LEASE

    def _guess(self, last: Committed) -> PullState:
        """Lease the newest version of the publishers that the last pull has found, while the coordinator is asked."""
        newest = look(self._store, self._local, None, self._requests.seconds_left())

        def is_newest() -> bool:
            committed = newest()
            if committed is None or committed.instances != last.instances:
                return False
            given = [pull.lease.given for pull in self._pulls.values()]
            return all(lease is not None and lease.version == committed.version for lease in given)

        self._is_newest, self._sources = is_newest, sources_of(self._store, last)
        return PullState.LEASE

    def _await_version(self) -> Committed:
        while True:
            asked = look(self._store, self._local, self._wanted, self._requests.seconds_left())
            committed: Committed | None = self._lending(asked)()
            if committed is not None:
                self._memory.committed = committed
                return committed
            _ = self._model.shards  # raises what would be wrong at any version
            self._wait(1, self._requests.seconds_left())

    # --- the leases ----------------------------------------------------------------------------------------------

    def _lease(self) -> PullState:
        """Lease the version at each source that is needed. Nothing is written before all have agreed."""
        before, self._pulls = self._pulls, {}
        try:
            self._requests.counter.begin_again()
            self._distances = self._usable.distances(self._asks_for, self._sources)
            expected = self._memory.expected(self._options, self._distances) if self._may_expect else None
            self._planned = expected or self._known_plan()
            self._pulls = self._pulls_of(self._planned)
            for at, pull in enumerate(self._pulls.values()):
                with pull.failing():
                    pull.ask(self._asks_for, self._since, caller_waits=not at)  # this thread waits for the first
        finally:
            for pull in before.values():
                pull.release()
        if expected is not None:
            self._planned = self._known_plan()
            if self._planned is None or not all(map(SourceCopies.asks_like, self._planned, expected)):
                self._may_expect = False
                return PullState.LEASE
            for number, pull in self._pulls.items():
                pull.planned = self._planned[number]
        self._await_leases()
        if self._is_newest is not None and not self._is_newest():
            self._is_newest = None
            self._release()
            return PullState.FIND
        return PullState.DONE if self.version == self._since else PullState.PLAN

    def _known_plan(self) -> list[SourceCopies] | None:
        """What the plan of a pull before brings into this model from each source; None if none applies."""
        if (targets := self._model.targets) is None:
            return None
        for plan in self._memory.plans:
            if plan.distances != self._distances:
                continue
            if (sources := plan.into(targets, self._options, self._model.check)) is not None:
                if self._model.makes_tensors:
                    self._model.check(set(plan.names))
                self._memory.remember(plan)
                return sources
        return None

    def _pulls_of(self, planned: Sequence[SourceCopies] | None) -> dict[int, SourcePull]:
        """Pulls from the sources that are needed."""
        if planned is None:
            layouts, probable = self._memory.layouts(len(self._sources)), self._model.device_type
        else:
            layouts, probable = [copies.layout for copies in planned], None
        pulls: dict[int, SourcePull] = {}
        for number, source in enumerate(self._sources):
            copies = None if planned is None else planned[number]
            if self._distances[number] == UNUSED:
                continue
            if copies is None or copies.transfers or len(self._sources) == 1:
                known = None if copies is None or copies.converts else copies.device_type
                pulls[number] = SourcePull(source, self._requests, layouts[number], copies, known or probable)
        return pulls

    def _await_leases(self) -> None:
        if any(pull.planned is None for pull in self._pulls.values()):
            _ = self._request  # raises if the model is invalid, though there may be nothing to pull
        self.version = self._asks_for or 0
        for pull in self._pulls.values():
            with pull.failing():
                lease = pull.answer()
                while lease is None and len(self._pulls) == 1:  # nothing is published yet
                    self._wait(1, self._requests.seconds_left())
                    pull.ask(self._asks_for, self._since, caller_waits=True)
                    lease = pull.answer()
            self.version = self.version if lease is None else lease.version

    # --- the plan ------------------------------------------------------------------------------------------------

    @cached_property
    def _request(self) -> Request:
        """What the model wants. Raises ConfigurationError for an invalid model."""
        values, shards = self._model.values, self._model.shards
        request = Request.of(self._name, shards, self._options, [source.home for source in self._sources])
        if isinstance(values, Mapping) and len(shards) < len(values):  # this process has nothing of some
            absent = (str(name) for name in values if str(name) not in shards)
            parts = (part for name in absent for part in self._options.mapping.get(name, (name,)))
            request = request._replace(elsewhere=request.elsewhere.union(parts))
        return request

    def _plan(self) -> PullState:
        """Plan anew, unless the last plan is for the layouts that the sources have now."""
        if self._planned is not None and all(pull.planned is not None for pull in self._pulls.values()):
            return PullState.MOVE
        if self._planned is not None:  # some layout is another now; the others may be, and those of other plans
            self._memory.plans = ()
            self._asks_for, self._since, self._is_newest, self._may_expect = self.version, None, None, True
            return PullState.LEASE
        self._make_plan()
        return PullState.MOVE

    def _make_plan(self) -> None:
        """Raises ConfigurationError, or why some sources are left out."""
        used = [self._pulls.get(number) for number in range(len(self._distances))]
        layouts = [_NOTHING if pull is None or pull.lease.given is None else pull.lease.layout for pull in used]
        if UNUSED in self._distances and not self._options.strict:  # what those alone have would be left out unseen
            self._usable.check_whole()
        request = self._request
        if (targets := self._model.targets) is None:
            self._model.check(request.targets)
        assert targets is not None
        try:
            known = [layout or _NOTHING for layout in layouts]
            plan = make_plan(request, self._options, known, self._distances, self._local.me.rank, targets)
        except ConfigurationError:
            if UNUSED in self._distances:
                self._usable.check_whole()
            raise
        sources = plan.into(targets, self._options, self._model.check)
        self._memory.remember(plan)
        for number, copies in enumerate(sources or ()):
            if number in self._pulls:
                self._pulls[number].planned = copies

    # --- the tensors ---------------------------------------------------------------------------------------------

    def _move(self) -> PullState:
        """Bring the tensors that are planned into the model."""
        self.has_begun, targets = True, self._model.targets
        for at, pull in enumerate(self._pulls.values()):
            with pull.failing():
                pull.request({} if targets is None else targets.tensors, caller_waits=not at)
        # The most comes on this stream, and first: a side stream follows only what is queued here before this.
        streams = self._side_streams() if len(self._pulls) > 1 else None
        ordered = sorted(self._pulls.values(), key=SourcePull.expect, reverse=True)
        try:
            for pull in ordered:
                is_aside = pull is not ordered[0] and pull.selection.nbytes >= _WORTH_A_STREAM
                with streams.one() if is_aside and streams is not None else nullcontext(), pull.failing():
                    pull.receive()
        finally:
            if streams is not None:
                streams.join()
        for check in [pull.lease.give_back() for pull in ordered]:
            check()
        return PullState.DONE

    def _side_streams(self) -> SideStreams | None:
        """Streams for several sources: one comes over NVLink while another is copied within the GPU."""
        tensors = {} if self._model.targets is None else self._model.targets.tensors
        device = next((tensor.device for tensor in tensors.values()), None)
        return SideStreams(device) if device is not None and device.type == "cuda" else None
