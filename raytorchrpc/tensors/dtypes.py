"""Tensor dtypes by name, ranges of memory, and views of raw memory as tensors."""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from torch.autograd.graph import increment_version
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from raytorchrpc._compat.torch_internals import make_resizable

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


@contextmanager
def written(targets: Sequence[torch.Tensor]) -> Iterator[None]:
    """Write these tensors within, by their addresses: without autograd, which learns afterwards that they changed."""
    with unrecorded(targets):
        try:
            yield
        finally:
            increment_version(targets)


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


#: Why a tensor for which ``is_freed`` cannot be used, and what to do.
FREED = (
    "has no memory: its storage was freed or shrunk, as by FSDP and DeepSpeed between uses; gather the tensor first, "
    "or give the shard that stays"
)


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor's storage ends before its elements do, so that to touch them would crash the process.

    Its address does not tell: at an offset it is not null. Hot path.
    """
    begin = tensor.storage_offset()
    if not begin and tensor.is_contiguous():  # as most are
        return tensor.untyped_storage().nbytes() < tensor.nbytes
    span = span_of(tensor.shape, tensor.stride())
    return span > 0 and tensor.untyped_storage().nbytes() < (begin + span) * tensor.itemsize


_nbytes, _itemsize = operator.attrgetter("nbytes"), operator.attrgetter("itemsize")


def storage_bytes(tensors: Iterable[torch.Tensor]) -> Iterable[int]:
    """The bytes that the storage of each tensor has; a loop that runs in C."""
    return map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors))


def may_be_freed(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether ``is_freed`` may be true for one of these contiguous tensors; by loops that run in C. Hot path."""
    ends: Iterable[int] = map(_nbytes, tensors)
    if any(map(torch.Tensor.storage_offset, tensors)):
        begins = map(operator.mul, map(torch.Tensor.storage_offset, tensors), map(_itemsize, tensors))
        ends = map(operator.add, begins, ends)
    return any(map(operator.lt, storage_bytes(tensors), ends))


_LAZY = UninitializedParameter, UninitializedBuffer


def dense_obstacle(tensor: torch.Tensor) -> str | None:
    """Why a tensor is not dense in memory, and what to do; None if it is. ``is_freed`` is asked apart."""
    if type(tensor) in _LAZY:
        return "is not initialized, as of a lazy module: call the module once, with a batch of the right shape, first"
    if tensor.is_meta:
        remedy = "to_empty() gives a module memory"
    elif tensor.is_quantized:
        remedy = "dequantize() makes one"
    elif tensor.is_nested:
        remedy = "to_padded_tensor() makes one"
    elif tensor.layout is not torch.strided:
        remedy = "to_dense() makes one"
    else:
        return None
    return f"is not a dense tensor with memory: {remedy}"


def strided_span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the bytes from the first to the last of a strided region's elements, inclusive.

    Raises OutOfBounds for a negative stride.
    """
    if any(stride < 0 for stride in strides):
        raise OutOfBounds(f"a region has negative strides: {tuple(strides)}")
    return span_of(shape, strides) * itemsize


class Dimension(NamedTuple):
    """One dimension of a copy: its extent, and the bytes from one place to the next in the source and the target."""

    extent: int
    source: int
    target: int


def collapse(
    shape: Sequence[int], itemsize: int, source: Sequence[int], target: Sequence[int]
) -> tuple[int, list[Dimension]]:
    """Merge the dimensions that are jointly contiguous in source and target.

    ``source``, ``target``: the strides of a region that is not empty, in elements of ``itemsize`` bytes. Returns the
    bytes that are contiguous in both, and the dimensions over them, outermost first.
    """
    dimensions = [
        Dimension(extent, here * itemsize, there * itemsize)
        for extent, here, there in zip(shape, source, target, strict=True)
        if extent != 1
    ]
    dimensions.sort(key=lambda dimension: dimension.target, reverse=True)
    merged: list[Dimension] = []
    for inner in [*dimensions, Dimension(itemsize, 1, 1)]:
        if merged:
            outer = merged[-1]
            if outer.source == inner.source * inner.extent and outer.target == inner.target * inner.extent:
                inner = inner._replace(extent=outer.extent * inner.extent)
                merged.pop()
        merged.append(inner)
    return merged.pop().extent, merged


def spread(
    dimensions: Iterable[Dimension], source: numpy.ndarray, target: numpy.ndarray
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Where the contiguous parts of regions begin that ``collapse`` found: for each region, that begins at these places
    of the source and the target (bytes).
    """
    for extent, there, here in dimensions:
        steps = numpy.arange(extent)
        source = (source[:, None] + steps * there).ravel()
        target = (target[:, None] + steps * here).ravel()
    return source, target


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


class _Span:
    """Memory that numpy views, and what keeps it."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, False)}
        self.owner = owner


def bytes_at(address: int, size: int, owner: object) -> numpy.ndarray:
    """View memory as writable bytes, which keep ``owner``."""
    return numpy.asarray(_Span(address, size, owner))


#: Tensors from this size on stay in the memory that they arrived in. A smaller one costs little to copy, and kept there
#: it would keep all of that memory (bytes).
STAYS_BYTES = 64 * 1024


def tensor_in(memory: Any, offset: int, shape: Shape) -> torch.Tensor:
    """View a buffer from byte ``offset`` as a tensor with a storage of its own, which keeps the buffer and can be
    resized. Few operations of torch, each of which gives up the interpreter lock, and takes it back more than once.
    """
    dtype, extents = shape
    count = math.prod(extents)
    if not count:
        return torch.empty(extents, dtype=dtype, device="cpu")
    within(offset, count * dtype.itemsize, len(memory))
    flat = make_resizable(torch.frombuffer(memory, dtype=dtype, count=count, offset=offset))
    return flat if len(extents) == 1 else flat.view(extents)


def independent(memory: memoryview, offset: int, shape: Shape) -> torch.Tensor:
    """Return a contiguous tensor that arrived at byte ``offset`` of a buffer, with a storage of its own.

    A large tensor stays there, see ``tensor_in``; a small one is copied.
    """
    dtype, extents = shape
    size = math.prod(extents) * dtype.itemsize
    if size >= STAYS_BYTES:
        return tensor_in(memory, offset, shape)
    within(offset, size, len(memory))
    tensor = _empty_of(dtype).new_empty(extents)
    if size:
        ctypes.memmove(tensor.data_ptr(), bytes(memory[offset : offset + size]), size)
    return tensor


_unbind_copy: Any = torch.unbind_copy  # torch's stubs say that it returns nothing
#: From so many tensors of one shape on, torch copies them in one call.
_MANY = 8


def all_independent(memory: memoryview, offsets: Sequence[int], shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """As ``independent``, for each of these offsets and shapes."""
    if len(shapes) >= _MANY and (alike := _copies_of_one_shape(memory, offsets, shapes)) is not None:
        return alike
    return [independent(memory, offset, shape) for offset, shape in zip(offsets, shapes, strict=True)]


def _copies_of_one_shape(
    memory: memoryview, offsets: Sequence[int], shapes: Sequence[Shape]
) -> list[torch.Tensor] | None:
    (dtype, extents), begin, step = shapes[0], offsets[0], offsets[1] - offsets[0]
    size, count = math.prod(extents) * dtype.itemsize, len(shapes)
    fits = 0 < size < STAYS_BYTES and step >= size and step % dtype.itemsize == 0 and dtype not in UNCOPIED
    if not fits or shapes.count(shapes[0]) != count or list(offsets) != list(range(begin, begin + count * step, step)):
        return None
    span = (count - 1) * step + size
    within(begin, span, len(memory))
    if memory.readonly:
        memory = memoryview(bytearray(memory))
    flat = torch.frombuffer(memory, dtype=dtype, count=span // dtype.itemsize, offset=begin)
    strides = torch.empty(extents, device="meta").stride()
    return list(_unbind_copy(flat.as_strided((count, *extents), (step // dtype.itemsize, *strides))))


@functools.cache
def _empty_of(dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor that others are made like: that takes less than to name the device."""
    return torch.empty(0, dtype=dtype, device="cpu")
