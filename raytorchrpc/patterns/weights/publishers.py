"""Stores with several publishers: a version exists once each of them has published its shards of it.

Every publisher keeps its own shards (see ``published``). The first one coordinates: the others tell it what they have
staged, and readers ask it which version is the newest that all have.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

from raytorchrpc.calls.current import current_local
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.services import DeferredReply
from raytorchrpc.errors import ConfigurationError, NotAMember, NotFound, RayTorchRpcError, RpcTimeout
from raytorchrpc.patterns.handle import Handle, factories, give_up_at, register_methods
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


def shards_name(store: str, instance: int | None) -> str:
    """The name of each publisher's shards. A new store of the same name has new ones."""
    return f"{store} {instance}"


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


class _Behind(NamedTuple):
    """A publisher that waits for the others."""

    version: int
    reply: DeferredReply


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

    def next_version(self, publisher: Publisher, newest: int) -> int:
        """The number of a publisher's next version. ``newest``: its own newest; 0 before the first."""
        with self._lock:
            self._note(publisher)
            return max(self._void, self._newest(), newest) + 1

    def staged(self, publisher: Publisher, version: int, until: float) -> int | DeferredReply:
        """Note that a publisher has its shards of a version; returns the oldest version that it has to keep.

        Answers later if the publisher is far ahead of the others.
        """
        with self._lock:
            self._note(publisher)
            self._highest = max(self._highest, version)
            if version <= max(self._void, self._newest()):
                return self._oldest()
            having = self._staged.setdefault(version, {})
            having[publisher.number] = publisher.instance
            complete = len(having) == len(self._publishers)
            if not complete:
                mine = [number for number, others in self._staged.items() if publisher.number in others]
                return self._await_others(publisher.number, version, until) if len(mine) > _AHEAD else self._oldest()
            due, ahead = self._commit(version, having), self._behind
            self._behind = []
            oldest = self._oldest()
        for waiting in due:
            waiting.settle(version)
        for _, reply in ahead:
            reply.settle(oldest)
        self._tell_publishers(oldest, but=publisher.number)
        return oldest

    def _note(self, publisher: Publisher) -> None:
        before = self._present.get(publisher.number)
        self._present[publisher.number] = publisher
        if before is not None and before != publisher:
            self._drop_staged()

    def _drop_staged(self) -> None:
        """A publisher was restarted: what was staged with it must not be completed with its next state."""
        self._staged.clear()
        self._void = self._highest

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
        behind = _Behind(version, reply)
        self._behind.append(behind)
        first = min(self._staged)
        late = [name for number, name in enumerate(self._publishers) if number not in self._staged[first]]

        def give_up() -> None:
            with self._lock:
                if behind in self._behind:
                    self._behind.remove(behind)
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
        """See ``Served``. Noticed here, a restart separates the versions before it from those after it, for all."""
        with suppress(NotAMember, ValueError):
            number = self._publishers.index(self._local.peers.route(rank).member.name)
            with self._lock:
                there = self._present.get(number)
                if there is not None and there.process != process:
                    del self._present[number]
                    self._drop_staged()

    def close(self, error: Exception) -> None:
        super().close(error)
        with self._lock:
            behind, self._behind = self._behind, []
        for _, reply in behind:
            reply.settle(None, error)


def _open(local: LocalMember, name: str, settings: Any) -> PublishedWeights | Coordinator:
    return Coordinator(local, name, settings) if len(settings) > 2 else PublishedWeights(local, settings)


factories[KIND] = _open
factories[SHARDS] = lambda local, name, settings: PublishedWeights(local, settings)
register_methods(
    {
        STAGED: lambda store, _, publisher, version, wait_s: store.staged(
            Publisher(*publisher), version, time.monotonic() + wait_s
        ),
        LOOK: lambda store, _, version: store.look(version),
        NEXT: lambda store, _, publisher, newest: store.next_version(Publisher(*publisher), newest),
        RETIRE: lambda weights, _, oldest: weights.retire_before(oldest),
    }
)
