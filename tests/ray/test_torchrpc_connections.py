"""TensorPipe's connections: one that breaks while both processes live, one that cannot be made just now, and those to
members that ended.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests import insides
from tests.insides import in_actor
from tests.polling import wait_until
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn

LIMIT_S = 60


@pytest.fixture(scope="module")
def actors(spawn_for_module: Spawn) -> dict[str, Any]:
    return {name: spawn_for_module(Peer) for name in "ab"}


@pytest.fixture
def members(actors: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with rtr.init_group(actors, config=rtr.GroupConfig(lanes=("torchrpc",))):
        yield actors


def double(name: str) -> float:
    return float(rtr.rpc_sync(name).double(torch.ones(3)).sum())


def until_it_works(name: str) -> list[str]:
    """The errors before a call succeeds, each once."""
    errors: set[str] = set()
    until = time.monotonic() + 40
    while True:
        try:
            assert double(name) == 6
            return sorted(errors)
        except rtr.PeerLost as error:
            errors.add(str(error))
            assert time.monotonic() < until, errors


def test_a_broken_connection_costs_the_calls_on_it_and_no_later_ones(members: dict[str, Any]) -> None:
    a, b = members["a"], members["b"]
    there = in_actor(b, insides.agent_url)
    for _ in range(2):  # the second one breaks too
        assert in_actor(a, double, "b") == 6
        assert in_actor(a, insides.hang_up_on, there) >= 1
        errors = in_actor(a, until_it_works, "b")
        assert errors and all("lost member 'b'" in error for error in errors)
    assert in_actor(b, double, "a") == 6


def test_rrefs_say_why_they_cannot_be_had_any_more(members: dict[str, Any]) -> None:
    a, there = members["a"], in_actor(members["b"], insides.agent_url)
    assert in_actor(a, double, "b") == 6

    def refused() -> str:
        insides.hang_up_on(there)
        until_it_works("b")
        with pytest.raises(rtr.LaneUnavailable, match="were renewed") as raised:
            rtr.remote("b").double(1)
        return str(raised.value)

    assert "'b'" in in_actor(a, refused)


@pytest.mark.parametrize("channel", ["cma", "mpt_uv"])
def test_a_member_that_ended_leaves_no_descriptors(spawn: Spawn, channel: str) -> None:
    """``mpt_uv``: as between hosts."""

    def descriptors(most: int) -> int:
        """TensorPipe closes a moment later."""
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= most, 20)
        return len(os.listdir("/proc/self/fd"))

    def talk(pid: int) -> int:
        """With the next process after that one; returns its pid."""
        until = time.monotonic() + LIMIT_S
        while True:
            with suppress(rtr.PeerLost, rtr.RpcTimeout):
                now = rtr.rpc_sync("b").who()[1]
                if now != pid:
                    assert double("b") == 6 and rtr.rpc_sync("b").give(lambda: double("a")) == 6
                    return int(now)
            assert time.monotonic() < until
            time.sleep(0.02)

    a, b = spawn(Peer, max_concurrency=2), spawn(Peer, max_restarts=-1)
    config = rtr.GroupConfig(lanes=("torchrpc",), channels=(channel, "basic"))
    with rtr.init_group({"a": a, "b": b}, config=config) as group:
        held, pid = [], 0
        for _ in range(3):
            pid = in_actor(a, talk, pid)
            held.append(in_actor(a, descriptors, held[0] + 3 if held else 1 << 20))
            ray.kill(b, no_restart=False)
        group.wait_ready(LIMIT_S)
    assert max(held) <= held[0] + 3, held


def test_rrefs_are_refused_where_the_agent_had_to_start_anew(spawn: Spawn) -> None:
    """Calls go on; restarting the actor is the remedy."""
    actors = {name: spawn(Peer) for name in "ab"}

    def refused() -> str:
        assert double("b") == 6
        with pytest.raises(rtr.LaneUnavailable, match="restarted its agent for another group") as raised:
            rtr.remote("b").double(1)
        return str(raised.value)

    with rtr.init_group(actors, config=rtr.GroupConfig(transports=("uv",))):
        assert in_actor(actors["a"], lambda: rtr.remote("b").double(1).to_here()) == 2
    with rtr.init_group(actors, config=rtr.GroupConfig(transports=("shm", "uv"))):
        assert "restart the actor" in in_actor(actors["a"], refused)


def test_without_descriptors_no_connection_is_begun(members: dict[str, Any]) -> None:
    """TensorPipe would end the process."""

    there = in_actor(members["b"], insides.agent_url)

    def crowded() -> str:
        assert double("b") == 6
        insides.hang_up_on(there)
        with pytest.raises(rtr.PeerLost):
            double("b")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        taken: list[int] = []
        with suppress(OSError):
            while True:
                taken.append(os.dup(taken[-1] if taken else os.open(os.devnull, os.O_RDONLY)))
        for fd in taken[-3:]:
            os.close(fd)
        try:
            with pytest.raises(rtr.LaneUnavailable, match="descriptors") as raised:
                double("b")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in taken[:-3]:
                os.close(fd)
        until_it_works("b")
        return str(raised.value)

    assert "ulimit" in in_actor(members["a"], crowded)
