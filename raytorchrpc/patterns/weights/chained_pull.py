"""A pull of a chain: another member may feed it, and it may feed others, piece by piece."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from raytorchrpc.calls.client.future import Future
from raytorchrpc.errors import LaneUnavailable, NotFound, PeerLost, RpcTimeout
from raytorchrpc.patterns.weights import feeds, published
from raytorchrpc.patterns.weights.feeds import Feed, Feeds
from raytorchrpc.patterns.weights.published import VersionLease
from raytorchrpc.patterns.weights.pull_plan import Selection, SourceCopies
from raytorchrpc.patterns.weights.relays import Advice
from raytorchrpc.patterns.weights.snapshots import TensorSpec
from raytorchrpc.patterns.weights.source_lease import SourceLease, stream
from raytorchrpc.process.completion import nothing
from raytorchrpc.process.cuda_driver import identity_of


class Pace(NamedTuple):
    """In which pieces members feed one another."""

    piece_bytes: int  # the least bytes of a piece
    pieces: int  # the most pieces
    ahead: int  # how many are asked for at once


#: Between hosts; and on one host, where members take about a millisecond to ask for a piece and to answer, and GPUs two
#: to copy a sixth of 4 GB.
BETWEEN_HOSTS, ON_A_HOST = Pace(4 << 20, 64, 2), Pace(64 << 20, 6, 6)
#: How long a pull waits at least for those that it feeds, once it has everything (seconds).
PATIENCE_S = 0.02
#: How many members are tried before the home alone.
_ATTEMPTS = 3
#: What a member may do to others that it feeds: stop, lose the weights, be out of reach or stand still.
_FAILURES = (PeerLost, NotFound, LaneUnavailable, RpcTimeout)


def feeds_of(lease: SourceLease) -> Feeds:
    """What this member feeds to others. To be called before the home hears of a pull that might feed some."""
    return feeds.feeds_of(lease.requests.local, lease.store, lease.requests.counter.store)


class ChainedPull:
    """One pull of a chain, by the thread that uses it."""

    def __init__(
        self,
        lease: SourceLease,
        signature: str,
        selection: Selection,
        pace: Pace,
        fetch: Callable[[Selection], Future[Any]],
    ) -> None:
        """
        Args:
            lease: at the home.
            signature: see ``Selection``.
            selection: what to bring.
            pace: in which pieces.
            fetch: sends the home a request for a message.
        """
        self._lease, self._requests, self._local = lease, lease.requests, lease.requests.local
        self._version, self._signature = lease.leased.version, signature
        self._selection, self._pace, self._fetch = selection, pace, fetch
        self._size = max(pace.piece_bytes, selection.nbytes // pace.pieces)
        self.feeds = feeds_of(lease)

    def bring_between_hosts(self) -> None:
        """Bring the tensors from another host. The member of a host that leads keeps them for all others."""
        pieces, home = self._pieces(self._selection), self._lease.home
        for _ in range(_ATTEMPTS):
            request = *self._lease.store._address, (self._version, self._signature), len(pieces)
            answer = self._requests.call(home, published.ADVISE, request, self._requests.seconds_left(0.001))
            advice = Advice(*answer.wait())
            if advice.leads or advice.source is None:
                self._lead(advice.source)
                return
            if self._from_member(advice.source, pieces, nothing) == len(pieces):
                return
        self._from_home(pieces, nothing)

    def _lead(self, source: int | None) -> None:
        """Pull into memory that this member keeps for others."""
        feed, targets, pool = None, self._selection.targets, self.feeds.pool
        specs = [TensorSpec(target.dtype, tuple(target.shape), target.device) for target in targets]
        try:
            memory = pool.memory(specs)
            pieces = self._pieces(self._selection.into(memory.tensors))
            feed = Feed(self._local, self._version, specs, memory, pool, [piece.targets for piece in pieces])
            lease = self.feeds.open(self._signature, feed)
            try:
                brought = 0 if source is None else self._from_member(source, pieces, feed.add)
                self._from_home(pieces[brought:], feed.add)
                feed.copy_into(targets, [(place, None) for place in range(len(targets))])
            finally:
                pool.release(lease)
        except BaseException:
            self.feeds.fail(self._signature, self._version, feed)
            self._report(self._local.me.rank)
            raise

    def bring_on_a_host(self, source: int | None) -> bool:
        """Copy from the GPU before this one, or from the home; meanwhile feed the next from the model's tensors.

        Returns False if the home's memory cannot be copied from.
        """
        began, pieces = time.monotonic(), self._pieces(self._selection)
        feed = Feed(self._local, self._version, (), None, self.feeds.pool, [piece.targets for piece in pieces])
        self.feeds.pool.release(self.feeds.open(self._signature, feed))
        is_sound = False
        try:
            if source is None:
                is_sound = has_come = self._from_home(pieces, feed.add)
            elif self._from_member(source, pieces, feed.add, confirms=True) == len(pieces):
                is_sound = has_come = True
            else:
                self.feeds.fail(self._signature, self._version, feed)  # nobody vouches for what others were fed
                has_come = self._from_home(pieces, nothing)
            if is_sound:
                self.feeds.end(self._signature, feed, PATIENCE_S + (time.monotonic() - began) / 2)
            return has_come
        finally:
            if not is_sound:
                self.feeds.fail(self._signature, self._version, feed)
            self._report(self._local.me.rank)

    def _pieces(self, selection: Selection) -> list[Selection]:
        return selection.in_slices(self._size).messages(self._size)

    def _from_home(self, pieces: Sequence[Selection], arrived: Callable[[], None]) -> bool:
        """Bring pieces from the home; False if its memory cannot be copied from."""
        answers = stream((partial(self._fetch, piece) for piece in pieces), self._pace.ahead)
        for piece, answer in zip(pieces, answers, strict=True):
            if not answer:
                return False
            self._lease.check()
            self._requests.count(self._lease.home, piece.nbytes)
            arrived()
        return True

    def _from_member(
        self, source: int, pieces: Sequence[Selection], arrived: Callable[[], None], *, confirms: bool = False
    ) -> int:
        """Bring pieces from a member that leads; returns how many it has brought before it failed.

        ``confirms``: it may have taken back what came, and says so at the end: then none.
        """
        requests, address, brought = self._requests, (feeds.KIND, self.feeds.name, None), 0

        def request(service: str, *args: Any, **options: Any) -> Future[Any]:
            wait_s = requests.seconds_left(0.001) / 2  # the rest is for the home
            return requests.call(source, service, (*address, *args, wait_s), 1.5 * wait_s, **options)

        try:
            lease = request(feeds.LEASE, self._signature, self._version, requests.seconds_left()).wait()
            if lease:
                try:
                    targets = enumerate(piece.targets for piece in pieces)
                    asks = (partial(request, feeds.PIECE, lease, number, into=into) for number, into in targets)
                    for piece, _ in zip(pieces, stream(asks, self._pace.ahead), strict=True):
                        self._lease.check()
                        requests.count(source, piece.nbytes)
                        arrived()
                        brought += 1
                    if not confirms or request(feeds.CONFIRM, lease).wait():
                        return brought
                finally:
                    requests.notify(source, published.RELEASE, (*address, lease, *requests.report(source)))
        except _FAILURES:
            if not requests.seconds_left():
                raise
        self._report(source)
        return 0 if confirms else brought

    def _report(self, leader: int) -> None:
        """Tell the home that a leader feeds no more."""
        report = *self._lease.store._address, (self._version, self._signature), leader
        self._requests.notify(self._lease.home, published.REPORT, report)


class HostTurn:
    """What one of several GPUs of a host asks of a home that they all pull the same from, by the thread that pulls.

    The home tells it with the lease which GPU to copy from; then it either copies, or gives its turn back, because
    others may wait to be fed by it.
    """

    def __init__(self, lease: SourceLease, signature: str, device: torch.device) -> None:
        """``signature``: what those that pull the same have in common. ``device``: of this pull."""
        self._lease, self._signature, self._is_over = lease, signature, False
        gpu = identity_of(device.index) if device.type == "cuda" else ""
        self.wanted = signature, gpu or f"rank {lease.requests.local.me.rank}"
        """What the home is told."""

    @classmethod
    def of(cls, lease: SourceLease, planned: SourceCopies | None) -> HostTurn | None:
        """For a pull for which others on this host may be nearer than the home; None for any other."""
        if lease.is_home or planned is None or planned.alike is None:
            return None
        signature, device = planned.alike
        same_gpus = {own for own, _ in lease.requests.local.peers.route(lease.home).same_gpus}
        if not lease.requests.is_readable(lease.home, device.type) or device.index in same_gpus:
            return None
        feeds_of(lease)  # before the home hears of it: others come at once
        return cls(lease, signature, device)

    @property
    def is_given(self) -> bool:
        """Whether there are others, and this member has neither copied nor given its turn back."""
        return self._lease.leased.turn is not None and not self._is_over

    def take(self, selection: Selection, fetch: Callable[[Selection], Future[Any]]) -> bool:
        """Copy from the one that is before this member; False if that is not possible. ``fetch``: from the home."""
        assert self._lease.leased.turn is not None
        self._is_over = True
        chained = ChainedPull(self._lease, self._signature, selection, ON_A_HOST, fetch)
        return chained.bring_on_a_host(Advice(*self._lease.leased.turn).source)

    def give_back(self, lease: VersionLease) -> None:
        """Tell those that would be fed by this member that they have to look elsewhere."""
        if lease.turn is None or self._is_over:
            return
        self._is_over = True
        feeds_of(self._lease).fail(self._signature, lease.version, None)
        requests = self._lease.requests
        report = (*self._lease.store._address, (lease.version, self._signature), requests.local.me.rank)
        requests.notify(self._lease.home, published.REPORT, report)
