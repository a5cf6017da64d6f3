"""How long a thread looks again before it sleeps, and the timer that comes to help."""

from __future__ import annotations

import os
import select
import time

import pytest

from raytorchrpc.lanes.socket.polling import SPIN_S, Spinner, Timer

several_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core nobody looks again")


def fail(spinner: Spinner, times: int) -> None:
    """Let it look in vain, as often as it would by itself."""
    while times:
        if spinner.should_spin():
            spinner.spin(lambda: False)
            times -= 1


@several_cores
def test_looking_in_vain_rests_longer_each_time_until_it_pays_off_again() -> None:
    spinner = Spinner()
    fail(spinner, 1)
    assert not spinner.should_spin()
    fail(spinner, 8)
    began = time.perf_counter()
    while not spinner.should_spin():
        time.sleep(SPIN_S)
    assert 4 * SPIN_S < time.perf_counter() - began < 1
    spinner.spin(lambda: True)
    assert all(spinner.should_spin() for _ in range(5))
    fail(spinner, 6)
    spinner.slept(1.0)
    assert not spinner.should_spin()
    spinner.slept(SPIN_S / 2)  # a spin would have spared this sleep
    assert spinner.should_spin()


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
