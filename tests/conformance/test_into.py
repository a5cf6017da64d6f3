"""Tensors received into memory of the receiver's: by every lane for tensors, and out of every other lane's messages.

Functions with an underscore run in the processes ``a`` and ``b``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from raytorchrpc.calls.receive_into import Buffers
from raytorchrpc.errors import PeerLost
from raytorchrpc.lanes import registry
from raytorchrpc.lanes.nccl.lane import NcclLane
from raytorchrpc.lanes.nixl.lane import NixlLane
from raytorchrpc.tensors import host_device_copy
from raytorchrpc.tensors.codec import Codec
from raytorchrpc.tensors.dtypes import Shape, as_copyable
from tests.conformance import peers
from tests.conformance import test_message_lanes as message_lanes
from tests.conformance import test_tensor_lanes as tensor_lanes
from tests.conformance.peers import ALL_DTYPES, Process, random, same, tensors
from tests.conformance.pipes import PipeCarrier
from tests.conformance.test_tensor_lanes import MIB, Pair

Make = Callable[..., list[torch.Tensor]]


@pytest.fixture(scope="module", params=tensor_lanes.KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = tensor_lanes.make_pair(request.param)
    yield pair
    pair.kill()


@pytest.fixture(scope="module")
def shm() -> Iterator[Pair]:
    """Two members whose arenas have 64 MiB."""
    pair = tensor_lanes.make_pair("shm", 64 * MIB)
    yield pair
    pair.kill()


# How the buffers are made, for a tensor of the result.


def _plain(shape: Shape) -> torch.Tensor:
    dtype, extents = shape
    size = dtype.itemsize * math.prod(extents)
    return torch.full((size,), 0x55, dtype=torch.uint8, device=tensors().device).view(dtype).view(extents)


def _strided(shape: Shape) -> torch.Tensor:
    dtype, extents = shape
    wider = _plain((dtype, (*extents, 3)))
    return wider[..., 1]


def _turned(shape: Shape) -> torch.Tensor:
    dtype, extents = shape
    return _plain((dtype, tuple(reversed(extents)))).permute(tuple(reversed(range(len(extents)))))


def _on_the_cpu(shape: Shape) -> torch.Tensor:
    return _brought(_plain(shape))


def _brought(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU; torch itself cannot bring every dtype there with every stride."""
    return as_copyable(tensor).cpu().view(tensor.dtype)


def _fill(
    sent: tuple[Any, list[Shape]], prepare: Callable[[Shape], torch.Tensor], make: Make, *args: Any
) -> list[bool]:
    """Fetches; returns which of the targets the lane itself filled."""
    descriptor, shapes = sent
    targets = [prepare(shape) for shape in shapes]
    arrived = tensors().lane.fetch("a", descriptor, shapes, targets)
    assert [(tensor.dtype, tuple(tensor.shape)) for tensor in arrived] == shapes
    direct = [tensor is target for tensor, target in zip(arrived, targets, strict=True)]
    filled = host_device_copy.copy_into(targets, arrived)
    assert all(tensor is target for tensor, target in zip(filled, targets, strict=True))
    for target, expected in zip(targets, make(*args), strict=True):
        assert same(_brought(target), expected), (expected.dtype, expected.shape)
    return direct


def _goes_direct() -> bool:
    """The nixl lane copies out of its own memory; lanes of other distributions may too."""
    lane = tensors().lane
    return not isinstance(lane, NixlLane) and lane.name in {row.name for row in registry.LANES}


#: Run each time; the others are slow.
_EACH_TIME = [_plain, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (_strided, _turned, _on_the_cpu))]


@pytest.mark.parametrize("prepare", _EACH_TIME)
@pytest.mark.parametrize("index", range(len(ALL_DTYPES)), ids=str)
def test_each_dtype(pair: Pair, index: int, prepare: Any) -> None:
    pair.b.run(_fill, pair.send(_few_of_dtype, index), prepare, _few_of_dtype, index)


def _few_of_dtype(index: int) -> list[torch.Tensor]:
    tensor = random((5, 7), ALL_DTYPES[index])
    return [tensor, tensor.T, tensor[:0], tensor[2, 3]]


@pytest.mark.parametrize("prepare", [_plain, _strided])
@pytest.mark.parametrize(
    ("make", "args"),
    [
        (tensor_lanes._same_shapes, ()),
        (tensor_lanes._empty, ()),
        (tensor_lanes._empty_among_others, ()),
        (tensor_lanes._views, ()),
        (tensor_lanes._expanded, ()),
        (tensor_lanes._around_one_mib, ()),
        (tensor_lanes._several_large, ()),
        (tensor_lanes._dtypes_together, (2,)),
        (tensor_lanes._many_small, (3000,)),
    ],
)
def test_each_kind_of_tensor(pair: Pair, make: Make, args: tuple[Any, ...], prepare: Any) -> None:
    pair.b.run(_fill, pair.send(make, *args), prepare, make, *args)


def test_large_ones_arrive_there_without_a_stop(pair: Pair) -> None:
    direct = pair.b.run(_fill, pair.send(tensor_lanes._several_large), _plain, tensor_lanes._several_large)
    assert direct == [pair.b.run(_goes_direct)] * 3


def test_some_have_no_buffer(pair: Pair) -> None:
    for number in range(3):
        pair.b.run(_fill_all_but, pair.send(tensor_lanes._several_large), number)


def _fill_all_but(sent: tuple[Any, list[Shape]], number: int) -> None:
    descriptor, shapes = sent
    targets = [None if index == number else _plain(shape) for index, shape in enumerate(shapes)]
    filled = host_device_copy.copy_into(targets, tensors().lane.fetch("a", descriptor, shapes, targets))
    for target, tensor, expected in zip(targets, filled, tensor_lanes._several_large(), strict=True):
        assert target is None or tensor is target
        assert same(_brought(tensor), expected)


def test_the_same_buffers_again_and_again(pair: Pair) -> None:
    """What has been filled stays so, whatever the lane carries next; and what a GPU does with them is in order."""
    for seed in range(6):
        pair.b.run(_refill, pair.send(_seeded, seed), seed)
        pair.pass_on("", _seeded, seed + 100)
        pair.b.run(_holds, seed)


def _seeded(seed: int) -> list[torch.Tensor]:
    return [random((size,), torch.uint8, seed) for size in (3 * MIB, 1000, 9 * MIB + 1, 77, 78, 79, MIB)]


def _refill(sent: tuple[Any, list[Shape]], seed: int) -> None:
    descriptor, shapes = sent
    targets = tensors().kept.setdefault("targets", [_plain(shape) for shape in shapes])
    for target in targets:
        target.add_(seed)  # on a GPU perhaps still to come when the lane is asked
    host_device_copy.copy_into(targets, tensors().lane.fetch("a", descriptor, shapes, targets))


def _holds(seed: int) -> None:
    for target, expected in zip(tensors().kept["targets"], _seeded(seed), strict=True):
        assert same(_brought(target), expected), seed


def test_what_one_gave_another_never_gets(pair: Pair) -> None:
    """The sender goes on with its own tensors at once."""
    sent = pair.a.run(tensor_lanes._export_then_change, tensor_lanes._several_large)
    pair.b.run(_fill, sent, _plain, tensor_lanes._several_large)
    pair.a.run(tensor_lanes._finish_and_change)


@pytest.mark.parametrize("prepare", [_plain, _strided])
def test_the_slot_is_back_as_soon_as_the_buffer_is_full(shm: Pair, prepare: Any) -> None:
    sent = shm.send(tensor_lanes._around_one_mib)
    assert shm.used()
    shm.b.run(_fill_and_keep, sent, prepare)
    assert shm.used() == 0


def _fill_and_keep(sent: tuple[Any, list[Shape]], prepare: Callable[[Shape], torch.Tensor]) -> None:
    descriptor, shapes = sent
    tensors().kept["targets"] = targets = [prepare(shape) for shape in shapes]
    tensors().kept["arrived"] = tensors().lane.fetch("a", descriptor, shapes, targets)


def test_also_when_the_arena_is_crowded(shm: Pair) -> None:
    held = [shm.pass_on(f"held {number}", tensor_lanes._several_large) for number in range(3)]
    sent = shm.send(tensor_lanes._several_large)
    assert not held[0][0][2] and sent[0][2], "more than half is out"
    shm.b.run(_fill, sent, _plain, tensor_lanes._several_large)
    again = shm.send(tensor_lanes._several_large)
    shm.b.run(_fill_all_but, again, 0)
    for number in range(3):
        shm.b.run(tensor_lanes._drop, f"held {number}")
    assert shm.used() == 0


def test_a_transfer_that_fails_in_the_middle_writes_no_more_once_that_is_told() -> None:
    a, b = Process(), Process()
    try:
        address_a = a.run(peers.open_tensors, "nccl by pipes")
        address_b = b.run(peers.open_tensors, "nccl by pipes", 0, 0, 1, 2.0)
        a.run(peers.meet, "b", address_b)
        b.run(peers.meet, "a", address_a)
        for _ in range(2):
            a.run(_stand_still_halfway)
            sent = a.run(peers.export, [torch.full((20 * MIB,), 7, dtype=torch.uint8)])
            assert b.run(_fill_and_lose, sent) == (0x55, True)
            a.run(_go_on)
            b.run(_unchanged)
        sent = a.run(tensor_lanes._export, tensor_lanes._several_large)
        b.run(_fill, sent, _plain, tensor_lanes._several_large)
    finally:
        a.kill()
        b.kill()


def _carrier() -> PipeCarrier:
    lane = tensors().lane
    assert isinstance(lane, NcclLane) and isinstance(lane._carrier, PipeCarrier)
    return lane._carrier


def _stand_still_halfway() -> None:
    _carrier().halfway = threading.Event()


def _go_on() -> None:
    """Wait until it has sent what it can."""
    carrier = _carrier()
    assert carrier.halfway is not None and carrier.halfway.is_set()
    carrier.halfway = None
    assert peers.wait_until(lambda: all(channel.over() for channel in carrier.channels), 10)


def _fill_and_lose(sent: tuple[Any, list[Shape]]) -> tuple[int, bool]:
    """The last byte of the buffer, and whether all that was under way is over."""
    descriptor, shapes = sent
    (target,) = targets = [_plain(shape) for shape in shapes]
    try:
        tensors().lane.fetch("a", descriptor, shapes, targets)
    except PeerLost:
        over = all(channel.over() for channel in _carrier().channels)
        tensors().kept["lost"] = (target, target.clone())
        return int(target[-1]), over
    raise AssertionError("the other half came too")


def _unchanged() -> None:
    target, then = tensors().kept.pop("lost")
    assert torch.equal(target, then)
    assert int(target[0]) == 7, "it had begun"


# --- in the message --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=message_lanes.KINDS)
def messengers(request: pytest.FixtureRequest) -> Iterator[message_lanes.Pair]:
    pair = message_lanes.make_pair(request.param)
    yield pair
    pair.kill()


@pytest.mark.parametrize("shape", message_lanes.SHAPES)
def test_every_shape_out_of_a_message(messengers: message_lanes.Pair, shape: str) -> None:
    messengers.run(_message_body, _of_shape, shape)


def _of_shape(shape: str) -> list[torch.Tensor]:
    return message_lanes.SHAPES[shape]()


def test_every_dtype_out_of_a_message(messengers: message_lanes.Pair) -> None:
    messengers.run(_message_body, _every_dtype)


def _every_dtype() -> list[torch.Tensor]:
    return [random((3, 4), dtype, seed) for seed, dtype in enumerate(ALL_DTYPES)]


def _message_body(make: Make, *args: Any) -> None:
    codec, made = Codec(), make(*args)
    encoded = codec.encode(made)
    for strided in (False, True):
        reply = peers.ask("work", *encoded.tensors, payload=encoded.payload)
        reply.make_current()
        buffers = [_buffer(tensor, strided) for tensor in made]
        body = reply.body._replace(payload=bytes(reply.body.payload))
        _, result = Buffers(buffers).receive(codec, body, [], "b.echo", keep=False)
        assert [id(tensor) for tensor in result] == [id(buffer) for buffer in buffers]
        assert all(same(*both) for both in zip(buffers, made, strict=True))


def _buffer(like: torch.Tensor, strided: bool) -> torch.Tensor:
    shape = (*like.shape, 2) if strided else tuple(like.shape)
    wider = random(shape, like.dtype, 99)
    return wider[..., 1] if strided else wider
