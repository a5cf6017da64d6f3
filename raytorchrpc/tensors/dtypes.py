"""Tensor dtypes by name, and views of raw memory as tensors."""

from __future__ import annotations

import math
import re

import torch

from raytorchrpc.tensors.bounds import within

#: What a receiver is told of each tensor: dtype and shape. It always gets a contiguous one.
Shape = tuple[torch.dtype, tuple[int, ...]]


#: dtypes by the name under which a message tells them, and back.
DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


#: Those that torch cannot copy, at least not everywhere: it can view them as others.
UNCOPIED = frozenset(
    dtype
    for name, dtype in DTYPES.items()
    if re.fullmatch(r"u?int[1-7]|bits\w+|float4\w+|float8_e8m0fnu|complex32", name)
)


_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def as_copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory and strides under a dtype that torch can copy (see UNCOPIED)."""
    return tensor.view(_NUMBERS[tensor.dtype.itemsize])


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, whatever the dtype."""
    return as_copyable(tensor).clone().view(tensor.dtype) if tensor.dtype in UNCOPIED else tensor.clone()


def view_at(source: torch.Tensor, offset: int, shape: Shape) -> torch.Tensor:
    """The tensor that begins at byte ``offset`` of a flat uint8 tensor; shares its memory. ``offset`` is aligned.

    Raises OutOfBounds if it is not in there.
    """
    dtype, extents = shape
    size = math.prod(extents) * dtype.itemsize
    if not size:
        return torch.empty(extents, dtype=dtype)
    within(offset, size, source.numel())
    return source[offset : offset + size].view(dtype).view(extents)
