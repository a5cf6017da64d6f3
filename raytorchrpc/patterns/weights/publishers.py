"""Stores with several publishers: a version exists once each of them has published its shards of it.

Every publisher keeps its own shards (see ``published``). The first one coordinates: the others tell it what they have
staged, and readers ask it which version is the newest that all have.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NamedTuple

import torch

from raytorchrpc.calls.current import current_local
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.services import DeferredReply
from raytorchrpc.errors import ConfigurationError, NotAMember, NotFound, RayTorchRpcError, RpcTimeout
from raytorchrpc.patterns.handle import Handle, Steps, begin, give_up_at
from raytorchrpc.patterns.home import factories, register_methods, setting_names
from raytorchrpc.patterns.weights.plan import PlaceInWhole
from raytorchrpc.patterns.weights.published import KIND, PublishedWeights
from raytorchrpc.patterns.weights.versions import VersionWaits

#: The shards of one publisher.
SHARDS = "weight shards"

#: Services of the coordinator.
STAGED, LOOK, NEXT = "raytorchrpc.weights.staged", "raytorchrpc.weights.look", "raytorchrpc.weights.next"
#: Of each publisher.
RETIRE = "raytorchrpc.weights.retire"

#: How many versions a publisher may be ahead of the others; each takes memory.
_AHEAD = 2


class Committed(NamedTuple):
    """A version that all publishers have."""

    version: int
    instances: tuple[int, ...]
    """Of each publisher's shards: a restarted publisher has lost them."""


class Shards(Handle):
    """The shards of one publisher."""

    kind: ClassVar[str] = SHARDS

    @property
    def _lives_with(self) -> tuple[str, ...]:
        return self._home, self._settings[2]


def shards_name(store: str, instance: int | None) -> str:
    """The name of each publisher's shards. A new store of the same name has new ones."""
    return f"{store} {instance}"


def shards_of_publisher(store: Handle, publisher: str, instance: int | None) -> Shards:
    """The handle of one publisher's shards of a store. ``instance`` None: of its present process."""
    name = shards_name(store.name, store._instance_id)
    return Shards._restore(name, publisher, (*store._settings[:2], store.home), instance)


def stage(
    store: Handle,
    publishers: Sequence[str],
    tensors: Mapping[str, torch.Tensor],
    places: Mapping[str, PlaceInWhole],
    version: int | None,
    timeout: float | None,
    partial: bool,
) -> Steps[int]:
    """Publish this member's shards of a version; see ``WeightStore.publish``."""
    local, wait_s = yield from begin(timeout)
    if local.me.name not in publishers:
        raise ConfigurationError(
            f"{store.kind} {store.name!r} is published by {', '.join(publishers)}, not by {local.me.name!r}"
        )
    yield from store._bind(local, wait_s)
    mine = shards_of_publisher(store, local.me.name, None)
    yield from mine._bind(local)
    weights: PublishedShards = mine._object(local)
    me = (publishers.index(local.me.name), local.incoming.token, mine._instance_id)
    if version is None or weights.is_unsure:
        with weights.answering() as settled:
            number, kept = yield from store._request(local, NEXT, (*store._address, me, weights.last()), wait_s)
        weights.retire(set(settled).difference(kept))
        version = number if version is None else version
    with weights.answering(version) as settled:
        weights.publish(tensors, version, places, staged=True, partial=partial)
        kept = yield from store._request(local, STAGED, (*store._address, me, version, wait_s), wait_s)
    weights.retire(set(settled).difference(kept))
    return version


def names_of(members: Any, home: Any) -> tuple[str, ...]:
    """The names of publishers. Raises ConfigurationError."""
    if home is not None:
        raise ConfigurationError("pass home= or publishers=, not both: the first publisher is the home")
    members = getattr(members, "ranks", members)  # of a ProcessGroupInfo, the members' names in their order
    if isinstance(members, str) or not members:
        raise ConfigurationError(f"publishers= is a list of members, such as ['left', 'right'], not {members!r}")
    local = current_local()
    names = [
        local.peers.route(member).member.name if local is not None else getattr(member, "name", member)
        for member in members
    ]
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise ConfigurationError(
            f"this process is in no group, so publishers= has to be the members' names, not {wrong[0]!r}"
        )
    if len(set(names)) < len(names):
        raise ConfigurationError(f"publishers= names a member twice: {', '.join(names)}")
    return tuple(names)


class Publisher(NamedTuple):
    """One process that publishes."""

    number: int
    """In the list of publishers."""
    process: str
    """The token of the process."""
    instance: int
    """Of its shards."""


#: Publishers that wait no longer, and what each is told; see ``Coordinator.staged``.
_Freed = list[tuple[DeferredReply, list[int]]]


class _Behind(NamedTuple):
    """A publisher that waits for the others."""

    publisher: int
    version: int
    reply: DeferredReply


class PublishedShards(PublishedWeights):
    """The shards of one publisher. Thread-safe."""

    def __init__(self, local: LocalMember, settings: tuple[int, bool, str]) -> None:
        """``settings``: see ``PublishedWeights``; the coordinator's name."""
        super().__init__(local, settings[:2])
        self.settings: Any = settings
        coordinator = local.peers.route(settings[2])
        self._coordinator, self._process = coordinator.member.rank, coordinator.token
        self._unanswered: set[int] = set()
        self.is_unsure = False
        """Whether the coordinator may not have a version that is here, because it did not answer or did not take it."""

    @contextmanager
    def answering(self, *version: int) -> Iterator[list[int]]:
        """While the coordinator is asked, and told of a version; yields those for which its answer will count."""
        with self._lock:
            settled = [number for number in self._versions if number not in self._unanswered] + list(version)
            self._unanswered.update(version)
        try:
            yield settled
            self.is_unsure = False
        except BaseException as error:
            self.is_unsure = True
            if isinstance(error, NotFound):
                self.end()
            raise
        finally:
            with self._lock:
                self._unanswered.difference_update(version)

    def retire(self, versions: Iterable[int]) -> None:
        """Retire these versions, those of them that are here."""
        with self._lock:
            old = [self._versions.pop(number)[1] for number in versions if number in self._versions]
        for snapshot in old:
            self.pool.retire(snapshot)

    def retire_before(self, version: float) -> None:
        """Retire the versions before this one."""
        with self._lock:
            old = [number for number in self._versions if number < version]
        self.retire(old)

    def end(self) -> None:
        """The store has ended: free all memory, as soon as nobody reads it."""
        self.retire_before(math.inf)
        self.pool.drop_spare_memory()

    def keep_only(self, rank: int, process: str | None) -> None:
        """See ``Served``. A store ends with the process that coordinates it."""
        if rank == self._coordinator and process != self._process:
            self.end()


class Coordinator(VersionWaits):
    """Which versions exist. Thread-safe; never blocks."""

    def __init__(self, local: LocalMember, name: str, settings: tuple[int, bool, tuple[str, ...]]) -> None:
        """``settings``: how many versions can be pulled; whether changes are tracked; the publishers' names."""
        super().__init__(local)
        self.settings = settings
        self._name, self._keep, self._publishers = name, settings[0], settings[2]
        self._staged: dict[int, dict[int, int]] = {}
        """By version: which publishers have it, with the instances of their shards."""
        self._present: dict[int, Publisher] = {}
        self._committed: OrderedDict[int, Committed] = OrderedDict()
        self._highest = self._void = 0
        """The highest version that anyone has staged; versions up to ``_void`` that do not exist never will."""
        self._behind: list[_Behind] = []

    # --- publishers ----------------------------------------------------------------------------------------------

    def next_version(self, publisher: Publisher, last: int) -> tuple[int, list[int]]:
        """The number of a publisher's next version, and the versions that it has to keep.

        ``last``: the highest number that it has used; 0 before the first.
        """
        with self._lock:
            self._check_open()
            freed = self._note(publisher)
            found = max(self._void, self._newest(), last) + 1, self._kept(publisher.number)
        _settle(freed)
        return found

    def staged(self, publisher: Publisher, version: int, until: float) -> list[int] | DeferredReply:
        """Note that a publisher has its shards of a version; returns the versions that it has to keep.

        Answers later if the publisher is far ahead of the others.
        """
        with self._lock:
            self._check_open()
            freed, due = self._note(publisher), list[DeferredReply]()
            self._highest = max(self._highest, version)
            is_complete = False
            if version > max(self._void, self._newest()):
                having = self._staged.setdefault(version, {})
                having[publisher.number] = publisher.instance
                is_complete = len(having) == len(self._publishers)
            if is_complete:
                due = self._commit(version, having)
                freed += self._free()
            mine = [number for number, others in self._staged.items() if publisher.number in others]
            answer: list[int] | DeferredReply = self._kept(publisher.number)
            if version in mine and len(mine) > _AHEAD:
                answer = self._await_others(publisher.number, version, until)
            oldest = self._oldest()
        for waiting in due:
            waiting.settle(version)
        _settle(freed)
        if is_complete:
            self._tell_publishers(oldest, but=publisher.number)
        return answer

    def _note(self, publisher: Publisher) -> _Freed:
        before = self._present.get(publisher.number)
        self._present[publisher.number] = publisher
        return self._drop_staged() if before is not None and before != publisher else []

    def _drop_staged(self) -> _Freed:
        """A publisher was restarted: what was staged with it must not be completed with its next state.

        Those that wait for it go on: the version that they have published will not exist.
        """
        self._staged.clear()
        self._void = self._highest
        return self._free()

    def _free(self) -> _Freed:
        """Take the publishers that wait, with what they are told. The caller settles them without the lock."""
        behind, self._behind = self._behind, []
        return [(one.reply, self._kept(one.publisher)) for one in behind]

    def _kept(self, publisher: int) -> list[int]:
        """The versions that a publisher has to keep."""
        return [*self._committed, *(number for number, others in self._staged.items() if publisher in others)]

    def _commit(self, version: int, having: dict[int, int]) -> list[DeferredReply]:
        instances = tuple(having[publisher] for publisher in range(len(self._publishers)))
        self._committed[version] = Committed(version, instances)
        while len(self._committed) > self._keep:
            self._committed.popitem(last=False)
        for number in [number for number in self._staged if number <= version]:
            del self._staged[number]
        return self._due(version)

    def _await_others(self, publisher: int, version: int, until: float) -> DeferredReply:
        reply = DeferredReply()
        behind = _Behind(publisher, version, reply)
        self._behind.append(behind)
        first = min(number for number, others in self._staged.items() if publisher in others)
        late = [name for number, name in enumerate(self._publishers) if number not in self._staged[first]]

        def give_up() -> None:
            with self._lock:
                if behind in self._behind:
                    self._behind.remove(behind)
                    self._staged[version].pop(publisher, None)  # else each one that is in vain takes memory
            reply.settle(
                None,
                RpcTimeout(
                    f"weight store {self._name!r}: {self._publishers[publisher]!r} has published version {version}, "
                    f"but {', '.join(late)} not even version {first}; every publisher has to publish each version"
                ),
            )

        return give_up_at(self._local.deadlines, until, reply, give_up)

    def _oldest(self) -> int:
        return next(iter(self._committed)) if self._committed else 0

    def _newest(self) -> int:
        return next(reversed(self._committed)) if self._committed else 0

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

    # --- readers -------------------------------------------------------------------------------------------------

    def look(self, version: int | None) -> Committed | None:
        """A version (None: the newest); None if there is none yet. Raises NotFound if it is not kept."""
        with self._lock:
            self._check_open()
            if not self._committed and version is None:
                return None
            chosen = self._newest() if version is None else version
            found = self._committed.get(chosen)
            if found is None:
                kept = ", ".join(map(str, self._committed)) or "none"
                raise NotFound(f"version {chosen} of the weights is not there, or no longer (there: {kept})")
            return found

    def lose(self, rank: int) -> None:
        """See ``Served``. What a publisher has staged stays: it may only be away."""

    def keep_only(self, rank: int, process: str | None) -> None:
        """See ``Served``. What was staged until a publisher's process ended, or until it restarted, never exists."""
        with suppress(NotAMember, ValueError):
            number, freed = self._publishers.index(self._local.peers.route(rank).member.name), _Freed()
            with self._lock:
                there = self._present.get(number)
                if there is not None and there.process != process:
                    if process is not None:  # else its restart is still to come, and separates versions once more
                        del self._present[number]
                    freed = self._drop_staged()
            _settle(freed)

    def close(self, error: Exception) -> None:
        super().close(error)
        with self._lock:
            behind, self._behind = self._behind, []
        for one in behind:
            one.reply.settle(None, error)


def _settle(freed: _Freed) -> None:
    for reply, kept in freed:
        reply.settle(kept)


def _open(local: LocalMember, name: str, settings: Any) -> PublishedWeights | Coordinator:
    return Coordinator(local, name, settings) if len(settings) > 2 else PublishedWeights(local, settings)


factories[KIND] = _open
setting_names[KIND] = setting_names[SHARDS] = ("keep", "track", "publishers")
factories[SHARDS] = lambda local, name, settings: PublishedShards(local, settings)
register_methods(
    {
        STAGED: lambda store, _, publisher, version, wait_s: store.staged(
            Publisher(*publisher), version, time.monotonic() + wait_s
        ),
        LOOK: lambda store, _, version: store.look(version),
        NEXT: lambda store, _, publisher, last: store.next_version(Publisher(*publisher), last),
        RETIRE: lambda weights, _, oldest: weights.retire_before(oldest),
    }
)
