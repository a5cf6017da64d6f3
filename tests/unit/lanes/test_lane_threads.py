"""The threads of lanes: who polls sockets, while methods run, how long one spins; torch replies."""

from __future__ import annotations

import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from raytorchrpc.lanes.common.polling import Timer
from raytorchrpc.lanes.socket.leadership import BRIEF_S
from raytorchrpc.lanes.socket.selector import SPIN_S, Selector, Spinner
from tests.polling import wait_until

PATIENCE_S = 20.0

Task = Callable[[], None]


class Source:
    """A connection that brings some methods each time it is readable."""

    def __init__(self, *tasks: Task) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.tasks = tasks
        self.left: list[int] = []
        """How many methods were waiting when this was read."""

    def arrive(self) -> None:
        os.eventfd_write(self.fd, 1)

    def enable_if_unread(self) -> bool:
        return False


def read(source: Source, tasks: deque[Task]) -> None:
    os.eventfd_read(source.fd)
    source.left.append(len(tasks))
    tasks.extend(source.tasks)


@pytest.fixture
def selector() -> Iterator[Selector]:
    made = Selector("test", read, lambda fd: True)
    made.start()
    yield made
    sources = list(made.connections.values())
    made.close()
    for source in sources:
        os.close(source.fd)


def add(selector: Selector, *tasks: Task) -> Source:
    source = Source(*tasks)
    assert selector.add(source)
    return source


def meeting(selector: Selector, meanwhile: Callable[[], object] = lambda: None) -> None:
    """A method waits for a method of another connection."""
    met, done = threading.Event(), threading.Event()
    other = add(selector, met.set)

    def wait() -> None:
        other.arrive()
        if met.wait(PATIENCE_S):
            done.set()

    def is_over() -> bool:
        meanwhile()
        return done.is_set()

    add(selector, wait).arrive()
    assert wait_until(is_over, PATIENCE_S)


def test_a_method_may_wait_for_another_one(selector: Selector) -> None:
    for _ in range(3):
        meeting(selector)


def test_many_brief_methods_do_not_keep_the_leader_from_polling(selector: Selector) -> None:
    done = threading.Event()
    other = add(selector)

    def brief() -> None:
        until = time.monotonic() + BRIEF_S / 4
        while time.monotonic() < until:
            pass

    add(selector, other.arrive, *[brief] * 40, done.set).arrive()
    assert done.wait(PATIENCE_S)
    assert other.left and other.left[0] > 0


def test_methods_that_have_arrived_run_though_the_lane_closes() -> None:
    """They may be admitted, and would keep all others out."""
    made = Selector("test", read, lambda fd: True)
    made.start()
    done = threading.Event()
    source = add(made, lambda: time.sleep(10 * BRIEF_S), made.close, done.set)
    source.arrive()
    assert done.wait(PATIENCE_S)
    os.close(source.fd)


# --- spinning -------------------------------------------------------------------------------------------------------


several_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core nobody looks again")


def fail(spinner: Spinner, times: int) -> None:
    """Let it look in vain, as often as it would by itself."""
    while times:
        if spinner.should_spin():
            spinner.spin(lambda: False)
            times -= 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """A look at it takes a hundredth of a spin: a look of a spin, or between two."""
    clock = itertools.count(0.0, SPIN_S / 100)
    ticking = SimpleNamespace(perf_counter=clock.__next__, monotonic=time.monotonic, process_time=lambda: 0.0)
    monkeypatch.setattr("raytorchrpc.lanes.socket.selector.time", ticking)
    return clock


@several_cores
def test_looking_in_vain_rests_longer_each_time_until_it_pays_off_again(clock: Iterator[float]) -> None:
    spinner = Spinner()
    fail(spinner, 1)
    assert not spinner.should_spin()
    fail(spinner, 8)
    began = next(clock)
    while not spinner.should_spin():
        pass
    assert 4 * SPIN_S < next(clock) - began < 1
    spinner.spin(lambda: True)
    assert all(spinner.should_spin() for _ in range(5))
    fail(spinner, 6)
    spinner.slept(1.0)
    assert not spinner.should_spin()
    spinner.slept(SPIN_S / 2)  # a spin would have spared this sleep
    assert spinner.should_spin()


def test_looking_ends_when_there_is_something_and_soon_in_any_case(clock: Iterator[float]) -> None:
    seen: list[bool] = []
    Spinner().spin(lambda: seen.append(True) is None)
    assert seen == [True]
    seen.clear()
    Spinner().spin(lambda: seen.append(False) is not None)
    assert 95 < len(seen) < 105


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
    timer.set(60.0)
    assert waiting.poll(20) == []
    timer.set(0.01)
    assert waiting.poll(5000)
    timer.clear()
    timer.clear()
    timer.close()
