"""Changes of a group whose supervisor runs in another process: kept there, fetched here, each delivered once."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from raytorchrpc.group import detached
from raytorchrpc.group.changes import Change, ChangeLog
from raytorchrpc.group.detached import ChangeFeed
from tests.polling import wait_until


def change(name: str) -> Change:
    return Change("added", (name,))


class Host:
    """Answers on threads of its own, as Ray does."""

    def __init__(self) -> None:
        self.log, self.dead, self.lasts = ChangeLog(), False, True
        self._threads = ThreadPoolExecutor(4)
        self.feed = ChangeFeed("group", self.fetch, lambda: self.lasts)

    def fetch(self, after: int | None, wait_s: float) -> Future[tuple[int, list[Change]]]:
        def work() -> tuple[int, list[Change]]:
            if self.dead:
                raise ConnectionError("it died")
            return self.log.after(after, wait_s)

        return self._threads.submit(work)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(detached, "_POLL_S", 0.2)
    made = Host()
    yield made
    made.feed.stop()
    assert wait_until(lambda: not running(), 5)


def running() -> bool:
    return any(thread.name == "raytorchrpc-changes-group" for thread in threading.enumerate())


def test_a_log_keeps_the_latest_changes() -> None:
    log = ChangeLog()
    assert log.after(None, 10) == (0, [])
    assert log.after(0, 0.01) == (0, [])
    log.put(change("a"))
    log.put(change("b"))
    assert log.after(0, 10) == (2, [change("a"), change("b")])
    assert log.after(1, 10) == (2, [change("b")])
    for number in range(2000):
        log.put(change(str(number)))
    last, kept = log.after(0, 10)
    assert (last, len(kept), kept[-1]) == (2002, 1000, change("1999"))


def test_every_change_after_the_start_comes_once_and_in_order(host: Host) -> None:
    host.log.put(change("before"))
    seen: queue.SimpleQueue[Change] = queue.SimpleQueue()
    end = host.feed.listen(seen.put)
    names = [str(number) for number in range(50)]
    for name in names:
        host.log.put(change(name))
    assert [seen.get(timeout=5).members[0] for _ in names] == names
    end()
    assert wait_until(lambda: not running(), 5)
    host.log.put(change("meanwhile"))
    host.feed.listen(seen.put)
    host.log.put(change("again"))
    assert seen.get(timeout=5) == change("again")


def test_the_thread_ends_with_the_group_and_with_the_cluster(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.feed.listen(lambda _: None)
    assert running()
    with caplog.at_level(logging.WARNING):
        host.dead = True
        assert wait_until(lambda: not running(), 5)
    assert "no more changes are reported" in caplog.text
    host.dead = False
    host.feed.listen(lambda _: None)
    host.lasts = False
    assert wait_until(lambda: not running(), 5)


def test_an_answer_that_never_comes_is_asked_for_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "_CHECK_S", 0.05)
    seen: queue.SimpleQueue[Change] = queue.SimpleQueue()
    answered, silent = host.feed._fetch, iter([False, True])
    host.feed._last = 0

    def fetch(after: int | None, wait_s: float) -> Future[tuple[int, list[Change]]]:
        return Future() if next(silent, False) else answered(after, wait_s)

    monkeypatch.setattr(detached, "_GRACE_S", 0.3)
    monkeypatch.setattr(host.feed, "_fetch", fetch)
    host.feed.listen(seen.put)
    host.log.put(change("late"))
    assert seen.get(timeout=10) == change("late")


def test_a_slow_callback_is_told_what_it_missed(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    seen: queue.SimpleQueue[Change] = queue.SimpleQueue()
    go_on = threading.Event()
    host.feed.listen(lambda one: (seen.put(one), go_on.wait(10)))
    host.log.put(change("first"))
    assert seen.get(timeout=5) == change("first")
    for number in range(1005):
        host.log.put(change(str(number)))
    with caplog.at_level(logging.WARNING):
        go_on.set()
        assert seen.get(timeout=5) == change("5")
    assert "5 changes were missed" in caplog.text
