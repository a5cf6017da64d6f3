"""Gates, admissions, workers, deadlines and cleanup, without Ray. No test waits for time to pass."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from raytorchrpc.calls.scope import HELD, Limit, Scope, allow_calls, current_scope, keep_admission, wait_serving
from raytorchrpc.calls.server import gates as execution
from raytorchrpc.calls.server.gates import Admission, Gate
from raytorchrpc.process.workers import DeferredCleanup, Workers
from tests.polling import wait_until
from tests.threads import in_thread
from tests.unit.callees import Deadlines

PATIENCE_S = 10.0


class Waiting:
    """A call under way, ended by the test."""

    def __init__(self) -> None:
        self._done, self.watched = threading.Event(), threading.Event()
        self.finish = self._done.set

    def wait(self, timeout_s: float) -> bool:
        self.watched.set()
        return self._done.wait(timeout_s)


class Method:
    """A job whose work the test does by hand, in the order it was admitted."""

    deadline = None

    def __init__(self, log: list[str], name: str, path: tuple[str, ...] = ()) -> None:
        self.log, self.label, self.path = log, name, path
        self.admission: Admission | None = None
        self.spawned = False

    def admit(self, admission: Admission, *, inside: bool = False) -> bool:
        assert not inside, "no event loop here"
        self.admission = admission
        self.log.append(self.label)
        return True

    def spawn(self) -> None:
        self.spawned = True

    def refuse(self, error: Exception) -> None:
        raise error

    def leave(self) -> None:
        assert self.admission is not None
        self.admission.leave()


# --- the gate ------------------------------------------------------------------------------------------------


def test_threads_that_enter_and_jobs_share_one_line() -> None:
    log: list[str] = []
    gate = Gate(1)
    first = gate.enter()
    assert first.owner == threading.get_ident()
    assert gate.enter_now() is None
    second = Method(log, "second")
    assert not gate.request(second)
    entered = threading.Event()

    def third() -> Admission:
        admission = gate.enter()
        entered.set()
        return admission

    join = in_thread(third)
    fourth = Method(log, "fourth")
    while len(gate._queue) < 2:  # the thread has taken its place in the line
        time.sleep(0)
    assert not gate.request(fourth)

    first.leave()
    assert log == ["second"] and not entered.is_set()
    second.leave()
    admission = join()
    assert log == ["second"] and admission.owner not in (None, threading.get_ident())
    admission.leave()
    assert log == ["second", "fourth"]


def test_ray_enters_a_named_group_beyond_its_limit_and_waits_only_for_direct_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log: list[str] = []
    gate = Gate(1, named="io")
    admissions = [gate.enter_now() for _ in range(2)]  # Ray's group is wider than what was declared
    direct, second = Method(log, "direct"), Method(log, "second")
    assert not gate.request(direct) and not gate.request(second)
    third = gate.enter_now()
    [warning] = caplog.messages
    assert warning.startswith("Ray runs 2 methods of concurrency group 'io' at a time here, and 1 is declared")
    for admission in (*admissions, third):
        assert admission is not None and log == []
        admission.leave()
    assert log == ["direct"] and gate.enter_now() is None
    met = threading.Barrier(2)

    def meet() -> None:
        admission = gate.enter()
        met.wait(PATIENCE_S)  # the two that Ray runs at once may wait for each other
        admission.leave()

    joins = [in_thread(meet) for _ in range(2)]
    while len(gate._queue) < 3:
        time.sleep(0)
    direct.leave()
    assert log == ["direct", "second"] and len(gate._queue) == 2
    second.leave()
    for join in joins:
        join()
    assert gate.request(Method(log, "last"))


def test_a_declared_limit_holds_for_direct_calls_and_rays_together() -> None:
    log: list[str] = []
    gate = Gate(2, named="io")
    first, second, third = (Method(log, str(number)) for number in range(3))
    assert gate.request(first)
    through_ray = gate.enter_now()
    assert through_ray is not None and not gate.request(second) and gate.enter_now() is None
    through_ray.leave()
    assert log == ["0", "1"] and not gate.request(third) and gate.enter_now() is None
    first.leave()
    assert log == ["0", "1", "2"]


def test_calls_of_the_next_group_are_reviewed_though_the_last_one_ended_while_calls_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(execution, "SLOW_S", 0.02)
    gate, refused = Gate(1), threading.Event()
    gate.enter()
    for name in ("first", "second"):
        deadlines, method = execution.Deadlines(), Method([], name)
        method.deadline, method.refuse = time.monotonic() + 0.05, lambda _: refused.set()  # type: ignore[assignment,method-assign]
        assert not gate.request(method)
        gate.watch(method, deadlines)
        if name == "first":
            deadlines.stop()
            time.sleep(0.1)
    assert refused.wait(PATIENCE_S)
    deadlines.stop()


# --- monitors --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sync actor", "threaded actor"])
def admission(request: pytest.FixtureRequest) -> Iterator[Admission]:
    """This thread runs a method, in the monitor of a sync actor, or in one of two admissions of a threaded one."""
    gate = Gate(1, lends=True, token="actor") if request.param == "sync actor" else Gate(2)
    admission = gate.enter("first")
    before = current_scope.set(Scope((admission.token,), None, admission))
    yield admission
    current_scope.reset(before)


def come_back(admission: Admission, method: Method) -> None:
    """The method is called by a call of the admission's chain."""
    method.path = (admission.token,)
    admission.gate.request(method)


def test_others_run_in_order_while_a_method_waits_and_it_goes_on_after_them(admission: Admission) -> None:
    log: list[str] = []
    waiting = Waiting()
    methods = [Method(log, str(number)) for number in range(3)]
    for method in methods:
        come_back(admission, method)
    assert log == []  # it runs

    def others() -> None:
        assert waiting.watched.wait(PATIENCE_S)
        assert log == ["0"] and methods[0].spawned
        waiting.finish()
        for method in methods:
            log.append(f"end of {method.label}")
            method.leave()

    join = in_thread(others)
    assert wait_serving(waiting, PATIENCE_S)
    assert log == ["0", "end of 0", "1", "end of 1", "2", "end of 2"]
    assert admission.state is HELD and admission.owner == threading.get_ident()
    join()


def test_a_method_that_waits_in_turn_lets_the_one_before_go_on(admission: Admission) -> None:
    """Unlike on one stack: the first needs not wait for what the second waits for."""
    log: list[str] = []
    first, second, inner = Waiting(), Waiting(), Method(log, "inner")

    def run_inner() -> None:
        assert first.watched.wait(PATIENCE_S)
        come_back(admission, inner)
        assert inner.admission is not None
        inner.admission.owner = threading.get_ident()
        current_scope.set(Scope(inner.path, None, inner.admission))
        first.finish()
        assert wait_serving(second, PATIENCE_S)
        log.append("inner goes on")
        inner.leave()

    join = in_thread(run_inner)
    assert wait_serving(first, PATIENCE_S)
    log.append("outer goes on")
    second.finish()
    with allow_calls():
        join()
    assert log == ["inner", "outer goes on", "inner goes on"]


def test_a_strange_call_may_run_while_a_sync_actors_method_waits_and_in_no_ones_place_elsewhere() -> None:
    log: list[str] = []
    for gate, expected in ((Gate(1, lends=True, token="actor"), ["stranger"]), (Gate(1), [])):
        admission = gate.enter()
        stranger = Method(log, "stranger")
        assert not gate.request(stranger)
        admission.lend()
        assert log == expected
        if stranger.admission:
            stranger.leave()
        admission.regain()
        log.clear()


def test_only_so_many_methods_of_a_sync_actor_wait_and_chains_still_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "MOST_LENT", 3)
    log: list[str] = []
    gate = Gate(1, lends=True, token="actor")
    waiting: list[Admission] = []
    for number in range(3):
        waiting.append(gate.enter(str(number)))
        waiting[-1].lend()
    late, back = Method(log, "late"), Method(log, "back", ("actor",))
    assert not gate.request(late) and gate.request(back)
    assert log == ["back"]
    back.leave()
    waiting[0].regain()
    assert log == ["back"]
    waiting[0].leave()
    assert log == ["back", "late"] and late.spawned


def test_a_wait_that_runs_out_says_so_and_can_be_repeated(admission: Admission) -> None:
    waiting = Waiting()
    assert not wait_serving(waiting, 0.01)
    assert admission.state is HELD
    waiting.finish()
    assert wait_serving(waiting, 0.0)


def test_an_admission_that_is_given_up_leaves_what_came_back_to_the_line(admission: Admission) -> None:
    log: list[str] = []
    gate = admission.gate
    stranger = Method(log, "stranger")
    if not gate.lends:
        assert gate.request(stranger)  # the other admission of the threaded actor
        log.clear()
    left = [Method(log, "left 1"), Method(log, "left 2")]
    for method in left:
        come_back(admission, method)
    admission.leave()
    assert log == ["left 1"]  # with an admission of its own
    left[0].leave()
    assert log == ["left 1", "left 2"]
    left[1].leave()
    assert gate.enter_now() is not None


def test_a_method_that_outlives_the_one_whose_chain_it_came_with_goes_on() -> None:
    gate, log = Gate(1), list[str]()
    outer = gate.enter()
    outer.lend()
    inner = Method(log, "inner")
    come_back(outer, inner)
    assert inner.admission is not None
    inner.admission.lend()
    outer.regain()
    join = in_thread(inner.admission.regain)
    outer.leave()
    join()
    inner.leave()
    assert gate.enter_now() is not None


class Broken(BaseException):
    """What a signal handler raises."""


@pytest.mark.parametrize("breaks", ["lend", "queueing", "queued"])
def test_an_admission_whose_wait_a_handler_breaks_off_is_given_up_once(
    admission: Admission, breaks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, log = admission.gate, list[str]()
    gate.enter_now()  # the other admission of the threaded actor
    inner = Method(log, "inner")
    come_back(admission, inner)

    def raise_there(*_: Any) -> None:
        raise Broken

    def queue_and_raise(waiter: Any, back: Admission) -> None:
        queue_up(waiter, back)
        raise Broken

    with monkeypatch.context() as patch:
        if breaks == "lend":
            patch.setattr(Method, "spawn", raise_there)
        else:
            admission.lend()
            assert admission.monitor is not None
            queue_up = admission.monitor._queue_up
            patch.setattr(Gate, "_queue_up", staticmethod(raise_there if breaks == "queueing" else queue_and_raise))
        with pytest.raises(Broken):
            admission.lend() if breaks == "lend" else admission.regain()
    admission.leave()
    inner.leave()
    stranger = Method(log, "stranger")
    assert gate.request(stranger) and not gate.request(Method(log, "next")) and gate.enter_now() is None
    stranger.leave()
    assert log == ["inner", "stranger", "next"]
    assert (gate._lent, gate._running) == (0, 1 if gate.lends else 2)


def test_another_thread_in_a_copy_of_the_context_does_not_lend_the_admission(admission: Admission) -> None:
    waiting = Waiting()
    join = in_thread(partial(contextvars.copy_context().run, wait_serving, waiting, PATIENCE_S))
    assert waiting.watched.wait(PATIENCE_S)
    log: list[str] = []
    come_back(admission, Method(log, "mine"))
    waiting.finish()
    assert join()
    assert log == []  # only the thread of the method may let it in


def test_an_operation_may_keep_its_admission_while_it_waits(admission: Admission) -> None:
    log: list[str] = []
    waiting = Waiting()
    method = Method(log, "other")
    come_back(admission, method)
    waiting.finish()
    with keep_admission() as lending:
        assert wait_serving(waiting, PATIENCE_S)
        assert log == []
        release = in_thread(lambda: _leave_when_admitted(method))
        assert lending(wait_serving)(waiting, PATIENCE_S)
        release()
    assert log == ["other"] and admission.state is HELD


def _leave_when_admitted(method: Method) -> None:
    until = time.monotonic() + PATIENCE_S
    while method.admission is None and time.monotonic() < until:
        time.sleep(0)
    method.leave()


# --- scopes --------------------------------------------------------------------------------------------------


def test_a_deadline_is_void_once_its_call_is_over() -> None:
    limit = Limit(time.monotonic() + 5)
    scope = Scope(("a",), limit)
    inherited = scope._replace(admission=None)
    assert scope.deadline == inherited.deadline == limit.at
    limit.over = True
    assert scope.deadline is None and inherited.deadline is None
    assert Scope().deadline is None


# --- event loops ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["waiting", "admitted", "after its turn was set"])
def test_a_cancelled_coroutine_leaves_its_seat_to_the_next(when: str) -> None:
    async def main() -> None:
        gate = Gate(1)
        first = await gate.enter_on_loop()
        task = asyncio.create_task(gate.enter_on_loop())
        await asyncio.sleep(0)
        if when == "waiting":
            task.cancel()
            await asyncio.sleep(0)
            first.leave()
        elif when == "admitted":
            first.leave()
            task.cancel()
        else:
            first.leave()
            asyncio.get_running_loop().call_soon(task.cancel)  # between its turn and its next step
        with pytest.raises(asyncio.CancelledError):
            await task
        last = await asyncio.wait_for(gate.enter_on_loop(), PATIENCE_S)
        last.leave()

    asyncio.run(main())


# --- workers -------------------------------------------------------------------------------------------------


def worker_threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    workers = Workers(request.node.name, limit=4)
    yield workers
    workers.stop()
    for thread in worker_threads(request.node.name):
        thread.join(PATIENCE_S)
    assert worker_threads(request.node.name) == []


def test_workers_grow_to_what_runs_at_once_up_to_their_limit(workers: Workers, request: pytest.FixtureRequest) -> None:
    running: queue.SimpleQueue[int] = queue.SimpleQueue()
    go = threading.Event()

    def work(number: int) -> None:
        running.put(number)
        go.wait(PATIENCE_S)

    for number in range(6):
        workers.submit(work, number)
    assert sorted(running.get(timeout=PATIENCE_S) for _ in range(4)) == [0, 1, 2, 3]
    assert len(worker_threads(request.node.name)) == 4
    assert running.empty()
    go.set()
    assert sorted(running.get(timeout=PATIENCE_S) for _ in range(2)) == [4, 5]


class ComesBack:
    """What holds the workers waits for it."""

    may_not_wait = True

    def __init__(self) -> None:
        self.ran = threading.Event()

    def work(self) -> None:
        self.ran.set()


def test_what_may_not_wait_runs_though_all_workers_are_busy_and_others_are_in_line(workers: Workers) -> None:
    urgent, after = ComesBack(), threading.Event()
    for _ in range(4):
        workers.submit(lambda: urgent.ran.wait(PATIENCE_S))
    workers.submit(after.set)
    workers.submit(urgent.work)
    assert urgent.ran.wait(PATIENCE_S)
    assert after.wait(PATIENCE_S)


def test_an_idle_worker_is_used_again(workers: Workers, request: pytest.FixtureRequest) -> None:
    idents: queue.SimpleQueue[int] = queue.SimpleQueue()
    seen = set()
    for _ in range(50):
        workers.submit(lambda: idents.put(threading.get_ident()))
        seen.add(idents.get(timeout=PATIENCE_S))
        assert wait_until(lambda: workers._idle == 1, PATIENCE_S), "it has come back"
    assert len(seen) == 1
    assert all(thread.daemon for thread in worker_threads(request.node.name))


def test_workers_without_work_end_and_new_ones_come_when_needed(request: pytest.FixtureRequest) -> None:
    workers = Workers(request.node.name, limit=4, idle_s=0.05)
    for _ in range(3):
        everybody = threading.Barrier(5)
        for _ in range(4):
            workers.submit(everybody.wait, PATIENCE_S)
        everybody.wait(PATIENCE_S)  # so four ran at once
        for thread in worker_threads(request.node.name):
            thread.join(PATIENCE_S)
        assert worker_threads(request.node.name) == []
    workers.stop()


def test_no_task_is_lost_while_idle_workers_end() -> None:
    workers = Workers("coming and going", limit=2, idle_s=0.0)  # each ends as soon as it finds nothing
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(200):
        workers.submit(done.put, number)
        if number % 3 == 0:
            assert done.get(timeout=PATIENCE_S) >= 0
    assert all(done.get(timeout=PATIENCE_S) >= 0 for _ in range(200 - 67))
    workers.stop()


def test_an_idle_worker_keeps_nothing_of_its_task(workers: Workers) -> None:
    class Large:
        pass

    gone = threading.Event()
    large = Large()
    weakref.finalize(large, gone.set)
    workers.submit(lambda it: None, large)
    del large
    assert gone.wait(PATIENCE_S)


def test_stopped_workers_do_what_was_submitted_before_and_after() -> None:
    """A method that waits for its turn while the group ends holds an admission: it must run, to give it back."""
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    go = threading.Event()
    workers = Workers("late-test", limit=1)
    workers.submit(go.wait, PATIENCE_S)
    workers.submit(done.put, "before")
    workers.stop()
    workers.stop()
    workers.submit(done.put, "after")
    assert done.get(timeout=PATIENCE_S) == "after"
    go.set()
    assert done.get(timeout=PATIENCE_S) == "before"
    for thread in worker_threads("late-test"):
        thread.join(PATIENCE_S)
    assert worker_threads("late-test") == []


# --- deadlines --------------------------------------------------------------------------------------------------


@contextmanager
def held_up(deadlines: Deadlines) -> Iterator[None]:
    """No alarm goes off within: the thread is busy with one."""
    busy, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        go_on.wait(PATIENCE_S)

    deadlines.at(time.monotonic(), hold)
    assert busy.wait(PATIENCE_S)
    yield
    go_on.set()


def test_alarms_go_off_in_order_of_time_and_not_before(deadlines: Deadlines) -> None:
    went: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()
    with held_up(deadlines):
        start = time.monotonic()
        for name, after in (("last", 0.06), ("first", 0.02), ("middle", 0.04)):
            deadlines.at(start + after, lambda name=name: went.put((name, time.monotonic() - start)))
    order = [went.get(timeout=PATIENCE_S) for _ in range(3)]
    assert [name for name, _ in order] == ["first", "middle", "last"]
    assert all(late >= after for (_, late), after in zip(order, (0.02, 0.04, 0.06), strict=True))


def test_a_cancelled_alarm_stays_silent_and_lets_go_of_its_callback(deadlines: Deadlines) -> None:
    went: queue.SimpleQueue[str] = queue.SimpleQueue()
    callback = went.put

    def held() -> None:
        callback("cancelled")

    alive = weakref.ref(held)
    with held_up(deadlines):
        cancel = deadlines.at(time.monotonic() + 0.02, held)
        cancel()
        cancel()
        del held
        assert alive() is None
        deadlines.at(time.monotonic() + 0.03, lambda: went.put("kept"))
    assert went.get(timeout=PATIENCE_S) == "kept"
    assert went.empty()


def test_thousands_of_cancelled_alarms_do_not_pile_up(deadlines: Deadlines) -> None:
    for _ in range(5000):
        deadlines.at(time.monotonic() + 60, lambda: None)()
    assert len(deadlines._clock._heap) < 200
    assert sys.getsizeof(deadlines._clock._heap) < 10_000


def test_stopped_alarms_are_silent_and_those_of_others_are_not(deadlines: Deadlines) -> None:
    stopped, went = Deadlines(), queue.SimpleQueue[str]()

    def held() -> None:
        went.put("stopped before")

    alive = weakref.ref(held)
    with held_up(deadlines):
        stopped.at(time.monotonic(), held)
        del held
        stopped.stop()
        assert alive() is None
        stopped.at(time.monotonic(), lambda: went.put("stopped"))
        deadlines.at(time.monotonic() + 0.01, lambda: went.put("another's"))
    assert went.get(timeout=PATIENCE_S) == "another's" and went.empty()


# --- cleanup -----------------------------------------------------------------------------------------------


class Dying:
    """Leaves something to be done."""

    def __init__(self, cleanup: DeferredCleanup, done: queue.SimpleQueue[str]) -> None:
        self._leftovers, self._done = cleanup, done

    def __del__(self) -> None:
        self._leftovers.leave(self._done.put, threading.current_thread().name)


def test_what_finalizers_leave_is_done_by_another_thread_until_the_end(caplog: pytest.LogCaptureFixture) -> None:
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    cleanup = DeferredCleanup()
    Dying(cleanup, done)
    assert done.get(timeout=PATIENCE_S) == threading.current_thread().name
    cleanup.leave(lambda: 1 / 0)
    cleanup.leave(done.put, "after one that failed")
    assert done.get(timeout=PATIENCE_S) == "after one that failed"
    assert "cleanup left by a finalizer failed" in caplog.text
    cleanup.stop()
    Dying(cleanup, done)
    assert done.empty()
