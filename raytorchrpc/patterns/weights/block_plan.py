"""Plans of pulls into fp8: which matrices publishers convert, and which scales the model has to have for them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from raytorchrpc.patterns.weights.conversions import FP8, SOURCES, BlockFp8, blocks_in, scales_of
from raytorchrpc.patterns.weights.names import check_fits
from raytorchrpc.patterns.weights.shards import Shard
from raytorchrpc.patterns.weights.slices import Held, Published, Request, Slice, differing
from raytorchrpc.tensors.dtypes import DTYPE_NAMES, DTYPES


def quantize(request: Request, fp8: BlockFp8, published: Published) -> Request:
    """Put the values and scales that publishers make in the place of their source; the request for both."""
    mapping, wrong = dict(request.options.mapping), list[str]()
    made: dict[str, list[Held]] = {}
    for target, shard in request.targets.items():
        names = mapping.get(target, (target,))
        if shard.tensor.dtype is not FP8 or any(name not in published.names for name in names):
            continue
        parts = {name: published.held(name) for name in names}
        if all(one.slice.dtype == DTYPE_NAMES[FP8] for held in parts.values() for one in held):
            continue  # published in fp8
        obstacles = [text for name, held in parts.items() for text in _unquantizable(name, held, fp8)]
        wrong += obstacles or _misfits_of_scales(target, request.targets, parts, fp8)
        mapping[target + fp8.suffix] = tuple(name + fp8.suffix for name in names)
        for name, held in parts.items():
            if name + fp8.suffix in published.names:
                wrong.append(f"{name + fp8.suffix!r} was published, but convert=BlockFp8 makes it of {name!r}")
            elif not obstacles:
                made[name] = held
    check_fits(request.store, wrong)
    for name, held in made.items():
        for one in held:
            values, scales = _quantized(one.slice, fp8)
            published.make(name, one, values)
            published.make(name + fp8.suffix, one, scales)
    return request._replace(options=request.options._replace(mapping=mapping))


@functools.lru_cache(4096)
def _quantized(values: Slice, fp8: BlockFp8) -> tuple[Slice, Slice]:
    """The values and the scales."""
    box = scales_of(values.box, values.global_shape, fp8.block)
    assert box is not None  # see _unquantizable
    scales = Slice("float32", blocks_in(values.global_shape, fp8.block), box, fp8.scales)
    return replace(values, dtype=DTYPE_NAMES[FP8], conversion=fp8.values), scales


def _unquantizable(name: str, held: Sequence[Held], fp8: BlockFp8) -> list[str]:
    """Why publishers cannot convert a tensor to fp8."""
    dtype, shape = held[0].slice.dtype, held[0].slice.global_shape
    if (difference := differing(name, held)) is not None:
        return [difference]
    if dtype not in SOURCES:
        return [f"{name!r} is {dtype} as published, and BlockFp8 converts {', '.join(sorted(SOURCES))}"]
    if len(shape) != 2:
        return [f"{name!r} has shape {shape}, and BlockFp8 converts matrices, which have two dimensions"]
    return [
        f"{name!r}: the shard {one.slice.box} of {shape} by {one.publisher!r} cuts a block of {fp8}: publish shards "
        f"that begin at multiples of a block and end there, or with the tensor"
        for one in held
        if scales_of(one.slice.box, shape, fp8.block) is None
    ]


def _misfits_of_scales(
    target: str, targets: Mapping[str, Shard], parts: Mapping[str, Sequence[Held]], fp8: BlockFp8
) -> list[str]:
    """What is amiss with the scales that the model has for one of its tensors."""
    shard, scales, name = targets[target], targets.get(target + fp8.suffix), target + fp8.suffix
    if len(shard.global_shape) != 2:
        return []  # another shape than the published one
    *others, last = ((part, held[0].slice.global_shape[0]) for part, held in parts.items())
    for part, rows in others if shard.is_whole else (*others, last) if others else ():
        if rows % fp8.block[0]:
            return [f"{target!r} is made of {part!r}, whose {rows} rows are not a multiple of a block of {fp8}"]
    box, whole = scales_of(shard.box, shard.global_shape, fp8.block), blocks_in(shard.global_shape, fp8.block)
    if box is None:
        return [f"{target!r}: the model's shard {shard.box} of {shard.global_shape} cuts a block of {fp8}"]
    needed = f"float32 {box.shape}" + ("" if shard.is_whole else f" at {box.offset} of {whole}")
    if scales is None:
        return [f"the model has no {name!r} for the scales of {target!r}: {needed}, one for each block of {fp8}"]
    given = f"{DTYPE_NAMES[scales.tensor.dtype]} {tuple(scales.tensor.shape)}"
    if scales.tensor.dtype is not DTYPES["float32"] or scales.global_shape != whole or scales.box != box:
        shown = given if scales.is_whole else f"{given} at {scales.offset} of {scales.global_shape}"
        return [f"{name!r} is {shown} in the model, and the scales of {target!r} are {needed}"]
    return []
