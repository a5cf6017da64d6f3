"""Weights that members pull for one another: each feeds others piece by piece, while it receives."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from raytorchrpc.calls.client.future import Future
from raytorchrpc.calls.counters import PullCounter
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import LaneUnavailable, NotAMember, NotFound, PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.patterns.handle import Handle
from raytorchrpc.patterns.home import object_services
from raytorchrpc.patterns.waits import ReplyLock, Waits, give_up_at
from raytorchrpc.patterns.weights import published
from raytorchrpc.patterns.weights.published import Readable, lease_end
from raytorchrpc.patterns.weights.pull_plan import Selection
from raytorchrpc.patterns.weights.relays import Advice
from raytorchrpc.patterns.weights.snapshots import Layout, Snapshot, SnapshotPool, TensorSpec, VersionMemory
from raytorchrpc.process.completion import nothing
from raytorchrpc.tensors.cuda_streams import own_streams

#: Requests for large messages that are sent before the first of them has to be answered.
AHEAD = 2


class Requests:
    """Requests of one pull, by the thread that uses it."""

    def __init__(self, local: LocalMember, until: float, counter: PullCounter) -> None:
        """``until``: when the pull has to end (``time.monotonic``)."""
        self.local, self.until, self.counter = local, until, counter
        self._brought: dict[Any, int] = {}  # bytes, by the member that they came from, since the last report to it

    def left(self, least: float = 0.0) -> float:
        """Seconds until the pull has to end."""
        return max(least, self.until - time.monotonic())

    def call(
        self, target: Any, service: str, args: tuple[Any, ...], timeout: float | None, **options: Any
    ) -> Future[Any]:
        """Send a request. Raises PeerLost."""
        return Future(self.local.outgoing.call(target, service, args, {}, CallOptions(timeout, retry=0, **options)))

    def notify(self, target: Any, service: str, args: tuple[Any, ...]) -> None:
        """Send a request without waiting for its answer; ignores errors."""
        with suppress(RayTorchRpcError):
            self.call(target, service, args, None)

    def count(self, source: Any, size: int) -> None:
        """Count bytes that have come from a member."""
        self.counter.add(size, self._name_of(source))
        self._brought[source] = self._brought.get(source, 0) + size

    def _name_of(self, member: Any) -> str:
        if isinstance(member, str):
            return member
        with suppress(NotAMember):  # it has just left
            return str(self.local.peers.route(member).member.name)
        return f"rank {member}"

    def report(self, source: Any) -> tuple[Any, ...]:
        """What a member that granted a lease is told with the end of it."""
        size = self._brought.pop(source, 0)
        return (self.counter.store, self.counter.version, size) if size else ()

    def is_near(self, member: Any) -> bool:
        """Whether a member is on this node."""
        return self.local.peers.route(member).member.node_id == self.local.me.node_id


def stream(requests: Iterable[Callable[[], Future[Any]]], ahead: int) -> Iterable[Any]:
    """Send requests, so many ahead, and yield their answers in order. Raises the error of the first that fails."""
    sent: deque[Future[Any]] = deque()
    for request in requests:
        sent.append(request())
        if len(sent) > ahead:
            yield sent.popleft().wait()
    while sent:
        yield sent.popleft().wait()


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
        super().__init__(version, layout, memory or VersionMemory((), lambda size: None), [version] * len(specs), pool)
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
        """See ``Holder``."""
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
        self.pool.wait_unread(feed, patience_s)
        self.pool.revoke(feed)
        for device in {tensor.get_device() for piece in feed.parts for tensor in piece if tensor.is_cuda}:
            self._fence(device)

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
        """See ``Served``."""
        with self._lock:
            self._waits.settle(error=error)


def feeds_of(requests: Requests, store: Handle) -> Feeds:
    """The feeds of this member. To be called before the home hears of a pull that might feed others."""
    local, (_, name, instance) = requests.local, store._address
    name = f"{name} {instance}"  # of this instance of the store
    ranks = [local.peers.route(home).member.rank for home in store._lives_with]
    feeds = local.services.open(KIND, name, lambda: Feeds(local, name, ranks))
    local.weights.watch(requests.counter.store, feeds)
    return feeds


SERVICES = object_services({LEASE: Feeds.serve_lease, PIECE: Feeds.serve_piece, CONFIRM: Feeds.serve_confirm})


class Pace(NamedTuple):
    """In which pieces members feed one another."""

    piece_bytes: int  # the least bytes of a piece
    pieces: int  # the most pieces
    ahead: int  # how many are asked for at once


#: Between hosts; and on one host, where members take about a millisecond to ask for a piece and to answer, and GPUs two
#: to copy a sixth of 4 GB.
BETWEEN_HOSTS, ON_A_HOST = Pace(4 << 20, 64, AHEAD), Pace(64 << 20, 6, 6)
#: How long a pull waits at least for those that it feeds, once it has everything (seconds).
PATIENCE_S = 0.02
#: How many members are tried before the home alone.
_ATTEMPTS = 3
#: What a member may do to others that it feeds: stop, lose the weights, be out of reach or stand still.
_FAILURES = (PeerLost, NotFound, LaneUnavailable, RpcTimeout)


class _NotReadable(Exception):
    """The home's memory cannot be copied from."""


class ChainedPull:
    """One pull of a chain: another member may feed it, and it may feed others. By the thread that uses it."""

    def __init__(
        self,
        requests: Requests,
        store: Handle,
        what: tuple[int, str],
        selection: Selection,
        pace: Pace,
        fetch: Callable[[Selection], Future[Any]],
        check_lease: Callable[[], None],
    ) -> None:
        """``what``: the version, and ``Selection.signature``. ``fetch``: sends a request for a message to the home."""
        self._requests, self._local, self._store = requests, requests.local, store
        self._what, self._selection, self._pace = what, selection, pace
        self._fetch, self._check_lease = fetch, check_lease
        self._size = max(pace.piece_bytes, selection.nbytes // pace.pieces)
        self._mine = feeds_of(requests, store)

    def bring_between_hosts(self) -> None:
        """Bring the tensors from another host. The member of a host that leads keeps them for all others."""
        pieces = self._pieces(self._selection)
        for _ in range(_ATTEMPTS):
            request = *self._store._address, self._what, len(pieces)
            answer = self._requests.call(self._store.home, published.ADVISE, request, self._requests.left(0.001))
            advice = Advice(*answer.wait())
            if advice.leads or advice.source is None:
                self._lead(advice.source)
                return
            if self._from_member(advice.source, pieces, nothing) == len(pieces):
                return
        self._from_home(pieces, nothing)

    def _lead(self, source: int | None) -> None:
        """Pull into memory that this member keeps for others."""
        feed, (version, signature) = None, self._what
        targets, pool = self._selection.targets, self._mine.pool
        specs = [TensorSpec(target.dtype, tuple(target.shape), target.device) for target in targets]
        try:
            memory = pool.memory(specs)
            pieces = self._pieces(self._selection.into(memory.tensors))
            feed = Feed(self._local, version, specs, memory, pool, [piece.targets for piece in pieces])
            lease = self._mine.open(signature, feed)
            try:
                brought = 0 if source is None else self._from_member(source, pieces, feed.add)
                self._from_home(pieces[brought:], feed.add)
                feed.copy_into(targets, [(place, None) for place in range(len(targets))])
            finally:
                pool.release(lease)
        except BaseException:
            self._mine.fail(signature, version, feed)
            self._report(self._local.me.rank)
            raise

    def bring_on_a_host(self, source: int | None) -> bool:
        """Copy from the GPU before this one, or from the home; meanwhile feed the next from the model's tensors.

        Returns False if the home's memory cannot be copied from.
        """
        (version, signature), began = self._what, time.monotonic()
        pieces = self._pieces(self._selection)
        feed = Feed(self._local, version, (), None, self._mine.pool, [piece.targets for piece in pieces])
        self._mine.pool.release(self._mine.open(signature, feed))
        is_sound = False
        try:
            if source is None:
                self._from_home(pieces, feed.add)
                is_sound = True
            elif self._from_member(source, pieces, feed.add, confirms=True) == len(pieces):
                is_sound = True
            else:
                self._mine.fail(signature, version, feed)  # those that were fed have what nobody vouches for
                self._from_home(pieces, nothing)
            if is_sound:
                self._mine.end(signature, feed, PATIENCE_S + (time.monotonic() - began) / 2)
            return True
        except _NotReadable:
            return False
        finally:
            if not is_sound:
                self._mine.fail(signature, version, feed)
            self._report(self._local.me.rank)

    def _pieces(self, selection: Selection) -> list[Selection]:
        return selection.in_slices(self._size).messages(self._size)

    def _from_home(self, pieces: Sequence[Selection], arrived: Callable[[], None]) -> None:
        answers = stream((partial(self._fetch, piece) for piece in pieces), self._pace.ahead)
        for piece, answer in zip(pieces, answers, strict=True):
            if not answer:
                raise _NotReadable
            self._check_lease()
            self._requests.count(self._store.home, piece.nbytes)
            arrived()

    def _from_member(
        self, source: int, pieces: Sequence[Selection], arrived: Callable[[], None], *, confirms: bool = False
    ) -> int:
        """Bring pieces from a member that leads; returns how many it has brought before it failed.

        ``confirms``: it may have taken back what came, and says so at the end: then none.
        """
        requests, address, brought = self._requests, (KIND, self._mine.name, None), 0

        def request(service: str, *args: Any, **options: Any) -> Future[Any]:
            wait_s = requests.left(0.001) / 2  # the rest is for the home
            return requests.call(source, service, (*address, *args, wait_s), 1.5 * wait_s, **options)

        try:
            lease = request(LEASE, *reversed(self._what), requests.left()).wait()
            if lease:
                try:
                    fed = enumerate(piece.targets for piece in pieces)
                    asks = (partial(request, PIECE, lease, place, into=into) for place, into in fed)
                    for piece, _ in zip(pieces, stream(asks, self._pace.ahead), strict=True):
                        self._check_lease()
                        requests.count(source, piece.nbytes)
                        arrived()
                        brought += 1
                    if not confirms or request(CONFIRM, lease).wait():
                        return brought
                finally:
                    requests.notify(source, published.RELEASE, (*address, lease, *requests.report(source)))
        except _FAILURES:
            if not requests.left():
                raise
        self._report(source)
        return 0 if confirms else brought

    def _report(self, leader: int) -> None:
        """Tell the home that a leader feeds no more."""
        self._requests.notify(self._store.home, published.REPORT, (*self._store._address, self._what, leader))
