"""The tensors that a member has exported over cuda_ipc, and the interprocess events that order two GPUs' work on them.

Every member has a page of memory that its peers map. It holds one flag for each number of an export, which the receiver
sets when it has copied or discarded the export, and the handles of the member's own events.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch

from raytorchrpc._compat import torch_internals
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.common.exports import Janitor
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
#: States of a flag byte: in flight; discarded; copied (plus the place of the event that follows the copy).
OUT, UNUSED, COPIED = 1, 2, 16
#: Pause between two rounds of the janitor; the same while only shared tensors are out, which may stay long (seconds).
_PAUSE_S, _SHARED_PAUSE_S = 0.02, 0.5


class Offer(NamedTuple):
    """The descriptor of an export."""

    number: int
    """In the sender's page."""
    target: int
    """The receiver's GPU."""
    ready: bytes
    """Handle of the event after which the tensors can be read."""
    places: Sequence[tuple[Any, ...]]
    """Of each piece: handle of its allocation, offset in it, bytes, indices of its tensors (shared: its strides)."""
    shared: bool
    tag: str
    """Of the sender's process."""

    @staticmethod
    def checked(descriptor: Any, devices: Sequence[int]) -> Offer:
        """``devices``: of this lane. Raises ValueError or TypeError."""
        offer = Offer(*descriptor)
        within(offer.number, 1, FLAGS)
        devices.index(offer.target)  # raises for a GPU that this lane does not have
        return offer


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
        """Whether ``record`` takes no lock, because it has an event for this stream."""
        return (device, raw) in self._done

    # --- peers -----------------------------------------------------------------------------------------------

    def tag_of(self, peer: str) -> str:
        """Return the tag of a peer's present process. Raises Gone."""
        address = self.peers.get(peer)
        if address is None:
            raise Gone("cuda_ipc", f"member {peer!r} is unknown here, or has left")
        return address.tag

    def is_dead(self, peer: str) -> bool:
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


# --- exports ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Exported:
    """One export in flight."""

    peer: str
    address: SharedAddress | None
    """The peer's page."""
    tensors: Sequence[torch.Tensor]
    """The exported or packed tensors. They are kept until copied, and shared ones until released."""
    shared: bool
    flag: int = OUT
    """As last read."""

    @property
    def device(self) -> int:
        return self.tensors[0].get_device()


class Exports:
    """Exports by number. Each number has a flag in this member's page, which the receiver sets. Thread-safe."""

    def __init__(self, events: SharedEvents) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._numbers = itertools.cycle(range(FLAGS))
        self._out: dict[int, Exported] = {}
        self._freeing: dict[int, torch.cuda.Stream] = {}
        self._janitor = Janitor("raytorchrpc-cuda-ipc", self._reclaim)

    def __len__(self) -> int:
        return len(self._out)

    def open(self, devices: Sequence[int]) -> None:
        """``devices``: the GPUs that tensors are exported from."""
        self._freeing = {index: torch.cuda.Stream(index) for index in devices}  # type: ignore[no-untyped-call]

    def add(self, peer: str, tensors: Sequence[torch.Tensor], shared: bool) -> tuple[int, Exported]:
        """Keep tensors; returns their number. Raises LaneUnavailable if all numbers are in use."""
        out = Exported(peer, self._events.peers.get(peer), tensors, shared)
        with self._lock:
            if len(self._out) >= FLAGS - 1:
                raise LaneUnavailable("cuda_ipc", f"{FLAGS - 1} messages with tensors are in flight")
            number = next(self._numbers)
            while number in self._out:
                number = next(self._numbers)
            self._events.page[number] = OUT
            self._events.page[USES + number] = 0
            self._out[number] = out
        self._janitor.wake(hurry=not shared)
        return number, out

    def cancel(self, number: int) -> None:
        """Forget an export that was not sent."""
        with self._lock:
            self._out.pop(number, None)

    def reap(self) -> None:
        """Release the tensors that have been fetched. Does not wait for the GPU."""
        if not self._out:
            return
        with self._lock:
            flags = self._events.page
            for number in [number for number in self._out if flags[number] != OUT]:
                out = self._out.pop(number)
                out.flag = int(flags[number])
                # Have the allocator reuse the memory only after the receiver's copy, on the GPU.
                self._order_after(out, out.flag - COPIED, self._freeing[out.device])

    def fence(self, device: int) -> None:
        self.reap()
        with self._lock:  # a thread that reaps at the same time has queued its part as well
            freeing = self._freeing.get(device)
            if freeing is not None:
                self._events.current(device)[0].wait_stream(freeing)

    def finish(self, number: int, out: Exported) -> None:
        """The call is over: order what this thread queues from now on after the receiver's copy."""
        with self._lock:
            flag = int(self._events.page[number])
            if self._out.get(number) is out and flag != OUT:
                del self._out[number]
                out.flag = flag
            place = int(self._events.page[USES + number]) - 1 if out.flag == OUT else out.flag - COPIED
        self._order_after(out, place, self._events.current(out.device)[0])

    def _order_after(self, out: Exported, place: int, stream: torch.cuda.Stream) -> None:
        """Order a stream after the receiver's event at that place; a negative place means that there is none."""
        tag = out.address.tag if out.address is not None else ""
        event = self._events.recorded(out.peer, tag, place, out.device) if place >= 0 else None
        if event is not None:
            event.wait(stream)
            for tensor in out.tensors:
                tensor.record_stream(stream)

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
                    del self._out[number]

    def drop(self, peer: str, *, dead: bool) -> bool:
        """Release what was exported to a peer that left. Returns whether shared tensors remain, which a living peer
        may still use.
        """
        with self._lock:
            of_peer = [number for number, out in self._out.items() if out.peer == peer]
            kept = [number for number in of_peer if self._out[number].shared and not dead]
            for number in set(of_peer).difference(kept):
                del self._out[number]
        return bool(kept)

    def close(self) -> None:
        """Release everything but shared tensors; those stay until their receivers release them."""
        with self._lock:
            self._out = {number: out for number, out in self._out.items() if out.shared}
        self._janitor.close()
