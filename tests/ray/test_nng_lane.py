"""Groups whose members reach each other by nng, over ipc and over TCP, as users see them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
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


def test_tensors_travel_beside_its_messages_as_long_as_there_is_room(spawn: Spawn) -> None:
    actors = dict(zip("ab", [spawn(NngPeer) for _ in range(2)], strict=True))
    for capacity, lane in ((100 << 20, "shm"), (1 << 20, "nng")):
        config = rtr.GroupConfig(lanes=("nng", "shm"), shm_bytes=capacity)
        with rtr.init_group(actors, name="another", config=config) as formed:
            in_actor(actors["a"], large)
            assert {row.lane for row in formed.stats() if row.caller == "a" and row.bytes_out} == {lane}
