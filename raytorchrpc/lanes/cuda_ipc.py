"""The cuda_ipc lane: CUDA tensors to a process of the same host, whose GPU may be another or the same.

The receiver maps the sender's allocation once and copies out of it, over NVLink or within the GPU, on the stream that
will use the data. Nobody's CPU waits for a GPU: that stream waits for what the sender had queued (an interprocess
event), and the sender's memory is handed out again only after the copy (another).

It works under Ray's masking, where each process sees only its own GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy
import torch

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes import _pieces
from raytorchrpc.lanes._arena import SharedAddress, SharedBytes, is_gone, map_shared
from raytorchrpc.lanes._cuda_driver import HANDLE_BYTES, driver
from raytorchrpc.lanes.base import Export, PeerAddress, Shape, TensorCapabilities, TensorLane

#: Mapped allocations of peers kept open, the least recently used closed beyond that.
MAPPINGS = 256
_FLAGS = 1 << 16
#: Streams of a member that receive tensors; each has an event, whose handle lies behind the flags.
_EVENTS = 200
_OUT, _UNUSED, _COPIED = 1, 2, 16  # a flag byte: on its way; not wanted; copied, plus the place of the event
#: While results wait to be fetched, their sender looks this often whether they have been (seconds).
_JANITOR_S = 0.02
#: It looks whether the peers are still alive every so many times.
_LOOKS_PER_CENSUS = 50


@dataclass(eq=False)
class _Out:
    """An export on its way."""

    peer: str
    tensors: Sequence[torch.Tensor]
    """Kept until copied: the exported ones, or the packed ones."""
    flag: int = _OUT
    """As last seen."""


class CudaIpcLane(TensorLane):
    """One per member. ``export`` does not copy; the memory is kept, and CUDA keeps the order."""

    name: ClassVar[str] = "cuda_ipc"
    capabilities: ClassVar[TensorCapabilities] = TensorCapabilities(
        devices=frozenset({"cuda"}), one_sided=True, same_host=True, zero_copy=False
    )

    def __init__(self, devices: Sequence[int]) -> None:
        """``devices``: local CUDA indices that tensors come from or arrive on."""
        self._devices = tuple(devices)
        self._lock = threading.Lock()
        self._peers: dict[str, SharedAddress] = {}
        self._numbers = itertools.cycle(range(_FLAGS))
        self._out: dict[int, _Out] = {}
        self._ready: dict[tuple[int, int], torch.cuda.Event] = {}
        """By device and stream: recorded when tensors of that stream are exported."""
        self._copied: dict[tuple[int, int], tuple[int, torch.cuda.Event]] = {}
        """Likewise: recorded after a copy; with its place in this member's page."""
        self._handles: dict[int, bytes] = {}
        self._pages: dict[str, numpy.ndarray] = {}
        self._events: dict[bytes, torch.cuda.Event] = {}
        self._mapped: OrderedDict[bytes, int] = OrderedDict()
        self._woken = threading.Event()
        self._closed = False
        self._janitor: threading.Thread | None = None

    def open(self) -> SharedAddress:
        driver()
        self._page = SharedBytes(_FLAGS + _EVENTS * HANDLE_BYTES)
        self._freeing = {index: torch.cuda.Stream(index) for index in self._devices}  # type: ignore[no-untyped-call]
        return self._page.address

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        self._peers.update((peer.peer, peer.address) for peer in peers)

    # --- sending -------------------------------------------------------------------------------------------

    def export(self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[int, int]) -> Export:
        self.tidy()
        source = tensors[0].device.index
        if any(tensor.device.index != source for tensor in tensors):
            raise LaneUnavailable(self.name, "one message with tensors of several GPUs")
        if source not in devices:
            raise LaneUnavailable(self.name, f"cuda:{source} is not in the device map")
        cuda = driver()
        cuda.enter(source)
        pieces = _pieces.pieces([(tensor.dtype, tensor.nbytes) for tensor in tensors])
        kept = [_pieces.joined([tensors[index] for index in piece]) for piece in pieces]
        places = [(*self._place(tensor), piece) for tensor, piece in zip(kept, pieces, strict=True)]
        out = _Out(peer, kept)
        number = self._take_number(out)
        stream = torch.cuda.current_stream(source)
        key = (source, stream.cuda_stream)
        ready = self._ready.get(key)
        if ready is None:
            ready = self._ready[key] = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        ready.record(stream)
        descriptor = (number, devices[source], bytes(ready.ipc_handle()), tuple(places))  # type: ignore[no-untyped-call]
        return _IpcExport(self, number, out, descriptor)

    def _place(self, tensor: torch.Tensor) -> tuple[bytes, int, int]:
        """(allocation's handle, offset in it, bytes)."""
        if not tensor.numel():
            return b"", 0, 0
        pointer = tensor.data_ptr()
        base, identity = driver().allocation(pointer)
        handle = self._handles.get(identity)
        if handle is None:  # an allocation freed and made again has another identity
            if len(self._handles) > 4 * MAPPINGS:
                self._handles.clear()
            handle = self._handles[identity] = driver().handle_of(base)
        return handle, pointer - base, tensor.nbytes

    def _take_number(self, out: _Out) -> int:
        with self._lock:
            if len(self._out) >= _FLAGS - 1:
                raise LaneUnavailable(self.name, "too many tensors on their way")
            number = next(number for number in self._numbers if number not in self._out)
            self._page.bytes[number] = _OUT
            self._out[number] = out
            if self._janitor is None and not self._closed:
                self._janitor = threading.Thread(target=self._look_after, name="raytorchrpc-cuda-ipc", daemon=True)
                self._janitor.start()
            self._woken.set()
            return number

    def tidy(self) -> None:
        """Let go of what has been fetched. Does not wait for the GPU."""
        if not self._out:
            return
        with self._lock:
            flags = self._page.bytes
            done = [(number, int(flags[number])) for number in self._out if flags[number] != _OUT]
            released = []
            for number, flag in done:
                out = self._out.pop(number)
                out.flag = flag
                released.append(out)
        for out in released:
            self._free_after_copy(out)

    def finish(self, number: int, out: _Out) -> None:
        """The call is over: what this thread queues from now on comes after the receiver's copy."""
        with self._lock:
            flag = int(self._page.bytes[number])
            if self._out.get(number) is out and flag != _OUT:
                del self._out[number]
                out.flag = flag
        event = self._copied_event(out)
        if event is not None:
            stream = torch.cuda.current_stream(out.tensors[0].device)
            event.wait(stream)
            for tensor in out.tensors:
                tensor.record_stream(stream)

    def _free_after_copy(self, out: _Out) -> None:
        """Make the allocator wait, on the GPU, for the receiver's copy before it hands the memory out again."""
        event = self._copied_event(out)
        if event is not None:
            stream = self._freeing[out.tensors[0].device.index]
            event.wait(stream)
            for tensor in out.tensors:
                tensor.record_stream(stream)

    def _copied_event(self, out: _Out) -> torch.cuda.Event | None:
        """What the receiver recorded after its copy; None if it made none."""
        if out.flag < _COPIED or out.peer not in self._peers:
            return None
        begin = _FLAGS + (out.flag - _COPIED) * HANDLE_BYTES
        handle = self._page_of(out.peer)[begin : begin + HANDLE_BYTES].tobytes()
        return self._opened(handle, out.tensors[0].device.index)

    def _look_after(self) -> None:
        """Results nobody answers for: look from time to time, while there are any."""
        while not self._closed:
            self._woken.wait()
            looks = itertools.count(1)
            while self._out and not self._closed:
                self.tidy()
                if next(looks) % _LOOKS_PER_CENSUS == 0:
                    self._drop_for_the_dead()
                threading.Event().wait(_JANITOR_S)
            with self._lock:
                if not self._out:
                    self._woken.clear()

    def _drop_for_the_dead(self) -> None:
        for peer, address in list(self._peers.items()):
            if is_gone(address):
                with self._lock:
                    for number in [number for number, out in self._out.items() if out.peer == peer]:
                        del self._out[number]

    def cancel(self, number: int) -> None:
        """Take back an export that was not sent."""
        with self._lock:
            self._out.pop(number, None)

    # --- receiving -----------------------------------------------------------------------------------------

    def fetch(self, peer: str, descriptor: Any, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        number, target, ready, places = descriptor
        device = torch.device("cuda", target)
        driver().enter(target)
        flags = self._page_of(peer)
        # On the user's own stream: its memory is there, and what it queues next needs the data anyway.
        stream = torch.cuda.current_stream(device)
        self._opened(ready, target).wait(stream)
        arrived: dict[int, torch.Tensor] = {}
        for handle, offset, size, piece in places:
            mine = [shapes[index] for index in piece]
            tensor = _pieces.room(mine, device)
            if size:
                driver().copy(tensor.data_ptr(), self._map(handle, device) + offset, size, stream.cuda_stream)
            arrived.update(zip(piece, _pieces.split(tensor, mine), strict=True))
        flags[number] = _COPIED + self._record_copied(target, stream)
        return [arrived[index] for index in range(len(shapes))]

    def _record_copied(self, device: int, stream: torch.cuda.Stream) -> int:
        """Record this stream's event; returns its place in the page, where the sender finds its handle."""
        key = (device, stream.cuda_stream)
        known = self._copied.get(key)
        if known is None:
            with self._lock:
                place = len(self._copied)
                if place >= _EVENTS:  # a program with hundreds of streams: wait, so that any event will do
                    stream.synchronize()
                    return 0
                event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
                event.record(stream)
                begin = _FLAGS + place * HANDLE_BYTES
                handle = numpy.frombuffer(bytes(event.ipc_handle()), dtype=numpy.uint8)  # type: ignore[no-untyped-call]
                self._page.bytes[begin : begin + HANDLE_BYTES] = handle
                known = self._copied[key] = (place, event)
        place, event = known
        event.record(stream)
        return place

    def _map(self, handle: bytes, device: torch.device) -> int:
        with self._lock:
            pointer = self._mapped.get(handle)
            if pointer is not None:
                self._mapped.move_to_end(handle)
                return pointer
            if len(self._mapped) >= MAPPINGS:
                _, oldest = self._mapped.popitem(last=False)
                torch.cuda.synchronize(device)  # rare: a copy out of it may be under way
                driver().close(oldest)
            pointer = self._mapped[handle] = driver().open(handle)
            return pointer

    def _opened(self, handle: bytes, device: int) -> torch.cuda.Event:
        event = self._events.get(handle)
        if event is None:
            event = self._events[handle] = torch.cuda.Event.from_ipc_handle(torch.device("cuda", device), handle)  # type: ignore[no-untyped-call]
        return event

    def _page_of(self, peer: str) -> numpy.ndarray:
        """A peer's shared page: the flags of its exports, then the handles of its events."""
        page = self._pages.get(peer)
        if page is None:
            address = self._peers.get(peer)
            if address is None:
                raise LaneUnavailable(self.name, f"member {peer!r} is not known here, or gone")
            page = self._pages[peer] = map_shared(address)
        return page

    def discard(self, peer: str, descriptor: Any) -> None:
        with contextlib.suppress(LaneUnavailable):  # the peer is gone
            self._page_of(peer)[descriptor[0]] = _UNUSED

    # --- the end ---------------------------------------------------------------------------------------------

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)
        self._pages.pop(peer, None)
        with self._lock:
            gone = [number for number, out in self._out.items() if out.peer == peer]
            for number in gone:
                del self._out[number]

    def close(self) -> None:
        self._closed = True
        self._woken.set()
        with self._lock:
            mapped, self._mapped = list(self._mapped.values()), OrderedDict()
            self._out.clear()
        if mapped:
            for index in self._devices:
                torch.cuda.synchronize(index)
        for pointer in mapped:
            driver().close(pointer)
        self._events.clear()
        self._ready.clear()
        self._copied.clear()
        if hasattr(self, "_page"):
            self._page.close()


class _IpcExport(Export):
    def __init__(self, lane: CudaIpcLane, number: int, out: _Out, descriptor: Any) -> None:
        self._lane, self._number, self._out = lane, number, out
        self.descriptor = descriptor

    def cancel(self) -> None:
        self._lane.cancel(self._number)

    def finished(self) -> None:
        self._lane.finish(self._number, self._out)
