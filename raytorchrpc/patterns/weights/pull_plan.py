"""What pulls into a model bring, worked out once for as long as its tensors and the layouts stay the same."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from raytorchrpc.lanes.base import Part, Parts
from raytorchrpc.patterns.weights.conversions import converted
from raytorchrpc.patterns.weights.model_tensors import Targets, check_writable, ties_of
from raytorchrpc.patterns.weights.plan import Move, Request, Row, check_fits, plan, tied_mismatch
from raytorchrpc.patterns.weights.shards import Region, Shard, region_of
from raytorchrpc.patterns.weights.snapshots import TensorSpec, converted_specs, lay_out
from raytorchrpc.tensors.dtypes import DTYPES

#: Devices between which readers of one host feed one another, and the least bytes of a pull for which they do.
IN_TURN, WORTH_A_TURN = {"cuda"}, 256 << 20

_CPU = torch.device("cpu")


class Alike(NamedTuple):
    """What several GPUs of a host may pull, each for itself."""

    signature: str
    device: torch.device
    places: list[tuple[int, str | None]]
    regions: Sequence[Region]


class KnownLayout(NamedTuple):
    """A layout, as a home told a reader."""

    number: int
    rows: list[Row]
    offsets: list[int]  # of each tensor, in the memory of a snapshot that has all tensors on one device
    alike: Alike | None = None
    """What the last pull brought, if other GPUs of the host may pull the same."""

    @staticmethod
    def of(number: int, rows: list[Row]) -> KnownLayout:
        return KnownLayout(number, rows, lay_out(_specs(rows))[0])


class Offsets:
    """Where the tensors of a layout, and the results of conversions, lie in the memory of snapshots."""

    def __init__(self, known: KnownLayout) -> None:
        self._rows = known.rows
        self._found: dict[str | None, list[int]] = {None: known.offsets}

    def of(self, place: int, name: str | None) -> int:
        """Return where a tensor begins (bytes). ``name``: of the conversion."""
        if name not in self._found:
            self._found[name] = lay_out(converted_specs(_specs(self._rows), name or ""))[0]
        return self._found[name][place]


class Selection(NamedTuple):
    """The tensors that a pull brings."""

    places: list[tuple[int, str | None]]
    """Place in the layout, and the name of the conversion (None: unconverted); see ``conversions``."""
    targets: Sequence[torch.Tensor]  # where each of them goes
    regions: Sequence[Region]  # what of the published tensor it gets

    @property
    def nbytes(self) -> int:
        return sum(target.nbytes for target in self.targets)

    def only(self, changed: Sequence[int] | None) -> Selection:
        """Return what it has of the tensors at these places; None: all."""
        if changed is None:
            return self
        wanted = set(changed)
        return self.at([index for index, (place, _) in enumerate(self.places) if place in wanted])

    def at(self, indices: Sequence[int]) -> Selection:
        """Return what it has at these indices."""
        targets, regions = [self.targets[index] for index in indices], [self.regions[index] for index in indices]
        return Selection([self.places[index] for index in indices], targets, regions)

    def messages(self, size: int) -> list[Selection]:
        """Divide into messages of at most ``size`` bytes; a larger tensor is a message of its own."""
        found: list[Selection] = []
        begin = filled = 0
        for place, target in enumerate(self.targets):
            if place > begin and filled + target.nbytes > size:
                found.append(self.at(range(begin, place)))
                begin, filled = place, 0
            filled += target.nbytes
        return [*found, self.at(range(begin, len(self.targets)))]

    def in_slices(self, size: int) -> Selection:
        """Return the same, with each tensor of more than ``size`` bytes divided along its first dimension."""
        places: list[tuple[int, str | None]] = []
        targets: list[torch.Tensor] = []
        regions: list[Region] = []
        for place, target, (first, shape, strides) in zip(*self, strict=True):
            along = next((dimension for dimension, extent in enumerate(shape) if extent > 1), None)
            extent = 1 if along is None else shape[along]
            step = max(1, extent * size // max(1, target.nbytes))
            for begin in range(0, extent, step):
                places.append(place)
                if along is None or step >= extent:
                    targets.append(target)
                    regions.append((first, shape, strides))
                    continue
                many = min(step, extent - begin)
                stride = math.prod(shape[along + 1 :]) if strides is None else strides[along]
                targets.append(target.narrow(along, begin, many))
                regions.append((first + begin * stride, (*shape[:along], many, *shape[along + 1 :]), strides))
        return Selection(places, targets, regions)

    def alike(self, known: KnownLayout, nbytes: int) -> Alike | None:
        """Return what readers on other GPUs may pull, too; None if ``nbytes`` are too few, or not on one GPU."""
        if nbytes < WORTH_A_TURN:
            return None
        devices = {target.device for target in self.targets}
        if len(devices) > 1 or not {device.type for device in devices} <= IN_TURN:
            return None
        device = devices.pop()
        if (last := known.alike) is not None and last[1:] == (device, self.places, self.regions):
            return last
        return Alike(self.signature(known.number), device, self.places, self.regions)

    def parts(self, known: KnownLayout, offsets: Offsets | None = None) -> list[list[Part]]:
        """Return which part of a snapshot's memory goes to each target, by piece; see ``Snapshot.pieces``."""
        offsets = offsets or Offsets(known)
        parts: dict[str | None, list[Part]] = {}
        for (place, name), target, (first, _, strides) in zip(*self, strict=True):
            begin = offsets.of(place, name) + first * target.itemsize
            parts.setdefault(name, []).append(Part(begin, target, strides))
        return list(parts.values())

    def signature(self, layout: int) -> str:
        """Return a digest: equal for pulls of one version that bring the same to the same type of device."""
        text = repr((layout, self.places, self.regions, [target.device.type for target in self.targets]))
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _specs(rows: Sequence[Row]) -> list[TensorSpec]:
    return [TensorSpec(DTYPES[dtype], shape, _CPU) for _, dtype, shape, _ in rows]


def writable_device_type(tensors: Sequence[torch.Tensor]) -> str | None:
    """The type of the device that all tensors are on, if a lane can write each of them in place; else None."""
    if len(set(map(torch.Tensor.get_device, tensors))) != 1:
        return None
    if any(map(torch.Tensor.is_neg, tensors)) or any(map(torch.Tensor.is_conj, tensors)):
        return None
    if any(not tensor.data_ptr() and tensor.numel() for tensor in tensors):
        return None
    return tensors[0].device.type


class Tie(NamedTuple):
    """Two published tensors that go into one tensor of a model."""

    places: tuple[int, int]
    """In the publisher's layout."""
    names: tuple[str, str]
    """In the model."""
    parts: Sequence[str]
    """What the first name is made of, by published names."""


def ties_of_plan(
    request: Request, layouts: Sequence[Sequence[Row]], moves: Sequence[Sequence[Move]]
) -> list[list[Tie]]:
    """Return, for each publisher, the pairs of its tensors that go into one tensor of the model.

    Raises ConfigurationError if one of a pair comes from a publisher that does not have the same shard of the other.
    """
    found: list[list[Tie]] = [[] for _ in layouts]
    tied = ties_of({name: shard.tensor for name, shard in request.targets.items()})
    brought = {move.target for its in moves for move in its} if tied else set()
    wrong: list[str] = []
    for names in tied:
        parts, others = (request.options.mapping.get(name, (name,)) for name in names)
        if parts == others or not brought.issuperset(names):
            continue
        (_, *place), (_, *other_place) = (request.targets[name] for name in names)
        ties = [_ties_at(rows, its, names, parts, others) for rows, its in zip(layouts, moves, strict=True)]
        for its, more in zip(found, ties, strict=True):
            its += more or ()
        if None in ties or len(parts) != len(others) or place != other_place:
            wrong.append(tied_mismatch(names, parts, "and no publisher can compare what is published for them"))
    check_fits(request.store, wrong)
    return found


def _ties_at(
    rows: Sequence[Row], moves: Sequence[Move], names: tuple[str, str], parts: Sequence[str], others: Sequence[str]
) -> list[Tie] | None:
    """The pairs at one publisher; None if it has only one of a pair."""
    places = {name: place for place, (name, *_) in enumerate(rows)}
    brought = {move.place for move in moves if move.target in names}
    found: list[Tie] = []
    for part, other in zip(parts, others, strict=False):
        one, two = places.get(part, -1), places.get(other, -1)
        if one in brought or two in brought:
            if min(one, two) < 0 or rows[one][3] != rows[two][3]:
                return None
            found.append(Tie((one, two), names, parts))
    return found


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
