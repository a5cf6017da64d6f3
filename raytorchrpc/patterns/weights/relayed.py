"""One pull from another host, by way of the members that pull the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from raytorchrpc.calls.future import Future
from raytorchrpc.errors import LaneUnavailable, NotFound, PeerLost, RpcTimeout
from raytorchrpc.patterns.weights import feeds, published
from raytorchrpc.patterns.weights.feeds import Feed, Feeds
from raytorchrpc.patterns.weights.match import Selection
from raytorchrpc.patterns.weights.relays import Advice
from raytorchrpc.patterns.weights.requests import Address, Requests, stream
from raytorchrpc.patterns.weights.snapshots import TensorSpec
from raytorchrpc.tensors.cuda_streams import nothing

#: A pull comes in this many pieces at most, of at least so many bytes each.
_PIECES, _PIECE_BYTES = 64, 4 << 20
#: How many members are tried before the home alone.
_ATTEMPTS = 3
#: What a member may do to others that it feeds: stop, lose the weights, be out of reach or stand still.
_FAILURES = (PeerLost, NotFound, LaneUnavailable, RpcTimeout)


class RelayedPull:
    """Brings the tensors of one pull, and feeds others with them if it is asked to. By the thread that uses it."""

    def __init__(
        self,
        requests: Requests,
        home: str,
        homes: Sequence[str],
        address: Address,
        what: tuple[int, str],
        selection: Selection,
        fetch: Callable[[Selection], Future[object]],
        check_lease: Callable[[], None],
    ) -> None:
        """
        Args:
            home: the member that has the weights.
            homes: the members without which nobody pulls them.
            address: of the weights at their home.
            what: the version, and ``Selection.signature``.
            fetch: sends a request for a message to the home.
            check_lease: raises if the home may have changed them meanwhile.
        """
        self._requests, self._home, self._homes, self._address = requests, home, homes, address
        self._what, self._selection = what, selection
        self._fetch, self._check_lease = fetch, check_lease
        self._size = max(_PIECE_BYTES, sum(target.nbytes for target in selection.targets) // _PIECES)

    def bring(self) -> None:
        """Bring the tensors. Raises as requests to the home do."""
        local = self._requests.local
        homes = [local.peers.route(home).member.rank for home in self._homes]
        # Before the home knows that this member might lead: others come at once.
        self._mine = local.services.open(feeds.KIND, self._name, lambda: Feeds(local, homes))
        pieces = self._pieces(self._selection)
        for _ in range(_ATTEMPTS):
            advice = self._ask(len(pieces))
            if advice.leads or advice.source is None:
                self._lead(advice.source)
                return
            if self._from_member(advice.source, pieces, nothing) == len(pieces):
                return
        self._from_home(pieces, nothing)

    def _pieces(self, selection: Selection) -> list[Selection]:
        return selection.in_slices(self._size).messages(self._size)

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

    def _from_home(self, pieces: Sequence[Selection], arrived: Callable[[], None]) -> None:
        for _ in stream(partial(self._fetch, piece) for piece in pieces):
            self._check_lease()
            arrived()

    def _from_member(self, source: int, pieces: Sequence[Selection], arrived: Callable[[], None]) -> int:
        """Bring pieces from a member that leads; returns how many it has brought before it failed."""
        requests, address, brought = self._requests, (feeds.KIND, self._name, None), 0

        def request(service: str, *args: Any, **options: Any) -> Future[Any]:
            wait_s = requests.left(0.001) / 2  # the rest is for the home
            return requests.call(source, service, (*address, *args, wait_s), 1.5 * wait_s, **options)

        try:
            lease = request(feeds.LEASE, *reversed(self._what), requests.left()).wait()
            if lease:
                try:
                    fed = enumerate(piece.targets for piece in pieces)
                    for _ in stream(partial(request, feeds.PIECE, lease, place, into=into) for place, into in fed):
                        self._check_lease()
                        arrived()
                        brought += 1
                    return brought
                finally:
                    requests.notify(source, published.RELEASE, (*address, lease))
        except _FAILURES:
            if not requests.left():
                raise
        self._report(source)
        return brought

    def _report(self, leader: int) -> None:
        self._requests.notify(self._home, published.REPORT, (*self._address, self._what, leader))

    @property
    def _name(self) -> str:
        """Members relay the weights of this instance of the store under it."""
        return f"{self._address[1]} {self._address[2]}"
