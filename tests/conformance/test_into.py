"""Tensors received into memory of the receiver's out of messages, and what becomes of it where a transfer fails.

test_tensor_lanes.py has the same for every lane for tensors.

Functions with an underscore run in the processes ``a`` and ``b``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from raytorchrpc.calls.receive_into import Buffers
from raytorchrpc.errors import PeerLost
from raytorchrpc.lanes.base import Copies
from raytorchrpc.lanes.nccl.lane import NcclLane
from raytorchrpc.tensors.codec import Codec
from raytorchrpc.tensors.dtypes import Shape
from tests.conformance import peers
from tests.conformance import test_message_lanes as message_lanes
from tests.conformance import test_tensor_lanes as tensor_lanes
from tests.conformance.peers import ALL_DTYPES, random, same, tensors
from tests.conformance.pipes import PipeCarrier
from tests.conformance.test_tensor_lanes import MIB
from tests.polling import wait_until

Make = Callable[..., list[torch.Tensor]]


def test_a_transfer_that_fails_in_the_middle_writes_no_more_once_that_is_told() -> None:
    pair = tensor_lanes.make_pair("nccl by pipes")
    a, b = pair.a, pair.b
    try:
        for _ in range(2):
            a.run(_stand_still_halfway)
            sent = a.run(peers.export, [torch.full((20 * MIB,), 7, dtype=torch.uint8)])
            b.begin(_fill_and_lose, sent)
            a.run(_give_up_halfway)
            assert b.result() == (0x55, True)
            a.run(_go_on)
            b.run(_unchanged)
        sent = a.run(tensor_lanes._export, tensor_lanes._several_large)
        b.run(tensor_lanes._fill, sent, tensor_lanes._plain, tensor_lanes._several_large)
    finally:
        pair.kill()


def _lane() -> NcclLane:
    lane = tensors().lane
    assert isinstance(lane, NcclLane)
    return lane


def _carrier() -> PipeCarrier:
    carrier = _lane()._carrier
    assert isinstance(carrier, PipeCarrier)
    return carrier


def _stand_still_halfway() -> None:
    _carrier().halfway = threading.Event()


def _give_up_halfway() -> None:
    """As the sender does at its deadline: the receiver is told, and then what is left is sent, or not."""
    lane, halfway = _lane(), _carrier().halfway
    assert halfway is not None and halfway.wait(20)
    (end,) = lane._sending.values()
    lane._end_at_receiver(end, "not in time", time.monotonic() + 20)


def _go_on() -> None:
    """Wait until it has sent what it can."""
    carrier = _carrier()
    carrier.halfway = None
    assert wait_until(lambda: all(channel.over() for channel in carrier.channels), 20)


def _fill_and_lose(sent: tuple[Any, list[Shape]]) -> tuple[int, bool]:
    """The last byte of the buffer, and whether all that was under way is over."""
    descriptor, shapes = sent
    (target,) = targets = [tensor_lanes._plain(shape) for shape in shapes]
    try:
        tensors().lane.read("a", descriptor, shapes, Copies.whole(targets))
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


@pytest.fixture(scope="module", params=["loopback", "socket over unix", "nng over tcp", "torchrpc"])
def messengers(request: pytest.FixtureRequest) -> Iterator[message_lanes.Pair]:
    pair = message_lanes.make_pair(request.param)
    yield pair
    pair.kill()


def test_every_shape_out_of_a_message(messengers: message_lanes.Pair) -> None:
    for shape in message_lanes.SHAPES:
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
