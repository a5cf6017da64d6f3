"""Groups whose members reach each other by nng, over ipc and over TCP, as users see them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from tests import insides
from tests.insides import in_actor
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn

CONFIG = rtr.GroupConfig(lanes=("nng",))
CONFIGS = {"ipc": CONFIG, "tcp": rtr.GroupConfig(lanes=("nng",), always_tcp=True)}


@pytest.fixture(scope="module", params=["ipc", "tcp"])
def group(request: pytest.FixtureRequest, spawn_for_module: Spawn) -> Iterator[tuple[rtr.Group, list[Any], str]]:
    actors = [spawn_for_module(NngPeer, max_concurrency=2) for _ in range(2)]
    with rtr.init_group(dict(zip("ab", actors, strict=True)), config=CONFIGS[request.param]) as group:
        yield group, actors, request.param


class NngPeer(Peer):
    """Does what it is told."""

    @rtr.method
    def echo(self, value: Any) -> Any:
        return value


def test_the_road_is_named(group: tuple[rtr.Group, list[Any], str]) -> None:
    formed, actors, kind = group
    text = formed.explain("a", "b")
    assert f"calls: nng (nng over {kind})" in text
    assert f"CPU tensors: nng (nng over {kind})" in text
    assert f"nng ({kind})" in str(formed.routes())
    in_actor(actors[0], large)
    rows = {(row.caller, row.lane): row for row in formed.stats()}
    assert {lane for caller, lane in rows if caller == "a"} == {"nng"}
    assert rows["a", "nng"].bytes_out > 40_000_000 and rows["a", "nng"].calls > 0


def large() -> None:
    tensor = torch.arange(10_000_000, dtype=torch.int32)
    assert torch.equal(rtr.rpc_sync("b").echo(tensor), tensor)


def test_what_needs_torchrpc_is_refused(group: tuple[rtr.Group, list[Any], str]) -> None:
    in_actor(group[1][0], refused_body)


def refused_body() -> None:
    for target in ("a", "b"):  # oneself too
        with pytest.raises(rtr.LaneUnavailable, match=r"not among lanes=\('nng',\).*allow it in GroupConfig.lanes"):
            rtr.remote(target).double(1)
    with torch.distributed.autograd.context(), pytest.raises(rtr.LaneUnavailable, match="distributed autograd"):
        rtr.rpc_sync("b").double(1)
    assert rtr.rpc_sync("b").double(1) == 2


def test_without_torchrpc_large_tensors_back_up_shared_memory_with_nng(spawn: Spawn) -> None:
    actors = dict(zip("ab", [spawn(NngPeer) for _ in range(2)], strict=True))
    config = rtr.GroupConfig(lanes=("socket", "shm", "nng"), shm_bytes=1 << 20)
    with rtr.init_group(actors, name="another", config=config) as formed:
        in_actor(actors["a"], large)
        lanes = {row.lane for row in formed.stats() if row.caller == "a"}
    assert lanes == {"nng"}
    with rtr.init_group(actors, name="another", config=rtr.GroupConfig(lanes=("socket", "shm"), shm_bytes=1 << 20)):
        in_actor(actors["a"], no_room)


def no_room() -> None:
    assert insides.lanes_to("b")[1] == "torchrpc"
    with pytest.raises(rtr.LaneUnavailable, match="not among lanes"):
        rtr.rpc_sync("b").echo(torch.ones(10_000_000))
    assert rtr.rpc_sync("b").double(1) == 2
