"""What pulls into a model bring, worked out once for as long as its tensors and the layouts stay the same."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy
import torch

from raytorchrpc.lanes.base import Copies, Copy, Pieces, Target
from raytorchrpc.patterns.weights.model_tensors import Targets, shadowed
from raytorchrpc.patterns.weights.plan import Transfer, plan
from raytorchrpc.patterns.weights.shards import Region, strides_of
from raytorchrpc.patterns.weights.slices import KnownLayout, Options, Request
from raytorchrpc.patterns.weights.snapshots import Place
from raytorchrpc.tensors.dtypes import collapse, spread

#: Devices between which readers of one host feed one another, and the least bytes of a pull for which they do.
IN_TURN, WORTH_A_TURN = {"cuda"}, 256 << 20


class Selection:
    """Transfers from one source into tensors of this process."""

    def __init__(
        self, transfers: Sequence[Transfer], targets: Sequence[torch.Tensor], copies: Copies | None = None
    ) -> None:
        """``targets``: what each transfer fills, without autograd. ``copies``: to these, if they are known."""
        self.transfers, self.targets, self._copies = transfers, targets, copies

    @property
    def places(self) -> list[Place]:
        return [transfer.place for transfer in self.transfers]

    @property
    def regions(self) -> list[Region]:
        return [transfer.region for transfer in self.transfers]

    @cached_property
    def nbytes(self) -> int:
        return sum([transfer.nbytes for transfer in self.transfers])

    @property
    def copies(self) -> Copies:
        """What to copy out of a snapshot's pieces; see ``Snapshot.pieces``."""
        if self._copies is None:
            self._copies = Copies(_copies(self.transfers, map(Target.of, self.targets)), self.targets)
        return self._copies

    @property
    def pieces(self) -> list[Pieces]:
        """What to copy out of the tensors of an unconverted version, which lie anywhere."""
        return self.copies.prepared("pieces", partial(_pieces, self.transfers, self.copies))

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


def _copies(transfers: Iterable[Transfer], targets: Iterable[Target]) -> list[Copy]:
    """The copies that bring transfers to their targets, out of pieces by conversion; see ``Snapshot.pieces``."""
    transfers = list(transfers)
    conversions = dict.fromkeys(conversion for (_, conversion), *_ in transfers if conversion is not None)
    first = {conversion: number for number, conversion in enumerate([*conversions, None])}
    return [
        Copy(first[conversion] + piece, target, offset, strides)
        for ((_, conversion), (_, _, strides), offset, *_, piece), target in zip(transfers, targets, strict=True)
    ]


def _pieces(transfers: Sequence[Transfer], copies: Iterable[Copy]) -> list[Pieces]:
    by_width: dict[int, list[tuple[int, numpy.ndarray, numpy.ndarray]]] = {}
    for ((place, _), (first, *_), *_), (_, target, _, strides) in zip(transfers, copies, strict=True):
        assert target is not None
        address, dtype, shape, goal, _ = target
        if 0 not in shape:
            width, dimensions = collapse(shape, dtype.itemsize, strides or strides_of(shape), goal)
            begins = numpy.array([first * dtype.itemsize]), numpy.array([address])
            by_width.setdefault(width, []).append((place, *spread(dimensions, *begins)))
    return [
        Pieces(
            numpy.repeat([place for place, *_ in parts], [len(offsets) for _, offsets, _ in parts]),
            numpy.concatenate([offsets for _, offsets, _ in parts]),
            numpy.concatenate([addresses for *_, addresses in parts]),
            width,
        )
        for width, parts in by_width.items()
    ]


class SourceCopies:
    """What a plan brings from one source into one memory of a model. Keeps no tensor."""

    def __init__(
        self, number: int, layout: KnownLayout, transfers: Sequence[Transfer], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """``number``: of the source in the plan. ``tensors``: the model's, by name."""
        self.number, self.layout, self.transfers = number, layout, transfers
        self.nbytes = sum([transfer.nbytes for transfer in transfers])
        self.converts = any(transfer.place[1] is not None for transfer in transfers)
        """Whether the publisher has to convert some of it first."""
        self.pieces: tuple[int, ...] = ()
        """The pieces that it reads of an unconverted snapshot, by number; none: all, or the only one."""
        if not self.converts and layout.count > 1:
            self.pieces = tuple(sorted({transfer.piece for transfer in transfers}))
        self._names = list(dict.fromkeys([transfer.target for transfer in transfers]))  # of what it fills
        filled = [tensors[name] for name in self._names]
        self.device_type = _one_device_type(filled) if filled else None
        """The type of the device that all tensors are on, if a lane can write each of them in place; else None."""
        self.alike: tuple[str, torch.device] | None = None
        """The signature and device of what several GPUs of a host may pull, each for itself; None: it is too little."""
        if self.device_type in IN_TURN and self.nbytes >= WORTH_A_TURN:
            signature = _signature(layout.number, transfers, [self.device_type] * len(transfers))
            self.alike = f"in turn {signature}", filled[0].device  # other hosts divide the same into other pieces
        self._copies: list[Copy] | None = None  # as soon as they are needed
        self._known: dict[Hashable, Any] = {}  # see ``Copies``

    def into(self, tensors: Mapping[str, torch.Tensor]) -> Selection:
        """All of it, into tensors in this memory. Tensors are viewed when a lane asks for them: it knows addresses."""
        if self._copies is None:
            self._copies = _copies(self.transfers, self._targets(tensors))
        targets, filled = _Views(self.transfers, tensors), [tensors[name] for name in self._names]
        selection = Selection(self.transfers, targets, Copies(self._copies, targets, filled, self.nbytes, self._known))
        selection.nbytes = self.nbytes
        return selection

    def _targets(self, tensors: Mapping[str, torch.Tensor]) -> list[Target]:
        filled = [tensors[name] for name in self._names]
        described = [Target(one.data_ptr(), one.dtype, one.shape, one.stride(), one.device) for one in filled]
        wholes, targets = dict(zip(self._names, described, strict=True)), list[Target]()
        for _, (_, shape, _), _, _, name, begin, _ in self.transfers:
            target = wholes[name]
            if begin is not None:
                address, dtype, _, strides, device = target
                skipped = sum(map(operator.mul, begin, strides))
                target = Target(address + dtype.itemsize * skipped, dtype, shape, strides, device)
            targets.append(target)
        return targets

    def asks_like(self, other: SourceCopies) -> bool:
        """Whether a home is asked the same for both."""
        is_same = self.transfers is other.transfers and self.layout is other.layout  # so the pieces are, too
        return is_same and (self.device_type, self.alike) == (other.device_type, other.alike)


class _Views(Sequence[torch.Tensor]):
    """What transfers fill, viewed without autograd when it is looked at."""

    def __init__(self, transfers: Sequence[Transfer], tensors: Mapping[str, torch.Tensor]) -> None:
        self._transfers, self._tensors = transfers, tensors

    def __len__(self) -> int:
        return len(self._transfers)

    def __getitem__(self, index: Any) -> Any:
        transfer = self._transfers[index]
        tensor = self._tensors[transfer.target].detach()
        if transfer.begin is None:
            return tensor
        strides = tensor.stride()
        begin = sum(map(operator.mul, transfer.begin, strides))
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
        layouts: Sequence[KnownLayout],
        transfers: Sequence[Sequence[Transfer]],
        targets: Targets,
        brought: frozenset[str],
        shadowed_names: frozenset[str],
    ) -> None:
        """``distances``, ``layouts``, ``transfers``: of each source. ``brought``: names of the model's tensors for
        which something comes, also of those that are ``shadowed``.
        """
        self.options, self.distances, self.layouts, self._transfers = options, distances, layouts, transfers
        self.names = brought - shadowed_names
        """Of the model's tensors that it fills."""
        self._form, self._brought, self._shadowed = targets.form, brought, shadowed_names
        self._memories: tuple[tuple[Any, list[SourceCopies]], ...] = ()  # by ``Targets.memory``, the last one first

    def expected(self, options: Options, distances: tuple[int, ...]) -> list[SourceCopies] | None:
        """What a pull into the same memory will bring from each source."""
        if (options, distances) != (self.options, self.distances) or not self._memories:
            return None
        return self._memories[0][1]

    def into(self, targets: Targets, options: Options, check: Callable[[set[str]], None]) -> list[SourceCopies] | None:
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
            check(set(self.names))
            sources = enumerate(zip(self.layouts, self._transfers, strict=True))
            memory = targets.memory, [SourceCopies(number, *source, targets.tensors) for number, source in sources]
        if not memories or memories[0] is not memory:
            self._memories = (memory, *[known for known in memories if known is not memory][: _MEMORIES - 1])
        return memory[1]


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
    return PullPlan(options, distances, layouts, by_source, into, brought, hidden)
