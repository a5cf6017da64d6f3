"""A member lane begins to listen, or fails to and leaves nothing behind."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.group import join
from raytorchrpc.lanes import registry
from raytorchrpc.lanes.nng.lane import NngLane
from tests.conformance.peers import SECRET, Credentials, Node
from tests.shortage import Failing, shortage
from tests.unit.members import Members

__all__ = ["shortage"]


@pytest.mark.parametrize("kind", ["socket over unix", "nng over ipc"])
def test_a_listener_that_could_not_be_opened_is_opened_later(kind: str) -> None:
    """With its address, which the members of other hosts connect to."""
    with Node(kind, "b", 1) as callee, Node(kind.split()[0] + " over tcp", "a", 0) as caller:
        lane: Any = callee.lane
        before, epoll = lane._acceptor.address, lane._acceptor._epoll
        lane._acceptor._epoll = SimpleNamespace(register=Failing([OSError(28, "no room in the epoll set")], print))
        with pytest.raises(LaneUnavailable, match="no room"):
            lane.reach("127.0.0.1", frozenset())
        lane._acceptor._epoll = epoll
        assert lane._acceptor.address == before and len(lane._acceptor._listeners) == 1
        address = lane.reach("127.0.0.1", frozenset())
        assert caller.meet("b", address).call("echo").header == ("echo",)


def noted(acceptor: Any, made: list[Any], function: Any, *args: Any) -> Any:
    made.append(function(acceptor, *args))
    return made[-1]


def test_lanes_that_opened_before_another_failed_keep_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt opens only those that are missing, and a lane that did not open is not taken for open."""
    monkeypatch.setattr(registry, "LANES", [registry.lane("socket"), registry.lane("nng")])
    opening = Failing([LaneUnavailable("nng", "a fault")], NngLane.open)
    monkeypatch.setattr(NngLane, "open", lambda *args: opening(*args))
    spec: Any = SimpleNamespace(name="a", credentials=Credentials(SECRET, 1))
    agent = SimpleNamespace(interface="lo", devices=())
    settings: Any = SimpleNamespace(
        tcp_host=None, by_tcp=frozenset(), agent=agent, device_maps={}, lanes=("socket", "nng")
    )
    with Members(GroupConfig()) as members:
        local = members.members["a"]
        first, second = dict[str, Any](), dict[str, Any]()
        with pytest.raises(LaneUnavailable, match="a fault"):
            join.open_lanes(spec, settings, local, first)
        join.open_lanes(spec, settings, local, second)
        assert [lane.name for lane in local.lanes] == ["socket", "nng"]
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect("\0" + first["socket"].unix)
        assert list(first) == ["socket"] and list(second) == ["nng"]
