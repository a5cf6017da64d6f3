"""Weights that members pull for one another: each feeds others piece by piece, while it receives."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from raytorchrpc.calls.counters import StoreKey
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import LaneUnavailable, NotFound
from raytorchrpc.patterns.handle import Handle
from raytorchrpc.patterns.home import object_services
from raytorchrpc.patterns.waits import ReplyLock, Waits, give_up_at
from raytorchrpc.patterns.weights.published import Readable, lease_end
from raytorchrpc.patterns.weights.snapshots import Layout, Snapshot, SnapshotPool, TensorSpec, VersionMemory
from raytorchrpc.tensors.cuda_streams import own_streams

KIND = "relayed weights"

#: Services of a member that feeds others.
LEASE, PIECE = "raytorchrpc.weights.lease_relayed", "raytorchrpc.weights.piece"
CONFIRM = "raytorchrpc.weights.confirm"


class Feed(Snapshot):
    """What one pull brings, in pieces that others can read as soon as they are here. Thread-safe.

    A feed of the model's own tensors (``is_lasting`` False) ends with the pull.
    """

    def __init__(
        self,
        local: LocalMember,
        version: int,
        specs: Sequence[TensorSpec],
        memory: VersionMemory | None,
        pool: SnapshotPool,
        pieces: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        """``memory`` None: the pieces, in the order in which they come, are the program's own tensors."""
        self.is_lasting = memory is not None
        layout = Layout(0, (), tuple(specs), ())
        super().__init__(version, layout, memory or VersionMemory([], [], []), [version] * len(specs), pool)
        self._local, self.parts = local, pieces
        self._changing = ReplyLock()
        self._here: list[Callable[[], AbstractContextManager[None]]] = []
        """For each piece that is here: the context in which a thread sends it, on streams that follow this piece alone.

        A stream that followed all that the pull has queued would send no piece before the last is here.
        """
        self._waits: Waits[int] = Waits(local.deadlines, self._changing)
        self._has_failed = False
        self.ended = DeferredReply()
        """Of a feed that is not lasting: settled with whether everything that came was sound."""

    @property
    def takes_readers(self) -> bool:
        """Whether a reader that begins now can keep up; one that is late would delay the pull that feeds it."""
        return self.is_lasting or (not self.ended.done() and 2 * len(self._here) <= len(self.parts))

    def add(self) -> None:
        """Note that the next piece is here. The thread that has written it calls this."""
        number = len(self._here)
        here = own_streams(self.parts[number])
        with self._changing:
            self._here.append(here)
            self._waits.settle(number.__eq__, number)

    def fail(self) -> None:
        """No more pieces come."""
        self.ended.settle(False)
        with self._changing:
            self._has_failed = True
            self._waits.settle(error=self._gone())

    def piece(self, number: int, until: float) -> DeferredReply:
        """A piece, as soon as it is here. Raises NotFound."""
        reply = DeferredReply()
        reply.context = lambda: self._here[number]() if number < len(self._here) else nullcontext()  # it has failed
        reply.convert = self.parts.__getitem__
        with self._changing:
            is_here = number < len(self._here)
            if number >= len(self.parts) or (self._has_failed and not is_here):
                raise self._gone()
            if not is_here:
                return self._waits.add(number, until, lambda: (None, self._gone()), reply)
        reply.settle(number)
        return reply

    def await_end(self, until: float) -> bool | DeferredReply:
        """Whether everything that came was sound, as soon as that is known."""
        if self.is_lasting or self.ended.done():
            return self.is_lasting or bool(self.ended.result(0))
        reply = DeferredReply()
        self.ended.add_done_callback(lambda ended: reply.settle(ended.result(0)))
        return give_up_at(self._local.deadlines, until, reply, partial(reply.settle, False))

    def _gone(self) -> NotFound:
        return NotFound(f"version {self.version} of the weights does not come any further here")


class Feeds(Readable):
    """What this member has pulled of one store, and pulls now, for other members. Thread-safe."""

    def __init__(self, local: LocalMember, name: str, homes: Collection[int]) -> None:
        """``homes``: the ranks of the members without which nobody asks for these weights."""
        super().__init__(local)
        self.name, self._homes = name, homes
        self._lock = ReplyLock()
        self._feeds: dict[str, Feed] = {}  # the newest, by ``Selection.signature``
        self._over: dict[str, int] = {}  # by signature: the newest version whose pull has ended here and feeds nobody
        self._waits: Waits[tuple[str, int]] = Waits(local.deadlines, self._lock)  # for the feed of a version

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
            if old is not None:
                self._lock.after(self.pool.retire, old)
            self._waits.settle((signature, feed.version).__eq__, feed)
        return lease

    def fail(self, signature: str, version: int, feed: Feed | None) -> None:
        """The pull has failed: whoever is fed by it has to look elsewhere. ``feed`` None: it was not even opened."""
        with self._lock:
            self._waits.settle((signature, version).__eq__)
            if feed is not None:
                self._lock.after(feed.fail)
                if self._is_over(signature, feed):
                    self._lock.after(self.pool.retire, feed)

    def end(self, signature: str, feed: Feed, patience_s: float) -> None:
        """Take a model's tensors back. Blocks while they are read, up to ``patience_s``; slower readers are refused."""
        with self._lock:  # no reader begins any more
            self._is_over(signature, feed)
        feed.ended.settle(True)
        self.take_back(feed, patience_s, [tensor for piece in feed.parts for tensor in piece])

    def _is_over(self, signature: str, feed: Feed) -> bool:
        """Note that a pull feeds nobody from now on; whether its feed was the newest."""
        self._over[signature] = max(feed.version, self._over.get(signature, feed.version))
        if self._feeds.get(signature) is not feed:
            return False
        del self._feeds[signature]
        return True

    def serve_lease(self, caller: int, signature: str, version: int, seconds: float, wait_s: float) -> Any:
        """Lease the feed of a version to a reader, for its pull of ``seconds``; 0 if none begins within ``wait_s``."""

        def lease(feed: Feed | None) -> int:
            with self._lock:
                if feed is None or self._feeds.get(signature) is not feed or not feed.takes_readers:
                    return 0
                if not (feed.is_lasting or self._can_send(feed, caller)):
                    return 0
                number = self.pool.lease(feed, caller, lease_end(seconds))
                return number

        with self._lock:
            feed = self._feeds.get(signature)
            known = [self._over.get(signature, -1), -1 if feed is None else feed.version]
            if max(known) < version:
                reply = DeferredReply()
                reply.convert = lease
                until = time.monotonic() + wait_s
                return self._waits.add((signature, version), until, lambda: (None, None), reply)
        return lease(feed if feed is not None and feed.version == version else None)

    def _can_send(self, feed: Feed, caller: int) -> bool:
        """Whether a lane can send the program's own tensors out of the memory that they are in."""
        route = self._local.peers.route_back(caller)
        largest = max((tensor for piece in feed.parts for tensor in piece), key=lambda tensor: tensor.nbytes)
        lane = self._local.tensor_lanes.get(route.beside.get(largest.device.type, ""))
        if lane is None:
            return False
        try:
            lane.export([largest], route.member.name, route.devices_back).cancel()
        except LaneUnavailable:
            return False
        return True

    def _leased(self, lease: int) -> Feed:
        feed = self.pool.leased(lease)
        assert isinstance(feed, Feed)
        return feed

    def serve_piece(self, _: int, lease: int, number: int, wait_s: float) -> Any:
        """A piece of a leased feed, as soon as it is here. Raises NotFound."""
        return self._leased(lease).piece(number, time.monotonic() + wait_s)

    def serve_confirm(self, _: int, lease: int, wait_s: float) -> Any:
        """End a lease; whether what was read under it is sound, as soon as that is known."""
        with suppress(NotFound):
            feed = self._leased(lease)
            if self.pool.release(lease):
                return feed.await_end(time.monotonic() + wait_s)
        return False

    def lose(self, rank: int) -> None:
        """See ``Served``. Without their home no member asks for these weights. They are pulled again if it returns."""
        super().lose(rank)
        if rank in self._homes:
            with self._lock:
                for feed in self._feeds.values():
                    self._lock.after(self.pool.retire, feed)
                self._feeds, self._over = {}, {}
            self.pool.drop_spare_memory()

    def close(self, error: Exception) -> None:
        with self._lock:
            self._waits.settle(error=error)


def feeds_of(local: LocalMember, store: Handle, key: StoreKey) -> Feeds:
    """The feeds of this member. To be called before the home hears of a pull that might feed others."""
    name = f"{store.name} {store._instance_id}"  # of this instance of the store
    ranks = [local.peers.route(home).member.rank for home in store._lives_with]
    feeds = local.services.open(KIND, name, lambda: Feeds(local, name, ranks))
    local.weights.watch(key, feeds)
    return feeds


SERVICES = object_services({LEASE: Feeds.serve_lease, PIECE: Feeds.serve_piece, CONFIRM: Feeds.serve_confirm})
