"""Threads that serve others: what ends their process, and how they take turns with one that runs Python."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raytorchrpc.process import threads
from raytorchrpc.process import workers as shared
from raytorchrpc.process.switch_interval import SwitchInterval
from raytorchrpc.process.threads import ThreadShortage
from raytorchrpc.process.workers import Deadlines, DeferredCleanup, Workers
from tests.programs import run_program
from tests.shortage import Failing, Shortage, shortage

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


def ended(program: str) -> str:
    """What a process writes that ends itself."""
    lines = f"""
import time
from raytorchrpc.process import threads
from raytorchrpc.process.completion import run_reported
from raytorchrpc.process.workers import Deadlines, DeferredCleanup, Workers
{program}"""
    program = run_program("-c", lines)
    assert program.returncode == 1
    return program.stderr


@pytest.mark.parametrize("error", ["MemoryError()", "KeyError('a fault')", "SystemExit()", "OSError(9, 'closed')"])
def test_a_thread_that_others_wait_for_ends_its_process_and_says_why(error: str) -> None:
    said = ended(f"""
def step():
    raise {error}
threads.start(threads.serve, step, "the listener", name="listener")
time.sleep(30)
""")
    name = error.partition("(")[0]
    assert said.count("this process ends, as the listener cannot go on") == 1 and f"cannot go on: {name}" in said
    assert ("Traceback" in said) is (name != "MemoryError")


@pytest.mark.parametrize(
    "give",
    [
        "Workers('test').submit(fail)",
        "Deadlines().at(0.0, fail)",
        "DeferredCleanup().leave(fail)",
        "run_reported(fail)",
    ],
)
def test_a_task_without_memory_ends_the_process_and_any_other_failure_only_the_task(give: str) -> None:
    said = ended(f"""
errors = [KeyError("a fault"), SystemExit("of a user"), MemoryError("no room")]
def fail():
    raise errors.pop(0)
for _ in range(3):
    {give}
    time.sleep(0.2)
time.sleep(30)
""")
    assert said.count("KeyError: 'a fault'") == 1 and said.count("cannot go on: MemoryError: no room") == 1


def test_a_thread_that_nobody_waits_for_goes_on_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    steps = Failing([KeyError("a fault"), OSError(9, "closed")], lambda: False)
    threads.serve(threads.surviving(steps, "the test"), "the test")
    assert steps.errors == [] and "the test goes on after a failure" in caplog.text


# --- workers, deadlines, cleanup, callbacks ------------------------------------------------------------------------


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


def test_a_member_that_cannot_watch_deadlines_is_none(shortage: Shortage) -> None:
    shortage.begin()
    for make, of_process in ((Deadlines, shared._clock), (DeferredCleanup, shared._cleanup)):
        of_process._forget()
        with pytest.raises(ThreadShortage):
            make()


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
