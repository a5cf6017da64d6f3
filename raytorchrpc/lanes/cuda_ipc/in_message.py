"""Small CUDA tensors that travel in the message itself, by way of the CPU.

Two copies of a few kilobytes take less time than the events that order the use of shared GPU memory. The first one has
to wait for the GPU, so it is only made if that has no other work.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from raytorchrpc.lanes.base import Into
from raytorchrpc.lanes.common import packing
from raytorchrpc.process.cuda_driver import driver
from raytorchrpc.tensors.dtypes import Shape, within

#: Most bytes of one message that travel so.
MOST_BYTES = 64 * 1024


class _Room(threading.local):
    """Where this thread's tensors arrive on the CPU: locked memory, so that the GPU writes it directly."""

    memory: torch.Tensor | None = None

    def address(self) -> int:
        if self.memory is None:
            self.memory = torch.empty(MOST_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self.memory.data_ptr()


_room = _Room()


def suits(tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream) -> bool:
    """Whether these tensors are to travel in the message: they are small, and the current stream of their GPU is idle.

    While a CUDA graph is captured, the stream may not be asked.
    """
    if len(tensors) > packing.FEW or sum(tensor.nbytes for tensor in tensors) > MOST_BYTES:
        return False
    return not torch.cuda.is_current_stream_capturing() and stream.query()


def descriptor(tensors: Sequence[torch.Tensor], target: int, stream: torch.cuda.Stream) -> tuple[bytes, int]:
    """Return the tensors' data, and the receiver's GPU. Blocks for the copy, for about 10 microseconds."""
    room, begin, kept = _room.address(), 0, []
    for tensor in tensors:
        if size := tensor.nbytes:
            kept.append(packing.joined([tensor]))
            driver().copy_out(room + begin, kept[-1].data_ptr(), size, stream.cuda_stream)
            begin += size
    stream.synchronize()
    return ctypes.string_at(room, begin), target


def has(descriptor: Any) -> bool:
    """Whether a descriptor contains the data."""
    return type(descriptor[0]) is bytes


def received(
    descriptor: Any,
    devices: Sequence[int],
    current: Callable[[int], tuple[torch.cuda.Stream, int]],
    shapes: Sequence[Shape],
    into: Into = None,
) -> list[torch.Tensor]:
    """Copy the data to the GPU, on the ``current`` stream. For ``into`` see ``TensorLane.fetch``.

    Raises ValueError for a GPU that is not one of ``devices``, and for too little data.
    """
    data, target = descriptor
    devices.index(target)
    device, arrived, begin = torch.device("cuda", target), [], 0
    with driver().on(target):
        stream = current(target)[1]
        address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
        for index, shape in enumerate(shapes):
            tensor = packing.given((index,), into, device)
            if tensor is None:
                tensor = packing.room([shape], device)
            if size := tensor.nbytes:
                within(begin, size, len(data))
                driver().copy_in(tensor.data_ptr(), address + begin, size, stream)  # has read the data when it returns
                begin += size
            arrived.append(tensor)
    return arrived
