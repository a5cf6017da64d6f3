"""The listener threads of the socket lane: who polls, while methods run and after failures."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raytorchrpc.lanes.socket.listeners import ATTEND_S, Listeners
from raytorchrpc.process import threads

PATIENCE_S = 20.0

Task = Callable[[], None]


class Source:
    """A connection that brings some methods each time it is readable."""

    accepted = True

    def __init__(self, *tasks: Task) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.tasks = tasks
        self.left: list[int] = []
        """How many methods were waiting when this was read."""

    def arrive(self) -> None:
        os.eventfd_write(self.fd, 1)

    def attend(self) -> bool:
        return False

    def rearm(self) -> None:
        """It is always polled."""


def read(source: Source, tasks: deque[Task]) -> None:
    os.eventfd_read(source.fd)
    source.left.append(len(tasks))
    tasks.extend(source.tasks)


@pytest.fixture
def listeners() -> Iterator[Listeners[Source]]:
    made: Listeners[Source] = Listeners("test", read, lambda fd: True, lambda: None)
    made.start(lambda work: threading.Thread(target=work, daemon=True).start())
    yield made
    sources = list(made.connections.values())
    made.close()
    for source in sources:
        os.close(source.fd)


def add(listeners: Listeners[Source], *tasks: Task) -> Source:
    source = Source(*tasks)
    assert listeners.add(source)
    return source


def meeting(listeners: Listeners[Source]) -> None:
    """A method waits for a method of another connection."""
    met, done = threading.Event(), threading.Event()
    other = add(listeners, met.set)

    def wait() -> None:
        other.arrive()
        if met.wait(PATIENCE_S):
            done.set()

    add(listeners, wait).arrive()
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


def test_a_method_may_wait_for_another_one(listeners: Listeners[Source]) -> None:
    for _ in range(3):
        meeting(listeners)


def test_many_brief_methods_do_not_keep_the_leader_from_polling(listeners: Listeners[Source]) -> None:
    done = threading.Event()
    other = add(listeners)

    def brief() -> None:
        until = time.monotonic() + ATTEND_S / 4
        while time.monotonic() < until:
            pass

    add(listeners, other.arrive, *[brief] * 40, done.set).arrive()
    assert done.wait(PATIENCE_S)
    assert other.left and other.left[0] > 0


def test_a_leader_is_replaced_after_an_attempt_failed(
    listeners: Listeners[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fail_once(listeners._replacement, "clear", monkeypatch)
    meeting(listeners)
    assert failed.is_set()


def test_a_method_runs_after_its_start_failed(listeners: Listeners[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be admitted, and would keep all others out."""
    failed, done = fail_once(listeners, "_ensure_another", monkeypatch), threading.Event()
    add(listeners, done.set).arrive()
    assert done.wait(PATIENCE_S)
    assert failed.is_set()


def test_a_thread_that_could_not_be_started_is_not_counted(
    listeners: Listeners[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fail_once(threads, "start", monkeypatch)
    meeting(listeners)
    assert failed.is_set()
    meeting(listeners)  # which has to start one


def test_all_threads_end_if_none_can_poll(listeners: Listeners[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    meeting(listeners)  # there are several now
    monkeypatch.setattr(threads, "_HOPELESS_S", 0.2)
    monkeypatch.setattr(listeners, "_give_up", listeners.close)
    freed, free = threading.Event(), listeners._free
    monkeypatch.setattr(listeners, "_free", lambda: (free(), freed.set()))

    def fail(patience_s: float) -> None:
        raise OSError("the epoll set is broken")

    monkeypatch.setattr(listeners, "_poll", fail)
    add(listeners).arrive()
    assert freed.wait(PATIENCE_S)
