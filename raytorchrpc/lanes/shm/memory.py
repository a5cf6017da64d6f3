"""The memory that two processes of one host share: arenas of slots for messages, and windows that their owner lends.

It is in memfds: they have no name in a file system, so a killed process leaves nothing behind, and /dev/shm does not
limit their size. A peer opens them through /proc, which the kernel allows only to the same user. The beginning of an
arena holds one state byte for each slot. A receiver clears that byte to return the slot, without a message and without
waking a thread. A window has no receiver that returns it: its owner finds out by other means when all have read it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from bisect import insort
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy
import torch

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.common.shared_memory import LIBC, SharedAddress, SharedBytes, is_open, map_shared, open_shared
from raytorchrpc.process import fork
from raytorchrpc.process.locks import Lock
from raytorchrpc.tensors.dtypes import within

SLOTS = 1 << 16
_DATA = 1 << 20
_PAGE = 4096
#: States of a slot. A receiver clears the state; it is set otherwise, also while the slot is not in use again.
_FREE, _TAKEN = 0, 1
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
#: With up to this many slots in use, each ``take`` collects returned ones; with more, only when slots or bytes doubled.
_REAP_EACH_TIME = 64
_REAP_BYTES = 64 << 20


class Slot(NamedTuple):
    """A range of the arena. The sender writes it; then the receiver owns it until it clears the state byte."""

    number: int
    offset: int
    size: int


class Arena:
    """The sender's side. Thread-safe. Slots are taken from the front, so that memory in the caches is reused."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: most bytes. Memory is allocated only as it is used."""
        self.capacity = (capacity + _PAGE - 1) // _PAGE * _PAGE
        self._shared = SharedBytes(_DATA + self.capacity)
        self.address = self._shared.address
        """The address by which peers map it."""
        self._bytes = self._shared.bytes
        self.span: tuple[int, int] = (self._bytes.ctypes.data, self._bytes.nbytes)
        """(address, bytes) of its mapping in this process."""
        self.flat = torch.from_numpy(self._bytes)
        self._lock = Lock()
        self._holes: list[tuple[int, int]] = [(_DATA, self.capacity)]  # (offset, size), by offset
        self._numbers: list[int] = []
        """Of slots that were returned."""
        self._numbered = 0
        """How many slots there ever were: the numbers below."""
        self._out: dict[int, tuple[Slot, str]] = {}
        """By number: the slot, and its owner."""
        self._filling: dict[int, bool] = {}
        """By number: whether the owner of a slot that is being written is gone."""
        self.used = 0
        """Bytes in use, as far as known."""
        self._reap_slots, self._reap_bytes = _REAP_EACH_TIME, _REAP_BYTES

    def in_use(self) -> int:
        """Bytes in use, after collecting returned slots."""
        with self._lock.once("a message with tensors"):
            self._reap()
            return self.used

    def crowded(self) -> bool:
        """Whether more than half of its bytes or slots are in use."""

        def more_than_half() -> bool:
            return self.used * 2 > self.capacity or len(self._out) * 2 > SLOTS

        if more_than_half():
            self.in_use()
        return more_than_half()

    def take(self, size: int, owner: str) -> Slot | None:
        """Take a slot of at least ``size`` bytes for the process ``owner``; None if the arena is full.

        Write it, then call ``filled`` or ``cancel``. Until then it is not reused, even if its owner ends.
        """
        wanted = max(_PAGE, (size + _PAGE - 1) // _PAGE * _PAGE)
        with self._lock.once("a message with tensors"):
            out = len(self._out)
            if out <= _REAP_EACH_TIME or out >= self._reap_slots or self.used >= self._reap_bytes:
                self._reap()
            slot = self._carve(wanted, owner)
            if slot is None:
                self._reap()
                slot = self._carve(wanted, owner)
            return slot

    def _carve(self, wanted: int, owner: str) -> Slot | None:
        if not self._numbers and self._numbered == SLOTS:
            return None
        for place, (offset, size) in enumerate(self._holes):
            if size >= wanted:
                if size == wanted:
                    del self._holes[place]
                else:
                    self._holes[place] = (offset + wanted, size - wanted)
                slot = Slot(self._numbers.pop() if self._numbers else self._numbered, offset, wanted)
                self._numbered = max(self._numbered, slot.number + 1)
                self._bytes[slot.number] = _TAKEN
                self._out[slot.number] = (slot, owner)
                self._filling[slot.number] = False
                self.used += wanted
                return slot
        return None

    def _reap(self) -> None:
        if len(self._out) <= 4 * _REAP_EACH_TIME:
            returned = [index for index in self._out if self._bytes[index] == _FREE]
        else:  # one scan of all states
            cleared: list[int] = numpy.flatnonzero(self._bytes[: self._numbered] == _FREE).tolist()
            returned = [index for index in cleared if index in self._out]
        for index in returned:
            self._put_back(index)
        self._reap_slots = max(_REAP_EACH_TIME, 2 * len(self._out))
        self._reap_bytes = max(_REAP_BYTES, 2 * self.used)

    def _put_back(self, index: int) -> None:
        slot, _ = self._out.pop(index)
        self._filling.pop(index, None)
        self._bytes[index] = _TAKEN
        self._numbers.append(index)
        self.used -= slot.size
        insort(self._holes, (slot.offset, slot.size))
        place = self._holes.index((slot.offset, slot.size))
        for index in (place, place - 1):  # join the neighbours
            if 0 <= index < len(self._holes) - 1:
                (offset, size), (following, more) = self._holes[index : index + 2]
                if offset + size == following:
                    self._holes[index : index + 2] = [(offset, size + more)]

    def filled(self, slots: Sequence[Slot]) -> bool:
        """The slots have been written. Returns False if their owner is gone; they are reclaimed then."""
        with self._lock.once("a message with tensors"):
            orphans = [slot.number for slot in slots if self._filling.pop(slot.number, False)]
            for index in orphans:
                self._put_back(index)
        return not orphans

    def cancel(self, slot: Slot) -> None:
        """Reclaim a slot that was not sent."""
        with self._lock.once("a message with tensors"):
            current = self._out.get(slot.number)
            if current is not None and current[0] is slot:  # not reclaimed and reused meanwhile
                self._put_back(slot.number)

    def reclaim(self, owner: str) -> None:
        """Reclaim the slots of a process that has ended. A slot that is being written for it is reclaimed afterwards:
        the write would otherwise overwrite the tensors of the slot's next owner.
        """
        with self._lock.once("a message with tensors"):
            for index in [index for index, (_, whose) in self._out.items() if whose == owner]:
                if index in self._filling:
                    self._filling[index] = True
                else:
                    self._put_back(index)

    def close(self) -> None:
        """Close the arena. Receivers keep what they use: the memory is freed with its last mapping."""
        with self._lock.once("a message with tensors"):
            self._shared.close()
            self._out.clear()
            self._holes.clear()
            self._numbers.clear()  # nothing can be taken from now on


class PeerArena:
    """The receiver's side of one peer's arena. Thread-safe."""

    def __init__(self, address: SharedAddress) -> None:
        """Raises LaneUnavailable."""
        self._address = address
        self._bytes = map_shared(address)
        self._pid = os.getpid()
        self.span: tuple[int, int] = (self._bytes.ctypes.data, self._bytes.nbytes)
        """(address, bytes) of its mapping in this process."""
        fork.register(self)

    def after_fork(self) -> tuple[()]:
        """See fork.ForkAware. Makes the mapping private, so that the parent does not see what the child writes."""
        with contextlib.suppress(OSError, LaneUnavailable):  # the owner is gone
            fd = open_shared(self._address)
            private = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
            LIBC.mmap(*self.span, mmap.PROT_READ | mmap.PROT_WRITE, private, fd, 0)
            os.close(fd)
        return ()

    def view(self, index: int, offset: int, size: int) -> numpy.ndarray:
        """Return the slot's bytes, private and writable. The slot is returned when no tensor uses them any more.

        Raises OutOfBounds.
        """
        within(index, 1, SLOTS)
        within(offset - _DATA, size, self._bytes.nbytes - _DATA)
        view = self._bytes[offset : offset + size]
        held = weakref.ref(view, partial(_on_dropped, self._bytes, self._pid, index))
        _held[id(held)] = held
        return view

    def give_back(self, index: int) -> None:
        """Return a slot that was not used. Raises OutOfBounds."""
        within(index, 1, SLOTS)
        if os.getpid() == self._pid:
            self._bytes[index] = _FREE


#: Returns the slots that tensors use, by identity. Not in a PeerArena, which may go before the tensors in it: a weak
#: reference that is collected itself never calls.
_held: dict[int, weakref.ref[numpy.ndarray]] = {}


def _on_dropped(states: numpy.ndarray, pid: int, index: int, held: weakref.ref[numpy.ndarray]) -> None:
    _held.pop(id(held), None)
    if os.getpid() == pid:  # the parent may still use what a forked child drops
        states[index] = _FREE


# --- windows ---------------------------------------------------------------------------------------------------------

#: A descriptor: (addresses of the pieces, for each tensor (piece, offset)).
Places = tuple[tuple[tuple[int, int, str, int], ...], tuple[tuple[int, int], ...]]


class Lender:
    """The memory that this process lends. Thread-safe."""

    def __init__(self) -> None:
        self._pieces: dict[int, SharedBytes] = {}
        """By address in this process."""

    def make(self, size: int) -> torch.Tensor:
        """Make a piece, as flat uint8. It is lent as long as a tensor on it lives. Raises LaneUnavailable."""
        shared = SharedBytes(max(1, size))
        array = shared.bytes[:size]  # a new array, which dies with the last tensor on it
        begin = shared.bytes.ctypes.data
        self._pieces[begin] = shared
        weakref.finalize(array, self._drop, begin).atexit = False
        return torch.from_numpy(array)

    def _drop(self, begin: int) -> None:
        if (shared := self._pieces.pop(begin, None)) is not None:
            shared.close(free=True)

    def places(self, tensors: Sequence[torch.Tensor]) -> Places | None:
        """Return where these tensors are, or None unless all of them lie in lent memory."""
        if not (pieces := self._pieces.copy()):
            return None
        used: dict[int, int] = {}
        places = []
        begin, shared = next(iter(pieces.items()))
        for tensor in tensors:
            address = tensor.data_ptr() if tensor.nbytes else begin
            if not begin <= address < begin + shared.address.size:
                for begin, shared in pieces.items():
                    if begin <= address < begin + shared.address.size:
                        break
                else:
                    return None
            if not tensor.is_contiguous():
                return None
            places.append((used.setdefault(begin, len(used)), address - begin))
        return tuple((*pieces[begin].address,) for begin in used), tuple(places)

    def close(self) -> None:
        """Prevent peers from mapping it from now on. Its tensors stay valid."""
        for shared in list(self._pieces.values()):
            shared.close()
        self._pieces.clear()


class Borrower:
    """The memory that peers lend, mapped here for as long as they lend it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._mapped: dict[tuple[str, SharedAddress], numpy.ndarray] = {}
        """By peer and address."""

    def bytes_at(self, peer: str, address: SharedAddress) -> numpy.ndarray:
        """Map a piece, read-only though numpy does not know. Raises LaneUnavailable."""
        key = peer, address
        with self._lock:
            array = self._mapped.get(key)
            if array is None:
                self._unmap_closed()  # a peer that lends a new piece may have dropped others
                array = map_shared(address)
                LIBC.mprotect(array.ctypes.data, array.nbytes, mmap.PROT_READ)  # others read it, too
                self._mapped[key] = array
            return array

    def _unmap_closed(self) -> None:
        for key in [key for key in self._mapped if not is_open(key[1])]:
            del self._mapped[key]

    def mapped(self, peer: str) -> int:
        with self._lock:
            self._unmap_closed()
            return sum(address.size for owner, address in self._mapped if owner == peer)

    def forget(self, peer: str | None = None) -> None:
        """Unmap the memory of that peer, or of all peers if None."""
        with self._lock:
            for key in [key for key in self._mapped if peer is None or key[0] == peer]:
                del self._mapped[key]
