"""Shared memory that its owner lends for reading: weights, for instance, that many peers pull by one copy each.

Unlike a slot of an arena it has no receiver that returns it. The owner finds out by other means when all have read it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import numpy
import torch

from raytorchrpc.lanes.common.shared_memory import SharedAddress, SharedBytes, is_open, map_shared

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
        found = []
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
            found.append((used.setdefault(begin, len(used)), address - begin))
        return tuple((*pieces[begin].address,) for begin in used), tuple(found)

    def close(self) -> None:
        """Prevent peers from mapping it from now on. Its tensors stay valid."""
        for shared in list(self._pieces.values()):
            shared.close()
        self._pieces.clear()


class Borrower:
    """The memory that peers lend, mapped here for as long as they lend it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[tuple[str, SharedAddress], numpy.ndarray] = {}
        """By peer and address."""

    def bytes_at(self, peer: str, address: SharedAddress) -> numpy.ndarray:
        """Map a piece. Raises LaneUnavailable."""
        key = peer, address
        with self._lock:
            array = self._mapped.get(key)
            if array is None:
                self._unmap_closed()  # a peer that lends a new piece may have dropped others
                array = self._mapped[key] = map_shared(address)
            return array

    def _unmap_closed(self) -> None:
        for key in [key for key in self._mapped if not is_open(key[1])]:
            del self._mapped[key]

    def mapped(self, peer: str) -> int:
        """Bytes of the memory that a peer lends and that is mapped here."""
        with self._lock:
            self._unmap_closed()
            return sum(address.size for owner, address in self._mapped if owner == peer)

    def forget(self, peer: str | None = None) -> None:
        """Unmap the memory of that peer, or of all peers if None."""
        with self._lock:
            for key in [key for key in self._mapped if peer is None or key[0] == peer]:
                del self._mapped[key]
