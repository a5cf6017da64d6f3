"""The nccl lane with NCCL itself: a peer that is killed while a large tensor crosses, and the survivor afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.nccl.lane import NcclLane
from raytorchrpc.tensors.dtypes import Shape
from tests.conformance import peers
from tests.conformance.peers import Process, tensors
from tests.polling import wait_until

pytestmark = pytest.mark.gpu(2)

GIB = 1 << 30
#: How NCCL crosses, and enough bytes that it takes a good part of a second.
ROADS = {"NVLink": ({}, 32 * GIB), "sockets": ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, 2 * GIB)}


@pytest.fixture(params=ROADS)
def four(request: pytest.FixtureRequest) -> Iterator[tuple[dict[str, Process], int]]:
    """``a`` and ``d`` on one GPU, ``b`` and ``c`` on another; and how many bytes to send."""
    environment, size = ROADS[request.param]
    processes = {name: Process() for name in "abcd"}
    for rank, process in enumerate(processes.values()):
        process.begin(_open, environment, int(rank in (1, 2)), rank)
    addresses = {name: process.result() for name, process in processes.items()}
    for name, process in processes.items():
        for peer, address in addresses.items():
            if peer != name:
                process.run(peers.meet, peer, address)
    yield processes, size
    for process in processes.values():
        if process.process.is_alive():
            process.kill()


def _open(environment: dict[str, str], gpu: int, rank: int) -> Any:
    os.environ.update(environment)
    return peers.open_tensors("nccl", 0, gpu, rank, 30)


@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_a_peer_killed_in_the_middle(four: tuple[dict[str, Process], int], victim: str) -> None:
    (a, b, c, d), size = four[0].values(), four[1]
    b.run(_fetch, a.run(_send, "b", 1000), 1000)  # joined and connected: what follows is the transfer alone
    b.begin(_fetch, a.run(_send, "b", size), size)
    a.run(_has_begun)
    if victim == "sender":
        a.process.kill()
        assert b.result() == "PeerLost"
        survivor, gone, its_name, other, others_name = b, "a", "b", d, "d"
    else:
        b.process.kill()
        a.run(_lets_go)
        survivor, gone, its_name, other, others_name = a, "b", "a", c, "c"
    survivor.run(_is_sound)
    survivor.run(_cannot_send, gone)
    for _ in range(3):
        sent = survivor.run(_send, others_name, 1 << 20)
        assert other.run(_fetch, sent, 1 << 20, its_name) == "whole"
        sent = other.run(_send, its_name, 1 << 20)
        assert survivor.run(_fetch, sent, 1 << 20, others_name) == "whole"


def _lane() -> NcclLane:
    lane = tensors().lane
    assert isinstance(lane, NcclLane)
    return lane


def _send(peer: str, size: int) -> tuple[Any, list[Shape]]:
    tensors().exports.clear()
    return peers.export([torch.full((size,), 7, dtype=torch.uint8, device="cuda")], peer)


def _has_begun() -> None:
    assert wait_until(lambda: not _lane().outstanding, 10)


def _fetch(sent: tuple[Any, list[Shape]], size: int, origin: str = "a") -> str:
    try:
        (arrived,) = _lane().read(origin, *sent)
    except PeerLost:
        return "PeerLost"
    assert arrived.shape == (size,) and int(arrived.min()) == int(arrived.max()) == 7
    return "whole"


def _lets_go() -> None:
    lane = _lane()
    assert wait_until(lambda: not lane._sending and not lane._receiving, 10)


def _is_sound() -> None:
    """The aborted kernel has left the GPU, and NCCL its communicator."""
    assert wait_until(lambda: not any("nccl-abort" in thread.name for thread in threading.enumerate()), 20)
    assert int(torch.ones(1000, device="cuda").sum()) == 1000
    torch.cuda.synchronize()


def _cannot_send(peer: str) -> None:
    with pytest.raises(LaneUnavailable):
        _send(peer, 10)


def test_both_ends_on_one_gpu_are_refused() -> None:
    one, other = Process(), Process()
    one.begin(_open, {}, 0, 0)
    other.begin(_open, {}, 0, 1)
    one.result()
    one.run(peers.meet, "b", other.result())
    one.run(_is_refused)
    one.kill()
    other.kill()


def _is_refused() -> None:
    with pytest.raises(LaneUnavailable, match=r"both ends are on GPU .*cuda_ipc"):
        _send("b", 10)
