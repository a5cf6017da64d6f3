"""Strided parts of flat tensors, brought into tensors of the receiver by every lane for tensors.

Functions with an underscore run in the processes ``a`` and ``b``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from raytorchrpc.calls.out_of_band import PendingTensors
from raytorchrpc.lanes.base import Part
from raytorchrpc.tensors.dtypes import Shape
from tests.conformance import test_into as into
from tests.conformance import test_tensor_lanes as tensor_lanes
from tests.conformance.peers import ALL_DTYPES, same, tensors
from tests.conformance.test_tensor_lanes import MIB, Pair


@pytest.fixture(scope="module", params=tensor_lanes.KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = tensor_lanes.make_pair(request.param)
    yield pair
    pair.kill()


def _column_slice(shape: Shape) -> torch.Tensor:
    dtype, extents = shape
    return into._plain((dtype, (*extents[:-1], extents[-1] + 16)))[..., 8:-8] if extents else into._plain(shape)


_Strided = tuple[int, torch.dtype, tuple[int, ...], "tuple[int, ...] | None"]

_STRIDED_PARTS: list[list[_Strided]] = [
    [
        (64, torch.float32, (1000, 300), (1024, 1)),  # columns of a matrix
        (2048, torch.bfloat16, (512, 20), (1024, 1)),
        (0, torch.int16, (4, 100, 64), (100_000, 256, 1)),  # and of a stack of them
        (256, torch.int32, (3, 200, 500), (400_000, 1000, 1)),
        (0, torch.uint8, (3, 4, 5, 6), (50_000, 4000, 40, 3)),
        (0, torch.float64, (300, 200), (1, 300)),  # transposed
        (128, torch.complex32, (20, 30), (64, 1)),
        (MIB, torch.uint8, (MIB,), None),
        (4096, torch.float32, (MIB // 8,), None),
        (0, torch.float32, (3, 4), (0, 1)),
        (8, torch.int64, (), ()),
        (0, torch.float32, (0, 3), (3, 1)),
    ],
    [(0, torch.uint8, (5, 4), (30, 1)), (8, torch.int32, (5,), (2,)), (64, torch.int32, (5,), None)],
    [(0, torch.uint8, (0, 4), (30, 1))],
    [
        (64, torch.bfloat16, (512, 1024), (2048, 1)),
        # Small ones among contiguous neighbours; bools of random bytes would be none.
        *((256 * number, dtype, (3, 2), (4, 1)) for number, dtype in enumerate(ALL_DTYPES) if dtype is not torch.bool),
        *((256 * number, torch.int16, (7,), None) for number in range(9)),
    ],
    [],
]


@pytest.mark.parametrize("prepare", [into._plain, _column_slice, into._strided, into._turned, into._on_the_cpu])
@pytest.mark.parametrize("lend", [False, True])
def test_strided_parts_of_flat_tensors_go_where_they_belong(pair: Pair, lend: bool, prepare: Any) -> None:
    for kept in (slice(None), slice(1, 3)):  # the latter are small enough for a message of cuda_ipc
        pair.b.run(_spread_strided, pair.send(_flats, lend, kept), prepare, kept)
    if pair.a.run(into._is_shm):
        assert pair.used() == 0, "slots are back"


def _flats(lend: bool, kept: slice) -> list[torch.Tensor]:
    return into._flat(lend)[kept]


def _spread_strided(sent: tuple[Any, list[Shape]], prepare: Callable[[Shape], torch.Tensor], kept: slice) -> None:
    """As a member does: by ``scatter_into`` if the lane has it, and else out of the whole tensors."""
    descriptor, shapes = sent
    parts = [
        [Part(offset, prepare((dtype, shape)), strides) for offset, dtype, shape, strides in its]
        for its in _STRIDED_PARTS[kept]
    ]
    runs = tuple(("uint8", shape, 1) for _, shape in shapes)
    PendingTensors(tensors().lane, "a", ("", None, runs, descriptor)).scatter_into(parts)
    for whole, its in zip(_flats(False, kept), parts, strict=True):
        for offset, target, strides in its:
            count = (whole.numel() - offset) // target.itemsize * target.itemsize
            elements = whole[offset : offset + count].clone().view(target.dtype)
            shape = tuple(target.shape)
            contiguous = elements[: target.numel()]
            expected = contiguous.view(shape) if strides is None else elements.as_strided(shape, strides)
            assert same(into._brought(target), expected), (offset, target.dtype, shape)
            memory = target if target._base is None else target._base
            assert (memory.reshape(-1).view(torch.uint8) != 0x55).sum() <= target.nbytes, "nothing else was written"
