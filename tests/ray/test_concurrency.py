"""A decorated method runs when Ray would let it run, whichever way it is called; and a chain never waits for itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray

import raytorchrpc as rtr
from tests import insides
from tests.ray.actors import Latch
from tests.ray.call_actors import AsyncCaller, Busy, GroupedBusy
from tests.ray.conftest import Spawn

MakeLatch = Callable[[], Latch]


@dataclass
class Members:
    """Sync members: two callers that do as they are told, and three busy ones; a threaded and an async one."""

    handles: dict[str, Any]

    def inside(self, member: str, function: Callable[..., Any], *args: Any) -> Any:
        """Begin it in that member's process, as a method that is not decorated."""
        return self.handles[member].run.remote(function, *args)

    def in_(self, member: str, function: Callable[..., Any], *args: Any) -> Any:
        return ray.get(self.inside(member, function, *args), timeout=60)


@pytest.fixture(scope="module")
def members(spawn_for_module: Spawn, peers: list[Any]) -> Iterator[Members]:
    handles = {
        "caller": peers[0],
        "other": peers[1],
        "a": spawn_for_module(Busy),
        "b": spawn_for_module(Busy),
        "c": spawn_for_module(Busy),
        "threaded": spawn_for_module(Busy, 3, max_concurrency=3),
        "grouped": spawn_for_module(GroupedBusy, 2),
        "async": spawn_for_module(AsyncCaller),
        "narrow": spawn_for_module(AsyncCaller, max_concurrency=1),
    }
    config = rtr.GroupConfig(torchrpc_threads=2, rpc_timeout_s=30)
    with rtr.init_group(handles, config=config):
        yield Members(handles)


def call_many(target: str, method: str, count: int, *args: Any) -> list[Any]:
    futures = [getattr(rtr.rpc_async(target), method)(*args) for _ in range(count)]
    return [future.wait() for future in futures]


# --- sync actors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("holder", ["direct", "ray"])
@pytest.mark.parametrize("waiter", ["direct", "ray"])
def test_a_method_waits_while_another_runs(members: Members, latch: MakeLatch, holder: str, waiter: str) -> None:
    a, gate = members.handles["a"], latch()

    def call(how: str, method: str, *args: Any) -> Any:
        if how == "ray":
            return getattr(a, method).remote(*args)
        return members.inside("caller" if method == "stay" else "other", _call, "a", method, *args)

    staying = call(holder, "stay", gate)
    held = gate.await_arrival()
    working = call(waiter, "work")
    assert ray.wait([working], timeout=0.1) == ([], [working])
    assert members.in_("b", _call, "a", "beside") == 1  # but what is concurrent runs beside both
    gate.release(held)
    assert ray.get([staying, working], timeout=60) == ["left", 1]


def _call(target: str, method: str, *args: Any) -> Any:
    return getattr(rtr.rpc_sync(target), method)(*args)


# --- threaded actors and concurrency groups --------------------------------------------------------------------


def test_a_threaded_actor_runs_up_to_its_max_concurrency(members: Members) -> None:
    threaded = members.handles["threaded"]
    for _ in range(3):  # only three at a time meet
        direct = [members.inside(name, _call, "threaded", "meet") for name in ("caller", "other")]
        assert len(ray.get([threaded.meet.remote(), *direct], timeout=60)) == 3
    assert len(members.in_("caller", call_many, "threaded", "meet", 3)) == 3
    direct = [members.inside(name, call_many, "threaded", "work", 40) for name in ("caller", "other", "a")]
    ray.get([*direct, *[threaded.work.remote() for _ in range(40)]], timeout=60)
    assert 2 <= ray.get(threaded.peak_so_far.remote()) <= 3


def test_concurrency_groups_run_beside_each_other(members: Members, latch: MakeLatch) -> None:
    grouped, gate, second = members.handles["grouped"], latch(), latch()
    staying = grouped.stay_in_io.remote(gate)
    held = gate.await_arrival()
    assert members.in_("caller", _call, "grouped", "work") == 1
    assert ray.get(grouped.work.remote(), timeout=60) == 1
    gate.release(held)
    assert ray.get(staying, timeout=60) == "left io"
    staying = members.inside("caller", _call, "grouped", "stay_in_io", second)
    held = second.await_arrival()
    assert members.in_("other", _call, "grouped", "work") == 1
    assert ray.get(grouped.work.remote(), timeout=60) == 1
    second.release(held)
    assert ray.get(staying, timeout=60) == "left io"


def test_a_concurrency_group_keeps_its_own_width(members: Members) -> None:
    grouped = members.handles["grouped"]
    assert sorted(ray.get([grouped.meet_in_io.remote() for _ in range(2)], timeout=60)) == [0, 1]


def test_direct_calls_of_a_concurrency_group_run_as_many_at_a_time_as_it_declares(members: Members) -> None:
    grouped = members.handles["grouped"]
    assert members.in_("caller", call_many, "grouped", "work_in_io", 20) == [1] * 20
    direct = members.inside("caller", _call, "grouped", "meet_on_disk")
    assert len(ray.get([direct, grouped.meet_on_disk.remote()], timeout=60)) == 2
    assert len(members.in_("caller", call_many, "grouped", "meet_on_disk", 2)) == 2
    busy = [members.inside(name, call_many, "grouped", "work_on_disk", 40) for name in ("caller", "other", "a")]
    through_ray = ray.get([grouped.work_on_disk.remote() for _ in range(40)], timeout=60)
    assert max(max(counts) for counts in (through_ray, *ray.get(busy, timeout=60))) <= 2


# --- chains that come back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["direct", "ray"])
def test_a_chain_that_comes_back_thirty_times(members: Members, start: str) -> None:
    if start == "ray":
        path = ray.get(members.handles["a"].bounce.remote("b", 30), timeout=60)
    else:
        path = members.in_("caller", lambda: rtr.rpc_sync("a").bounce("b", 30))
    assert path == ["a", "b"] * 15 + ["a"]
    assert members.in_("caller", call_many, "a", "work", 2) == [1, 1]  # nothing of it is left


@pytest.mark.parametrize(
    ("first", "second", "method"),
    [
        ("a", "b", "descend"),
        ("async", "narrow", "descend"),
        ("a", "b", "descend_beside"),
        ("a", "a", "descend_beside"),
    ],
)
def test_a_chain_of_a_thousand_calls(members: Members, first: str, second: str, method: str) -> None:
    def descend() -> Any:
        return getattr(rtr.rpc_sync(first), method)(second, 1000)

    assert members.in_("caller", descend) == 1000
    assert members.in_("caller", call_many, "a", "work", 2) == [1, 1]  # nothing of it is left


@pytest.mark.parametrize(("second", "most"), [("b", 50), ("a", 600)], ids=["two members", "more than all workers wait"])
def test_a_chain_without_an_end_is_refused_with_the_limit(members: Members, second: str, most: int) -> None:
    def descend() -> tuple[str, str, float]:
        start = time.monotonic()
        error = rtr.rpc_async("a").descend(second, 10**6).exception()
        return type(error).__name__, str(error), time.monotonic() - start

    limit = members.in_("a", insides.limit_nesting, most)
    try:
        kind, text, elapsed = members.in_("caller", descend)
    finally:
        members.in_("a", insides.limit_nesting, limit)
    assert kind == "RayTorchRpcError"
    assert "a.descend was not called" in text and "recursion" in text
    assert f"come back to that actor {most} times" in text
    assert elapsed < 28


def test_parallel_branches_of_one_chain_take_turns_in_the_actor_they_come_back_to(members: Members) -> None:
    log = members.in_("caller", lambda: rtr.rpc_sync("a").fan_out(["b", "c"]))
    assert len(log) == 40
    assert all(begin == "+" + end[1:] and end[0] == "-" for begin, end in zip(log[::2], log[1::2], strict=True))


def test_a_concurrent_method_may_call_what_needs_a_turn_on_behalf_of_a_chain(members: Members) -> None:
    def check() -> None:
        assert rtr.rpc_sync("a").beside_then_work() == 1
        assert rtr.rpc_sync("a").bounce_through("b", "beside_then_work") == 1
        assert rtr.rpc_sync("a").bounce_through("b", "work") == 1
        assert rtr.rpc_sync("a").bounce_through("b", "beside") == 0

    members.in_("caller", check)


# --- async actors ----------------------------------------------------------------------------------------------


def test_coroutines_run_on_the_actors_own_loop_many_at_once(members: Members) -> None:
    target = members.handles["async"]
    expected = ray.get(target.where.remote())

    def check() -> Any:
        assert rtr.rpc_sync("async").where() == expected
        assert rtr.rpc_sync("async").plain() == (expected[0], True)
        return sorted(call_many("async", "meet", 50, 100))

    direct = members.inside("caller", check)
    through_ray = [target.meet.remote(100) for _ in range(50)]
    ray.get([direct, *through_ray], timeout=60)


def test_coroutines_come_back_to_the_loop_that_awaits(members: Members) -> None:
    for target in ("async", "narrow"):  # max_concurrency 1000, and 1
        for how in ("arun", "run", "crun"):
            handle = members.handles[target]
            assert ray.get(getattr(handle, how).remote(_there_and_back, target, 6), timeout=60) == 7
        assert members.in_("caller", lambda target: rtr.rpc_sync(target).arun(_there_and_back, target, 6), target) == 7


async def _there_and_back(me: str, depth: int) -> int:
    """From an async member to a sync one and back to its loop."""

    def back() -> int:
        return int(rtr.rpc_sync(me).arun(_there_and_back, me, depth - 1))

    return 1 + int(await rtr.rpc_async("other").give(back)) if depth else 1


@pytest.mark.parametrize("how", ["run", "arun", "crun"])
def test_what_would_block_a_loop_is_refused_with_the_remedy(members: Members, latch: MakeLatch, how: str) -> None:
    """In an async actor, called through Ray or directly."""
    remedies = ["await raytorchrpc.rpc_async(target).double(...)", "await future", "await future"]
    assert ray.get(getattr(members.handles["async"], how).remote(_block, latch()), timeout=60) == remedies
    if how != "run":
        gate = latch()
        assert members.in_("caller", lambda: getattr(rtr.rpc_sync("async"), how)(_block, gate)) == remedies
    assert members.in_("caller", lambda: rtr.rpc_sync("async").double(2)) == 4  # the loop goes on


async def _block(gate: Latch) -> list[str]:
    future = rtr.rpc_async("a").hold(gate)
    remedies = []
    for block in (lambda: rtr.rpc_sync("other").double(1), future.wait, lambda: future.result(5)):
        with pytest.raises(rtr.RayTorchRpcError, match="would block this thread's event loop") as refused:
            block()
        remedies.append(str(refused.value).split("`")[1])
    gate.release(await asyncio.to_thread(gate.await_arrival))
    assert await future == future.result() == "released", "one that is done blocks nothing"
    return remedies


def test_an_async_actor_of_one_at_a_time(members: Members, latch: MakeLatch) -> None:
    gate = latch()
    staying = members.inside("caller", _call, "narrow", "hold", gate)
    held = gate.await_arrival()
    waiting = members.inside("other", _call, "narrow", "double", 2)
    assert ray.wait([waiting], timeout=0.1) == ([], [waiting])
    gate.release(held)
    assert ray.get([staying, waiting], timeout=60) == ["released", 4]
