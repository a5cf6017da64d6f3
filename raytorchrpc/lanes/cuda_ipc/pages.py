"""Words in shared host memory by which the processes and the GPUs of two members order their work.

Every member has a page, which its peers map. GPUs write to it from their streams, CPUs read and write it as well. So
either end can stop waiting for the other, which CUDA's own events do not allow: a process that is killed leaves its
events unset, and streams that wait for them wait for ever.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import numpy
import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost, RpcTimeout
from raytorchrpc.lanes.common.shared_memory import Gone, SharedAddress, SharedBytes, is_gone, map_shared
from raytorchrpc.process import fork, threads
from raytorchrpc.process.cuda_driver import Driver, driver
from raytorchrpc.process.locks import Lock

#: Numbers for exports, and the serial numbers of the exports that have had one: as many as a word has values.
NUMBERS, SERIALS = 1 << 14, 1 << 32
#: States of an export, for its sender: in flight; discarded; read, or to be read by work that is queued.
OUT, UNUSED, QUEUED = 1, 2, 3
#: Three words for each number: see ``Page.ready``, ``copied`` and ``used``. Then two bytes for each.
_WORDS, _BYTES = 3, 2
_WORD = 4
PAGE_BYTES = NUMBERS * (_WORDS * _WORD + _BYTES)
#: A wait for another process's GPU: its shortest and longest pause, and how often to check that the process lives
#: (seconds).
_SHORT_S, _LONG_S, _CHECK_S = 20e-6, 1e-3, 10e-3


class SharedWords:
    """Host memory whose words GPUs write. Registered with CUDA when one first does, so that a member that exchanges no
    CUDA tensors needs no CUDA context.
    """

    def __init__(self, memory: numpy.ndarray, devices: Sequence[int]) -> None:
        """``devices``: those of this process's GPUs that write to it."""
        self._memory, self._devices = memory, devices
        self._lock = Lock()
        self._address = 0

    def on_gpus(self) -> int:
        """Return its address for the GPUs. Takes a lock the first time only. Raises LaneUnavailable."""
        if not self._address:
            with self._lock, driver().on(self._devices[0]):
                if not self._address:
                    driver().register(self._memory.ctypes.data, self._memory.nbytes)
                    self._address = driver().address_on_gpus(self._memory.ctypes.data)
        return self._address

    def __del__(self) -> None:
        if not self._address or fork.forked():
            return
        with contextlib.suppress(Exception):  # the process may be ending
            for index in self._devices:
                torch.cuda.synchronize(index)  # rare: one may still have to write to it
            with driver().on(self._devices[0]):
                driver().unregister(self._memory.ctypes.data)


class Word:
    """One word of each export of a page. A GPU sets it to the export's serial number."""

    def __init__(self, words: numpy.ndarray, shared: SharedWords, offset: int) -> None:
        """``offset``: of the words in ``shared`` (bytes)."""
        self._words, self._shared, self._offset = words, shared, offset

    def has(self, number: int, serial: int) -> bool:
        """Whether the word has reached this serial number, in the cyclic order of 32 bits."""
        return (int(self._words[number]) - serial) % SERIALS < SERIALS // 2

    def write(self, number: int, serial: int, stream: int, cuda: Driver) -> None:
        """Have a stream of the GPU whose context is current set the word, behind all that is queued on it."""
        cuda.write(self._shared.on_gpus() + self._offset + _WORD * number, serial, stream)

    def wait(self, number: int, serial: int, stream: int) -> None:
        """Have such a stream wait until the word has reached this serial number."""
        driver().wait(self._shared.on_gpus() + self._offset + _WORD * number, serial, stream)

    def set(self, number: int, serial: int) -> None:
        """Set the word from the CPU, unless it has been: streams that wait for it go on."""
        if not self.has(number, serial):
            self._words[number] = serial


class Page:
    """One member's exports, as its process and that of a peer see them."""

    def __init__(self, memory: numpy.ndarray, devices: Sequence[int]) -> None:
        """``devices``: see SharedWords."""
        self.shared = SharedWords(memory, devices)
        words, flags = memory[: _WORDS * _WORD * NUMBERS].view(numpy.uint32), memory[_WORDS * _WORD * NUMBERS :]
        self.ready, self.copied, self.used = (
            Word(words[at : at + NUMBERS], self.shared, _WORD * at) for at in range(0, _WORDS * NUMBERS, NUMBERS)
        )
        """By the sender's GPU: the tensors can be read. By the receiver's: it has read them, or released shared ones;
        the method that they were passed to has used them.
        """
        self.state = flags[:NUMBERS]
        self.is_used = flags[NUMBERS:]
        """Whether the receiver's GPU will set ``used``."""


class Pages:
    """The page of one member, and those of its peers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.peers: dict[str, SharedAddress] = {}
        """Where the pages of peers are."""
        self._pages: dict[str, Page] = {}
        """By tag, which a restarted peer changes."""
        self._is_closed = False

    def open(self, devices: Sequence[int]) -> SharedAddress:
        """Make the page, for these GPUs; returns the address by which peers map it. Raises LaneUnavailable."""
        if not driver().has_words:
            raise LaneUnavailable("cuda_ipc", "the CUDA driver is older than that of CUDA 11.7: install a newer one")
        self._devices, self._memory = devices, SharedBytes(PAGE_BYTES)
        self.page, self.tag = Page(self._memory.bytes, devices), self._memory.address.tag
        return self._memory.address

    def tag_of(self, peer: str) -> str:
        """Return the tag of a peer's present process. Raises Gone."""
        address = self.peers.get(peer)
        if address is None:
            raise Gone("cuda_ipc", f"member {peer!r} is unknown here, or has left")
        return address.tag

    def is_dead(self, peer: str) -> bool:
        address = self.peers.get(peer)
        return address is None or is_gone(address)

    def of(self, peer: str, tag: str) -> Page:
        """Map the page of one process of a peer. Raises LaneUnavailable or Gone."""
        page = self._pages.get(tag)
        if page is None:
            if self.tag_of(peer) != tag:  # the numbers of its next process mean other tensors
                raise Gone("cuda_ipc", f"the process of member {peer!r} that sent these tensors is gone")
            with self._lock:
                if (page := self._pages.get(tag)) is None:
                    page = self._pages[tag] = Page(map_shared(self.peers[peer]), self._devices)
        return page

    def wait_until_ready(self, peer: str, tag: str, number: int, serial: int, timeout_s: float) -> None:
        """Block until the GPU of one process of a peer has computed what it exported under that number.

        Raises PeerLost if that process ends before, or is no longer a member, and RpcTimeout.
        """
        ready = self.of(peer, tag).ready
        began = checked = time.monotonic()
        while not ready.has(number, serial):
            now = time.monotonic()
            if now - checked > _CHECK_S:
                checked = now
                is_member = not self._is_closed and (address := self.peers.get(peer)) is not None and address.tag == tag
                if (not is_member or self.is_dead(peer)) and not ready.has(number, serial):
                    raise PeerLost(peer, "its process ended, or left the group, before its GPU had computed them")
                if now - began > timeout_s:
                    raise RpcTimeout(f"the GPU of {peer!r} has not computed its tensors within {timeout_s:.3g} s")
            time.sleep(min(_LONG_S, max(_SHORT_S, (now - began) / 8)))

    def forget(self, peer: str, keep_page: bool) -> None:
        """Forget a peer. ``keep_page``: it still has shared tensors of this member."""
        address = self.peers.pop(peer, None)
        if address is None or keep_page or address.tag not in self._pages:
            return
        last = [self._pages.pop(address.tag)]
        threads.start(last.clear, name="raytorchrpc-cuda-page")  # may wait for a GPU

    def close(self) -> None:
        """Prevent peers from mapping the page from now on, and forget theirs. Idempotent."""
        self._is_closed = True
        self._pages.clear()
        if hasattr(self, "_memory"):
            self._memory.close()
