"""The tensors that a member has exported over cuda_ipc."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.common.exports import Janitor
from raytorchrpc.lanes.common.shared_memory import SharedAddress, is_gone
from raytorchrpc.lanes.cuda_ipc.pages import NUMBERS, OUT, QUEUED, SERIALS, UNUSED, Pages
from raytorchrpc.process.cuda_driver import Driver
from raytorchrpc.process.locks import Lock
from raytorchrpc.tensors.dtypes import within

#: Pause between two rounds of the janitor; the same while only shared tensors are out, which may stay long (seconds).
_PAUSE_S, _SHARED_PAUSE_S = 0.02, 0.5


class Offer(NamedTuple):
    """The descriptor of an export."""

    number: int
    """In the sender's page."""
    target: int
    """The receiver's GPU."""
    serial: int
    """Which of the exports that have had this number it is."""
    places: Sequence[tuple[Any, ...]]
    """Of each piece: handle of its allocation, offset in it, bytes, indices of its tensors (shared: its strides)."""
    shared: bool
    tag: str
    """Of the sender's process."""

    @staticmethod
    def checked(descriptor: Any, devices: Sequence[int]) -> Offer:
        """``devices``: of this lane. Raises ValueError or TypeError."""
        offer = Offer(*descriptor)
        within(offer.number, 1, NUMBERS)
        within(offer.serial, 0, SERIALS)
        devices.index(offer.target)  # raises for a GPU that this lane does not have
        return offer


@dataclass(eq=False)
class Exported:
    """One export in flight."""

    peer: str
    address: SharedAddress | None
    """The peer's page."""
    tensors: Sequence[torch.Tensor]
    """The exported or packed tensors. They are kept until read, and shared ones until released."""
    shared: bool
    serial: int = 0

    @property
    def device(self) -> int:
        return self.tensors[0].get_device()


class Exports:
    """Exports by number, each with its words in this member's page. Thread-safe."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._lock = Lock()
        self._last = 0
        self._serials = [0] * NUMBERS
        """The serial number of the last export of each number."""
        self._barred: set[int] = set()
        """Numbers that a process which left the group may still write to."""
        self._out: dict[int, Exported] = {}
        self._janitor = Janitor("raytorchrpc-cuda-ipc", self._reclaim)

    def __len__(self) -> int:
        return len(self._out)

    def add(
        self, peer: str, tensors: Sequence[torch.Tensor], shared: bool, stream: int, cuda: Driver
    ) -> tuple[int, Exported]:
        """Keep tensors, which are ready behind what is queued on ``stream``, by ``cuda``; returns their number.

        Raises LaneUnavailable if all numbers are in use.
        """
        out, page = Exported(peer, self._pages.peers.get(peer), tensors, shared), self._pages.page
        with self._lock:
            number = self._free_number()
            out.serial = self._serials[number] = (self._serials[number] + 1) % SERIALS
            page.state[number], page.is_used[number] = OUT, False
            self._out[number] = out
        try:
            page.ready.write(number, out.serial, stream, cuda)
        except BaseException:
            page.ready.set(number, out.serial)
            self.cancel(number)
            raise
        self._janitor.wake(hurry=not shared)
        return number, out

    def _free_number(self) -> int:
        """The next number that no GPU may still write to. The caller holds the lock."""
        ready = self._pages.page.ready
        for number in ((self._last + more) % NUMBERS for more in range(1, NUMBERS + 1)):
            free = number not in self._out and number not in self._barred
            if free and ready.has(number, self._serials[number]):
                self._last = number
                return number
        raise LaneUnavailable("cuda_ipc", f"{len(self._out)} messages with tensors are in flight")

    def cancel(self, number: int) -> None:
        """Forget an export that was not sent."""
        with self._lock:
            self._forget(number)

    def _forget(self, number: int) -> None:
        """Release an export, and all that waits for its receiver. The caller holds the lock."""
        out = self._out.pop(number, None)
        if out is not None:
            page = self._pages.page
            page.copied.set(number, out.serial)
            page.used.set(number, out.serial)

    def reap(self) -> None:
        """Release the tensors that have been read, or discarded. Does not wait for the GPU."""
        if not self._out:
            return
        page = self._pages.page
        with self._lock:
            for number, out in list(self._out.items()):
                state = page.state[number]
                if state == UNUSED or (state == QUEUED and page.copied.has(number, out.serial)):
                    self._forget(number)

    # A wait is queued without the lock: it blocks while a stream is full, and it is the janitor that ends the waits for
    # a process that is gone. No word is ever set back, so a wait for an export that is released meanwhile ends at once.

    def fence(self, device: int, stream: int) -> None:
        """Have a stream wait for the reads of all exports from that GPU that have been queued."""
        self.reap()
        page = self._pages.page
        with self._lock:
            on_device = [(number, out.serial) for number, out in self._out.items() if out.device == device]
        for number, serial in on_device:
            if page.state[number] == QUEUED:
                page.copied.wait(number, serial, stream)

    def finish(self, number: int, out: Exported, stream: int) -> None:
        """The call is over: have a stream wait until the receiver has read, or its method has used, the tensors."""
        page = self._pages.page
        with self._lock:
            if self._out.get(number) is not out:
                return
            is_queued = page.state[number] == QUEUED
            if is_queued and page.copied.has(number, out.serial):
                self._forget(number)
                return
            is_used = bool(page.is_used[number])
        if is_queued or is_used:
            (page.copied if is_queued else page.used).wait(number, out.serial, stream)

    def _reclaim(self, census: bool) -> float | None:
        """See Janitor. Needed for results, whose receivers confirm nothing."""
        self.reap()
        only_shared = all(out.shared for out in list(self._out.values()))
        if only_shared or census:
            self._drop_dead()
        if not self._out:
            return None
        return _SHARED_PAUSE_S if only_shared else _PAUSE_S

    def _drop_dead(self) -> None:
        with self._lock:
            held = list(self._out.items())
        gone = {address for address in {out.address for _, out in held} if address is not None and is_gone(address)}
        with self._lock:
            for number, out in held:
                if out.address in gone and self._out.get(number) is out:
                    self._forget(number)

    def drop(self, peer: str, *, dead: bool) -> bool:
        """Release what was exported to a peer that left. Returns whether shared tensors remain, which a living peer
        may still use.
        """
        with self._lock:
            of_peer = [number for number, out in self._out.items() if out.peer == peer]
            kept = [number for number in of_peer if self._out[number].shared and not dead]
            released = set(of_peer).difference(kept)
            if not dead:
                self._barred.update(released)
            for number in released:
                self._forget(number)
        return bool(kept)

    def close(self) -> None:
        """Release everything but shared tensors; those stay until their receivers release them."""
        with self._lock:
            for number in [number for number, out in self._out.items() if not out.shared]:
                self._forget(number)
        self._janitor.close()
