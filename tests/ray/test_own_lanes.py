"""Groups whose lanes come from another distribution, ``examples/own_lanes``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests.distributions import MEMFD, UNIX_STREAM, install_own_lanes
from tests.ray.conftest import Spawn

LARGE = 1 << 20


class Doubler:
    def __init__(self, folder: str | None = None) -> None:
        """``folder``: where distributions are installed that this process can import."""
        if folder is not None:
            sys.path.append(folder)

    @rtr.method
    def double(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    def ask(self, other: str, size: int) -> bool:
        tensor = torch.arange(size)
        return torch.equal(rtr.rpc_sync(other).double(tensor), tensor * 2)

    def ask_until_lost(self, other: str) -> str:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                rtr.rpc_sync(other).double(torch.ones(3))
            except rtr.PeerLost as lost:
                return str(lost)
        return "it still answers"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the lanes are installed; on the path of this process."""
    monkeypatch.syspath_prepend(str(install_own_lanes(tmp_path)))
    return str(tmp_path)


def lanes_between(group: rtr.Group, caller: str, peer: str) -> set[str]:
    return {row.lane for row in group.stats() if (row.caller, row.peer) == (caller, peer) and row.calls}


def test_calls_and_tensors_travel_by_lanes_of_another_distribution(spawn: Spawn, site: str) -> None:
    actors = {name: spawn(Doubler, site) for name in "ab"}
    with rtr.init_group(actors, config=rtr.GroupConfig(lanes=(UNIX_STREAM, MEMFD, "torchrpc"))) as group:
        said = group.explain("a", "b")
        assert f"calls: {UNIX_STREAM} (Unix sockets): same host" in said
        assert f"CPU tensors: {MEMFD} (memfds): same host" in said
        for caller, peer in ("ab", "ba"):
            assert all(ray.get([actors[caller].ask.remote(peer, size) for size in (3, LARGE, LARGE, 0)]))
            assert lanes_between(group, caller, peer) == {UNIX_STREAM, MEMFD}
        ray.kill(actors["b"])
        assert "'b'" in ray.get(actors["a"].ask_until_lost.remote("b"))
