"""Threads that serve others, in a process that is short of memory or threads for a moment."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import contextvars
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raytorchrpc.errors import PeerLost, RpcTimeout
from raytorchrpc.group.changes import Announcer, Change, EventBus
from raytorchrpc.group.roster import GroupState
from raytorchrpc.lanes.base import Message, Pending
from raytorchrpc.lanes.common import frames
from raytorchrpc.lanes.shm.lane import Copier
from raytorchrpc.process import threads
from raytorchrpc.process.threads import ThreadShortage
from raytorchrpc.process.workers import DeferredCleanup, Workers
from tests.conformance.peers import EMPTY, Node, answer
from tests.polling import wait_until
from tests.unit.callees import Deadlines

PATIENCE_S = 10.0


class Shortage:
    """Of threads, or none, in this process. The kernel refuses a thread whose stack is larger than any memory."""

    def begin(self) -> None:
        threading.stack_size(1 << 47)

    def end(self) -> None:
        threading.stack_size(0)


@pytest.fixture
def shortage() -> Iterator[Shortage]:
    one = Shortage()
    yield one
    one.end()


@pytest.fixture(autouse=True)
def nothing_was_reported() -> None:
    threads._reported.clear()


class Failing:
    """Raises these errors, one each time, and then does what it is told."""

    def __init__(self, errors: list[BaseException], then: Callable[..., Any]) -> None:
        self.errors, self.then = errors, then

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return self.then(*args, **kwargs)


# --- starting ------------------------------------------------------------------------------------------------


def test_a_thread_has_its_name_and_keeps_no_process_alive() -> None:
    seen: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    threads.start(lambda: seen.put(threading.current_thread()), name="raytorchrpc-test").join(PATIENCE_S)
    thread = seen.get(timeout=PATIENCE_S)
    assert (thread.name, thread.daemon) == ("raytorchrpc-test", True)


def test_where_no_thread_can_be_started_the_error_names_it_and_the_remedy(shortage: Shortage) -> None:
    shortage.begin()
    with pytest.raises(ThreadShortage, match=r"raytorchrpc-test: can't start new thread; .*pids.max"):
        threads.start(int, name="raytorchrpc-test")
    shortage.end()
    threads.start(int, name="raytorchrpc-test").join(PATIENCE_S)


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


def test_what_a_thread_ends_with_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    threads.start(lambda: 1 / 0, name="raytorchrpc-test").join(PATIENCE_S)
    assert "raytorchrpc-test has ended" in caplog.text
    assert "ZeroDivisionError" in caplog.text


PACKAGE = Path(__file__).parents[3] / "raytorchrpc"
#: What starts a thread. ``asyncio``'s leave what could not be started to be run later, when nobody waits for it.
STARTERS = {
    *("Thread", "ThreadPoolExecutor", "start_new_thread", "start_joinable_thread", "ThreadPool"),
    *("to_thread", "run_in_executor"),
}


def test_no_thread_is_started_anywhere_else() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        # The benchmark's own threads serve no member.
        if path == PACKAGE / "process" / "threads.py" or PACKAGE / "bench" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            name = getattr(called, "attr", None) or getattr(called, "id", None)
            timer = name == "Timer" and isinstance(called, ast.Attribute)  # threading.Timer
            based = [getattr(base, "attr", None) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if name in STARTERS or timer or "Thread" in based:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not found, f"use threads.start: {found}"


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

#: As torch raises it.
NO_MEMORY = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"


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
    steps = iter([False])
    restore = Failing([MemoryError()], int)
    threads.serve(Failing([MemoryError(), MemoryError()], lambda: next(steps)), "the test", restore=restore)
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


@pytest.fixture
def deadlines(request: pytest.FixtureRequest) -> Iterator[Deadlines]:
    deadlines = Deadlines(request.node.name)
    yield deadlines
    deadlines.stop()


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
    workers = Workers(request.node.name, limit=1, keep=True)
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
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


def test_callbacks_hear_of_a_change_once_there_is_memory(request: pytest.FixtureRequest) -> None:
    news = EventBus(request.node.name)
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    news.listen(Failing([MemoryError()], told.put))
    news.listen(told.put)

    thread = news.start()
    for kind in ("lost", "back"):
        news.put(Change(kind, ("a",)))  # type: ignore[arg-type]
    assert [told.get(timeout=PATIENCE_S).kind for _ in range(3)] == ["lost", "back", "back"]
    news.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_copy_needs_no_further_threads(shortage: Shortage) -> None:
    size = (16 << 20) + 3
    source = torch.randint(0, 256, (size,), dtype=torch.uint8)
    for short in (True, False, True):
        copier, target = Copier(4), torch.zeros(size, dtype=torch.uint8)
        if short:
            shortage.begin()
        copier.move(target.data_ptr(), source.data_ptr(), size)
        shortage.end()
        copier.close()
        assert torch.equal(target, source)


def test_a_member_that_could_not_be_resynchronised_is_so_later(shortage: Shortage) -> None:
    """One that missed a change, by a supervisor that cannot start a thread for it."""

    class Roster:
        generation, name = "g", "group"
        records = handles = {"a": object()}  # noqa: RUF012
        table = spec = lambda *_: None

    class ControlConnections:
        def call_all(self, *_: Any) -> Any:
            return {}, {}

    state: Any = GroupState(Roster(), None, {})  # type: ignore[arg-type]
    submitted: queue.SimpleQueue[Any] = queue.SimpleQueue()
    announcer = Announcer(state, ControlConnections(), submitted.put)  # type: ignore[arg-type]
    announcer.mark_behind(["a"])
    shortage.begin()
    with pytest.raises(ThreadShortage):
        announcer.resync_due()
    (due,) = announcer.due()
    assert due < time.monotonic() + 1
    shortage.end()
    threading.Event().wait(max(0.0, due - time.monotonic()))
    announcer.resync_due()
    assert callable(submitted.get(timeout=PATIENCE_S))


# --- lanes -----------------------------------------------------------------------------------------------------------

LANES = ["socket over unix", "socket over tcp", "socket over tls", "nng", "nng over tcp", "nng over tls"]


class Pair:
    """Two members of a lane."""

    def __init__(self, kind: str) -> None:
        self.a, self.b = Node(kind, "a", 0), Node(kind, "b", 1)
        self.a.meet("b", self.b.address)
        self.b.meet("a", self.a.address)

    def ask(self, what: str = "echo", size: int = 0) -> Message:
        """Call from a to b."""
        return self.a.call(what, payload=bytes(size))

    def hold(self) -> Pending:
        """Call from a to b, which has got it but not answered when this returns."""
        pending = self.a.lane.call("b", Message(("hold",), EMPTY), PATIENCE_S)
        assert self.b.arrived.acquire(timeout=PATIENCE_S)
        return pending

    def close(self) -> None:
        self.a.lane.close()
        self.b.lane.close()


@pytest.fixture(params=LANES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.close()


@pytest.fixture
def unix() -> Iterator[Pair]:
    pair = Pair("socket over unix")
    yield pair
    pair.close()


def fail_once(owner: Any, name: str, error: BaseException, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> Failing:
    failing = Failing([error] * times, getattr(owner, name))
    monkeypatch.setattr(owner, name, failing)
    return failing


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError(NO_MEMORY), SystemExit(), KeyError("a fault")], ids=repr)
def test_a_request_that_fails_at_its_listener_is_lost_and_no_later_one(
    pair: Pair, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.ask()
    # More often than there are listeners.
    failing = fail_once(pair.b.lane, "_serve", error, monkeypatch, times=8)
    for _ in range(8):
        with pytest.raises(PeerLost):
            pair.ask()
    assert failing.errors == []
    assert pair.ask().header == ("echo",)


class BrokenEpoll:
    """An epoll set that has nothing to tell any more."""

    def __init__(self, epoll: Any) -> None:
        self._epoll = epoll

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)

    def poll(self, *_: Any) -> Any:
        raise OSError("the epoll set is broken")


@pytest.mark.parametrize("kind", ["socket over unix", "nng"])
def test_a_listener_that_cannot_go_on_ends_its_connections(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the supervisor hears of it, as of any loss."""
    monkeypatch.setattr(threads, "_HOPELESS_S", 0.1)
    pair = Pair(kind)
    try:
        answer(pair.a.lane.call("b", Message(("work",), EMPTY), PATIENCE_S))  # a second listener waits from now on
        pending = pair.hold()
        reader = getattr(pair.b.lane, "_selector", pair.b.lane)
        monkeypatch.setattr(reader, "_epoll", BrokenEpoll(reader._epoll))
        with contextlib.suppress(PeerLost, RpcTimeout):  # wakes those who wait in the kernel
            pair.a.lane.call("b", Message(("echo",), EMPTY), 1)
        with pytest.raises(PeerLost):
            answer(pending)
    finally:
        pair.close()


def test_new_connections_are_heard_after_a_moment_without_threads(pair: Pair, shortage: Shortage) -> None:
    shortage.begin()
    with pytest.raises(PeerLost) as lost:
        pair.ask()
    assert not lost.value.may_have_run
    shortage.end()
    assert pair.ask().header == ("echo",)


def test_who_has_no_memory_for_a_message_is_still_in_step(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The large one costs neither those before it nor those behind it, and whoever sent it can be told its size."""
    pair.ask()
    torch_empty = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        if args[0] == (0,) or not isinstance(args[0], int) or args[0] < 1 << 20:
            return torch_empty(*args, **kwargs)
        raise RuntimeError(NO_MEMORY)

    monkeypatch.setattr(torch, "empty", empty)
    seen: list[Message] = []
    served = pair.b.serve
    monkeypatch.setattr(pair.b.lane, "_serve", lambda message, reply: (seen.append(message), served(message, reply))[1])
    messages = [Message(("hold",), EMPTY), Message(("echo",), EMPTY._replace(payload=bytes(5 << 20)))]
    held, large = [pair.a.lane.call("b", message, PATIENCE_S) for message in messages]
    assert answer(large).header == ("echo",)
    (unread,) = [message for message in seen if message.unread_bytes]
    assert 5 << 20 <= unread.unread_bytes < (5 << 20) + 1000
    assert not unread.body.payload
    # Likewise an answer.
    assert pair.b.arrived.acquire(timeout=PATIENCE_S)
    (reply,) = pair.b.held
    reply(messages[1])
    with pytest.raises(MemoryError, match="no memory for the answer"):
        answer(held)
    assert pair.ask().header == ("echo",)


def test_a_listener_is_found_among_other_threads_if_none_can_be_started(
    shortage: Shortage, request: pytest.FixtureRequest
) -> None:
    """The only listener is busy with a method, and its member hears on as soon as there is a thread at all."""
    pair, workers = Pair("socket over unix"), Workers(request.node.name, keep=True)
    pair.b.lane._spawn = workers.submit  # type: ignore[attr-defined]
    try:
        pair.ask()  # connected
        shortage.begin()
        first = pair.a.lane.call("b", Message(("meet",), EMPTY), PATIENCE_S)
        second = pair.a.lane.call("b", Message(("meet",), EMPTY), PATIENCE_S)
        assert [answer(one).header for one in (first, second)] == [("meet",), ("meet",)]
    finally:
        pair.close()
        workers.stop()


def test_half_a_request_whose_rest_cannot_be_sent_ends_the_connection(unix: Pair, shortage: Shortage) -> None:
    """Or nothing could be sent by it for ever."""
    unix.ask()
    (accepted,) = unix.b.lane._selector.connections.values()  # type: ignore[attr-defined]
    assert wait_until(accepted.acquire_read, PATIENCE_S)  # it stands still
    shortage.begin()
    large = Message(("echo",), EMPTY._replace(payload=bytes(8 << 20)))
    with pytest.raises(PeerLost, match="the rest of it cannot be sent"):
        unix.a.lane.call("b", large, 0.1)
    shortage.end()
    accepted.release_read()
    assert unix.ask().header == ("echo",)


@pytest.mark.parametrize("step", [10_000, 69_000, 300_000])
def test_a_frame_that_is_skipped_tells_what_it_was(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    message = Message(
        (1, 2, "t", "method", ("x" * 70_000,)), EMPTY._replace(payload=bytes(200_000)), manifests=(("shm",),)
    )
    data = b"".join(bytes(part) for part in frames.pack(frames.REQUEST, 7, message))
    monkeypatch.setattr(torch, "empty", Failing([MemoryError()], torch.empty))
    large = frames.LargeFrame(len(data))
    *none, frame = [large.add(memoryview(data)[begin : begin + step]) for begin in range(0, len(data), step)]
    assert frame is not None and not any(none)
    assert (frame.kind, frame.call) == (frames.REQUEST, 7)
    assert (frame.message.header, frame.message.manifests) == (message.header, message.manifests)
    assert frame.message.unread_bytes == len(data)
