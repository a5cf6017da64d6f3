"""Copies of the parts of a mapped flat tensor into their targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from raytorchrpc.lanes.base import Part
from raytorchrpc.lanes.common import packing, regions
from raytorchrpc.process.cuda_driver import MAX_PITCH, Driver
from raytorchrpc.tensors.bounds import span_of
from raytorchrpc.tensors.dtypes import view_at


class Copies(NamedTuple):
    """How to bring the parts of a flat tensor to a GPU. Holds addresses, and none of the memory."""

    straight: list[tuple[int, int, int]]
    """Contiguous bytes: (target's address, offset in the flat tensor, bytes)."""
    rows: list[tuple[int, int, int, int, int, int]]
    """Target's address, offset, and ``Rows`` from ``width`` on."""
    alone: list[int]
    """Parts that need a temporary each, by index."""
    together: list[list[int]]
    """Parts that share a temporary."""

    @staticmethod
    def of(parts: Sequence[Part], size: int, device: torch.device) -> Copies:
        """``size``: of the flat tensor (bytes). Raises OutOfBounds."""
        found = Copies([], [], [], [])
        alone, together = packing.together(parts, size)
        found.together.extend(together)
        for index in alone:
            offset, target, strides = parts[index]
            copies = _copies(target, strides, target.stride()) if target.device == device else None
            if copies is None:
                found.alone.append(index)
                continue
            begin = target.data_ptr()
            for row in copies:
                if row.number == 1:
                    found.straight.append((begin + row.target, offset + row.source, row.width))
                else:
                    found.rows.append((begin + row.target, offset + row.source, *row[2:]))
        return found

    def queue(
        self, parts: Sequence[Part], flat: int, device: torch.device, driver: Driver, stream: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Queue them on ``stream`` of ``device``. Returns what the caller must copy itself: (target, source).

        ``parts``: those for which they were made. ``flat``: address of the flat tensor.
        """
        driver.copy_all(self.straight, flat, stream)
        for target, offset, width, number, source_pitch, target_pitch in self.rows:
            driver.copy_rows(target, flat + offset, width, number, target_pitch, source_pitch, stream)
        left = [_by_temporary(parts[index], flat, device, driver, stream) for index in self.alone]
        for indices in self.together:
            run = [parts[index] for index in indices]
            first, last = run[0].offset, max(part.offset + part.target.nbytes for part in run)
            joined = torch.empty(last - first, dtype=torch.uint8, device=device)
            driver.copy(joined.data_ptr(), flat + first, last - first, stream)
            left += [(part.target, packing.part_of(joined, part, first)) for part in run]
        return left


def _copies(
    target: torch.Tensor, strides: tuple[int, ...] | None, goal: tuple[int, ...]
) -> tuple[regions.Rows, ...] | None:
    """``goal``: strides of where the part goes. None: better by way of a temporary."""
    shape = tuple(target.shape)
    return regions.copies(shape, target.itemsize, strides or packing.layout(shape)[0], goal, MAX_PITCH)


def _by_temporary(
    part: Part, flat: int, device: torch.device, driver: Driver, stream: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queue the copy of a part to a temporary on ``device``. Returns (target, source) of the copy from there."""
    offset, target, strides = part
    shape = tuple(target.shape)
    contiguous = packing.layout(shape)[0]
    copies = None if target.device == device else _copies(target, strides, contiguous)
    if copies is None:  # very many or very short rows
        strides = strides or contiguous
        span = torch.empty(span_of(shape, strides) * target.itemsize, dtype=torch.uint8, device=device)
        driver.copy(span.data_ptr(), flat + offset, span.nbytes, stream)
        return target, view_at(span, 0, (target.dtype, shape), strides)
    arrived = torch.empty(shape, dtype=target.dtype, device=device)
    begin, end = flat + offset, arrived.data_ptr()
    for source, place, width, rows, source_pitch, target_pitch in copies:
        driver.copy_rows(end + place, begin + source, width, rows, target_pitch, source_pitch, stream)
    return target, arrived
