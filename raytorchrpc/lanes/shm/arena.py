"""Memory that two processes of one host share: an arena of slots, each given away once and given back by a flag.

The arena is a memfd: it has no name in any file system, so nothing is left behind when a process is killed, and
the size of /dev/shm does not limit it. A peer opens it through /proc, which the kernel allows to the same user
only. The first page block holds one state byte a slot; a receiver gives a slot back by clearing its byte, without
a message and without waking anybody.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from bisect import insort
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy
import torch

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.common.shared_memory import LIBC, SharedAddress, SharedBytes, map_shared, open_shared
from raytorchrpc.process import fork
from raytorchrpc.tensors.bounds import within

SLOTS = 1 << 16
_DATA = 1 << 20
_PAGE = 4096
#: A slot's state. A receiver clears it; else it is set, also while the slot is in nobody's hands.
_FREE, _TAKEN = 0, 1
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
#: Up to so many slots out, each taking looks for given-back ones; beyond, only when slots or bytes have doubled.
_REAP_EACH_TIME = 64
_REAP_BYTES = 64 << 20


class Slot(NamedTuple):
    """A piece of the arena: what the sender fills and the receiver owns until it clears the state byte."""

    number: int
    offset: int
    size: int


class Arena:
    """The sender's side. Thread-safe. Memory is used from the front, so that what is warm is used again."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: bytes at most; memory is taken only as it is used."""
        self.capacity = (capacity + _PAGE - 1) // _PAGE * _PAGE
        self._shared = SharedBytes(_DATA + self.capacity)
        self._bytes = self._shared.bytes
        self._bytes[:SLOTS] = _TAKEN
        self._base = self._bytes.ctypes.data
        self._lock = threading.Lock()
        self._holes: list[tuple[int, int]] = [(_DATA, self.capacity)]  # (offset, size), by offset
        self._numbers = list(range(SLOTS - 1, -1, -1))
        self._out: dict[int, tuple[Slot, str]] = {}
        """By number: the slot, and whose it is."""
        self._filling: set[int] = set()
        self._orphans: set[int] = set()
        """Of those, whose owner is gone."""
        self._used = 0
        self._reap_slots, self._reap_bytes = _REAP_EACH_TIME, _REAP_BYTES

    @property
    def address(self) -> SharedAddress:
        """For peers to map."""
        return self._shared.address

    @property
    def span(self) -> tuple[int, int]:
        """(address, bytes) of its mapping in this process."""
        return self._base, self._bytes.nbytes

    @property
    def used(self) -> int:
        """Bytes given away and not yet known to be back."""
        return self._used

    def in_use(self) -> int:
        """Bytes given away, after a look at what is back."""
        with self._lock:
            self._reap()
            return self._used

    def crowded(self) -> bool:
        """Whether more than half is out, of its bytes or of its slots."""
        if not self._more_than_half():
            return False
        with self._lock:
            self._reap()
            return self._more_than_half()

    def _more_than_half(self) -> bool:
        return self._used * 2 > self.capacity or len(self._out) * 2 > SLOTS

    def take(self, size: int, owner: str) -> Slot | None:
        """A slot of at least ``size`` bytes for ``owner``, a process, to give back; None if the arena is full.

        It is to be filled, and then ``filled`` or ``cancel`` to be called: until then nobody else gets it.
        """
        wanted = max(_PAGE, (size + _PAGE - 1) // _PAGE * _PAGE)
        with self._lock:
            out = len(self._out)
            if out <= _REAP_EACH_TIME or out >= self._reap_slots or self._used >= self._reap_bytes:
                self._reap()
            slot = self._carve(wanted, owner)
            if slot is None:
                self._reap()
                slot = self._carve(wanted, owner)
            return slot

    def _carve(self, wanted: int, owner: str) -> Slot | None:
        if not self._numbers:
            return None
        for place, (offset, size) in enumerate(self._holes):
            if size >= wanted:
                if size == wanted:
                    del self._holes[place]
                else:
                    self._holes[place] = (offset + wanted, size - wanted)
                slot = Slot(self._numbers.pop(), offset, wanted)
                self._bytes[slot.number] = _TAKEN
                self._out[slot.number] = (slot, owner)
                self._filling.add(slot.number)
                self._used += wanted
                return slot
        return None

    def _reap(self) -> None:
        for index in self._given_back():
            self._put_back(index)
        self._reap_slots = max(_REAP_EACH_TIME, 2 * len(self._out))
        self._reap_bytes = max(_REAP_BYTES, 2 * self._used)

    def _given_back(self) -> list[int]:
        if len(self._out) <= 4 * _REAP_EACH_TIME:
            return [index for index in self._out if self._bytes[index] == _FREE]
        cleared: list[int] = numpy.flatnonzero(self._bytes[:SLOTS] == _FREE).tolist()  # looked at all at once
        return [index for index in cleared if index in self._out]

    def _put_back(self, index: int) -> None:
        slot, _ = self._out.pop(index)
        self._filling.discard(index)
        self._orphans.discard(index)
        self._bytes[index] = _TAKEN
        self._numbers.append(index)
        self._used -= slot.size
        insort(self._holes, (slot.offset, slot.size))
        place = self._holes.index((slot.offset, slot.size))
        for left in (place, place - 1):  # join the neighbours
            if 0 <= left < len(self._holes) - 1:
                (offset, size), (following, more) = self._holes[left : left + 2]
                if offset + size == following:
                    self._holes[left : left + 2] = [(offset, size + more)]

    def address_of(self, offset: int) -> int:
        """Where an offset lies in this process's memory."""
        return self._base + offset

    def tensor(self, offset: int, size: int) -> torch.Tensor:
        """Those bytes, to be filled."""
        return torch.from_numpy(self._bytes[offset : offset + size])

    def filled(self, slots: Sequence[Slot]) -> bool:
        """Nobody writes there any more. False if the owner is gone: they are taken back then."""
        with self._lock:
            self._filling.difference_update(slot.number for slot in slots)
            orphans = self._orphans.intersection(slot.number for slot in slots) if self._orphans else ()
            for index in orphans:
                self._put_back(index)
        return not orphans

    def cancel(self, slot: Slot) -> None:
        """Take back a slot that was never sent."""
        with self._lock:
            found = self._out.get(slot.number)
            if found is not None and found[0] is slot:  # not reclaimed, and given away again, meanwhile
                self._put_back(slot.number)

    def reclaim(self, owner: str) -> None:
        """Take back whatever a process that has ended still had; what is being filled for it, as soon as that is over:
        whoever got it next would find the rest of it in his tensors.
        """
        with self._lock:
            for index in [index for index, (_, whose) in self._out.items() if whose == owner]:
                if index in self._filling:
                    self._orphans.add(index)
                else:
                    self._put_back(index)

    def close(self) -> None:
        """Let go of the arena. Receivers keep what they still use: the memory goes with its last mapping."""
        with self._lock:
            self._shared.close()
            self._out.clear()
            self._holes.clear()
            self._numbers.clear()  # nothing can be taken any more


class PeerArena:
    """The receiver's side of one peer's arena. Thread-safe."""

    def __init__(self, address: SharedAddress) -> None:
        """Raises LaneUnavailable."""
        self._address = address
        self._bytes = map_shared(address)
        self._pid = os.getpid()
        self._held: dict[int, weakref.ref[numpy.ndarray]] = {}
        self.span: tuple[int, int] = (self._bytes.ctypes.data, self._bytes.nbytes)
        """(address, bytes) of its mapping in this process."""
        fork.register(self)

    def after_fork(self) -> tuple[()]:
        """See forking.ForkAware. What this process writes from now on, its parent is not to see."""
        with contextlib.suppress(OSError, LaneUnavailable):  # the owner is gone: nothing to map it from
            fd = open_shared(self._address)
            private = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
            LIBC.mmap(*self.span, mmap.PROT_READ | mmap.PROT_WRITE, private, fd, 0)
            os.close(fd)
        return ()

    def view(self, index: int, offset: int, size: int) -> numpy.ndarray:
        """The slot's bytes, private and writable. The slot is given back when nothing uses them any more.

        Raises OutOfBounds.
        """
        within(index, 1, SLOTS)
        within(offset - _DATA, size, self._bytes.nbytes - _DATA)
        view = self._bytes[offset : offset + size]
        self._held[index] = weakref.ref(view, partial(_given_back, self._held, self._bytes, self._pid, index))
        return view

    def give_back(self, index: int) -> None:
        """Give a slot back that was not used. Raises OutOfBounds."""
        within(index, 1, SLOTS)
        if os.getpid() == self._pid:
            self._bytes[index] = _FREE


def _given_back(
    held: dict[int, weakref.ref[numpy.ndarray]], states: numpy.ndarray, pid: int, index: int, _: object
) -> None:
    held.pop(index, None)
    if os.getpid() == pid:  # what a forked child drops, its parent may still use
        states[index] = _FREE
