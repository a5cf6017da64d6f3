"""What pulls into a model bring, worked out once for as long as its tensors and the layouts stay the same."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from raytorchrpc.lanes.base import Part, PartPlace, Parts
from raytorchrpc.patterns.weights.model_tensors import Targets, shadowed
from raytorchrpc.patterns.weights.plan import Transfer, plan
from raytorchrpc.patterns.weights.shards import Region
from raytorchrpc.patterns.weights.slices import KnownLayout, Options, Request
from raytorchrpc.patterns.weights.snapshots import Place

#: Devices between which readers of one host feed one another, and the least bytes of a pull for which they do.
IN_TURN, WORTH_A_TURN = {"cuda"}, 256 << 20


class Selection:
    """Transfers from one source into tensors of this process."""

    def __init__(self, transfers: Sequence[Transfer], targets: Sequence[torch.Tensor]) -> None:
        """``targets``: what each transfer fills, without autograd."""
        self.transfers, self._targets = transfers, targets

    @property
    def targets(self) -> Sequence[torch.Tensor]:
        return self._targets

    @property
    def places(self) -> list[Place]:
        return [transfer.place for transfer in self.transfers]

    @property
    def regions(self) -> list[Region]:
        return [transfer.region for transfer in self.transfers]

    @property
    def nbytes(self) -> int:
        return sum([transfer.nbytes for transfer in self.transfers])

    @property
    def parts(self) -> Sequence[Sequence[Part]]:
        """Which part of a snapshot's memory goes to each target, by piece; see ``Snapshot.pieces``."""
        by_conversion: dict[str | None, list[Part]] = {}
        for transfer, target in zip(self.transfers, self.targets, strict=True):
            by_conversion.setdefault(transfer.place[1], []).append(Part(transfer.offset, target, transfer.region[2]))
        return list(by_conversion.values())

    def only(self, changed: Iterable[int] | None) -> Selection:
        """What it has of the tensors at these places; None: all."""
        if changed is None:
            return self
        wanted = set(changed)
        return self.at([index for index, transfer in enumerate(self.transfers) if transfer.place[0] in wanted])

    def at(self, indices: Sequence[int]) -> Selection:
        return Selection([self.transfers[index] for index in indices], [self.targets[index] for index in indices])

    def into(self, targets: Sequence[torch.Tensor]) -> Selection:
        """The same, into other tensors."""
        return Selection(self.transfers, targets)

    def messages(self, size: int, sizes: Sequence[int] | None = None) -> list[Selection]:
        """Divide into messages of at most ``size`` bytes; a larger tensor is a message of its own.

        ``sizes``: what each transfer takes, if that is not its ``nbytes``.
        """
        messages: list[Selection] = []
        begin = filled = 0
        for index, nbytes in enumerate(sizes or [transfer.nbytes for transfer in self.transfers]):
            if index > begin and filled + nbytes > size:
                messages.append(self.at(range(begin, index)))
                begin, filled = index, 0
            filled += nbytes
        return [*messages, self.at(range(begin, len(self.transfers)))]

    def in_slices(self, size: int) -> Selection:
        """The same, with each tensor of more than ``size`` bytes divided along its first dimension."""
        transfers: list[Transfer] = []
        targets: list[torch.Tensor] = []
        for whole, target in zip(self.transfers, self.targets, strict=True):
            first, shape, strides = whole.region
            along = next((dimension for dimension, extent in enumerate(shape) if extent > 1), None)
            if along is None or whole.nbytes <= size:
                transfers.append(whole)
                targets.append(target)
                continue
            extent = shape[along]
            row, step = whole.nbytes // extent, max(1, extent * size // whole.nbytes)
            stride = math.prod(shape[along + 1 :]) if strides is None else strides[along]
            for begin in range(0, extent, step):
                many = min(step, extent - begin)
                region = first + begin * stride, (*shape[:along], many, *shape[along + 1 :]), strides
                offset = whole.offset + begin * stride * target.itemsize
                transfers.append(whole._replace(region=region, offset=offset, nbytes=many * row))
                targets.append(target.narrow(along, begin, many))
        return Selection(transfers, targets)

    def signature(self, layout: int) -> str:
        """A digest: equal for pulls of one version that bring the same to the same type of device."""
        return _signature(layout, self.transfers, [target.device.type for target in self.targets])


def _signature(layout: int, transfers: Sequence[Transfer], device_types: Sequence[str]) -> str:
    text = repr((layout, [(transfer.place, transfer.region) for transfer in transfers], device_types))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


class SourcePlan:
    """What a plan brings from one source."""

    def __init__(self, number: int, layout: KnownLayout, transfers: Sequence[Transfer]) -> None:
        """``number``: of the source in the plan."""
        self.number, self.layout, self.transfers = number, layout, transfers
        self.nbytes = sum([transfer.nbytes for transfer in transfers])
        self.pieces: dict[str | None, list[Transfer]] = {}  # by conversion; see ``Snapshot.pieces``
        for transfer in transfers:
            self.pieces.setdefault(transfer.place[1], []).append(transfer)
        self.names = [list(dict.fromkeys([t.target for t in transfers])) for transfers in self.pieces.values()]
        """Of the model's tensors that each piece fills."""

    @property
    def converts(self) -> bool:
        """Whether the publisher has to convert some of it first."""
        return any(conversion is not None for conversion in self.pieces)


class Destination:
    """The memory of a model's tensors, as one source fills it. Keeps no tensor."""

    def __init__(self, plan: SourcePlan, tensors: Mapping[str, torch.Tensor]) -> None:
        filled = [tensors[name] for names in plan.names for name in names]
        self.device_type = _one_device_type(filled) if filled else None
        """The type of the device that all tensors are on, if a lane can write each of them in place; else None."""
        self.alike: tuple[str, torch.device] | None = None
        """The signature and device of what several GPUs of a host may pull, each for itself; None: it is too little."""
        if self.device_type in IN_TURN and plan.nbytes >= WORTH_A_TURN:
            signature = _signature(plan.layout.number, plan.transfers, [self.device_type] * len(plan.transfers))
            self.alike = signature, filled[0].device
        self.prepared: list[dict[Hashable, Any]] = [{} for _ in plan.pieces]
        """For each piece: what lanes have worked out; see ``Parts``."""


class ModelSelection(Selection):
    """All that a plan brings from one source, into the model's tensors as they are now."""

    def __init__(self, plan: SourcePlan, destination: Destination, tensors: Mapping[str, torch.Tensor]) -> None:
        """``tensors``: the model's by name, which ``destination`` was made of; none if it is only to be asked for."""
        self.plan, self.transfers, self.destination, self._tensors = plan, plan.transfers, destination, tensors

    @cached_property
    def _views(self) -> list[torch.Tensor]:
        return [_view(transfer, self._tensors) for transfer in self.transfers]

    @property
    def targets(self) -> Sequence[torch.Tensor]:
        """Made when they are looked at: a lane that knows the addresses needs no views."""
        return self._views

    @property
    def nbytes(self) -> int:
        return self.plan.nbytes

    @cached_property
    def parts(self) -> Sequence[Sequence[Part]]:
        pieces = zip(self.plan.pieces.values(), self.plan.names, self.destination.prepared, strict=True)
        return [self._parts_of(*piece) for piece in pieces]

    def _parts_of(self, transfers: Sequence[Transfer], names: Sequence[str], prepared: dict[Hashable, Any]) -> Parts:
        def make(index: int) -> Part:
            transfer = transfers[index]
            return Part(transfer.offset, _view(transfer, self._tensors), transfer.region[2])

        def places() -> list[PartPlace]:
            memory = [(tensor.data_ptr(), tensor.itemsize, tensor.stride(), tensor.device) for tensor in filled]
            by_name = dict(zip(names, memory, strict=True))
            parts: list[PartPlace] = []
            for _, (_, shape, strides), offset, _, target, begin in transfers:
                address, itemsize, goal, device = by_name[target]
                if begin is not None:
                    address += itemsize * sum(map(operator.mul, begin, goal))
                parts.append((offset, address, shape, itemsize, strides, goal, device))
            return parts

        filled = [self._tensors[name] for name in names]
        size = self.plan.nbytes if len(self.plan.pieces) == 1 else sum(transfer.nbytes for transfer in transfers)
        return Parts(len(transfers), make, places, filled, size, prepared)

    @property
    def device_type(self) -> str | None:
        """See ``Destination``."""
        return self.destination.device_type

    @property
    def alike(self) -> tuple[str, torch.device] | None:
        """See ``Destination``."""
        return self.destination.alike

    def agrees(self, other: ModelSelection) -> bool:
        """Whether a home is asked the same for both."""
        here, there = self.destination, other.destination
        same = here is there or (here.device_type, here.alike) == (there.device_type, there.alike)
        return self.plan is other.plan and same


def _view(transfer: Transfer, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """View what a transfer fills, without autograd."""
    tensor = targets[transfer.target].detach()
    if transfer.begin is None:
        return tensor
    strides = tensor.stride()
    begin = sum(first * stride for first, stride in zip(transfer.begin, strides, strict=True))
    return tensor.as_strided(transfer.region[1], strides, tensor.storage_offset() + begin)


def _one_device_type(tensors: Sequence[torch.Tensor]) -> str | None:
    return tensors[0].device.type if len(set(map(torch.Tensor.get_device, tensors))) == 1 else None


#: Most memories of models of one form that a plan knows, such as those of two models, each with its twin.
_MEMORIES = 8


class PullPlan:
    """What pulls bring into models of one form, as long as the layouts stay the same: a list of copies by source."""

    def __init__(
        self,
        options: Options,
        distances: tuple[int, ...],
        sources: Sequence[SourcePlan],
        targets: Targets,
        brought: frozenset[str],
        shadowed_names: frozenset[str],
    ) -> None:
        """``distances``: how far each source is. ``brought``: names of the model's tensors for which something comes,
        also of those that are ``shadowed``.
        """
        self.options, self.distances, self.sources = options, distances, sources
        self.names = {name for source in sources for names in source.names for name in names}
        """Of the model's tensors that it fills."""
        self._form, self._brought, self._shadowed = targets.form, brought, shadowed_names
        self._memories: tuple[tuple[Any, list[Destination]], ...] = ()  # by ``Targets.memory``, the last one first

    def expected(self, options: Options, distances: tuple[int, ...]) -> list[ModelSelection] | None:
        """What a pull into the same model will bring from each source; of no use but to ask for it."""
        if (options, distances) != (self.options, self.distances) or not self._memories:
            return None
        return self._selections(self._memories[0][1], {})

    def fill(
        self, targets: Targets, options: Options, check: Callable[[set[str]], None]
    ) -> list[ModelSelection] | None:
        """What comes from each source into these tensors; None if they need another plan.

        ``check``: raises if the tensors of these names cannot be filled. Called for each new memory.
        """
        if options != self.options or targets.form != self._form:
            return None
        memories = self._memories
        memory = next((known for known in memories if known[0] == targets.memory), None)
        if memory is None:
            if shadowed(targets.tensors, self._brought) != self._shadowed:
                return None
            check(self.names)
            memory = targets.memory, [Destination(source, targets.tensors) for source in self.sources]
        if not memories or memories[0] is not memory:
            self._memories = (memory, *[known for known in memories if known is not memory][: _MEMORIES - 1])
        return self._selections(memory[1], targets.tensors)

    def _selections(
        self, destinations: Sequence[Destination], tensors: Mapping[str, torch.Tensor]
    ) -> list[ModelSelection]:
        both = zip(self.sources, destinations, strict=True)
        return [ModelSelection(source, destination, tensors) for source, destination in both]


def make_plan(
    request: Request,
    options: Options,
    layouts: Sequence[KnownLayout],
    distances: tuple[int, ...],
    turn: int,
    into: Targets,
) -> PullPlan:
    """See ``plan.plan``. ``options``: of the pull. ``into``: the model's tensors."""
    by_source = plan(request, layouts, distances, turn)
    brought = frozenset(transfer.target for transfers in by_source for transfer in transfers)
    hidden = shadowed(into.tensors, brought)
    if hidden:
        by_source = [[transfer for transfer in transfers if transfer.target not in hidden] for transfers in by_source]
    sources = list(map(SourcePlan, range(len(layouts)), layouts, by_source))
    return PullPlan(options, distances, sources, into, brought, hidden)
