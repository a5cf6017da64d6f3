"""What one pull brings from one home: from its memory, in messages, as deltas, or by way of other members."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any

import torch

from raytorchrpc.calls.client.future import Future
from raytorchrpc.calls.peers import is_client
from raytorchrpc.calls.receive_into import Window
from raytorchrpc.errors import LaneUnavailable, NotFound, PeerLost
from raytorchrpc.patterns.handle import Handle
from raytorchrpc.patterns.weights import published
from raytorchrpc.patterns.weights.chained_pull import BETWEEN_HOSTS, ChainedPull, HostTurn
from raytorchrpc.patterns.weights.delta_pull import DeltaPull, divide
from raytorchrpc.patterns.weights.published import VersionLease
from raytorchrpc.patterns.weights.pull_plan import Selection, SourceCopies
from raytorchrpc.patterns.weights.slices import KnownLayout
from raytorchrpc.patterns.weights.source_lease import Requests, SourceLease
from raytorchrpc.tensors.dtypes import written

#: Most bytes of one message: tensors that lanes bring in memory of their own need this much of it.
MESSAGE_BYTES = 256 << 20
#: Smaller pulls do not use a relay: asking which member has it takes as long (bytes).
_WORTH_RELAYING = 1 << 20


class Way(Enum):
    """How what a pull brings gets here from a home."""

    NOTHING = "nothing has changed"
    OWN = "copied from this process's own snapshot"
    ARRIVED = "copied from memory that came with the lease"
    IN_PLACE = "read out of lent tensors, by what the lease says where they lie"
    REQUESTED = "requested under the lease: deltas first, and then what comes whole"


class SourcePull:
    """One pull of a version from one home into a model, by the thread that uses it.

    ``ask`` and ``answer`` lease a version. If the plan was made for another layout, ``planned`` is None then: set it.
    ``request`` and ``receive`` move the tensors, and ``release`` ends the lease.
    """

    def __init__(
        self,
        store: Handle,
        requests: Requests,
        layout: KnownLayout | None,
        planned: SourceCopies | None,
        device_type: str | None,
    ) -> None:
        """``device_type``: see ``SourceLease``."""
        needed = () if planned is None else planned.pieces
        self.lease = SourceLease(store, requests, layout, device_type, needed, self._give_turn_back)
        self.planned, self.home = planned, store.home
        self.failure: NotFound | PeerLost | None = None  # what this source has raised
        self.selection = Selection((), ())  # as soon as it is requested: what the pull brings
        self._requests, self._local = requests, requests.local
        self._way = Way.NOTHING
        self._turn: HostTurn | None = None  # that is asked for with the lease
        self._deltas: DeltaPull | None = None
        self._whole: Selection | None = None  # what comes whole, if it is requested
        self._sent_pieces: Future[Any] | None = None

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Note that this source has failed, if that is raised within."""
        try:
            yield
        except (NotFound, PeerLost) as error:
            self.failure = error
            raise

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Say what is lost with the home, if that is raised within."""
        try:
            yield
        except PeerLost as lost:
            if lost.peer != self.home:
                raise
            raise self.lease.store._home_lost(lost) from lost

    # --- the lease -----------------------------------------------------------------------------------------------

    def ask(self, version: int | None, since: int | None, caller_waits: bool = False) -> None:
        """Ask the home for a lease. Then call ``answer`` or ``release``."""
        self._turn = HostTurn.of(self.lease, self.planned)
        self.lease.ask(version, since, None if self._turn is None else self._turn.wanted, caller_waits)

    def answer(self) -> VersionLease | None:
        """The lease; None if nothing is published yet."""
        lease = self.lease.answer()
        if lease is not None and lease.rows is not None:
            self.planned = None  # the plan was for another layout
        if self.planned is None:
            self.lease.memory.prepare()
        return lease

    @property
    def leased(self) -> VersionLease:
        return self.lease.leased

    def release(self) -> None:
        self.lease.release()
        self.failure = None  # which holds the frames that hold this

    def _give_turn_back(self, lease: VersionLease) -> None:
        if self._turn is not None:
            self._turn.give_back(lease)

    # --- moving tensors ------------------------------------------------------------------------------------------

    def expect(self) -> int:
        """Count the tensors as still to come; returns their bytes."""
        size = self.selection.nbytes
        self._requests.counter.expect(self.leased.version, size)
        return size

    def request(self, tensors: Mapping[str, torch.Tensor], caller_waits: bool = False) -> None:
        """Ask the home for what comes first. Then call ``receive``. ``tensors``: the model's, by name."""
        assert self.planned is not None
        lease, converts = self.lease, self.planned.converts
        selection = self.planned.into(tensors)
        self.selection = selection.only(lease.leased.changed)
        if not self.selection.transfers:
            self._way = Way.NOTHING
        elif lease.is_home:
            self._way = Way.OWN
        elif lease.memory.has_tensors and lease.device_type == (None if converts else self.planned.device_type):
            self._way = Way.ARRIVED
        elif lease.leased.exposed is not None and self._is_in_place():
            self._way, self._whole = Way.IN_PLACE, self.selection
        else:
            self._way = Way.REQUESTED
            lease.memory = Window()  # what came with the lease, if anything, is in another form
            self._deltas, self._whole = self._divide(self.selection)
            with self._moving():
                if self._deltas is not None:
                    self._deltas.begin(caller_waits)
                self._sent_pieces = self._request_in_place(self._whole, caller_waits and self._deltas is None)

    def receive(self) -> None:
        """Bring the tensors into the model. Raises PeerLost also if the home has lost the version."""
        try:
            with self._moving():
                self._receive()
        except NotFound as error:
            if self.leased.is_lent:
                raise self.lease.taken_back() from error
            raise PeerLost(self.home, f"it has lost version {self.leased.version}: {error}", True) from error

    def _receive(self) -> None:
        selection = self.selection
        match self._way:
            case Way.NOTHING:
                return
            case Way.OWN:
                self.lease.snapshot().copy_into(selection.targets, selection.places, selection.regions)
                self._requests.counter.add(selection.nbytes)
            case Way.ARRIVED:
                self.lease.memory.make(selection.copies)
                self._requests.count(self.home, selection.nbytes)
            case Way.IN_PLACE if self._read_in_place():
                self._requests.count(self.home, selection.nbytes)
            case Way.IN_PLACE | Way.REQUESTED:
                if self._deltas is not None:
                    self._deltas.receive()
                self._receive_whole()
        self.lease.check()

    def _is_in_place(self) -> bool:
        """Whether to read the tensors where they lie, as no others of another host can hand them on."""
        assert self.planned is not None
        is_alike = not self.planned.converts and self.planned.device_type == "cpu"
        return is_alike and not self._is_relayed(self.selection)

    def _read_in_place(self) -> bool:
        """Copy out of the home's tensors; False if this process cannot."""
        assert self.leased.exposed is not None
        (name, descriptor), selection = self.leased.exposed, self.selection
        if (lane := self._local.tensor_lanes.get(name)) is None:
            return False
        try:
            with written(selection.copies.filled):
                lane.gather(self.home, descriptor, selection.pieces, torch.device("cpu"))
        except LaneUnavailable as error:
            store = self.lease.store
            detour = f"{store.kind} {store.name!r} comes in messages from {self.home!r}, not by {name}"
            self._local.payloads.warn(detour, error.reason)
            return False
        return True

    def _receive_whole(self) -> None:
        whole = self._whole
        if whole is None or not whole.transfers:
            return
        if self._is_relayed(whole):
            signature = whole.signature(self.leased.layout)
            ChainedPull(self.lease, signature, whole, BETWEEN_HOSTS, self._request_message).bring_between_hosts()
            return
        if self._has_turn and self._take_turn(whole):
            return
        sent = self._sent_pieces or self._request_in_place(whole, caller_waits=True)
        if sent is not None and sent.wait():
            self._requests.count(self.home, whole.nbytes)
            return
        for message in whole.messages(MESSAGE_BYTES):  # copied out of the lane's memory before the next
            self._request_message(message).wait()
            self._requests.count(self.home, message.nbytes)

    def _request_in_place(self, whole: Selection, caller_waits: bool) -> Future[Any] | None:
        """Ask for memory to copy from; None if the tensors come in another way."""
        assert self.planned is not None
        device_type = self.planned.device_type
        if not whole.transfers or device_type is None or self._is_relayed(whole) or self._has_turn:
            return None
        if not self._requests.is_readable(self.home, device_type):
            return None
        return self._request_pieces(device_type, whole, caller_waits)

    def _request_pieces(
        self, device_type: str, selection: Selection, caller_waits: bool = False
    ) -> Future[list[torch.Tensor]]:
        """Ask the home for its memory, to copy from when the answer is taken; no pieces if that cannot be read."""
        copies, places = selection.copies, selection.places
        into = Window(lambda pieces: copies if pieces else None)
        if all(name is None for _, name in places):
            places = []  # the same memory, in a shorter request
        return self.lease.request(published.PIECES, places, device_type, into=into, caller_waits=caller_waits)

    def _request_message(self, message: Selection) -> Future[Any]:
        return self.lease.request(published.TENSORS, message.places, message.regions, into=message.targets)

    def _divide(self, selection: Selection) -> tuple[DeltaPull | None, Selection]:
        """What comes as deltas, and what comes whole."""
        deltas, planned = self.leased.deltas, self.planned
        assert planned is not None
        if not deltas or self._requests.is_readable(self.home, planned.device_type):
            return None, selection
        # The home sends deltas to each reader, and whole tensors to other hosts once.
        times = 1 if self._requests.is_near(self.home) else max(1, self._count_far_members())
        messages, whole = divide(selection, dict(deltas), planned.layout, times, MESSAGE_BYTES)
        return DeltaPull(self.lease, messages) if messages else None, whole

    # --- by way of others ----------------------------------------------------------------------------------------

    def _is_relayed(self, selection: Selection) -> bool:
        """Whether other members that are not on the home's host may pull the same."""
        if is_client(self._local.me.rank):  # no member connects to it
            return False
        if self._requests.is_near(self.home) or selection.nbytes < _WORTH_RELAYING:
            return False
        return self._count_far_members() > 1

    def _count_far_members(self) -> int:
        """How many members are not on the home's host."""
        peers = self._local.peers
        node = peers.member(self.home).node_id
        return sum(member.node_id != node for member in peers.members)

    @property
    def _has_turn(self) -> bool:
        """Whether other GPUs of this host pull the same, and the home has told this member from which it copies."""
        return self._turn is not None and self._turn.is_given

    def _take_turn(self, whole: Selection) -> bool:
        """Copy from the GPU that is before this one; False if that is not possible."""
        assert self._turn is not None and self.planned is not None
        if self.leased.changed is not None or self._deltas is not None:  # the others bring something else
            self._turn.give_back(self.leased)
            return False
        return self._turn.take(whole, partial(self._request_pieces, self.planned.device_type or ""))
