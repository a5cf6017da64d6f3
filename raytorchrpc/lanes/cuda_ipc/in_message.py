"""Small CUDA tensors that travel in the message itself, by way of the CPU.

Two copies of a few kilobytes take less time than the events that order the use of shared GPU memory. The first one has
to wait for the GPU, so it is only made if that has no other work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from raytorchrpc.lanes.common import packing
from raytorchrpc.process.cuda_driver import driver
from raytorchrpc.tensors.bounds import within
from raytorchrpc.tensors.dtypes import Shape

#: Most bytes of one message that travel so.
MOST_BYTES = 64 * 1024


def suits(tensors: Sequence[torch.Tensor], device: int) -> bool:
    """Whether these tensors of a GPU are to travel in the message, because they are small and the GPU's stream is idle.

    While a CUDA graph is captured, the stream may not be asked.
    """
    if len(tensors) > packing.FEW or sum(tensor.nbytes for tensor in tensors) > MOST_BYTES:
        return False
    return not torch.cuda.is_current_stream_capturing() and torch.cuda.current_stream(device).query()


def descriptor(tensors: Sequence[torch.Tensor], target: int) -> tuple[bytes, int]:
    """Return the tensors' data, and the receiver's GPU. Blocks for the copy, about 10 microseconds each."""
    parts = []
    for tensor in tensors:
        flat = packing.joined([tensor]).view(-1).view(torch.uint8).cpu()
        parts.append(ctypes.string_at(flat.data_ptr(), flat.numel()))
    return b"".join(parts), target


def has(descriptor: Any) -> bool:
    """Whether a descriptor contains the data."""
    return type(descriptor[0]) is bytes


def received(
    descriptor: Any,
    devices: Sequence[int],
    shapes: Sequence[Shape],
    into: Sequence[torch.Tensor | None] | None = None,
) -> list[torch.Tensor]:
    """Copy the data to the GPU, on the stream that will use it. For ``into`` see ``TensorLane.fetch``.

    Raises ValueError for a GPU that is not one of ``devices``, and for too little data.
    """
    data, target = descriptor
    devices.index(target)
    device, arrived, begin = torch.device("cuda", target), [], 0
    with driver().on(target):
        stream = torch.cuda.current_stream(target).cuda_stream
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
