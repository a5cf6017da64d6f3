"""Who does not have the group's secret, at every socket of a group that works: no member ends, none serves them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
import torch

from raytorchrpc.lanes.base import PeerAddress
from raytorchrpc.lanes.common.acceptor import listener_identity
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.lanes.nccl.lane import NcclLane
from tests.conformance.peers import SECRET, forkserver, nccl_lane
from tests.conformance.pipes import PipeCarrier
from tests.faults.faults import Siege
from tests.faults.running import run_faults
from tests.faults.strangers import GROUPS, Door, recorded, send

MESSAGES = 3_000


@pytest.mark.slow
@pytest.mark.parametrize("lane", GROUPS)
def test_garbage_at_every_socket_harms_nobody(cluster: None, lane: str) -> None:
    report = run_faults("calls", [[Siege("c0", lane, MESSAGES, seed=1)]], 1, **GROUPS[lane])
    assert report.violations == [], report
    (struck,) = report.struck
    assert {kind.partition(":")[0] for kind in struck.sent} == {f"{lane} over unix", f"{lane} over tcp"}
    assert sum(struck.sent.values()) >= 0.9 * MESSAGES, struck.unsent
    assert report.verdicts["call ok"] >= 100


@pytest.fixture
def nccl() -> Iterator[list[NcclLane]]:
    """Two members' ends of the nccl lane, with a carrier that needs no GPU."""
    lanes = [nccl_lane(rank, 20, PipeCarrier(name), tcp=True) for rank, name in enumerate("ab")]
    addresses = [lane.open() for lane in lanes]
    lanes[0].connect([PeerAddress("b", addresses[1])])
    lanes[1].connect([PeerAddress("a", addresses[0])])
    yield lanes
    for lane in lanes:
        lane.close()


@pytest.mark.parametrize("messages", [1_000, pytest.param(MESSAGES, marks=pytest.mark.slow)])
def test_garbage_at_the_sockets_of_the_nccl_lane_harms_nobody(nccl: list[NcclLane], messages: int) -> None:
    a, b = nccl
    control = b._peers["a"].control
    assert control.tcp is not None
    known = Credentials(SECRET)
    identity = listener_identity("socket", known, control, socket.AF_UNIX)
    doors = [Door("a", "nccl", control.unix, identity), Door("a", "nccl", control.tcp)]
    told = recorded(doors[0], known)
    slowest, fetched = 0.0, 0
    with forkserver().Pool(1) as pool:
        sending = pool.apply_async(send, (doors, 1, messages, told))
        while not sending.ready() or not fetched:
            start, tensor = time.monotonic(), torch.full((10,), fetched)
            export = a.export([tensor], "b", {0: 0})
            assert torch.equal(b.read("a", export.descriptor, [(tensor.dtype, (10,))])[0], tensor)
            slowest, fetched = max(slowest, time.monotonic() - start), fetched + 1
            time.sleep(0.001)
        sent, unsent, heard = sending.get(1)
    assert sum(sent.values()) >= 0.9 * messages, unsent
    assert heard <= 65
    assert slowest < 15
    assert not a._kept or len(a._kept) == 1
