"""What publishers have of each tensor, and what a pull asks of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from raytorchrpc.patterns.weights.conversions import BlockFp8, Convert, converts_blocks
from raytorchrpc.patterns.weights.names import Only, Renamed, globs_of, renames, selected
from raytorchrpc.patterns.weights.shards import Box, PlaceInWhole, Row, Shard
from raytorchrpc.patterns.weights.snapshots import Span, TensorSpec, converted_specs, lay_out
from raytorchrpc.tensors.dtypes import DTYPES

_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Slice:
    """A box of a global tensor: what a publisher has of it, or what one of the model's tensors wants.

    The layers of a model share these: they are compared by identity.
    """

    dtype: str  # as published, or after ``conversion``
    global_shape: tuple[int, ...]
    box: Box
    conversion: str | None = None
    """That its publisher makes before, if it is not the one to the model's dtype; see ``conversions``."""
    shape: tuple[int, ...] = ()  # of the model's tensor that wants it
    begin: tuple[int, ...] = ()  # where it begins in the model's tensor


@functools.lru_cache(4096)
def _slice_of(dtype: str, shape: tuple[int, ...], place: PlaceInWhole | None) -> Slice:
    whole, offset = (shape, (0,) * len(shape)) if place is None else place
    return Slice(dtype, whole, Box(offset, shape))


class Held(NamedTuple):
    """A slice that a publisher has."""

    source: int  # which publisher
    publisher: str  # its name
    place: int  # in its layout
    slice: Slice


class Published:
    """What publishers have of each tensor."""

    def __init__(self, publishers: Sequence[str], layouts: Sequence[KnownLayout]) -> None:
        self._publishers = publishers
        self.slices = [{name: _slice_of(*row) for name, *row in layout.rows} for layout in layouts]
        self.places = [dict(zip(slices, range(len(slices)), strict=True)) for slices in self.slices]
        """For each publisher, by the tensor's name."""
        self.names = dict.fromkeys(itertools.chain.from_iterable(self.slices))

    def held(self, name: str) -> list[Held]:
        publishers = enumerate(zip(self._publishers, self.places, self.slices, strict=True))
        return [
            Held(source, by, places[name], slices[name])
            for source, (by, places, slices) in publishers
            if name in slices
        ]

    def make(self, name: str, of: Held, made: Slice) -> None:
        """Note that a publisher makes a tensor of one that it has."""
        self.names[name], self.places[of.source][name], self.slices[of.source][name] = None, of.place, made


class KnownLayout:
    """A layout, as a home told a reader."""

    def __init__(self, number: int, rows: Sequence[Row], spans: Sequence[Span] | None = None) -> None:
        """``spans``: see ``snapshots.Layout``."""
        self.number, self.rows, self._spans = number, rows, spans
        self.count = 1 if spans is None else 1 + max((number for number, _ in spans), default=0)
        """How many pieces an unconverted snapshot has that is read in place."""
        self._offsets: dict[str | None, list[int]] = {}

    def offsets(self, conversion: str | None) -> list[int]:
        """Where each tensor begins in the memory of a snapshot that has all tensors on one device (bytes)."""
        if conversion not in self._offsets:
            sizes = [(_bytes_of(dtype, shape, conversion), _CPU) for _, dtype, shape, _ in self.rows]
            self._offsets[conversion] = lay_out(sizes)[0]
        return self._offsets[conversion]

    def span(self, place: int, conversion: str | None) -> Span:
        """Where a tensor begins: which of the pieces of its conversion, and the offset there (bytes)."""
        if conversion is None and self._spans is not None:
            return self._spans[place]
        return 0, self.offsets(conversion)[place]


@functools.lru_cache(4096)
def _bytes_of(dtype: str, shape: tuple[int, ...], conversion: str | None) -> int:
    """Of a tensor after a conversion."""
    spec = TensorSpec(DTYPES[dtype], shape, _CPU)
    return (spec if conversion is None else converted_specs([spec], conversion)[0]).nbytes


class Options(NamedTuple):
    """See ``WeightStore.pull``."""

    mapping: Mapping[str, tuple[str, ...]]
    convert: Convert
    strict: bool
    only: tuple[str, ...] = ()  # globs; none for all

    @staticmethod
    def of(
        mapping: Renamed | None = None, convert: Convert = False, strict: bool = True, only: Only | None = None
    ) -> Options:
        """Of the arguments of a pull. Raises ConfigurationError."""
        converts_blocks(convert)  # which checks it
        return Options(renames(mapping), convert, strict, globs_of(only))

    @property
    def form(self) -> Hashable:
        """What a tensor of a model gets from a version: a model has the version in this form."""
        return tuple(self.mapping.items()), self.convert


class Request(NamedTuple):
    """What a pull is to bring, and how."""

    store: str
    targets: Mapping[str, Shard]
    options: Options
    publishers: Sequence[str]  # their names
    elsewhere: frozenset[str] = frozenset()
    """Published names of what goes to tensors of the model that ``options.only`` does not select."""

    @staticmethod
    def of(store: str, model: Mapping[str, Shard], options: Options, publishers: Sequence[str]) -> Request:
        """For the tensors of a model that ``options.only`` selects, with their scales. Raises ConfigurationError."""
        if not options.only:
            return Request(store, model, options, publishers)
        names = set(selected(options.only, model, store, strict=options.strict))
        if isinstance(options.convert, BlockFp8):
            names |= {name + options.convert.suffix for name in names}
        mapping = {name: parts for name, parts in options.mapping.items() if name in names or name not in model}
        targets = {name: shard for name, shard in model.items() if name in names}
        others = (options.mapping.get(name, (name,)) for name in model if name not in names)
        elsewhere = frozenset(part for parts in others for part in parts)
        return Request(store, targets, options._replace(mapping=mapping), publishers, elsewhere)


def differing(name: str, held: Sequence[Held]) -> str | None:
    """What is amiss if publishers disagree on a tensor's global shape or dtype."""
    if len(held) > 1 and len({(one.slice.global_shape, one.slice.dtype) for one in held}) > 1:
        return f"{name!r} differs between publishers: {shown(held)}"
    return None


def shown(held: Sequence[Held]) -> str:
    """What publishers have, for errors."""
    return ", ".join(
        f"{part.dtype} {part.global_shape} {part.box} by {publisher!r}" for _, publisher, _, part in held[:4]
    )
