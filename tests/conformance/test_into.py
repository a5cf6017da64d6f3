"""What becomes of the receiver's memory where a transfer fails; test_tensor_lanes has those that do not.

Functions with an underscore run in the processes ``a`` and ``b``.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from raytorchrpc.errors import PeerLost
from raytorchrpc.lanes.base import Copies
from raytorchrpc.lanes.nccl.lane import NcclLane
from raytorchrpc.tensors.dtypes import Shape
from tests.conformance import peers
from tests.conformance import test_tensor_lanes as tensor_lanes
from tests.conformance.peers import tensors
from tests.conformance.pipes import PipeCarrier
from tests.conformance.test_tensor_lanes import MIB
from tests.polling import wait_until


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
