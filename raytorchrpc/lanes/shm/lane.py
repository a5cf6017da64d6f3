"""The shm lane: CPU tensors to a process of the same host through shared memory.

One copy, by the sender, into its arena. The receiver gets views of that memory: no copy, private (the sender
never looks at it again) and writable. The slot goes back when the receiver's last tensor on it dies; when the
arena is more than half full the receiver copies instead, so that tensors kept for long cannot fill it. A receiver that
gives tensors to fill copies too, and the slot is back when ``fetch`` returns.

CUDA tensors that are to arrive on the CPU are copied into the arena by their GPU; ``export`` waits for that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy
import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import Export, Part, PeerAddress, TensorCapabilities, TensorLane, never_fetched
from raytorchrpc.lanes.common.shared_memory import Gone, SharedAddress, is_gone
from raytorchrpc.lanes.shm.arena import Arena, PeerArena, Slot
from raytorchrpc.lanes.shm.parallel_copy import Copier, default_threads
from raytorchrpc.lanes.shm.read_only import Borrower, Lender, Places
from raytorchrpc.tensors import host_device_copy
from raytorchrpc.tensors.bounds import MALFORMED, checked, within
from raytorchrpc.tensors.dtypes import Shape, as_copyable, copied, view_at

_ALIGN = 64
#: From here on a tensor has a slot of its own, so that keeping it keeps nothing else (bytes).
_OWN_SLOT = 1 << 20
#: Arenas of which it is remembered what is owed to them.
_OWED = 64


class ShmLane(TensorLane):
    """One per member. Copies before ``export`` returns, so the sender may change its tensors at once."""

    name: ClassVar[str] = "shm"
    capabilities: ClassVar[TensorCapabilities] = TensorCapabilities(
        devices=frozenset({"cpu"}), one_sided=True, same_host=True, zero_copy=True, takes_cuda=True, in_parts=True
    )

    def __init__(self, capacity: int, threads: int | None) -> None:
        """``capacity``: of the arena, in bytes. ``threads``: that share a large copy; None: as many as are worth it."""
        self._capacity, self._copier = capacity, Copier(threads or default_threads())
        self._peers: dict[str, PeerArena] = {}
        """By tag: its next process has an arena of its own."""
        self._addresses: dict[str, SharedAddress] = {}
        self._former: set[SharedAddress] = set()
        """Of processes that are no peers any more and may still live: they give back what they hold by themselves."""
        self._owed: dict[str, list[int]] = {}
        """By tag: slots that could not be given back yet: there were too few descriptors to map their arena, or this
        member had not been told of the process that sent them (it stood still while that one came).
        """
        self._lender, self._borrower = Lender(), Borrower()
        self._lock = threading.Lock()

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
            return _LentExport(lent)
        tensors = [tensor.contiguous() if tensor.is_cuda else tensor for tensor in tensors]
        groups = _grouped(tensors)
        slots: list[Slot] = []
        places: list[tuple[int, int]] = [(0, 0)] * len(tensors)
        try:
            for size, _ in groups:  # all of them before the first copy, which may turn out to be for nothing
                slots.append(self._take(size, peer))
            for number, (_, members) in enumerate(groups):
                for index, offset in members:
                    places[index] = (number, offset)
                    self._copy(tensors[index], slots[number].offset + offset)
            host_device_copy.wait_for(tensors)
            if not self._arena.filled(slots):
                raise LaneUnavailable(self.name, f"the process of member {peer!r} is gone")
        except BaseException:
            host_device_copy.wait_for(tensors)  # a GPU may still write there
            for slot in slots:
                self._arena.cancel(slot)
            raise
        crowded = self._arena.crowded()
        descriptor = (tuple((*slot,) for slot in slots), tuple(places), crowded, self._arena.address.tag)
        return _ShmExport(self._arena, slots, descriptor)

    def lend(self, size: int) -> torch.Tensor | None:
        try:
            return self._lender.make(size)
        except LaneUnavailable:
            return None

    def _take(self, size: int, peer: str) -> Slot:
        if self._former:
            self._reclaim_from_the_dead()
        address = self._addresses.get(peer)
        owner = peer if address is None else address.name
        slot = self._arena.take(size, owner)
        if slot is None:
            self._reclaim_from_the_dead()
            slot = self._arena.take(size, owner)
        if slot is None:
            raise LaneUnavailable(
                self.name,
                f"the arena of {self._capacity >> 20} MiB has no room for {size} bytes: the peers still hold "
                f"{self._arena.used >> 20} MiB; use @method(keep=True) or clone() where tensors are kept, or raise "
                f"GroupConfig.shm_bytes",
            )
        return slot

    def _reclaim_from_the_dead(self) -> None:
        for address in (*self._addresses.values(), *self._former):
            if is_gone(address):
                self._arena.reclaim(address.name)
                self._former.discard(address)

    def _copy(self, tensor: torch.Tensor, offset: int) -> None:
        size = tensor.nbytes
        if not size:
            return
        target = self._arena.address_of(offset)
        if tensor.is_cuda:
            host_device_copy.copy_out(tensor, target)
            return
        if not tensor.is_contiguous():
            strided = as_copyable(tensor)
            self._arena.tensor(offset, size).view(strided.dtype).view(strided.shape).copy_(strided)
            return
        self.move(target, tensor.data_ptr(), size)

    def move(self, target: int, source: int, size: int) -> None:
        try:
            self._copier.move(target, source, size)
        except RuntimeError as error:
            raise LaneUnavailable(self.name, "this member leaves the group") from error

    @checked
    def fetch(
        self, peer: str, descriptor: Any, shapes: Sequence[Shape], into: Sequence[torch.Tensor | None] | None = None
    ) -> list[torch.Tensor]:
        if len(descriptor) == 2:  # copies, always: the memory stays its owner's
            addresses, places = descriptor
            bases, crowded = self._lent(peer, addresses), True
            into = into or [None] * len(places)
        else:
            slots, places, crowded, tag = descriptor
            arena = self._peer(peer, tag, slots)
            bases = [arena.view(*slot) for slot in slots]
        flats = [torch.from_numpy(base) for base in bases]
        if into is not None:
            rooms = [_Room.of(base) for base in bases]
            found = zip(places, shapes, into, strict=True)
            return [
                target
                if target is not None and self._filled(target, rooms[number], offset)
                else self._left(view_at(flats[number], offset, shape), target, crowded)
                for (number, offset), shape, target in found
            ]
        if crowded:
            flats = [flat.clone() for flat in flats]
        return [view_at(flats[number], offset, shape) for (number, offset), shape in zip(places, shapes, strict=True)]

    def _lent(self, peer: str, addresses: Sequence[tuple[Any, ...]]) -> list[numpy.ndarray]:
        try:
            return [self._borrower.bytes_at(peer, SharedAddress(*address)) for address in addresses]
        except Gone as gone:
            raise gone.lost(peer) from gone

    @checked
    def scatter_into(
        self, peer: str, descriptor: Any, sizes: Sequence[int], parts: Sequence[Sequence[Part]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if len(descriptor) == 2:
            addresses, places = descriptor
            bases = self._lent(peer, addresses)
        else:
            slots, places, _, tag = descriptor
            arena = self._peer(peer, tag, slots)
            bases = [arena.view(*slot) for slot in slots]
        left: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (number, start), size, its in zip(places, sizes, parts, strict=True):
            base = bases[number]
            within(start, size, base.nbytes)
            room = _Room(base.ctypes.data + start, size)
            for offset, target in its:
                if not self._filled(target, room, offset):
                    flat = torch.from_numpy(base[start : start + size])
                    left.append((target, view_at(flat, offset, (target.dtype, tuple(target.shape)))))
        return left

    def _filled(self, target: torch.Tensor, room: _Room, offset: int) -> bool:
        """Whether a tensor could be filled from there as it lies. Raises OutOfBounds."""
        if not target.is_cpu or not target.is_contiguous():
            return False
        if size := target.nbytes:
            within(offset, size, room.size)
            self.move(target.data_ptr(), room.begin + offset, size)
        return True

    def _left(self, view: torch.Tensor, target: torch.Tensor | None, crowded: bool) -> torch.Tensor:
        if target is None:
            return copied(view) if crowded else view
        if target.is_cpu:
            as_copyable(target).copy_(as_copyable(view))
            return target
        return view  # its GPU copies it from here

    def in_use(self) -> int:
        """Bytes that are with others, as far as can be known now."""
        self._reclaim_from_the_dead()
        return self._arena.in_use()

    def discard(self, peer: str, descriptor: Any) -> None:
        if len(descriptor) == 2:
            return  # lent: there is nothing to give back
        slots, _, _, tag = descriptor
        try:
            arena = self._peer(peer, tag, slots)
        except (LaneUnavailable, PeerLost):
            return  # the peer is gone, and its arena with it, or they are owed
        with contextlib.suppress(*MALFORMED):
            for slot in slots:
                arena.give_back(slot[0])

    def _peer(self, peer: str, tag: str, slots: Sequence[tuple[int, int, int]]) -> PeerArena:
        """Where these slots are. If that cannot be mapped now, they are given back as soon as it can."""
        address = self._addresses.get(peer)
        if address is None or address.tag != tag:
            self._owe(tag, slots)
            raise never_fetched(peer)
        arena = self._peers.get(tag)
        if arena is not None:
            return arena
        with self._lock:
            arena = self._peers.get(tag)
            if arena is None:
                try:
                    arena = PeerArena(address)
                except Gone as gone:
                    raise gone.lost(peer) from gone
                except LaneUnavailable:
                    self._owed.setdefault(tag, []).extend(slot[0] for slot in slots)
                    raise
                for number in self._owed.pop(tag, ()):
                    with contextlib.suppress(*MALFORMED):
                        arena.give_back(number)
                self._peers[tag] = arena
                host_device_copy.announce(*arena.span)
        return arena

    def _owe(self, tag: str, slots: Sequence[tuple[int, int, int]]) -> None:
        with self._lock:
            self._owed.setdefault(tag, []).extend(slot[0] for slot in slots)
            while len(self._owed) > _OWED:
                del self._owed[
                    next(iter(self._owed))
                ]  # most are of processes that are gone, and their arenas with them

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
        # One that was only removed, or is out of reach, may use what it got for as long as it likes.
        self._former.add(address)
        self._reclaim_from_the_dead()

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


class _Room(NamedTuple):
    """A peer's memory, as it is mapped here."""

    begin: int
    size: int

    @staticmethod
    def of(base: numpy.ndarray) -> _Room:
        return _Room(base.ctypes.data, base.nbytes)


class _ShmExport(Export):
    def __init__(self, arena: Arena, slots: list[Slot], descriptor: Any) -> None:
        self._arena, self._slots = arena, slots
        self.descriptor = descriptor

    def cancel(self) -> None:
        for slot in self._slots:
            self._arena.cancel(slot)


class _LentExport(Export):
    def __init__(self, descriptor: Places) -> None:
        self.descriptor = descriptor

    def cancel(self) -> None:
        """Nothing was taken for it."""


def _grouped(tensors: Sequence[torch.Tensor]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Slots to make: (size, [(tensor's index, offset)]); large tensors alone, small ones together."""
    groups: list[tuple[int, list[tuple[int, int]]]] = []
    small: list[tuple[int, int]] = []
    filled = 0
    for index, tensor in enumerate(tensors):
        size = tensor.nbytes
        if size >= _OWN_SLOT:
            groups.append((size, [(index, 0)]))
        else:
            small.append((index, filled))
            filled += (size + _ALIGN - 1) & -_ALIGN
    if small:
        groups.append((filled, small))
    return groups
