"""Copies tensors between a GPU and the CPU within a call, for device maps with "cpu".

The end with the GPU makes the copy, so lanes only carry CPU tensors then. A lane announces memory that two processes
share, and its parts are registered with CUDA as they are used: the GPU then accesses them directly, at the speed of the
bus. Other memory takes an ordinary copy.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from raytorchrpc._compat import torch_internals
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.process.cuda_driver import driver
from raytorchrpc.tensors.codec import Encoded
from raytorchrpc.tensors.devices import CPU, Device
from raytorchrpc.tensors.dtypes import as_copyable

logger = logging.getLogger(__name__)

#: Announced memory is registered in parts of this size (bytes). A copy is cut where two parts meet, because CUDA
#: rejects a copy that crosses two registrations.
PART = 16 << 20
#: Smaller tensors are copied together, through memory that torch keeps locked (bytes).
_SMALL = 32 << 20
#: dtypes that all of torch's copies support; others are copied as integers. So is float16: a GPU that copies many
#: tensors at once converts it to float32 and back, which changes some NaNs.
_COMMON = frozenset({torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool})


def pieces(offset: int, size: int, part: int = PART) -> Iterator[tuple[int, int]]:
    """Yield (offset, size) of the pieces of a span, cut at every multiple of ``part``."""
    end = offset + size
    while offset < end:
        until = min(end, (offset // part + 1) * part)
        yield offset, until - offset
        offset = until


class Region:
    """A span of host memory, of which the used parts are registered. Thread-safe."""

    def __init__(self, base: int, size: int, register: Callable[[int, int], None]) -> None:
        """``register(address, size)`` locks memory, or raises LaneUnavailable. ``base`` is the start of a page."""
        self.base, self.size = base, size
        self._register = register
        self._lock = threading.Lock()
        self._tried: set[int] = set()
        self.registered: set[int] = set()
        """Addresses of the registered parts."""
        self.used_by: set[int] = set()
        """GPUs that have copied here."""
        self.closed = False
        """Whether it registers nothing more."""

    def prepare(self, offset: int, size: int) -> list[tuple[int, int]]:
        """Register the parts of a span if possible; returns the pieces to copy it in. The copy works either way."""
        cut = list(pieces(offset, size))
        numbers = range(offset // PART, (offset + size - 1) // PART + 1)
        if not self._tried.issuperset(numbers):
            with self._lock:
                for number in numbers:
                    if number not in self._tried and not self.closed:
                        self._try(number)
                        self._tried.add(number)
        return cut

    def _try(self, number: int) -> None:
        begin = number * PART
        try:
            self._register(self.base + begin, min(PART, self.size - begin))
        except LaneUnavailable as error:
            self.closed = True
            _warn_once(error.reason)
        else:
            self.registered.add(self.base + begin)

    def close(self) -> set[int]:
        """Register nothing more; returns the addresses of what is registered."""
        with self._lock:
            self.closed = True
            registered, self.registered = self.registered, set()
            return registered


_warned = False


def _warn_once(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        logger.warning(
            "cannot register shared memory with CUDA (%s); copies between the CPU and a GPU are slower without it: "
            "raise the limit on locked memory (ulimit -l)",
            reason,
        )


class Regions:
    """The announced memory of one process, by address. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: tuple[list[int], list[Region]] = ([], [])  # replaced as a whole, so that find() needs no lock

    def add(self, region: Region) -> None:
        with self._lock:
            regions = sorted([*self._known[1], region], key=lambda known: known.base)
            self._known = [known.base for known in regions], regions

    def remove(self, base: int) -> Region | None:
        with self._lock:
            removed = next((region for region in self._known[1] if region.base == base), None)
            regions = [region for region in self._known[1] if region is not removed]
            self._known = [region.base for region in regions], regions
        return removed

    def find(self, address: int, size: int) -> Region | None:
        """Return the region that contains the span, or None."""
        bases, regions = self._known
        place = bisect_right(bases, address) - 1
        if place < 0 or address + size > regions[place].base + regions[place].size:
            return None
        return regions[place]


_regions = Regions()
_in_flight: deque[tuple[Any, list[torch.Tensor]]] = deque()  # (event, tensors that are read until then)
_reaping = threading.Lock()


def announce(base: int, size: int) -> None:
    """Announce ``size`` bytes of memory at ``base``, in whole pages, that GPUs will copy from and to."""
    _regions.add(Region(base, size, lambda address, span: driver().register(address, span)))


def withdraw(base: int) -> None:
    """Forget announced memory, before it is unmapped. Waits for the GPUs that used it."""
    region = _regions.remove(base)
    if region is None or not (registered := region.close()):
        return
    used_by = sorted(region.used_by)
    for index in used_by:
        torch.cuda.synchronize(index)
    with driver().on(used_by[0]):
        for address in registered:
            driver().unregister(address)
    reap_copies()


# --- GPU to CPU --------------------------------------------------------------------------------------------------


def goes_to_cpu(tensor: torch.Tensor, devices: Mapping[Any, Device]) -> bool:
    """Whether this is a CUDA tensor that the map brings to the CPU."""
    return tensor.is_cuda and devices.get(tensor.device.index) == CPU


def copy_out(tensor: torch.Tensor, address: int) -> None:
    """Queue the copy of a contiguous CUDA tensor to host memory, on this thread's current stream.

    Both must live until ``wait_for``. Raises LaneUnavailable.
    """
    size, index, source = tensor.nbytes, tensor.device.index, tensor.data_ptr()
    with driver().on(index):
        stream = torch.cuda.current_stream(index).cuda_stream
        region = _regions.find(address, size)
        if region is None:
            driver().copy_out(address, source, size, stream)
            return
        region.used_by.add(index)
        for offset, length in region.prepare(address - region.base, size):
            begin = region.base + offset
            driver().copy_out(begin, source + begin - address, length, stream)


def wait_for(tensors: Sequence[torch.Tensor]) -> None:
    """Block until this thread's streams on the GPUs of these tensors are done."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def to_cpu(tensors: Sequence[torch.Tensor], devices: Mapping[Any, Device]) -> Sequence[torch.Tensor]:
    """Copy the tensors that the map brings to the CPU; returns all of them. Blocks until the copies are done."""
    if CPU not in devices.values():
        return tensors
    leaving = [goes_to_cpu(tensor, devices) for tensor in tensors]
    if not any(leaving):
        return tensors
    moved = [
        tensor.to(CPU, non_blocking=tensor.nbytes < _SMALL) if leaves else tensor
        for tensor, leaves in zip(tensors, leaving, strict=True)
    ]
    wait_for([tensor for tensor, leaves in zip(tensors, leaving, strict=True) if leaves])
    return moved


def outbound(body: Encoded, devices: Mapping[Any, Device]) -> Encoded:
    """Return a body for a lane that carries all tensors in band: see ``to_cpu``."""
    tensors = to_cpu(body.tensors, devices)
    return body if tensors is body.tensors else body._replace(tensors=tensors)


# --- CPU to GPU --------------------------------------------------------------------------------------------------


def inbound(body: Encoded, index: int) -> Encoded:
    """Copy a body's tensors, but not its buffers, to that GPU. The copies are queued on this thread's stream."""
    split = len(body.tensors) - body.buffers
    moved = _to_gpu(body.tensors[:split], torch.device("cuda", index))
    return body._replace(tensors=[*moved, *body.tensors[split:]])


def _to_gpu(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    reap_copies()
    stream = torch.cuda.current_stream(device)
    arrived: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for tensor in tensors:
        size = tensor.nbytes
        region = _regions.find(tensor.data_ptr(), size) if size and tensor.is_cpu else None
        if region is None:
            # From ordinary memory, the driver has read the data when this returns.
            arrived.append(tensor.to(device, non_blocking=True))
            continue
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        _copy_in(made, tensor.data_ptr(), region, stream)
        arrived.append(made)
        read.append(tensor)
    if read:
        _in_flight.append((stream.record_event(), read))
    return arrived


def copy_into(targets: Sequence[torch.Tensor | None], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors into targets; returns the targets, and the tensors themselves where the target is None.

    Blocks for copies to the CPU; those to a GPU are queued on this thread's current stream. None requires grad.
    """
    on_gpu: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, tensor in zip(targets, tensors, strict=True):
        if target is None or target is tensor or not tensor.numel():
            continue
        between_gpus = target.is_cuda and tensor.is_cuda
        # Between GPUs, torch copies bfloat16 by way of float32, which changes the bits of some NaNs.
        as_is = tensor.dtype in _COMMON and not (between_gpus and tensor.dtype is torch.bfloat16)
        pair = (target, tensor) if as_is else (as_copyable(target), as_copyable(tensor))
        if between_gpus:
            on_gpu.setdefault(pair[0].dtype, []).append(pair)
        elif target.is_cuda and tensor.is_cpu:
            _copy_into_gpu(*pair)
        else:
            pair[0].copy_(pair[1])
    for pairs in on_gpu.values():
        torch_internals.copy_all([target for target, _ in pairs], [tensor for _, tensor in pairs])
    return [tensor if target is None else target for target, tensor in zip(targets, tensors, strict=True)]


def _copy_into_gpu(target: torch.Tensor, tensor: torch.Tensor) -> None:
    tensor = tensor.contiguous()  # no copy, unless it is a strided part of a larger one
    if not target.is_contiguous():
        target.copy_(_to_gpu([tensor], target.device)[0])  # the GPU arranges the strides
        return
    region = _regions.find(tensor.data_ptr(), tensor.nbytes)
    if region is None:
        target.copy_(tensor, non_blocking=True)  # see _to_gpu
        return
    reap_copies()
    stream = torch.cuda.current_stream(target.device)
    _copy_in(target, tensor.data_ptr(), region, stream)
    _in_flight.append((stream.record_event(), [tensor]))


def _copy_in(made: torch.Tensor, source: int, region: Region, stream: torch.cuda.Stream) -> None:
    target = made.data_ptr() - source
    region.used_by.add(made.device.index)
    with driver().on(made.device.index):
        for offset, length in region.prepare(source - region.base, made.nbytes):
            begin = region.base + offset
            driver().copy_in(target + begin, begin, length, stream.cuda_stream)


def reap_copies() -> None:
    """Release tensors that GPUs have finished reading. Does not wait."""
    if not _in_flight or not _reaping.acquire(blocking=False):
        return
    try:
        for _ in range(len(_in_flight)):
            waiting = _in_flight.popleft()
            if not waiting[0].query():
                _in_flight.append(waiting)
    except RuntimeError as error:  # CUDA is broken in this process, which the user will notice
        logger.debug("a copy to a GPU failed: %s", error)
    finally:
        _reaping.release()
