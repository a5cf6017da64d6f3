"""A sender that is faster than its receiver is held up, or told; memory stays bounded at both ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

import raytorchrpc as rtr
from tests.ray.actors import Latch
from tests.ray.conftest import Spawn
from tests.ray.loaded import Loaded

MIB = 1 << 20
SLOW = pytest.mark.slow
LANES = pytest.mark.parametrize(
    "lanes",
    [None, pytest.param(("nng",), marks=SLOW), pytest.param(("torchrpc",), marks=SLOW)],
    ids=["socket", "nng", "torchrpc"],
)
Form = Callable[..., tuple[Any, Any]]


@pytest.fixture
def pair(spawn: Spawn) -> Iterator[Form]:
    """Forms a group of two, "a" and "b"."""
    formed: list[rtr.Group] = []

    def form(sender: Any = Loaded, max_restarts: int = 0, **config: Any) -> tuple[Any, Any]:
        a, b = spawn(sender), spawn(Loaded, max_restarts=max_restarts)
        formed.append(rtr.init_group({"a": a, "b": b}, config=rtr.GroupConfig(**config)))
        return a, b

    yield form
    for group in formed:
        group.shutdown()


@LANES
def test_no_more_calls_are_under_way_than_allowed(pair: Form, lanes: tuple[str, ...] | None) -> None:
    a, b = pair(lanes=lanes, max_calls_in_flight=4)
    assert ray.get(a.flood.remote("b", "meet", 20, 4), timeout=60) == [None] * 20
    assert ray.get(b.seen.remote()) == (4, 20)
    assert ray.get(a.under_way.remote()) == (0, 0)


@LANES
def test_every_end_of_a_call_makes_room_for_the_next(
    pair: Form, latch: Callable[[], Latch], lanes: tuple[str, ...] | None
) -> None:
    a, _ = pair(lanes=lanes, max_calls_in_flight=1, max_restarts=-1)
    ends = ray.get(a.outcomes.remote(latch()), timeout=60)
    assert ends == [
        *("returned", "ValueError", "NoSuchMethod", "SerializationError", "returned"),
        *("RpcTimeout", "returned", "returned", "returned"),
    ]
    assert ray.get(a.under_way.remote()) == (0, 0)
    assert "lost member 'b'" in ray.get(a.lose.remote(), timeout=60)
    rtr.get_group().wait_ready(30)
    assert ray.get(a.call.remote("b", "double", 4, retry=3), timeout=60) == 8
    assert ray.get(a.under_way.remote()) == (0, 0)


@LANES
def test_a_receiver_that_stands_still_bounds_the_memory_at_both_ends(
    pair: Form, latch: Callable[[], Latch], lanes: tuple[str, ...] | None
) -> None:
    a, b = pair(lanes=lanes, max_bytes_in_flight=32 * MIB)
    standing = latch()
    before = ray.get(b.peak_rss.remote())
    sent, last_s, why, grown = ray.get(a.fill.remote(standing, 7 * MIB, 1.5), timeout=60)
    assert sent == 4
    assert why.startswith("RpcTimeout: b.take was not sent by its deadline: 4 calls with 28.0 MiB of arguments")
    assert 1 < last_s < 25
    assert grown < 200 * MIB
    standing.open()
    assert ray.get(a.call.remote("b", "double", 1), timeout=60) == 2
    assert ray.get(b.peak_rss.remote()) - before < 200 * MIB
    assert ray.get(a.under_way.remote()) == (0, 0)


def test_rejecting_tells_at_once_and_sends_nothing(pair: Form, latch: Callable[[], Latch]) -> None:
    a, _ = pair(max_bytes_in_flight=16 * MIB, when_full="reject")
    standing = latch()
    sent, last_s, why, _ = ray.get(a.fill.remote(standing, 5 * MIB, 30), timeout=60)
    assert sent == 3
    assert last_s < 15
    assert "PeerBusy: b.take was not sent: 3 calls with 15.0 MiB of arguments are in flight to 'b'" in why
    standing.open()
    assert ray.get(a.call.remote("b", "double", 1), timeout=60) == 2
    assert ray.get(a.under_way.remote()) == (0, 0)


@pytest.mark.parametrize("method", ["bounce", "concurrent_bounce"])
def test_a_chain_that_comes_back_does_not_wait_for_itself(pair: Form, method: str) -> None:
    a, _ = pair(max_calls_in_flight=1)
    for target in ("a", "b"):
        assert ray.get(a.call.remote(target, method, ["a", "b"], 8, timeout=20), timeout=60) == 0
