"""Plans a pull: which region of which publisher's tensors goes to which region of the model's.

Pure: global indices in, regions out. Every element comes from one publisher, so no byte moves that is not needed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch

from raytorchrpc.patterns.weights.block_plan import quantize
from raytorchrpc.patterns.weights.conversions import BlockFp8, Convert
from raytorchrpc.patterns.weights.names import check_fits, selects
from raytorchrpc.patterns.weights.shards import Box, Region, Shard, region_of
from raytorchrpc.patterns.weights.slices import (
    Held,
    KnownLayout,
    Published,
    Request,
    Slice,
    differing,
    shown,
)
from raytorchrpc.patterns.weights.snapshots import Place
from raytorchrpc.tensors.dtypes import DTYPE_NAMES, DTYPES


class Transfer(NamedTuple):
    """One region of a published tensor that goes to a region of one of the model's."""

    place: Place
    region: Region  # of the published tensor, after its conversion
    offset: int  # where the region begins in the piece (bytes)
    nbytes: int
    target: str  # name of the model's tensor
    begin: tuple[int, ...] | None  # where in the model's tensor; None: the region fills all of it
    piece: int = 0  # which of the pieces of its conversion that a snapshot has


def plan(request: Request, layouts: Sequence[KnownLayout], distances: Sequence[int], turn: int) -> list[list[Transfer]]:
    """For each publisher, what to bring from it. Raises ConfigurationError, which names up to ten tensors.

    What several have comes from the nearest; ``turn`` spreads readers over equally near ones.
    """
    published = Published(request.publishers, layouts)
    wrong: list[str] = []
    lacking, unpublished = list[str](), list[str]()
    if isinstance(request.options.convert, BlockFp8):
        request = quantize(request, request.options.convert, published)
    transfers: list[list[Transfer]] = [[] for _ in layouts]
    known: dict[Hashable, _Divided] = {}  # the layers of a model are alike
    for number, (name, target, wanted) in enumerate(_wanted(request, published, wrong, unpublished)):
        alike, shift = (wanted, *[slices.get(name) for slices in published.slices]), (number + turn) % len(layouts)
        divided = known.get(alike) or known.get((alike, shift))
        if divided is None:
            held = published.held(name)
            if (mismatch := _mismatch(name, wanted, held, request.options.convert)) is not None:
                wrong.append(mismatch)
                continue
            ranks = [(distances[source], (source + shift) % len(layouts)) for source in range(len(layouts))]
            divided = _divide(wanted, sorted(held, key=lambda one: ranks[one.source]))
            known[(alike, shift) if divided.depends_on_order else alike] = divided
        for source, (conversion, region, first, nbytes, begin) in divided.regions:
            place = published.places[source][name]
            piece, offset = layouts[source].span(place, conversion)
            transfer = Transfer((place, conversion), region, offset + first, nbytes, target, begin, piece)
            transfers[source].append(transfer)
        if missing := divided.missing:
            wrong.append(
                f"{name!r}: {' and '.join(map(str, missing[:3]))} of {wanted.global_shape} were not published "
                f"(published: {shown(published.held(name))}; the model wants {wanted.box})"
            )
    if request.options.strict:
        used = {part for name in request.targets for part in request.options.mapping.get(name, (name,))}
        used |= request.elsewhere
        lacking = [name for name in published.names if name not in used and selects(request.options.only, name)]
        wrong += [f"the model has no {name!r}, which was published" for name in lacking]
    check_fits(request.store, wrong, lacking, unpublished)
    return transfers


def _wanted(
    request: Request, published: Published, wrong: list[str], unpublished: list[str]
) -> list[tuple[str, str, Slice]]:
    """What is wanted of each published name, and for which tensor of the model.

    Adds what is amiss to ``wrong`` and ``unpublished``.
    """
    slices: list[tuple[str, str, Slice]] = []
    for target, shard in request.targets.items():
        names = request.options.mapping.get(target, (target,))
        unknown = [name for name in names if name not in published.names]
        if unknown:
            if request.options.strict or len(unknown) < len(names):
                role = f", which {target!r} is to be made of," if target in request.options.mapping else " of the model"
                wrong += [f"{name!r}{role} was not published" for name in unknown]
                unpublished += [] if target in request.options.mapping else unknown
            continue
        if len(names) == 1:
            tensor, whole, offset = shard
            slices.append((names[0], target, _slice_for(tensor.dtype, tensor.shape, whole, offset)))
        else:
            parts = [(name, published.held(name)[0].slice.global_shape) for name in names]
            slices += [(name, target, part) for name, part in _fused(target, shard, parts, wrong)]
    wrong += [
        f"mapping names {name!r}, which the model does not have (the model's name comes first, then what was published)"
        for name in request.options.mapping
        if name not in request.targets
    ]
    return slices


@functools.lru_cache(4096)
def _slice_for(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    whole: tuple[int, ...],
    offset: tuple[int, ...],
    extents: tuple[int, ...] | None = None,
    begin: tuple[int, ...] | None = None,
) -> Slice:
    """What a tensor of the model wants. ``extents``: of the box, if it is not the whole tensor's."""
    shape = tuple(shape)
    box = Box(offset, extents or shape)
    return Slice(DTYPE_NAMES[dtype], whole, box, shape=shape, begin=begin or (0,) * len(shape))


def _fused(
    target: str, shard: Shard, parts: Sequence[tuple[str, tuple[int, ...]]], wrong: list[str]
) -> list[tuple[str, Slice]]:
    """Divide a fused tensor, or the same share of each part, along its first dimension."""
    whole = shard.global_shape
    inner = {shape[1:] for _, shape in parts} | {whole[1:]}
    if not all((whole, *(shape for _, shape in parts))) or len(inner) > 1 or sum(s[0] for _, s in parts) != whole[0]:
        shapes = " + ".join(str(shape) for _, shape in parts)
        wrong.append(f"{target!r} is {whole} in the model, and made of {shapes}, one after the other along dimension 0")
        return []
    dtype, extents, (first, *rest_of_offset) = shard.tensor.dtype, tuple(shard.tensor.shape), shard.offset
    slices: list[tuple[str, Slice]] = []
    begin = 0
    for name, shape in parts:
        share, rest = divmod(shape[0] * extents[0], whole[0])
        offset, odd = divmod(shape[0] * first, whole[0])
        if rest or odd:
            wrong.append(
                f"{target!r} has {extents[0]} rows from {first} on of {whole[0]}, which is no whole number of rows of "
                f"{name!r} {shape}: pull into a Shard of each part"
            )
            return []
        box = (offset, *rest_of_offset), (share, *extents[1:])
        slices.append((name, _slice_for(dtype, extents, shape, *box, (begin,) + (0,) * (len(whole) - 1))))
        begin += share
    return slices


def _mismatch(name: str, wanted: Slice, held: Sequence[Held], convert: Convert) -> str | None:
    if (difference := differing(name, held)) is not None:
        return difference
    shape, dtype = held[0].slice.global_shape, held[0].slice.dtype
    if shape != wanted.global_shape:
        is_whole = wanted.box.shape == wanted.global_shape and len(shape) == len(wanted.global_shape)
        remedy = ""
        if is_whole and all(map(operator.le, wanted.global_shape, shape)):
            remedy = " (for a part of it, pull a Shard or a DTensor)"
        elif is_whole and all(map(operator.ge, wanted.global_shape, shape)):
            part = ", ".join([f":{extent}" for extent in shape])
            remedy = f" (to fill a part of that, pull into a view such as tensor[{part}])"
        return f"{name!r} is {shape} as published, and {wanted.global_shape} in the model{remedy}"
    if dtype == wanted.dtype:
        return None
    if held[0].slice.conversion is not None:
        return (
            f"{name!r} is {wanted.dtype} in one tensor of the model, and {dtype} in another: BlockFp8 makes one of them"
        )
    is_floating = DTYPES[dtype].is_floating_point and DTYPES[wanted.dtype].is_floating_point
    if convert and is_floating:
        return None
    remedy = "convert=True converts it" if is_floating else "only floating dtypes are converted"
    return f"{name!r} is {dtype} as published, and {wanted.dtype} in the model ({remedy})"


class _Divided(NamedTuple):
    """How what is wanted comes from those that have parts of it."""

    regions: Sequence[tuple[int, tuple[str | None, Region, int, int, tuple[int, ...] | None]]]
    """For each source: the fields of a ``Transfer`` but for its place and target."""
    missing: Sequence[Box]  # what none has
    depends_on_order: bool  # because several have the same


def _divide(wanted: Slice, held: Iterable[Held]) -> _Divided:
    """``held``: in the order in which they are asked for what they have."""
    regions, itemsize, common_size = [], DTYPES[wanted.dtype].itemsize, 0
    missing = [wanted.box] if wanted.box.size else []
    for source, _, _, part in held:
        if (whole := wanted.box.intersection(part.box)) is None:
            continue
        common_size += whole.size
        lacking: list[Box] = []
        conversion = part.conversion or (None if part.dtype == wanted.dtype else wanted.dtype)
        for box in missing:
            common = whole if box is wanted.box else box.intersection(part.box)
            if common is None:
                lacking.append(box)
                continue
            inside = tuple(map(operator.sub, common.offset, part.box.offset))
            steps = zip(wanted.begin, common.offset, wanted.box.offset, strict=True)
            begin = None if common.shape == wanted.shape else tuple(own + at - first for own, at, first in steps)
            first, strides = region_of(part.box.shape, inside, common.shape)
            region = first, common.shape, strides
            regions.append((source, (conversion, region, first * itemsize, common.size * itemsize, begin)))
            lacking += box.without(common)
        missing = lacking
    return _Divided(regions, missing, common_size > wanted.box.size - sum(box.size for box in missing))
