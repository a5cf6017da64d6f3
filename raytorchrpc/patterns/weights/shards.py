"""Shards: boxes of global tensors, as members hold them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch

from raytorchrpc.tensors.dtypes import OutOfBounds, within

#: Of a shard: (shape of the global tensor, offset in it).
PlaceInWhole = tuple[tuple[int, ...], tuple[int, ...]]
#: A tensor in a message: name, dtype's name, shape, and for a shard its place.
Row = tuple[str, str, tuple[int, ...], PlaceInWhole | None]


class Box(NamedTuple):
    """Indices of a global tensor: ``shape`` elements from ``offset`` on, in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def intersection(self, other: Box) -> Box | None:
        """The indices in both; None if there are none."""
        begin = tuple(map(max, self.offset, other.offset))
        shape = tuple(map(operator.sub, map(min, self.end, other.end), begin))
        return Box(begin, shape) if min(shape, default=1) > 0 else None

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(map(operator.add, self.offset, self.shape))

    def without(self, part: Box) -> list[Box]:
        """Boxes that have the other indices. ``part`` lies in this box."""
        others: list[Box] = []
        begin, end = list(self.offset), list(self.end)
        for dimension, (first, last) in enumerate(zip(part.offset, part.end, strict=True)):
            for low, high in ((begin[dimension], first), (last, end[dimension])):
                if low < high:
                    offset, shape = list(begin), [end[d] - begin[d] for d in range(len(begin))]
                    offset[dimension], shape[dimension] = low, high - low
                    others.append(Box(tuple(offset), tuple(shape)))
            begin[dimension], end[dimension] = first, last
        return others

    def __str__(self) -> str:
        ranges = zip(self.offset, self.end, strict=True)
        return "[" + ", ".join(f"{first}:{last}" for first, last in ranges) + "]"


class Shard(NamedTuple):
    """A box of a global tensor, for ``WeightStore.publish`` and ``pull``.

    For layouts that no DTensor describes: experts, stacked layers, views into a fused parameter.

    Attributes:
        tensor: the elements; dense, with any strides. A pull writes to its memory.
        global_shape: the shape of the global tensor, which has as many dimensions as ``tensor``.
        offset: the index of the first element in the global tensor.

    Examples:
        >>> half = rtr.Shard(torch.zeros(2, 4), global_shape=(4, 4), offset=(2, 0))  # the lower two rows
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Which indices of the global tensor it has."""
        return Box(self.offset, tuple(self.tensor.shape))

    @property
    def is_whole(self) -> bool:
        """Whether it has all of the global tensor."""
        return tuple(self.tensor.shape) == self.global_shape


#: A region of a contiguous tensor: (first element, shape, strides in elements; None: contiguous).
Region = tuple[int, tuple[int, ...], tuple[int, ...] | None]


def cut(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """View a region of a contiguous tensor. Raises OutOfBounds."""
    offset, shape, strides = region
    if strides is None:
        if not offset and shape == tensor.shape:
            return tensor
        within(offset, math.prod(shape), tensor.numel())
        return tensor.view(-1)[offset : offset + math.prod(shape)].view(shape)
    last = offset + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    if min((offset, *shape, *strides)) < 0 or (0 not in shape and last >= tensor.numel()):
        raise OutOfBounds(f"a region of shape {shape} and strides {strides} from {offset} on")
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def region_of(
    shape: tuple[int, ...], begin: tuple[int, ...], extents: tuple[int, ...]
) -> tuple[int, tuple[int, ...] | None]:
    """Where a region of a contiguous tensor begins, and its strides (None: it is contiguous), in elements."""
    strides = strides_of(shape)
    offset = sum(first * stride for first, stride in zip(begin, strides, strict=True))
    inner = next((dimension for dimension, extent in enumerate(extents) if extent > 1), len(extents))
    if extents[inner + 1 :] == shape[inner + 1 :]:
        return offset, None
    return offset, strides
