"""Tensors of one message that travel as one."""

from __future__ import annotations

import pytest
import torch

from raytorchrpc.lanes.common import packing

FLOATS = [
    (torch.float32, (2, 3)),
    (torch.float32, (4,)),
    (torch.float32, ()),
    (torch.float32, (0, 2)),
    (torch.float32, (5,)),
]


def test_what_was_packed_is_unpacked() -> None:
    tensors = [torch.arange(6.0).view(3, 2).t(), torch.ones(4), torch.tensor(7.0), torch.empty(0, 2), torch.arange(5.0)]
    grouped, packed = packing.pack(tensors)
    assert len(grouped) == 1, "many small tensors of one dtype are one piece"
    unpacked = packing.unpack(packed, grouped, FLOATS)
    assert all(torch.equal(*pair) for pair in zip(tensors, unpacked, strict=True))
    assert [tensor.stride() for tensor in unpacked] == [torch.empty(shape).stride() for _, shape in FLOATS]


@pytest.mark.parametrize("grouped", [[(0, 1), (1,)], [(0,)], [(0,), (0,)], [(0,), (-1,)], [()]])
def test_pieces_that_are_not_all_tensors_once_are_refused(grouped: list[tuple[int, ...]]) -> None:
    shapes = [(torch.float32, (2,)), (torch.float32, (2,))]
    with pytest.raises((ValueError, LookupError)):
        packing.unpack([torch.zeros(2 * len(piece)) for piece in grouped], grouped, shapes)


def test_a_piece_of_another_dtype_is_refused() -> None:
    shapes = [(torch.float32, (2,)), (torch.int32, (2,))]
    with pytest.raises(ValueError, match="another dtype"):
        packing.unpack([torch.zeros(4)], [(0, 1)], shapes)
