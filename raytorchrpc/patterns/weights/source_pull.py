"""One pull from one home: leases a version there, and brings its tensors from there or from a member of this host."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from raytorchrpc.calls.client.future import Future
from raytorchrpc.calls.counters import PullCounter
from raytorchrpc.calls.guests import is_guest
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.receive_into import Spread
from raytorchrpc.errors import NotFound, PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.lanes.base import Part, WindowLane
from raytorchrpc.patterns.handle import Handle, run
from raytorchrpc.patterns.weights import published
from raytorchrpc.patterns.weights.deltas import Change, apply, bytes_of, span_of
from raytorchrpc.patterns.weights.feeds import Origin, PullInTurn, RelayedPull, Requests, feeds_of
from raytorchrpc.patterns.weights.plan import Row, check_fits, tied_mismatch
from raytorchrpc.patterns.weights.published import VersionLease, lease_is_valid_until
from raytorchrpc.patterns.weights.pull_plan import Filled, KnownLayout, Offsets, Selection, Tie
from raytorchrpc.patterns.weights.relays import Advice
from raytorchrpc.patterns.weights.shards import Region
from raytorchrpc.patterns.weights.snapshots import Places


class LayoutMatch:
    """What one pull brings from one home. The response to a lease request may fill the targets."""

    def __init__(
        self, store: str, known: KnownLayout | None, planned: Filled | None = None, to_prepare: str | None = None
    ) -> None:
        """
        Args:
            known: the layout of the pull before.
            planned: what to bring of that layout.
            to_prepare: the type of the device whose memory lanes are to prepare, while the pull is planned.
        """
        self._store, self.known, self.planned, self.to_prepare = store, known, planned, to_prepare
        self.filled = False  # the targets have their tensors already
        self.lease: VersionLease | None = None  # as soon as the home has answered; it may have to be released

    @property
    def layout(self) -> KnownLayout:
        assert self.known is not None
        return self.known

    @property
    def leased(self) -> VersionLease:
        assert self.lease is not None
        return self.lease

    @property
    def device_type(self) -> str | None:
        """The type of the device that all targets are on, if a lane can write each of them in place; else None."""
        return None if self.planned is None else self.planned.device_type

    @property
    def device_type_of_answer(self) -> str | None:
        """None also if the response to the lease request cannot bring the tensors: they have to be converted first."""
        return None if self.planned is None or self.planned.converts else self.planned.device_type

    @property
    def ties(self) -> Sequence[Tie]:
        """The pairs of published tensors that go into one tensor of the model."""
        return () if self.planned is None else self.planned.ties

    def set_lease(self, lease: VersionLease) -> None:
        """Take the answer of the home. Raises NotFound if it names an unknown layout."""
        self.lease = lease
        if lease.lease and lease.rows is not None:
            self.known, self.planned = KnownLayout.of(lease.layout, lease.rows), None  # the plan was for another one
        elif lease.lease and (self.known is None or self.known.number != lease.layout):
            raise NotFound(f"the home of {self._store!r} did not say what it has; pull again")

    def selection(self) -> Selection:
        """Return what the pull brings. There is a plan."""
        assert self.planned is not None
        return self.planned.selection.only(self.leased.changed)

    def doubtful(self) -> list[Tie]:
        """Return the pairs for one tensor of the model that the home has published as two tensors."""
        first = {place: one for one, place in self.leased.ties} if self.ties else {}
        return [tie for tie in self.ties if len({first.get(place, place) for place in tie.places}) > 1]

    def check_equal(self, ties: Sequence[Tie], equal: Sequence[bool]) -> None:
        """Raise ConfigurationError, which names them, if some of these pairs are not ``equal``."""
        both = zip(ties, equal, strict=True)
        check_fits(self._store, [tied_mismatch(*tie[1:]) for tie, is_equal in both if not is_equal])

    def bytes_of(self, selection: Selection) -> int:
        """The size of what the pull brings. Quick for all of it: to ask each tensor takes a while."""
        if self.planned is not None and selection is self.planned.selection:
            return self.planned.nbytes
        return selection.nbytes

    def parts_of(self, selection: Selection) -> Sequence[Sequence[Part]]:
        """Return which part of the home's memory goes to each target. ``selection``: see there."""
        if self.planned is not None and selection is self.planned.selection:
            return self.planned.parts
        return selection.parts(self.layout)

    def parts_of_answer(self, device_type: str | None, answer: Any) -> Sequence[Sequence[Part]] | None:
        """Take a whole response of the home, and return which parts of its tensors go where; see ``Spread``.

        ``device_type``: of the device on which the answer has all tensors in one piece, if it has. None: fill nothing.
        """
        if answer is None:
            return None
        fields, pieces = answer
        self.set_lease(VersionLease(*fields))
        if not pieces or self.device_type_of_answer != device_type or self.leased.deltas:
            return None
        selection = self.selection()
        if not selection.targets or self.doubtful():
            return None
        self.filled = True
        return self.parts_of(selection)


#: Most bytes of one message: tensors that lanes bring in memory of their own need this much of it.
MESSAGE_BYTES = 256 << 20
#: A home, and the instance of what it has there.
Source = tuple[str, int | None]
#: Smaller pulls do not use a relay: asking which member has it takes as long (bytes).
_WORTH_RELAYING = 1 << 20


class Pull:
    """One pull of a version into a model, by the thread that uses it."""

    def __init__(
        self, store: Handle, local: LocalMember, match: LayoutMatch, until: float, counter: PullCounter
    ) -> None:
        """``store``: bound. ``until``: when the pull has to end (``time.monotonic``)."""
        self._store, self._local, self._match = store, local, match
        self._requests = Requests(local, until, counter)
        self._is_expected = False
        self.home, self._address = store.home, store._address
        self._is_home = store._is_home(local)
        self._asked: Future[Any] | None = None  # for the lease
        self._sent: Future[Any] | None = None  # for memory to copy from
        self._had_turn = self._is_abandoned = False
        self._divided: tuple[list[list[Change]], Selection] | None = None  # what comes as deltas, and the rest
        self._sent_deltas: Future[Any] | None = None  # for the first message of deltas

    @property
    def source(self) -> Source:
        """Where it pulls from."""
        return self.home, self._store._instance_id

    def loss_of(self, lost: PeerLost) -> PeerLost:
        """The error for the loss of the home: it says what was lost with it."""
        return self._store._home_lost(lost)

    # --- the lease -----------------------------------------------------------------------------------------------

    def lease(
        self, version: int | None, since: int | None, in_place: bool, wait: Callable[[int, float], Any]
    ) -> VersionLease:
        """Lease a version for this pull. ``wait(1, seconds)`` blocks until the first one is published.

        ``in_place``: if the tensors can be read in place, the same request brings them.
        """
        while True:
            self.ask(version, since, in_place, caller_waits=True)
            lease = self.answer()
            if lease is not None:
                return lease
            wait(1, self._requests.left())

    def ask(self, version: int | None, since: int | None, in_place: bool = False, caller_waits: bool = False) -> None:
        """Ask the home for a lease; see ``lease``. Then call ``answer``, or ``release``."""
        match, left = self._match, self._requests.left()
        args = (version, since, 0 if match.known is None else match.known.number)
        if self._is_home:
            found = self._store._object(self._local).lease(self._local.me.rank, *args, None)
            if found is not None:
                match.set_lease(found)
            return
        wanted = match.device_type_of_answer if in_place else match.to_prepare
        device_type = self._readable_in_place(self.home, wanted)
        answer = Spread(partial(self._parts_of_answer, device_type))
        alike, signature = None if match.known is None else match.known.alike, None
        if alike is not None and self._takes_turns(alike.device):
            signature = alike.signature
            feeds_of(self._local, self._requests.counter.store, *self._origin[1:])
        request = (*self._address, *args, left, device_type, signature)
        self._asked = self._store._send(
            self._local, published.LEASE, request, left, caller_waits=caller_waits, into=answer
        )

    def answer(self) -> VersionLease | None:
        """The lease; None if nothing is published yet."""
        sent, self._asked = self._asked, None
        if sent is not None:
            response = self._store._response(sent)
            del sent  # see _response
            run(response)
        return self._match.lease

    def answers_within(self, seconds: float) -> bool:
        """Wait for the answer to ``ask``, or its failure; False if there is none within this time."""
        try:
            if self._asked is not None:
                self._asked.exception(seconds)
        except RpcTimeout:
            return False
        return True

    def abandon(self, answered: Callable[[], object] | None = None) -> None:
        """Give the request for a lease up. A late answer writes nothing, and its lease is released.

        ``answered`` is called, on another thread, when the home has answered after all, or at the deadline.
        """
        sent, self._asked = self._asked, None
        self._is_abandoned = True

        def late(sent: Future[Any]) -> None:
            self._asked = sent
            try:
                self._release()
            finally:
                if answered is not None:
                    answered()

        if sent is not None:
            sent.add_done_callback(late)

    def _parts_of_answer(self, device_type: str | None, answer: Any) -> Sequence[Sequence[Part]] | None:
        parts = self._match.parts_of_answer(None if self._is_abandoned else device_type, answer)
        if parts is not None:
            self.expect(self._match.selection())
        return parts

    def _check_lease(self) -> None:
        """Raise RpcTimeout if the lease may have ended before the tensors were copied."""
        if time.monotonic() > lease_is_valid_until(self._requests.until):
            raise RpcTimeout(
                f"a pull of {self._store.kind} {self._store.name!r} was suspended, or took much longer than its "
                f"timeout, and {self.home!r} has ended its lease: the model may have tensors of two versions; "
                f"pull again"
            )

    def release(self) -> None:
        """End the lease. Does not wait for the home's answer."""
        if self._asked is not None and not self._asked.done():
            self.abandon()
        elif not self._is_abandoned:
            self._release()

    def _release(self) -> None:
        if self._asked is not None:
            with suppress(RayTorchRpcError):  # no lease then
                self.answer()
        lease = self._match.lease
        if lease is not None and lease.lease:
            self._give_turn_back()
            if self._is_home:
                self._store._object(self._local).pool.release(lease.lease)
            else:
                report = (*self._address, lease.lease, *self._requests.report(self.home))
                self._requests.notify(self.home, published.RELEASE, report)

    # --- moving tensors ------------------------------------------------------------------------------------------

    def expect(self, selection: Selection) -> None:
        """Count these tensors as still to come, once."""
        if not self._is_expected:
            self._is_expected = True
            self._requests.counter.expect(self._match.leased.version, self._match.bytes_of(selection))

    def check_ties(self) -> None:
        """Raise ConfigurationError if tensors that are one in the model differ as published; may ask the home."""
        if ties := self._match.doubtful():
            pairs = [tie.places for tie in ties]
            if self._is_home:
                equal = self._store._object(self._local).pool.leased(self._match.leased.lease).equal(pairs)
            else:
                equal = self._request(published.EQUAL, pairs, caller_waits=True).wait()
            self._match.check_equal(ties, equal)

    def begin(self, selection: Selection, caller_waits: bool = False) -> None:
        """Ask the home for what ``bring`` will need, without waiting for the answer."""
        if not selection.targets or self._match.filled or self._is_home:
            return
        deltas, selection = self._divide(selection)
        if deltas:
            self._sent_deltas, caller_waits = self._request_deltas(deltas[0], caller_waits), False
        self._begin_whole(selection, caller_waits)

    def _begin_whole(self, selection: Selection, caller_waits: bool = False) -> None:
        if not selection.targets or self._uses_relay(selection) or self._has_turn:
            return
        device_type = self._readable_in_place(self.home, self._match.device_type)
        if device_type is not None:
            parts = self._match.parts_of(selection)
            self._sent = self._request_pieces(device_type, parts, selection.places, caller_waits)

    def bring(self, selection: Selection) -> None:
        """Bring these tensors into the model, unless the lease request has brought them."""
        if selection.targets:
            if self._match.filled:
                self._requests.count(self.home, self._match.bytes_of(selection))
            else:
                self._fetch(selection)
            self._check_lease()

    def _fetch(self, selection: Selection) -> None:
        if self._is_home:
            snapshot = self._store._object(self._local).pool.leased(self._match.leased.lease)
            snapshot.copy_into(selection.targets, selection.places, selection.regions)
            self._requests.counter.add(self._match.bytes_of(selection))
            return
        deltas, rest = self._divide(selection)
        if deltas:
            self._fetch_deltas(deltas)
        if rest.targets:
            self._fetch_whole(rest)

    def _fetch_whole(self, selection: Selection) -> None:
        if self._uses_relay(selection):
            self._relayed(selection).bring()
            return
        if self._has_turn and self._take_turn(selection):
            return
        if self._sent is None:
            self._begin_whole(selection, caller_waits=True)
        sent, self._sent = self._sent, None
        if sent is not None and sent.wait():
            self._requests.count(self.home, self._match.bytes_of(selection))
            return
        for message in selection.messages(MESSAGE_BYTES):  # copied out of the lane's memory before the next
            self._request_message(message).wait()
            self._requests.count(self.home, message.nbytes)

    def _request_pieces(
        self, device_type: str, parts: Sequence[Sequence[Part]], places: Places, caller_waits: bool = False
    ) -> Future[list[torch.Tensor]]:
        """Ask the home for its memory, to copy from when the answer is taken; no pieces if that cannot be read."""
        into = Spread(lambda pieces: parts if pieces else None)
        if all(name is None for _, name in places):
            places = ()  # the same memory, in a shorter request
        return self._request(published.PIECES, places, device_type, into=into, caller_waits=caller_waits)

    def _request_message(self, message: Selection) -> Future[Any]:
        return self._request(published.TENSORS, message.places, message.regions, into=message.targets)

    # --- deltas --------------------------------------------------------------------------------------------------

    def _divide(self, selection: Selection) -> tuple[list[list[Change]], Selection]:
        """Return the messages of what comes as deltas, and what comes whole."""
        if self._divided is None:
            deltas = self._match.leased.deltas
            if not deltas or self._readable_in_place(self.home, self._match.device_type):
                self._divided = [], selection
            else:
                # The home sends deltas to each reader, and whole tensors to other hosts once.
                times = 1 if self._requests.is_near(self.home) else max(1, self._far_members())
                changes, rest = divide(selection, dict(deltas), self._match.layout.rows, times)
                self._divided = messages(changes, MESSAGE_BYTES), rest
        return self._divided

    def _fetch_deltas(self, deltas: Sequence[Sequence[Change]]) -> None:
        sent, self._sent_deltas = self._sent_deltas, None
        for number, message in enumerate(deltas):
            if sent is None:
                sent = self._request_deltas(message, caller_waits=True)
            answer = sent.wait()
            sent = self._request_deltas(deltas[number + 1]) if number + 1 < len(deltas) else None
            apply(message, answer)
            size = sum(tensor.nbytes for tensor in answer[1])
            whole = sum(change.target.nbytes for change in message)
            self._requests.counter.expect(self._match.leased.version, size - whole)
            self._requests.count(self.home, size)

    def _request_deltas(self, message: Sequence[Change], caller_waits: bool = False) -> Future[Any]:
        return self._request(published.DELTAS, [change.span for change in message], caller_waits=caller_waits)

    def _request(self, service: str, *args: Any, **options: Any) -> Future[Any]:
        request = (*self._address, self._match.leased.lease, *args)
        return self._requests.call(self.home, service, request, self._requests.left(0.001), **options)

    # --- by way of others ----------------------------------------------------------------------------------------

    def _uses_relay(self, selection: Selection) -> bool:
        """Whether other members that are not on the home's host may pull the same."""
        if is_guest(self._local.me.rank):  # no member connects to it
            return False
        if self._requests.is_near(self.home) or sum(target.nbytes for target in selection.targets) < _WORTH_RELAYING:
            return False
        return self._far_members() > 1

    def _far_members(self) -> int:
        """How many members are not on the home's host."""
        peers = self._local.peers
        its_node = peers.route(self.home).member.node_id
        return sum(route.member.node_id != its_node for route in peers.routes)

    def _relayed(self, selection: Selection) -> RelayedPull:
        lease = self._match.leased
        what = lease.version, selection.signature(lease.layout)
        send, check = self._request_message, self._check_lease
        return RelayedPull(self._requests, self._origin, what, selection, send, check)

    @property
    def _origin(self) -> Origin:
        return Origin(self.home, self._store._lives_with, self._address)

    def _takes_turns(self, device: torch.device) -> bool:
        """Whether other GPUs of this host may be nearer than the home: not for a reader on the home's own."""
        if self._readable_in_place(self.home, device.type) is None:
            return False
        return device.index not in {mine for mine, _ in self._local.peers.route(self.home).same_gpus}

    @property
    def _has_turn(self) -> bool:
        """Whether other GPUs of this host pull the same, and the home has told this member from which it copies."""
        return self._match.leased.turn is not None and not self._had_turn

    def _take_turn(self, selection: Selection) -> bool:
        """Copy from the one that is before this member; False if that is not possible."""
        lease, layout = self._match.leased, self._match.layout
        alike = selection.alike(layout, self._match.bytes_of(selection))
        if alike is None or alike is not layout.alike:  # this model is another
            self._give_turn_back()
            return False
        assert lease.turn is not None
        self._had_turn, what = True, (lease.version, alike.signature)
        offsets = Offsets(layout)

        def send(message: Selection) -> Future[Any]:
            return self._request_pieces(alike.device.type, message.parts(layout, offsets), message.places)

        return PullInTurn(self._requests, self._origin, what, selection, send, self._check_lease).bring(
            Advice(*lease.turn).source
        )

    def _give_turn_back(self) -> None:
        """Tell those that would be fed by this member that they have to look elsewhere."""
        if self._has_turn and (alike := self._match.layout.alike) is not None:
            self._had_turn, version = True, self._match.leased.version
            feeds_of(self._local, self._requests.counter.store, *self._origin[1:]).fail(alike.signature, version, None)
            report = (*self._address, (version, alike.signature), self._local.me.rank)
            self._requests.notify(self.home, published.REPORT, report)

    def _readable_in_place(self, source: Any, device_type: str | None) -> str | None:
        """Return ``device_type`` if a lane can read parts of the source's memory on such devices in place."""
        if device_type is None or not self._requests.is_near(source):
            return None
        lane = self._local.tensor_lanes.get(self._local.peers.route(source).beside.get(device_type, ""))
        return device_type if isinstance(lane, WindowLane) else None


def divide(
    selection: Selection, deltas: Mapping[int, int], rows: Sequence[Row], times: int
) -> tuple[list[Change], Selection]:
    """Divide what a pull brings: what comes as deltas, and what comes whole.

    Args:
        deltas: the places that have a delta, and how many elements each has.
        times: how often the source sends a delta for each time that it would send the whole tensors.
    """
    changes: list[Change] = []
    rest: list[int] = []
    for index, ((place, conversion), target, region) in enumerate(zip(*selection, strict=True)):
        change = None
        if conversion is None and place in deltas and _is_writable(target):
            shape = rows[place][2]
            change = _change(place, region, shape, target, deltas[place])
        if change is not None and (change.bytes * times < target.nbytes or change.is_tiny):
            changes.append(change)
        else:
            rest.append(index)
    if all(change.is_tiny for change in changes):
        return [], selection
    return changes, selection.at(rest)


def _change(place: int, region: Region, shape: tuple[int, ...], target: torch.Tensor, count: int) -> Change:
    elements, (first, last) = math.prod(shape), span_of(region)
    share = math.ceil(count * (last - first) / elements)
    return Change(place, region, shape, target, bytes_of(share, elements, target.itemsize))


def _is_writable(target: torch.Tensor) -> bool:
    """Whether integers can be written to the memory of a tensor: not if that is another than it looks."""
    return target.numel() > 0 and bool(target.data_ptr()) and not target.is_neg() and not target.is_conj()


def messages(changes: Iterable[Change], size: int) -> list[list[Change]]:
    """Divide into messages of at most about ``size`` bytes; a larger delta is a message of its own."""
    found: list[list[Change]] = []
    filled = 0
    for change in changes:
        if not found or filled + change.bytes > size:
            found.append([])
            filled = 0
        found[-1].append(change)
        filled += change.bytes
    return found
