"""Weights that a member pulls for others: it feeds them piece by piece, while it receives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from raytorchrpc.calls.counters import StoreKey
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import LaneUnavailable, NotFound
from raytorchrpc.patterns.handle import give_up_at
from raytorchrpc.patterns.home import register_methods
from raytorchrpc.patterns.weights.published import Readable, lease_end
from raytorchrpc.patterns.weights.snapshots import Snapshot, SnapshotPool, TensorSpec, VersionMemory
from raytorchrpc.tensors.cuda_streams import own_streams

KIND = "relayed weights"

#: Services of a member that feeds others.
LEASE, PIECE = "raytorchrpc.weights.lease_relayed", "raytorchrpc.weights.piece"
CONFIRM = "raytorchrpc.weights.confirm"

#: The tensors of a piece.
_Piece = Sequence[torch.Tensor]


class Feed(Snapshot):
    """What one pull brings, in pieces that others can read as soon as they are here. Thread-safe.

    Like each snapshot it keeps its memory as long as it has readers.
    """

    def __init__(
        self,
        version: int,
        specs: Sequence[TensorSpec],
        memory: VersionMemory,
        pool: SnapshotPool,
        pieces: Sequence[_Piece],
    ) -> None:
        """``pieces``: of the memory, in the order in which they will come."""
        super().__init__(version, specs, memory, [version] * len(specs), pool)
        self._pieces = pieces
        self._changing = threading.Lock()
        self._here: list[Callable[[], AbstractContextManager[None]]] = []
        """For each piece that is here: the context in which a thread sends it, on streams that follow this piece alone.

        A stream that followed all that the pull has queued would send no piece before the last is here.
        """
        self._waiting: list[tuple[int, DeferredReply]] = []
        self._has_failed = False
        self.is_lasting = True
        """The memory is kept while it has readers."""
        self._unread = threading.Event()
        self._unread.set()
        self.ended = DeferredReply()
        """Of a feed that is not lasting: settled with whether everything that came was sound."""

    @classmethod
    def of_model(cls, version: int, pool: SnapshotPool, pieces: Sequence[_Piece]) -> Feed:
        """A feed from tensors that the program will use when the pull has ended."""
        feed = cls(version, (), VersionMemory((), lambda size: None), pool, pieces)
        feed.is_lasting = False
        return feed

    @property
    def takes_readers(self) -> bool:
        """Whether a reader that begins now can keep up; one that is late would delay the pull that feeds it."""
        return self.is_lasting or (not self.ended.done() and 2 * len(self._here) <= len(self._pieces))

    def add(self) -> None:
        """Note that the next piece is here. The thread that has written it calls this."""
        number = len(self._here)
        here = own_streams(self._pieces[number])
        with self._changing:
            self._here.append(here)
            due = [reply for wanted, reply in self._waiting if wanted == number]
            self._waiting = [(wanted, reply) for wanted, reply in self._waiting if wanted != number]
        for reply in due:
            reply.settle(number)

    def set_read(self) -> None:
        """A reader has begun."""
        self._unread.clear()

    def set_unread(self) -> None:
        self._unread.set()

    def wait_for_readers(self, seconds: float) -> None:
        """Block until no reader is left, but not longer."""
        self._unread.wait(seconds)

    def fail(self) -> None:
        """No more pieces come."""
        self.ended.settle(False)
        with self._changing:
            self._has_failed = True
            waiting, self._waiting = self._waiting, []
        for _, reply in waiting:
            reply.settle(None, self._gone())

    def piece(self, number: int, until: float, local: LocalMember) -> DeferredReply:
        """A piece, as soon as it is here. Raises NotFound."""
        reply = DeferredReply()
        reply.context = lambda: self._here[number]() if number < len(self._here) else nullcontext()  # it has failed
        reply.convert = self._pieces.__getitem__
        with self._changing:
            is_here = number < len(self._here)
            if number >= len(self._pieces) or (self._has_failed and not is_here):
                raise self._gone()
            if not is_here:
                self._waiting.append((number, reply))
        if is_here:
            reply.settle(number)
            return reply
        return give_up_at(local.deadlines, until, reply, lambda: self._give_up(reply))

    def _give_up(self, reply: DeferredReply) -> None:
        with self._changing:
            self._waiting = [one for one in self._waiting if one[1] is not reply]
        reply.settle(None, self._gone())

    @property
    def devices(self) -> set[int]:
        """The GPUs that its pieces are on."""
        return {tensor.get_device() for piece in self._pieces for tensor in piece if tensor.is_cuda}

    @property
    def largest(self) -> torch.Tensor:
        return max((tensor for piece in self._pieces for tensor in piece), key=lambda tensor: tensor.nbytes)

    def await_end(self, until: float, local: LocalMember) -> bool | DeferredReply:
        """Whether everything that came was sound, as soon as that is known."""
        if self.is_lasting or self.ended.done():
            return self.is_lasting or bool(self.ended.result(0))
        reply = DeferredReply()
        self.ended.add_done_callback(lambda ended: reply.settle(ended.result(0)))
        return give_up_at(local.deadlines, until, reply, lambda: _refuse(reply))

    def _gone(self) -> NotFound:
        return NotFound(f"version {self.version} of the weights does not come any further here")


def _refuse(reply: DeferredReply) -> None:
    reply.settle(False)


class Feeds(Readable):
    """What this member has pulled of one store, and pulls now, for other members. Thread-safe."""

    def __init__(self, local: LocalMember, name: str, homes: Collection[int]) -> None:
        """``homes``: the ranks of the members without which nobody asks for these weights."""
        super().__init__(local)
        self.name, self._homes = name, homes
        self._lock = threading.Lock()
        self._feeds: dict[str, Feed] = {}
        """The newest, by ``Selection.signature``."""
        self._over: dict[str, int] = {}
        """By signature: the newest version whose pull has ended here and feeds nobody."""
        self._waiting: list[tuple[str, int, DeferredReply]] = []
        """For the feed of a version."""

    @property
    def kept(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(feed.version for feed in self._feeds.values() if feed.is_lasting)

    def open(self, signature: str, feed: Feed) -> int:
        """Begin to feed others. Returns a lease for the caller, which writes the memory."""
        with self._lock:
            old = self._feeds.get(signature)
            self._feeds[signature] = feed
            lease = self.pool.lease(feed, self._local.me.rank, None)
            due = self._take_waiting(signature, feed.version)
        if old is not None:
            self.pool.retire(old)
        for reply in due:
            reply.settle(feed)
        return lease

    def fail(self, signature: str, version: int, feed: Feed | None) -> None:
        """The pull has failed: whoever is fed by it has to look elsewhere. ``feed`` None: it was not even opened."""
        with self._lock:
            due = self._take_waiting(signature, version)
            is_newest = feed is not None and self._feeds.get(signature) is feed
            if is_newest:
                del self._feeds[signature]
            self._over[signature] = max(version, self._over.get(signature, version))
        for reply in due:
            reply.settle(None)
        if feed is not None:
            feed.fail()
            if is_newest:
                self.pool.retire(feed)

    def end(self, signature: str, feed: Feed, patience_s: float) -> None:
        """Take a model's tensors back from a feed that has everything. Blocks while it is read, up to ``patience_s``.

        What this thread queues on its streams from now on follows the reads. Readers that take longer are refused.
        """
        with self._lock:  # no reader begins any more
            if self._feeds.get(signature) is feed:
                del self._feeds[signature]
            self._over[signature] = max(feed.version, self._over.get(signature, feed.version))
        feed.ended.settle(True)
        feed.wait_for_readers(patience_s)
        self.pool.revoke(feed)
        for device in feed.devices:
            self._fence(device)

    def _take_waiting(self, signature: str, version: int) -> list[DeferredReply]:
        due = [reply for key, wanted, reply in self._waiting if (key, wanted) == (signature, version)]
        self._waiting = [one for one in self._waiting if one[:2] != (signature, version)]
        return due

    def serve_lease(self, caller: int, signature: str, version: int, seconds: float, wait_s: float) -> Any:
        """Lease the feed of a version to a reader, for its pull of ``seconds``; 0 if none begins within ``wait_s``."""

        def lease(feed: Feed | None) -> int:
            with self._lock:
                if feed is None or self._feeds.get(signature) is not feed or not feed.takes_readers:
                    return 0
                if not (feed.is_lasting or self._can_send(feed, caller)):
                    return 0
                number = self.pool.lease(feed, caller, lease_end(seconds))
                feed.set_read()
                return number

        reply = DeferredReply()
        reply.convert = lease
        waits = signature, version, reply
        with self._lock:
            feed = self._feeds.get(signature)
            known = [self._over.get(signature, -1), -1 if feed is None else feed.version]
            if is_early := max(known) < version:
                self._waiting.append(waits)
        if not is_early:
            return lease(feed if feed is not None and feed.version == version else None)

        def give_up() -> None:
            with self._lock:
                if waits in self._waiting:
                    self._waiting.remove(waits)
            reply.settle(None)

        return give_up_at(self._local.deadlines, time.monotonic() + wait_s, reply, give_up)

    def _can_send(self, feed: Feed, caller: int) -> bool:
        """Whether a lane can send the program's own tensors out of the memory that they are in."""
        route = self._local.peers.route_back(caller)
        lane = self._local.tensor_lanes.get(route.beside.get(feed.largest.device.type, ""))
        if lane is None:
            return False
        try:
            lane.export([feed.largest], route.member.name, route.devices_back).cancel()
        except LaneUnavailable:
            return False
        return True

    def serve_piece(self, _: int, lease: int, number: int, wait_s: float) -> Any:
        """A piece of a leased feed, as soon as it is here. Raises NotFound."""
        feed = self.pool.leased(lease)
        assert isinstance(feed, Feed)
        return feed.piece(number, time.monotonic() + wait_s, self._local)

    def serve_confirm(self, _: int, lease: int, wait_s: float) -> Any:
        """End a lease; whether what was read under it is sound, as soon as that is known."""
        with suppress(NotFound):
            feed = self.pool.leased(lease)
            assert isinstance(feed, Feed)
            if self.pool.release(lease):
                return feed.await_end(time.monotonic() + wait_s, self._local)
        return False

    def lose(self, rank: int) -> None:
        """See ``Served``. Without their home no member asks for these weights. They are pulled again if it returns."""
        super().lose(rank)
        if rank in self._homes:
            with self._lock:
                feeds, self._feeds, self._over = list(self._feeds.values()), {}, {}
            for feed in feeds:
                self.pool.retire(feed)
            self.pool.drop_spare_memory()

    def close(self, error: Exception) -> None:
        """See ``Served``."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for *_, reply in waiting:
            reply.settle(None, error)


def feeds_of(local: LocalMember, store: StoreKey, homes: Sequence[str], address: tuple[str, str, int | None]) -> Feeds:
    """The feeds of this member for the weights at an address. ``homes``: the members without which nobody pulls them.

    To be called before the home hears of a pull that might feed others: they come at once.
    """
    name = f"{address[1]} {address[2]}"  # of this instance of the store
    ranks = [local.peers.route(home).member.rank for home in homes]
    feeds = local.services.open(KIND, name, lambda: Feeds(local, name, ranks))
    local.weights.watch(store, feeds)
    return feeds


register_methods({LEASE: Feeds.serve_lease, PIECE: Feeds.serve_piece, CONFIRM: Feeds.serve_confirm})
