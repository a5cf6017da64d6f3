"""One pull from one home: leases a version there, and brings its tensors from there or from a member of this host."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from raytorchrpc.calls.client.future import Future
from raytorchrpc.calls.counters import PullCounter
from raytorchrpc.calls.guests import is_guest
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.receive_into import Window
from raytorchrpc.errors import LaneUnavailable, NotFound, PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.lanes.base import WindowLane
from raytorchrpc.patterns.handle import Handle, run
from raytorchrpc.patterns.weights import feeds, published
from raytorchrpc.patterns.weights.deltas import TINY, apply, bounds_of, delta_bytes, takes_elements
from raytorchrpc.patterns.weights.feeds import Feed, Feeds
from raytorchrpc.patterns.weights.plan import KnownLayout
from raytorchrpc.patterns.weights.published import VersionLease, lease_is_valid_until
from raytorchrpc.patterns.weights.pull_plan import ModelSelection, Selection
from raytorchrpc.patterns.weights.relays import Advice
from raytorchrpc.patterns.weights.snapshots import TensorSpec
from raytorchrpc.process.completion import nothing
from raytorchrpc.process.cuda_driver import identity_of

#: Most bytes of one message: tensors that lanes bring in memory of their own need this much of it.
MESSAGE_BYTES = 256 << 20
#: A home, and the instance of what it has there.
Source = tuple[str, int | None]
#: Smaller pulls do not use a relay: asking which member has it takes as long (bytes).
_WORTH_RELAYING = 1 << 20


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
        self.counter.add(size, source if isinstance(source, str) else published.name_of(self.local, source))
        self._brought[source] = self._brought.get(source, 0) + size

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


class SourcePull:
    """One pull of a version from one home into a model, by the thread that uses it.

    ``ask`` and ``answer`` lease a version. If the plan was made for another layout, ``planned`` is None then: set it.
    ``bring`` moves the tensors, and ``release`` ends the lease.
    """

    def __init__(
        self,
        store: Handle,
        requests: Requests,
        layout: KnownLayout | None,
        planned: ModelSelection | None,
        device_type: str | None,
    ) -> None:
        """``device_type``: of the memory that is to come with the lease; None: none is."""
        self.store, self.requests, self._local = store, requests, requests.local
        self.layout, self.planned = layout, planned
        self.lease: VersionLease | None = None  # as soon as the home has answered. It has to be released
        self.home, self._address = store.home, store._address
        self._is_home = store._is_home(self._local)
        self._device_type = None if self._is_home else self._readable_in_place(self.home, device_type)
        self.memory = Window()  # that has come with the lease
        self._had_turn = False
        self._asked: Future[Any] | None = None  # for the lease

    @property
    def source(self) -> Source:
        """Where it pulls from."""
        return self.home, self.store._instance_id

    @property
    def leased(self) -> VersionLease:
        assert self.lease is not None
        return self.lease

    # --- the lease -----------------------------------------------------------------------------------------------

    def ask(self, version: int | None, since: int | None, caller_waits: bool = False) -> None:
        """Ask the home for a lease. Then call ``answer`` or ``release``."""
        left = self.requests.left()
        args = version, since, 0 if self.layout is None else self.layout.number
        if self._is_home:
            found = self.store._object(self._local).lease(self._local.me.rank, *args, None)
            if found is not None:
                self._take(found)
            return
        what = None
        if self.planned is not None and (alike := self.planned.alike) is not None and self._takes_turns(alike[1]):
            signature, device = alike
            gpu = identity_of(device.index) if device.type == "cuda" else ""
            what = signature, gpu or f"rank {self._local.me.rank}"
            self.feeds()  # before the home hears of it: others come at once
        request = (*self._address, *args, left, self._device_type, what)
        options: dict[str, Any] = {"caller_waits": caller_waits, "into": self.memory}
        self._asked = self.store._send(self._local, published.LEASE, request, left, **options)

    def answer(self) -> VersionLease | None:
        """The lease; None if nothing is published yet."""
        sent, self._asked = self._asked, None
        if sent is not None:
            response = self.store._response(sent)
            del sent  # see _response
            run(response)
        self._note_answer()
        return self.lease

    def _note_answer(self) -> None:
        """Take the lease out of the answer, if one has come."""
        if self.lease is None and (answer := self.memory.result) is not None:
            self._take(VersionLease(*answer[0]))
            if self.planned is None:
                self.memory.prepare()

    def _take(self, lease: VersionLease) -> None:
        self.lease = lease
        if lease.lease and lease.rows is not None:
            self.layout, self.planned = KnownLayout(lease.layout, lease.rows), None  # the plan was for another one
        elif lease.lease and (self.layout is None or self.layout.number != lease.layout):
            raise NotFound(f"the home of {self.requests.counter.store[0]!r} did not say what it has; pull again")

    def release(self) -> None:
        """End the lease, also one that is still to come. Does not wait for the home's answer."""
        sent, self._asked = self._asked, None
        if sent is None:
            self._release()
        else:
            sent.add_done_callback(self._release_late)

    def _release_late(self, sent: Future[Any]) -> None:
        self._asked = sent
        self._release()

    def _release(self) -> None:
        if self._asked is not None:
            with suppress(RayTorchRpcError):  # no lease then
                self.answer()
        if self.lease is None or not self.lease.lease:
            return
        self._give_turn_back()
        if self._is_home:
            self.store._object(self._local).pool.release(self.lease.lease)
        else:
            report = (*self._address, self.lease.lease, *self.requests.report(self.home))
            self.requests.notify(self.home, published.RELEASE, report)

    def check_lease(self) -> None:
        """Raise RpcTimeout if the lease may have ended before the tensors were copied."""
        if time.monotonic() > lease_is_valid_until(self.requests.until):
            raise RpcTimeout(
                f"a pull of {self.store.kind} {self.store.name!r} was suspended, or took much longer than its "
                f"timeout, and {self.home!r} has ended its lease: the model may have tensors of two versions; "
                f"pull again"
            )

    def snapshot(self) -> Any:
        return self.store._object(self._local).pool.leased(self.leased.lease)

    # --- moving tensors ------------------------------------------------------------------------------------------

    @cached_property
    def selection(self) -> Selection:
        """What the pull brings."""
        assert self.planned is not None
        return self.planned.only(self.leased.changed)

    def expect(self) -> int:
        """Count the tensors as still to come; returns their bytes."""
        size = self.selection.nbytes
        self.requests.counter.expect(self.leased.version, size)
        return size

    @property
    def _has_arrived(self) -> bool:
        """Whether the memory that has come with the lease has the tensors."""
        assert self.planned is not None
        its_type = None if self.planned.converts else self.planned.device_type
        return self.memory.has_tensors and its_type == self._device_type

    def bring(self, caller_waits: bool = False) -> Iterator[None]:
        """Bring the tensors into the model. Yields once, when the home is asked for what comes first."""
        if not (selection := self.selection).transfers:
            return
        if self._is_home or self._has_arrived:
            yield
            if self._is_home:
                self.snapshot().copy_into(selection.targets, selection.places, selection.regions)
                self.requests.counter.add(selection.nbytes)
            else:
                self.memory.copy_into(selection.parts)
                self.requests.count(self.home, selection.nbytes)
        else:
            self.memory = Window()  # what came with the lease, if anything, is in another form
            deltas, rest = self._divide(selection)
            first = self._request_deltas(deltas[0], caller_waits) if deltas else None
            sent = self._request_whole(rest, caller_waits and not deltas)
            yield
            self._fetch_deltas(deltas, first)
            if rest.transfers:
                self._fetch_whole(rest, sent)
        self.check_lease()

    def _request_whole(self, selection: Selection, caller_waits: bool) -> Future[Any] | None:
        """Ask for memory to copy from; None if the tensors come in another way."""
        if not selection.transfers or self._uses_relay(selection) or self._has_turn:
            return None
        assert self.planned is not None
        device_type = self._readable_in_place(self.home, self.planned.device_type)
        return None if device_type is None else self._request_pieces(device_type, selection, caller_waits)

    def _fetch_whole(self, selection: Selection, sent: Future[Any] | None) -> None:
        if self._uses_relay(selection):
            signature = selection.signature(self.leased.layout)
            ChainedPull(self, signature, selection, BETWEEN_HOSTS, self._request_message).bring_between_hosts()
            return
        if self._has_turn and self._take_turn(selection):
            return
        if sent is None:
            sent = self._request_whole(selection, caller_waits=True)
        if sent is not None and sent.wait():
            self.requests.count(self.home, selection.nbytes)
            return
        for message in selection.messages(MESSAGE_BYTES):  # copied out of the lane's memory before the next
            self._request_message(message).wait()
            self.requests.count(self.home, message.nbytes)

    def _request_pieces(
        self, device_type: str, selection: Selection, caller_waits: bool = False
    ) -> Future[list[torch.Tensor]]:
        """Ask the home for its memory, to copy from when the answer is taken; no pieces if that cannot be read."""
        parts, places = selection.parts, selection.places
        into = Window(lambda pieces: parts if pieces else None)
        if all(name is None for _, name in places):
            places = []  # the same memory, in a shorter request
        return self._request(published.PIECES, places, device_type, into=into, caller_waits=caller_waits)

    def _request_message(self, message: Selection) -> Future[Any]:
        return self._request(published.TENSORS, message.places, message.regions, into=message.targets)

    def _request(self, service: str, *args: Any, **options: Any) -> Future[Any]:
        request = (*self._address, self.leased.lease, *args)
        return self.requests.call(self.home, service, request, self.requests.left(0.001), **options)

    # --- deltas --------------------------------------------------------------------------------------------------

    def _divide(self, selection: Selection) -> tuple[list[Selection], Selection]:
        """The messages of what comes as deltas, and what comes whole."""
        deltas, planned = self.leased.deltas, self.planned
        assert planned is not None
        if not deltas or self._readable_in_place(self.home, planned.device_type):
            return [], selection
        # The home sends deltas to each reader, and whole tensors to other hosts once.
        times = 1 if self.requests.is_near(self.home) else max(1, self._far_members())
        return divide(selection, dict(deltas), planned.plan.layout, times)

    def _fetch_deltas(self, deltas: Sequence[Selection], sent: Future[Any] | None) -> None:
        for number, message in enumerate(deltas):
            answer = (sent or self._request_deltas(message, caller_waits=True)).wait()
            sent = self._request_deltas(deltas[number + 1]) if number + 1 < len(deltas) else None
            apply(message.regions, message.targets, answer)
            size = sum(tensor.nbytes for tensor in answer[1])
            self.requests.counter.expect(self.leased.version, size - message.nbytes)
            self.requests.count(self.home, size)

    def _request_deltas(self, message: Selection, caller_waits: bool = False) -> Future[Any]:
        spans = [(transfer.place[0], *bounds_of(transfer.region)) for transfer in message.transfers]
        return self._request(published.DELTAS, spans, caller_waits=caller_waits)

    # --- by way of others ----------------------------------------------------------------------------------------

    def _uses_relay(self, selection: Selection) -> bool:
        """Whether other members that are not on the home's host may pull the same."""
        if is_guest(self._local.me.rank):  # no member connects to it
            return False
        if self.requests.is_near(self.home) or selection.nbytes < _WORTH_RELAYING:
            return False
        return self._far_members() > 1

    def _far_members(self) -> int:
        """How many members are not on the home's host."""
        peers = self._local.peers
        its_node = peers.member(self.home).node_id
        return sum(member.node_id != its_node for member in peers.members)

    def feeds(self) -> Feeds:
        """What this member feeds to others. To be called before the home hears of a pull that might."""
        return feeds.feeds_of(self._local, self.store, self.requests.counter.store)

    def _takes_turns(self, device: torch.device) -> bool:
        """Whether other GPUs of this host may be nearer than the home: not for a reader on the home's own."""
        if self._readable_in_place(self.home, device.type) is None:
            return False
        return device.index not in {mine for mine, _ in self._local.peers.route(self.home).same_gpus}

    @property
    def _has_turn(self) -> bool:
        """Whether other GPUs of this host pull the same, and the home has told this member from which it copies."""
        return self.leased.turn is not None and not self._had_turn

    def _take_turn(self, selection: Selection) -> bool:
        """Copy from the one that is before this member; False if that is not possible."""
        assert self.leased.turn is not None
        if self.planned is None or selection is not self.planned or (alike := selection.alike) is None:
            self._give_turn_back()
            return False
        self._had_turn = True
        chained = ChainedPull(self, alike[0], selection, ON_A_HOST, partial(self._request_pieces, alike[1].type))
        return chained.bring_on_a_host(Advice(*self.leased.turn).source)

    def _give_turn_back(self) -> None:
        """Tell those that would be fed by this member that they have to look elsewhere."""
        if self._has_turn and self.planned is not None and (alike := self.planned.alike) is not None:
            self._had_turn, version = True, self.leased.version
            self.feeds().fail(alike[0], version, None)
            report = (*self._address, (version, alike[0]), self._local.me.rank)
            self.requests.notify(self.home, published.REPORT, report)

    def _readable_in_place(self, source: Any, device_type: str | None) -> str | None:
        """Return ``device_type`` if a lane can read parts of the source's memory on such devices in place."""
        if device_type is None or not self.requests.is_near(source):
            return None
        lane = self._local.tensor_lanes.get(self._local.peers.route(source).beside.get(device_type, ""))
        return device_type if isinstance(lane, WindowLane) else None


class _NotReadable(Exception):
    """The home's memory cannot be copied from."""


class ChainedPull:
    """One pull of a chain: another member may feed it, and it may feed others. By the thread that uses it."""

    def __init__(
        self,
        pull: SourcePull,
        signature: str,
        selection: Selection,
        pace: Pace,
        fetch: Callable[[Selection], Future[Any]],
    ) -> None:
        """``signature``: see ``Selection``. ``fetch``: sends a request for a message to the home."""
        self._pull, self._requests, self._local, self._store = pull, pull.requests, pull.requests.local, pull.store
        self._what = pull.leased.version, signature
        self._selection, self._pace, self._fetch = selection, pace, fetch
        self._size = max(pace.piece_bytes, selection.nbytes // pace.pieces)
        self._mine = pull.feeds()

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
            self._pull.check_lease()
            self._requests.count(self._store.home, piece.nbytes)
            arrived()

    def _from_member(
        self, source: int, pieces: Sequence[Selection], arrived: Callable[[], None], *, confirms: bool = False
    ) -> int:
        """Bring pieces from a member that leads; returns how many it has brought before it failed.

        ``confirms``: it may have taken back what came, and says so at the end: then none.
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
                    for piece, _ in zip(pieces, stream(asks, self._pace.ahead), strict=True):
                        self._pull.check_lease()
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
        self._requests.notify(self._store.home, published.REPORT, (*self._store._address, self._what, leader))


def divide(
    selection: Selection, deltas: Mapping[int, int], layout: KnownLayout, times: int
) -> tuple[list[Selection], Selection]:
    """Divide what a pull brings: the messages of what comes as deltas, and what comes whole.

    ``times``: how often the source sends a delta for each time that it would send the whole tensors.
    """
    sizes: dict[int, int] = {}  # of what comes as deltas
    is_worth_a_request = False
    for index, (transfer, target) in enumerate(zip(selection.transfers, selection.targets, strict=True)):
        place, conversion = transfer.place
        if conversion is None and place in deltas and takes_elements(target):
            elements = math.prod(layout.rows[place][2])
            is_tiny = elements * target.itemsize < TINY
            size = delta_bytes(transfer.region, elements, target.itemsize, deltas[place])
            if is_tiny or size * times < target.nbytes:
                sizes[index] = size
                is_worth_a_request |= not is_tiny
    if not is_worth_a_request:
        return [], selection
    rest = [index for index in range(len(selection.transfers)) if index not in sizes]
    return selection.at(list(sizes)).messages(MESSAGE_BYTES, list(sizes.values())), selection.at(rest)
