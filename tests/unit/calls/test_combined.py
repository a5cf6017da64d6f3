"""``wait`` and ``gather``: which futures they return, when, and what they refuse."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
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
def latches() -> Latches:
    return Latches()


@pytest.fixture
def members(latches: Latches) -> Iterator[Members]:
    methods = {"hold": exposed(latches.hold), "fail": exposed(latches.fail)}
    with Members(rtr.GroupConfig(rpc_timeout_s=LONG), methods) as made, made.acting("a"):
        yield made
        latches.release(*range(10))


def held(count: int, **options: Any) -> list[Future[Any]]:
    return [rtr.rpc_async("home", **options).hold(number) for number in range(count)]


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


WAIT: Any = rtr.wait
GATHER: Any = rtr.gather


@pytest.mark.parametrize(
    ("combine", "why"),
    [
        (lambda one, other: WAIT([one, other], num_returns=0), "at least 1"),
        (lambda one, other: WAIT([one, other], num_returns=True), "at least 1"),
        (lambda one, other: WAIT([one, other], num_returns=3), "exceeds the 2 futures"),
        (lambda one, other: WAIT([one, other], timeout="soon"), "timeout is a number"),
        (lambda one, other: WAIT([one, one]), "twice"),
        (lambda one, other: WAIT(one), "not a single one"),
        (lambda one, other: GATHER(one, 1), r"is not a raytorchrpc\.Future"),
        (lambda one, other: GATHER([one, other]), r"write gather\(\*futures\)"),
    ],
)
def test_arguments_that_cannot_be_combined_are_refused(members: Members, combine: Callable[..., Any], why: str) -> None:
    with pytest.raises(rtr.ConfigurationError, match=why):
        combine(*held(2))


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


def test_gather_waits_for_a_call_that_is_sent_again(
    members: Members, latches: Latches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytorchrpc.calls.peers.UNREPORTED_LOSS_S", 0.05)
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


def test_on_an_event_loop_a_result_is_refused_whether_it_has_arrived_or_not(members: Members, latches: Latches) -> None:
    """Until the program has asked: else it would work by accident, and fail on a slower machine."""

    async def run() -> None:
        future, arrived = held(1)[0], threading.Event()
        future.add_done_callback(lambda _: arrived.set())
        latches.release(0)
        assert await asyncio.to_thread(arrived.wait, LONG)
        for take in (future.result, future.wait, future.exception):
            with pytest.raises(rtr.RayTorchRpcError, match="would block this thread's event loop: use `await future`"):
                take()
        assert future.done() and future.result() == 0 == await future

    asyncio.run(run())
