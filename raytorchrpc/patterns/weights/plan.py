"""Plans a pull of shards: which region of which publisher's tensors goes to which region of the model's.

Pure: global indices in, regions out. Every element comes from one publisher, so no byte moves that is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raytorchrpc.errors import ConfigurationError
from raytorchrpc.patterns.weights.shards import Box, Shard
from raytorchrpc.tensors.dtypes import DTYPE_NAMES, DTYPES

#: Of a shard: (shape of the global tensor, offset in it).
PlaceInWhole = tuple[tuple[int, ...], tuple[int, ...]]
#: A tensor in a message: name, dtype's name, shape, and for a shard its place.
Row = tuple[str, str, tuple[int, ...], PlaceInWhole | None]
#: Names of the model -> the published name, or those of the parts of a fused parameter, in order.
Renamed = Mapping[str, str | Sequence[str]]


class Held(NamedTuple):
    """A shard that a publisher has."""

    source: int
    """Which publisher."""
    place: int
    """In its layout."""
    dtype: str
    global_shape: tuple[int, ...]
    box: Box


class Wanted(NamedTuple):
    """A box of a published tensor that goes to a region of one of the model's tensors."""

    target: str
    """Name of the model's tensor."""
    begin: tuple[int, ...]
    """Where the region begins in the model's tensor."""
    dtype: str
    global_shape: tuple[int, ...]
    box: Box


class Move(NamedTuple):
    """One region to copy. ``shape`` elements."""

    place: int
    """In the publisher's layout."""
    dtype: str | None
    """Converted to it before (None: as published)."""
    source_begin: tuple[int, ...]
    """In the publisher's tensor."""
    target: str
    target_begin: tuple[int, ...]
    """In the model's tensor."""
    shape: tuple[int, ...]


class Options(NamedTuple):
    """See ``WeightStore.pull``."""

    mapping: Mapping[str, tuple[str, ...]]
    convert: bool
    strict: bool

    @staticmethod
    def of(mapping: Renamed | None = None, convert: bool = False, strict: bool = True) -> Options:
        """Of the arguments of a pull."""
        given = (mapping or {}).items()
        names = {name: (parts,) if isinstance(parts, str) else tuple(parts) for name, parts in given}
        return Options(names, convert, strict)


class Request(NamedTuple):
    """What a pull is to bring, and how."""

    store: str
    targets: Mapping[str, Shard]
    options: Options


def plan(request: Request, layouts: Sequence[Sequence[Row]], near: Sequence[int], turn: int) -> list[list[Move]]:
    """For each publisher, what to bring from it.

    Args:
        layouts: the rows of each publisher.
        near: for each publisher, how far it is; data that several have comes from the nearest.
        turn: differs between readers, so that they spread over equally near publishers.

    Raises ConfigurationError, which names up to ten tensors and both layouts.
    """
    published = _published(layouts)
    wrong: list[str] = []
    moves: list[list[Move]] = [[] for _ in layouts]
    used: set[str] = set()
    for number, (name, wanted) in enumerate(_wanted(request, published, wrong)):
        used.add(name)
        held = published[name]
        if (mismatch := _mismatch(name, wanted, held, request.options.convert)) is not None:
            wrong.append(mismatch)
            continue
        ranked = sorted(held, key=lambda one: (near[one.source], (one.source + turn + number) % len(layouts)))
        missing = _cover(wanted, ranked, moves)
        if missing:
            wrong.append(
                f"{name!r}: {' and '.join(map(str, missing[:3]))} of {wanted.global_shape} were not published "
                f"(published: {_shown(held)}; the model wants {wanted.box})"
            )
    if request.options.strict:
        wrong += [f"the model has no {name!r}, which was published" for name in published if name not in used]
    if wrong:
        shown = "; ".join(wrong[:10]) + (f"; and {len(wrong) - 10} more" if len(wrong) > 10 else "")
        raise ConfigurationError(f"the weights of {request.store!r} do not fit: {shown}")
    return moves


def _published(layouts: Sequence[Sequence[Row]]) -> dict[str, list[Held]]:
    found: dict[str, list[Held]] = {}
    for source, rows in enumerate(layouts):
        for place, (name, dtype, shape, shard) in enumerate(rows):
            whole, offset = (shape, (0,) * len(shape)) if shard is None else shard
            found.setdefault(name, []).append(Held(source, place, dtype, whole, Box(offset, shape)))
    return found


def _wanted(request: Request, published: Mapping[str, list[Held]], wrong: list[str]) -> list[tuple[str, Wanted]]:
    """The boxes that the model wants, by published name. Adds what is amiss to ``wrong``."""
    found: list[tuple[str, Wanted]] = []
    for target, shard in request.targets.items():
        names = request.options.mapping.get(target, (target,))
        unknown = [name for name in names if name not in published]
        if unknown:
            if request.options.strict or len(unknown) < len(names):
                what = f", which {target!r} is to be made of," if target in request.options.mapping else " of the model"
                wrong += [f"{name!r}{what} was not published" for name in unknown]
            continue
        dtype = DTYPE_NAMES[shard.tensor.dtype]
        if len(names) == 1:
            begin = (0,) * len(shard.global_shape)
            found.append((names[0], Wanted(target, begin, dtype, shard.global_shape, shard.box)))
        else:
            found += _fused(target, shard, dtype, [(name, published[name][0].global_shape) for name in names], wrong)
    wrong += [
        f"mapping names {name!r}, which the model does not have"
        for name in request.options.mapping
        if name not in request.targets
    ]
    return found


def _fused(
    target: str, shard: Shard, dtype: str, parts: Sequence[tuple[str, tuple[int, ...]]], wrong: list[str]
) -> list[tuple[str, Wanted]]:
    """Divide a fused tensor along its first dimension. A shard of it has the same share of each part, one after the
    other, as merged layers have in tensor parallel inference.
    """
    whole, first, extent = shard.global_shape, shard.offset[0], shard.tensor.shape[0]
    shapes = " + ".join(str(shape) for _, shape in parts)
    if sum(shape[0] for _, shape in parts) != whole[0] or any(shape[1:] != whole[1:] for _, shape in parts):
        wrong.append(f"{target!r} is {whole} in the model, and made of {shapes}")
        return []
    found: list[tuple[str, Wanted]] = []
    begin = 0
    for name, shape in parts:
        share, rest = divmod(shape[0] * extent, whole[0])
        offset, odd = divmod(shape[0] * first, whole[0])
        if rest or odd:
            wrong.append(
                f"{target!r} has {extent} rows from {first} on of {whole[0]}, which is no whole number of rows of "
                f"{name!r} {shape}: pull into a Shard of each part"
            )
            return []
        box = Box((offset, *shard.offset[1:]), (share, *shard.tensor.shape[1:]))
        found.append((name, Wanted(target, (begin,) + (0,) * (len(whole) - 1), dtype, shape, box)))
        begin += share
    return found


def _mismatch(name: str, wanted: Wanted, held: Sequence[Held], convert: bool) -> str | None:
    if len({(one.global_shape, one.dtype) for one in held}) > 1:
        return f"{name!r} differs between publishers: {_shown(held)}"
    shape, dtype = held[0].global_shape, held[0].dtype
    if shape != wanted.global_shape:
        return f"{name!r} is {shape} as published, and {wanted.global_shape} in the model"
    may_convert = convert and DTYPES[dtype].is_floating_point and DTYPES[wanted.dtype].is_floating_point
    if dtype != wanted.dtype and not may_convert:
        remedy = "" if convert else " (convert=True converts floating dtypes)"
        return f"{name!r} is {dtype} as published, and {wanted.dtype} in the model{remedy}"
    return None


def _shown(held: Sequence[Held]) -> str:
    return ", ".join(f"{one.dtype} {one.global_shape} {one.box} by publisher {one.source}" for one in held[:4])


def _cover(wanted: Wanted, held: Sequence[Held], moves: list[list[Move]]) -> list[Box]:
    """Add the moves that bring a box, each element once; returns what nobody has."""
    missing = [wanted.box] if wanted.box.size else []
    for one in held:
        left: list[Box] = []
        for box in missing:
            common = box.intersection(one.box)
            if common is None:
                left.append(box)
                continue
            moves[one.source].append(_move(wanted, one, common))
            left += box.without(common)
        missing = left
        if not missing:
            break
    return missing


def _move(wanted: Wanted, held: Held, box: Box) -> Move:
    source = tuple(at - first for at, first in zip(box.offset, held.box.offset, strict=True))
    steps = zip(wanted.begin, box.offset, wanted.box.offset, strict=True)
    target = tuple(begin + at - first for begin, at, first in steps)
    dtype = None if held.dtype == wanted.dtype else wanted.dtype
    return Move(held.place, dtype, source, wanted.target, target, box.shape)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def region_of(shape: Sequence[int], begin: Sequence[int], extents: Sequence[int]) -> tuple[int, tuple[int, ...] | None]:
    """Where a region of a contiguous tensor begins, and its strides (None: it is contiguous), in elements."""
    strides = strides_of(shape)
    offset = sum(first * stride for first, stride in zip(begin, strides, strict=True))
    inner = next((dimension for dimension, extent in enumerate(extents) if extent > 1), len(extents))
    if tuple(extents[inner + 1 :]) == tuple(shape[inner + 1 :]):
        return offset, None
    return offset, strides
