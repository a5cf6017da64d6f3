"""Threads that serve others, in a process that is short of memory or threads for a moment, or runs Python."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raytorchrpc.process import threads
from raytorchrpc.process.switch_interval import SwitchInterval
from raytorchrpc.process.threads import ThreadShortage
from raytorchrpc.process.workers import Deadlines, DeferredCleanup, Workers
from tests.shortage import NO_MEMORY, Failing, Shortage, shortage

__all__ = ["shortage"]

PATIENCE_S = 10.0


@pytest.fixture(autouse=True)
def nothing_was_reported() -> None:
    threads._reported.clear()


# --- starting ------------------------------------------------------------------------------------------------


def test_a_thread_has_its_name_or_an_error_that_names_it_and_the_remedy(shortage: Shortage) -> None:
    seen: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    shortage.begin()
    with pytest.raises(ThreadShortage, match=r"raytorchrpc-test: can't start new thread; .*pids.max"):
        threads.start(int, name="raytorchrpc-test")
    shortage.end()
    threads.start(lambda: seen.put(threading.current_thread()), name="raytorchrpc-test").join(PATIENCE_S)
    thread = seen.get(timeout=PATIENCE_S)
    assert (thread.name, thread.daemon) == ("raytorchrpc-test", True)


def test_a_thread_without_memory_for_its_first_line_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would wait for ever for it to begin."""
    ran: list[int] = []
    late: list[threading.Thread] = []

    def begin(boot: Any) -> None:
        late.append(boot._thread)
        raise SystemExit  # as MemoryError does, but silently

    monkeypatch.setattr(threads._Boot, "__call__", begin)
    with pytest.raises(ThreadShortage, match="no memory for it"):
        threads.start(ran.append, 1, name="raytorchrpc-test")
    late[0].run()  # had it begun after all: nobody expects its work any more
    assert ran == []
    # Python counts it as starting for ever; not so this process's other tests.
    threading._limbo.pop(late[0], None)  # type: ignore[attr-defined]


def test_a_thread_waits_no_longer_than_it_asked_for() -> None:
    slack_ns: list[int] = []
    threads.start(lambda: slack_ns.append(ctypes.CDLL(None).prctl(30)), name="punctual").join(30)
    assert slack_ns == [1]


def test_what_a_thread_ends_with_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    threads.start(lambda: 1 / 0, name="raytorchrpc-test").join(PATIENCE_S)
    assert "raytorchrpc-test has ended" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_coroutine_waits_for_a_thread_of_its_own(shortage: Shortage) -> None:
    where = contextvars.ContextVar("where", default="outside")
    ran: list[int] = []

    def work(number: int) -> str:
        ran.append(number)
        if number < 0:
            raise LookupError(number)
        return where.get()

    async def main() -> None:
        where.set("inside")
        assert await threads.in_thread(work, 1) == "inside"
        with pytest.raises(LookupError):
            await threads.in_thread(work, -1)
        shortage.begin()
        with pytest.raises(ThreadShortage):
            await threads.in_thread(work, 2)
        shortage.end()
        assert await threads.in_thread(work, 3) == "inside"

    asyncio.run(main())
    assert ran == [1, -1, 3]


# --- serving -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError(NO_MEMORY), RuntimeError("can't start new thread"), KeyError("a fault"), SystemExit()],
    ids=repr,
)
def test_a_step_that_fails_costs_no_other(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    steps = iter([True, True, False])
    restored: list[int] = []
    threads.serve(Failing([error, error], lambda: next(steps)), "the test", restore=lambda: restored.append(1))
    assert list(steps) == []
    assert len(restored) == 2
    assert caplog.text.count("the test goes on after a failure") == 1


def test_setting_right_may_fail_too() -> None:
    restore = Failing([MemoryError()], int)
    threads.serve(Failing([MemoryError(), MemoryError()], bool), "the test", restore=restore)
    assert restore.errors == []


def test_who_serves_gives_up_only_what_is_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_HOPELESS_S", 0.15)
    gave_up: list[int] = []
    threads.serve(Failing([MemoryError() for _ in range(6)], bool), "the test", give_up=lambda: gave_up.append(1))
    assert gave_up == []  # memory can be had again at any time
    hopeless = Failing([OSError("closed") for _ in range(1000)], bool)
    threads.serve(hopeless, "the test", give_up=lambda: gave_up.append(1))
    assert gave_up == [1]
    assert len(hopeless.errors) > 900  # it does not take a processor meanwhile


# --- workers, deadlines, cleanup, callbacks ------------------------------------------------------------------------


def test_tasks_wait_for_a_thread_that_exists_and_for_new_ones(
    deadlines: Deadlines, shortage: Shortage, request: pytest.FixtureRequest
) -> None:
    workers = Workers(request.node.name, keep=True, deadlines=deadlines)
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    shortage.begin()
    for number in range(5):
        workers.submit(done.put, number)
    assert [done.get(timeout=PATIENCE_S) for _ in range(5)] == list(range(5))
    go = threading.Event()
    workers.submit(lambda: done.put(go.wait(PATIENCE_S)))
    workers.submit(go.set)  # behind it: needs another thread
    assert not go.wait(0.1)
    shortage.end()
    assert done.get(timeout=PATIENCE_S) is True
    workers.stop()


def test_workers_that_have_no_thread_say_so_and_do_it_never(shortage: Shortage, request: Any) -> None:
    workers = Workers(request.node.name)
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    shortage.begin()
    with pytest.raises(ThreadShortage):
        workers.submit(done.put, 1)
    shortage.end()
    workers.submit(done.put, 2)
    assert done.get(timeout=PATIENCE_S) == 2
    workers.stop()
    shortage.begin()
    workers.submit(done.put, 3)  # it holds an admission: it runs in any case
    assert done.get(timeout=PATIENCE_S) == 3


def test_a_task_that_raises_costs_no_other(request: pytest.FixtureRequest) -> None:
    workers, done = Workers(request.node.name, limit=1, keep=True), queue.SimpleQueue[int]()
    for number in range(3):
        workers.submit(Failing([MemoryError()], int))
        workers.submit(done.put, number)
        assert done.get(timeout=PATIENCE_S) == number
    workers.stop()


def test_an_alarm_that_finds_no_memory_goes_off_again(deadlines: Deadlines) -> None:
    went: queue.SimpleQueue[str] = queue.SimpleQueue()
    deadlines.at(time.monotonic(), Failing([MemoryError(), MemoryError()], lambda: went.put("at last")))
    assert went.get(timeout=PATIENCE_S) == "at last"
    deadlines.at(time.monotonic(), Failing([ValueError()], lambda: went.put("a second time")))
    deadlines.at(time.monotonic() + 0.01, lambda: went.put("next"))
    assert went.get(timeout=PATIENCE_S) == "next"
    assert went.empty()


def test_a_member_that_cannot_watch_deadlines_is_none(shortage: Shortage, request: pytest.FixtureRequest) -> None:
    shortage.begin()
    for make in (Deadlines, DeferredCleanup, lambda name: Workers(name, keep=True)):
        with pytest.raises(ThreadShortage):
            make(request.node.name)


def test_what_finalizers_leave_is_done_once_there_is_memory(request: pytest.FixtureRequest) -> None:
    cleanup = DeferredCleanup(request.node.name)
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    cleanup.leave(Failing([MemoryError(), RuntimeError(NO_MEMORY)], done.put), "given back")
    assert done.get(timeout=PATIENCE_S) == "given back"
    cleanup.stop()


# --- the switch interval, short while calls come ---------------------------------------------------------------

OWN, SHORT = 0.005, 0.0005


class Clock(Deadlines):
    """Calls back when the test says that it is time."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        self.due.append(callback)
        return lambda: None

    def pass_lease(self) -> None:
        due, self.due = self.due, []
        for callback in due:
            callback()


@pytest.fixture
def clock() -> Iterator[Clock]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(OWN)
    yield Clock()
    sys.setswitchinterval(before)


def interval() -> float:
    return round(sys.getswitchinterval(), 6)


def call(switch_interval: SwitchInterval) -> None:
    if not switch_interval.used:
        switch_interval.shorten()


def test_it_is_short_from_the_first_call_until_none_has_come_for_a_lease(clock: Clock) -> None:
    switch_interval = SwitchInterval(SHORT, clock)
    assert interval() == OWN
    for _ in range(3):
        call(switch_interval)
        assert interval() == SHORT
        assert len(clock.due) == 1  # however many calls come
        clock.pass_lease()
    assert interval() == SHORT
    clock.pass_lease()
    assert interval() == OWN
    assert not clock.due  # an idle member wakes no thread
    call(switch_interval)
    assert interval() == SHORT


@pytest.mark.parametrize("own", [0.001, 0.0001, 0.02])
def test_an_interval_that_the_program_has_set_is_left_alone(clock: Clock, own: float) -> None:
    sys.setswitchinterval(own)
    switch_interval = SwitchInterval(SHORT, clock)
    call(switch_interval)
    assert interval() == own
    assert not clock.due
    switch_interval.end()
    assert interval() == own


def test_an_interval_that_the_program_sets_while_it_is_short_stays(clock: Clock) -> None:
    switch_interval = SwitchInterval(SHORT, clock)
    call(switch_interval)
    sys.setswitchinterval(0.002)
    clock.pass_lease()
    clock.pass_lease()
    assert interval() == 0.002


def test_its_end_restores_the_interval_for_good(clock: Clock) -> None:
    switch_interval = SwitchInterval(SHORT, clock)
    call(switch_interval)
    switch_interval.end()
    assert interval() == OWN
    clock.pass_lease()
    clock.pass_lease()
    call(switch_interval)
    assert interval() == OWN


def test_a_forked_child_has_the_interval_of_the_program(clock: Clock) -> None:
    switch_interval = SwitchInterval(SHORT, clock)
    call(switch_interval)
    if (child := os.fork()) == 0:
        os._exit(interval() != OWN)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert interval() == SHORT
