"""Small CUDA tensors that travel in the message itself, by way of the CPU.

For a few kilobytes, two copies are faster than sharing GPU memory and ordering its use. The first one has to wait for
the GPU, so it is only made if that has no other work. Copy engines make both: unlike a copy within the GPU, they do not
wait for the kernels of other processes.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from raytorchrpc.lanes.base import Arrived, Copies, arrived, whole_targets
from raytorchrpc.lanes.common import packing
from raytorchrpc.lanes.cuda_ipc.pages import SERIALS
from raytorchrpc.process.cuda_driver import driver, is_idle, quick_driver
from raytorchrpc.tensors.dtypes import Shape, within

#: Most bytes of one message that travel so.
MOST_BYTES = 64 * 1024
#: How often a thread looks whether a copy has arrived before it sleeps; eight times are usual.
_LOOKS = 30
_WORD = 4


class _Room:
    """Host memory for one message. It is locked, so that the GPU accesses it directly."""

    def __init__(self) -> None:
        memory = torch.empty(MOST_BYTES + _WORD, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.address, self._word, self._value = memory.data_ptr(), memory.numpy()[MOST_BYTES:].view(numpy.uint32), 0
        self._word[0] = 0

    def is_free(self) -> bool:
        """Whether the GPU has made all copies out of it."""
        return int(self._word[0]) == self._value

    def bring(self, copies: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Queue copies (target, offset, bytes) out of it on an idle stream."""
        self._value, cuda = (self._value + 1) % SERIALS, quick_driver()
        for target, offset, size in copies:
            cuda.copy_in_by_engine(target, self.address + offset, size, stream)
        cuda.write(self.address + MOST_BYTES, self._value, stream)


#: Rooms that no thread uses; the GPU may still read them.
_rooms: deque[_Room] = deque()


def _room() -> _Room:
    with contextlib.suppress(IndexError):  # other threads have taken them
        for _ in range(len(_rooms)):
            room = _rooms.popleft()
            if room.is_free():
                return room
            _rooms.append(room)
    return _Room()


def suits(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these tensors are small enough to travel in the message, if the current stream of their GPU is idle."""
    return len(tensors) <= packing.FEW and sum(tensor.nbytes for tensor in tensors) <= MOST_BYTES


def descriptor(tensors: Sequence[torch.Tensor], target: int, stream: torch.cuda.Stream) -> tuple[bytes, int]:
    """Return the tensors' data, and the receiver's GPU. Blocks for the copy, for about 10 microseconds.

    ``stream``: the current one, which is idle.
    """
    room, begin, kept = _room(), 0, []
    for tensor in tensors:
        if size := tensor.nbytes:
            kept.append(packing.joined([tensor]))
            quick_driver().copy_out(room.address + begin, kept[-1].data_ptr(), size, stream.cuda_stream)
            begin += size
    if not any(stream.query() for _ in range(_LOOKS)):  # a sleep would cost a busy process its interpreter lock
        stream.synchronize()
    data = ctypes.string_at(room.address, begin)
    _rooms.append(room)
    return data, target


def has(descriptor: Any) -> bool:
    """Whether a descriptor contains the data."""
    return type(descriptor[0]) is bytes


def received(
    descriptor: Any,
    devices: Sequence[int],
    current: Callable[[int], tuple[torch.cuda.Stream, int]],
    shapes: Sequence[Shape],
    copies: Copies | None,
) -> Arrived:
    """Copy the data to the GPU, on the ``current`` stream; see ``TensorLane.read``.

    Raises ValueError for a GPU that is not one of ``devices``, and for too little data.
    """
    data, target = descriptor
    devices.index(target)
    device, tensors, begin = torch.device("cuda", target), [], 0
    with driver().on(target):
        stream, raw = current(target)
        room, spans = _room() if len(data) <= MOST_BYTES and is_idle(stream) else None, []
        address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
        for tensor, shape in zip(whole_targets(copies, shapes, device), shapes, strict=True):
            tensor = packing.room([shape], device) if tensor is None else tensor
            if size := tensor.nbytes:
                within(begin, size, len(data))
                spans.append((tensor.data_ptr(), begin, size))
                begin += size
            tensors.append(tensor)
        if room is None:
            for to, offset, size in spans:
                driver().copy_in(to, address + offset, size, raw)  # has read the data when it returns
        elif spans:
            ctypes.memmove(room.address, address, begin)
            room.bring(spans, raw)
            _rooms.append(room)
    return arrived(tensors, copies)
