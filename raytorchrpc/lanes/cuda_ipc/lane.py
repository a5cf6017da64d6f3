"""The cuda_ipc lane: CUDA tensors to a process of the same host, whose GPU may be another or the same.

The receiver maps the sender's allocation once and copies out of it, over NVLink or within the GPU, on the stream that
will use the data. No CPU thread waits for a GPU: that stream waits for an interprocess event behind the sender's work,
and the sender reuses its memory only after another event, behind the copy.

Small tensors of a GPU that has nothing else to do travel in the message itself, through the CPU (see ``in_message``).

``share`` omits the copy, for two processes on one GPU: the receiver's tensors lie in the sender's memory (see
``mappings``), which the sender reuses only after the last of them is gone.

The lane works where Ray lets each process see only its own GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy
import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import (
    MALFORMED,
    Export,
    Into,
    Part,
    PeerAddress,
    TensorCapabilities,
    ToCopy,
    WindowLane,
    checked,
    never_fetched,
    prepared,
)
from raytorchrpc.lanes.common import packing
from raytorchrpc.lanes.common.shared_memory import Gone, SharedAddress
from raytorchrpc.lanes.cuda_ipc import in_message
from raytorchrpc.lanes.cuda_ipc.copies import COPY_ROWS, Copies, Rows, Scatter
from raytorchrpc.lanes.cuda_ipc.exports import COPIED, OUT, UNUSED, USES, Exports, Offer, SharedEvents
from raytorchrpc.lanes.cuda_ipc.mappings import Loan, Mapped, Mappings, tensor_over
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.process import threads
from raytorchrpc.process.completion import nothing
from raytorchrpc.process.cuda_driver import driver
from raytorchrpc.tensors.dtypes import Shape, span_of, within

#: Most allocations of peers kept mapped; beyond that, the least recently used is unmapped.
MAPPINGS = 256
#: The default stream. On another, copies run beside what the program computes.
_DEFAULT = 0


class CudaIpcLane(WindowLane):
    """One per member. ``export`` does not copy: it keeps the memory, and CUDA events order its use."""

    name: ClassVar[str] = "cuda_ipc"
    capabilities: ClassVar[TensorCapabilities] = TensorCapabilities(devices=frozenset({"cuda"}))

    def __init__(self, devices: Sequence[int], mappings: int = MAPPINGS) -> None:
        """``devices``: local CUDA indices that tensors come from or arrive on. ``mappings``: most to keep open."""
        self._devices = tuple(devices)
        self._events = SharedEvents()
        self._mappings = Mappings(mappings)
        self._exports = Exports(self._events)
        self._handles: dict[int, bytes] = {}

    @property
    def outstanding(self) -> int:
        return len(self._exports)

    def open(self) -> SharedAddress:
        driver()
        address = self._events.open()
        self._exports.open(self._devices)
        self._returning = {index: torch.cuda.Stream(index) for index in self._devices}  # type: ignore[no-untyped-call]
        return address

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        self._events.peers.update((peer.peer, peer.address) for peer in peers)

    # --- sending -------------------------------------------------------------------------------------------

    def share(self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[Any, Any]) -> Export:
        # Map its page while that is possible: it may release the tensors after it has left.
        self._events.page_of(peer, self._events.tag_of(peer))
        return self.export(tensors, peer, devices, shared=True)

    def export(
        self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[Any, Any], *, shared: bool = False
    ) -> Export:
        self._exports.reap()
        source = packing.source_of(tensors, devices, self.name)
        found: dict[int, tuple[int, bytes]] = {}
        with driver().on(source):
            stream = self._events.current(source)[0]
            if not shared and in_message.suits(tensors, stream):
                return Export(in_message.descriptor(tensors, devices[source], stream), nothing)
            if shared:
                own = [self._place(tensor, found) for tensor in tensors]
                placed = [(*place, tuple(place[0].stride())) for place in own]
            else:
                packed = zip(*packing.pack(tensors), strict=True)
                placed = [(*self._place(tensor, found), piece) for piece, tensor in packed]
            kept = [tensor for tensor, *_ in placed]
            number, out = self._exports.add(peer, kept, shared)
            ready = self._events.ready(source)
        places = tuple(tuple(place) for _, *place in placed)
        offer = Offer(number, devices[source], ready, places, shared, self._events.tag)
        return Export(tuple(offer), partial(self._exports.cancel, number), partial(self._exports.finish, number, out))

    def _place(self, tensor: torch.Tensor, found: dict[int, tuple[int, bytes]]) -> tuple[torch.Tensor, bytes, int, int]:
        """Return (tensor to keep, handle of its allocation, offset in it, bytes from the first element to the last).

        ``found``: this message's allocations so far, by the address of the storage: asking CUDA takes longer than
        everything else, and the tensors of a model may lie in one allocation.
        """
        if not tensor.numel():
            return tensor, b"", 0, 0
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in found:
            try:
                found[address] = self._allocation(address)
            except LaneUnavailable:
                if storage.resizable():  # torch allocated it: a copy would not help
                    raise
                tensor = tensor.clone()  # another process shared this memory, so it cannot be exported again
                address = tensor.untyped_storage().data_ptr()
                found[address] = self._allocation(address)
        base, handle = found[address]
        return tensor, handle, tensor.data_ptr() - base, span_of(tensor.shape, tensor.stride()) * tensor.itemsize

    def _allocation(self, pointer: int) -> tuple[int, bytes]:
        """Return (base, handle) of the allocation that contains an address."""
        base, identity = driver().allocation(pointer)
        handle = self._handles.get(identity)
        if handle is None and self._mappings.has(base):
            raise LaneUnavailable(
                self.name, "memory that another process shared with this one cannot be exported again"
            )
        if handle is None:  # an allocation that was freed and made again has a new identity
            if len(self._handles) > 4 * MAPPINGS:
                self._handles.clear()
            handle = self._handles[identity] = driver().handle_of(base)
        return base, handle

    def reap(self) -> None:
        """Release the tensors that have been fetched. Does not wait for the GPU."""
        self._exports.reap()

    def fence(self, device: int) -> None:
        self._exports.fence(device)

    # --- receiving -----------------------------------------------------------------------------------------

    @checked
    def fetch(self, peer: str, descriptor: Any, shapes: Sequence[Shape], into: Into = None) -> list[torch.Tensor]:
        if in_message.has(descriptor):
            return in_message.received(descriptor, self._devices, self._events.current, shapes, into)
        offer = Offer.checked(descriptor, self._devices)
        target = offer.target
        device = torch.device("cuda", target)
        with driver().on(target):
            with self._reading(peer, offer) as (mapped, stream, raw):
                if not offer.shared:
                    arrived = self._copy(mapped, offer.places, shapes, into, device, raw)
                    self._copied_on(peer, offer, stream, raw)
                    return arrived
                flags = self._events.page_of(peer, offer.tag)
                # Prepare the event now: a finalizer releases the tensors, and may take no lock.
                returning = self._returning[target]
                self._events.record(target, returning, returning.cuda_stream)
            loan = Loan(lambda: self._release(flags, offer.number, stream))
            return [
                torch.empty(shape[1], dtype=shape[0], device=device)
                if mapping is None
                else tensor_over(mapping, offset, size, shape, strides, loan)
                for mapping, (_, offset, size, strides), shape in zip(mapped, offer.places, shapes, strict=True)
            ]

    @checked
    def scatter_into(self, peer: str, descriptor: Any, sizes: Sequence[int], parts: Sequence[Sequence[Part]]) -> ToCopy:
        left: ToCopy = []
        if in_message.has(descriptor):
            flat = in_message.received(
                descriptor, self._devices, self._events.current, [(torch.uint8, (size,)) for size in sizes]
            )
            for tensor, its in zip(flat, parts, strict=True):
                left += [(part.target, part.view_of(tensor)) for part in its]
            return left
        offer, cuda = Offer.checked(descriptor, self._devices), driver()
        index = offer.target
        kernel = partial(COPY_ROWS.on, index, cuda)
        with cuda.on(index), self._reading(peer, offer) as (mapped, stream, raw):
            for mapping, (_, begin, _, piece) in zip(mapped, offer.places, strict=True):
                if mapping is None:
                    continue
                for number in piece:
                    its, size = parts[number], sizes[number]
                    address = mapping.at(begin, size)
                    make = partial(Scatter.of, its, size, stream.device, raw != _DEFAULT)
                    scatter = prepared(its, (self.name, index, size, raw != _DEFAULT), make)
                    left += scatter.queue(its, address, stream.device, cuda, kernel, raw)
                    begin += size
            self._copied_on(peer, offer, stream, raw)
        return left

    @contextlib.contextmanager
    def _reading(self, peer: str, offer: Offer) -> Iterator[tuple[list[Mapped | None], torch.cuda.Stream, int]]:
        """Yield the mapped allocations, and the stream on which they can be read. Releases the export if that fails."""
        device = torch.device("cuda", offer.target)
        try:
            flags = self._events.page_of(peer, offer.tag)
        except Gone as gone:
            raise never_fetched(peer) from gone
        # The user's own stream: its memory belongs to it, and what it queues next needs the data anyway.
        stream, raw = self._events.current(offer.target)
        try:
            mapped = [self._mappings.get(handle, device) if size else None for handle, _, size, _ in offer.places]
            self._events.opened(offer.ready, offer.target).wait(stream)
            yield mapped, stream, raw
        except BaseException as error:  # for instance, no memory is left
            stream.synchronize()
            flags[offer.number] = UNUSED
            if isinstance(error, LaneUnavailable) and self._events.is_dead(peer):  # CUDA could not map its memory
                raise PeerLost(peer, f"its process ended before its tensors were fetched ({error.reason})") from error
            raise

    def _copied_on(self, peer: str, offer: Offer, stream: torch.cuda.Stream, raw: int) -> None:
        """Tell the sender that what is queued on this stream reads its memory for the last time."""
        self._events.page_of(peer, offer.tag)[offer.number] = COPIED + self._events.record(offer.target, stream, raw)

    def _copy(
        self,
        mapped: Sequence[Mapped | None],
        places: Any,
        shapes: Sequence[Shape],
        into: Into,
        device: torch.device,
        stream: int,
    ) -> list[torch.Tensor]:
        arrived: list[torch.Tensor] = []
        copies, cuda = Copies(beside=stream != _DEFAULT), driver()
        for mapping, (_, offset, size, piece) in zip(mapped, places, strict=True):
            tensor = packing.given(piece, into, device)
            if tensor is None:
                tensor = packing.room([shapes[index] for index in piece], device)
            if mapping is not None:
                within(0, size, tensor.nbytes)
                copies.rows.append(Rows(tensor.data_ptr(), mapping.at(offset, size), size, 1, 0, 0))
            arrived.append(tensor)
        copies.queue(0, cuda, partial(COPY_ROWS.on, device.index, cuda), stream)
        return packing.unpack(arrived, [place[3] for place in places], shapes)

    def _release(self, flags: numpy.ndarray, number: int, stream: torch.cuda.Stream) -> None:
        """Tell the sender that the last tensor over its memory has died. Called on any thread."""
        index = stream.device.index
        returning = self._returning[index]
        if not self._events.has_recorded(index, returning.cuda_stream):  # closed, or too many streams
            torch.cuda.synchronize(stream.device)
            flags[number] = UNUSED
            return
        returning.wait_stream(stream)
        returning.wait_stream(torch.cuda.current_stream(stream.device))
        flags[number] = COPIED + self._events.record(index, returning, returning.cuda_stream)

    def used(self, peer: str, descriptor: Any) -> None:
        if in_message.has(descriptor):
            return
        offer = Offer(*descriptor)
        if not offer.shared:
            return
        with contextlib.suppress(Gone):  # then no process waits for it
            page = self._events.page_of(peer, offer.tag)
            if page[offer.number] == OUT:  # the method keeps some of the tensors
                place = self._events.record(offer.target, *self._events.current(offer.target))
                page[USES + offer.number] = 1 + place

    def prepare(self, peer: str, descriptor: Any) -> None:
        """Map the memory meanwhile, on another thread: that takes 6 to 17 ms for each allocation of another GPU."""
        with contextlib.suppress(*MALFORMED, threads.ThreadShortage):
            if not in_message.has(descriptor):
                offer = Offer.checked(descriptor, self._devices)
                handles = {handle for handle, _, size, _ in offer.places if size}
                if not all(map(self._mappings.is_mapped, handles)):
                    threads.start(self._map, handles, offer.target, name="raytorchrpc-cuda-map")

    def _map(self, handles: Iterable[bytes], index: int) -> None:
        with contextlib.suppress(LaneUnavailable), driver().on(index):  # who fetches from it finds out
            for handle in handles:
                self._mappings.get(handle, torch.device("cuda", index))

    def discard(self, peer: str, descriptor: Any) -> None:
        with contextlib.suppress(LaneUnavailable, *MALFORMED):  # the peer is gone
            if in_message.has(descriptor):
                return
            offer = Offer.checked(descriptor, self._devices)
            self._events.page_of(peer, offer.tag)[offer.number] = UNUSED

    # --- the end ---------------------------------------------------------------------------------------------

    def disconnect(self, peer: str) -> None:
        shared = self._exports.drop(peer, dead=self._events.is_dead(peer))
        self._events.forget(peer, keep_page=shared)

    def close(self) -> None:
        self._exports.close()
        self._mappings.close(self._devices)
        self._events.close(keep_opened=bool(self._exports))


def make(setup: LaneSetup) -> CudaIpcLane:
    return CudaIpcLane(setup.devices)
