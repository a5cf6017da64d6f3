"""The nccl lane: CUDA tensors to another GPU, of this host or of another, by NCCL's own transports.

NCCL is two-sided: both ends post each transfer, in the same order. The receiver therefore requests each transfer on a
control connection to the sender, which has communicators of two; ``protocol`` defines the order. A connection and its
communicators end together: when the peer dies, when NCCL fails, or at a deadline. The next fetch makes new ones.

``fetch`` returns when the data has arrived: a CUDA stream that waits for NCCL cannot be told that the peer died, while
the calling thread can raise an exception.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import math
import os
import random
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import Export, PeerAddress, TensorCapabilities, TensorLane, checked
from raytorchrpc.lanes.common import packing
from raytorchrpc.lanes.common.connections import Acceptor, SocketAddress
from raytorchrpc.lanes.common.handshake import Credentials, Identity
from raytorchrpc.lanes.common.protection import Protection
from raytorchrpc.lanes.nccl.carrier import Broken, Carrier
from raytorchrpc.lanes.nccl.protocol import (
    SERVICE,
    ControlConnection,
    Disconnected,
    Kept,
    Receiving,
    Sending,
    TimedOut,
    connect,
)
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.process import fork, threads
from raytorchrpc.tensors.dtypes import Shape
from raytorchrpc.topology import nccl_env

logger = logging.getLogger(__name__)

#: Pause between attempts to accept while the process has no descriptor left (seconds).
_ACCEPT_PAUSE_S = 0.05
#: Longest time that the lane's own thread waits for a peer that it sends something to (seconds).
_PATIENCE_S = 1.0


class NcclAddress(NamedTuple):
    """Where a member's lane listens, and its GPUs."""

    rank: int
    control: SocketAddress
    devices: dict[int, str]
    """A unique identity of each GPU, by the member's own index."""


class NcclLane(TensorLane):
    """One per member. ``export`` neither copies nor sends; it keeps the memory until the receiver has fetched it."""

    name: ClassVar[str] = "nccl"
    capabilities: ClassVar[TensorCapabilities] = TensorCapabilities(
        devices=frozenset({"cuda"}), one_sided=False, same_host=False, zero_copy=False
    )

    def __init__(
        self,
        me: str,
        credentials: Credentials,
        devices: Sequence[int],
        *,
        tcp_host: str | None = None,
        by_tcp: frozenset[str] = frozenset(),
        timeout_s: float = 60.0,
        carrier: Carrier | None = None,
    ) -> None:
        """``devices``: local CUDA indices that tensors come from or arrive on. ``tcp_host``: address to listen on for
        the peers ``by_tcp``. ``timeout_s``: for one fetch. The caller sets NCCL's variables before the first lane of
        the process opens.
        """
        self._me, self._credentials = me, credentials
        self._devices, self._tcp_host, self._by_tcp = tuple(devices), tcp_host, by_tcp
        self._timeout_s = timeout_s
        self._carrier = carrier or Carrier()
        self._lock = threading.Lock()
        self._peers: dict[str, NcclAddress] = {}
        self._dialing: dict[str, threading.Lock] = {}
        self._receiving: dict[str, Receiving] = {}
        self._sending: set[Sending] = set()
        # Random: a peer may still discard numbers of an earlier process of this member.
        self._numbers = itertools.count(random.SystemRandom().getrandbits(48))
        self._kept: dict[int, Kept] = {}
        self._discards: collections.deque[tuple[str, int]] = collections.deque()
        peers = self._peers.__len__
        self._acceptor = Acceptor(SERVICE, me, credentials, peers, self._serve, "nccl-sender")
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # wakes the lane's own thread
        self._closed = False

    def __del__(self) -> None:
        os.close(self._bell)  # not before: any thread that has the lane may ring it

    @property
    def outstanding(self) -> int:
        """Number of exports that have not been fetched."""
        return len(self._kept)

    def open(self) -> NcclAddress:
        self._identities = dict(self._carrier.open(self._devices))
        try:
            control = self._acceptor.open(self._tcp_host)
            threads.start(self._attend, name=f"raytorchrpc-{self._me}-nccl-attendant")
        except (OSError, threads.ThreadShortage) as error:
            self._acceptor.close()
            raise LaneUnavailable(self.name, str(error)) from error
        self._address = NcclAddress(self._credentials.rank, control, self._identities)
        fork.register(self)
        return self._address

    def reach(self, tcp_host: str | None, by_tcp: frozenset[str]) -> None:
        # A lane opened for one host stays so: torchrpc reaches members that join from other hosts.
        self._by_tcp = by_tcp

    def after_fork(self) -> list[fork.Address]:
        """See fork.ForkAware. Transfers in progress are the parent's, and CUDA does not survive a fork."""
        closed, self._closed = self._closed, True
        known = [] if closed else [self._address, *self._peers.values()]
        return [address.control.tcp for address in known if address.control.tcp is not None]

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        for peer in peers:
            self._dialing.setdefault(peer.peer, threading.Lock())
            self._peers[peer.peer] = peer.address

    # --- sending -------------------------------------------------------------------------------------------

    def export(self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[int, int]) -> Export:
        opened = {own: its for own, its in devices.items() if own in self._identities}
        source = packing.source_of(tensors, opened, self.name)
        self._check_apart(peer, source, devices[source])
        try:
            # The connection that fetches from that peer. Its end shows that the peer will not fetch these tensors.
            watched = self._receiving_from(peer, time.monotonic() + self._timeout_s)
        except (Disconnected, TimedOut) as error:
            raise LaneUnavailable(self.name, f"no connection to {peer!r}: {str(error) or 'not in time'}") from error
        pieces = [piece for piece in packing.pack(tensors)[1] if piece.nbytes]
        kept = Kept(peer, pieces, self._carrier.mark(source))
        number = next(self._numbers)
        self._kept[number] = kept
        if self._receiving.get(peer) is not watched:
            self._kept.pop(number, None)
            raise LaneUnavailable(self.name, f"the connection to {peer!r} has just ended")
        descriptor = (number, source, devices[source], tuple(piece.nbytes for piece in pieces))
        return Export(descriptor, partial(self._kept.pop, number, None), kept.precede)

    def _check_apart(self, peer: str, mine: int, its: int) -> None:
        address = self._peers.get(peer)
        if address is None:
            raise LaneUnavailable(self.name, f"member {peer!r} is unknown here, or has left")
        if its not in address.devices:
            raise LaneUnavailable(self.name, f"{peer!r} has not opened cuda:{its} for this lane")
        if self._identities[mine] and address.devices[its] == self._identities[mine]:
            raise LaneUnavailable(
                self.name, f"both ends are on GPU {self._identities[mine]} and NCCL needs two; allow cuda_ipc"
            )

    def _take(self, rank: int, number: int) -> Kept | None:
        """Remove and return the export of that number, if it is for this rank."""
        kept = self._kept.get(number)
        if kept is None or (address := self._peers.get(kept.peer)) is None or address.rank != rank:
            return None
        return self._kept.pop(number, None)

    def _drop(self, peer: str) -> None:
        for number in [number for number, kept in self._kept.copy().items() if kept.peer == peer]:
            self._kept.pop(number, None)

    def _serve(self, sock: socket.socket, protection: Protection | None, peer: Identity) -> None:
        """Answer a peer's requests until it hangs up. Runs on a thread of its own."""
        control, rank = ControlConnection(sock, protection), peer.rank
        sending = Sending(control, self._carrier, self._timeout_s, partial(self._take, rank))
        with self._lock:
            self._sending.add(sending)
            if self._closed:
                control.close()
        try:
            sending.serve()
        except (Disconnected, TimedOut, Broken) as error:
            logger.debug("%s: a control connection of rank %d has ended: %s", self._me, rank, error)
        except Exception:
            logger.exception("%s cannot send to rank %d", self._me, rank)
        finally:
            with self._lock:
                self._sending.discard(sending)

    # --- receiving -----------------------------------------------------------------------------------------

    @checked
    def fetch(
        self, peer: str, descriptor: Any, shapes: Sequence[Shape], into: Sequence[torch.Tensor | None] | None = None
    ) -> list[torch.Tensor]:
        number, source, target, sizes = descriptor
        if target not in self._devices:
            raise LaneUnavailable(self.name, f"{peer!r} sends to cuda:{target}, which was not opened for this lane")
        deadline = time.monotonic() + self._timeout_s
        kinds = [(dtype, dtype.itemsize * math.prod(extents)) for dtype, extents in shapes]
        places = packing.pieces(kinds)
        expected = [sum(kinds[index][1] for index in place) for place in places]
        pieces = [[shapes[index] for index in place] for place in places]
        own = [packing.given(place, into, self._carrier.device(target)) for place in places]
        try:
            if tuple(size for size in expected if size) != tuple(sizes):
                raise LaneUnavailable(
                    self.name, f"{peer!r} packs tensors in another way; run one release of raytorchrpc everywhere"
                )
            receiving = self._receiving_from(peer, deadline)
            try:
                room, channel = receiving.fetch(number, source, target, pieces, own, deadline)
            except (LaneUnavailable, PeerLost, torch.OutOfMemoryError):
                raise  # nothing was posted
            except BaseException:
                self._end(receiving)  # the two ends may be out of step
                raise
        except BaseException as error:
            self.discard(peer, descriptor)
            if isinstance(error, (Disconnected, TimedOut, Broken)):
                why = str(error) or f"it did not send tensors within {self._timeout_s:g} s"
                raise PeerLost(peer, why) from error
            raise
        channel.make_current(room)
        return packing.unpack(room, places, shapes)

    def discard(self, peer: str, descriptor: Any) -> None:
        # Only recorded: the garbage collector may call this at any point.
        self._discards.append((peer, descriptor[0]))
        self._ring()

    def _receiving_from(self, peer: str, deadline: float) -> Receiving:
        """The connection that fetches from this peer; made if there is none. Raises Disconnected or TimedOut."""
        if (receiving := self._receiving.get(peer)) is not None:
            return receiving
        address, dialing = self._peers.get(peer), self._dialing.get(peer)
        if address is None or dialing is None or self._closed:
            raise Disconnected("it is unknown here, or has left")
        if not dialing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimedOut
        try:
            if (receiving := self._receiving.get(peer)) is not None:
                return receiving
            own, by_tcp = self._acceptor.address, peer in self._by_tcp
            control = connect(address.control, by_tcp, self._credentials, own, deadline)
            receiving = Receiving(peer, self.name, control, self._carrier)
            self._add(receiving)
            return receiving
        finally:
            dialing.release()

    def _add(self, receiving: Receiving) -> None:
        with self._lock:
            if self._closed:
                receiving.end()
                raise Disconnected("this member has left the group")
            self._receiving[receiving.peer] = receiving
        self._ring()

    def _end(self, receiving: Receiving) -> None:
        with self._lock:
            known = self._receiving.get(receiving.peer) is receiving
            if known:
                del self._receiving[receiving.peer]
        if known and receiving.control.hung_up():  # the peer did: this end has not closed it yet
            self._drop(receiving.peer)
        receiving.end()

    # --- the lane's own thread -------------------------------------------------------------------------------

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._bell, 1)

    def _attend(self) -> None:
        """Accept connections, detect peers that are gone, and send discards."""
        threads.serve(self._attend_once, f"the nccl attendant of {self._me}", give_up=self.close)
        self._acceptor.close()

    def _attend_once(self) -> bool:
        if self._closed:
            return False
        listeners = self._acceptor.listeners
        poll = select.poll()
        for fd in (self._bell, *listeners):
            poll.register(fd, select.POLLIN)
        with self._lock:
            receiving = {one.control.fd: one for one in self._receiving.values()}
        for fd in receiving:
            poll.register(fd, select.POLLRDHUP)
        for fd, _ in poll.poll():
            if fd == self._bell:
                os.eventfd_read(self._bell)
            elif fd not in listeners:
                self._end(receiving[fd])
            elif not self._acceptor.accept(listeners[fd]):
                time.sleep(_ACCEPT_PAUSE_S)  # else poll would report it again at once
        receiving.clear()
        self._send_discards()
        return True

    def _send_discards(self) -> None:
        while self._discards and not self._closed:
            peer, number = self._discards.popleft()
            deadline = time.monotonic() + _PATIENCE_S
            try:
                self._receiving_from(peer, deadline).discard(number, deadline)
            except Disconnected:
                self._drop(peer)  # it will not fetch either
            except TimedOut:
                continue

    # --- the end ---------------------------------------------------------------------------------------------

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)
        self._drop(peer)
        if (receiving := self._receiving.get(peer)) is not None:
            self._end(receiving)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            receiving, sending = list(self._receiving.values()), list(self._sending)
        for one in sending:
            one.end()
        for other in receiving:
            self._end(other)
        self._kept.clear()
        self._ring()


def make(setup: LaneSetup) -> NcclLane:
    """See registry.Lane.make. Sets NCCL's environment variables in this process, where the user has not."""
    # Also where all members share a host: NCCL reads them once, and the next group may span hosts.
    chosen = nccl_env.apply(setup.endpoint(), interface=setup.config.interface)
    logger.debug("%s: set for NCCL: %s", setup.member, chosen)
    return NcclLane(
        setup.member,
        setup.credentials,
        setup.devices,
        tcp_host=setup.tcp_host,
        by_tcp=setup.by_tcp,
        timeout_s=setup.config.rpc_timeout_s,
    )
