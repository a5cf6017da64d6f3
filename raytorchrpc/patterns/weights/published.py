"""Weights where they are published, and where they are passed on: the side that has them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.peers import Member
from raytorchrpc.calls.services import DeferredReply
from raytorchrpc.errors import ConfigurationError, NotAMember, NotFound
from raytorchrpc.lanes.base import TensorLane
from raytorchrpc.patterns.weights.relays import Relays
from raytorchrpc.patterns.weights.snapshots import Flat, Kind, Shelf, Snapshot, equal, write
from raytorchrpc.process.identity import has_ended
from raytorchrpc.tensors.dtypes import DTYPE_NAMES

#: A reader that says nothing keeps its snapshot so much longer than its pull may take (seconds): a copy that began in
#: time is not to find other weights there.
_LINGER_S = 60.0
#: Whether a reader that was lost has ended is looked at so often (seconds): its sockets close before it has.
_LOOK_S = 1.0

#: What a tensor is, in a message: name, dtype's name, shape.
Row = tuple[str, str, tuple[int, ...]]


class Layout(NamedTuple):
    """Which tensors a version has."""

    number: int
    names: tuple[str, ...]
    kinds: tuple[Kind, ...]

    @property
    def rows(self) -> list[Row]:
        """For a message."""
        return [(name, DTYPE_NAMES[kind.dtype], kind.shape) for name, kind in zip(self.names, self.kinds, strict=True)]


class Look(NamedTuple):
    """What a reader is told before it pulls."""

    version: int
    lease: int
    """0: it has that version."""
    layout: int
    rows: list[Row] | None
    """None: it knows that layout."""
    changed: list[int] | None
    """Tensors that are not as in the version it has; None: all."""


def held_until(until: float) -> float:
    """Up to when a reader can be sure that it still has its lease, if its pull was to end at ``until``.

    It counts from before it asked, and the home from when it was asked. Their clocks may differ a little.
    """
    return until + 0.75 * _LINGER_S


def shelf_of(local: LocalMember) -> Shelf:
    """For snapshots of this member, in memory that peers on the host read where it is, if a lane has such."""

    def lend(size: int) -> torch.Tensor | None:
        for lane in local.tensor_lanes.values():
            lent = lane.lend(size)
            if lent is not None:
                return lent
        return None

    moves = [lane.move for lane in local.tensor_lanes.values() if lane.capabilities.parallel_move]
    return Shelf(lend, local.deadlines.at, *moves[:1])


class Readable:
    """What others pull tensors from, under a lease."""

    life: int

    def __init__(self, local: LocalMember) -> None:
        self.shelf = shelf_of(local)
        self._local = local
        self._lanes: Mapping[str, TensorLane] = local.tensor_lanes

    def _memory(self, kinds: Sequence[Kind]) -> Flat:
        """That this thread may write to."""
        flat = self.shelf.memory(kinds)
        for index in {tensor.device.index for tensor in flat.tensors if tensor.is_cuda}:
            for lane in self._lanes.values():
                lane.fence(index)  # those who read it before may still do so, on their GPUs
        uses, flat.uses = flat.uses, []
        for use in uses:
            use()
        return flat

    def lose(self, rank: int) -> None:
        """See services.Served. A process that may live, out of reach, may go on reading until its leases end."""
        if numbers := self.shelf.leases_of(rank):
            with suppress(NotAMember):
                self._release_once_ended(self._local.peers.route(rank).member, rank, numbers)

    def _release_once_ended(self, peer: Member, rank: int, numbers: set[int]) -> None:
        if peer.node_id != self._local.me.node_id:
            return
        if has_ended(peer.pid):
            for number in numbers:
                self.shelf.release(number)
        elif numbers := numbers & self.shelf.leases_of(rank):
            look = partial(self._release_once_ended, peer, rank, numbers)
            self._local.deadlines.at(time.monotonic() + _LOOK_S, look)

    def keep_only(self, rank: int, process: str | None) -> None:
        """See services.Served."""

    def close(self, error: Exception) -> None:
        """See services.Served."""


class Weights(Readable):
    """The versions that one member has published. Thread-safe."""

    def __init__(self, local: LocalMember, settings: tuple[int, bool]) -> None:
        """``settings``: how many versions can be pulled; whether it is noted which tensors changed."""
        super().__init__(local)
        self.settings = settings
        self._keep, self._track = settings
        self.relays = Relays()
        self._publishing = threading.Lock()
        self._lock = threading.Lock()
        self._layout: Layout | None = None
        self._kept: OrderedDict[int, tuple[Layout, Snapshot]] = OrderedDict()
        self._waiting: list[tuple[int, DeferredReply]] = []
        self._broken: Exception | None = None

    # --- publishing ----------------------------------------------------------------------------------------------

    def publish(self, tensors: Mapping[str, torch.Tensor], version: int | None) -> int:
        """Copy them; from then on they are the newest version. Blocks for the copy, and for nobody who reads."""
        with self._publishing:
            newest = self.newest
            if version is None:
                version = newest + 1
            elif version <= newest:
                raise ConfigurationError(f"version {version} is not newer than {newest}, which is published already")
            layout = self._layout_of(tensors)
            sources = list(tensors.values())
            changed = self._changed(layout, sources, version)
            flat = self._memory(layout.kinds)
            self._write(flat, sources, changed)
            snapshot = Snapshot(version, layout.kinds, flat, changed, self.shelf)
            with self._lock:
                if self._broken is not None:
                    raise self._broken
                self._kept[version] = layout, snapshot
                old = [self._kept.popitem(last=False)[1][1] for _ in range(len(self._kept) - self._keep)]
                told = [later for wanted, later in self._waiting if wanted <= version]
                self._waiting = [(wanted, later) for wanted, later in self._waiting if wanted > version]
            for snapshot in old:
                self.shelf.take_off(snapshot)
        for later in told:
            later.settle(version)
        return version

    def _layout_of(self, tensors: Mapping[str, torch.Tensor]) -> Layout:
        names = tuple(tensors)
        kinds = tuple(Kind(tensor.dtype, tuple(tensor.shape), tensor.device) for tensor in tensors.values())
        known = self._layout
        if known is None or (known.names, known.kinds) != (names, kinds):
            self.shelf.forget_memory()
            known = self._layout = Layout(1 if known is None else known.number + 1, names, kinds)
        return known

    def _changed(self, layout: Layout, sources: Sequence[torch.Tensor], version: int) -> list[int]:
        """For each tensor, the version that it was new in.

        Told by comparing every bit with the version before: torch counts no writes that are made behind its back, by
        way of ``.data``, numpy or another process.
        """
        with self._lock:
            before = next(reversed(self._kept.values())) if self._kept else None
        if not self._track or before is None or before[0] is not layout:
            return [version] * len(sources)
        snapshot = before[1]
        snapshot.make_current()
        alike = equal(sources, snapshot.flat.tensors)
        return [old if same else version for old, same in zip(snapshot.changed, alike, strict=True)]

    def _write(self, flat: Flat, sources: Sequence[torch.Tensor], changed: Sequence[int]) -> None:
        stale = [place for place, stamp in enumerate(flat.stamps) if stamp != changed[place]]
        for place in stale:
            flat.stamps[place] = None
        write([flat.tensors[place] for place in stale], [sources[place] for place in stale], self.shelf.move)
        flat.stamps = list(changed)

    # --- reading -------------------------------------------------------------------------------------------------

    @property
    def newest(self) -> int:
        """Version; 0 before the first."""
        with self._lock:
            return next(reversed(self._kept)) if self._kept else 0

    def wait(self, version: int, until: float, at: Any) -> int | DeferredReply:
        """The newest version, as soon as it is at least this; 0 at ``until``. ``at``: see workers.Deadlines."""
        with self._lock:
            if self._broken is not None:
                raise self._broken
            newest = next(reversed(self._kept)) if self._kept else 0
            if newest >= version or until <= time.monotonic():
                return newest if newest >= version else 0
            later = DeferredReply()
            waits = version, later
            self._waiting.append(waits)

        def give_up() -> None:
            with self._lock:
                if waits in self._waiting:
                    self._waiting.remove(waits)
            later.settle(0)

        prevent = at(until, give_up)
        later.add_done_callback(lambda _: prevent())
        return later

    def look(
        self, rank: int, version: int | None, since: int | None, layout: int, seconds: float | None
    ) -> Look | None:
        """The newest version, or that one, kept for this reader; None if nothing is published yet.

        ``seconds``: that its pull may take; None: it is of this process, and certain to release it.
        """
        with self._lock:
            if not self._kept:
                if version is not None:
                    raise NotFound(f"version {version} of the weights is not there: none is published yet")
                return None
            wanted = next(reversed(self._kept)) if version is None else version
            found = self._kept.get(wanted)
            if found is None:
                there = ", ".join(map(str, self._kept))
                raise NotFound(f"version {wanted} of the weights is not there, or no longer (there: {there})")
            known, snapshot = found
            if wanted == since:
                return Look(wanted, 0, known.number, None, None)
            number = self.shelf.lease(snapshot, rank, _lease_end(seconds))
        changed = None
        if self._track and since is not None and since < wanted and known is self._layout:
            changed = [place for place, new in enumerate(snapshot.changed) if new > since]
        rows = None if known.number == layout else known.rows
        return Look(wanted, number, known.number, rows, changed)

    def lose(self, rank: int) -> None:
        """See services.Served."""
        super().lose(rank)
        self.relays.lose(rank)

    def close(self, error: Exception) -> None:
        """See services.Served."""
        self.relays.close(error)
        with self._lock:
            self._broken = error
            waiting, self._waiting = self._waiting, []
            self._kept.clear()
        for _, later in waiting:
            later.settle(0, error)


class Mirror(Readable):
    """Weights of one life of a store that this member has pulled and passes on to others of its node. Thread-safe."""

    settings = ()

    def __init__(self, local: LocalMember, home: int) -> None:
        """``home``: the rank of the store's home."""
        super().__init__(local)
        self._home = home
        self._lock = threading.Lock()
        self._kept: dict[str, Snapshot] = {}
        """The newest of each sort of pull: what it asks for, as ``signature``."""

    def begin(self, kinds: Sequence[Kind]) -> Flat:
        """Memory to pull into, for this thread."""
        return self._memory(kinds)

    def keep(self, signature: str, version: int, kinds: Sequence[Kind], flat: Flat) -> None:
        """From now on others can pull it. By the thread that filled it."""
        snapshot = Snapshot(version, kinds, flat, [version] * len(kinds), self.shelf)
        with self._lock:
            old = self._kept.pop(signature, None)
            self._kept[signature] = snapshot
        if old is not None:
            self.shelf.take_off(old)

    def look(self, rank: int, signature: str, version: int, seconds: float | None) -> int:
        """A lease; 0 if it is not there (any more)."""
        with self._lock:
            snapshot = self._kept.get(signature)
            if snapshot is None or snapshot.version != version:
                return 0
            return self.shelf.lease(snapshot, rank, _lease_end(seconds))

    def lose(self, rank: int) -> None:
        """See services.Served. Nobody asks for these weights after their home was lost; they may come back."""
        super().lose(rank)
        if rank == self._home:
            with self._lock:
                kept, self._kept = list(self._kept.values()), {}
            for snapshot in kept:
                self.shelf.take_off(snapshot)
            self.shelf.forget_memory()


def _lease_end(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds + _LINGER_S
