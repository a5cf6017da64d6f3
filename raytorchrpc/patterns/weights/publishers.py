"""Stores with several publishers: a version exists once each of them has published its shards of it.

Every publisher keeps its own shards (see ``published``). The first one by name coordinates: the others tell it what
they have staged, and readers ask it which version is the newest that all have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NamedTuple

from raytorchrpc.calls.client.future import Future
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.scope import allow_calls
from raytorchrpc.calls.server.exposed import service
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import ConfigurationError, Empty, NotAMember, NotFound, PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.patterns.handle import Handle, Steps, member_name, run
from raytorchrpc.patterns.home import Kind, object_services
from raytorchrpc.patterns.waits import Waits
from raytorchrpc.patterns.weights.drafts import Draft
from raytorchrpc.patterns.weights.feeds import KIND as FEEDS
from raytorchrpc.patterns.weights.published import KIND, PublishedWeights, Versions
from raytorchrpc.patterns.weights.snapshots import Snapshot
from raytorchrpc.process.locks import Turn

#: The shards of one publisher.
SHARDS = "weight shards"

#: Services of the coordinator.
STAGED, LOOK, NEXT = "raytorchrpc.weights.staged", "raytorchrpc.weights.look", "raytorchrpc.weights.next"
END_LOAN = "raytorchrpc.weights.end_loan"
#: Of each publisher.
RETIRE = "raytorchrpc.weights.retire"
#: Of each member: it drops what it has of a store.
FORGET = "raytorchrpc.weights.forget"

#: How many versions a publisher may be ahead of the others; each takes memory.
_AHEAD = 2
#: How many publishers an error names.
_SHOWN = 8


class Committed(NamedTuple):
    """A version that all publishers have."""

    version: int
    instances: tuple[int, ...]  # of each publisher's shards: a restarted publisher has lost them


class Publisher(NamedTuple):
    """One process that publishes."""

    number: int  # in the list of publishers
    process: str  # the token of the process
    instance: int  # of its shards


def shards_name(store: str, instance: int | None) -> str:
    """The name of each publisher's shards. A new store of the same name has new ones."""
    return f"{store} {instance}"


class Coordinator(Versions[Committed]):
    """Which versions exist. Thread-safe; never blocks."""

    def __init__(self, local: LocalMember, name: str, settings: tuple[int, bool, tuple[str, ...]]) -> None:
        """``settings``: how many versions can be pulled; whether changes are tracked; the publishers' names."""
        super().__init__(local, name)
        self.settings = settings
        self._keep, self._publishers = settings[0], settings[2]
        self._staged: dict[int, dict[int, int]] = {}
        """By version that some publishers have, and by publisher: the instance of its shards."""
        self._vain: set[int] = set()
        """Versions above ``_void`` that will never exist: not all publishers have kept what they had staged."""
        self._present: dict[int, Publisher] = {}
        self._highest = self._void = 0
        """The highest version that anyone has staged; versions up to ``_void`` that do not exist never will."""
        self._behind: Waits[int] = Waits(local.deadlines, self._lock)
        """Publishers that are far ahead of the others, each by the version that it has staged last."""
        self._loans: dict[int, set[int]] = {}
        """By lent version: the publishers whose blocks have ended."""
        self._blocks: Waits[int] = Waits(local.deadlines, self._lock)
        """Publishers that wait for the blocks of the others, each by its version."""

    # --- publishers ----------------------------------------------------------------------------------------------

    def next_version(self, publisher: Publisher, last: int) -> tuple[int, list[int]]:
        """The next number of a publisher, which has used ``last``, and the versions that it has to keep."""
        with self._lock:
            self._check_open()
            self._note(publisher)
            return max(self._void, self._newest(), last) + 1, self._kept(publisher.number)

    def staged(self, publisher: Publisher, version: int, until: float) -> list[int] | DeferredReply:
        """Note that a publisher has its shards of a version; returns the versions that it has to keep.

        Answers later if it is far ahead of the others.
        """
        with self._lock:
            self._check_open()
            self._note(publisher)
            self._highest = max(self._highest, version)
            if version > max(self._void, self._newest()) and version not in self._vain:
                instances = self._staged.setdefault(version, {})
                instances[publisher.number] = publisher.instance
                if len(instances) == len(self._publishers):
                    self._commit(version, instances)
                    self._lock.after(self._tell_publishers, next(iter(self._versions)), publisher.number)
            staged = self._staged_by(publisher.number)
            if version in staged and len(staged) > _AHEAD:
                return self._await_others(publisher.number, version, until)
            return self._kept(publisher.number)

    def _staged_by(self, publisher: int) -> list[int]:
        return [version for version, instances in self._staged.items() if publisher in instances]

    def _note(self, publisher: Publisher) -> None:
        before = self._present.get(publisher.number)
        self._present[publisher.number] = publisher
        if before is not None and before != publisher:
            self._drop_staged()

    def _drop_staged(self) -> None:
        """A publisher was restarted: what was staged with its earlier process never becomes a version."""
        self._staged.clear()
        self._vain.clear()
        self._void = self._highest
        self._behind.settle()
        for version in list(self._loans):
            self._end_loan(version)

    def _kept(self, publisher: int) -> list[int]:
        return [*self._versions, *self._staged_by(publisher)]

    def _kept_now(self, publisher: int) -> list[int]:
        with self._lock:
            return self._kept(publisher)

    def _commit(self, version: int, having: dict[int, int]) -> None:
        instances = tuple(having[publisher] for publisher in range(len(self._publishers)))
        self._versions[version] = Committed(version, instances)
        while len(self._versions) > self._keep:
            self._versions.popitem(last=False)
        self._staged = {number: instances for number, instances in self._staged.items() if number > version}
        self._vain = {number for number in self._vain if number > version}
        self._waits.settle(lambda wanted: wanted <= version, version)
        self._behind.settle()

    def _await_others(self, publisher: int, version: int, until: float) -> DeferredReply:
        first = min(self._staged_by(publisher))
        late = [name for number, name in enumerate(self._publishers) if number not in self._staged[first]]

        def give_up() -> tuple[None, RpcTimeout]:
            if self._staged.pop(version, None) is not None:  # each one that is in vain takes memory
                self._vain.add(version)
            self._behind.settle(version.__eq__)
            return None, RpcTimeout(
                f"weight store {self._name!r}: {self._publishers[publisher]!r} has published version {version}, "
                f"but {', '.join(late)} not even version {first}; every publisher has to publish each version"
            )

        reply = DeferredReply()
        reply.convert = lambda _: self._kept_now(publisher)
        return self._behind.add(version, until, give_up, reply)

    def end_loan(self, publisher: Publisher, version: int, until: float, at_once: bool) -> DeferredReply | None:
        """Answer once the blocks of all publishers have ended, and so the loan of their shards of a version.

        ``at_once``: or now. The loan ends for all publishers together, also at ``until`` and if one of them is lost.
        """
        with self._lock:
            self._check_open()
            if version not in self._versions and version not in self._staged:  # it has ended, or never was
                return None
            ended = self._loans.setdefault(version, set())
            ended.add(publisher.number)
            is_lost = version <= self._void  # a publisher was restarted since
            if at_once or is_lost or len(ended) == len(self._publishers):
                self._end_loan(version)
                return None

            def give_up() -> tuple[None, RpcTimeout]:
                others = set(range(len(self._publishers))) - self._loans.get(version, set())
                self._end_loan(version)
                return None, RpcTimeout(
                    f"weight store {self._name!r}: took back version {version} at the end of the timeout; "
                    f"{', '.join(self._publishers[number] for number in sorted(others)[:_SHOWN])} had not lent its "
                    f"shards, or had not ended its block: every publisher has to lend the version, and end"
                )

            return self._blocks.add(version, until, give_up)

    def _end_loan(self, version: int) -> None:
        for number in [number for number in self._versions if number <= version]:
            del self._versions[number]
        if self._staged.pop(version, None) is not None:  # it will never be a version
            self._vain.add(version)
        self._loans.pop(version, None)
        self._blocks.settle(version.__eq__)

    def _tell_publishers(self, oldest: int, but: int) -> None:
        """Have publishers free the memory of older versions. Does not wait for them."""
        shards = shards_name(self._name, self.instance_id)
        for number, name in enumerate(self._publishers):
            if number != but and (there := self._present.get(number)) is not None:
                with suppress(RayTorchRpcError):
                    if name == self._local.me.name:
                        self._local.services.find(SHARDS, shards, there.instance, name).retire_before(oldest)
                    else:
                        request = (SHARDS, shards, there.instance, oldest)
                        self._local.outgoing.call(name, RETIRE, request, {}, CallOptions(retry=0))

    def _not_in_time(self, version: int) -> Empty:
        newest = [max([self._newest(), *self._staged_by(number)]) for number in range(len(self._publishers))]
        last = sorted(range(len(newest)), key=newest.__getitem__)[:_SHOWN]
        return Empty(
            f"version {version} was not published to weight store {self._name!r} in time; every publisher has to "
            f"publish it, and the newest of each is: {', '.join(f'{self._publishers[n]} {newest[n]}' for n in last)}"
        )

    # --- readers -------------------------------------------------------------------------------------------------

    def look(self, version: int | None) -> Committed | None:
        """A version (None: the newest); None if there is none yet. Raises NotFound if it is not kept."""
        with self._lock:
            self._check_open()
            if not self._versions and version is None:
                return None
            return self._find(version)

    def lose(self, rank: int) -> None:
        """See ``Served``. What a publisher has staged stays: it may only be away."""

    def keep_only(self, rank: int, process: str | None) -> None:
        """See ``Served``. What was staged until a publisher's process ended, or until it restarted, never exists."""
        with suppress(NotAMember, ValueError):
            number = self._publishers.index(self._local.peers.route(rank).member.name)
            with self._lock:
                there = self._present.get(number)
                if there is not None and there.process != process:
                    if process is not None:  # else its restart is still to come, and separates versions once more
                        del self._present[number]
                    self._drop_staged()

    def close(self, error: Exception) -> None:
        super().close(error)
        with self._lock:
            self._behind.settle(error=error)
            self._blocks.settle(error=error)


class Shards(Handle):
    """The shards of one publisher."""

    kind: ClassVar[str] = SHARDS

    @property
    def _lives_with(self) -> tuple[str, ...]:
        return self._home, self._settings[2]

    @property
    def _label(self) -> str:
        return f"shards of {KIND} {self._name.rsplit(' ', 1)[0]!r}"  # see ``shards_name``


def shards_of_publisher(store: Handle, publisher: str, instance: int | None) -> Shards:
    """The handle of one publisher's shards of a store. ``instance`` None: of its present process."""
    name = shards_name(store.name, store._instance_id)
    group = store._generation, store._group
    return Shards._restore(name, publisher, (*store._settings[:2], store.home), instance, *group)


def publishers_of(store: Handle) -> tuple[str, ...] | None:
    """The names of the members that publish to a store, sorted; None: its home alone does."""
    names: tuple[str, ...] | None = store._settings[2] if len(store._settings) > 2 else None
    return names


def look(store: Handle, local: LocalMember, version: int | None, wait_s: float) -> Callable[[], Committed | None]:
    """Ask the coordinator for a version (None: the newest).

    What it returns waits for the answer: None if there is none yet. It raises NotFound.
    """
    args = (*store._address, version)
    if store._is_home(local):
        answer = store._request(local, LOOK, args, wait_s)
    else:
        answer = store._response(store._send(local, LOOK, args, wait_s))

    def found() -> Committed | None:
        taken = run(answer)
        return None if taken is None else Committed(*taken)

    return found


def sources_of(store: Handle, committed: Committed | None) -> list[Handle]:
    """The handles of the members that have a version; None: the home has it."""
    if committed is None:
        return [store]
    there = zip(publishers_of(store) or (), committed.instances, strict=True)
    return [shards_of_publisher(store, name, instance) for name, instance in there]


def stage(
    store: Handle, publishers: Sequence[str], draft: Draft, version: int | None, timeout: float | None, lends: bool
) -> Steps[tuple[PublishedShards, Snapshot, Publisher]]:
    """Publish this member's shards of a version, or lend them; see ``WeightStore.publish`` and ``lend``.

    Returns what this member has of the store, the new version there, and what the coordinator knows this process by.
    """
    local, wait_s = yield from store._begin(timeout)
    if local.me.name not in publishers:
        raise ConfigurationError(
            f"{store.kind} {store.name!r} is published by {', '.join(publishers)}, not by {local.me.name!r}"
        )
    until = time.monotonic() + wait_s
    yield from store._bind(local, wait_s)
    shards = shards_of_publisher(store, local.me.name, None)
    yield from shards._bind(local)
    weights: PublishedShards = shards._object(local)
    began = time.monotonic()
    weights.copy(draft, version)
    until += time.monotonic() - began
    me = Publisher(publishers.index(local.me.name), local.incoming.token, shards._instance_id or 0)
    with weights.one_thread(until):
        wait_s = max(0.0, until - time.monotonic())
        if version is None or weights.is_unsure:
            number, kept = yield from store._request(local, NEXT, (*store._address, me, weights.last()), wait_s)
            weights.keep(kept)
            version = number if version is None else version
        weights.is_unsure = True
        snapshot = (weights.lend if lends else weights.publish)(draft, version, staged=True)
        try:
            weights.keep((yield from store._request(local, STAGED, (*store._address, me, version, wait_s), wait_s)))
        except BaseException:
            if lends:
                weights.end_loan(snapshot, 0.0)
            raise
        weights.is_unsure = False
    return weights, snapshot, me


def end_loan(store: Handle, me: Publisher, version: int, wait_s: float, at_once: bool) -> Steps[None]:
    """Wait until the other publishers of a loan have ended their blocks, too. Raises RpcTimeout and PeerLost."""
    local, _ = yield from store._begin(wait_s)
    yield from store._request(local, END_LOAN, (*store._address, me, version, wait_s, at_once), wait_s)


def names_of(members: Any, home: Any, group: str | None = None) -> tuple[str, ...]:
    """The names of publishers, sorted: any order is the same store. Raises ConfigurationError."""
    if home is not None:
        raise ConfigurationError("pass home= or publishers=, not both: the first publisher by name is the home")
    members = getattr(members, "ranks", members)  # of a ProcessGroupInfo, the members' names
    if isinstance(members, str) or not members:
        raise ConfigurationError(f"publishers= is a list of members, such as ['left', 'right'], not {members!r}")
    names = [member_name(member, "publishers", group) for member in members]
    if len(set(names)) < len(names):
        raise ConfigurationError(f"publishers= names a member twice: {', '.join(names)}")
    return tuple(sorted(names))


class PublishedShards(PublishedWeights):
    """The shards of one publisher. Thread-safe."""

    def __init__(self, local: LocalMember, name: str, settings: tuple[int, bool, str]) -> None:
        """``settings``: see ``PublishedWeights``; the coordinator's name."""
        super().__init__(local, name, settings[:2])
        self.settings: Any = settings
        self.pool.keeps_spare = True  # the version before stays until all publishers have the new one
        coordinator = local.peers.route(settings[2])
        self._coordinator, self._process = coordinator.member.rank, coordinator.token
        self._staging = Turn()
        self.is_unsure = False
        """Whether the coordinator may not have a version that is here, because it did not answer or did not take it."""

    @contextmanager
    def one_thread(self, until: float) -> Iterator[None]:
        """While a thread of this member publishes a version; others wait. Frees all memory if the store has ended."""
        with allow_calls():  # the one that publishes may need this actor to go on
            begins = self._staging.once("publishing").acquire(timeout=max(0.0, until - time.monotonic()))
        if not begins:
            raise RpcTimeout("another thread of this member waits for the other publishers; this one published nothing")
        try:
            yield
        except NotFound:
            self.clear()
            raise
        finally:
            self._staging.release()

    def keep(self, versions: Collection[int]) -> None:
        """Retire all versions but these."""
        self._retire(lambda number: number not in versions)

    def retire_before(self, version: int) -> None:
        self._retire(lambda number: number < version)

    def keep_only(self, rank: int, process: str | None) -> None:
        """See ``Served``. A store ends with the process that coordinates it."""
        if rank == self._coordinator and process != self._process:
            self.clear()


def _open(local: LocalMember, name: str, settings: Any) -> PublishedWeights | Coordinator:
    if len(settings) > 2:
        return Coordinator(local, name, settings)
    weights = PublishedWeights(local, name, settings)
    local.weights.watch((name, local.me.name), weights)
    return weights


def _open_shards(local: LocalMember, name: str, settings: Any) -> PublishedShards:
    store, _ = name.rsplit(" ", 1)  # see ``shards_name``
    shards = PublishedShards(local, store, settings)
    local.weights.watch((store, settings[2]), shards)
    return shards


def _forget(local: LocalMember, caller: int, name: str, home: str, instance: int) -> None:
    """Drop the shards and feeds of a store that is being deleted, unless somebody reads them."""
    for kind in (SHARDS, FEEDS):
        with suppress(NotFound):
            local.services.delete(kind, shards_name(name, instance), None, local.me.name)
    local.weights.forget((name, home))


def forget_everywhere(store: Handle, local: LocalMember) -> Steps[None]:
    """Have all members drop what they have of a store. Raises ConfigurationError where it is being read."""
    args = store.name, store.home, store._instance_id
    asked = []
    for member in local.peers.members:
        if member.rank == local.me.rank:
            _forget(local, local.me.rank, *args)  # type: ignore[arg-type]
        else:
            with suppress(PeerLost):  # what it had is gone, or goes with its process
                asked.append(Future[None](local.outgoing.call(member, FORGET, args, {}, CallOptions(retry=0))))
    while asked:
        with suppress(PeerLost):
            yield asked.pop()


_SETTING_NAMES = ("keep", "track", "publishers")
KINDS = {KIND: Kind(_open, _SETTING_NAMES), SHARDS: Kind(_open_shards, _SETTING_NAMES)}
SERVICES = {FORGET: service(_forget)} | object_services(
    {
        STAGED: lambda store, _, publisher, version, wait_s: store.staged(
            Publisher(*publisher), version, time.monotonic() + wait_s
        ),
        END_LOAN: lambda store, _, publisher, version, wait_s, at_once: store.end_loan(
            Publisher(*publisher), version, time.monotonic() + wait_s, at_once
        ),
        LOOK: lambda store, _, version: store.look(version),
        NEXT: lambda store, _, publisher, last: store.next_version(Publisher(*publisher), last),
        RETIRE: lambda weights, _, oldest: weights.retire_before(oldest),
    }
)
