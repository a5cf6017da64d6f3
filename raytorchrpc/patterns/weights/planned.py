"""What pulls into a model bring, worked out once for as long as its tensors and the layouts stay the same."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from raytorchrpc.lanes.base import Part, Parts
from raytorchrpc.patterns.weights.conversions import converted
from raytorchrpc.patterns.weights.mismatch import check_writable
from raytorchrpc.patterns.weights.plan import Move, Request, plan, region_of
from raytorchrpc.patterns.weights.selection import KnownLayout, Offsets, Selection, writable_device_type
from raytorchrpc.patterns.weights.shards import Shard
from raytorchrpc.patterns.weights.snapshots import Region
from raytorchrpc.patterns.weights.targets import Targets
from raytorchrpc.patterns.weights.ties import Tie, ties_of, ties_of_plan
from raytorchrpc.tensors.dtypes import DTYPES


class _Bring(NamedTuple):
    """One region that a pull brings."""

    place: tuple[int, str | None]  # see ``Selection.places``
    region: Region
    offset: int
    """Where it begins in the memory of a snapshot (bytes); see ``Selection.parts``."""
    target: str
    begin: tuple[int, ...] | None
    """In the model's tensor; None: it is all of it."""
    nbytes: int

    def into(self, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """View what it fills, without autograd."""
        tensor = targets[self.target].detach()
        if self.begin is None:
            return tensor
        strides = tensor.stride()
        begin = sum(first * stride for first, stride in zip(self.begin, strides, strict=True))
        return tensor.as_strided(self.region[1], strides, tensor.storage_offset() + begin)


class _Views(Sequence[torch.Tensor]):
    """What regions fill, made when it is looked at: a lane that knows the addresses needs no views."""

    def __init__(self, brings: Sequence[_Bring], targets: Mapping[str, torch.Tensor]) -> None:
        self._brings, self._targets = brings, targets

    @cached_property
    def _made(self) -> list[torch.Tensor]:
        return [bring.into(self._targets) for bring in self._brings]

    def __len__(self) -> int:
        return len(self._brings)

    def __getitem__(self, index: Any) -> Any:
        return self._made[index]


class Filled(NamedTuple):
    """What comes from one source."""

    selection: Selection
    parts: list[Parts]
    device_type: str | None
    """See ``LayoutMatch.device_type``."""
    nbytes: int
    converts: bool
    """Whether the publisher has to convert some of it first."""
    ties: Sequence[Tie]
    """See ``LayoutMatch.ties``."""


class _Piece(NamedTuple):
    """What comes out of one piece of a snapshot's memory; see ``Snapshot.pieces``."""

    brings: list[_Bring]
    names: list[str]
    """Of the model's tensors that it fills."""
    nbytes: int
    converts: bool

    @staticmethod
    def of(brings: list[_Bring]) -> _Piece:
        names, nbytes = [*dict.fromkeys(bring.target for bring in brings)], sum(bring.nbytes for bring in brings)
        return _Piece(brings, names, nbytes, brings[0].place[1] is not None)

    def parts(self, targets: Mapping[str, torch.Tensor], known: dict[Hashable, Any]) -> Parts:
        def make(index: int) -> Part:
            bring = self.brings[index]
            return Part(bring.offset, bring.into(targets), bring.region[2])

        return Parts(len(self.brings), make, [targets[name] for name in self.names], self.nbytes, known)


class _Source(NamedTuple):
    """What a plan brings from one source."""

    brings: list[_Bring]
    places: list[tuple[int, str | None]]  # see ``Selection``
    regions: list[Region]
    pieces: list[_Piece]
    ties: Sequence[Tie]

    @staticmethod
    def of(brings: list[_Bring], ties: Sequence[Tie]) -> _Source:
        pieces: dict[str | None, list[_Bring]] = {}
        for bring in brings:
            pieces.setdefault(bring.place[1], []).append(bring)
        places, regions = [bring.place for bring in brings], [bring.region for bring in brings]
        return _Source(brings, places, regions, list(map(_Piece.of, pieces.values())), ties)

    def fill(self, targets: Targets, known: dict[Hashable, Any]) -> Filled:
        """What comes into the model's tensors. ``known``: about this source; see ``Targets.known``."""
        parts = [piece.parts(targets.tensors, known.setdefault(number, {})) for number, piece in enumerate(self.pieces)]
        if "device type" not in known:
            filled = [tensor for its in parts for tensor in its.filled]
            known["device type"] = writable_device_type(filled) if filled else None
        selection = Selection(self.places, _Views(self.brings, targets.tensors), self.regions)
        nbytes, converts = sum(piece.nbytes for piece in self.pieces), any(piece.converts for piece in self.pieces)
        return Filled(selection, parts, known["device type"], nbytes, converts, self.ties)


class Planned(NamedTuple):
    """What pulls of a model bring, as long as the layouts stay the same."""

    asked: Any
    """What the model wants; see ``signature_of``."""
    near: tuple[int, ...]
    layouts: tuple[KnownLayout, ...]
    """Of each source."""
    sources: list[_Source]

    @property
    def tied(self) -> list[tuple[str, str]]:
        """Names of one tensor of the model."""
        found: list[tuple[str, str]] = self.asked[-1]
        return found

    def check_writable(self, store: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise ConfigurationError, which names it, for a tensor that it fills and that cannot be written."""
        names = {name for source in self.sources for piece in source.pieces for name in piece.names}
        check_writable(store, {name: tensor for name, tensor in tensors.items() if name in names})

    def fill(self, targets: Targets) -> list[Filled]:
        """What comes from each source, into the model's tensors as they are now."""
        known = [targets.known.setdefault(number, {}) for number in range(len(self.sources))]
        return list(map(_Source.fill, self.sources, itertools.repeat(targets), known))


def make_plan(request: Request, layouts: Sequence[KnownLayout], near: Sequence[int], turn: int) -> Planned:
    """See ``plan.plan``."""
    rows = [known.rows for known in layouts]
    moves = plan(request, rows, near, turn)
    sources = [
        _Source.of([_bring(move, known, offsets, request.targets[move.target]) for move in wanted], ties)
        for known, offsets, wanted, ties in zip(
            layouts, map(Offsets, layouts), moves, ties_of_plan(request, rows, moves), strict=True
        )
    ]
    return Planned(signature_of(request), tuple(near), tuple(layouts), sources)


def _bring(move: Move, known: KnownLayout, offsets: Offsets, target: Shard) -> _Bring:
    _, dtype, shape, _ = known.rows[move.place]
    if move.conversion is not None:
        shape = converted(DTYPES[dtype], shape, move.conversion)[1]
    first, strides = region_of(shape, move.source_begin, move.shape)
    itemsize = target.tensor.itemsize
    return _Bring(
        (move.place, move.conversion),
        (first, move.shape, strides),
        offsets.of(move.place, move.conversion) + first * itemsize,
        move.target,
        None if move.shape == tuple(target.tensor.shape) else move.target_begin,
        math.prod(move.shape) * itemsize,
    )


def signature_of(request: Request) -> Any:
    targets = [
        (name, shard.tensor.dtype, shard.tensor.shape, shard.global_shape, shard.offset)
        for name, shard in request.targets.items()
    ]
    tied = ties_of({name: shard.tensor for name, shard in request.targets.items()})
    return targets, request.options, request.elsewhere, tied
