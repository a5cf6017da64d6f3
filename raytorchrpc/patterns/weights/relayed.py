"""Pulls by way of the members that pull the same: from another host, or among many of one host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from raytorchrpc.calls.client.future import Future
from raytorchrpc.errors import LaneUnavailable, NotFound, PeerLost, RpcTimeout
from raytorchrpc.patterns.weights import feeds, published
from raytorchrpc.patterns.weights.feeds import Feed, feeds_of
from raytorchrpc.patterns.weights.relays import Advice
from raytorchrpc.patterns.weights.requests import AHEAD, Address, Requests, stream
from raytorchrpc.patterns.weights.selection import Selection
from raytorchrpc.patterns.weights.snapshots import TensorSpec
from raytorchrpc.tensors.cuda_streams import nothing

#: A pull comes in this many pieces at most, of at least so many bytes each.
_PIECES, _PIECE_BYTES = 64, 4 << 20
#: How long a pull waits at least for those that it feeds, once it has everything (seconds).
_PATIENCE_S = 0.02
#: How many members are tried before the home alone.
_ATTEMPTS = 3
#: What a member may do to others that it feeds: stop, lose the weights, be out of reach or stand still.
_FAILURES = (PeerLost, NotFound, LaneUnavailable, RpcTimeout)


class _NotReadable(Exception):
    """The home's memory cannot be copied from."""


class Origin(NamedTuple):
    """Where weights are pulled from."""

    home: str
    """The member that has them."""
    homes: Sequence[str]
    """The members without which nobody pulls them."""
    address: Address
    """Of the weights at their home."""


class FedPull:
    """One pull that others may feed, and that may feed others. By the thread that uses it."""

    #: The least bytes of a piece, the most pieces, and how many are asked for at once.
    piece_bytes, pieces, ahead = _PIECE_BYTES, _PIECES, AHEAD

    def __init__(
        self,
        requests: Requests,
        origin: Origin,
        what: tuple[int, str],
        selection: Selection,
        fetch: Callable[[Selection], Future[Any]],
        check_lease: Callable[[], None],
    ) -> None:
        """
        Args:
            what: the version, and ``Selection.signature``.
            fetch: sends a request for a message to the home.
            check_lease: raises if the home may have changed them meanwhile.
        """
        self._requests, self._home, self._address = requests, origin.home, origin.address
        self._what, self._selection = what, selection
        self._fetch, self._check_lease = fetch, check_lease
        self._size = max(self.piece_bytes, sum(target.nbytes for target in selection.targets) // self.pieces)
        self._mine = feeds_of(requests.local, requests.counter.store, *origin[1:])

    def _pieces(self, selection: Selection) -> list[Selection]:
        return selection.in_slices(self._size).messages(self._size)

    def _from_home(self, pieces: Sequence[Selection], arrived: Callable[[], None]) -> None:
        answers = stream((partial(self._fetch, piece) for piece in pieces), self.ahead)
        for piece, answer in zip(pieces, answers, strict=True):
            if not answer:
                raise _NotReadable
            self._check_lease()
            self._requests.count(self._home, piece.nbytes)
            arrived()

    def _from_member(
        self, source: int, pieces: Sequence[Selection], arrived: Callable[[], None], *, confirms: bool = False
    ) -> int:
        """Bring pieces from a member that leads; returns how many it has brought before it failed.

        ``confirms``: the member may have taken back what came, and says so at the end: then none.
        """
        requests, address, brought = self._requests, (feeds.KIND, self._mine.name, None), 0

        def request(service: str, *args: Any, **options: Any) -> Future[Any]:
            wait_s = requests.left(0.001) / 2  # the rest is for the home
            return requests.call(source, service, (*address, *args, wait_s), 1.5 * wait_s, **options)

        try:
            lease = request(feeds.LEASE, *reversed(self._what), requests.left()).wait()
            if lease:
                try:
                    fed = enumerate(piece.targets for piece in pieces)
                    asks = (partial(request, feeds.PIECE, lease, place, into=into) for place, into in fed)
                    for piece, _ in zip(pieces, stream(asks, self.ahead), strict=True):
                        self._check_lease()
                        requests.count(source, piece.nbytes)
                        arrived()
                        brought += 1
                    if not confirms or request(feeds.CONFIRM, lease).wait():
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
        self._requests.notify(self._home, published.REPORT, (*self._address, self._what, leader))


class RelayedPull(FedPull):
    """Brings tensors from another host. The member of a host that leads keeps them in memory for all others."""

    def bring(self) -> None:
        """Bring the tensors. Raises as requests to the home do."""
        pieces = self._pieces(self._selection)
        for _ in range(_ATTEMPTS):
            advice = self._ask(len(pieces))
            if advice.leads or advice.source is None:
                self._lead(advice.source)
                return
            if self._from_member(advice.source, pieces, nothing) == len(pieces):
                return
        self._from_home(pieces, nothing)

    def _ask(self, pieces: int) -> Advice:
        request = (*self._address, self._what, pieces)
        return Advice(*self._requests.call(self._home, published.ADVISE, request, self._requests.left(0.001)).wait())

    def _lead(self, source: int | None) -> None:
        """Pull into memory that this member keeps for others."""
        local, mine, feed = self._requests.local, self._mine, None
        targets, (version, signature) = self._selection.targets, self._what
        specs = [TensorSpec(target.dtype, tuple(target.shape), target.device) for target in targets]
        try:
            memory = mine.pool.memory(specs)
            pieces = self._pieces(self._selection._replace(targets=memory.tensors))
            feed = Feed(version, specs, memory, mine.pool, [piece.targets for piece in pieces])
            lease = mine.open(signature, feed)
            try:
                brought = 0 if source is None else self._from_member(source, pieces, feed.add)
                self._from_home(pieces[brought:], feed.add)
                feed.copy_into(targets, [(place, None) for place in range(len(targets))])
            finally:
                mine.pool.release(lease)
        except BaseException:
            mine.fail(signature, version, feed)
            self._report(local.me.rank)
            raise


class PullInTurn(FedPull):
    """Brings tensors on one host, where several GPUs pull the same: each one copies from the one before it.

    It feeds the next from the model's own tensors, so only for as long as the pull takes.
    """

    # Members take about a millisecond to ask for a piece and to answer, and GPUs two to copy a sixth of 4 GB.
    piece_bytes, pieces, ahead = 64 << 20, 6, 6

    def bring(self, source: int | None) -> bool:
        """Bring the tensors; False if they cannot be copied from the home's memory. Raises as requests to the home do.

        ``source``: see ``Advice``.
        """
        local, (version, signature) = self._requests.local, self._what
        pieces, began = self._pieces(self._selection), time.monotonic()
        feed = Feed.of_model(version, self._mine.pool, [piece.targets for piece in pieces])
        self._mine.pool.release(self._mine.open(signature, feed))
        try:
            if source is None:
                self._from_home(pieces, feed.add)
            elif self._from_member(source, pieces, feed.add, confirms=True) < len(pieces):
                self._mine.fail(signature, version, feed)  # those that were fed have what nobody vouches for
                self._from_home(pieces, nothing)
                return True
            self._mine.end(signature, feed, _PATIENCE_S + (time.monotonic() - began) / 2)
            return True
        except _NotReadable:
            self._mine.fail(signature, version, feed)
            return False
        except BaseException:
            self._mine.fail(signature, version, feed)
            raise
        finally:
            self._report(local.me.rank)
