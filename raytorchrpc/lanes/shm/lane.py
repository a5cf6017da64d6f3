"""The shm lane: CPU tensors to a process of the same host, through shared memory.

The sender copies once, into its arena. The receiver gets views of that memory, without a copy; they are private,
because the sender does not use the slot again, and writable. The slot is returned when the receiver's last tensor in it
dies. When the arena is more than half full, the receiver copies instead, so that tensors kept for long cannot fill the
arena. Where the receiver has tensors to fill, it copies to them, and the slot is returned when that is done.

CUDA tensors that are to arrive on the CPU are copied into the arena by their GPU; ``export`` waits for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy
import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import (
    MALFORMED,
    Arrived,
    Copies,
    Copy,
    Export,
    PeerAddress,
    Pieces,
    TensorCapabilities,
    TensorLane,
    checked,
    never_fetched,
    size_of,
)
from raytorchrpc.lanes.common import packing
from raytorchrpc.lanes.common.shared_memory import Gone, SharedAddress, is_gone, is_open
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.lanes.shm.memory import Arena, Borrower, Lender, PeerArena, Slot
from raytorchrpc.process import peer_memory
from raytorchrpc.process.completion import nothing
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.workers import Workers
from raytorchrpc.tensors import host_device_copy
from raytorchrpc.tensors.dtypes import Shape, all_independent, copied, independent, tensor_in, view_at, within

#: Most arenas with slots to be returned later.
_OWED = 64
#: Smallest part of a copy for one thread (bytes).
_PART = 4 << 20
_CPU = torch.device("cpu")  # to compare with it takes a tenth of what it takes to ask a device for its type


class Copier:
    """Copies memory. Thread-safe. Its threads start with the first large copy."""

    def __init__(self, threads: int) -> None:
        """``threads``: that share a large copy, including the calling one."""
        self._threads = threads
        self._lock = Lock()
        self._pool: Workers | None = None
        self._closed = False

    def move(self, target: int, source: int, size: int) -> None:
        parts = min(self._threads, size // _PART)
        if parts < 2:
            ctypes.memmove(target, source, size)
            return
        step = -(-size // parts) + 64 & -64
        begins = range(0, size, step)
        self.share([partial(ctypes.memmove, target + at, source + at, min(step, size - at)) for at in begins])

    def share(self, parts: Sequence[Callable[[], object]]) -> None:
        """Run the parts of a copy, on all threads. Raises the error of one that fails."""
        with self._lock:
            if self._closed:
                raise LaneUnavailable("shm", "this member is leaving the group")
            pool = self._pool = self._pool or Workers("raytorchrpc-copy", self._threads - 1)
        waiting: list[tuple[threading.Event, list[Exception]]] = []
        try:
            for number in range(1, min(self._threads, len(parts))):
                done, errors = threading.Event(), list[Exception]()
                pool.submit(_run_parts, parts[number :: self._threads], done, errors)
                waiting.append((done, errors))
            for part in parts[:: self._threads]:  # this thread's
                part()
        finally:
            for done, _ in waiting:  # also if this thread is interrupted, because the caller may reuse the memory
                done.wait()
        for _, errors in waiting:
            if errors:
                raise errors[0]

    def close(self) -> None:
        """End the threads; copies in progress are completed. Idempotent."""
        with self._lock:
            self._closed, pool = True, self._pool
        if pool is not None:
            pool.stop()


def _run_parts(parts: Sequence[Callable[[], object]], done: threading.Event, errors: list[Exception]) -> None:
    try:
        for part in parts:
            part()
    except OSError as error:
        errors.append(error)
    finally:
        done.set()


def default_threads() -> int:
    """Return how many threads share a large copy. One core cannot use the full memory bandwidth: on two cores, both
    took 38 ms for 640 MB and one took 60. More than four gain little.
    """
    cores = len(os.sched_getaffinity(0))
    return min(cores, max(2, min(4, cores // 2)))


class _Moves(NamedTuple):
    """How to make the copies of a read. Holds addresses, and none of the memory."""

    straight: list[tuple[int, int, int, int]]
    """Contiguous bytes: (which tensor, offset in it, target's address, bytes)."""
    rest: list[int]
    """The other copies, by index."""

    @staticmethod
    def of(copies: Copies, sizes: Sequence[int]) -> _Moves:
        """``sizes``: of the exported tensors (bytes). Raises OutOfBounds."""
        moves = _Moves([], [])
        for index, (source, target, offset, strides) in enumerate(copies):
            if target is not None and strides is None:
                address, dtype, shape, goal, device = target
                if device == _CPU and packing.is_contiguous(shape, goal):
                    if length := packing.layout(shape)[1] * dtype.itemsize:
                        within(offset, length, sizes[source])
                        moves.straight.append((source, offset, address, length))
                    continue
            moves.rest.append(index)
        return moves


class ShmLane(TensorLane):
    """One per member. Copies before ``export`` returns, so the sender may change its tensors at once."""

    name: ClassVar[str] = "shm"
    capabilities: ClassVar[TensorCapabilities] = TensorCapabilities(
        devices=frozenset({"cpu"}), takes_cuda=True, in_place=True
    )

    def __init__(self, capacity: int, threads: int | None) -> None:
        """``capacity``: of the arena, in bytes. ``threads``: that share a large copy; None: chosen by the
        number of cores.
        """
        self._capacity, self._copier = capacity, Copier(threads or default_threads())
        self._peers: dict[str, PeerArena] = {}
        """By tag, because the next process of a peer has another arena."""
        self._addresses: dict[str, SharedAddress] = {}
        self._former_peers: set[SharedAddress] = set()
        """Of former peers that may still live, and return their slots themselves."""
        self._owed: dict[str, list[int]] = {}
        """By tag: slots that could not be returned yet, because this process had no descriptor to map their arena, or
        did not know the sending process yet (it was stalled while that one joined).
        """
        self._lender, self._borrower = Lender(), Borrower()
        self._lock = Lock()

    def open(self) -> SharedAddress:
        self._arena = Arena(self._capacity)
        host_device_copy.announce(*self._arena.span)
        return self._arena.address

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        self._addresses.update((peer.peer, peer.address) for peer in peers)
        for peer in peers:
            if peer.address.tag in self._owed:
                with contextlib.suppress(LaneUnavailable, PeerLost):
                    self._peer(peer.peer, peer.address.tag, ())

    def export(self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[int, int]) -> Export:
        lent = self._lender.places(tensors)
        if lent is not None:
            return Export(lent, nothing)
        tensors = [tensor.contiguous() if tensor.is_cuda else tensor for tensor in tensors]
        groups = packing.by_size([tensor.nbytes for tensor in tensors])
        slots: list[Slot] = []
        places: list[tuple[int, int]] = [(0, 0)] * len(tensors)
        try:
            for size, _ in groups:  # all before the first copy, which would be wasted if one fails
                slots.append(self._take(size, peer))
            for number, (_, members) in enumerate(groups):
                for index, place in members:
                    places[index] = (number, place)
                    tensor, offset = tensors[index], slots[number].offset + place
                    if not tensor.is_cuda:
                        packing.write(tensor, self._arena.flat, offset, self.move)
                    elif tensor.nbytes:
                        host_device_copy.copy_out(tensor, self._arena.span[0] + offset)
            host_device_copy.wait_for(tensors)
            if not self._arena.filled(slots):
                raise LaneUnavailable(self.name, f"the process of member {peer!r} is gone")
        except BaseException:
            host_device_copy.wait_for(tensors)  # a GPU may still write there
            self._cancel(slots)
            raise
        crowded = self._arena.crowded()
        descriptor = (tuple((*slot,) for slot in slots), tuple(places), crowded, self._arena.address.tag)
        return Export(descriptor, partial(self._cancel, slots))

    def _cancel(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._arena.cancel(slot)

    def lend(self, size: int) -> torch.Tensor | None:
        try:
            return self._lender.make(size)
        except LaneUnavailable:
            return None

    def mapped(self, peer: str) -> int:
        return self._borrower.mapped(peer)

    def _take(self, size: int, peer: str) -> Slot:
        if self._former_peers:
            self._reclaim_from_dead()
        address = self._addresses.get(peer)
        owner = peer if address is None else address.name
        slot = self._arena.take(size, owner)
        if slot is None:
            self._reclaim_from_dead()
            slot = self._arena.take(size, owner)
        if slot is None:
            raise LaneUnavailable(
                self.name,
                f"the arena of {self._capacity >> 20} MiB has no room for {size} bytes: the peers still hold "
                f"{self._arena.used >> 20} MiB; use @method(keep=True) or clone() where tensors are kept, or raise "
                f"GroupConfig.shm_bytes",
            )
        return slot

    def _reclaim_from_dead(self) -> None:
        for address in (*self._addresses.values(), *self._former_peers):
            if is_gone(address):
                self._arena.reclaim(address.name)
                self._former_peers.discard(address)

    def move(self, target: int, source: int, size: int) -> None:
        self._copier.move(target, source, size)

    @checked
    def read(self, peer: str, descriptor: Any, shapes: Sequence[Shape], copies: Copies | None = None) -> Arrived:
        bases, places, crowded = self._opened(peer, descriptor)
        if copies is None:
            if crowded:
                located = zip(places, shapes, strict=True)
                return [copied(tensor_in(bases[number], offset, shape)) for (number, offset), shape in located]
            if len(bases) == 1:
                return [*all_independent(bases[0].data, [offset for _, offset in places], shapes)]
            buffers = [base.data for base in bases]
            located = zip(places, shapes, strict=True)
            return [independent(buffers[number], offset, shape) for (number, offset), shape in located]
        sizes = tuple(map(size_of, shapes))
        begins: list[int] = []
        for (number, offset), size in zip(places, sizes, strict=True):
            within(offset, size, bases[number].nbytes)
            begins.append(bases[number].ctypes.data + offset)
        moves = copies.prepared((self.name, sizes), partial(_Moves.of, copies, sizes))
        results: Arrived = [None] * len(copies)
        for index in moves.rest:
            copy: Copy = copies[index]
            number, offset = places[copy.source]
            # A storage of its own, which any dtype can be viewed in. It keeps the slot.
            tensor = tensor_in(bases[number], offset, shapes[copy.source])
            results[index] = copied(tensor) if copy.target is None else copy.view_of(tensor)
        for source, offset, target, length in moves.straight:
            self.move(target, begins[source] + offset, length)
        return results

    def _opened(self, peer: str, descriptor: Any) -> tuple[list[numpy.ndarray], Sequence[tuple[int, int]], bool]:
        """The memory that a descriptor names, where in it each tensor lies, and whether to copy them out."""
        if len(descriptor) == 2:  # lent: the memory belongs to its owner
            addresses, places = descriptor
            try:
                bases = [self._borrower.bytes_at(peer, SharedAddress(*address)) for address in addresses]
            except Gone as gone:
                raise never_fetched(peer) from gone
            crowded = True
        else:
            slots, places, crowded, tag = descriptor
            arena = self._peer(peer, tag, slots)
            bases = [arena.view(*slot) for slot in slots]
        return bases, places, crowded

    @checked
    def view(self, peer: str, descriptor: Any, shapes: Sequence[Shape]) -> list[torch.Tensor] | None:
        if len(descriptor) != 2:
            return super().view(peer, descriptor, shapes)
        bases, places, _ = self._opened(peer, descriptor)
        flats = [torch.from_numpy(base) for base in bases]
        return [view_at(flats[number], offset, shape) for (number, offset), shape in zip(places, shapes, strict=True)]

    def expose(self, tensors: Sequence[torch.Tensor]) -> Any:
        peer_memory.admit_readers()
        return self._arena.address.tag, tuple(tensor.data_ptr() for tensor in tensors)

    @checked
    def gather(self, peer: str, descriptor: Any, pieces: Sequence[Pieces], device: torch.device) -> None:
        tag, addresses = descriptor
        address = self._addresses.get(peer)
        if address is None or address.tag != tag or not is_open(address):
            raise never_fetched(peer)
        begins = numpy.array(addresses, numpy.int64)
        try:
            copies = [
                part
                for source, offset, target, width in pieces
                for part in peer_memory.copies(address.pid, target, begins[source] + offset, width)
            ]
            self._copier.share(copies)
        except OSError as error:
            if is_gone(address):
                raise never_fetched(peer) from error
            raise LaneUnavailable(self.name, f"this process may not read the memory of {peer!r}: {error}") from error

    def in_use(self) -> int:
        """Bytes in use by receivers, as far as known."""
        self._reclaim_from_dead()
        return self._arena.in_use()

    def release(self, peer: str, descriptor: Any) -> None:
        if len(descriptor) == 2:
            return  # lent: there is nothing to return
        slots, _, _, tag = descriptor
        try:
            arena = self._peer(peer, tag, slots)
        except (LaneUnavailable, PeerLost):
            return  # the peer is gone, and its arena with it; or the slots are returned later
        with contextlib.suppress(*MALFORMED):
            for slot in slots:
                arena.give_back(slot[0])

    def _peer(self, peer: str, tag: str, slots: Sequence[tuple[int, int, int]]) -> PeerArena:
        """Return the arena of these slots. If it cannot be mapped now, they are returned as soon as it can."""
        address = self._addresses.get(peer)
        current = address is not None and address.tag == tag
        if current and (arena := self._peers.get(tag)) is not None:
            return arena
        with self._lock:
            if address is None or not current:
                self._owe(tag, slots)
                raise never_fetched(peer)
            arena = self._peers.get(tag)
            if arena is None:
                try:
                    arena = PeerArena(address)
                except Gone as gone:
                    raise never_fetched(peer) from gone
                except LaneUnavailable:
                    self._owe(tag, slots)
                    raise
                for number in self._owed.pop(tag, ()):
                    with contextlib.suppress(*MALFORMED):
                        arena.give_back(number)
                self._peers[tag] = arena
                host_device_copy.announce(*arena.span)
        return arena

    def _owe(self, tag: str, slots: Sequence[tuple[int, int, int]]) -> None:
        self._owed.setdefault(tag, []).extend(slot[0] for slot in slots)
        while len(self._owed) > _OWED:
            # Most are of processes that are gone, and their arenas with them.
            del self._owed[next(iter(self._owed))]

    def disconnect(self, peer: str) -> None:
        address = self._addresses.pop(peer, None)
        self._borrower.forget(peer)
        if address is None:
            self._arena.reclaim(peer)
            return
        arena = self._peers.pop(address.tag, None)
        if arena is not None:
            host_device_copy.withdraw(arena.span[0])
        self._owed.pop(address.tag, None)
        # A peer that was only removed, or is unreachable, may go on using its tensors.
        self._former_peers.add(address)
        self._reclaim_from_dead()

    def close(self) -> None:
        peers, self._peers = self._peers, {}
        for arena in peers.values():
            host_device_copy.withdraw(arena.span[0])
        self._borrower.forget()
        self._lender.close()
        if hasattr(self, "_arena"):
            host_device_copy.withdraw(self._arena.span[0])
            self._arena.close()
        self._copier.close()


def make(setup: LaneSetup) -> ShmLane:
    return ShmLane(setup.capacity, setup.config.copy_threads)
