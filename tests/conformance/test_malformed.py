"""Descriptors that cannot be: whatever a peer says of its tensors, the receiver lives, and says which lane and peer.

Two processes, ``a`` and ``b``, as in tests/conformance/test_tensor_lanes.py; functions with an underscore run in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import Copies
from raytorchrpc.tensors.dtypes import Shape
from tests.conformance import peers
from tests.conformance.peers import export, random, tensors
from tests.conformance.test_tensor_lanes import GPU_KINDS, NIXL_KINDS, Pair, region

MIB = 1 << 20
#: Bytes of a flat tensor.
FLAT = 2 * MIB


@pytest.fixture
def pair(request: pytest.FixtureRequest, form: Callable[..., Pair]) -> Pair:
    """``request.param``: its lane."""
    return form(request.param, 64 * MIB)


#: Those whose memory peers read.
IN_PLACE = ["shm", *(kind for kind in GPU_KINDS if kind.values[0].startswith("cuda_ipc"))]  # type: ignore[union-attr]


def _two() -> list[torch.Tensor]:
    """One with a slot of its own, and a small one."""
    return [random((2 * MIB,), torch.uint8), random((3, 5))]


def broken(value: Any) -> Iterator[Any]:
    """A descriptor with one of its fields changed at a time."""
    if isinstance(value, tuple):
        yield value[:-1]
        yield (*value, 0)
        for place, field in enumerate(value):
            for other in broken(field):
                yield (*value[:place], other, *value[place + 1 :])
    elif value is None:
        yield from (-1, 5, "")
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (-1, -MIB, value + 65 * MIB, 1 << 31, 1 << 62, -(1 << 62), 1 << 80, None, "1", 0.5)
    else:
        yield from (value[:0], value[:-1], value + value, None, 7)


def asks_for_the_same(lane: str, one: Any, other: Any) -> bool:
    """Whether the sender is asked for the same memory. If that is not there, it ends a two-sided connection, or NIXL's,
    as it should.
    """
    if lane == "cuda_ipc":  # of another serial, the sender's GPU may still be computing it: it is waited for
        return bool(one[2:3] == other[2:3])
    if lane == "nccl":
        return bool(one[:2] == other[:2])
    if lane != "nixl":
        return True
    if len(one) < 3 or one[0] != other[0] or not isinstance(one[2], tuple):
        return False
    return all(isinstance(place, tuple) and place[:3] == its[:3] for place, its in zip(one[2], other[2], strict=False))


def _fetch_all(descriptors: list[Any], shapes: list[Shape], lane: str) -> int:
    """How many of them were refused; the others bring tensors of these shapes."""
    refused = 0
    for descriptor in descriptors:
        try:
            arrived = tensors().lane.read("a", descriptor, shapes)
        except (LaneUnavailable, PeerLost) as error:
            assert "'a'" in str(error) or lane in str(error), error
            refused += 1
        else:
            assert [(tensor.dtype, tuple(tensor.shape)) for tensor in arrived] == shapes
            for tensor in arrived:
                tensor.sum().item()  # all of it can be read
    return refused


@pytest.mark.parametrize("pair", ["shm", "nccl by pipes", *NIXL_KINDS, *GPU_KINDS], indirect=True)
def test_a_descriptor_that_cannot_be_is_refused(pair: Pair, request: pytest.FixtureRequest) -> None:
    descriptor, shapes = pair.send(_two)
    lane = request.node.callspec.params["pair"].split()[0].rstrip(",")
    changed = [other for other in broken(descriptor) if asks_for_the_same(lane, other, descriptor)]
    assert len(changed) > 10
    assert pair.b.run(_fetch_all, changed, shapes, lane) > len(changed) / 2
    pair.pass_on("", _two)  # all goes on


# --- regions of flat tensors ---------------------------------------------------------------------------------------


def _send_flat(lend: bool) -> Any:
    flat = tensors().lane.lend(FLAT) if lend else torch.empty(FLAT, dtype=torch.uint8)
    assert flat is not None
    tensors().kept["flat"] = flat.copy_(random((FLAT,), torch.uint8))
    return export([flat])


def _spread_refused(descriptor: Any, size: int, offset: int, target: int) -> str:
    """What came of asking for ``target`` bytes of a flat tensor of ``size`` bytes."""
    return _refused(descriptor, size, offset, torch.zeros(target, dtype=torch.uint8))


def _refused(
    descriptor: Any, size: int, offset: int, target: torch.Tensor, strides: tuple[int, ...] | None = None
) -> str:
    with pytest.raises(LaneUnavailable) as error:
        tensors().lane.read("a", descriptor, [(torch.uint8, (size,))], region(offset, target, strides))
    assert not target.any(), "nothing was written"
    return str(error.value)


def _spread_rightly(descriptor: Any) -> None:
    target = torch.zeros(MIB, dtype=torch.uint8)
    assert tensors().lane.read("a", descriptor, [(torch.uint8, (FLAT,))], region(MIB, target)) == [None]
    assert torch.equal(target, random((FLAT,), torch.uint8)[MIB:])


@pytest.mark.parametrize("pair", ["shm"], indirect=True)
@pytest.mark.parametrize("lend", [False, True], ids=["exported", "lent"])
def test_regions_that_are_not_there_are_refused(pair: Pair, lend: bool) -> None:
    """As of a layout that had more tensors: the memory that is told of is too small for it."""
    descriptor, _ = pair.a.run(_send_flat, lend)
    outside = [
        (FLAT, FLAT - 1, 2),
        (FLAT, -1, 2),
        (FLAT, 1 << 40, 8),
        (1 << 40, 1 << 30, MIB),
        (64, 0, MIB),
        (-1, 0, 1),
    ]
    for size, offset, target in outside:
        text = pair.b.run(_spread_refused, descriptor, size, offset, target)
        assert "lane 'shm'" in text and "member 'a'" in text and "are not in" in text
    pieces, places, *rest = descriptor
    for number, offset in ((0, FLAT), (0, -MIB), (0, 1 << 50), (1, 0)):
        pair.b.run(_spread_refused, (pieces, ((number, offset),), *rest), FLAT, 0, MIB)
    pair.b.run(_spread_rightly, descriptor)
    assert len(places) == 1


def _send_on_its_device() -> Any:
    return export([random((FLAT,), torch.uint8).to(tensors().device)])


def _strided_refused(descriptor: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    return _refused(descriptor, FLAT, offset, torch.zeros(shape, dtype=torch.int16, device=tensors().device), strides)


def _strided_taken(descriptor: Any) -> None:
    """The last bytes are the region's end."""
    targets = [torch.zeros(rows, 256, dtype=torch.int16, device=tensors().device) for rows in (1024, 16)]
    offsets = MIB, FLAT - 2 * (15 * 512 + 256)
    described = [region(offset, target, (512, 1))[0] for offset, target in zip(offsets, targets, strict=True)]
    peers.read((descriptor, [(torch.uint8, (FLAT,))]), Copies(described, targets))
    sent = random((FLAT,), torch.uint8).view(torch.int16)
    for offset, target in zip(offsets, targets, strict=True):
        assert torch.equal(target.cpu(), sent[offset // 2 :].as_strided(target.shape, (512, 1), offset // 2))


@pytest.mark.parametrize("pair", IN_PLACE, indirect=True)
def test_strided_regions_that_are_not_there_are_refused(pair: Pair) -> None:
    outside = [
        (MIB + 514, (1024, 256), (512, 1)),
        (FLAT - 2 * (15 * 512 + 256) + 2, (16, 256), (512, 1)),
        (MIB, (1024, 256), (513, 1)),
        (MIB, (1024, 256), (512, 3)),
        (MIB, (1024, 256), (-512, 1)),
        (MIB, (1024, 256), (512, -1)),
        (-2, (4, 4), (8, 1)),
        (0, (2, 2), (1 << 61, 1)),
        (1 << 40, (2, 2), (0, 0)),
        (0, (4, 4), (8,)),
        (0, (4, 4), (8, 1, 1)),
    ]
    for offset, shape, strides in outside:
        descriptor, _ = pair.a.run(_send_on_its_device)  # which a refusal may release
        text = pair.b.run(_strided_refused, descriptor, offset, shape, strides)
        assert "member 'a'" in text and "is invalid" in text, text
    descriptor, _ = pair.a.run(_send_on_its_device)
    pair.b.run(_strided_taken, descriptor)
