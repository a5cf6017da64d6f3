"""Packs many small tensors of one message into one, and unpacks them."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from raytorchrpc._compat import torch_internals
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.tensors.dtypes import UNCOPIED, Shape, as_copyable, view_at
from raytorchrpc.tensors.host_device_copy import copy_into

#: More tensors than FEW, each smaller than _SMALL bytes, travel as one.
FEW, _SMALL = 4, 1 << 20
#: Tensors packed by size begin at multiples of this; larger ones than the second are alone, so that keeping one keeps
#: no other alive (bytes).
ALIGN, _ALONE = 64, 1 << 20
#: The tensors in a piece: (index, offset in bytes).
Members = tuple[tuple[int, int], ...]
#: The indices of the tensors in a piece, which have one dtype.
Piece = tuple[int, ...]
_shape = attrgetter("shape")


def source_of(tensors: Sequence[torch.Tensor], devices: Mapping[Any, Any], lane: str) -> int:
    """Return the GPU that all tensors of a message are on. Raises LaneUnavailable if that is not one of ``devices``."""
    source = tensors[0].device.index or 0
    if len(tensors) > 1 and len(set(map(torch.Tensor.get_device, tensors))) > 1:
        raise LaneUnavailable(lane, "one message with tensors of several GPUs")
    if source not in devices:
        raise LaneUnavailable(lane, f"cuda:{source} is not in the device map")
    return source


def pack(tensors: Sequence[torch.Tensor]) -> tuple[list[Piece], list[torch.Tensor]]:
    """Return the pieces of a message, and each as one contiguous tensor, without a copy if possible."""
    grouped = pieces([(tensor.dtype, tensor.nbytes) for tensor in tensors])
    return grouped, [joined([tensors[index] for index in piece]) for piece in grouped]


def unpack(
    arrived: Sequence[torch.Tensor], grouped: Sequence[Sequence[int]], shapes: Sequence[Shape]
) -> list[torch.Tensor]:
    """Return the tensors of a message whose pieces have arrived, each in memory of its own. Raises ValueError or
    KeyError unless they fit.
    """
    if sum(map(len, grouped)) != len(shapes):
        raise ValueError(f"pieces {grouped} of {len(shapes)} tensors")
    placed: dict[int, torch.Tensor] = {}
    shared: list[int] = []
    for tensor, piece in zip(arrived, grouped, strict=True):
        placed.update(zip(piece, split(tensor, [shapes[index] for index in piece]), strict=True))
        if len(piece) > 1:
            shared += piece
    if shared:  # they are small, and one kernel copies many
        views = [placed[index] for index in shared]
        own = [torch.empty(view.shape, dtype=view.dtype, device=view.device) for view in views]
        copy_into(own, views)
        placed.update(zip(shared, own, strict=True))
    return [placed[index] for index in range(len(shapes))]


def pieces(kinds: Sequence[tuple[torch.dtype, int]]) -> list[Piece]:
    """Group tensors of these (dtype, bytes) by index: many small ones of a dtype together, all others alone."""
    if len(kinds) <= FEW:
        return [(index,) for index in range(len(kinds))]
    if kinds[0][1] < _SMALL and kinds.count(kinds[0]) == len(kinds):
        return [tuple(range(len(kinds)))]
    small: dict[torch.dtype, list[int]] = {}
    alone: list[Piece] = []
    for index, (dtype, size) in enumerate(kinds):
        if size < _SMALL:
            small.setdefault(dtype, []).append(index)
        else:
            alone.append((index,))
    return alone + [tuple(members) for members in small.values()]


def by_size(sizes: Sequence[int]) -> list[tuple[int, Members]]:
    """Pack tensors of these bytes, whatever their dtypes, into pieces of (bytes, members): all small ones in
    the last.
    """
    packed: list[tuple[int, Members]] = []
    small: list[tuple[int, int]] = []
    end = 0
    for index, size in enumerate(sizes):
        if size >= _ALONE:
            packed.append((size, ((index, 0),)))
        else:
            small.append((index, end))
            end += (size + ALIGN - 1) & -ALIGN
    if small:
        packed.append((end, tuple(small)))
    return packed


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensors of one piece as one contiguous tensor, without a copy if possible."""
    dtype = tensors[0].dtype
    if dtype in UNCOPIED:
        return joined([as_copyable(tensor) for tensor in tensors]).view(dtype)
    if len(tensors) == 1:
        return tensors[0].contiguous()
    shapes = list(map(_shape, tensors))
    if shapes.count(shapes[0]) == len(shapes):  # one call instead of one for each tensor
        return torch.stack(list(tensors))
    return torch_internals.flattened(tensors)


def write(
    tensor: torch.Tensor, flat: torch.Tensor, offset: int, move: Callable[[int, int, int], object] = ctypes.memmove
) -> None:
    """Copy a CPU tensor to byte ``offset`` of a flat one, by ``move(target, source, bytes)`` if it is contiguous."""
    if not tensor.nbytes:
        return
    if tensor.is_contiguous():
        move(flat.data_ptr() + offset, tensor.data_ptr(), tensor.nbytes)
    else:
        strided = as_copyable(tensor)
        view_at(flat, offset, (strided.dtype, tuple(strided.shape))).copy_(strided)


def room(shapes: Sequence[Shape], device: torch.device) -> torch.Tensor:
    """Allocate memory for one piece, on the current stream."""
    dtype, shape = shapes[0]
    if len(shapes) > 1 and shapes.count(shapes[0]) == len(shapes):
        shape = (len(shapes) * math.prod(shape),)
    elif len(shapes) > 1:
        shape = (sum(math.prod(extents) for _, extents in shapes),)
    return torch.empty(shape, dtype=dtype, device=device)


def split(tensor: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """Return the tensors of one piece. Raises ValueError if they have another dtype."""
    if len(shapes) == 1:
        return [tensor]
    if any(dtype is not tensor.dtype for dtype, _ in shapes):
        raise ValueError(f"a piece of {tensor.dtype} for tensors of another dtype")
    first = shapes[0]
    if shapes.count(first) == len(shapes):
        return list(tensor.view(len(shapes), *first[1]).unbind(0))
    parts: list[torch.Tensor] = []
    begin = 0
    for _, shape in shapes:
        strides, size = layout(shape)
        parts.append(tensor.as_strided(shape, strides, begin))  # takes half as long as a slice and a view
        begin += size
    return parts


@functools.lru_cache(4096)
def layout(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """The strides of a contiguous tensor, and how many elements it has."""
    strides, size = [0] * len(shape), 1
    for dimension in reversed(range(len(shape))):
        strides[dimension] = size
        size *= shape[dimension]
    return tuple(strides), size


@functools.lru_cache(4096)
def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a tensor with these strides is."""
    wanted, size = layout(shape)
    along = zip(shape, strides, wanted, strict=True)
    return not size or all(extent == 1 or stride == needed for extent, stride, needed in along)
