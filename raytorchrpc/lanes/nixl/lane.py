"""The nixl lane: the receiver reads tensors out of the sender's memory, by RDMA where UCX has a device for it.

CPU tensors: the sender copies them into memory that stays registered. The receiver reads into such memory too, and uses
it there. CUDA tensors: the receiver reads out of the sender's allocation into one of its own. Each is registered once.

NIXL does not know CUDA streams. The sender therefore waits until the GPU has produced a tensor before it announces it.
The receiver lets tensors arrive in memory of a stream on which no work is ever queued: torch's allocator provides such
memory only when the work that last used it is complete, so the receiver has nothing to wait for.

No read goes directly into a receiver's own tensors; data is copied into them. A read that is abandoned, at its deadline
for instance, cannot be cancelled and may still write, and then it writes into memory that is not in use. Host memory of
the receiver would have to be registered first too, which takes longer than the copy.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy
import torch

from raytorchrpc._compat import nixl_package
from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import (
    GONE,
    Arrived,
    Copies,
    Export,
    PeerAddress,
    TensorCapabilities,
    TensorLane,
    arrived,
    checked,
)
from raytorchrpc.lanes.common import packing
from raytorchrpc.lanes.common.exports import Janitor
from raytorchrpc.lanes.nixl.agent import Agent, Kind, Link, Lost, Place, Read, Span, ucx_settings
from raytorchrpc.lanes.nixl.memory import NOTHING, Block, HostPool, Segments, check_members, lay_out
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.tensors.cuda_streams import finish_stream
from raytorchrpc.tensors.dtypes import Shape, independent, within

#: Pause between two rounds of the janitor (seconds).
_PAUSE_S = 0.02
_CLOSE_S = 1.5
_PROBE = b""  # an empty notice: sending it shows that a peer is lost


class _Offer(NamedTuple):
    """The descriptor of an export."""

    number: int
    target: int | None  # the peer's GPU that CUDA tensors arrive on; None for CPU tensors
    places: Sequence[Place]  # of each piece
    members: Sequence[Any]  # the tensors in each piece: ``Members`` for CPU tensors, their indices for CUDA tensors


class _Exported(NamedTuple):
    """An export in flight, and the memory that it keeps."""

    link: Link
    blocks: Sequence[Block]
    tensors: Sequence[torch.Tensor]


class NixlLane(TensorLane):
    """One per member; needs the package ``nixl``. CPU tensors are copied before ``export`` returns; for CUDA tensors it
    waits until the GPU has produced them.
    """

    name: ClassVar[str] = "nixl"
    capabilities: ClassVar[TensorCapabilities] = TensorCapabilities(devices=frozenset({"cpu", "cuda"}))

    def __init__(
        self, capacity: int, devices: Sequence[int], timeout_s: float, settings: Mapping[str, str] | None = None
    ) -> None:
        """``capacity``: of registered host memory, in bytes. ``devices``: local CUDA indices. ``timeout_s``: for the
        data of one message. ``settings``: UCX settings, by name without ``UCX_``; the environment overrides them.
        """
        self._capacity, self._devices, self._timeout_s = capacity, tuple(devices), timeout_s
        self._settings = dict(settings or {})
        self._agent: Agent | None = None
        self._links: dict[str, Link] = {}
        self._reading = 0  # threads that read
        self._read_ended = threading.Condition()
        self._closed = False
        # Random: a peer may still discard numbers of an earlier process of this member.
        self._numbers = itertools.count(random.SystemRandom().getrandbits(48))
        self._out: dict[int, _Exported] = {}
        self._abandoned: list[tuple[Read, Link, Any]] = []
        """Reads that no thread waits for any more, with the memory that they may still write."""
        self._landing: dict[int, torch.cuda.Stream] = {}
        self._cuda_obstacle: str | None = None
        self._janitor = Janitor("raytorchrpc-nixl", self._reclaim)

    @property
    def outstanding(self) -> int:
        return len(self._out)

    def open(self) -> tuple[str, bytes, str | None]:
        # Streams first: UCX looks for CUDA when the agent is created.
        self._landing = {index: torch.cuda.Stream(index) for index in self._devices}  # type: ignore[no-untyped-call]
        agent = Agent(nixl_package.nixl_package(), self._settings)
        self._pool, self._segments = HostPool(agent, self._capacity), Segments(agent)
        try:
            for index in self._devices:
                self._segments.covering(self._room([(torch.uint8, (1,))], index))
        except LaneUnavailable as error:  # CPU tensors can still be sent
            self._cuda_obstacle = error.reason
        self._agent = agent
        return agent.name, agent.connection, self._cuda_obstacle

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        if (agent := self._agent) is not None:  # else the lane is closed
            self._links.update((peer.peer, Link(agent, *peer.address)) for peer in peers)

    def _link(self, peer: str) -> Link:
        """Raises LaneUnavailable."""
        link = self._links.get(peer)
        if self._closed:
            raise LaneUnavailable(self.name, "the lane is closed")
        if link is None:
            raise LaneUnavailable(self.name, f"member {peer!r} is unknown here, or has left")
        return link

    # --- sending -------------------------------------------------------------------------------------------

    def export(self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[int, int]) -> Export:
        link = self._link(peer)
        if link.lost is not None:
            raise LaneUnavailable(self.name, f"the connection to {peer!r} broke: {link.lost}")
        self.reap()
        number = next(self._numbers)
        if tensors and tensors[0].is_cuda:
            kept, offer = self._lay_out_cuda(number, tensors, link, devices)
            self._out[number] = _Exported(link, (), kept)
        else:
            blocks, places, members = lay_out(self._pool, tensors)
            offer = _Offer(number, None, places, members)
            self._out[number] = _Exported(link, blocks, ())
        self._janitor.wake()
        return Export(tuple(offer), partial(self._release, number), self.reap)

    def _lay_out_cuda(
        self, number: int, tensors: Sequence[torch.Tensor], link: Link, devices: Mapping[int, int]
    ) -> tuple[list[torch.Tensor], _Offer]:
        for obstacle, whose in ((self._cuda_obstacle, "here"), (link.cuda_obstacle, "at the peer")):
            if obstacle is not None:
                raise LaneUnavailable(self.name, f"no CUDA tensors {whose}: {obstacle}")
        source = packing.source_of(tensors, devices, self.name)
        members, kept = packing.pack(tensors)
        places: list[Place] = []
        for tensor in kept:
            if tensor.nbytes:
                memory = self._segments.covering(tensor)
                places.append((memory.number, memory.blob, tensor.data_ptr(), tensor.nbytes))
            else:
                places.append(NOTHING)
        finish_stream(torch.device("cuda", source))
        return kept, _Offer(number, devices[source], tuple(places), tuple(members))

    def _release(self, number: int) -> None:
        """Release an export that has been fetched, or will not be. Idempotent."""
        out = self._out.pop(number, None)
        for block in out.blocks if out else ():
            self._pool.give(block)

    def reap(self) -> None:
        agent = self._agent  # ``close`` on another thread sets it to None
        if agent is None or self._closed:
            return
        for name, notices in agent.notices().items():
            for notice in notices:
                out = self._out.get(int(notice)) if notice.isdigit() else None
                if out is not None and out.link.name == name:
                    self._release(int(notice))

    def _reclaim(self, census: bool) -> float | None:
        """See Janitor. Needed for results, whose receivers confirm nothing, and for abandoned reads."""
        if self._closed:
            return None
        self.reap()
        self._drop_abandoned()
        if census:
            self._drop_lost()
        return _PAUSE_S if self._out or self._abandoned else None

    def _drop_lost(self) -> None:
        for link in {out.link for out in list(self._out.values())}:
            try:
                link.notify(_PROBE)
            except Lost as error:
                link.lost = str(error)
                self._drop(link)

    def _drop(self, link: Link) -> None:
        for number, out in list(self._out.items()):
            if out.link is link:
                self._release(number)

    # --- receiving -----------------------------------------------------------------------------------------

    @checked
    def read(self, peer: str, descriptor: Any, shapes: Sequence[Shape], copies: Copies | None = None) -> Arrived:
        try:
            link = self._link(peer)
        except LaneUnavailable as error:
            raise PeerLost(peer, error.reason) from error
        offer = _Offer(*descriptor)
        if offer.target is not None and offer.target not in self._devices:
            raise LaneUnavailable(
                self.name, f"{peer!r} sends to cuda:{offer.target}, which was not opened for this lane"
            )
        self.reap()
        with self._reading_from(link):
            try:
                link.connect()
                link.load(offer.places)
                if offer.target is not None:
                    return arrived(self._read_cuda(link, offer, offer.target, shapes), copies)
                # Blocks that are copied out at once are not kept for long.
                keeps = copies is None or any(copy.target is None for copy in copies)
                crowded = keeps and self._pool.used * 2 > self._capacity
                return arrived(self._read_cpu(link, offer, shapes, crowded), copies)
            except Lost as error:
                if not isinstance(error, _Abandoned):
                    link.lost = str(error)
                raise PeerLost(peer, str(error)) from error
            except Exception:  # for instance, no memory is left: nothing has been read
                self.release(peer, descriptor)
                raise

    @contextlib.contextmanager
    def _reading_from(self, link: Link) -> Iterator[None]:
        """Keep the link, and the lane's agent, while this thread reads."""
        link.retain()
        with self._read_ended:
            self._reading += 1
        try:
            yield
        finally:
            with self._read_ended:
                self._reading -= 1
                self._read_ended.notify_all()
            link.release()

    def _read_cpu(self, link: Link, offer: _Offer, shapes: Sequence[Shape], crowded: bool) -> list[torch.Tensor]:
        blocks: list[Block] = []
        check_members(offer.places, offer.members, shapes)
        try:
            here, there = list[Span](), list[Span]()
            for number, _, address, size in offer.places:
                if size:
                    blocks.append(block := self._pool.take(size, beyond=True))
                    here.append((block.memory.address, size, block.memory.number))
                    there.append((address, size, number))
            self._read(link, "cpu", here, there, offer.number, blocks)
        except _Abandoned:
            raise  # the read may still write into the blocks
        except Exception:  # not for an interrupt, which may come before or after the read is abandoned
            for block in blocks:
                self._pool.give(block)
            raise
        following, nothing = iter(blocks), numpy.empty(0, numpy.uint8)
        tensors: dict[int, torch.Tensor] = {}
        try:
            for place, group in zip(offer.places, offer.members, strict=True):
                memory = self._pool.as_array(next(following), place[3], copy=crowded) if place[3] else nothing
                tensors.update((index, independent(memory.data, offset, shapes[index])) for index, offset in group)
        finally:  # perhaps there is no memory for a copy
            for block in following:
                self._pool.give(block)
        return [tensors[index] for index in range(len(shapes))]

    def _read_cuda(self, link: Link, offer: _Offer, target: int, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        rooms = [self._room([shapes[index] for index in piece], target) for piece in offer.members]
        here, there = list[Span](), list[Span]()
        for (number, _, address, size), room in zip(offer.places, rooms, strict=True):
            within(0, size, room.nbytes)
            if size:
                here.append((room.data_ptr(), size, self._segments.covering(room).number))
                there.append((address, size, number))
        self._read(link, "cuda", here, there, offer.number, rooms)
        stream = torch.cuda.current_stream(target)
        for room in rooms:
            room.record_stream(stream)
        return packing.unpack(rooms, offer.members, shapes)

    def _room(self, shapes: Sequence[Shape], device: int) -> torch.Tensor:
        with torch.cuda.stream(self._landing[device]):
            return packing.room(shapes, torch.device("cuda", device))

    def _read(
        self, link: Link, kind: Kind, here: Sequence[Span], there: Sequence[Span], number: int, into: Any
    ) -> None:
        """Block until all has arrived in ``into``. Raises Lost."""
        notice = b"%d" % number
        if not here:
            link.notify(notice)
            return
        deadline = time.monotonic() + self._timeout_s
        read = link.agent.read(link.name, kind, here, there, notice)
        try:
            has_arrived = read.wait(deadline, lambda: link.lost is None and not self._closed)
        finally:
            if not read.over:
                link.retain()
                self._abandoned.append((read, link, into))
                self._janitor.wake()
        if not has_arrived:
            if self._closed:
                raise _Abandoned("the lane was closed meanwhile")
            if link.lost is not None:
                raise _Abandoned(link.lost)
            raise _Abandoned(f"its data did not arrive within {self._timeout_s:g} s")

    def _drop_abandoned(self) -> None:
        """Release abandoned reads that have ended meanwhile, and their memory."""
        for entry in list(self._abandoned):
            read, link, into = entry
            with contextlib.suppress(Lost):
                if not read.done():
                    continue
                read.release()
            self._abandoned.remove(entry)
            for block in into:
                if isinstance(block, Block):
                    self._pool.give(block)
            link.release()

    def release(self, peer: str, descriptor: Any) -> None:
        with contextlib.suppress(LaneUnavailable, Lost):
            self._link(peer).notify(b"%d" % descriptor[0])

    # --- the end ---------------------------------------------------------------------------------------------

    def disconnect(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.end(GONE)
            self._drop(link)

    def close(self) -> None:
        self._closed = True
        with self._read_ended:
            self._read_ended.wait_for(lambda: not self._reading, _CLOSE_S)
            agent, self._agent = self._agent, None
        if agent is None:
            return
        self._janitor.close(_CLOSE_S)
        for read, _, _ in self._abandoned:
            read.release()
        self._abandoned.clear()
        for number in list(self._out):
            self._release(number)
        for link in self._links.values():
            link.disconnect()
        self._segments.close()
        self._pool.close()
        agent.close()


class _Abandoned(Lost):
    """A read was left in progress."""


def make(setup: LaneSetup) -> NixlLane:
    return NixlLane(setup.capacity, setup.devices, setup.config.rpc_timeout_s, ucx_settings(setup))
