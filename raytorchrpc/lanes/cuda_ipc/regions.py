"""Copies of the parts of a mapped flat tensor into their targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from raytorchrpc.lanes.base import Part
from raytorchrpc.lanes.common import packing, regions
from raytorchrpc.lanes.cuda_ipc.copy_kernel import Copies
from raytorchrpc.process.cuda_driver import MAX_PITCH, Driver, Kernel
from raytorchrpc.tensors.dtypes import span_of, strided_within, view_at, within


class Scatter(NamedTuple):
    """How to bring the parts of a flat tensor to a GPU. Holds addresses, and none of the memory."""

    direct: Copies
    alone: list[int]
    """Parts that need a temporary each, by index."""

    @staticmethod
    def of(parts: Sequence[Part], size: int, device: torch.device, beside: bool = False) -> Scatter:
        """``size``: of the flat tensor (bytes). ``beside``: see Copies. Raises OutOfBounds."""
        found = Scatter(Copies(beside=beside), [])
        for index, part in enumerate(parts):
            offset, target, strides = part
            if strides is None:
                within(offset, target.nbytes, size)
            else:
                strided_within(offset, target.shape, strides, target.itemsize, size)
            rows = _copies(target, strides, target.stride()) if target.device == device else None
            if rows is None:
                found.alone.append(index)
                continue
            begin = target.data_ptr()
            found.direct.rows.extend((begin + row.target, offset + row.source, *row[2:]) for row in rows)
        return found

    def queue(
        self,
        parts: Sequence[Part],
        flat: int,
        device: torch.device,
        driver: Driver,
        kernel: Callable[[], Kernel | None],
        stream: int,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Queue it on ``stream``, the current one of ``device``. Returns what the caller must copy itself: (target,
        source).

        ``parts``: those for which it was made. ``flat``: address of the flat tensor. ``kernel``: see ``Copies``.
        """
        self.direct.queue(flat, driver, kernel, stream)
        return [_by_temporary(parts[index], flat, device, driver, stream) for index in self.alone]


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
