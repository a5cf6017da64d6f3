"""A member that stands still: the first call to it, and replies to it, keep nothing else waiting."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests import insides
from tests.insides import in_actor
from tests.polling import suspend, wait_until
from tests.ray.actors import AsyncPeer, AsyncRunner, Peer
from tests.ray.conftest import Spawn

#: Elements of a tensor that goes by shm.
LARGE = 1 << 19
SHORT_S, LONG_S = 1.0, 60.0
#: More than a socket's buffer holds.
MUCH = b" " * (1 << 20)


class Still:
    """A member that is suspended, and goes on when it is told to."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.stop()

    def stop(self) -> None:
        suspend(self._pid)

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)


class Generous(AsyncRunner):
    def __init__(self) -> None:
        self._opened = asyncio.Event()

    async def open(self) -> None:
        self._opened.set()

    @rtr.method
    async def give_much(self) -> bytes:
        await self._opened.wait()
        return MUCH


@pytest.fixture
def actors(spawn: Spawn) -> dict[str, Any]:
    """Each has a connection to the next one at most: "still" has none from "sync" and "loop"."""
    kinds = {"still": Peer, "sync": Peer, "loop": Generous, "other": AsyncPeer}
    return {name: spawn(kind) for name, kind in kinds.items()}


@pytest.fixture
def still(actors: dict[str, Any]) -> Iterator[Still]:
    pid = in_actor(actors["still"], os.getpid)
    with rtr.init_group(actors, include_driver=True):
        one = Still(pid)
        try:
            yield one
        finally:
            one.go_on()


def connects() -> bool:
    return insides.is_connecting("still")


def test_a_sync_actor_that_calls_it_serves_others_meanwhile(actors: dict[str, Any], still: Still) -> None:
    first = actors["sync"].call.remote("still", "double", 21, timeout=LONG_S)
    assert wait_until(lambda: rtr.rpc_sync("sync", timeout=LONG_S).give(connects), LONG_S)
    assert ray.wait([first], timeout=0) == ([], [first])
    still.go_on()
    assert ray.get(first, timeout=LONG_S) == 42


def call_often() -> list[rtr.Future[int]]:
    insides.saved.futures = [rtr.rpc_async("still", timeout=LONG_S).keep(number) for number in range(10)]
    return [future.done() for future in insides.saved.futures]


def take_results() -> list[Any]:
    return [future.result() for future in insides.saved.futures]


def test_rpc_async_returns_at_once_and_the_calls_arrive_in_order(actors: dict[str, Any], still: Still) -> None:
    assert in_actor(actors["sync"], call_often) == [False] * 10
    assert in_actor(actors["sync"], connects)
    still.go_on()
    assert in_actor(actors["sync"], take_results) == list(range(1, 11))
    assert rtr.rpc_sync("still").give(lambda: rtr.current_member().name) == "still"


def test_an_event_loop_that_calls_it_goes_on(actors: dict[str, Any], still: Still) -> None:
    first = actors["loop"].call.remote("still", "double", 21, timeout=LONG_S)
    assert wait_until(lambda: in_actor(actors["loop"], connects), LONG_S)
    assert rtr.rpc_sync("loop").double(1) == 2
    assert ray.wait([first], timeout=0) == ([], [first])
    still.go_on()
    assert ray.get(first, timeout=LONG_S) == 42


def call_often_with_much() -> None:
    insides.saved.futures = [rtr.rpc_async("still", timeout=LONG_S).keep(MUCH) for _ in range(10)]


async def await_results() -> list[int]:
    return [await future for future in insides.saved.futures]


def test_an_event_loop_goes_on_while_a_peer_does_not_read(actors: dict[str, Any], still: Still) -> None:
    still.go_on()
    assert ray.get(actors["loop"].call.remote("still", "double", 21), timeout=LONG_S) == 42
    still.stop()
    ray.get(actors["loop"].run.remote(call_often_with_much), timeout=LONG_S / 4)
    assert rtr.rpc_sync("loop", timeout=LONG_S / 4).double(1) == 2
    still.go_on()
    assert ray.get(actors["loop"].arun.remote(await_results), timeout=LONG_S) == list(range(1, 11))


def ask_for_much() -> None:
    rtr.rpc_sync("loop", timeout=LONG_S).double(1)  # connects
    insides.saved.futures = [rtr.rpc_async("loop", timeout=LONG_S).give_much() for _ in range(10)]


def test_an_event_loop_goes_on_while_a_caller_does_not_read_its_replies(actors: dict[str, Any], still: Still) -> None:
    still.go_on()
    in_actor(actors["still"], ask_for_much)
    still.stop()
    ray.get(actors["loop"].open.remote(), timeout=LONG_S)
    assert rtr.rpc_sync("loop", timeout=LONG_S / 12).double(1) == 2
    still.go_on()
    assert in_actor(actors["still"], take_results) == [MUCH] * 10


def in_time(ask: Callable[[rtr.Future[int]], Any]) -> str:
    try:
        ask(rtr.rpc_async("still", timeout=SHORT_S).keep(torch.ones(LARGE)))
    except rtr.RpcTimeout as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ask", [rtr.Future.wait, rtr.Future.result, lambda future: rtr.gather(future)])
def test_a_call_that_finds_no_connection_by_its_deadline_never_runs(
    actors: dict[str, Any], still: Still, ask: Callable[[rtr.Future[int]], Any]
) -> None:
    assert "no connection to 'still' by the deadline" in in_actor(actors["sync"], in_time, ask)
    assert wait_until(lambda: not in_actor(actors["sync"], insides.shared_bytes), LONG_S)  # nobody fetches the tensor
    still.go_on()
    assert rtr.rpc_sync("still").keep("the first") == 1
