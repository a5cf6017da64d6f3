"""The cuda_ipc lane: CUDA tensors to a process of the same host, whose GPU may be another or the same.

The receiver maps the sender's allocation once and copies out of it, over NVLink or within the GPU, on the stream that
will use the data. ``read`` returns when the sender's GPU has computed the tensors and the copy is queued: a stream
that waits for a process which is then killed cannot be told, while the calling thread can raise an exception. The
sender reuses its memory only after the copy, and no CPU thread waits for that. See ``pages``.

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

from raytorchrpc._compat import torch_internals
from raytorchrpc.errors import LaneUnavailable, PeerLost, RpcTimeout
from raytorchrpc.lanes.base import (
    MALFORMED,
    Arrived,
    Copies,
    Export,
    PeerAddress,
    Pieces,
    TensorCapabilities,
    TensorLane,
    arrived,
    checked,
    never_fetched,
    size_of,
)
from raytorchrpc.lanes.common import packing
from raytorchrpc.lanes.common.gpu_copies import COPY_LISTED, COPY_ROWS, RowCopies, Rows, Scatter, queue_pieces
from raytorchrpc.lanes.common.shared_memory import Gone, SharedAddress
from raytorchrpc.lanes.cuda_ipc import in_message
from raytorchrpc.lanes.cuda_ipc.exports import Exported, Exports, Offer
from raytorchrpc.lanes.cuda_ipc.mappings import Loan, Mapped, Mappings, tensor_over
from raytorchrpc.lanes.cuda_ipc.pages import OUT, QUEUED, UNUSED, Page, Pages
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.process import threads
from raytorchrpc.process.completion import nothing
from raytorchrpc.process.cuda_driver import Driver, driver, is_idle, quick_driver
from raytorchrpc.tensors.cuda_streams import runs_beside
from raytorchrpc.tensors.dtypes import Shape, span_of, within

#: Most allocations of peers kept mapped; beyond that, the least recently used is unmapped. torch's allocator gives each
#: tensor of more than 10 MB one of its own, and a model that is lent is read out of all of them.
MAPPINGS = 1024


class CudaIpcLane(TensorLane):
    """One per member. ``export`` does not copy: it keeps the memory until it has been read."""

    name: ClassVar[str] = "cuda_ipc"
    capabilities: ClassVar[TensorCapabilities] = TensorCapabilities(devices=frozenset({"cuda"}), in_place=True)

    def __init__(self, devices: Sequence[int], mappings: int = MAPPINGS, *, timeout_s: float = 60.0) -> None:
        """
        Args:
            devices: local CUDA indices that tensors come from or arrive on.
            mappings: most to keep open.
            timeout_s: longest time to wait for the GPU of a sender that lives.
        """
        self._devices, self._timeout_s = tuple(devices), timeout_s
        self._pages = Pages()
        self._mappings = Mappings(mappings)
        self._exports = Exports(self._pages)
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}
        """By device and CUDA handle: making a Stream object each time takes longer."""
        self._returning: dict[int, torch.cuda.Stream] = {}
        """By device: where the last uses of shared tensors are awaited."""
        self._allocations: dict[int, tuple[int, bytes]] = {}
        """By the identity of an allocation, which is never used again: where it begins, and its handle."""

    @property
    def outstanding(self) -> int:
        return len(self._exports)

    def open(self) -> SharedAddress:
        return self._pages.open(self._devices)

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        self._pages.peers.update((peer.peer, peer.address) for peer in peers)

    def _current(self, device: int) -> tuple[torch.cuda.Stream, int]:
        """Return this thread's current stream on that device, and its CUDA handle."""
        raw = torch_internals.current_cuda_stream(device)
        stream = self._streams.get((device, raw))
        if stream is None:
            stream = self._streams[device, raw] = torch.cuda.current_stream(device)
        return stream, raw

    # --- sending -------------------------------------------------------------------------------------------

    def share(self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[Any, Any]) -> Export:
        # Map its page while that is possible: it may release the tensors after it has left.
        self._pages.of(peer, self._pages.tag_of(peer))
        return self.export(tensors, peer, devices, shared=True)

    def export(
        self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[Any, Any], *, shared: bool = False
    ) -> Export:
        self._exports.reap()
        source = packing.source_of(tensors, devices, self.name)
        allocations: dict[int, tuple[int, bytes]] = {}
        with driver().on(source):
            stream, raw = self._current(source)
            idle = is_idle(stream)
            if idle and not shared and in_message.suits(tensors):
                return Export(in_message.descriptor(tensors, devices[source], stream), nothing)
            if shared:
                own = [self._place(tensor, allocations) for tensor in tensors]
                placed = [(*place, tuple(place[0].stride())) for place in own]
            else:
                packed = zip(*packing.pack(tensors), strict=True)
                placed = [(*self._place(tensor, allocations), piece) for piece, tensor in packed]
            kept = [tensor for tensor, *_ in placed]
            number, out = self._exports.add(peer, kept, shared, raw, quick_driver() if idle else driver())
        places = tuple(tuple(place) for _, *place in placed)
        offer = Offer(number, devices[source], out.serial, places, shared, self._pages.tag)
        return Export(tuple(offer), partial(self._exports.cancel, number), partial(self._finish, source, number, out))

    def _finish(self, device: int, number: int, out: Exported) -> None:
        with driver().on(device):
            self._exports.finish(number, out, self._current(device)[1])

    def _place(
        self, tensor: torch.Tensor, allocations: dict[int, tuple[int, bytes]]
    ) -> tuple[torch.Tensor, bytes, int, int]:
        """Return (tensor to keep, handle of its allocation, offset in it, bytes from the first element to the last).

        ``allocations``: this message's allocations so far, by the address of the storage: asking CUDA takes longer than
        everything else, and the tensors of a model may lie in one allocation.
        """
        if not tensor.numel():
            return tensor, b"", 0, 0
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in allocations:
            try:
                allocations[address] = self._allocation(address)
            except LaneUnavailable:
                if storage.resizable():  # torch allocated it: a copy would not help
                    raise
                tensor = tensor.clone()  # another process shared this memory, so it cannot be exported again
                address = tensor.untyped_storage().data_ptr()
                allocations[address] = self._allocation(address)
        base, handle = allocations[address]
        return tensor, handle, tensor.data_ptr() - base, span_of(tensor.shape, tensor.stride()) * tensor.itemsize

    def _allocation(self, pointer: int) -> tuple[int, bytes]:
        """Return (base, handle) of the allocation that contains an address."""
        identity = driver().identity_at(pointer)
        if (known := self._allocations.get(identity)) is None:
            base = driver().base_of(pointer)
            if self._mappings.has(base):
                raise LaneUnavailable(
                    self.name, "memory that another process shared with this one cannot be exported again"
                )
            if len(self._allocations) > 4 * MAPPINGS:
                self._allocations.clear()
            known = self._allocations[identity] = base, driver().handle_of(base)
        return known

    def reap(self) -> None:
        """Release the tensors that have been fetched. Does not wait for the GPU."""
        self._exports.reap()

    def fence(self, device: int) -> None:
        if device in self._devices and self._exports:
            with driver().on(device):
                self._exports.fence(device, self._current(device)[1])

    # --- receiving -----------------------------------------------------------------------------------------

    @checked
    def read(self, peer: str, descriptor: Any, shapes: Sequence[Shape], copies: Copies | None = None) -> Arrived:
        if in_message.has(descriptor):
            return in_message.received(descriptor, self._devices, self._current, shapes, copies)
        offer = Offer.checked(descriptor, self._devices)
        target = offer.target
        with driver().on(target):
            with self._reading(peer, offer) as (page, mapped, stream, raw):
                if not offer.shared:
                    few = max(len(mapped), len(copies or ())) <= packing.FEW
                    cuda = quick_driver() if few and is_idle(stream) else driver()
                    if copies is None:
                        results = self._copy_all(mapped, offer.places, shapes, stream.device, raw, cuda)
                    else:
                        results = self._copy(mapped, offer.places, shapes, copies, stream.device, raw, cuda)
                    _read_on(raw, page, offer, cuda)
                    return results
            # Prepare what the release needs: a finalizer does it, and may take no lock.
            page.shared.on_gpus()
            if target not in self._returning:
                self._returning[target] = torch.cuda.Stream(target)  # type: ignore[no-untyped-call]
            returning = self._returning[target]
            loan = Loan(lambda: _release(page, offer, stream, returning))
            tensors = [
                torch.empty(shape[1], dtype=shape[0], device=stream.device)
                if mapping is None
                else tensor_over(mapping, offset, size, shape, strides, loan)
                for mapping, (_, offset, size, strides), shape in zip(mapped, offer.places, shapes, strict=True)
            ]
            return arrived(tensors, copies)

    @contextlib.contextmanager
    def _reading(self, peer: str, offer: Offer) -> Iterator[tuple[Page, list[Mapped | None], torch.cuda.Stream, int]]:
        """Yield the sender's page, the mapped allocations, and the stream on which they can be read.

        Blocks until the sender's GPU has computed them. Releases the export if anything fails.
        """
        device = torch.device("cuda", offer.target)
        try:
            page = self._pages.of(peer, offer.tag)
        except Gone as gone:
            raise never_fetched(peer) from gone
        # The user's own stream: its memory belongs to it, and what it queues next needs the data anyway.
        stream, raw = self._current(offer.target)
        try:
            mapped = [self._mappings.get(handle, device) if size else None for handle, _, size, _ in offer.places]
            self._pages.wait_until_ready(peer, offer.tag, offer.number, offer.serial, self._timeout_s)
            yield page, mapped, stream, raw
        except BaseException as error:  # for instance, no memory is left
            if not isinstance(error, (PeerLost, RpcTimeout)):  # else nothing is queued
                stream.synchronize()
            page.state[offer.number] = UNUSED
            if isinstance(error, LaneUnavailable) and self._pages.is_dead(peer):  # CUDA could not map its memory
                raise PeerLost(peer, f"its process ended before its tensors were fetched ({error.reason})") from error
            raise

    def _copy_all(
        self,
        mapped: Sequence[Mapped | None],
        places: Any,
        shapes: Sequence[Shape],
        device: torch.device,
        stream: int,
        cuda: Driver,
    ) -> Arrived:
        """Copy each tensor to memory of its own."""
        rooms: list[torch.Tensor] = []
        rows = RowCopies(beside=runs_beside(stream))
        for mapping, (_, offset, size, piece) in zip(mapped, places, strict=True):
            room = packing.room([shapes[index] for index in piece], device)
            if mapping is not None:
                within(0, size, room.nbytes)
                rows.rows.append(Rows(room.data_ptr(), mapping.at(offset, size), size, 1, 0, 0))
            rooms.append(room)
        rows.queue(0, cuda, partial(COPY_ROWS.on, device.index, driver()), stream)
        return [*packing.unpack(rooms, [place[3] for place in places], shapes)]

    def _copy(
        self,
        mapped: Sequence[Mapped | None],
        places: Any,
        shapes: Sequence[Shape],
        copies: Copies,
        device: torch.device,
        stream: int,
        cuda: Driver,
    ) -> Arrived:
        """Make copies to targets on this GPU, and copies to temporaries for others."""
        begins, sizes = dict[int, int](), tuple(map(size_of, shapes))
        for mapping, (_, begin, size, piece) in zip(mapped, places, strict=True):
            if sum([sizes[number] for number in piece]) != size:
                raise ValueError(f"a piece of {size} bytes for tensors of {[sizes[number] for number in piece]}")
            for number in piece:
                begins[number] = 0 if mapping is None else mapping.at(begin, sizes[number])
                begin += sizes[number]
        first = min([begins[number] for number, size in enumerate(sizes) if size], default=0)
        origins = tuple([begins[number] - first if size else 0 for number, size in enumerate(sizes)])
        beside, kernel = runs_beside(stream), partial(COPY_ROWS.on, device.index, driver())
        make = partial(Scatter.of, copies, sizes, device, beside, origins)
        scatter = copies.prepared((self.name, device.index, sizes, beside, origins), make)
        results: Arrived = [None] * len(copies)
        for index, tensor in scatter.queue(copies, first, shapes, device, cuda, kernel, stream):
            results[index] = tensor
        return results

    # --- memory that is read when peers like -----------------------------------------------------------------

    def expose(self, tensors: Sequence[torch.Tensor]) -> Any:
        places = []
        for tensor in tensors:
            span = span_of(tensor.shape, tensor.stride()) * tensor.itemsize
            if not span:
                places.append((b"", 0, 0))
                continue
            with driver().on(tensor.device.index):
                base, handle = self._allocation(tensor.data_ptr())
            places.append((handle, tensor.data_ptr() - base, span))
        return self._pages.tag, tuple(places)

    @checked
    def gather(self, peer: str, descriptor: Any, pieces: Sequence[Pieces], device: torch.device) -> None:
        tag, places = descriptor
        if device.index not in self._devices:
            raise LaneUnavailable(self.name, f"{device} was not opened for this lane")
        try:
            current = self._pages.tag_of(peer)
        except Gone as gone:
            raise never_fetched(peer) from gone
        if current != tag or self._pages.is_dead(peer):
            raise never_fetched(peer)
        with driver().on(device.index):
            stream, raw = self._current(device.index)
            try:
                mapped = [self._mappings.get(handle, device) if span else None for handle, _, span in places]
            except LaneUnavailable as error:
                if self._pages.is_dead(peer):
                    raise never_fetched(peer) from error
                raise
            located = zip(mapped, places, strict=True)
            begins = numpy.array([0 if one is None else one.at(*place[1:]) for one, place in located], numpy.int64)
            spans = numpy.array([span for *_, span in places], numpy.int64)
            for source, offset, _, width in pieces:
                if len(offset) and (offset.min() < 0 or (offset + width > spans[source]).any()):
                    raise ValueError(f"pieces of {width} bytes are not in their tensors")
            kernel = partial(COPY_LISTED.on, device.index, driver())
            for some in pieces:
                queue_pieces(some, begins, stream.device, driver(), kernel, raw)

    def used(self, peer: str, descriptor: Any) -> None:
        if in_message.has(descriptor):
            return
        offer = Offer(*descriptor)
        if not offer.shared:
            return
        with contextlib.suppress(Gone):  # then no process waits for it
            page = self._pages.of(peer, offer.tag)
            if page.state[offer.number] == OUT:  # the method keeps some of the tensors
                with driver().on(offer.target):
                    page.used.write(offer.number, offer.serial, self._current(offer.target)[1], driver())
                page.is_used[offer.number] = True

    def prepare(self, peer: str, descriptor: Any) -> None:
        """Map the memory meanwhile, on another thread: that takes 6 to 17 ms for each allocation of another GPU."""
        with contextlib.suppress(*MALFORMED):
            if not in_message.has(descriptor):
                offer = Offer.checked(descriptor, self._devices)
                handles = {handle for handle, _, size, _ in offer.places if size}
                if not all(map(self._mappings.is_mapped, handles)):
                    threads.start(self._map, handles, offer.target, name="raytorchrpc-cuda-map")

    def _map(self, handles: Iterable[bytes], index: int) -> None:
        with contextlib.suppress(LaneUnavailable), driver().on(index):  # who fetches from it finds out
            for handle in handles:
                self._mappings.get(handle, torch.device("cuda", index))

    def release(self, peer: str, descriptor: Any) -> None:
        with contextlib.suppress(LaneUnavailable, *MALFORMED):  # the peer is gone
            if in_message.has(descriptor):
                return
            offer = Offer.checked(descriptor, self._devices)
            self._pages.of(peer, offer.tag).state[offer.number] = UNUSED

    # --- the end ---------------------------------------------------------------------------------------------

    def disconnect(self, peer: str) -> None:
        shared = self._exports.drop(peer, dead=self._pages.is_dead(peer))
        self._pages.forget(peer, keep_page=shared)

    def close(self) -> None:
        self._exports.close()
        self._mappings.close(self._devices)
        self._streams.clear()
        self._pages.close()


def _read_on(stream: int, page: Page, offer: Offer, cuda: Driver) -> None:
    """Tell the sender that what is queued on this stream reads its memory for the last time."""
    page.copied.write(offer.number, offer.serial, stream, cuda)
    page.state[offer.number] = QUEUED


def _release(page: Page, offer: Offer, stream: torch.cuda.Stream, returning: torch.cuda.Stream) -> None:
    """Tell the sender that the last tensor over its memory has died. Called on any thread. Takes no lock."""
    returning.wait_stream(stream)
    returning.wait_stream(torch.cuda.current_stream(stream.device))
    with driver().on(offer.target):
        _read_on(returning.cuda_stream, page, offer, driver())


def make(setup: LaneSetup) -> CudaIpcLane:
    return CudaIpcLane(setup.devices, timeout_s=setup.config.rpc_timeout_s)
