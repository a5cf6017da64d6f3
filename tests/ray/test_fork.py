"""Forked children of members and of drivers: they are refused, disturb nobody, and hide no death."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

import raytorchrpc as rtr
from tests.ray.actors import Latch, Peer
from tests.ray.conftest import Spawn
from tests.ray.forked import Forker, in_child, refusal

LANES = pytest.mark.parametrize(
    ("lanes", "always_tcp"),
    [
        (None, False),
        pytest.param(None, True, marks=pytest.mark.slow),
        pytest.param(("nng",), False, marks=pytest.mark.slow),
        pytest.param(("nng",), True, marks=pytest.mark.slow),
        pytest.param(("torchrpc",), False, marks=pytest.mark.slow),
    ],
    ids=["socket", "socket by tcp", "nng", "nng by tcp", "torchrpc"],
)


@pytest.fixture
def pair(spawn: Spawn) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """Forms a group of a Forker "a" and a Peer "b"."""
    formed: list[rtr.Group] = []

    def form(**config: Any) -> tuple[Any, Any]:
        a, b = spawn(Forker), spawn(Peer)
        formed.append(rtr.init_group({"a": a, "b": b}, config=rtr.GroupConfig(**config)))
        assert ray.get(a.call.remote("b", "double", 4)) == 8
        assert ray.get(b.call.remote("a", "double", 4)) == 8
        return a, b

    yield form
    for group in formed:
        group.shutdown()


@LANES
def test_a_forked_child_is_refused_and_the_parent_goes_on(
    pair: Callable[..., tuple[Any, Any]], lanes: tuple[str, ...] | None, always_tcp: bool
) -> None:
    a, b = pair(lanes=lanes, always_tcp=always_tcp)
    for text in ray.get(a.attempts.remote(), timeout=60):
        assert "forked from member 'a' of group 'default'" in text, text
        assert "make the call in the parent" in text
    ray.get(a.forget.remote(5), timeout=60)
    assert ray.get(a.call.remote("b", "double", 21), timeout=60) == 42
    assert ray.get(b.call.remote("a", "double", 21), timeout=60) == 42


def test_what_a_child_writes_its_parent_does_not_see(pair: Callable[..., tuple[Any, Any]]) -> None:
    a, _ = pair(lanes=("socket", "shm"))
    assert ray.get(a.written_by_child.remote(), timeout=60) == (7e6, 2e6)


def test_the_workers_of_a_data_loader(pair: Callable[..., tuple[Any, Any]]) -> None:
    a, _ = pair()
    assert ray.get(a.load.remote(), timeout=60) == [[0, True], [1, True], [4, True], [9, True]]
    assert ray.get(a.call.remote("b", "double", 21), timeout=60) == 42


@LANES
def test_a_death_is_seen_though_a_child_lives(
    pair: Callable[..., tuple[Any, Any]],
    latch: Callable[[], Latch],
    lanes: tuple[str, ...] | None,
    always_tcp: bool,
) -> None:
    _, b = pair(lanes=lanes, always_tcp=always_tcp)
    lost: list[Any] = []
    rtr.get_group().on_change(lost.append)
    child = latch()
    started = time.monotonic()
    call = b.call.remote("a", "die", child, timeout=60)
    held = child.await_arrival()
    with pytest.raises(rtr.PeerLost, match="'a'"):
        ray.get(call, timeout=90)
    assert time.monotonic() - started < 50
    assert in_child(lambda: None) is None
    child.release(held)


def test_a_command_inherits_nothing(pair: Callable[..., tuple[Any, Any]], spawn: Spawn) -> None:
    before = ray.get(spawn(Forker).inherited_by_command.remote(), timeout=60)
    a, _ = pair(lanes=("socket", "shm", "nng", "torchrpc"))
    assert sorted(ray.get(a.inherited_by_command.remote(), timeout=60)) == sorted(before)


def test_a_forked_child_of_the_driver_leaves_the_group_alone(spawn: Spawn) -> None:
    a, b = spawn(Peer), spawn(Peer)
    with rtr.init_group({"a": a, "b": b}, include_driver=True) as group:

        def child() -> list[str]:
            group.shutdown()
            return [refusal(rtr.get_group), refusal(group.stats), refusal(lambda: rtr.rpc_sync("a").double(1))]

        for text in in_child(child):
            assert "this process was forked from" in text
        assert rtr.rpc_sync("a").double(1) == 2
        assert not group.stats().missing
        with pytest.raises(ZeroDivisionError):
            in_child(lambda: leave_by_error(group))
        assert ray.get(a.call.remote("b", "double", 21), timeout=60) == 42


def leave_by_error(group: rtr.Group) -> None:
    with group:
        raise ZeroDivisionError
