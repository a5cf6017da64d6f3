"""Changes of a group: made once or never, told later to who missed them, reported to listeners, also from afar."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from raytorchrpc.errors import BootstrapError
from raytorchrpc.group import changes, detached
from raytorchrpc.group.changes import Change, ChangeFeed, ChangeLog, RequestedChange
from tests.polling import wait_until
from tests.shortage import shortage

# --- changes that are asked for -------------------------------------------------------------------------------------


__all__ = ["shortage"]

PATIENCE_S = 20.0


def test_a_change_that_was_given_up_before_its_turn_is_not_made_later() -> None:
    made: list[str] = []
    change = RequestedChange("g", lambda: made.append("made"))
    with pytest.raises(BootstrapError, match="busy with another change; this one did not begin"):
        change.result(0.01)
    change.run()
    assert made == []


def test_a_change_that_takes_longer_than_its_patience_says_so() -> None:
    errors: list[str] = []

    def slow() -> None:
        with pytest.raises(BootstrapError) as late:
            change.result(0.01)
        errors.append(str(late.value))

    change = RequestedChange("g", slow)
    change.run()
    assert errors == ["group 'g': this change began and has not finished after 0.01 s"]


@pytest.mark.parametrize("error", [ValueError, MemoryError, SystemExit])
def test_callbacks_hear_of_a_change_though_others_fail(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(change: Change) -> None:
        raise error

    log, told = ChangeLog(), queue.SimpleQueue[Change]()
    feed = ChangeFeed("g", log.after, log.lasts)
    feed.listen(fail)
    feed.listen(told.put)
    log.put(Change("lost", ("a",)))
    assert told.get(timeout=PATIENCE_S).kind == "lost"
    log.put(Change("back", ("a",)))
    log.close()
    assert told.get(timeout=PATIENCE_S).kind == "back", "it came before the end"
    assert feed.thread is not None
    feed.thread.join(PATIENCE_S)
    assert not feed.thread.is_alive() and "a callback of group 'g' raised" in caplog.text


# --- changes whose supervisor runs in another process ---------------------------------------------------------------


def change(name: str) -> Change:
    return Change("added", (name,))


class Host:
    """Answers on threads of its own, as Ray does."""

    def __init__(self) -> None:
        self.log, self.dead, self.lasts, self.silent = ChangeLog(), False, True, iter(())
        self._threads = ThreadPoolExecutor(4)
        self.info = self.changes = self
        self._made = detached.DetachedHost("group", self)
        self.feed = self._made._feed

    def remote(self, *request: Any) -> Any:
        """Of ``info`` without arguments, of ``changes`` with two."""
        return SimpleNamespace(future=lambda: self._answer(*request))

    def _answer(self, after: int | None = None, wait_s: float = 0.0) -> Future[Any]:
        def work() -> Any:
            if self.dead:
                raise ConnectionError("it died")
            return self.log.after(after, wait_s)

        return Future() if after is not None and next(self.silent, False) else self._threads.submit(work)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(changes, "POLL_S", 0.2)
    monkeypatch.setattr(detached, "_CHECK_S", 0.05)
    monkeypatch.setattr(detached, "_answer", lambda name, reference, patience_s: reference.future().result(PATIENCE_S))
    monkeypatch.setattr(detached.ray_internals, "session_check", lambda: lambda: made.lasts)
    made = Host()
    yield made
    made.feed.stop()
    assert wait_until(lambda: not running(), PATIENCE_S)


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
    assert [seen.get(timeout=PATIENCE_S).members[0] for _ in names] == names
    end()
    assert wait_until(lambda: not running(), PATIENCE_S)
    host.log.put(change("meanwhile"))
    host.feed.listen(seen.put)
    host.log.put(change("again"))
    assert seen.get(timeout=PATIENCE_S) == change("again")


def test_the_thread_ends_with_the_group_and_with_the_cluster(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.feed.listen(lambda _: None)
    assert running()
    with caplog.at_level(logging.WARNING):
        host.dead = True
        assert wait_until(lambda: not running(), PATIENCE_S)
    assert "no more changes are reported" in caplog.text
    host.dead = False
    host.feed.listen(lambda _: None)
    host.lasts = False
    assert wait_until(lambda: not running(), PATIENCE_S)


def test_an_answer_that_never_comes_is_asked_for_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "_GRACE_S", 0.3)
    seen: queue.SimpleQueue[Change] = queue.SimpleQueue()
    host.silent = iter([False, True])
    host.feed.listen(seen.put)
    host.log.put(change("late"))
    assert seen.get(timeout=PATIENCE_S) == change("late")


def test_a_slow_callback_is_told_what_it_missed(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    seen: queue.SimpleQueue[Change] = queue.SimpleQueue()
    go_on = threading.Event()
    host.feed.listen(lambda one: (seen.put(one), go_on.wait(PATIENCE_S)))
    host.log.put(change("first"))
    assert seen.get(timeout=PATIENCE_S) == change("first")
    for number in range(1005):
        host.log.put(change(str(number)))
    with caplog.at_level(logging.WARNING):
        go_on.set()
        assert seen.get(timeout=PATIENCE_S) == change("5")
    assert "5 changes were missed" in caplog.text
