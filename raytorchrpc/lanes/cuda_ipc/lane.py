"""The cuda_ipc lane: CUDA tensors to a process of the same host, whose GPU may be another or the same.

The receiver maps the sender's allocation once and copies out of it, over NVLink or within the GPU, on the stream that
will use the data. Nobody's CPU waits for a GPU: that stream waits for what the sender had queued (an interprocess
event), and the sender's memory is handed out again only after the copy (another).

``share`` leaves the copy out, for two processes on one GPU: the receiver's tensors lie in the sender's memory (see
``_cuda_shared``), and the sender hands it out again only after the last of them.

It works under Ray's masking, where each process sees only its own GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy
import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import Export, Part, PeerAddress, TensorCapabilities, TensorLane
from raytorchrpc.lanes.common import packing
from raytorchrpc.lanes.common.shared_memory import Gone, SharedAddress, is_gone
from raytorchrpc.lanes.cuda_ipc.events import FLAGS, USES, SharedEvents, told
from raytorchrpc.lanes.cuda_ipc.mappings import Loan, Mapped, Mappings, span_of, tensor_over
from raytorchrpc.process import threads
from raytorchrpc.process.cuda_driver import driver
from raytorchrpc.tensors.bounds import MALFORMED, checked, within
from raytorchrpc.tensors.dtypes import Shape

#: Mapped allocations of peers kept open, the least recently used closed beyond that.
MAPPINGS = 256
_OUT, _UNUSED, _COPIED = 1, 2, 16  # a flag byte: on its way; not wanted; copied, plus the place of the event
#: While results wait to be fetched, their sender looks this often whether they have been (seconds).
_JANITOR_S = 0.02
#: Likewise, while nothing is out but what is shared; that may stay for long.
_SLOW_JANITOR_S = 0.5
#: It looks whether the peers are still alive every so many times.
_LOOKS_PER_CENSUS = 50


@dataclass(eq=False)
class _Out:
    """An export on its way."""

    peer: str
    address: SharedAddress | None
    """Of that peer."""
    tensors: Sequence[torch.Tensor]
    """Kept until copied: the exported ones, or the packed ones. Shared ones are kept until given back."""
    shared: bool
    flag: int = _OUT
    """As last seen."""


class CudaIpcLane(TensorLane):
    """One per member. ``export`` does not copy; the memory is kept, and CUDA keeps the order."""

    name: ClassVar[str] = "cuda_ipc"
    capabilities: ClassVar[TensorCapabilities] = TensorCapabilities(
        devices=frozenset({"cuda"}), one_sided=True, same_host=True, zero_copy=False, in_parts=True
    )

    def __init__(self, devices: Sequence[int], mappings: int = MAPPINGS) -> None:
        """``devices``: local CUDA indices that tensors come from or arrive on. ``mappings``: most to keep open."""
        self._devices = tuple(devices)
        self._lock = threading.Lock()
        self._events = SharedEvents()
        self._mappings = Mappings(mappings)
        self._numbers = itertools.cycle(range(FLAGS))
        self._out: dict[int, _Out] = {}
        self._handles: dict[int, bytes] = {}
        self._woken, self._hurry = threading.Event(), threading.Event()
        self._closed = False
        self._janitor: threading.Thread | None = None

    def open(self) -> SharedAddress:
        driver()
        address = self._events.open()
        self._freeing = {index: torch.cuda.Stream(index) for index in self._devices}  # type: ignore[no-untyped-call]
        self._returning = {index: torch.cuda.Stream(index) for index in self._devices}  # type: ignore[no-untyped-call]
        return address

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        self._events.connect(peers)

    # --- sending -------------------------------------------------------------------------------------------

    def export(self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[Any, Any]) -> Export:
        return self._export(tensors, peer, devices, shared=False)

    def share(self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[Any, Any]) -> Export:
        # While it can be mapped: the peer may give back after it left.
        self._events.page_of(peer, self._events.tag_of(peer))
        return self._export(tensors, peer, devices, shared=True)

    def _export(
        self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[Any, Any], *, shared: bool
    ) -> Export:
        self.reap()
        source = tensors[0].device.index
        if len(tensors) > 1 and set(map(torch.Tensor.get_device, tensors)) != {source}:
            raise LaneUnavailable(self.name, "one message with tensors of several GPUs")
        if source not in devices:
            raise LaneUnavailable(self.name, f"cuda:{source} is not in the device map")
        found: dict[int, tuple[int, bytes]] = {}
        with driver().on(source):
            if shared:
                own = [self._place(tensor, found) for tensor in tensors]
                placed = [(*place, tuple(place[0].stride())) for place in own]
            else:
                pieces = packing.pieces([(tensor.dtype, tensor.nbytes) for tensor in tensors])
                placed = [
                    (*self._place(packing.joined([tensors[at] for at in piece]), found), piece) for piece in pieces
                ]
            kept = [tensor for tensor, *_ in placed]
            number, out, ready = self._set_out(peer, kept, source, shared)
        places = tuple(tuple(place) for _, *place in placed)
        return _IpcExport(self, number, out, (number, devices[source], ready, places, shared, self._events.tag))

    def _set_out(self, peer: str, kept: Sequence[torch.Tensor], source: int, shared: bool) -> tuple[int, _Out, bytes]:
        """Keep the tensors; returns their number, and the handle of the event after which they may be read."""
        out = _Out(peer, self._events.address_of(peer), kept, shared)
        return self._take_number(out), out, self._events.ready(source)

    def _place(self, tensor: torch.Tensor, found: dict[int, tuple[int, bytes]]) -> tuple[torch.Tensor, bytes, int, int]:
        """(what to keep, allocation's handle, offset in it, bytes from the first element to the last).

        ``found``: the allocations of this message's tensors so far, by the address of their storages: asking CUDA takes
        longer than all the rest, and a model's tensors may lie in one.
        """
        if not tensor.numel():
            return tensor, b"", 0, 0
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in found:
            try:
                found[address] = self._allocation(address)
            except LaneUnavailable:
                if storage.resizable():  # torch's own memory: a copy would be no better
                    raise
                tensor = tensor.clone()  # in memory that another process shared, which cannot be passed on
                address = tensor.untyped_storage().data_ptr()
                found[address] = self._allocation(address)
        base, handle = found[address]
        return tensor, handle, tensor.data_ptr() - base, span_of(tensor.shape, tensor.stride()) * tensor.itemsize

    def _allocation(self, pointer: int) -> tuple[int, bytes]:
        """(base, handle) of the allocation around an address."""
        base, identity = driver().allocation(pointer)
        handle = self._handles.get(identity)
        if handle is None and self._mappings.has(base):
            raise LaneUnavailable(self.name, "memory that another process shared with this one cannot be passed on")
        if handle is None:  # an allocation freed and made again has another identity
            if len(self._handles) > 4 * MAPPINGS:
                self._handles.clear()
            handle = self._handles[identity] = driver().handle_of(base)
        return base, handle

    def _take_number(self, out: _Out) -> int:
        with self._lock:
            if len(self._out) >= FLAGS - 1:
                raise LaneUnavailable(self.name, "too many tensors on their way")
            number = next(self._numbers)
            while number in self._out:
                number = next(self._numbers)
            self._events.page[number] = _OUT
            self._events.page[USES + number] = 0
            self._out[number] = out
            if self._janitor is None and not self._closed:
                self._start_janitor()
            if not self._woken.is_set():
                self._woken.set()
            if not out.shared and not self._hurry.is_set():
                self._hurry.set()
            return number

    def reap(self) -> None:
        """Let go of what has been fetched. Does not wait for the GPU."""
        if not self._out:
            return
        with self._lock:
            flags = self._events.page
            done = [(number, int(flags[number])) for number in self._out if flags[number] != _OUT]
            released = []
            for number, flag in done:
                out = self._out.pop(number)
                out.flag = flag
                released.append(out)
            for out in released:
                self._free_after_copy(out)

    def fence(self, device: int) -> None:
        self.reap()
        with self._lock:  # whoever tidies at the same time has queued its part as well
            freeing = self._freeing.get(device)
            if freeing is not None:
                self._events.current(device)[0].wait_stream(freeing)

    def finish(self, number: int, out: _Out) -> None:
        """The call is over: what this thread queues from now on comes after the receiver's copy."""
        with self._lock:
            flag = int(self._events.page[number])
            if self._out.get(number) is out and flag != _OUT:
                del self._out[number]
                out.flag = flag
            use = int(self._events.page[USES + number]) if out.flag == _OUT else 0
        event = self._recorded(out, use - 1) if use else self._copied_event(out)
        if event is not None:
            stream, _ = self._events.current(out.tensors[0].device.index)
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
        return self._recorded(out, out.flag - _COPIED) if out.flag >= _COPIED else None

    def _recorded(self, out: _Out, place: int) -> torch.cuda.Event | None:
        tag = out.address.tag if out.address is not None else ""
        return self._events.recorded(out.peer, tag, place, out.tensors[0].device.index)

    def _start_janitor(self) -> None:
        try:
            self._janitor = threads.start(self._look_after, name="raytorchrpc-cuda-ipc")
        except threads.ThreadShortage as error:  # the next export tries again, and tidies up meanwhile
            threads.report(error, "memory of tensors that were sent is given back late")

    def _look_after(self) -> None:
        threads.serve(self._look_while_needed, "the janitor of cuda_ipc")

    def _look_while_needed(self) -> bool:
        """Results nobody answers for: look from time to time, while there are any."""
        if self._closed and not self._out:  # what is shared goes on after the end, until it is given back
            return False
        self._woken.wait()
        looks = itertools.count(1)
        while self._out:
            self.reap()
            slow = all(out.shared for out in list(self._out.values()))
            if slow or next(looks) % _LOOKS_PER_CENSUS == 0:
                self._drop_for_the_dead()
            if slow:
                self._hurry.wait(_SLOW_JANITOR_S)
                self._hurry.clear()
            else:
                threading.Event().wait(_JANITOR_S)
        with self._lock:
            if not self._out and not self._closed:
                self._woken.clear()
        return True

    def _drop_for_the_dead(self) -> None:
        with self._lock:
            held = list(self._out.items())
        gone = {address for address in {out.address for _, out in held} if address is not None and is_gone(address)}
        with self._lock:
            for number, out in held:
                if out.address in gone and self._out.get(number) is out:
                    del self._out[number]

    def cancel(self, number: int) -> None:
        """Take back an export that was not sent."""
        with self._lock:
            self._out.pop(number, None)

    # --- receiving -----------------------------------------------------------------------------------------

    @checked
    def fetch(
        self, peer: str, descriptor: Any, shapes: Sequence[Shape], into: Sequence[torch.Tensor | None] | None = None
    ) -> list[torch.Tensor]:
        number, target, _, places, shared, tag = told(descriptor, self._devices)
        device = torch.device("cuda", target)
        with driver().on(target):
            with self._reading(peer, descriptor) as (mapped, stream, raw):
                if not shared:
                    arrived = self._copy(mapped, places, shapes, into, device, raw)
                    self._copied_on(peer, descriptor, stream, raw)
                    return arrived
                flags = self._events.page_of(peer, tag)
                # Made ready now: giving back can happen in the middle of anything, and may take no lock.
                returning = self._returning[target]
                self._events.record(target, returning, returning.cuda_stream)
            loan = Loan(lambda: self._give_back(flags, number, stream))
            return [
                torch.empty(shape[1], dtype=shape[0], device=device)
                if mapping is None
                else tensor_over(mapping, offset, size, shape, strides, loan)
                for mapping, (_, offset, size, strides), shape in zip(mapped, places, shapes, strict=True)
            ]

    @checked
    def scatter_into(
        self, peer: str, descriptor: Any, sizes: Sequence[int], parts: Sequence[Sequence[Part]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        _, index, _, places, _, _ = told(descriptor, self._devices)
        copy = driver().copy
        left: list[tuple[torch.Tensor, torch.Tensor]] = []
        with driver().on(index), self._reading(peer, descriptor) as (mapped, stream, raw):
            for mapping, (_, begin, _, piece) in zip(mapped, places, strict=True):
                if mapping is None:
                    continue
                for number in piece:
                    source = mapping.at(begin, sizes[number])
                    alone, runs = packing.together(parts[number], sizes[number])
                    for offset, target in alone:
                        if target.get_device() != index or not target.is_contiguous():
                            there, target = target, torch.empty(target.shape, dtype=target.dtype, device=stream.device)
                            left.append((there, target))
                        if size := target.nbytes:
                            copy(target.data_ptr(), source + offset, size, raw)
                    for run in runs:
                        first, last = run[0].offset, max(offset + target.nbytes for offset, target in run)
                        joined = torch.empty(last - first, dtype=torch.uint8, device=stream.device)
                        copy(joined.data_ptr(), source + first, last - first, raw)
                        left += [(target, packing.part_of(joined, offset - first, target)) for offset, target in run]
                    begin += sizes[number]
            self._copied_on(peer, descriptor, stream, raw)
        return left

    @contextlib.contextmanager
    def _reading(self, peer: str, descriptor: Any) -> Iterator[tuple[list[Mapped | None], torch.cuda.Stream, int]]:
        """What was exported, mapped, and the stream on which it can be read from now on; given back if that fails."""
        number, target, ready, places, _, tag = descriptor
        try:
            flags, device = self._events.page_of(peer, tag), torch.device("cuda", target)
        except Gone as gone:
            raise gone.lost(peer) from gone
        # On the user's own stream: its memory is there, and what it queues next needs the data anyway.
        stream, raw = self._events.current(target)
        try:
            mapped = [self._mappings.get(handle, device) if size else None for handle, _, size, _ in places]
            self._events.opened(ready, target).wait(stream)
            yield mapped, stream, raw
        except BaseException as error:  # no memory left here, for one
            stream.synchronize()
            flags[number] = _UNUSED
            if isinstance(error, LaneUnavailable) and self._events.is_dead(peer):  # CUDA could not map its memory
                raise PeerLost(peer, f"its process ended before its tensors were fetched ({error.reason})") from error
            raise

    def _copied_on(self, peer: str, descriptor: Any, stream: torch.cuda.Stream, raw: int) -> None:
        """The sender has it back after what is queued on this stream."""
        number, target, _, _, _, tag = descriptor
        self._events.page_of(peer, tag)[number] = _COPIED + self._events.record(target, stream, raw)

    def _copy(
        self,
        mapped: Sequence[Mapped | None],
        places: Any,
        shapes: Sequence[Shape],
        into: Sequence[torch.Tensor | None] | None,
        device: torch.device,
        stream: int,
    ) -> list[torch.Tensor]:
        arrived: dict[int, torch.Tensor] = {}
        for mapping, (_, offset, size, piece) in zip(mapped, places, strict=True):
            mine = [shapes[index] for index in piece]
            tensor = packing.given(piece, into, device)
            if tensor is None:
                tensor = packing.room(mine, device)
            if mapping is not None:
                within(0, size, tensor.nbytes)
                driver().copy(tensor.data_ptr(), mapping.at(offset, size), size, stream)
            arrived.update(zip(piece, packing.split(tensor, mine), strict=True))
        return [arrived[index] for index in range(len(shapes))]

    def _give_back(self, flags: numpy.ndarray, number: int, stream: torch.cuda.Stream) -> None:
        """The last tensor over a peer's memory has died, on any thread."""
        index = stream.device.index
        returning = self._returning[index]
        if not self._events.has_recorded(index, returning.cuda_stream):  # closed, or too many streams
            torch.cuda.synchronize(stream.device)
            flags[number] = _UNUSED
            return
        returning.wait_stream(stream)
        returning.wait_stream(torch.cuda.current_stream(stream.device))
        flags[number] = _COPIED + self._events.record(index, returning, returning.cuda_stream)

    def used(self, peer: str, descriptor: Any) -> None:
        number, target, _, _, shared, tag = descriptor
        if not shared:
            return
        with contextlib.suppress(Gone):  # then nobody waits for it
            page = self._events.page_of(peer, tag)
            if page[number] == _OUT:  # it keeps some of them
                page[USES + number] = 1 + self._events.record(target, *self._events.current(target))

    def discard(self, peer: str, descriptor: Any) -> None:
        with contextlib.suppress(LaneUnavailable, *MALFORMED):  # the peer is gone
            number, *_, tag = told(descriptor, self._devices)
            self._events.page_of(peer, tag)[number] = _UNUSED

    # --- the end ---------------------------------------------------------------------------------------------

    def disconnect(self, peer: str) -> None:
        dead = self._events.is_dead(peer)
        with self._lock:
            of_peer = [number for number, out in self._out.items() if out.peer == peer]
            kept = [number for number in of_peer if self._out[number].shared and not dead]
            for number in set(of_peer).difference(kept):
                del self._out[number]
        self._events.forget(peer, keep_page=bool(kept))

    def close(self) -> None:
        with self._lock:
            self._out = {number: out for number, out in self._out.items() if out.shared}
        self._closed = True
        self._woken.set()
        self._mappings.close(self._devices)
        self._events.close(keep_opened=bool(self._out))


class _IpcExport(Export):
    def __init__(self, lane: CudaIpcLane, number: int, out: _Out, descriptor: Any) -> None:
        self._lane, self._number, self._out = lane, number, out
        self.descriptor = descriptor

    def cancel(self) -> None:
        self._lane.cancel(self._number)

    def finished(self) -> None:
        self._lane.finish(self._number, self._out)
