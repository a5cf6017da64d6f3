"""Stores with several publishers: a version exists once each of them has published its shards of it.

Every publisher keeps its own shards (see ``published``). The first one by name coordinates: the others tell it what
they have staged, and readers ask it which version is the newest that all have.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.server.gates import allow_calls
from raytorchrpc.errors import ConfigurationError, NotFound, RpcTimeout
from raytorchrpc.patterns.handle import Handle, Steps, begin, member_name
from raytorchrpc.patterns.home import factories, register_methods, setting_names
from raytorchrpc.patterns.weights.coordinator import NEXT, RETIRE, SHARDS, STAGED, Coordinator, shards_name
from raytorchrpc.patterns.weights.plan import PlaceInWhole
from raytorchrpc.patterns.weights.published import KIND, PublishedWeights


class Shards(Handle):
    """The shards of one publisher."""

    kind: ClassVar[str] = SHARDS

    @property
    def _lives_with(self) -> tuple[str, ...]:
        return self._home, self._settings[2]


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
    only: tuple[str, ...],
) -> Steps[int]:
    """Publish this member's shards of a version; see ``WeightStore.publish``. ``only``: globs; none for all."""
    local, wait_s = yield from begin(timeout)
    until = time.monotonic() + wait_s
    if local.me.name not in publishers:
        raise ConfigurationError(
            f"{store.kind} {store.name!r} is published by {', '.join(publishers)}, not by {local.me.name!r}"
        )
    yield from store._bind(local, wait_s)
    mine = shards_of_publisher(store, local.me.name, None)
    yield from mine._bind(local)
    weights: PublishedShards = mine._object(local)
    me = (publishers.index(local.me.name), local.incoming.token, mine._instance_id)
    with weights.one_thread(until):
        wait_s = max(0.0, until - time.monotonic())
        if version is None or weights.is_unsure:
            with weights.answering() as settled:
                number, kept = yield from store._request(local, NEXT, (*store._address, me, weights.last()), wait_s)
            weights.retire(set(settled).difference(kept))
            version = number if version is None else version
        with weights.answering(version) as settled:
            carried = (only, weights.newest()) if only else None
            weights.publish(tensors, version, places, staged=True, partial=bool(only))
            kept = yield from store._request(local, STAGED, (*store._address, me, version, carried, wait_s), wait_s)
        weights.retire(set(settled).difference(kept))
    return version


def names_of(members: Any, home: Any) -> tuple[str, ...]:
    """The names of publishers, sorted, so that every order in which they are given is the same store.

    Raises ConfigurationError.
    """
    if home is not None:
        raise ConfigurationError("pass home= or publishers=, not both: the first publisher by name is the home")
    members = getattr(members, "ranks", members)  # of a ProcessGroupInfo, the members' names
    if isinstance(members, str) or not members:
        raise ConfigurationError(f"publishers= is a list of members, such as ['left', 'right'], not {members!r}")
    names = [member_name(member, "publishers") for member in members]
    if len(set(names)) < len(names):
        raise ConfigurationError(f"publishers= names a member twice: {', '.join(names)}")
    return tuple(sorted(names))


class PublishedShards(PublishedWeights):
    """The shards of one publisher. Thread-safe."""

    def __init__(self, local: LocalMember, settings: tuple[int, bool, str]) -> None:
        """``settings``: see ``PublishedWeights``; the coordinator's name."""
        super().__init__(local, settings[:2])
        self.settings: Any = settings
        coordinator = local.peers.route(settings[2])
        self._coordinator, self._process = coordinator.member.rank, coordinator.token
        self._staging = threading.Lock()
        self._unanswered: set[int] = set()
        self.is_unsure = False
        """Whether the coordinator may not have a version that is here, because it did not answer or did not take it."""

    @contextmanager
    def one_thread(self, until: float) -> Iterator[None]:
        """While a thread of this member publishes a version; others wait."""
        with allow_calls():  # the one that publishes may need this actor to go on
            begins = self._staging.acquire(timeout=max(0.0, until - time.monotonic()))
        if not begins:
            raise RpcTimeout("another thread of this member waits for the other publishers; this one published nothing")
        try:
            yield
        finally:
            self._staging.release()

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

    def newest(self) -> int:
        """The newest version that is here; 0 if there is none."""
        with self._lock:
            return self._newest()

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


def _open(local: LocalMember, name: str, settings: Any) -> PublishedWeights | Coordinator:
    if len(settings) > 2:
        return Coordinator(local, name, settings)
    weights = PublishedWeights(local, settings)
    local.weights.watch((name, local.me.name), weights)
    return weights


def _open_shards(local: LocalMember, name: str, settings: Any) -> PublishedShards:
    shards = PublishedShards(local, settings)
    local.weights.watch((name.rsplit(" ", 1)[0], settings[2]), shards)  # see ``shards_name``
    return shards


factories[KIND] = _open
setting_names[KIND] = setting_names[SHARDS] = ("keep", "track", "publishers")
factories[SHARDS] = _open_shards
register_methods({RETIRE: lambda weights, _, oldest: weights.retire_before(oldest)})
