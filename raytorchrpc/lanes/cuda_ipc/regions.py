"""Copies a part of a mapped flat tensor into a target that is not the part's contiguous equal."""

from __future__ import annotations

import torch

from raytorchrpc.lanes.base import Part
from raytorchrpc.lanes.common import packing, regions
from raytorchrpc.process.cuda_driver import MAX_PITCH, Driver
from raytorchrpc.tensors.bounds import span_of
from raytorchrpc.tensors.dtypes import view_at


def copy_region(
    part: Part, flat: int, device: torch.device, driver: Driver, stream: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Queue the copy of a part, whose bounds have been checked, on ``stream`` of ``device``.

    ``flat``: address of the flat tensor. Writes to a target on ``device`` without a temporary, unless the region falls
    into very many or very short rows. Returns what the caller must copy itself: (target, source), at most one.
    """
    offset, target, strides = part
    shape = tuple(target.shape)
    contiguous = packing.layout(shape)[0]
    if strides is None:
        strides = contiguous
    direct = target.device == device
    goal_strides = target.stride() if direct else contiguous
    copies = regions.copies(shape, target.itemsize, strides, goal_strides, MAX_PITCH)
    if copies is None:
        span = torch.empty(span_of(shape, strides) * target.itemsize, dtype=torch.uint8, device=device)
        driver.copy(span.data_ptr(), flat + offset, span.nbytes, stream)
        return [(target, view_at(span, 0, (target.dtype, shape), strides))]
    goal = target if direct else torch.empty(shape, dtype=target.dtype, device=device)
    begin, end = flat + offset, goal.data_ptr()
    for source, place, width, rows, source_pitch, target_pitch in copies:
        driver.copy_rows(end + place, begin + source, width, rows, target_pitch, source_pitch, stream)
    return [] if direct else [(target, goal)]
