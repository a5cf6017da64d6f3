"""The nixl lane: the receiver reads tensors out of the sender's memory, by RDMA where UCX has a device for it.

CPU tensors: the sender copies them into memory that stays registered. The receiver reads into such memory too, and uses
it there. CUDA tensors: the receiver reads out of the sender's allocation into one of its own. Each is registered once.

NIXL does not know CUDA streams. The sender therefore waits until the GPU has produced a tensor before it announces it.
The receiver lets tensors arrive in memory of a stream on which no work is ever queued: torch's allocator provides such
memory only when the work that last used it is complete, so the receiver has nothing to wait for.

What a member exposes stays registered, and peers read pieces of it, a few MiB at a time. UCX over TCP reads an address
for a peer whether or not it is still registered, so the memory is kept until each reader has said that it is done.

No read goes directly into a receiver's own tensors; data is copied into them. A read that is abandoned, at its deadline
for instance, cannot be cancelled and may still write, and then it writes into memory that is not in use. Host memory of
the receiver would have to be registered first too, which takes longer than the copy.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy
import torch

from raytorchrpc._compat import nixl_package
from raytorchrpc.errors import LaneUnavailable, NotFound, PeerLost
from raytorchrpc.lanes.base import (
    GONE,
    Arrived,
    Copies,
    Export,
    PeerAddress,
    Pieces,
    TensorCapabilities,
    TensorLane,
    arrived,
    checked,
    never_fetched,
)
from raytorchrpc.lanes.common import packing
from raytorchrpc.lanes.common.exports import Janitor
from raytorchrpc.lanes.common.gpu_copies import COPY_LISTED, queue_pieces
from raytorchrpc.lanes.nixl.agent import Agent, Kind, Link, Lost, Place, Read, Registered, Span, ucx_settings
from raytorchrpc.lanes.nixl.memory import (
    NOTHING,
    Block,
    HostPool,
    Segments,
    check_members,
    lay_out,
    register_all,
)
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.process import peer_memory
from raytorchrpc.process.cuda_driver import driver
from raytorchrpc.tensors.cuda_streams import finish_stream
from raytorchrpc.tensors.dtypes import Shape, independent, within

#: Pause between two rounds of the janitor, and where it only waits for peers that may end what they expose (seconds).
_PAUSE_S, _IDLE_S = 0.02, 0.5
#: Bytes of one read of exposed memory, per device type, and how many are in flight.
_AT_ONCE, _AHEAD = {"cpu": 4 << 20, "cuda": 64 << 20}, 4
#: Notices about exposed memory, with its number: its owner ends it; a reader reads it no more.
_ENDS, _ENDED = b"-", b"+"
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


@dataclass
class _Exposed:
    """What peers read in place, and the memory that it keeps."""

    tensors: Sequence[torch.Tensor]
    memories: Sequence[Registered]
    """What to deregister at the end."""
    readers: set[Link] | None = None
    """Once it ends: those that have not said that they read no more."""


#: What a peer exposes: its agent's name, and the number.
_Key = tuple[str, int]


class NixlLane(TensorLane):
    """One per member; needs the package ``nixl``. CPU tensors are copied before ``export`` returns; for CUDA tensors it
    waits until the GPU has produced them.
    """

    name: ClassVar[str] = "nixl"
    capabilities: ClassVar[TensorCapabilities] = TensorCapabilities(devices=frozenset({"cpu", "cuda"}))

    def __init__(
        self, capacity: int, devices: Sequence[int], timeout_s: float, settings: Mapping[str, str] | None
    ) -> None:
        """``capacity``: of registered host memory, in bytes. ``devices``: local CUDA indices. ``timeout_s``: for the
        data of one message. ``settings``: see ``Agent``.
        """
        self._capacity, self._devices, self._timeout_s = capacity, tuple(devices), timeout_s
        self._settings = settings
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
        self._exposed: dict[int, _Exposed] = {}
        self._reads: Counter[_Key] = Counter()
        """Of what peers expose: how many threads read it."""
        self._ending: dict[_Key, Link] = {}
        """What peers end; they have not been told yet that this process reads it no more."""
        self._ended: set[_Key] = set()
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
                elif notice[1:].isdigit():
                    self._take_notice(name, notice[:1], int(notice[1:]))

    def _take_notice(self, name: str, mark: bytes, number: int) -> None:
        """Of exposed memory, from an agent."""
        link = next((link for link in list(self._links.values()) if link.name == name), None)
        if link is not None and mark == _ENDS:
            self._ended.add((name, number))
            self._ending[name, number] = link
            self._janitor.wake()
        elif link is not None and mark == _ENDED and (exposed := self._exposed.get(number)) is not None:
            (exposed.readers or set()).discard(link)

    def _reclaim(self, census: bool) -> float | None:
        """See Janitor. Needed for results, whose receivers confirm nothing, and for abandoned reads."""
        if self._closed:
            return None
        self.reap()
        self._drop_abandoned()
        if census:
            self._drop_lost()
        if self._out or self._abandoned or self._end_exposed():
            return _PAUSE_S
        return _IDLE_S if self._reads else None

    def _end_exposed(self) -> bool:
        """Deregister what nobody reads any more, and tell peers what this process reads no more; whether some is left
        to end.
        """
        agent, agents = self._agent, {link.name for link in list(self._links.values())}
        for key in list(self._reads):
            if key in self._ended or key[0] not in agents:
                with self._read_ended:
                    if not self._reads[key]:
                        del self._reads[key]
        for key, link in list(self._ending.items()):
            if key not in self._reads and all(link is not other for _, other, _ in list(self._abandoned)):
                del self._ending[key]
                with contextlib.suppress(Lost):
                    link.notify(_ENDED + b"%d" % key[1])
        concealed = {number: each for number, each in list(self._exposed.items()) if each.readers is not None}
        for number, each in concealed.items():
            if all(link.lost is not None for link in tuple(each.readers or ())):
                del self._exposed[number]
                if agent is not None:
                    agent.deregister(*each.memories)
        return bool(self._ending or concealed)

    def _drop_lost(self) -> None:
        readers = [link for each in list(self._exposed.values()) for link in tuple(each.readers or ())]
        for link in {*readers, *(out.link for out in list(self._out.values()))}:
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
        try:
            with self._reading_from(peer, link, offer.places):
                if offer.target is not None:
                    return arrived(self._read_cuda(link, offer, offer.target, shapes), copies)
                # Blocks that are copied out at once are not kept for long.
                keeps = copies is None or any(copy.target is None for copy in copies)
                crowded = keeps and self._pool.used * 2 > self._capacity
                return arrived(self._read_cpu(link, offer, shapes, crowded), copies)
        except PeerLost:
            raise
        except Exception:  # for instance, no memory is left: nothing has been read
            self.release(peer, descriptor)
            raise

    @contextlib.contextmanager
    def _reading_from(self, peer: str, link: Link, places: Sequence[Place]) -> Iterator[None]:
        """Connect, and keep the link and the lane's agent while this thread reads these places. Raises PeerLost."""
        link.retain()
        with self._read_ended:
            self._reading += 1
        try:
            link.connect()
            link.load(places)
            yield
        except Lost as error:
            if not isinstance(error, _Abandoned):
                link.lost = str(error)
            raise PeerLost(peer, str(error)) from error
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
        self._wait(link, link.agent.read(link.name, kind, here, there, notice), into)

    def _wait(self, link: Link, read: Read, into: Any) -> None:
        deadline = time.monotonic() + self._timeout_s
        try:
            has_arrived = read.wait(deadline, lambda: link.lost is None and not self._closed)
        finally:
            if not read.over:
                self._abandon(link, read, into)
        if not has_arrived:
            if self._closed:
                raise _Abandoned("the lane was closed meanwhile")
            if link.lost is not None:
                raise _Abandoned(link.lost)
            raise _Abandoned(f"its data did not arrive within {self._timeout_s:g} s")

    def _abandon(self, link: Link, read: Read, into: Any) -> None:
        link.retain()
        self._abandoned.append((read, link, into))
        self._janitor.wake()

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

    # --- memory that is read when peers like -----------------------------------------------------------------

    def expose(self, tensors: Sequence[torch.Tensor]) -> Any:
        agent, is_cuda = self._agent, tensors[0].is_cuda
        if agent is None or (obstacle := self._cuda_obstacle if is_cuda else None) is not None:
            raise LaneUnavailable(self.name, "the lane is closed" if agent is None else f"no CUDA tensors: {obstacle}")
        own = [] if is_cuda else register_all(agent, tensors)
        places, used = [], {memory.number: memory for memory in own}
        for tensor in tensors:
            begin, number = tensor.data_ptr(), 0
            if tensor.nbytes:
                lie_in = [self._segments.covering(tensor)] if is_cuda else own
                (memory,) = [memory for memory in lie_in if 0 <= begin - memory.address < memory.size]
                used[memory.number], number = memory, memory.number
            places.append((number, begin))
        number = next(self._numbers)
        self._exposed[number] = _Exposed(tensors, own)
        memories = tuple((each.number, each.blob, each.address, each.size) for each in used.values())
        return agent.name, number, memories, tuple(places)

    def conceal(self, descriptor: Any, peers: Iterable[str]) -> None:
        number = descriptor[1]
        readers = {link for peer in peers if (link := self._links.get(peer)) is not None}
        if (exposed := self._exposed.get(number)) is None:  # the lane is closed
            return
        exposed.readers = readers
        for link in tuple(readers):
            try:
                link.notify(_ENDS + b"%d" % number)
            except Lost:
                readers.discard(link)
        self._janitor.wake()

    @checked
    def gather(self, peer: str, descriptor: Any, pieces: Sequence[Pieces], device: torch.device) -> None:
        agent, number, memories, places = descriptor
        link, key = self._links.get(peer), (agent, number)
        if link is None or link.name != agent:
            raise never_fetched(peer)
        if link.lost is not None:
            raise LaneUnavailable(self.name, f"the connection to {peer!r} broke: {link.lost}")
        if device.type == "cuda" and (self._cuda_obstacle or device.index not in self._devices):
            raise LaneUnavailable(self.name, self._cuda_obstacle or f"{device} was not opened for this lane")
        self.reap()
        with self._read_ended:
            if key in self._ended:
                raise NotFound(f"{peer!r} has ended what it exposed")
            self._reads[key] += 1
        reads = deque[tuple[Read, Any, Pieces]]()
        try:
            with self._reading_from(peer, link, memories):
                begins = numpy.array(places, numpy.int64)
                for some in _divided(pieces, _AT_ONCE[device.type]):
                    if len(reads) == _AHEAD:
                        self._place(link, device, *reads.popleft())
                    reads.append(self._begin(link, device, begins, some))
                while reads:
                    self._place(link, device, *reads.popleft())
        finally:
            for read, into, _ in reads:
                self._abandon(link, read, [into])
            with self._read_ended:
                self._reads[key] -= 1
            self._janitor.wake(hurry=False)

    def _begin(
        self, link: Link, device: torch.device, begins: numpy.ndarray, pieces: Pieces
    ) -> tuple[Read, Any, Pieces]:
        """Begin to read pieces into memory of the lane, and return that: it is free once it is dropped. Raises Lost."""
        source, offset, target, width = pieces
        steps = numpy.arange(len(target)) * width
        if device.type == "cuda":
            into: Any = self._room([(torch.uint8, (len(target) * width,))], device.index)
            memory, begin = self._segments.covering(into), into.data_ptr()
        else:
            block = self._pool.take(len(target) * width, beyond=True)
            into = self._pool.as_array(block, block.size, copy=False)
            memory, begin = block.memory, block.memory.address
        spans = numpy.full((2, len(target), 3), width, numpy.uint64)
        spans[0, :, 0], spans[0, :, 2] = begin + steps, memory.number
        spans[1, :, 0], spans[1, :, 2] = begins[source, 1] + offset, begins[source, 0]
        return link.agent.read(link.name, memory.kind, *spans), into, Pieces(source, begin + steps, target, width)

    def _place(self, link: Link, device: torch.device, read: Read, into: Any, pieces: Pieces) -> None:
        """Wait for pieces, and copy them to where they go. Raises Lost."""
        self._wait(link, read, [into])
        source, address, target, width = pieces
        if device.type == "cuda":
            stream, kernel = torch.cuda.current_stream(device), partial(COPY_LISTED.on, device.index, driver())
            with driver().on(device.index):
                begins = numpy.zeros(1 + source.max(initial=0), numpy.int64)
                queue_pieces(pieces, begins, device, driver(), kernel, stream.cuda_stream)
            into.record_stream(stream)
            return
        try:
            for part in peer_memory.copies(os.getpid(), target, address, width):
                part()
        except OSError as error:
            raise LaneUnavailable(self.name, f"this process may not copy many pieces at once: {error}") from error

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
        for exposed in self._exposed.values():
            agent.deregister(*exposed.memories)
        self._segments.close()
        self._pool.close()
        agent.close()
        self._exposed.clear()


def _divided(pieces: Sequence[Pieces], most: int) -> Iterator[Pieces]:
    """The same pieces, in parts of at most ``most`` bytes."""
    for source, offset, target, width in pieces:
        step = max(1, most // width)
        for begin in range(0, len(target), step):
            some = slice(begin, begin + step)
            for at in range(0, width, most):
                yield Pieces(source[some], offset[some] + at, target[some] + at, min(most, width - at))


class _Abandoned(Lost):
    """A read was left in progress."""


def make(setup: LaneSetup) -> NixlLane:
    return NixlLane(setup.capacity, setup.devices, setup.config.rpc_timeout_s, ucx_settings(setup))
