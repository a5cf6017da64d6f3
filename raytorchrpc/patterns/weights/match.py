"""Published layouts as readers know them, and what a pull brings of one into which tensors of a model."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import torch

from raytorchrpc.errors import ConfigurationError, NotFound
from raytorchrpc.lanes.base import Part, Parts
from raytorchrpc.patterns.weights.mismatch import (
    check_fits,
    check_writable,
    dtype_mismatch,
    shape_mismatch,
    tied_mismatch,
)
from raytorchrpc.patterns.weights.plan import Row
from raytorchrpc.patterns.weights.shards import shards_of
from raytorchrpc.patterns.weights.snapshots import Region, TensorSpec, converted_specs, lay_out
from raytorchrpc.patterns.weights.targets import KnownMemory
from raytorchrpc.patterns.weights.ties import Tie, ties_of_model
from raytorchrpc.patterns.weights.versions import VersionLease
from raytorchrpc.tensors.dtypes import DTYPE_NAMES, DTYPES

#: Moves tensors by other means than the group's lanes, such as a collective: ``carry(version, tensors)`` sends them at
#: the home, and fills them at the readers.
Carry = Callable[[int, Sequence[torch.Tensor]], None]


#: Devices between which readers of one host feed one another, and the least bytes of a pull for which they do.
IN_TURN, WORTH_A_TURN = {"cuda"}, 256 << 20

_CPU = torch.device("cpu")


class Alike(NamedTuple):
    """What several GPUs of a host may pull, each for itself."""

    signature: str
    device: torch.device
    places: list[tuple[int, str | None]]
    regions: Sequence[Region] | None


class KnownLayout(NamedTuple):
    """A layout, as a home told a reader."""

    number: int
    rows: list[Row]
    offsets: list[int]  # of each tensor, in the memory of a snapshot that has all tensors on one device
    device_type: str | None = None  # see ``ModelMatch.device_type``; of the last pull
    alike: Alike | None = None
    """What the last pull brought, if other GPUs of the host may pull the same."""
    nbytes: int = 0

    @staticmethod
    def of(number: int, rows: list[Row]) -> KnownLayout:
        specs = _specs(rows)
        size = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
        return KnownLayout(number, rows, lay_out(specs)[0], nbytes=size)


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
    regions: Sequence[Region] | None = None
    """Of each of them, if not all are brought whole."""

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
        regions = None if self.regions is None else [self.regions[index] for index in indices]
        return Selection([self.places[index] for index in indices], [self.targets[index] for index in indices], regions)

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
        for index, (place, target) in enumerate(zip(self.places, self.targets, strict=True)):
            first, shape, strides = (0, tuple(target.shape), None) if self.regions is None else self.regions[index]
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

    def alike(self, known: KnownLayout) -> Alike | None:
        """Return what readers on other GPUs may pull, too; None if this is too little, or not on one GPU."""
        if sum(target.nbytes for target in self.targets) < WORTH_A_TURN:
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
        for index, ((place, name), target) in enumerate(zip(self.places, self.targets, strict=True)):
            begin, strides = offsets.of(place, name), None
            if self.regions is not None:
                first, _, strides = self.regions[index]
                begin += first * target.itemsize
            parts.setdefault(name, []).append(Part(begin, target, strides))
        return list(parts.values())

    def signature(self, layout: int) -> str:
        """Return a digest: equal for pulls of one version that bring the same to the same type of device."""
        text = repr((layout, self.places, self.regions, [target.device.type for target in self.targets]))
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _specs(rows: Sequence[Row]) -> list[TensorSpec]:
    return [TensorSpec(DTYPES[dtype], shape, _CPU) for _, dtype, shape, _ in rows]


class LayoutMatch(ABC):
    """What one pull brings from one home. The response to a lease request may fill the targets."""

    targets: Mapping[str, torch.Tensor]
    device_type: str | None
    """The type of the device that all targets are on, if a lane can write each of them in place; else None."""
    converts = False
    """Whether some tensors may have to be converted."""
    ties: Sequence[Tie] = ()

    def __init__(self, store: str, known: KnownLayout | None) -> None:
        """``known``: the layout of the pull before."""
        self._store, self.known = store, known
        self.filled = False  # the targets have their tensors already
        self.lease: VersionLease | None = None  # as soon as the home has answered; it may have to be released
        self._matched: Selection | None = None  # all of ``known``
        self._parts: Sequence[Sequence[Part]] | None = None  # of ``_matched``
        self.to_prepare: str | None = None
        """The type of the device whose memory lanes are to prepare, while the pull is planned."""
        self._of_memory: dict[Hashable, Any] = {}  # what is known of the targets' memory and ``known``

    @property
    def layout(self) -> KnownLayout:
        assert self.known is not None
        return self.known

    @property
    def leased(self) -> VersionLease:
        assert self.lease is not None
        return self.lease

    @property
    def likely_device_type(self) -> str | None:
        """``device_type``, or what it probably is."""
        return self.device_type

    def match_ahead(self) -> None:  # noqa: B027 - not all have anything to do
        """Prepare for the answer of the home, which has been asked."""

    @abstractmethod
    def selection(self) -> Selection:
        """Return what the pull brings. Raises ConfigurationError, which names every mismatch."""

    def set_lease(self, lease: VersionLease) -> None:
        """Take the answer of the home. Raises NotFound if it names an unknown layout."""
        self.lease = lease
        if lease.lease and lease.rows is not None:
            self.known, self._matched, self._parts = KnownLayout.of(lease.layout, lease.rows), None, None
            self._of_memory = {}
        elif lease.lease and (self.known is None or self.known.number != lease.layout):
            raise NotFound(f"the home of {self._store!r} did not say what it has; pull again")

    def doubtful(self) -> list[Tie]:
        """Return the pairs for one tensor of the model that the home has published as two tensors."""
        first = {place: one for one, place in self.leased.ties} if self.ties else {}
        return [tie for tie in self.ties if len({first.get(place, place) for place in tie.places}) > 1]

    def check_equal(self, ties: Sequence[Tie], equal: Sequence[bool]) -> None:
        """Raise ConfigurationError, which names them, if some of these pairs are not ``equal``."""
        both = zip(ties, equal, strict=True)
        check_fits(self._store, [tied_mismatch(*tie[1:]) for tie, is_equal in both if not is_equal])

    def bytes_of(self, selection: Selection) -> int:
        """The size of what the pull brings. Quick for all tensors as published: to ask each tensor takes a while."""
        if not self.converts and selection.regions is None and len(selection.targets) == len(self.layout.rows):
            return self.layout.nbytes
        return selection.nbytes

    def parts_of_answer(self, device_type: str | None, answer: Any) -> Sequence[Sequence[Part]] | None:
        """Take a whole response of the home, and return which parts of its tensors go where; see ``Spread``.

        ``device_type``: of the device on which the answer has all tensors in one piece, if it has. None: fill nothing.
        """
        if answer is None:
            return None
        fields, pieces = answer
        self.set_lease(VersionLease(*fields))
        if not pieces or self.device_type != device_type or self.leased.deltas:
            return None
        selection = self.selection()
        if not selection.targets or any(name is not None for _, name in selection.places) or self.doubtful():
            return None
        self.filled = True
        return self.parts_of(selection)

    def parts_of(self, selection: Selection) -> Sequence[Sequence[Part]]:
        """Return which part of the home's memory goes to each target. ``selection``: see there."""
        return selection.parts(self.layout) if self._parts is None else self._parts


class ModelMatch(LayoutMatch):
    """A model that gets whole tensors, and the layout of the version that it is to have."""

    def __init__(
        self, store: str, model: Any, known: KnownLayout | None, memory: KnownMemory, convert: bool, strict: bool
    ) -> None:
        """The model is examined when that is needed. ``memory``: of the pulls before."""
        super().__init__(store, known)
        self._model, self._memory, self.converts, self._strict = model, memory, convert, strict

    @cached_property
    def targets(self) -> Mapping[str, torch.Tensor]:  # type: ignore[override]
        """The model's tensors. Raises ConfigurationError for anything that is not a model."""
        return {name: shard.tensor for name, shard in shards_of(self._model, self._store).items()}

    @cached_property
    def device_type(self) -> str | None:  # type: ignore[override]
        tensors = list(self.targets.values())
        return writable_device_type(tensors) if all(map(torch.Tensor.is_contiguous, tensors)) else None

    @property
    def ties(self) -> Sequence[Tie]:  # type: ignore[override]
        """The pairs of published tensors that go into one tensor of the model."""
        if "ties" not in self._of_memory:
            self._of_memory["ties"] = ties_of_model(self.layout.rows, self.targets)
        found: list[Tie] = self._of_memory["ties"]
        return found

    @property
    def likely_device_type(self) -> str | None:
        """``device_type``, or that of the pull before, which needs no look at the model."""
        return self.device_type if self.known is None else self.known.device_type

    def match_ahead(self) -> None:
        """Match the model with the known layout, while the home is asked whether that is still its layout."""
        with suppress(ConfigurationError):  # raised by ``selection`` if the layout is the same
            if self.known is not None and self.device_type is not None:
                self._matched = self._match(self.known.rows, None)
                self._parts = self._known_parts(self._matched)

    def selection(self) -> Selection:
        """Return what the pull brings. Raises ConfigurationError, which names every mismatch."""
        if self._matched is None or self.leased.changed is not None:
            self._matched, self._parts = self._match(self.layout.rows, self.leased.changed), None
        return self._matched

    def parts_of(self, selection: Selection) -> Sequence[Sequence[Part]]:
        if self._parts is None and selection is self._matched and self.leased.changed is None:
            self._parts = self._known_parts(selection)
        return super().parts_of(selection)

    def _known_parts(self, selection: Selection) -> list[Parts]:
        known = self._memory.of(selection.targets, (self.layout.number, tuple(selection.places)))
        self._of_memory = known

        def again(number: int, parts: list[Part]) -> Parts:
            targets = [part.target for part in parts]
            size = sum(target.nbytes for target in targets)
            return Parts(len(parts), parts.__getitem__, targets, size, known.setdefault(number, {}))

        return [again(number, parts) for number, parts in enumerate(selection.parts(self.layout))]

    def layout_for_next(self) -> KnownLayout | None:
        """Return the layout to remember for the next pull."""
        if self.known is None or self._matched is None or self.leased.changed is not None:
            return self.known and self.known._replace(device_type=self.device_type)
        return self.known._replace(device_type=self.device_type, alike=self._matched.alike(self.known))

    def carry_by(self, carry: Carry) -> None:
        """Have ``carry`` fill the model. Raises ConfigurationError unless the model has all tensors as published."""
        selection = self.selection()
        if len(selection.targets) != len(self.layout.rows) or any(name is not None for _, name in selection.places):
            raise ConfigurationError(
                "carry= brings all tensors as they were published: the model needs each of them, under the same dtype"
            )
        with torch.no_grad():
            carry(self.leased.version, selection.targets)

    def _match(self, rows: Sequence[Row], changed: Sequence[int] | None) -> Selection:
        targets, convert = self.targets, self.converts
        wrong: list[str] = []
        lacking = [name for name, *_ in rows if name not in targets] if self._strict else []
        wrong += [f"the model has no {name!r}, which was published" for name in lacking]
        places: list[tuple[int, str | None]] = []
        found: list[torch.Tensor] = []
        moved = None if changed is None else set(changed)
        for place, (name, dtype, shape, _) in enumerate(rows):
            target = targets.get(name)
            if target is None:
                continue
            its = DTYPE_NAMES[target.dtype]
            if target.shape != shape:
                wrong.append(shape_mismatch(name, shape, tuple(target.shape), is_whole=True))
            elif its != dtype and (mismatch := dtype_mismatch(name, dtype, its, convert)) is not None:
                wrong.append(mismatch)
            elif moved is None or place in moved:
                places.append((place, None if its == dtype else its))
                found.append(target)
        unpublished: list[str] = []
        if self._strict:
            published = {name for name, *_ in rows}
            unpublished = [name for name in targets if name not in published]
            wrong += [f"{name!r} of the model was not published" for name in unpublished]
        check_fits(self._store, wrong, lacking, unpublished)
        if self.device_type is None:
            check_writable(self._store, {name: targets[name] for name, *_ in rows if name in targets})
        return Selection(places, found)


def writable_device_type(tensors: Sequence[torch.Tensor]) -> str | None:
    """The type of the device that all tensors are on, if a lane can write each of them in place; else None."""
    if len(set(map(torch.Tensor.get_device, tensors))) != 1:
        return None
    if any(map(torch.Tensor.is_neg, tensors)) or any(map(torch.Tensor.is_conj, tensors)):
        return None
    if any(not tensor.data_ptr() and tensor.numel() for tensor in tensors):
        return None
    return tensors[0].device.type
