"""Tensor dtypes by name, ranges of memory, and views of raw memory as tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import numpy
import torch

#: dtype and shape of a tensor to receive, which is contiguous.
Shape = tuple[torch.dtype, tuple[int, ...]]

#: dtypes by their name in messages, and back.
DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: dtypes that torch cannot copy on every device. It can view them as others.
UNCOPIED = frozenset(
    dtype
    for name, dtype in DTYPES.items()
    if re.fullmatch(r"u?int[1-7]|bits\w+|float4\w+|float8_e8m0fnu|complex32", name)
)

_COPYABLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def as_copyable(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor, with its strides, as a dtype that torch can copy (see UNCOPIED)."""
    return tensor.view(_COPYABLE[tensor.dtype.itemsize])


def unrecorded(targets: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
    """Return a context to write these tensors in, without autograd.

    Tensors made under inference mode can only be written under it.
    """
    return torch.inference_mode() if any(map(torch.Tensor.is_inference, targets)) else torch.no_grad()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Clone a tensor of any dtype. A copy made under inference mode is a plain tensor too."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return copied(tensor)
    return as_copyable(tensor).clone().view(tensor.dtype) if tensor.dtype in UNCOPIED else tensor.clone()


# --- memory ------------------------------------------------------------------------------------------------------


class OutOfBounds(ValueError):
    """A peer described a range that lies outside the memory that it described."""


def within(offset: int, size: int, total: int) -> None:
    """Raise OutOfBounds unless ``size`` bytes at ``offset`` lie within ``total`` bytes. Hot path."""
    if offset < 0 or size < 0 or offset + size > total:
        raise OutOfBounds(f"{size} bytes at {offset} are not in {total} bytes")


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Count the elements from the first to the last of a strided tensor, inclusive; 0 if it is empty."""
    if 0 in shape:
        return 0
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


def strided_span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the bytes from the first to the last of a strided region's elements, inclusive.

    Raises OutOfBounds for a negative stride.
    """
    if any(stride < 0 for stride in strides):
        raise OutOfBounds(f"a region has negative strides: {tuple(strides)}")
    return span_of(shape, strides) * itemsize


def view_at(source: torch.Tensor, offset: int, shape: Shape, strides: Sequence[int] | None = None) -> torch.Tensor:
    """View a flat uint8 tensor from byte ``offset``, which is aligned, as a tensor of that dtype and shape.

    ``strides``: of the view, in elements; None: contiguous. Raises OutOfBounds if the tensor would exceed it.
    """
    dtype, extents = shape
    size = math.prod(extents) * dtype.itemsize
    if strides is not None:
        span = strided_span(extents, strides, dtype.itemsize)
        within(offset, span, source.numel())
        if size:
            return source[offset : offset + span].view(dtype).as_strided(extents, tuple(strides))
    if not size:
        return torch.empty(extents, dtype=dtype, device=source.device)
    within(offset, size, source.numel())
    return source[offset : offset + size].view(dtype).view(extents)


def tensor_in(memory: bytearray | numpy.ndarray, offset: int, shape: Shape) -> torch.Tensor:
    """As ``view_at``, for bytes that are no tensor. Few operations of torch, each of which gives up the interpreter
    lock, and takes it back more than once.
    """
    dtype, extents = shape
    count = math.prod(extents)
    if not count:
        return torch.empty(extents, dtype=dtype, device="cpu")
    within(offset, count * dtype.itemsize, len(memory))
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
    return flat if len(extents) == 1 else flat.view(extents)
