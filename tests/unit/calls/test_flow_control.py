"""Calls and bytes in flight to one peer: what is let through, what waits, and what is given back."""

from __future__ import annotations

import itertools
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from raytorchrpc.calls.flow_control import CreditWindow, CreditWindows
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import PeerBusy, RpcTimeout
from tests.threads import in_threads
from tests.unit.switching import switching_often


def take(windows: CreditWindows, call: int, size: int, deadline: float) -> None:
    """As a call does."""
    window = windows.by_rank.get(1) or windows.open(windows.by_rank, 1)
    if not window.take(call, size):
        windows.wait(window, "b", "f", call, size, deadline)


@pytest.mark.parametrize(
    ("max_calls", "max_bytes", "inside", "refused", "fits"),
    [
        (2, 10**9, [0, 0], 0, None),
        (100, 10, [4], 7, 6),
        (100, 10, [1000], 0, None),  # larger than the window: it goes alone
    ],
)
def test_calls_and_bytes_are_counted(
    max_calls: int, max_bytes: int, inside: list[int], refused: int, fits: int | None
) -> None:
    window = CreditWindow(max_calls, max_bytes)
    calls = list(range(len(inside)))
    assert all(window.take(call, size) for call, size in zip(calls, inside, strict=True))
    assert not window.take(10, refused)
    if fits is not None:
        calls.append(11)
        assert window.take(11, fits)
    window.give_back(calls.pop())
    calls.append(12)
    assert window.take(12, 0)
    for call in (10, *calls, *calls):  # given back twice, it counts once; what was refused has nothing
        window.give_back(call)
    assert (window.calls, window.bytes, window.sizes) == (0, 0, {})


def test_a_call_that_two_threads_give_back_at_once_counts_once() -> None:
    window = CreditWindow(10, 10)
    with ThreadPoolExecutor(2) as pool, switching_often():
        for call in range(2000):
            assert window.take(call, 1)
            for done in [pool.submit(window.give_back, call) for _ in range(2)]:
                done.result(10)
    assert (window.calls, window.bytes, window.sizes) == (0, 0, {})


def test_who_waits_is_served_in_order_and_before_later_ones() -> None:
    window = CreditWindow(10, 10)
    assert window.take(1, 10)
    large, small, last = window.enqueue(2, 8), window.enqueue(3, 1), window.enqueue(4, 10)
    assert not large[2].wait(0)
    assert not window.take(5, 0), "nobody passes those who wait"
    window.give_back(1)
    for queued in (large, small, last):
        assert queued is last or queued[2].wait(5)
        window.cancel(queued)
    assert (window.calls, window.bytes) == (0, 0)


def test_many_threads_never_exceed_it_and_leave_nothing() -> None:
    windows = CreditWindows(GroupConfig(max_calls_in_flight=3), 100)
    numbers, inside, most = itertools.count(), list[int](), 0

    def work(seed: int) -> None:
        nonlocal most
        choices = random.Random(seed)
        for _ in range(300):
            call = next(numbers)
            try:
                take(windows, call, choices.randrange(60), time.monotonic() + choices.choice([0.0, 0.001, 10]))
            except RpcTimeout:
                continue
            inside.append(call)
            most = max(most, len(inside))
            inside.remove(call)
            windows.by_rank[1].give_back(call)

    with switching_often():
        in_threads(work, 8)
    assert 1 <= most <= 3
    assert windows.in_flight(1) == (0, 0)


def test_an_interrupt_finds_credit_taken_or_not_taken() -> None:
    window, rounds = CreditWindow(10, 10), 0

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-4)
                try:
                    while True:
                        window.take(rounds, 1)
                        window.give_back(rounds)
                        rounds += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                window.give_back(rounds)
            assert (window.calls, window.bytes, window.sizes) == (0, 0, {})
    finally:
        signal.signal(signal.SIGALRM, before)
    assert rounds > 0


def test_when_full_it_waits_until_the_deadline_or_rejects_at_once() -> None:
    blocking = CreditWindows(GroupConfig(max_calls_in_flight=1), 100)
    take(blocking, 1, 1, 0.0)
    with pytest.raises(RpcTimeout, match=r"b\.f was not sent by its deadline: 1 calls"):
        take(blocking, 2, 1, time.monotonic() + 0.01)
    rejecting = CreditWindows(GroupConfig(max_calls_in_flight=1, when_full="reject"), 100)
    take(rejecting, 1, 1, 0.0)
    with pytest.raises(PeerBusy, match=r"b\.f was not sent.*max_calls_in_flight \(1\)") as busy:
        take(rejecting, 2, 1, time.monotonic() + 60)
    assert (busy.value.peer, busy.value.calls, busy.value.bytes) == ("b", 1, 1)
