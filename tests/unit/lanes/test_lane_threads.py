"""The threads of lanes: who polls sockets, while methods run, how long one spins; torch replies."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from raytorchrpc.lanes.socket.leadership import BRIEF_S
from raytorchrpc.lanes.socket.selector import Selector

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

    @property
    def lane(self) -> type[Source]:
        return Source

    @staticmethod
    def read(source: Source, tasks: deque[Task]) -> None:
        os.eventfd_read(source.fd)
        source.left.append(len(tasks))
        tasks.extend(source.tasks)

    def end(self, reason: str) -> None:
        """It stays as it is."""


def started() -> Selector:
    made = Selector()
    made.enter(Source)
    made.start()
    return made


@pytest.fixture
def selector() -> Iterator[Selector]:
    made = started()
    yield made
    made.leave(Source, "the test is over")
    for source in made.of(Source):
        os.close(source.fd)


def add(selector: Selector, *tasks: Task) -> Source:
    source = Source(*tasks)
    assert selector.add(source)
    return source


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
    made = started()
    done = threading.Event()
    source = add(made, lambda: time.sleep(10 * BRIEF_S), lambda: made.leave(Source, "it closes"), done.set)
    source.arrive()
    assert done.wait(PATIENCE_S)
    os.close(source.fd)
