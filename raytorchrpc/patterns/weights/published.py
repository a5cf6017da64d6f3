"""The versions of a store, at its home."""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from raytorchrpc.calls.counters import StoreKey
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import ConfigurationError, Empty, LaneUnavailable, NotAMember, NotFound
from raytorchrpc.lanes.base import in_place
from raytorchrpc.patterns.exposed_memory import ExposedMemory
from raytorchrpc.patterns.home import object_services
from raytorchrpc.patterns.waits import ReplyLock, Waits, once_ended
from raytorchrpc.patterns.weights.deltas import Deltas, find_deltas, may_have_delta
from raytorchrpc.patterns.weights.drafts import Draft
from raytorchrpc.patterns.weights.relays import RelayPlan
from raytorchrpc.patterns.weights.shards import PlaceInWhole, Row
from raytorchrpc.patterns.weights.snapshots import (
    Layout,
    Places,
    Snapshot,
    SnapshotPool,
    Span,
    TensorSpec,
    VersionMemory,
    copy_tensors,
    equal_bits,
)
from raytorchrpc.process.locks import Turn
from raytorchrpc.tensors.kept_errors import again

KIND = "weight store"
_log = logging.getLogger(__name__)

#: Services of a home.
WAIT, LEASE = "raytorchrpc.weights.wait", "raytorchrpc.weights.lease"
LAYOUT = "raytorchrpc.weights.layout"
ADVISE, REPORT = "raytorchrpc.weights.advise", "raytorchrpc.weights.report"
TENSORS, PIECES = "raytorchrpc.weights.tensors", "raytorchrpc.weights.pieces"
DELTAS = "raytorchrpc.weights.deltas"
HOLD = "raytorchrpc.weights.hold"
#: Also of a member that relays.
RELEASE = "raytorchrpc.weights.release"

#: A lease outlasts the timeout of its pull by this much, so that a copy that began in time finds the same weights
#: (seconds).
LINGER_S = 60.0


class VersionLease(NamedTuple):
    """What a home tells a reader before it pulls."""

    version: int
    lease: int  # keeps the version until it is released. 0: the reader has this version
    layout: int
    rows: list[Row] | None  # None: the reader knows this layout
    changed: list[int] | None  # places of the tensors that differ from the version that the reader has; None: all
    turn: tuple[int | None, bool] | None = None  # others of its host pull the same: see ``RelayPlan.ask``
    deltas: list[tuple[int, int]] | None = None  # of what changed: see ``Deltas.counts``
    spans: tuple[Span, ...] | None = None  # with ``rows``: see ``Layout``
    is_lent: bool = False  # the reader has to ask at the end whether the tensors were still lent
    exposed: tuple[str, Any] | None = None  # the lane that reads all tensors in place, by their places; its descriptor


def lease_is_valid_until(until: float) -> float:
    """Until when a reader can rely on a lease, if its pull was to end at ``until``: clocks may differ a little."""
    return until + 0.75 * LINGER_S


def lease_end(seconds: float | None) -> float | None:
    """Until when to keep a lease for a pull that may take ``seconds``; None: without a limit."""
    return None if seconds is None else time.monotonic() + seconds + LINGER_S


def name_of(local: LocalMember, rank: int) -> str:
    """What the counters call a member."""
    with suppress(NotAMember):  # it has just left
        return str(local.peers.route_back(rank).member.name)
    return f"rank {rank}"


class Readable:
    """Snapshots that other members read under leases; see ``Served``."""

    instance_id: int

    def __init__(self, local: LocalMember) -> None:
        self._local = local
        moves = [lane.move for lane in in_place(local.tensor_lanes) if "cpu" in lane.capabilities.devices]
        self.pool = SnapshotPool(self._allocate_shared, local.deadlines, local.cleanup.leave, self._fence, *moves[:1])

    def _allocate_shared(self, size: int) -> torch.Tensor | None:
        offers = (lane.lend(size) for lane in in_place(self._local.tensor_lanes))
        return next((shared for shared in offers if shared is not None), None)

    def _fence(self, device: int) -> None:
        for lane in in_place(self._local.tensor_lanes):
            lane.fence(device)

    def lose(self, rank: int) -> None:
        """See ``Served``. A process that lives, out of reach, may go on reading until its leases end."""
        if leases := self.pool.leases_of(rank):
            with suppress(NotAMember):
                peer = self._local.peers.route(rank).member
                if peer.node_id != self._local.me.node_id:  # nobody here knows whether it has ended
                    self.pool.release_loans(leases)
                    return
                once_ended(
                    self._local.deadlines,
                    peer.pid,
                    lambda: list(map(self.pool.release, leases)),
                    lambda: leases & self.pool.leases_of(rank),
                )

    def keep_only(self, rank: int, process: str | None) -> None:
        """See ``Served``."""

    @property
    def held(self) -> Mapping[str, int]:
        return self.pool.held

    @property
    def readers(self) -> int:
        """How many leases there are."""
        return self.pool.readers

    def release(self, caller: int, lease: int, store: StoreKey | None = None, version: int = 0, size: int = 0) -> bool:
        """End a lease, under which its reader has brought ``size`` bytes of a version of ``store``; whether it had not
        ended before.
        """
        if store is not None:
            self._local.weights.served(store, version, size, name_of(self._local, caller))
        return self.pool.release(lease)

    def take_back(self, snapshot: Snapshot, patience_s: float, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Let the program change its own tensors again: no reader begins any more, and those that have begun get up to
        ``patience_s``. Blocks. CUDA work that this thread queues afterwards follows the copies of the readers.

        Returns the ranks of readers that were too slow: their leases have ended.
        """
        try:
            self.pool.wait_unread(snapshot, patience_s)
        finally:
            slow = self.pool.revoke(snapshot)
            for wait_for_read in snapshot.memory.own_reads:
                wait_for_read()
            others = [lane for lane in self._local.tensor_lanes.values() if not lane.capabilities.in_place]
            is_sent = snapshot.memory.is_lent and any("cuda" in lane.capabilities.devices for lane in others)
            for device in {tensor.get_device() for tensor in tensors if tensor.is_cuda}:
                self._fence(device)
                if is_sent:  # by kernels of this process, on streams of a lane
                    torch.cuda.synchronize(device)
        return slow

    def serve_pieces(
        self, caller: int, lease: int, places: Places, device_type: str, needed: Collection[int] = ()
    ) -> list[torch.Tensor]:
        """Return no pieces if a device map lacks a mapping to the caller; its next request raises which.

        ``needed``: the numbers of those that the caller reads; it gets nothing of the others. Empty: it reads all.
        """
        pieces = self.pool.leased(lease).pieces(device_type, places)
        if needed:
            pieces = [piece if number in needed else piece[:0] for number, piece in enumerate(pieces)]
        try:
            self._local.payloads.check_reply(self._local.peers.route_back(caller), pieces)
        except LaneUnavailable:
            return []
        return pieces


V = TypeVar("V")


class Versions(Generic[V]):
    """What is known of each version that there is, by its number, and waits for versions. Thread-safe."""

    instance_id: int

    def __init__(self, local: LocalMember, name: str) -> None:
        """``name``: of the store."""
        self._local, self._name, self._lock = local, name, ReplyLock()
        self._waits: Waits[int] = Waits(local.deadlines, self._lock)
        self._versions: OrderedDict[int, V] = OrderedDict()
        self._broken: Exception | None = None
        self._being_replaced = 0  # the newest version, if its memory is just written for the next

    def _newest(self) -> int:
        """The newest version; 0 before the first."""
        return next(reversed(self._versions), 0)

    def _find(self, version: int | None) -> V:
        """A version (None: the newest). The caller holds the lock. Raises NotFound."""
        if not self._versions:
            raise NotFound(f"version {version or 1} of {KIND} {self._name!r} is not there: the store has none now")
        chosen = self._newest() if version is None else version
        if chosen not in self._versions:
            kept = ", ".join(map(str, self._versions))
            raise NotFound(
                f"version {chosen} of {KIND} {self._name!r} is not there, or no longer (there: {kept}); a store with a "
                f"larger keep= keeps more"
            )
        return self._versions[chosen]

    def _check_open(self) -> None:
        if self._broken is not None:
            raise again(self._broken)

    def wait(self, version: int, until: float) -> int | DeferredReply:
        """Return the newest version as soon as it is at least ``version``; 0 at ``until``, or raise Empty."""
        with self._lock:
            self._check_open()
            if (newest := self._newest()) >= version:
                return newest or self._being_replaced
            if until > time.monotonic():
                return self._waits.add(version, until, lambda: (0, self._not_in_time(version)))
            if (error := self._not_in_time(version)) is not None:
                raise again(error)
            return 0

    def _not_in_time(self, version: int) -> Empty | None:
        """What a wait that ended raises; None: it returns 0. The caller holds the lock."""
        return None

    def close(self, error: Exception) -> None:
        with self._lock:
            self._broken = error
            self._waits.settle(error=error)
            self._versions.clear()


class PublishedWeights(Readable, Versions[Snapshot]):
    """The versions that a home has published. Thread-safe."""

    def __init__(self, local: LocalMember, name: str, settings: tuple[int, bool]) -> None:
        """``name``: of the store. ``settings``: how many versions can be pulled; whether changes are tracked."""
        Readable.__init__(self, local)
        Versions.__init__(self, local, name)
        self.settings = settings
        self._keep, self._track = settings
        self.pool.keeps_spare = self._track
        self.relays = RelayPlan()
        self._publishing = Turn()
        self._layout: Layout | None = None
        self._exposed: dict[int, ExposedMemory] = {}
        """Of versions that are lent in CPU memory: their tensors."""
        self._last = 0  # the highest number that was published, which is there no longer if it was retired

    # --- publishing ----------------------------------------------------------------------------------------------

    def copy(self, draft: Draft, version: int | None) -> None:
        """Copy what an iterator yields, before ``publish``. Other threads may publish meanwhile."""
        with self._lock:
            self._check_open()
            self._number(version)
            layout = self._layout
        draft.copy(self.pool, layout)

    def _number(self, version: int | None) -> int:
        """The number of the next version. The caller holds the lock. Raises ConfigurationError."""
        if version is not None and version <= self._last:
            of = f"of {KIND} {self._name!r} is not newer than {self._last}"
            raise ConfigurationError(
                f"version {version} {of}, which is published already: give a higher number, or none"
            )
        return self._last + 1 if version is None else version

    def publish(self, draft: Draft, version: int | None, *, staged: bool = False) -> Snapshot:
        """Make a draft the newest version. Blocks while tensors are copied, and never for readers.

        The version that is kept no longer is retired first, for its memory, unless it is compared with the new one.
        ``staged``: older versions stay.
        """
        with self._publishing.once("publishing"):
            with self._lock:
                self._check_open()
                version = self._number(version)
                before = next(reversed(self._versions.values()), None)
            try:
                known, layout = self._layout, self._layout_of(draft.tensors, draft.places)
                before = before if before is not None and before.layout is layout else None
                sources, memory = list(draft.tensors.values()), draft.memory
                if not (staged or self._track or draft.has_copies):
                    self._being_replaced = self._newest()
                    self._make_room(self._keep - 1)
                if memory is None or draft.layout is not layout:
                    memory = self.pool.memory(layout.specs)
                if layout is not known:
                    sizes = ", ".join(f"{size / 1e6:,.1f} MB on {device}" for device, size in memory.sizes.items())
                    _log.info(
                        f"{KIND} {self._name!r}: a copy of the weights takes {sizes or 'nothing'}; lend takes none"
                    )
                changed = self._changed(sources, version, before)
                self._write(memory, sources, changed)
                if draft.memory is not memory:
                    draft.put_back(self.pool)
                deltas = None if before is None else self._deltas(memory, changed, version, before)
                if before is not None and deltas:
                    before.note_own_reads()
                snapshot = Snapshot(version, layout, memory, changed, self.pool, deltas)
                self._add(snapshot, staged)
            finally:
                self._being_replaced = 0
        return snapshot

    def _add(self, snapshot: Snapshot, staged: bool) -> None:
        version = snapshot.version
        with self._lock:
            self._check_open()
            self._versions[version], self._last = snapshot, version
            self._waits.settle(lambda wanted: wanted <= version, version)
        if not staged:
            self._make_room(self._keep)

    def _make_room(self, kept: int) -> None:
        """Retire the oldest versions, so that so many are left."""
        with self._lock:
            for _ in range(len(self._versions) - kept):
                self._lock.after(self.pool.retire, self._versions.popitem(last=False)[1])

    def lend(self, draft: Draft, version: int | None, *, staged: bool = False) -> Snapshot:
        """Make the tensors of a draft themselves the newest version, until ``end_loan``."""
        with self._publishing.once("publishing"):
            with self._lock:
                self._check_open()
                version = self._number(version)
            memory = VersionMemory.lent(list(draft.tensors.values()))
            layout = self._layout_of(draft.tensors, draft.places, memory.spans)
            loan = Snapshot(version, layout, memory, [version] * len(memory.tensors), self.pool)
            if all(tensor.is_cpu for tensor in memory.tensors):  # a GPU's memory comes with the lease
                self._exposed[version] = ExposedMemory(self._local, f"{KIND} {self._name!r}", memory.tensors)
            self._add(loan, staged)
        return loan

    def end_loan(self, loan: Snapshot, patience_s: float) -> set[int]:
        """Take the tensors back; see ``take_back``. Older versions end too: no reader goes back to one."""
        self._retire(lambda number: number <= loan.version)
        try:
            return self.take_back(loan, patience_s, loan.memory.tensors)
        finally:
            if (exposed := self._exposed.pop(loan.version, None)) is not None:
                exposed.end()

    @property
    def kept(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(self._versions)

    def last(self) -> int:
        """The highest number that was published; 0 before the first."""
        with self._lock:
            return self._last

    def _layout_of(
        self,
        tensors: Mapping[str, torch.Tensor],
        places: Mapping[str, PlaceInWhole],
        spans: tuple[Span, ...] | None = None,
    ) -> Layout:
        names, wholes = tuple(tensors), tuple(map(places.get, tensors))
        specs = tuple(TensorSpec(tensor.dtype, tuple(tensor.shape), tensor.device) for tensor in tensors.values())
        known = self._layout
        if known is None or known[1:] != (names, specs, wholes, spans):
            self.pool.drop_spare_memory()
            # Random, because readers remember numbers, and a restarted publisher may have another layout.
            number = 1 + secrets.randbits(48) if known is None else known.number + 1
            known = self._layout = Layout(number, names, specs, wholes, spans)
        return known

    def _changed(self, sources: Sequence[torch.Tensor], version: int, before: Snapshot | None) -> list[int]:
        """For each tensor, the version that its content was new in, bit for bit: torch counts not every write."""
        if before is None or not self._track:
            return [version] * len(sources)
        before.make_current()
        equal = equal_bits(sources, before.memory.tensors)
        return [old if is_equal else version for old, is_equal in zip(before.changed, equal, strict=True)]

    def _deltas(self, memory: VersionMemory, changed: Sequence[int], version: int, before: Snapshot) -> Deltas | None:
        """Find what has changed within tensors since the version before.

        Not if all members read the memory in place: of 256 MB of bfloat16 of which 1 % had changed, a core copied all
        in 23 ms, wrote the changed elements in 11 ms to 20 ms, and took 190 ms to find them. Between two H200, copies
        of 67 MB took 1.8 ms, and deltas 5.6 ms.
        """
        if before.memory is memory or not self._track:
            return None
        held, tensors = before.memory.tensors, memory.tensors
        places = [place for place, new in enumerate(changed) if new == version and may_have_delta(tensors[place])]
        if not places or (self._is_readable(memory.readable) and not self._has_far_members()):
            return None
        return find_deltas(before.version, places, *([memory[place] for place in places] for memory in (tensors, held)))

    def _is_readable(self, pieces: Sequence[torch.Tensor]) -> bool:
        """Whether members of this host can copy from this memory."""
        lanes = in_place(self._local.tensor_lanes)
        by_gpu = any("cuda" in lane.capabilities.devices for lane in lanes)
        return bool(pieces) and (pieces[0].is_cpu or by_gpu)

    def _has_far_members(self) -> bool:
        return any(member.node_id != self._local.me.node_id for member in self._local.peers.members)

    def _write(self, memory: VersionMemory, sources: Sequence[torch.Tensor], changed: Sequence[int]) -> None:
        stale = [place for place, held in enumerate(memory.changed) if held != changed[place]]
        for place in stale:
            memory.changed[place] = None
        unwritten = [place for place in stale if sources[place] is not memory.tensors[place]]
        targets = [memory.tensors[place] for place in unwritten]
        copy_tensors(targets, [sources[place] for place in unwritten], self.pool.copy_bytes)
        memory.changed = list(changed)

    def close(self, error: Exception) -> None:
        self.clear()
        super().close(error)

    def clear(self) -> None:
        """Free all memory, as soon as nobody reads it."""
        self.pool.drop_spare_memory()  # first, so that what is retired is not kept
        self._retire(lambda number: True)

    def _retire(self, is_over: Callable[[int], bool]) -> None:
        with self._lock:
            for number in filter(is_over, list(self._versions)):
                self._lock.after(self.pool.retire, self._versions.pop(number))

    # --- reading -------------------------------------------------------------------------------------------------

    def serve_layout(self, _: int, version: int | None) -> tuple[int, int, list[Row]]:
        """Return a version (None: the newest), and the number and rows of its layout. Raises NotFound."""
        with self._lock:
            self._check_open()
            snapshot = self._find(version)
        return snapshot.version, snapshot.layout.number, snapshot.layout.rows

    def lease(
        self, rank: int, version: int | None, since: int | None, layout: int, seconds: float | None
    ) -> VersionLease | None:
        """Lease a version to a reader; None if nothing is published yet. Raises NotFound if the version is not kept.

        ``seconds``: that its pull may take; None: the reader is this process, and certain to release it.
        """
        with self._lock:
            if not self._versions and version is None:
                return None
            snapshot = self._find(version)
            chosen, leased_layout = snapshot.version, snapshot.layout
            if chosen == since:
                return VersionLease(chosen, 0, leased_layout.number, None, None)
            number = self.pool.lease(snapshot, rank, lease_end(seconds))
        changed = deltas = None
        if self._track and since is not None and since < chosen and leased_layout is self._layout:
            changed = [place for place, new in enumerate(snapshot.changed) if new > since]
            if snapshot.deltas is not None and snapshot.deltas.base == since:
                deltas = snapshot.deltas.counts()
        rows, spans = (None, None) if leased_layout.number == layout else (leased_layout.rows, leased_layout.spans)
        is_lent = snapshot.memory.is_lent
        return VersionLease(
            chosen, number, leased_layout.number, rows, changed, deltas=deltas, spans=spans, is_lent=is_lent
        )

    def serve_lease(
        self,
        caller: int,
        version: int | None,
        since: int | None,
        layout: int,
        seconds: float,
        device_type: str | None,
        needed: tuple[int, ...],
        alike: tuple[str, str] | None,
    ) -> tuple[tuple[Any, ...], list[torch.Tensor]] | None:
        """Lease a version to a peer, with its memory if the peer can read all tensors in place on ``device_type``.

        ``needed``: see ``serve_pieces``. ``alike``: the signature of a pull that is worth a turn, and its GPU.
        """
        lease = self.lease(caller, version, since, layout, seconds)
        if lease is None:
            return None
        if device_type is not None:  # it copies from here as fast; see ``_deltas``
            lease = lease._replace(deltas=None)
        if alike is not None and lease.lease and lease.rows is None and lease.changed is None:
            turn = self.relays.take_turn(lease.version, *alike, caller)
            if turn is not None:
                return tuple(lease._replace(turn=(turn.source, turn.leads))), []
        if not lease.lease or device_type is None:
            return tuple(lease), []
        if device_type == "cpu" and (exposed := self._exposed.get(lease.version)) is not None:
            return tuple(lease._replace(exposed=exposed.describe(caller).get("cpu"))), []
        if lease.rows is not None:  # the numbers are of another layout
            needed = ()
        return tuple(lease), self.serve_pieces(caller, lease.lease, (), device_type, needed)

    # --- relays --------------------------------------------------------------------------------------------------

    def serve_advise(self, caller: int, pulled: tuple[Any, ...], pieces: int) -> tuple[int | bool | None, ...]:
        """Return from where the caller pulls it; see ``RelayPlan.ask``."""
        return tuple(self.relays.ask(pulled, self._local.peers.route_back(caller).member.node_id, caller, pieces))

    def serve_report(self, _: int, pulled: tuple[Any, ...], leader: int) -> None:
        """Note that a leader could not pull it. A reader reports a leader that has lost it."""
        self.relays.failed(pulled, leader)

    def lose(self, rank: int) -> None:
        super().lose(rank)
        self.relays.lose(rank)


SERVICES = object_services(
    {
        WAIT: lambda weights, _, version, wait_s: weights.wait(version, time.monotonic() + wait_s),
        LEASE: PublishedWeights.serve_lease,
        LAYOUT: PublishedWeights.serve_layout,
        ADVISE: PublishedWeights.serve_advise,
        REPORT: PublishedWeights.serve_report,
        TENSORS: lambda weights, _, lease, places, regions=None: weights.pool.leased(lease).tensors(places, regions),
        PIECES: Readable.serve_pieces,
        DELTAS: lambda weights, _, lease, spans: weights.pool.leased(lease).read_deltas(spans),
        HOLD: lambda weights, _, lease: weights.pool.hold(lease),
        RELEASE: Readable.release,
    }
)
