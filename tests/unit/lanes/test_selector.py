"""The threads of the socket lane: who polls, while methods run and after failures."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raytorchrpc.lanes.socket.selector import BRIEF_S, Selector
from raytorchrpc.process import threads
from tests.polling import wait_until

PATIENCE_S = 20.0

Task = Callable[[], None]


class Source:
    """A connection that brings some methods each time it is readable."""

    accepted = True
    ended = ""

    def __init__(self, *tasks: Task) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.tasks = tasks
        self.left: list[int] = []
        """How many methods were waiting when this was read."""

    def arrive(self) -> None:
        os.eventfd_write(self.fd, 1)

    def enable_if_unread(self) -> bool:
        return False

    def enable_again(self) -> None:
        """It is always polled."""

    def end(self, reason: str) -> None:
        self.ended = reason


def read(source: Source, tasks: deque[tuple[Task, Source | None]]) -> None:
    os.eventfd_read(source.fd)
    source.left.append(len(tasks))
    tasks.extend((task, source) for task in source.tasks)


@pytest.fixture
def selector() -> Iterator[Selector[Source]]:
    made: Selector[Source] = Selector("test", read, lambda fd: True, lambda: None)
    made.start(lambda work: threading.Thread(target=work, daemon=True).start())
    yield made
    sources = list(made.connections.values())
    made.close()
    for source in sources:
        os.close(source.fd)


def add(selector: Selector[Source], *tasks: Task) -> Source:
    source = Source(*tasks)
    assert selector.add(source)
    return source


def meeting(selector: Selector[Source]) -> None:
    """A method waits for a method of another connection."""
    met, done = threading.Event(), threading.Event()
    other = add(selector, met.set)

    def wait() -> None:
        other.arrive()
        if met.wait(PATIENCE_S):
            done.set()

    add(selector, wait).arrive()
    assert done.wait(PATIENCE_S)


def fail_once(where: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The next call of this function finds no memory."""
    failed, real = threading.Event(), getattr(where, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if failed.is_set():
            return real(*args, **kwargs)
        failed.set()
        raise MemoryError

    monkeypatch.setattr(where, name, fail)
    return failed


def test_a_method_may_wait_for_another_one(selector: Selector[Source]) -> None:
    for _ in range(3):
        meeting(selector)


def test_many_brief_methods_do_not_keep_the_leader_from_polling(selector: Selector[Source]) -> None:
    done = threading.Event()
    other = add(selector)

    def brief() -> None:
        until = time.monotonic() + BRIEF_S / 4
        while time.monotonic() < until:
            pass

    add(selector, other.arrive, *[brief] * 40, done.set).arrive()
    assert done.wait(PATIENCE_S)
    assert other.left and other.left[0] > 0


def test_a_leader_is_replaced_after_an_attempt_failed(
    selector: Selector[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fail_once(selector._takeover, "clear", monkeypatch)
    meeting(selector)
    assert failed.is_set()


def test_a_method_runs_after_its_start_failed(selector: Selector[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be admitted, and would keep all others out."""
    failed, done = fail_once(selector, "_ensure_follower", monkeypatch), threading.Event()
    add(selector, done.set).arrive()
    assert done.wait(PATIENCE_S)
    assert failed.is_set()


def test_a_connection_whose_method_failed_ends(selector: Selector[Source]) -> None:
    """Its caller may not have an answer."""
    done = threading.Event()

    def fail() -> None:
        raise MemoryError

    source = add(selector, fail)
    source.arrive()
    assert wait_until(lambda: source.ended, PATIENCE_S)
    add(selector, done.set).arrive()
    assert done.wait(PATIENCE_S)


def test_methods_that_have_arrived_run_though_the_lane_closes() -> None:
    """They may be admitted, and would keep all others out."""
    made: Selector[Source] = Selector("test", read, lambda fd: True, lambda: None)
    made.start(lambda work: threading.Thread(target=work, daemon=True).start())
    done = threading.Event()
    source = add(made, lambda: time.sleep(10 * BRIEF_S), made.close, done.set)
    source.arrive()
    assert done.wait(PATIENCE_S)
    os.close(source.fd)


def test_a_thread_that_could_not_be_started_is_not_counted(
    selector: Selector[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fail_once(threads, "start", monkeypatch)
    meeting(selector)
    assert failed.is_set()
    meeting(selector)  # which has to start one


def test_all_threads_end_if_none_can_poll(selector: Selector[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    meeting(selector)  # there are several now
    monkeypatch.setattr(threads, "_HOPELESS_S", 0.2)
    monkeypatch.setattr(selector, "_give_up", selector.close)
    freed, free = threading.Event(), selector._free
    monkeypatch.setattr(selector, "_free", lambda: (free(), freed.set()))

    def fail(*, wait: bool) -> None:
        raise OSError("the epoll set is broken")

    monkeypatch.setattr(selector, "_poll", fail)
    add(selector).arrive()
    assert freed.wait(PATIENCE_S)
