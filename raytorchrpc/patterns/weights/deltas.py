"""Deltas of weights: of a tensor of which few elements have changed, only these elements, bit for bit.

A home finds them when it publishes, and keeps them with the snapshot. Elements are compared and moved as integers, so
that every bit counts: NaNs keep their payload, and zeros their sign.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from raytorchrpc.errors import NotFound
from raytorchrpc.patterns.weights.shards import Region, strides_of
from raytorchrpc.tensors.dtypes import as_copyable, span_of, unrecorded

#: A tensor has a delta if at most this share of its elements has changed. Indices take more bytes than most elements.
MOST_CHANGED = 1 / 8
#: Smaller tensors always have one, so that they need no request of their own (bytes).
TINY = 4 << 10

_LONG = 8
_INT32_MAX = torch.iinfo(torch.int32).max
#: Words that a CPU compares at once, so that they stay in its cache.
_WORDS_AT_ONCE = 1 << 18

#: Elements of a contiguous tensor, from the first to before the last: (place in the layout, first, last).
Span = tuple[int, int, int]
#: Of each span: which of the pairs of flat tensors has its elements, and how many they are.
Runs = list[tuple[int, int]]


class Delta(NamedTuple):
    """The elements of one contiguous tensor that differ from the version before."""

    at: torch.Tensor  # which elements, ascending: int32 if the tensor has no more, else int64
    bits: torch.Tensor  # what they are now, as integers
    elements: int  # how many the tensor has


class Deltas(NamedTuple):
    """The deltas of one version."""

    base: int  # the version before, to which they apply
    by_place: Mapping[int, Delta]  # by the tensor's place in the layout

    def counts(self) -> list[tuple[int, int]]:
        """Return the places, and how many elements each has."""
        return [(place, delta.at.numel()) for place, delta in self.by_place.items()]

    def read(self, spans: Sequence[Span]) -> tuple[Runs, list[torch.Tensor]]:
        """The elements of these spans in few flat tensors: pairs of indices and bits. Raises NotFound."""
        if any(place not in self.by_place for place, *_ in spans):
            raise NotFound("this version of the weights has no such delta")
        groups: dict[tuple[torch.dtype, torch.dtype, torch.device], list[Delta]] = {}
        runs: Runs = []
        for delta in _within([(self.by_place[place], first, last) for place, first, last in spans]):
            kind = delta.at.dtype, delta.bits.dtype, delta.bits.device
            groups.setdefault(kind, []).append(delta)
            runs.append((list(groups).index(kind), delta.at.numel()))
            if delta.bits.is_cuda:  # the allocator of another thread's stream must not reuse it before it was read
                stream = torch.cuda.current_stream(delta.bits.device)
                delta.at.record_stream(stream)
                delta.bits.record_stream(stream)
        flat = [
            torch.cat(each)
            for deltas in groups.values()
            for each in ([delta.at for delta in deltas], [delta.bits for delta in deltas])
        ]
        return runs, flat


def _within(wanted: Sequence[tuple[Delta, int, int]]) -> list[Delta]:
    """Cut each delta to the elements from a first to before a last. Blocks once for each GPU."""
    deltas = [delta for delta, *_ in wanted]
    bounds: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, (delta, first, last) in enumerate(wanted):
        if first <= 0 and last >= delta.elements:
            continue
        ends = torch.searchsorted(delta.at, delta.at.new_tensor([first, last]))
        bounds.setdefault(ends.device, []).append((number, ends))
    for on_device in bounds.values():
        both = torch.stack([ends for _, ends in on_device]).tolist()
        for (number, _), (begin, end) in zip(on_device, both, strict=True):
            delta = deltas[number]
            deltas[number] = delta._replace(at=delta.at[begin:end], bits=delta.bits[begin:end])
    return deltas


def may_have_delta(tensor: torch.Tensor) -> bool:
    """Whether a changed tensor of this spec has a delta if few of its elements have changed."""
    return tensor.itemsize <= _LONG and tensor.numel() > 0


def _most_changed(tensor: torch.Tensor) -> int:
    return tensor.numel() if tensor.nbytes < TINY else int(tensor.numel() * MOST_CHANGED)


def find_deltas(
    base: int, places: Sequence[int], ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> Deltas:
    """Find the deltas from version ``base`` to ``ones``, where few elements have changed. Waits for each GPU once."""
    deltas: dict[int, Delta] = {}
    on_gpu: dict[torch.device, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
    with torch.inference_mode(False), torch.no_grad():
        for place, one, other in zip(places, ones, others, strict=True):
            one, other = as_copyable(one).view(-1), as_copyable(other).view(-1)
            if one.is_cuda:
                on_gpu.setdefault(one.device, []).append((place, one, other))
            elif (delta := _compare_on_cpu(one, other)) is not None:
                deltas[place] = delta
        for pairs in on_gpu.values():
            counts = torch.stack([(one != other).count_nonzero() for _, one, other in pairs]).tolist()
            for (place, one, other), count in zip(pairs, counts, strict=True):
                if count <= _most_changed(one):
                    # The count is known, so that nothing waits for the GPU here.
                    index = torch.nonzero_static(one != other, size=count).view(-1)
                    deltas[place] = _delta(one, index)
    return Deltas(base, deltas)


def _compare_on_cpu(one: torch.Tensor, other: torch.Tensor) -> Delta | None:
    """Compare words of 8 bytes first, which takes two thirds of the time for bfloat16 of which 1 % has changed."""
    most = _most_changed(one)
    many = _LONG // one.itemsize
    whole = one.numel() // many * many
    words, others = one[:whole].view(torch.int64), other[:whole].view(torch.int64)
    differing, count = [words.new_empty(0)], 0
    for begin in range(0, words.numel(), _WORDS_AT_ONCE):
        end = begin + _WORDS_AT_ONCE
        differ = (words[begin:end] != others[begin:end]).nonzero().view(-1)
        if (count := count + differ.numel()) > most:
            return None
        differing.append(differ.add_(begin))
    at = torch.cat(differing)
    changed = (words[at].view(one.dtype) != others[at].view(one.dtype)).nonzero().view(-1)
    rest = (one[whole:] != other[whole:]).nonzero().view(-1)
    index = torch.cat([at[changed // many] * many + changed % many, rest + whole])
    return _delta(one, index) if index.numel() <= most else None


def _delta(one: torch.Tensor, index: torch.Tensor) -> Delta:
    bits = one[index]
    return Delta(index.to(torch.int32) if one.numel() <= _INT32_MAX else index, bits, one.numel())


def bounds_of(region: Region) -> tuple[int, int]:
    """Return the first element of a region that is not empty, and the one after its last."""
    first, shape, strides = region
    return first, first + (math.prod(shape) if strides is None else span_of(shape, strides))


def delta_bytes(region: Region, elements: int, itemsize: int, count: int) -> int:
    """The bytes that a region takes of a delta of ``count`` elements, at most, or about, if they are evenly spread.

    ``elements``: of the published tensor.
    """
    first, last = bounds_of(region)
    return math.ceil(count * (last - first) / elements) * (itemsize + (4 if elements <= _INT32_MAX else _LONG))


def apply(regions: Sequence[Region], targets: Sequence[torch.Tensor], answer: tuple[Runs, list[torch.Tensor]]) -> None:
    """Write the elements that a home has sent for these regions to their targets; see ``Deltas.read``."""
    runs, flat = answer
    begins = [0] * len(flat)
    moved: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
    with unrecorded(targets):
        for region, target, (group, count) in zip(regions, targets, runs, strict=True):
            device, begin = target.device, begins[group]
            if (group, device) not in moved:
                moved[group, device] = [tensor.to(device) for tensor in flat[2 * group : 2 * group + 2]]
            index, bits = moved[group, device]
            _write(region, as_copyable(target), index[begin : begin + count].long(), bits[begin : begin + count])
            begins[group] += count


def _write(region: Region, target: torch.Tensor, positions: torch.Tensor, bits: torch.Tensor) -> None:
    first, shape, strides = region
    if strides is None and first:  # elements that follow one another in the published tensor
        positions = positions - first
    if strides is None and target.is_contiguous():
        target.view(-1).scatter_(0, positions, bits)
        return
    begin = [0] * len(shape)
    for dimension, stride in enumerate(strides or ()):
        begin[dimension], first = divmod(first, stride)
    places, is_within = torch.zeros_like(positions), torch.ones_like(positions, dtype=torch.bool)
    for start, extent, stride, step in zip(begin, shape, strides or strides_of(shape), target.stride(), strict=True):
        along = positions.div(stride, rounding_mode="floor") - start
        positions = positions.remainder(stride)
        is_within &= (along >= 0) & (along < extent)
        places += along * step
    memory = target.as_strided((span_of(shape, target.stride()),), (1,), target.storage_offset())
    if strides is None:  # all are within
        memory.scatter_(0, places, bits)
    else:
        memory.scatter_(0, places[is_within], bits[is_within])
