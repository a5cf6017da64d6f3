"""How long a thread looks again before it sleeps, and the timer that comes to help."""

from __future__ import annotations

import os
import select
import time

import pytest

from raytorchrpc.lanes.socket.spin import SPIN_S, Spinner, Timer

several_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core nobody looks again")


def turns(spinner: Spinner, count: int) -> list[bool]:
    """Whether to look, time after time, if it is always in vain."""
    asked = []
    for _ in range(count):
        asked.append(spinner.should_spin())
        if asked[-1]:
            spinner.spin(lambda: False)
    return asked


@several_cores
def test_looking_in_vain_is_left_out_more_and_more() -> None:
    asked = turns(Spinner(), 600)
    assert asked[:12] == [True, True, False, True, False, False, False, True, *[False] * 4]
    assert sum(asked) <= 11


@several_cores
def test_once_it_has_paid_off_it_is_done_every_time_again() -> None:
    spinner = Spinner()
    turns(spinner, 100)
    while not spinner.should_spin():
        pass
    spinner.spin(lambda: True)
    assert all(spinner.should_spin() for _ in range(5))


def test_looking_ends_when_there_is_something_and_soon_in_any_case() -> None:
    seen: list[bool] = []
    Spinner().spin(lambda: seen.append(True) is None)
    assert seen == [True]
    began, spent = time.perf_counter(), time.thread_time()
    Spinner().spin(lambda: False)
    assert time.perf_counter() - began >= SPIN_S
    assert time.thread_time() - spent < 50 * SPIN_S


def test_the_timer_goes_off_once_for_each_time_it_is_set() -> None:
    timer = Timer(0.005)
    waiting = select.poll()
    waiting.register(timer.fd, select.POLLIN)
    assert waiting.poll(0) == []
    for _ in range(2):
        began = time.monotonic()
        timer.set()
        assert waiting.poll(5000)
        assert time.monotonic() - began >= 0.005
        timer.clear()
        assert waiting.poll(0) == []
    timer.clear()
    timer.close()
