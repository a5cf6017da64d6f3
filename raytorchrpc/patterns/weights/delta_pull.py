"""The part of a pull that comes as deltas: which tensors, and how their elements get into the model's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from raytorchrpc.patterns.weights.deltas import TINY, Runs, Span, bytes_of, span_of
from raytorchrpc.patterns.weights.plan import Row, strides_of
from raytorchrpc.patterns.weights.selection import Selection
from raytorchrpc.patterns.weights.snapshots import Region
from raytorchrpc.tensors.dtypes import as_copyable


class Change(NamedTuple):
    """A region of a published tensor, of which the changed elements go to a target."""

    place: int
    region: Region
    shape: tuple[int, ...]
    """Of the published tensor."""
    target: torch.Tensor
    bytes: int
    """That its elements take at most, or about, if they are evenly spread."""

    @property
    def is_tiny(self) -> bool:
        """Whether the published tensor is not worth a request of its own."""
        return math.prod(self.shape) * self.target.itemsize < TINY

    @property
    def span(self) -> Span:
        return self.place, *span_of(self.region)


def divide(
    selection: Selection, deltas: Mapping[int, int], rows: Sequence[Row], times: int
) -> tuple[list[Change], Selection]:
    """Divide what a pull brings: what comes as deltas, and what comes whole.

    Args:
        deltas: the places that have a delta, and how many elements each has.
        times: how often the source sends a delta for each time that it would send the whole tensors.
    """
    changes: list[Change] = []
    rest: list[int] = []
    for index, ((place, conversion), target, region) in enumerate(zip(*selection, strict=True)):
        change = None
        if conversion is None and place in deltas and _is_writable(target):
            shape = rows[place][2]
            change = _change(place, region, shape, target, deltas[place])
        if change is not None and (change.bytes * times < target.nbytes or change.is_tiny):
            changes.append(change)
        else:
            rest.append(index)
    if all(change.is_tiny for change in changes):
        return [], selection
    return changes, selection.at(rest)


def _change(place: int, region: Region, shape: tuple[int, ...], target: torch.Tensor, count: int) -> Change:
    elements, (first, last) = math.prod(shape), span_of(region)
    share = math.ceil(count * (last - first) / elements)
    return Change(place, region, shape, target, bytes_of(share, elements, target.itemsize))


def _is_writable(target: torch.Tensor) -> bool:
    """Whether integers can be written to the memory of a tensor: not if that is another than it looks."""
    return target.numel() > 0 and bool(target.data_ptr()) and not target.is_neg() and not target.is_conj()


def messages(changes: Iterable[Change], size: int) -> list[list[Change]]:
    """Divide into messages of at most about ``size`` bytes; a larger delta is a message of its own."""
    found: list[list[Change]] = []
    filled = 0
    for change in changes:
        if not found or filled + change.bytes > size:
            found.append([])
            filled = 0
        found[-1].append(change)
        filled += change.bytes
    return found


def apply(changes: Sequence[Change], answer: tuple[Runs, list[torch.Tensor]]) -> None:
    """Write the elements that a home has sent for these changes; see ``Deltas.read``."""
    runs, flat = answer
    targets = [change.target for change in changes]
    begins = [0] * len(flat)
    moved: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
    # Tensors made under inference mode can only be written under it.
    with torch.inference_mode() if any(map(torch.Tensor.is_inference, targets)) else torch.no_grad():
        for change, (group, count) in zip(changes, runs, strict=True):
            device, begin = change.target.device, begins[group]
            if (group, device) not in moved:
                moved[group, device] = [tensor.to(device) for tensor in flat[2 * group : 2 * group + 2]]
            index, bits = moved[group, device]
            _write(change, index[begin : begin + count], bits[begin : begin + count])
            begins[group] += count


def _write(change: Change, index: torch.Tensor, bits: torch.Tensor) -> None:
    first, shape, strides = change.region
    target = as_copyable(change.target)
    positions = index.long()
    if strides is None and first == 0 and shape == change.shape and target.is_contiguous():
        target.view(-1).scatter_(0, positions, bits)
        return
    if strides is None:  # elements that follow one another in the published tensor
        its_strides, begin = strides_of(shape), [0] * len(shape)
        positions = positions - first
    else:
        its_strides, begin = strides_of(change.shape), []
        for stride in its_strides:
            begin.append(first // stride)
            first %= stride
    places, is_within = torch.zeros_like(positions), torch.ones_like(positions, dtype=torch.bool)
    for start, extent, stride, step in zip(begin, shape, its_strides, target.stride(), strict=True):
        along = positions.div(stride, rounding_mode="floor") - start
        positions = positions.remainder(stride)
        is_within &= (along >= 0) & (along < extent)
        places += along * step
    span = 1 + sum((extent - 1) * step for extent, step in zip(shape, target.stride(), strict=True))
    memory = target.as_strided((span,), (1,), target.storage_offset())
    if strides is None:  # all are within
        memory.scatter_(0, places, bits)
    else:
        memory.scatter_(0, places[is_within], bits[is_within])
