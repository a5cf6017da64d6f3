"""``wait`` and ``gather``: which futures they return, when, and what they refuse."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import raytorchrpc as rtr
from raytorchrpc import Future
from tests.polling import wait_until
from tests.unit.callees import exposed
from tests.unit.members import Members, in_thread

LONG = 20.0


class Latches:
    """``hold`` returns its number when that is released."""

    def __init__(self) -> None:
        self.events = [threading.Event() for _ in range(10)]

    def hold(self, _: None, number: int) -> int:
        assert self.events[number].wait(LONG)
        return number

    def fail(self, _: None, number: int) -> None:
        assert self.events[number].wait(LONG)
        raise KeyError(number)

    def release(self, *numbers: int) -> None:
        for number in numbers:
            self.events[number].set()


@pytest.fixture
def latches() -> Iterator[Latches]:
    made = Latches()
    yield made
    made.release(*range(10))


@pytest.fixture
def members(latches: Latches) -> Iterator[Members]:
    methods = {name: exposed(getattr(latches, name)) for name in ("hold", "fail")}
    made = Members(rtr.GroupConfig(rpc_timeout_s=LONG), methods)
    try:
        with made.acting("a"):
            yield made
    finally:
        latches.release(*range(10))
        made.close()


def held(count: int, **options: Any) -> list[Future[Any]]:
    return [rtr.rpc_async("home", **options).hold(number) for number in range(count)]


class SentAgain(SimpleNamespace):
    """A call whose result was lost on its way, as every waiting thread finds; its second attempt never ends."""

    label, is_there = "home.f", True

    def wait(self, timeout_s: float) -> bool:
        return self.is_there

    def remaining(self) -> float:
        return LONG

    def outcome(self) -> None:
        self.is_there = False
        self.when_found()

    def add_done_callback(self, callback: Any) -> None:
        """It never calls back."""

    cancel = at_deadline = lambda *_: int

    def run_callback(self, callback: Any, argument: Any) -> None:
        callback(argument)


def test_a_callback_added_while_threads_find_that_a_call_is_sent_again_hears_of_its_cancellation() -> None:
    call: Any = SentAgain()
    future, called = Future[Any](call), list[Any]()
    call.when_found = lambda: future.add_done_callback(called.append)
    with pytest.raises(rtr.RpcTimeout):
        future.result(0)
    assert future.cancel() and called == [future]


# --- wait ----------------------------------------------------------------------------------------------------


def test_wait_returns_when_one_is_done(members: Members, latches: Latches) -> None:
    futures = held(3)
    waiting = in_thread(lambda: rtr.wait(futures))
    latches.release(1)
    assert waiting() == ([futures[1]], [futures[0], futures[2]])
    assert rtr.wait(futures) == ([futures[1]], [futures[0], futures[2]]), "it was done before"


def test_wait_returns_no_more_than_wanted_and_keeps_the_order(members: Members, latches: Latches) -> None:
    futures = held(4)
    latches.release(3, 1, 0)
    assert wait_until(lambda: sum(future.done() for future in futures) == 3, LONG)
    assert rtr.wait(futures, num_returns=2) == ([futures[0], futures[1]], [futures[2], futures[3]])
    assert rtr.wait(futures, num_returns=3) == ([futures[0], futures[1], futures[3]], [futures[2]])


def test_wait_goes_through_futures_one_by_one(members: Members, latches: Latches) -> None:
    left, seen = held(5), []
    for number in (2, 0, 4, 1, 3):
        latches.release(number)
        (done,), left = rtr.wait(left)
        seen.append(done.result())
    assert seen == [2, 0, 4, 1, 3] and rtr.wait(left) == ([], [])


def test_wait_ends_at_its_timeout(members: Members, latches: Latches) -> None:
    futures = held(3)
    latches.release(1)
    assert wait_until(futures[1].done, LONG)
    assert rtr.wait(futures, num_returns=2, timeout=0) == ([futures[1]], [futures[0], futures[2]])
    assert rtr.wait(futures, num_returns=3, timeout=0.05) == ([futures[1]], [futures[0], futures[2]])
    latches.release(0, 2)
    assert rtr.wait(futures, num_returns=3, timeout=LONG) == (futures, [])
    assert not any(vars(future)["_arrival"]._callbacks for future in futures), "nothing is left of the waits"


def test_wait_takes_failed_late_and_cancelled_calls_as_done(members: Members, latches: Latches) -> None:
    failing = rtr.rpc_async("home").fail(0)
    late = rtr.rpc_async("home", timeout=0.05).hold(1)
    cancelled, running = rtr.rpc_async("home").hold(2), rtr.rpc_async("home").hold(3)
    waiting = in_thread(lambda: rtr.wait([failing, late, cancelled, running], num_returns=3))
    latches.release(0)
    cancelled.cancel()
    assert waiting() == ([failing, late, cancelled], [running])


def test_wait_does_not_take_outcomes(members: Members, latches: Latches) -> None:
    future = rtr.rpc_async("home").fail(0)
    latches.release(0)
    assert rtr.wait([future]) == ([future], [])
    with pytest.raises(KeyError):
        future.result()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"num_returns": 0}, "at least 1"),
        ({"num_returns": True}, "at least 1"),
        ({"num_returns": 3}, "exceeds the 2 futures"),
        ({"timeout": "soon"}, "timeout is a number"),
    ],
)
def test_wait_refuses_bad_arguments(members: Members, arguments: Any, why: str) -> None:
    with pytest.raises(rtr.ConfigurationError, match=why):
        rtr.wait(held(2), **arguments)


def test_wait_refuses_what_are_no_futures(members: Members) -> None:
    (future,) = held(1)
    with pytest.raises(rtr.ConfigurationError, match="twice"):
        rtr.wait([future, future])
    with pytest.raises(rtr.ConfigurationError, match="not a single one"):
        rtr.wait(future)  # type: ignore[arg-type]
    with pytest.raises(rtr.ConfigurationError, match=r"is not a raytorchrpc\.Future"):
        rtr.gather(future, 1)  # type: ignore[arg-type]
    with pytest.raises(rtr.ConfigurationError, match=r"write gather\(\*futures\)"):
        rtr.gather([future])  # type: ignore[arg-type]


# --- gather --------------------------------------------------------------------------------------------------


def test_gather_returns_results_in_the_order_of_its_arguments(members: Members, latches: Latches) -> None:
    futures = held(3)
    waiting = in_thread(lambda: rtr.gather(*futures, futures[0]))
    for number in (2, 0, 1):
        latches.release(number)
    assert waiting() == [0, 1, 2, 0] and rtr.gather() == []


def test_gather_raises_the_first_error_while_others_go_on(members: Members, latches: Latches) -> None:
    running, failing = rtr.rpc_async("home").hold(0), rtr.rpc_async("home").fail(1)
    latches.release(1)
    with pytest.raises(KeyError):
        rtr.gather(running, failing)
    assert not running.done()
    latches.release(0)
    assert running.result() == 0


def test_gather_returns_errors_in_their_places(members: Members, latches: Latches) -> None:
    futures = [rtr.rpc_async("home").hold(0), rtr.rpc_async("home").fail(1), rtr.rpc_async("home").hold(2)]
    late = rtr.rpc_async("home", timeout=0.05).hold(3)
    futures[2].cancel()
    waiting = in_thread(lambda: rtr.gather(*futures, late, return_exceptions=True))
    latches.release(0, 1)
    kinds = [outcome if outcome == 0 else type(outcome) for outcome in waiting()]
    assert kinds == [0, KeyError, rtr.CancelledError, rtr.RpcTimeout]


def test_gather_raises_at_the_first_deadline(members: Members) -> None:
    began = time.monotonic()
    with pytest.raises(rtr.RpcTimeout):
        rtr.gather(*held(1), *held(1, timeout=0.05))
    assert time.monotonic() - began < LONG / 2


def test_an_error_that_gather_raised_holds_no_futures(members: Members, latches: Latches) -> None:
    gc.disable()
    try:
        future = rtr.rpc_async("home").fail(0)
        latches.release(0)
        alive = weakref.ref(future)
        with pytest.raises(KeyError):
            rtr.gather(future)
        del future
        assert wait_until(lambda: alive() is None, LONG), "at the latest when the thread that brought it is done"
    finally:
        gc.enable()


def test_gather_waits_for_a_call_that_is_sent_again(members: Members, latches: Latches) -> None:
    lane = members.lanes["a"]
    lane.holds = lambda method: method == "hold"
    futures = held(2, retry=1)
    lane.lose(0)
    waiting = in_thread(lambda: rtr.gather(*futures))
    latches.release(0, 1)
    lane.release()
    assert waiting() == [0, 1]


@pytest.mark.parametrize("function", ["wait", "gather"])
def test_on_an_event_loop_they_name_what_to_use_there(members: Members, latches: Latches, function: str) -> None:
    async def run() -> None:
        futures = held(1)
        with pytest.raises(rtr.RayTorchRpcError, match=rf"await asyncio\.{function}"):
            getattr(rtr, function)(*([futures] if function == "wait" else futures))
        assert rtr.wait(futures, timeout=0) == ([], futures), "which does not block"
        latches.release(0)
        assert await futures[0] == 0

    asyncio.run(run())


class Repeated:
    """A call that is sent again: whoever takes the outcome of its first attempt finds it lost."""

    label, attempt, is_here = "a.method", 1, True

    def __init__(self) -> None:
        self.until = time.monotonic() + LONG
        self.callbacks: list[Callable[[], None]] = []

    def remaining(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def check_reader(self) -> None:
        """Nothing is interrupted."""

    def wait(self, timeout_s: float) -> bool:
        return self.is_here

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def outcome(self) -> tuple[Any, BaseException | None] | None:
        if self.attempt == 1:
            self.attempt, self.is_here = 2, False
            return None
        return 7, None

    def answer(self) -> None:
        self.is_here = True
        for callback in self.callbacks:
            callback()

    def at_deadline(self, callback: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def run_callback(self, callback: Callable[[Any], object], argument: Any) -> None:
        callback(argument)


def test_a_callback_that_comes_after_its_attempt_was_taken_ends_no_wait() -> None:
    call: Any = Repeated()
    future: Future[int] = Future(call)
    future.add_done_callback(lambda _: None)
    late, call.callbacks = call.callbacks, []
    with pytest.raises(rtr.RpcTimeout):
        future.result(0)  # another thread takes the outcome before the lane has called back
    for callback in late:
        callback()
    threading.Timer(0.2, call.answer).start()
    began = time.monotonic()
    assert rtr.wait([future]) == ([future], []) and time.monotonic() - began < LONG / 2
