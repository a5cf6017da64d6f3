"""The nixl lane: the receiver reads tensors out of the sender's memory, by RDMA where UCX has a device for it.

CPU tensors: the sender copies into memory that stays registered, the receiver reads into such memory too and uses it
there. CUDA tensors: the receiver reads out of the sender's allocation into one of its own, both registered once.

NIXL knows no CUDA streams. The sender therefore waits, before it tells of a tensor, until the GPU has produced it.
The receiver lets tensors arrive in memory of a stream on which nothing is ever queued: torch hands such memory out only
when whatever used it last has run, so no work of the receiver's has to be waited for.

Nothing is read straight into tensors that the receiver gives to be filled: they are copied out of that memory. A read
that is given up, at its deadline for one, cannot be called back and may still write; then it writes where nobody looks.
Host memory of the receiver's would have to be registered first too, which takes longer than the copy.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, ClassVar

import torch

from raytorchrpc._compat import nixl_package
from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import Export, PeerAddress, TensorCapabilities, TensorLane
from raytorchrpc.lanes.common import packing
from raytorchrpc.lanes.nixl.agent import Agent, Kind, Lost, Read, Span
from raytorchrpc.lanes.nixl.memory import NOTHING, Block, HostPool, Members, Place, Segments, check_members, lay_out
from raytorchrpc.process import threads
from raytorchrpc.tensors.bounds import checked, within
from raytorchrpc.tensors.dtypes import Shape, view_at

#: While exports wait to be fetched, their sender looks this often whether they have been (seconds).
_JANITOR_S = 0.02
#: And so often whether their receivers are still there (seconds).
_CENSUS_S = 1.0
_CLOSE_S = 1.5
_QUESTION = b""  # a notice that says nothing; a lost peer shows when it is sent


@dataclass(eq=False)
class _Link:
    """A peer, as far as this member reads from it."""

    agent: str
    connection: bytes
    cuda_obstacle: str | None
    known: set[int] = field(default_factory=set)
    """Its memory that this agent has been told of, by the peer's number."""
    met: bool = False
    lost: str | None = None
    """Why nothing goes this way any more. It stays so: the sender may have used its memory for something else since."""
    users: int = 0
    """Reads under way."""


@dataclass(eq=False)
class _Out:
    """An export on its way: what it keeps."""

    link: _Link
    blocks: Sequence[Block] = ()
    tensors: Sequence[torch.Tensor] = ()


class NixlLane(TensorLane):
    """One per member; needs the package ``nixl``. CPU tensors are copied before ``export`` returns; for CUDA tensors it
    waits until the GPU has produced them.
    """

    name: ClassVar[str] = "nixl"
    capabilities: ClassVar[TensorCapabilities] = TensorCapabilities(
        devices=frozenset({"cpu", "cuda"}), one_sided=True, same_host=False, zero_copy=True
    )

    def __init__(
        self, capacity: int, devices: Sequence[int], timeout_s: float, settings: Mapping[str, str] | None = None
    ) -> None:
        """``capacity``: of registered host memory, in bytes. ``devices``: local CUDA indices. ``timeout_s``: for one
        message's data to arrive. ``settings``: of UCX, by name without ``UCX_``; those in the environment win.
        """
        self._capacity, self._devices, self._timeout_s = capacity, tuple(devices), timeout_s
        self._settings = dict(settings or {})
        self._lock = threading.Condition()
        self._links: dict[str, _Link] = {}
        # What an earlier process of this member sent, and a peer still gives up, is none of these.
        self._numbers = itertools.count(random.SystemRandom().getrandbits(48))
        self._out: dict[int, _Out] = {}
        self._given_up: list[tuple[Read, _Link, Any]] = []
        """Reads that nobody waits for any more, with the memory that they may still write."""
        self._landing: dict[int, torch.cuda.Stream] = {}
        self._cuda_obstacle: str | None = None
        self._agent: Agent | None = None
        self._reading = 0
        self._closed = False
        self._woken = threading.Event()
        self._janitor: threading.Thread | None = None

    # --- who is there --------------------------------------------------------------------------------------

    def open(self) -> tuple[str, bytes, str | None]:
        # Streams first: UCX looks for CUDA when the agent is made.
        self._landing = {index: torch.cuda.Stream(index) for index in self._devices}  # type: ignore[no-untyped-call]
        agent = Agent(nixl_package.nixl_package(), self._settings)
        self._pool, self._segments = HostPool(agent, self._capacity), Segments(agent)
        try:
            for index in self._devices:
                self._segments.covering(self._room([(torch.uint8, (1,))], index))
        except LaneUnavailable as error:  # CPU tensors can still go
            self._cuda_obstacle = error.reason
        self._agent = agent
        return agent.name, agent.connection, self._cuda_obstacle

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        self._links.update((peer.peer, _Link(*peer.address)) for peer in peers)

    def _known(self, peer: str) -> tuple[Agent, _Link]:
        agent, link = self._agent, self._links.get(peer)
        if agent is None or self._closed:
            raise LaneUnavailable(self.name, "the lane is closed")
        if link is None:
            raise LaneUnavailable(self.name, f"member {peer!r} is not known here, or gone")
        return agent, link

    def _meet(self, agent: Agent, link: _Link) -> None:
        """Raises Lost."""
        with self._lock:
            if link.lost is not None:
                raise Lost(link.lost)
            if not link.met:
                agent.meet(link.connection)
                link.met = True

    # --- sending -------------------------------------------------------------------------------------------

    def export(self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[int, int]) -> Export:
        agent, link = self._known(peer)
        if link.lost is not None:
            raise LaneUnavailable(self.name, f"the way to {peer!r} broke: {link.lost}")
        self._collect(agent)
        if tensors and tensors[0].is_cuda:
            out, told = self._export_cuda(tensors, link, devices)
        else:
            blocks, places, members = lay_out(self._pool, tensors)
            out, told = _Out(link, blocks=blocks), (None, places, members)
        with self._lock:
            number = next(self._numbers)
            self._out[number] = out
        self._watch()
        return _NixlExport(self, number, (number, *told))

    def _export_cuda(
        self, tensors: Sequence[torch.Tensor], link: _Link, devices: Mapping[int, int]
    ) -> tuple[_Out, tuple[Any, ...]]:
        for obstacle, whose in ((self._cuda_obstacle, "here"), (link.cuda_obstacle, "at the peer")):
            if obstacle is not None:
                raise LaneUnavailable(self.name, f"no CUDA tensors {whose}: {obstacle}")
        source = tensors[0].device.index
        if any(tensor.device.index != source for tensor in tensors):
            raise LaneUnavailable(self.name, "one message with tensors of several GPUs")
        if source not in devices:
            raise LaneUnavailable(self.name, f"cuda:{source} is not in the device map")
        members = packing.pieces([(tensor.dtype, tensor.nbytes) for tensor in tensors])
        kept = [packing.joined([tensors[index] for index in piece]) for piece in members]
        places: list[Place] = []
        for tensor in kept:
            if tensor.nbytes:
                memory = self._segments.covering(tensor)
                places.append((memory.number, memory.blob, tensor.data_ptr(), tensor.nbytes))
            else:
                places.append(NOTHING)
        stream = torch.cuda.current_stream(source)
        if not stream.query():
            produced = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            produced.record(stream)
            produced.synchronize()
        return _Out(link, tensors=kept), (devices[source], tuple(places), tuple(members))

    def take_back(self, number: int) -> None:
        """An export that nobody is going to fetch, or that has been."""
        with self._lock:
            out = self._out.pop(number, None)
        for block in out.blocks if out else ():
            self._pool.give(block)

    def reap(self) -> None:
        """Let go of what has been fetched or discarded."""
        agent = self._agent
        if agent is not None and not self._closed:
            self._collect(agent)

    def _collect(self, agent: Agent) -> None:
        for name, notices in agent.notices().items():
            for notice in notices:
                if notice.isdigit():
                    out = self._out.get(int(notice))
                    if out is not None and out.link.agent == name:
                        self.take_back(int(notice))

    def _watch(self) -> None:
        with self._lock:
            if self._janitor is None and not self._closed:
                self._start_janitor()
        self._woken.set()

    def _start_janitor(self) -> None:
        try:
            self._janitor = threads.start(self._look_after, name="raytorchrpc-nixl")
        except threads.ThreadShortage as error:  # the next export tries again
            threads.report(error, "memory of tensors that were sent is given back late")

    def _look_after(self) -> None:
        threads.serve(self._look_while_needed, "the janitor of nixl")

    def _look_while_needed(self) -> bool:
        """Results that nobody answers for, and reads that nobody waits for: look from time to time."""
        self._woken.wait()
        census = time.monotonic() + _CENSUS_S
        while (self._out or self._given_up) and not self._closed:
            self.reap()
            self._drop_given_up()
            if time.monotonic() > census:
                self._drop_for_the_lost()
                census = time.monotonic() + _CENSUS_S
            threading.Event().wait(_JANITOR_S)
        with self._lock:
            if not self._out and not self._given_up and not self._closed:
                self._woken.clear()
        return not self._closed

    def _drop_for_the_lost(self) -> None:
        agent = self._agent
        for link in {out.link for out in list(self._out.values())}:
            if agent is None:
                return
            try:
                self._meet(agent, link)
                agent.notify(link.agent, _QUESTION)
            except Lost as error:
                link.lost = str(error)
                self._drop(link)

    def _drop(self, link: _Link) -> None:
        for number, out in list(self._out.items()):
            if out.link is link:
                self.take_back(number)

    # --- receiving -----------------------------------------------------------------------------------------

    @checked
    def fetch(
        self, peer: str, descriptor: Any, shapes: Sequence[Shape], into: Sequence[torch.Tensor | None] | None = None
    ) -> list[torch.Tensor]:
        try:
            agent, link = self._known(peer)
        except LaneUnavailable as error:
            raise PeerLost(peer, error.reason) from error
        number, target, places, members = descriptor
        if target is not None and target not in self._devices:
            raise LaneUnavailable(self.name, f"{peer!r} sends to cuda:{target}, which was not opened for this lane")
        self._collect(agent)
        with self._using(agent, link):
            try:
                self._meet(agent, link)
                self._learn(agent, link, places)
                if target is None:
                    # What is copied out at once is not kept for long.
                    crowded = (into is None or any(one is None for one in into)) and self._pool.crowded()
                    return self._fetch_cpu(agent, link, number, places, members, shapes, crowded)
                return self._fetch_cuda(agent, link, number, target, places, members, shapes)
            except _GivenUp as error:
                raise PeerLost(peer, str(error)) from error
            except Lost as error:
                link.lost = str(error)
                raise PeerLost(peer, str(error)) from error
            except Exception:  # no memory left here, for one: nothing has been read
                self.discard(peer, descriptor)
                raise

    @contextlib.contextmanager
    def _using(self, agent: Agent, link: _Link) -> Iterator[None]:
        with self._lock:
            link.users += 1
            self._reading += 1
        try:
            yield
        finally:
            with self._lock:
                self._reading -= 1
                self._lock.notify_all()
            self._unused(agent, link)

    def _unused(self, agent: Agent, link: _Link) -> None:
        """A read from a peer has ended."""
        with self._lock:
            link.users -= 1
            if link.lost is not None and not link.users and link.met:
                link.met = False
                agent.forget(link.agent)

    def _learn(self, agent: Agent, link: _Link, places: Sequence[Place]) -> None:
        for number, blob, _, size in places:
            if size and number not in link.known:
                agent.learn(blob)
                link.known.add(number)

    def _fetch_cpu(
        self,
        agent: Agent,
        link: _Link,
        number: int,
        places: Sequence[Place],
        members: Sequence[Members],
        shapes: Sequence[Shape],
        crowded: bool,
    ) -> list[torch.Tensor]:
        blocks: list[Block] = []
        check_members(places, members, shapes)
        try:
            for place in places:
                if place[3]:
                    blocks.append(self._pool.take(place[3], beyond=True))
            spans = [
                Span(block.memory.address, block.memory.number, place[2], place[0], place[3])
                for place, block in zip(filter(itemgetter(3), places), blocks, strict=True)
            ]
            self._read(agent, link, "cpu", spans, number, blocks)
        except _GivenUp:
            raise  # the blocks may still be written
        except Exception:  # an interrupt may have come before or after the read was given up: then they stay
            for block in blocks:
                self._pool.give(block)
            raise
        left = iter(blocks)
        arrived: dict[int, torch.Tensor] = {}
        for place, group in zip(places, members, strict=True):
            flat = self._pool.give_away(next(left), place[3], copy=crowded) if place[3] else torch.empty(0)
            arrived.update((index, view_at(flat, offset, shapes[index])) for index, offset in group)
        return [arrived[index] for index in range(len(shapes))]

    def _fetch_cuda(
        self,
        agent: Agent,
        link: _Link,
        number: int,
        target: int,
        places: Sequence[Place],
        members: Sequence[Sequence[int]],
        shapes: Sequence[Shape],
    ) -> list[torch.Tensor]:
        rooms = [self._room([shapes[index] for index in piece], target) for piece in members]
        spans = []
        for place, room in zip(places, rooms, strict=True):
            within(0, place[3], room.nbytes)
            if place[3]:
                memory = self._segments.covering(room)
                spans.append(Span(room.data_ptr(), memory.number, place[2], place[0], place[3]))
        self._read(agent, link, "cuda", spans, number, rooms)
        stream = torch.cuda.current_stream(target)
        arrived: dict[int, torch.Tensor] = {}
        for piece, room in zip(members, rooms, strict=True):
            room.record_stream(stream)
            arrived.update(zip(piece, packing.split(room, [shapes[index] for index in piece]), strict=True))
        return [arrived[index] for index in range(len(shapes))]

    def _room(self, shapes: Sequence[Shape], device: int) -> torch.Tensor:
        landing = self._landing.get(device)
        if landing is None:
            landing = self._landing.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(landing):
            return packing.room(shapes, torch.device("cuda", device))

    def _read(self, agent: Agent, link: _Link, kind: Kind, spans: Sequence[Span], number: int, into: Any) -> None:
        """Block until all has arrived in ``into``. Raises Lost."""
        notice = b"%d" % number
        if not spans:
            agent.notify(link.agent, notice)
            return
        deadline = time.monotonic() + self._timeout_s
        read = agent.read(link.agent, kind, kind, spans, notice)
        try:
            arrived = read.wait(deadline, lambda: link.lost is None and not self._closed)
        finally:
            if not read.over:
                self._give_up(read, link, into)
        if not arrived:
            if self._closed:
                raise _GivenUp("the lane was closed meanwhile")
            if link.lost is not None:
                raise _GivenUp(link.lost)
            raise _GivenUp(f"its data did not arrive within {self._timeout_s:g} s")

    def _give_up(self, read: Read, link: _Link, into: Any) -> None:
        with self._lock:
            link.users += 1
            self._given_up.append((read, link, into))
        self._watch()

    def _drop_given_up(self) -> None:
        agent = self._agent
        for entry in list(self._given_up):
            read, link, into = entry
            with contextlib.suppress(Lost):
                if not read.done():
                    continue
                read.release()
            self._given_up.remove(entry)
            for block in into:
                if isinstance(block, Block):
                    self._pool.give(block)
            if agent is not None:
                self._unused(agent, link)

    def discard(self, peer: str, descriptor: Any) -> None:
        with contextlib.suppress(LaneUnavailable, Lost):
            agent, link = self._known(peer)
            self._meet(agent, link)
            agent.notify(link.agent, b"%d" % descriptor[0])

    # --- the end ---------------------------------------------------------------------------------------------

    def disconnect(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is None:
            return
        self._drop(link)
        link.lost = "it left the group, or died"  # whoever reads from it gives up
        if self._agent is not None:
            with self._lock:
                link.users += 1
            self._unused(self._agent, link)

    def close(self) -> None:
        self._closed = True
        self._woken.set()
        agent = self._agent
        with self._lock:
            self._lock.wait_for(lambda: not self._reading, _CLOSE_S)
            self._agent = None
        if agent is None:
            return
        if self._janitor is not None and self._janitor is not threading.current_thread():
            self._janitor.join(_CLOSE_S)
        for read, _, _ in self._given_up:
            read.release()
        self._given_up.clear()
        for number in list(self._out):
            self.take_back(number)
        for link in self._links.values():
            if link.met:
                agent.forget(link.agent)
        self._segments.close()
        self._pool.close()
        agent.close()


class _GivenUp(Lost):
    """A read was left under way."""


class _NixlExport(Export):
    def __init__(self, lane: NixlLane, number: int, descriptor: Any) -> None:
        self._lane, self._number = lane, number
        self.descriptor = descriptor

    def cancel(self) -> None:
        self._lane.take_back(self._number)

    def finished(self) -> None:
        self._lane.reap()
