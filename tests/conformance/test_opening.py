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
from tests.conformance.peers import SECRET, Credentials
from tests.shortage import Failing
from tests.unit.members import Members


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
        membership: Any = SimpleNamespace(spec=spec, local=local, no_agent="")
        first, second = dict[str, Any](), dict[str, Any]()
        with pytest.raises(LaneUnavailable, match="a fault"):
            join._open_lanes(membership, settings, first)
        join._open_lanes(membership, settings, second)
        assert [lane.name for lane in local.lanes] == ["socket", "nng"]
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect("\0" + first["socket"].unix)
        assert list(first) == ["socket"] and list(second) == ["nng"]
