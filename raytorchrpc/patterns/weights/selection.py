"""Published layouts as readers know them, and what a pull brings of one into which tensors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from raytorchrpc.lanes.base import Part
from raytorchrpc.patterns.weights.plan import Row
from raytorchrpc.patterns.weights.snapshots import Region, TensorSpec, converted_specs, lay_out
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
