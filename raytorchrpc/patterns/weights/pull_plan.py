"""What pulls into a model bring, worked out once for as long as its tensors and the layouts stay the same."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from raytorchrpc.lanes.base import Part, PartPlace, Parts
from raytorchrpc.patterns.weights.model_tensors import Targets, shadowed
from raytorchrpc.patterns.weights.plan import (
    KnownLayout,
    Options,
    Request,
    Transfer,
    plan,
)
from raytorchrpc.patterns.weights.shards import Region
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
        found: dict[str | None, list[Part]] = {}
        for transfer, target in zip(self.transfers, self.targets, strict=True):
            found.setdefault(transfer.place[1], []).append(Part(transfer.offset, target, transfer.region[2]))
        return list(found.values())

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
        found: list[Selection] = []
        begin = filled = 0
        for place, its in enumerate(sizes or [transfer.nbytes for transfer in self.transfers]):
            if place > begin and filled + its > size:
                found.append(self.at(range(begin, place)))
                begin, filled = place, 0
            filled += its
        return [*found, self.at(range(begin, len(self.transfers)))]

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
        text = repr((layout, self.places, self.regions, [target.device.type for target in self.targets]))
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
        self.names = [list(dict.fromkeys([transfer.target for transfer in its])) for its in self.pieces.values()]
        """Of the model's tensors that each piece fills."""


class ModelSelection(Selection):
    """All that a plan brings from one source, into the model's tensors as they are now."""

    def __init__(self, plan: SourcePlan, into: Mapping[str, torch.Tensor], known: dict[Any, Any]) -> None:
        """``known``: what was worked out for their memory."""
        self.plan, self.transfers, self._into = plan, plan.transfers, into
        self._known = known.setdefault(plan.number, {})

    @cached_property
    def _views(self) -> list[torch.Tensor]:
        return [_view(transfer, self._into) for transfer in self.transfers]

    @property
    def targets(self) -> Sequence[torch.Tensor]:
        """Made when they are looked at: a lane that knows the addresses needs no views."""
        return self._views

    @property
    def nbytes(self) -> int:
        return self.plan.nbytes

    @cached_property
    def parts(self) -> Sequence[Sequence[Part]]:
        known = [self._known.setdefault(number, {}) for number in range(len(self.plan.pieces))]
        return list(map(self._parts_of, self.plan.pieces.values(), self.plan.names, known))

    def _parts_of(self, transfers: Sequence[Transfer], names: Sequence[str], known: dict[Any, Any]) -> Parts:
        def make(index: int) -> Part:
            transfer = transfers[index]
            return Part(transfer.offset, _view(transfer, self._into), transfer.region[2])

        def places() -> list[PartPlace]:
            layouts = [(its.data_ptr(), its.itemsize, its.stride(), its.device) for its in filled]
            by_name = dict(zip(names, layouts, strict=True))
            found: list[PartPlace] = []
            for _, (_, shape, strides), offset, _, target, begin in transfers:
                address, itemsize, goal, device = by_name[target]
                if begin is not None:
                    address += itemsize * sum(map(operator.mul, begin, goal))
                found.append((offset, address, shape, itemsize, strides, goal, device))
            return found

        filled = [self._into[name] for name in names]
        size = self.plan.nbytes if len(self.plan.pieces) == 1 else sum(transfer.nbytes for transfer in transfers)
        return Parts(len(transfers), make, places, filled, size, known)

    @property
    def converts(self) -> bool:
        """Whether the publisher has to convert some of it first."""
        return any(conversion is not None for conversion in self.plan.pieces)

    @property
    def device_type(self) -> str | None:
        """The type of the device that all targets are on, if a lane can write each of them in place; else None."""
        if "device type" not in self._known:
            filled = [self._into[name] for names in self.plan.names for name in names]
            self._known["device type"] = _writable_device_type(filled) if filled else None
        found: str | None = self._known["device type"]
        return found

    @property
    def is_known(self) -> bool:
        """Whether all that a home is asked for is known, without a look at the tensors."""
        if not self.transfers or self.nbytes < WORTH_A_TURN:
            return not self.transfers or "device type" in self._known
        return self._known.keys() >= {"device type", "alike"} or self._known.get("device type", "cuda") not in IN_TURN

    def agrees(self, other: ModelSelection) -> bool:
        """Whether a home is asked the same for both."""
        mine, its = (self.device_type, self.alike), (other.device_type, other.alike)
        return self.plan is other.plan and (self._known is other._known or mine == its)

    @property
    def alike(self) -> tuple[str, torch.device] | None:
        """The signature and device of what several GPUs of a host may pull, each for itself; None: it is too little."""
        if self.nbytes < WORTH_A_TURN or self.device_type not in IN_TURN:
            return None
        if "alike" not in self._known:
            self._known["alike"] = self.signature(self.plan.layout.number), self.targets[0].device
        found: tuple[str, torch.device] = self._known["alike"]
        return found


def _view(transfer: Transfer, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """View what a transfer fills, without autograd."""
    tensor = targets[transfer.target].detach()
    if transfer.begin is None:
        return tensor
    strides = tensor.stride()
    begin = sum(first * stride for first, stride in zip(transfer.begin, strides, strict=True))
    return tensor.as_strided(transfer.region[1], strides, tensor.storage_offset() + begin)


def _writable_device_type(tensors: Sequence[torch.Tensor]) -> str | None:
    if len(set(map(torch.Tensor.get_device, tensors))) != 1:
        return None
    if any(map(torch.Tensor.is_neg, tensors)) or any(map(torch.Tensor.is_conj, tensors)):
        return None
    if any(not tensor.data_ptr() and tensor.numel() for tensor in tensors):
        return None
    return tensors[0].device.type


#: Most memories of models of one form that a plan knows. A model whose buffers are exchanged has two.
_MEMORIES = 8


class PullPlan:
    """What pulls bring into models of one form, as long as the layouts stay the same."""

    def __init__(
        self,
        options: Options,
        near: tuple[int, ...],
        sources: Sequence[SourcePlan],
        targets: Targets,
        brought: frozenset[str],
        shadowed_names: frozenset[str],
    ) -> None:
        """``near``: how far each source is. ``brought``: names of the model's tensors for which something comes, also
        of those that are ``shadowed``.
        """
        self.options, self.near, self.sources = options, near, sources
        self.names = {name for source in sources for names in source.names for name in names}
        """Of the model's tensors that it fills."""
        self._form, self._brought, self._shadowed = targets.form, brought, shadowed_names
        self._memories: tuple[tuple[Any, dict[Any, Any]], ...] = ()  # and what was worked out for each, the last first

    def expected(self, options: Options, near: tuple[int, ...]) -> list[ModelSelection] | None:
        """What a pull into the same model will bring from each source; of no use but to ask for it."""
        if (options, near) != (self.options, self.near) or not self._memories:
            return None
        found = [ModelSelection(source, {}, self._memories[0][1]) for source in self.sources]
        return found if all(its.is_known for its in found) else None

    def fill(
        self, targets: Targets, options: Options, check: Callable[[set[str]], None]
    ) -> list[ModelSelection] | None:
        """What comes from each source into these tensors; None if they need another plan.

        ``check``: raises if the tensors of these names cannot be filled. Called for each new memory.
        """
        if options != self.options or targets.form != self._form:
            return None
        last = self._memories
        found = next((one for one in last if one[0] == targets.memory), None)
        if found is None:
            if shadowed(targets.tensors, self._brought) != self._shadowed:
                return None
            check(self.names)
            found = targets.memory, {}
        if not last or last[0] is not found:
            self._memories = (found, *[one for one in last if one is not found][: _MEMORIES - 1])
        return [ModelSelection(source, targets.tensors, found[1]) for source in self.sources]


def make_plan(
    request: Request, options: Options, layouts: Sequence[KnownLayout], near: tuple[int, ...], turn: int, into: Targets
) -> PullPlan:
    """See ``plan.plan``. ``options``: of the pull. ``into``: the model's tensors."""
    transfers = plan(request, layouts, near, turn)
    brought = frozenset(transfer.target for its in transfers for transfer in its)
    names = shadowed(into.tensors, brought)
    lasting = (
        [[transfer for transfer in its if transfer.target not in names] for its in transfers] if names else transfers
    )
    sources = list(map(SourcePlan, range(len(layouts)), layouts, lasting))
    return PullPlan(options, near, sources, into, brought, names)
