"""Calls and bytes in flight to one peer: what is let through, what waits, and what is given back."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from raytorchrpc import Member
from raytorchrpc.calls.flow_control import Credit, CreditWindow, CreditWindows
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import PeerBusy, RpcTimeout

B = Member(1, "b", None, "node", 1, "rtr-b", 1)


def taken(window: CreditWindow, size: int) -> Credit:
    credit = window.take(size)
    assert credit is not None
    return credit


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
    credits = [taken(window, size) for size in inside]
    assert window.take(refused) is None
    if fits is not None:
        credits.append(taken(window, fits))
    credits.pop().give_back()
    credits.append(taken(window, 0))
    for credit in (*credits, *credits):  # given back twice, it counts once
        credit.give_back()
    assert (window.calls, window.bytes) == (0, 0)


def test_who_waits_is_served_in_order_and_before_later_ones() -> None:
    window = CreditWindow(10, 10)
    first = taken(window, 10)
    large, small = window.enqueue(8), window.enqueue(1)
    assert not large[1].wait(0)
    assert window.take(0) is None, "nobody passes those who wait"
    first.give_back()
    for queued in (large, small):
        assert queued[1].wait(5)
        window.cancel(queued)
    assert (window.calls, window.bytes) == (0, 0)


def test_many_threads_never_exceed_it_and_leave_nothing() -> None:
    windows = CreditWindows(GroupConfig(max_calls_in_flight=3), 100)
    inside, most = 0, 0
    lock = threading.Lock()

    def work(seed: int) -> None:
        nonlocal inside, most
        numbers = random.Random(seed)
        for _ in range(200):
            try:
                credit, _ = windows.take(B, "f", numbers.randrange(60), numbers.choice([0.0, 0.001, 10]))
            except RpcTimeout:
                continue
            with lock:
                inside += 1
                most = max(most, inside)
            with lock:
                inside -= 1
            credit.give_back()

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, seed) for seed in range(8)]:
            done.result(60)
    assert 1 <= most <= 3
    assert windows.in_flight(1) == (0, 0)


def test_when_full_it_waits_until_the_deadline_or_rejects_at_once() -> None:
    blocking = CreditWindows(GroupConfig(max_calls_in_flight=1), 100)
    blocking.take(B, "f", 1, 1)
    with pytest.raises(RpcTimeout, match=r"b\.g was not sent by its deadline: 1 calls"):
        blocking.take(B, "g", 1, 0.01)
    rejecting = CreditWindows(GroupConfig(max_calls_in_flight=1, when_full="reject"), 100)
    rejecting.take(B, "f", 1, 1)
    with pytest.raises(PeerBusy, match=r"b\.g was not sent.*max_calls_in_flight \(1\)") as busy:
        rejecting.take(B, "g", 1, 60)
    assert (busy.value.peer, busy.value.calls, busy.value.bytes) == ("b", 1, 1)
