"""Copies tensors between a GPU and the CPU within a call, for device maps with "cpu".

The end with the GPU makes the copy, so lanes only carry CPU tensors then. Memory that two processes share is announced
by its lane, and registered with CUDA in parts as it is used: a GPU then reads and writes it itself, at the speed of the
bus. Tensors there are kept until a GPU has read them. Other memory takes an ordinary copy.
"""

from __future__ import annotations

import itertools
import logging
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from raytorchrpc._compat import torch_internals
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.process.cuda_driver import driver
from raytorchrpc.process.locks import Lock
from raytorchrpc.tensors.codec import Encoded
from raytorchrpc.tensors.devices import CPU, Device
from raytorchrpc.tensors.dtypes import as_copyable

logger = logging.getLogger(__name__)

#: Announced memory is registered in parts of this size (bytes). A copy is cut where two parts meet, because CUDA
#: rejects a copy that crosses two registrations.
PART = 16 << 20
#: Smaller tensors are copied together, through memory that torch keeps locked (bytes).
_SMALL = 32 << 20
#: From this size on, a tensor is copied by a call of its own on a GPU, which uses more of the memory's speed than the
#: kernel for many tensors: on an H200, 16.4 GB in 8.7 instead of 11.5 ms (bytes).
_WORTH_A_CALL = 16 << 20
#: dtypes that all of torch's copies support; others are copied as integers. So is float16: a GPU that copies many
#: tensors at once converts it to float32 and back, which changes some NaNs.
_COMMON = frozenset({torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool})


# --- announced memory --------------------------------------------------------------------------------------------


_warned = False


class Region:
    """A span of host memory, of which the used parts are registered. Thread-safe."""

    def __init__(self, base: int, size: int, register: Callable[[int, int], object]) -> None:
        """``register(address, size)`` locks memory, or raises LaneUnavailable. ``base`` is the start of a page."""
        self.base, self.size, self._register = base, size, register
        self._lock = Lock()
        self._tried: set[int] = set()
        self.registered: set[int] = set()
        """Addresses of the registered parts."""
        self._closed = False
        self.used_by: set[int] = set()
        """GPUs that have copied here."""

    def pieces(self, address: int, size: int) -> list[tuple[int, int]]:
        """Return (address, bytes) of the pieces to copy a span in, after registering its parts if possible.

        The copy works either way.
        """
        first, last = (address - self.base) // PART, (address + size - 1 - self.base) // PART
        begins = [self.base + number * PART for number in range(first, last + 1)]
        if not self._tried.issuperset(begins):
            with self._lock:
                for begin in begins:
                    if begin not in self._tried and not self._closed:
                        self._try(begin)
        edges = [address, *begins[1:], address + size]
        return [(begin, end - begin) for begin, end in itertools.pairwise(edges)]

    def _try(self, begin: int) -> None:
        global _warned
        try:
            self._register(begin, min(PART, self.base + self.size - begin))
        except LaneUnavailable as error:
            self._closed = True
            if not _warned:
                _warned = True
                logger.warning(
                    "cannot register shared memory with CUDA (%s); copies between the CPU and a GPU are slower without "
                    "it: raise the limit on locked memory (ulimit -l)",
                    error.reason,
                )
        else:
            self.registered.add(begin)
        self._tried.add(begin)

    def close(self) -> set[int]:
        """Register nothing more; returns the addresses of what is registered."""
        with self._lock:
            self._closed = True
            registered, self.registered = self.registered, set()
            return registered


_lock = Lock()
_regions: list[Region] = []
"""By address. Replaced as a whole, so that a look-up takes no lock."""


def _base(region: Region) -> int:
    return region.base


def announce(base: int, size: int) -> None:
    """Announce ``size`` bytes of memory at ``base``, in whole pages, that GPUs will copy from and to."""
    global _regions
    region = Region(base, size, lambda address, span: driver().register(address, span))
    with _lock:
        _regions = sorted([*_regions, region], key=_base)


def withdraw(base: int) -> None:
    """Forget announced memory, before it is unmapped. Waits for the GPUs that used it."""
    global _regions
    with _lock:
        removed = [region for region in _regions if region.base == base]
        _regions = [region for region in _regions if region.base != base]
    for region in removed:
        if not (registered := region.close()):
            continue
        used_by = sorted(region.used_by)
        for index in used_by:
            torch.cuda.synchronize(index)
        with driver().on(used_by[0]):
            for address in registered:
                driver().unregister(address)
        reap_copies()


def region_of(address: int, size: int) -> Region | None:
    """Return the announced region that contains the span, or None."""
    regions = _regions
    place = bisect_right(regions, address, key=_base) - 1
    if place < 0 or address + size > regions[place].base + regions[place].size:
        return None
    return regions[place]


def _pieces(address: int, size: int, index: int) -> Sequence[tuple[int, int]]:
    """(address, bytes) of the pieces in which the GPU ``index`` copies a span of host memory."""
    region = region_of(address, size)
    if region is None:
        return ((address, size),)
    region.used_by.add(index)
    return region.pieces(address, size)


# --- GPU to CPU --------------------------------------------------------------------------------------------------


def goes_to_cpu(tensor: torch.Tensor, devices: Mapping[Any, Device]) -> bool:
    """Whether this is a CUDA tensor that the map brings to the CPU."""
    return tensor.is_cuda and devices.get(tensor.device.index) == CPU


def copy_out(tensor: torch.Tensor, address: int) -> None:
    """Queue the copy of a contiguous CUDA tensor to host memory, on this thread's current stream.

    Both must live until ``wait_for``. Raises LaneUnavailable.
    """
    index, source = tensor.device.index, tensor.data_ptr()
    with driver().on(index):
        stream = torch.cuda.current_stream(index).cuda_stream
        for begin, length in _pieces(address, tensor.nbytes, index):
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
    """Copy a body's CPU tensors, but not its buffers, to that GPU. The copies are queued on this thread's stream."""
    tensors, lifted = list(body.tensors), len(body.tensors) - body.buffers
    positions = [position for position, tensor in enumerate(tensors[:lifted]) if tensor.is_cpu]
    moved = _to_gpu([tensors[position] for position in positions], torch.device("cuda", index))
    for position, tensor in zip(positions, moved, strict=True):
        tensors[position] = tensor
    return body._replace(tensors=tensors)


def placed(body: Encoded, positions: Sequence[int], indices: Sequence[int]) -> Encoded:
    """As ``inbound``, for the tensors at these positions: each to the GPU of its index."""
    tensors = list(body.tensors)
    for position, index in zip(positions, indices, strict=True):
        (tensors[position],) = _to_gpu([tensors[position]], torch.device("cuda", index))
    return body._replace(tensors=tensors)


def _to_gpu(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    arrived: list[torch.Tensor] = []
    announced: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor in tensors:
        if _is_announced(tensor):
            arrived.append(torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
            announced.append((arrived[-1], tensor))
        else:
            # From ordinary memory, the driver has read the data when this returns.
            arrived.append(tensor.to(device, non_blocking=True))
    _copy_in(announced)
    return arrived


def _is_announced(tensor: torch.Tensor) -> bool:
    size = tensor.nbytes
    return tensor.is_cpu and bool(size) and region_of(tensor.data_ptr(), size) is not None


_in_flight: deque[tuple[Any, list[torch.Tensor]]] = deque()
"""(event, tensors that are read until then)."""
_reaping = threading.Lock()


def _copy_in(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Queue copies to contiguous tensors of one GPU from contiguous ones in announced memory: (target, source)."""
    reap_copies()
    if not pairs:
        return
    device = pairs[0][0].device
    stream = torch.cuda.current_stream(device)
    with driver().on(device.index):
        for target, tensor in pairs:
            source = tensor.data_ptr()
            for begin, length in _pieces(source, tensor.nbytes, device.index):
                driver().copy_in(target.data_ptr() + begin - source, begin, length, stream.cuda_stream)
    _in_flight.append((stream.record_event(), [tensor for _, tensor in pairs]))


def copy_into(targets: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors into targets.

    Blocks for copies to the CPU; those to a GPU are queued on this thread's current stream. None requires grad.
    """
    on_gpu: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, tensor in zip(targets, tensors, strict=True):
        if target is tensor or not tensor.numel():
            continue
        between_gpus = target.is_cuda and tensor.is_cuda
        # Between GPUs, torch copies bfloat16 by way of float32, which changes the bits of some NaNs.
        as_is = tensor.dtype in _COMMON and not (between_gpus and tensor.dtype is torch.bfloat16)
        pair = (target, tensor) if as_is else (as_copyable(target), as_copyable(tensor))
        if between_gpus and tensor.nbytes < _WORTH_A_CALL:
            on_gpu.setdefault(pair[0].dtype, []).append(pair)
        elif target.is_cuda and tensor.is_cpu:
            _copy_into_gpu(*pair)
        else:
            pair[0].copy_(pair[1])
    for pairs in on_gpu.values():
        torch_internals.copy_all([target for target, _ in pairs], [tensor for _, tensor in pairs])


def _copy_into_gpu(target: torch.Tensor, tensor: torch.Tensor) -> None:
    tensor = tensor.contiguous()  # no copy, unless it is a strided part of a larger one
    if not target.is_contiguous():
        target.copy_(_to_gpu([tensor], target.device)[0])  # the GPU arranges the strides
    elif _is_announced(tensor):
        _copy_in([(target, tensor)])
    else:
        target.copy_(tensor, non_blocking=True)  # see _to_gpu


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
