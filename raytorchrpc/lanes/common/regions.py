"""Divides the copy of a strided region into copies of rows of contiguous bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from raytorchrpc.lanes.base import SMALL
from raytorchrpc.tensors.dtypes import span_of

#: Shorter rows are assumed to take longer to copy alone than with everything between them (bytes; not measured).
_NARROW = 32
#: Everything between the rows is only copied if the span of the region has at most this many times its bytes.
_DENSE = 4


class Dimension(NamedTuple):
    """One dimension of a copy: its extent, and the bytes from one place to the next in the source and the target."""

    extent: int
    source: int
    target: int


class Rows(NamedTuple):
    """One copy: ``number`` rows of ``width`` contiguous bytes."""

    source: int
    """Where the first row begins, in bytes from the begin of the region; ``target`` likewise."""
    target: int
    width: int
    number: int
    source_pitch: int
    """Bytes from one row to the next, at least ``width``; ``target_pitch`` likewise."""
    target_pitch: int


def collapse(
    shape: Sequence[int], itemsize: int, source: Sequence[int], target: Sequence[int]
) -> tuple[int, list[Dimension]]:
    """Merge the dimensions that are jointly contiguous in source and target.

    ``source``, ``target``: the strides of a region that is not empty, in elements of ``itemsize`` bytes. Returns the
    bytes that are contiguous in both, and the dimensions over them, outermost first.
    """
    found = [
        Dimension(extent, here * itemsize, there * itemsize)
        for extent, here, there in zip(shape, source, target, strict=True)
        if extent != 1
    ]
    found.sort(key=lambda dimension: dimension.target, reverse=True)
    merged: list[Dimension] = []
    for inner in [*found, Dimension(itemsize, 1, 1)]:
        if merged:
            outer = merged[-1]
            if outer.source == inner.source * inner.extent and outer.target == inner.target * inner.extent:
                inner = inner._replace(extent=outer.extent * inner.extent)
                merged.pop()
        merged.append(inner)
    return merged.pop().extent, merged


@functools.lru_cache(8192)
def copies(
    shape: tuple[int, ...], itemsize: int, source: tuple[int, ...], target: tuple[int, ...], max_pitch: int
) -> tuple[Rows, ...] | None:
    """Return the copies that bring a strided region to a strided target; none for an empty one.

    ``source``, ``target``: the strides, in elements of ``itemsize`` bytes. ``max_pitch``: largest for ``Rows``. Returns
    None if it is better to copy the whole span of the region to a temporary, and from there with a strided copy.
    """
    if 0 in shape:
        return ()
    width, dimensions = collapse(shape, itemsize, source, target)
    row = Dimension(1, width, width)
    for dimension in dimensions:
        pitches = dimension.source, dimension.target
        if dimension.extent > row.extent and min(pitches) >= width and max(pitches) <= max_pitch:
            row = dimension
    if row.extent > 1:
        dimensions.remove(row)
    size = math.prod(shape) * itemsize
    needed = math.prod(dimension.extent for dimension in dimensions)
    slow = (width < _NARROW and size >= SMALL) or (needed > 1 and size < needed * SMALL)
    if slow and span_of(shape, source) * itemsize <= _DENSE * size:
        return None
    places = [(0, 0)]
    for extent, here, there in dimensions:
        places = [(begin + place * here, end + place * there) for begin, end in places for place in range(extent)]
    return tuple(Rows(begin, end, width, row.extent, row.source, row.target) for begin, end in places)
