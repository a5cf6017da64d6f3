"""Gates, admissions, workers, deadlines and cleanup, without Ray. No test waits for time to pass."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raytorchrpc.calls import event_loops
from raytorchrpc.calls import gates as execution
from raytorchrpc.calls.gates import Admission, Gate, Work
from raytorchrpc.calls.scope import Limit, Scope, current_scope
from raytorchrpc.calls.waiting import wait_serving
from raytorchrpc.errors import RayTorchRpcError
from raytorchrpc.process.deadlines import Deadlines
from raytorchrpc.process.deferred_cleanup import DeferredCleanup
from raytorchrpc.process.workers import Workers

PATIENCE_S = 10.0


class Waiting:
    """A call under way, ended by the test."""

    def __init__(self, loop_token: str | None = None) -> None:
        self.loop_token = loop_token
        self._done = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self.watched = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        self.watched.set()
        return self._done.wait(timeout_s)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)
        self.watched.set()
        if self._done.is_set():
            callback()

    def finish(self) -> None:
        self._done.set()
        for callback in self._callbacks:
            callback()


class Method:
    """A job whose work the test does by hand, in the order it was admitted."""

    def __init__(self, log: list[str], name: str, inside: Callable[[Admission], None] | None = None) -> None:
        self.log, self.name, self.inside = log, name, inside
        self.admission: Admission | None = None
        self.ran_on: int | None = None

    @property
    def label(self) -> str:
        return self.name

    def admit(self, admission: Admission) -> Work | None:
        self.admission = admission
        self.log.append(self.name)
        return lambda: None

    def spawn(self, work: Work) -> None:
        work()

    def run_inside(self, admission: Admission) -> None:
        self.admission, self.ran_on = admission, threading.get_ident()
        self.log.append(f"{self.name} inside")
        if self.inside is not None:
            self.inside(admission)

    def leave(self) -> None:
        assert self.admission is not None
        self.admission.gate.leave(self.admission)


def on_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """Start it; the result joins, and returns or raises what it did."""
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((function(), None))
        except BaseException as error:
            outcome.put((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> Any:
        value, error = outcome.get(timeout=PATIENCE_S)
        thread.join(PATIENCE_S)
        if error is not None:
            raise error
        return value

    return join


# --- the gate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3])
def test_a_gate_admits_its_limit_and_the_rest_in_the_order_they_came(limit: int) -> None:
    log: list[str] = []
    gate = Gate(limit)
    methods = [Method(log, str(number)) for number in range(6)]
    admitted = [gate.request(method) is not None for method in methods]
    assert admitted == [True] * limit + [False] * (6 - limit)
    for gone, method in enumerate(methods, start=1):
        assert log == [str(number) for number in range(min(6, limit + gone - 1))]
        method.leave()
    assert gate.enter_now() is not None  # all admissions are free again


def test_threads_that_enter_and_jobs_share_one_line() -> None:
    log: list[str] = []
    gate = Gate(1)
    first = gate.enter()
    assert first.owner == threading.get_ident()
    assert gate.enter_now() is None
    second = Method(log, "second")
    assert gate.request(second) is None
    entered = threading.Event()

    def third() -> Admission:
        admission = gate.enter()
        entered.set()
        return admission

    join = on_thread(third)
    fourth = Method(log, "fourth")
    while len(gate._queue) < 2:  # the thread has taken its place in the line
        time.sleep(0)
    assert gate.request(fourth) is None

    gate.leave(first)
    assert log == ["second"] and not entered.is_set()
    second.leave()
    admission = join()
    assert log == ["second"] and admission.owner not in (None, threading.get_ident())
    gate.leave(admission)
    assert log == ["second", "fourth"]


def test_pass_on_gives_the_next_in_line_to_the_same_thread() -> None:
    log: list[str] = []
    gate = Gate(1)
    first, second = Method(log, "first"), Method(log, "second")
    gate.request(first)
    gate.request(second)
    assert first.admission is not None
    following = gate.pass_on(first.admission)
    assert following is not None and following[0] is second
    assert second.admission is not None and second.admission is not first.admission
    assert gate.pass_on(second.admission) is None


def test_a_chain_finds_the_seat_it_holds_and_no_other() -> None:
    gate, other = Gate(2), Gate(1)
    mine, its = gate.enter(), gate.enter()
    elsewhere = other.enter()
    assert gate.held((elsewhere.token, mine.token)) is mine
    assert gate.held((mine.token, its.token)) is its  # the latest
    assert gate.held((elsewhere.token,)) is None
    assert mine.taken
    gate.leave(mine)
    assert gate.held((mine.token,)) is None
    assert not mine.taken


def test_tokens_are_never_used_twice() -> None:
    gates = [Gate(1) for _ in range(3)]
    tokens = []
    for gate in gates * 10:
        admission = gate.enter()
        tokens.append(admission.token)
        gate.leave(admission)
    assert len(set(tokens)) == 30


# --- coming back to an admission -----------------------------------------------------------------------------------


@pytest.fixture
def admission() -> Iterator[Admission]:
    """This thread runs a method in a gate of one."""
    gate = Gate(1)
    admission = gate.enter()
    before = current_scope.set(Scope((admission.token,), None, admission))
    yield admission
    current_scope.reset(before)


def test_what_comes_back_runs_on_the_thread_that_waits_in_order(admission: Admission) -> None:
    log: list[str] = []
    waiting = Waiting()
    methods = [Method(log, str(number)) for number in range(3)]
    methods[2].inside = lambda _: waiting.finish()

    def come_back() -> None:
        for method in methods:
            assert admission.gate.post(admission, method)

    join = on_thread(come_back)
    assert wait_serving(waiting, PATIENCE_S)
    join()
    assert log == ["0 inside", "1 inside", "2 inside"]
    assert {method.ran_on for method in methods} == {threading.get_ident()}
    assert {method.admission for method in methods} == {admission}


def test_what_came_back_early_runs_when_the_method_first_waits(admission: Admission) -> None:
    log: list[str] = []
    waiting = Waiting()
    admission.gate.post(admission, Method(log, "early", lambda _: waiting.finish()))
    assert log == []
    assert wait_serving(waiting, PATIENCE_S)
    assert log == ["early inside"]


def test_a_wait_inside_a_wait(admission: Admission) -> None:
    log: list[str] = []
    outer, inner = Waiting(), Waiting()

    def wait_again(_: Admission) -> None:
        admission.gate.post(admission, Method(log, "second", lambda _: inner.finish()))
        assert wait_serving(inner, PATIENCE_S)
        log.append("first goes on")
        outer.finish()

    admission.gate.post(admission, Method(log, "first", wait_again))
    assert wait_serving(outer, PATIENCE_S)
    assert log == ["first inside", "second inside", "first goes on"]


def _descend(admission: Admission, log: list[str], depth: int) -> Waiting:
    """What comes back, and what comes back to that, so deep; ends from the innermost outwards."""
    waiting = Waiting()

    def inside(_: Admission) -> None:
        if depth > 1:
            inner = _descend(admission, log, depth - 1)
            assert wait_serving(inner, PATIENCE_S)
        waiting.finish()

    admission.gate.post(admission, Method(log, str(depth), inside))
    return waiting


def test_what_comes_back_a_thousand_times_finds_stack_to_run_on(admission: Admission) -> None:
    log: list[str] = []
    assert wait_serving(_descend(admission, log, 1000), PATIENCE_S)
    assert log == [f"{depth} inside" for depth in range(1000, 0, -1)]
    assert (admission.owner, admission.nested) == (threading.get_ident(), 0)
    assert wait_serving(_descend(admission, log, 1), PATIENCE_S), "and the admission is this thread's again"


def test_what_comes_back_without_an_end_is_refused(admission: Admission, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "MOST_NESTED", 20)
    log: list[str] = []
    refused: list[str] = []

    def again(_: Admission) -> None:
        waiting = Waiting()
        try:
            admission.gate.post(admission, Method(log, "again", lambda _: (again(admission), waiting.finish())[1]))
        except RayTorchRpcError as error:
            refused.append(str(error))
        else:
            assert wait_serving(waiting, PATIENCE_S)

    again(admission)
    assert len(log) == 20 and admission.nested == 0
    assert [text[: text.index(":")] for text in refused] == ["again was not called"]
    assert "come back to that actor 20 times" in refused[0]


def test_a_wait_that_runs_out_says_so_and_can_be_repeated(admission: Admission) -> None:
    waiting = Waiting()
    assert not wait_serving(waiting, 0.01)
    waiting.finish()
    assert wait_serving(waiting, 0.0)


def test_a_seat_that_is_given_up_hands_what_nobody_ran_to_the_line(admission: Admission) -> None:
    log: list[str] = []
    gate = admission.gate
    left = [Method(log, "left 1"), Method(log, "left 2")]
    for method in left:
        assert gate.post(admission, method)
    gate.leave(admission)
    assert log == ["left 1"]  # one at a time, with an admission of its own
    left[0].leave()
    assert log == ["left 1", "left 2"]
    assert not gate.post(admission, Method(log, "too late"))
    left[1].leave()
    assert gate.enter_now() is not None


def test_another_thread_in_a_copy_of_the_context_does_not_take_the_seat_for_its_own(admission: Admission) -> None:
    import contextvars

    log: list[str] = []
    waiting = Waiting()
    context = contextvars.copy_context()
    join = on_thread(lambda: context.run(wait_serving, waiting, PATIENCE_S))
    assert waiting.watched.wait(PATIENCE_S)
    admission.gate.post(admission, Method(log, "mine"))
    waiting.finish()
    assert join()
    assert log == []  # only the thread of the method may run it


# --- scopes --------------------------------------------------------------------------------------------------


def test_a_deadline_is_void_once_its_call_is_over() -> None:
    limit = Limit(time.monotonic() + 5)
    scope = Scope(("a",), limit)
    inherited = scope._replace(admission=None)
    assert scope.deadline == inherited.deadline == limit.at
    limit.over = True
    assert scope.deadline is None and inherited.deadline is None
    assert Scope().deadline is None


def test_a_scope_inside_a_seat_keeps_the_chain_and_the_limit() -> None:
    gate = Gate(2)
    first, second = gate.enter(), gate.enter()
    limit = Limit(1.0)
    inside = Scope((), limit).inside(first).inside(second)
    assert inside.path == (first.token, second.token)
    assert inside.limit is limit and inside.admission is second
    again = inside.inside(first)
    assert again.path == inside.path and again.admission is first


# --- event loops ---------------------------------------------------------------------------------------------


def test_coroutines_wait_for_their_turn_without_stopping_the_loop() -> None:
    async def main() -> list[str]:
        gate, log = Gate(1), []

        async def enter(name: str) -> Admission:
            admission = await gate.enter_on_loop()
            log.append(name)
            return admission

        first = await enter("first")
        tasks = [asyncio.create_task(enter(name)) for name in ("second", "third")]
        await asyncio.sleep(0)
        assert log == ["first"] and first.owner is None
        gate.leave(first)
        gate.leave(await tasks[0])
        gate.leave(await tasks[1])
        return log

    assert asyncio.run(main()) == ["first", "second", "third"]


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
            gate.leave(first)
        elif when == "admitted":
            gate.leave(first)
            task.cancel()
        else:
            gate.leave(first)
            asyncio.get_running_loop().call_soon(task.cancel)  # between its turn and its next step
        with pytest.raises(asyncio.CancelledError):
            await task
        last = await asyncio.wait_for(gate.enter_on_loop(), PATIENCE_S)
        gate.leave(last)

    asyncio.run(main())


@pytest.mark.parametrize("early", [True, False])
def test_a_loop_that_stands_still_for_a_call_refuses_what_that_call_brings_back(early: bool) -> None:
    async def main() -> list[str]:
        log: list[str] = []
        loop = asyncio.get_running_loop()
        mine, other = event_loops.token_on_loop(), event_loops.token_on_loop()
        assert mine and other and mine != other
        waiting = Waiting(mine)

        def start(name: str, *path: str) -> None:
            def refuse() -> None:
                log.append(f"{name} refused")
                waiting.finish()

            event_loops.start_on_loop(loop, path, lambda: log.append(f"{name} started"), refuse)

        start("of another chain", other)
        start("of no chain")
        if early:
            start("mine", "x", mine)  # before this thread waits
            assert wait_serving(waiting, PATIENCE_S)
        else:
            join = on_thread(lambda: waiting.watched.wait(PATIENCE_S) and start("mine", mine, "x"))
            assert wait_serving(waiting, PATIENCE_S)
            join()
        await asyncio.sleep(0)
        start("later", mine)  # nobody stands still any more
        await asyncio.sleep(0)
        return log

    order = ["mine refused", "of another chain started", "of no chain started", "later started"]
    assert asyncio.run(main()) == order


def test_a_thread_without_a_loop_needs_no_token() -> None:
    assert event_loops.token_on_loop() is None


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
    assert [running.get(timeout=PATIENCE_S) for _ in range(2)] == [4, 5]


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
        with workers._lock:
            pass  # it may have to come back to the queue first
    assert len(seen) <= 2
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
    for number in range(2000):
        workers.submit(done.put, number)
        if number % 3 == 0:
            assert done.get(timeout=PATIENCE_S) >= 0
    assert all(done.get(timeout=PATIENCE_S) >= 0 for _ in range(2000 - 667))
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


@pytest.fixture
def deadlines(request: pytest.FixtureRequest) -> Iterator[Deadlines]:
    deadlines = Deadlines(request.node.name)
    yield deadlines
    deadlines.stop()
    for thread in worker_threads(request.node.name):
        thread.join(PATIENCE_S)
    assert worker_threads(request.node.name) == []


def test_alarms_go_off_in_order_of_time_and_not_before(deadlines: Deadlines) -> None:
    went: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()
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
    assert len(deadlines._heap) < 200
    assert sys.getsizeof(deadlines._heap) < 10_000


def test_stopped_alarms_are_silent() -> None:
    deadlines = Deadlines("stopped-deadlines")
    deadlines.at(time.monotonic() + 60, lambda: None)
    (thread,) = worker_threads("stopped-deadlines")
    deadlines.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    deadlines.at(time.monotonic(), lambda: pytest.fail("it was stopped"))


# --- cleanup -----------------------------------------------------------------------------------------------


class Dying:
    """Leaves something to be done."""

    def __init__(self, cleanup: DeferredCleanup, done: queue.SimpleQueue[str]) -> None:
        self._leftovers, self._done = cleanup, done

    def __del__(self) -> None:
        self._leftovers.leave(self._done.put, threading.current_thread().name)


def test_what_finalizers_leave_is_done_by_a_thread_of_its_own_until_the_end(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    cleanup = DeferredCleanup(request.node.name)
    Dying(cleanup, done)
    assert done.get(timeout=PATIENCE_S) == threading.current_thread().name
    cleanup.leave(lambda: 1 / 0)
    cleanup.leave(done.put, "after one that failed")
    assert done.get(timeout=PATIENCE_S) == "after one that failed"
    assert "cleanup left by a finalizer failed" in caplog.text
    cleanup.stop()
    for thread in worker_threads(request.node.name):
        thread.join(PATIENCE_S)
    assert worker_threads(request.node.name) == []
    Dying(cleanup, done)
    assert done.empty()
