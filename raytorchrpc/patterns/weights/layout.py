"""What members tell each other about published weights: their layout, a lease on a version, and what a pull selects."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from raytorchrpc.lanes.base import Part
from raytorchrpc.patterns.weights.snapshots import TensorSpec, converted_specs, lay_out
from raytorchrpc.tensors.dtypes import DTYPES

#: A tensor in a message: name, dtype's name, shape.
Row = tuple[str, str, tuple[int, ...]]

_CPU = torch.device("cpu")


class VersionLease(NamedTuple):
    """What a home tells a reader before it pulls."""

    version: int
    lease: int
    """Keeps the version until it is released. 0: the reader has this version."""
    layout: int
    rows: list[Row] | None
    """None: the reader knows this layout."""
    changed: list[int] | None
    """Places of the tensors that differ from the version that the reader has; None: all."""


class KnownLayout(NamedTuple):
    """A layout, as a home told a reader."""

    number: int
    rows: list[Row]
    offsets: list[int]
    """Of each tensor, in the memory of a snapshot that has all tensors on one device."""
    device_type: str | None = None
    """See ``ModelMatch.device_type``; of the last pull."""

    @staticmethod
    def of(number: int, rows: list[Row]) -> KnownLayout:
        return KnownLayout(number, rows, lay_out(_specs(rows))[0])


class Selection(NamedTuple):
    """The tensors that a pull brings."""

    places: list[tuple[int, str | None]]
    """Place in the layout, and the name of the dtype to convert to (None: unconverted)."""
    targets: list[torch.Tensor]
    """Where each of them goes."""

    def as_relayed(self) -> Selection:
        """Return the same, of relayed weights: those are the selected tensors as converted."""
        return self._replace(places=[(place, None) for place in range(len(self.targets))])

    def messages(self, size: int) -> list[Selection]:
        """Divide into messages of at most ``size`` bytes; a larger tensor is a message of its own."""
        found: list[Selection] = []
        begin = filled = 0
        for place, target in enumerate(self.targets):
            if place > begin and filled + target.nbytes > size:
                found.append(Selection(self.places[begin:place], self.targets[begin:place]))
                begin, filled = place, 0
            filled += target.nbytes
        return [*found, Selection(self.places[begin:], self.targets[begin:])]

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of the selected tensors, as converted. ``rows``: of the whole layout."""
        return [(rows[place][0], name or rows[place][1], rows[place][2]) for place, name in self.places]

    def specs(self, rows: Sequence[Row]) -> list[TensorSpec]:
        """Return the specs of the targets. ``rows``: of the whole layout."""
        specs = zip(_specs(self.rows(rows)), self.targets, strict=True)
        return [spec._replace(device=target.device) for spec, target in specs]

    def parts(self, known: KnownLayout) -> list[list[Part]]:
        """Return which part of a snapshot's memory goes to each target, by piece; see ``Snapshot.pieces``."""
        offsets: dict[str | None, list[int]] = {None: known.offsets}
        parts: dict[str | None, list[Part]] = {}
        for (place, name), target in zip(self.places, self.targets, strict=True):
            if name not in offsets:
                offsets[name] = lay_out(converted_specs(_specs(known.rows), DTYPES[name]))[0]  # type: ignore[index]
            parts.setdefault(name, []).append(Part(offsets[name][place], target))
        return list(parts.values())

    def signature(self, layout: int) -> str:
        """Return a digest: equal for pulls of one version that bring the same to the same type of device."""
        text = repr((layout, self.places, [target.device.type for target in self.targets]))
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _specs(rows: Sequence[Row]) -> list[TensorSpec]:
    return [TensorSpec(DTYPES[dtype], shape, _CPU) for _, dtype, shape in rows]
