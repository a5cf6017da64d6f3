"""torchrpc starts where it is needed, and nowhere else; see GroupConfig.torchrpc."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

import raytorchrpc as rtr
from tests import insides
from tests.insides import in_actor
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn


@pytest.fixture
def actors(spawn: Spawn) -> dict[str, Any]:
    return {name: spawn(Peer) for name in "abc"}


@pytest.fixture
def group(actors: dict[str, Any]) -> Iterator[rtr.Group]:
    with rtr.init_group(actors) as group:
        yield group


def running(actors: dict[str, Any]) -> list[str]:
    return [name for name, actor in actors.items() if in_actor(actor, insides.agent_runs)]


def torchrpc_threads() -> int:
    """Threads that TensorPipe and torch's agent have started here."""
    found = 0
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has just ended
            name = Path(f"/proc/self/task/{task}/comm").read_text()
            found += "TP_" in name or "ensor" in name.lower()
    return found


def call(peer: str) -> None:
    assert rtr.rpc_sync(peer).double(torch.ones(3)).sum() == 6


def by_rref(peer: str) -> None:
    assert rtr.remote(peer).double(torch.ones(3)).to_here().sum() == 6


def by_torchs_api(peer: str) -> None:
    assert rpc.rpc_sync(name_of(peer), operator.add, args=(1, 2)) == 3


def by_autograd(peer: str) -> None:
    with dist_autograd.context() as context:
        weight = torch.ones(2, requires_grad=True)
        dist_autograd.backward(context, [rtr.rpc_sync(peer).double(weight).sum()])
        assert dist_autograd.get_gradients(context)[weight].tolist() == [2.0, 2.0]


def name_of(peer: str) -> str:
    return next(member.rpc_name for member in rtr.get_group().members if member.name == peer)


@pytest.mark.parametrize("use", [by_rref, by_torchs_api, by_autograd])
def test_it_starts_at_both_ends_of_its_first_use(
    group: rtr.Group, actors: dict[str, Any], use: Callable[[str], None]
) -> None:
    in_actor(actors["a"], call, "b")
    assert running(actors) == []
    assert in_actor(actors["a"], torchrpc_threads) == 0
    in_actor(actors["a"], use, "b")
    assert running(actors) == ["a", "b"]
    assert in_actor(actors["a"], torchrpc_threads) > 0
    in_actor(actors["a"], call, "c")
    assert running(actors) == ["a", "b"], "other calls need none"


def test_all_start_at_once_where_that_is_asked_for(actors: dict[str, Any]) -> None:
    with rtr.init_group(actors, config=rtr.GroupConfig(torchrpc="at once")):
        assert running(actors) == ["a", "b", "c"]


def test_a_route_that_needs_it_starts_it(actors: dict[str, Any]) -> None:
    with rtr.init_group(actors, config=rtr.GroupConfig(lanes=("torchrpc",))):
        assert running(actors) == []
        in_actor(actors["a"], call, "b")
        assert running(actors) == ["a", "b"]
