"""Cancelled calls: what becomes of the method, of the future, and of what the caller kept for the call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc import Future
from tests.polling import wait_until
from tests.unit.callees import Awaited, Exposed, Gate, Rejoin, exposed
from tests.unit.members import Members, in_thread

LONG = 20.0


class Actor:
    """The methods of all members, and what became of them. ``home`` has a gate that admits one at a time."""

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.log: list[str] = []

    def hold(self, _: None, value: Any = None) -> Any:
        self.began.set()
        self.go.wait(LONG)
        self.log.append("held")
        return value

    def note(self, _: None, what: Any) -> Any:
        self.log.append("noted")
        return what

    async def stay(self, _: None) -> str:
        self.began.set()
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError as error:
            self.log.append(str(error))
            raise
        finally:
            self.log.append("left")
        return "stayed"

    async def pass_on(self, _: None, target: str) -> Any:
        return await rtr.rpc_async(target).stay()

    def methods(self) -> dict[str, Exposed]:
        coroutines = {name: getattr(self, name) for name in ("stay", "pass_on")}
        return {
            "hold": exposed(self.hold, concurrent=False),
            "hold_beside": exposed(self.hold),
            "note": exposed(self.note, concurrent=False),
            **{name: exposed(function, concurrent=False, is_coroutine=True) for name, function in coroutines.items()},
        }


@pytest.fixture
def actor(gate: Gate, loop: asyncio.AbstractEventLoop) -> Actor:
    return Actor()


@pytest.fixture
def members(actor: Actor) -> Iterator[Members]:
    with Members(rtr.GroupConfig(rpc_timeout_s=LONG), actor.methods()) as made, made.acting("a"):
        yield made
        actor.go.set()


def in_flight(members: Members) -> tuple[int, int]:
    return members.members["a"].outgoing.in_flight()["home"]


def is_cancelled(future: Future[Any]) -> None:
    assert future.cancelled() and future.done() and "cancelled" in repr(future)
    for ask in (future.result, future.wait, future.exception):
        with pytest.raises(rtr.CancelledError, match="home"):
            ask()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(0)


# --- the method ----------------------------------------------------------------------------------------------


def test_a_running_sync_method_is_left_alone(members: Members, actor: Actor) -> None:
    running = rtr.rpc_async("home").hold("result")
    assert actor.began.wait(LONG) and running.cancel()
    is_cancelled(running)
    assert wait_until(lambda: in_flight(members) == (0, 0), LONG), "though the method still runs"
    following = rtr.rpc_async("home").note(1)
    assert not following.done() and actor.log == []
    actor.go.set()
    assert following.result() == 1 and actor.log == ["held", "noted"]
    is_cancelled(running)


def test_a_coroutine_is_cancelled(members: Members, actor: Actor) -> None:
    running = rtr.rpc_async("home").stay()
    assert actor.began.wait(LONG)
    following = rtr.rpc_async("home").note(1)
    assert running.cancel()
    is_cancelled(running)
    assert following.result() == 1, "it has given its admission back"
    assert actor.log == ["the caller of home.stay cancelled it", "left", "noted"]
    assert wait_until(lambda: in_flight(members) == (0, 0), LONG)


def test_a_coroutine_that_waits_for_its_turn_never_begins(members: Members, actor: Actor) -> None:
    running = rtr.rpc_async("home").hold()
    assert actor.began.wait(LONG)
    actor.began.clear()
    queued = rtr.rpc_async("home").stay()
    assert queued.cancel()
    actor.go.set()
    running.wait()
    assert rtr.rpc_sync("home").note(1) == 1 and not actor.began.is_set() and actor.log == ["held", "noted"]


def test_a_coroutine_whose_first_step_has_not_come_never_begins(
    members: Members, actor: Actor, loop: asyncio.AbstractEventLoop
) -> None:
    blocked = threading.Event()
    loop.call_soon_threadsafe(blocked.wait, LONG)
    admitted = rtr.rpc_async("home").stay()
    assert admitted.cancel() and wait_until(lambda: in_flight(members) == (0, 0), LONG)
    blocked.set()
    assert rtr.rpc_sync("home").note(1) == 1, "it has given its admission back"
    assert not actor.began.is_set() and actor.log == ["noted"]


def test_a_cancellation_that_overtakes_its_call_stops_it(members: Members, actor: Actor) -> None:
    lane = members.lanes["a"]
    lane.holds = lambda method: method == "note"
    held = rtr.rpc_async("home").note(1)
    assert held.cancel()
    lane.release()
    assert wait_until(lambda: in_flight(members) == (0, 0), LONG)
    assert rtr.rpc_sync("home").note(2) == 2 and actor.log == ["noted"]


def test_arguments_of_a_queued_call_are_freed_at_once(members: Members, actor: Actor) -> None:
    running = rtr.rpc_async("home").hold()
    assert actor.began.wait(LONG)
    tensor = torch.ones(8)
    freed = weakref.ref(tensor)
    queued = rtr.rpc_async("home").note([tensor, {"nested": tensor}])
    del tensor
    gc.collect()
    assert freed() is not None, "the callee has it, in this test"
    queued.cancel()
    assert wait_until(lambda: gc.collect() >= 0 and freed() is None, LONG) and not running.done()


# --- races ---------------------------------------------------------------------------------------------------


def test_a_call_that_is_done_keeps_its_result(members: Members) -> None:
    done = rtr.rpc_async("home").note(1)
    assert wait_until(done.done, LONG) and not done.cancel() and not done.cancelled()
    assert done.result() == 1 and not done.cancel()


def test_the_call_or_its_cancellation_wins_and_that_stays(members: Members, actor: Actor) -> None:
    actor.go.set()
    won = {True: 0, False: 0}
    for number in range(300):
        future = rtr.rpc_async("home").note(number)
        if number % 2:
            time.sleep(0.0001)
        cancelled = future.cancel()
        won[cancelled] += 1
        assert future.cancelled() is cancelled
        if cancelled:
            is_cancelled(future)
        else:
            assert future.result() == number
    assert wait_until(lambda: in_flight(members) == (0, 0), LONG)
    assert not members.members["home"].incoming.callee.cancellable, "nothing is left of them"


def test_replies_to_cancelled_calls_are_read_to_free_what_comes_with_them(members: Members, actor: Actor) -> None:
    lane = members.lanes["a"]
    lane.delays = lambda kind: True
    discarded: list[Any] = []
    outgoing: Any = members.members["a"].outgoing
    outgoing.discard_reply = lambda route, pending, label, deadline: discarded.append(pending)
    answered = rtr.rpc_async("home").note(1)
    assert wait_until(lambda: len(lane.answers) == 1, LONG), "its reply is on its way"
    assert answered.cancel()
    lane.deliver_answers()
    assert wait_until(lambda: [pending.done for pending in discarded] == [True], LONG)
    is_cancelled(answered)


# --- whoever waits -------------------------------------------------------------------------------------------


def test_a_waiting_thread_is_woken(members: Members, actor: Actor) -> None:
    running = rtr.rpc_async("home").hold()

    def wait_for_it() -> type[BaseException] | None:
        try:
            running.result()
        except BaseException as error:
            return type(error)
        return None

    waiting = in_thread(wait_for_it)
    assert actor.began.wait(LONG) and running.cancel()
    assert waiting() is rtr.CancelledError and not actor.go.is_set()


def test_awaits_raise_the_error_of_asyncio(members: Members, actor: Actor) -> None:
    async def run() -> None:
        running = rtr.rpc_async("home").hold()
        waiting = asyncio.ensure_future(running)
        await asyncio.sleep(0)
        running.cancel()
        text = r"home\.hold" if sys.version_info >= (3, 11) else None  # a task of Python 3.10 drops it
        with pytest.raises(asyncio.CancelledError, match=text):
            await asyncio.wait_for(waiting, LONG)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert waiting.cancelled()

    asyncio.run(run())


# --- asyncio -------------------------------------------------------------------------------------------------


async def cancel_a_task(call: rtr.Future[Any], other: rtr.Future[Any]) -> None:
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    task.cancel()
    await task


async def wait_for(call: rtr.Future[Any], other: rtr.Future[Any]) -> None:
    await asyncio.wait_for(call, 0.05)


async def cancel_a_gather(call: rtr.Future[Any], other: rtr.Future[Any]) -> None:
    together = asyncio.gather(call, other)
    await asyncio.sleep(0)
    together.cancel()
    try:
        await together
    finally:
        assert other.cancelled()


async def fail_in_a_task_group(call: rtr.Future[Any], other: rtr.Future[Any]) -> None:
    async def wait() -> None:
        await call

    async with asyncio.TaskGroup() as group:
        group.create_task(wait())
        await asyncio.sleep(0)
        raise ValueError("on purpose")


needs_task_groups = pytest.mark.skipif("sys.version_info < (3, 11)", reason="has no TaskGroup")


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (cancel_a_task, asyncio.CancelledError),
        (wait_for, asyncio.TimeoutError),
        (cancel_a_gather, asyncio.CancelledError),
        pytest.param(fail_in_a_task_group, Exception, marks=needs_task_groups),
    ],
)
def test_what_cancels_its_task_cancels_the_call(
    members: Members, actor: Actor, way: Any, expected: type[BaseException]
) -> None:
    async def run() -> None:
        call, other = rtr.rpc_async("home").stay(), rtr.rpc_async("b").stay()
        assert await asyncio.to_thread(actor.began.wait, LONG)
        with pytest.raises(expected):
            await way(call, other)
        assert call.cancelled() and other.cancel()

    asyncio.run(run())
    assert wait_until(lambda: "left" in actor.log, LONG)


@pytest.mark.skipif("sys.version_info < (3, 11)", reason="asyncio.wait wraps awaitables itself")
def test_wait_refuses_a_bare_future_with_the_remedy(members: Members) -> None:
    async def run() -> None:
        with pytest.raises(rtr.ConfigurationError, match=r"asyncio\.ensure_future"):
            await asyncio.wait([rtr.rpc_async("home").note(1)])

    asyncio.run(run())


# --- calls that are sent again, or not yet -------------------------------------------------------------------


def test_a_call_that_is_sent_again_is_not_any_more(members: Members, actor: Actor) -> None:
    running = rtr.rpc_async("home", retry=3).hold()
    assert actor.began.wait(LONG) and running.cancel()
    is_cancelled(running)
    assert wait_until(lambda: in_flight(members) == (0, 0), LONG)
    lost = rtr.rpc_async("home", retry=3).hold()
    members.lanes["a"].break_connection()
    called = threading.Event()
    lost.add_done_callback(lambda _: called.set())
    assert lost.cancel() and called.wait(LONG)
    is_cancelled(lost)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_call_before_its_process_is_a_member(
    members: Members, actor: Actor, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """It is sent once the process is one, unless it was cancelled."""
    member = Awaited(Rejoin("actor"), LONG)
    monkeypatch.setattr("raytorchrpc.calls.rejoin.awaited", lambda timeout: member)

    async def run() -> None:
        with members.acting(None):
            future: rtr.Future[Any] = rtr.rpc_async("home").note(1)
        waiting = asyncio.ensure_future(future)
        await asyncio.sleep(0)
        assert not future.done()
        if cancelled:
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert future.cancelled()
        member.settle(members.members["a"])
        assert cancelled or await waiting == 1
        assert await rtr.rpc_async("home").note(2) == 2
        assert actor.log == ["noted"] * (1 if cancelled else 2)

    asyncio.run(run())
