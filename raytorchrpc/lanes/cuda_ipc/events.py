"""Orders the GPU work of two processes, by interprocess events.

Every member has a page of memory that its peers map. It holds one flag for each number of an export, which the receiver
sets when it has copied or discarded the export, and the handles of the member's own events.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from raytorchrpc._compat import torch_internals
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.common.shared_memory import Gone, SharedAddress, SharedBytes, is_gone, map_shared
from raytorchrpc.process.cuda_driver import HANDLE_BYTES
from raytorchrpc.tensors.dtypes import within

#: Numbers for exports; each has a flag byte.
FLAGS = 1 << 16
#: Behind the flags, a second byte for each number: 0, or 1 plus the place of the event behind the receiver's last use.
USES = FLAGS
#: Most streams of a member that receive tensors; each has an event, whose handle lies behind the flags.
_EVENTS = 200
_HANDLES = 2 * FLAGS


def told(descriptor: Any, devices: Sequence[int]) -> Any:
    """Check a descriptor: (number in the sender's page, one of ``devices``, ...). Returns it. Raises ValueError."""
    within(descriptor[0], 1, FLAGS)
    devices.index(descriptor[1])  # raises for a GPU that this lane does not have
    return descriptor


class SharedEvents:
    """The page and events of one member, and those of its peers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.peers: dict[str, SharedAddress] = {}
        """Where the pages of peers are."""
        self._pages: dict[str, numpy.ndarray] = {}
        """By tag, which a restarted peer changes."""
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}
        """By device and CUDA handle: making a Stream object each time takes longer."""
        self._ready: dict[tuple[int, int], tuple[torch.cuda.Event, bytes]] = {}
        """Likewise: the event recorded when tensors of that stream are exported, and its handle."""
        self._done: dict[tuple[int, int], tuple[int, torch.cuda.Event]] = {}
        """Likewise: the event recorded after a copy, and its place in this member's page."""
        self._opened: dict[bytes, torch.cuda.Event] = {}
        """Events of peers, by handle."""

    def open(self) -> SharedAddress:
        """Make the page; returns the address by which peers map it. Raises LaneUnavailable."""
        self._memory = SharedBytes(_HANDLES + _EVENTS * HANDLE_BYTES)
        self.page, self.tag = self._memory.bytes, self._memory.address.tag
        return self._memory.address

    # --- this member's streams -------------------------------------------------------------------------------

    def current(self, device: int) -> tuple[torch.cuda.Stream, int]:
        """Return this thread's current stream on that device, and its CUDA handle."""
        raw = torch_internals.current_cuda_stream(device)
        stream = self._streams.get((device, raw))
        if stream is None:
            stream = self._streams[device, raw] = torch.cuda.current_stream(device)
        return stream, raw

    def ready(self, device: int) -> bytes:
        """Record an event on the current stream of that device; returns its handle."""
        stream, raw = self.current(device)
        known = self._ready.get((device, raw))
        if known is None:
            known = self._ready[device, raw] = _event_on(stream)
        known[0].record(stream)
        return known[1]

    def record(self, device: int, stream: torch.cuda.Stream, raw: int) -> int:
        """Record this stream's event; returns its place in the page, where peers find its handle."""
        key = (device, raw)
        known = self._done.get(key)
        if known is None:
            with self._lock:
                place = len(self._done)
                if place >= _EVENTS:  # the program has hundreds of streams: wait, so that any event suffices
                    stream.synchronize()
                    return 0
                event, handle = _event_on(stream)
                self.page[_handle_at(place)] = numpy.frombuffer(handle, dtype=numpy.uint8)
                known = self._done[key] = (place, event)
        place, event = known
        event.record(stream)
        return place

    def has_recorded(self, device: int, raw: int) -> bool:
        """Whether ``record`` has an event for this stream already, and so takes no lock."""
        return (device, raw) in self._done

    # --- peers -----------------------------------------------------------------------------------------------

    def tag_of(self, peer: str) -> str:
        """Return the tag of a peer's present process. Raises Gone."""
        address = self.peers.get(peer)
        if address is None:
            raise Gone("cuda_ipc", f"member {peer!r} is unknown here, or has left")
        return address.tag

    def is_dead(self, peer: str) -> bool:
        """Whether a peer's process has ended."""
        address = self.peers.get(peer)
        return address is None or is_gone(address)

    def page_of(self, peer: str, tag: str) -> numpy.ndarray:
        """Map the page of one process of a peer. Raises LaneUnavailable or Gone."""
        page = self._pages.get(tag)
        if page is None:
            if self.tag_of(peer) != tag:  # the numbers of its next process mean other tensors
                raise Gone("cuda_ipc", f"the process of member {peer!r} that sent these tensors is gone")
            page = self._pages[tag] = map_shared(self.peers[peer])
        return page

    def opened(self, handle: bytes, device: int) -> torch.cuda.Event:
        """Open a peer's event, for a device of this process. Raises ValueError for what is no handle."""
        event = self._opened.get(handle)
        if event is None:
            if len(handle) != HANDLE_BYTES:
                raise ValueError(f"an event's handle has {len(handle)} bytes")
            event = self._opened[handle] = torch.cuda.Event.from_ipc_handle(torch.device("cuda", device), handle)  # type: ignore[no-untyped-call]
        return event

    def recorded(self, peer: str, tag: str, place: int, device: int) -> torch.cuda.Event | None:
        """Return the event that a peer recorded at that place; None if the peer is gone, and all its work with it."""
        try:
            return self.opened(self.page_of(peer, tag)[_handle_at(place)].tobytes(), device)
        except (LaneUnavailable, RuntimeError):  # before it left, it waited for its GPUs
            return None

    # --- the end ---------------------------------------------------------------------------------------------

    def forget(self, peer: str, keep_page: bool) -> None:
        """Forget a peer. ``keep_page``: it still has shared tensors of this member."""
        address = self.peers.pop(peer, None)
        if address is not None and not keep_page:
            self._pages.pop(address.tag, None)

    def close(self, keep_opened: bool) -> None:
        """Close the page. ``keep_opened``: peers still have shared tensors of this member. Idempotent."""
        if not keep_opened:
            self._opened.clear()
        self._streams.clear()
        self._ready.clear()
        self._done.clear()
        if hasattr(self, "_memory"):
            self._memory.close()


def _event_on(stream: torch.cuda.Stream) -> tuple[torch.cuda.Event, bytes]:
    """Make an event, record it, and return it with its handle for other processes."""
    event: Any = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event, bytes(event.ipc_handle())


def _handle_at(place: int) -> slice:
    begin = _HANDLES + place * HANDLE_BYTES
    return slice(begin, begin + HANDLE_BYTES)
