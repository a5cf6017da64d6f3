"""Lanes in a process that is short of memory or threads for a moment."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from raytorchrpc.errors import PeerLost, RpcTimeout
from raytorchrpc.lanes.base import Message, Pending
from raytorchrpc.lanes.common import frames
from raytorchrpc.lanes.shm.lane import Copier
from raytorchrpc.process import threads
from raytorchrpc.process.workers import Workers
from tests.conformance.peers import EMPTY, Node, answer
from tests.conformance.test_idle_connections import in_thread, spied_connects
from tests.polling import wait_until
from tests.shortage import NO_MEMORY, Failing, Shortage, shortage

__all__ = ["shortage"]

PATIENCE_S = 10.0

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


def test_new_connections_outlast_a_moment_without_threads(pair: Pair, shortage: Shortage) -> None:
    """Those of the socket lane need none. Those of nng do, and are tried again until there is one."""
    begun, attempts = threading.Event(), spied_connects(pair.a)
    asked = in_thread(lambda: begun.wait() and pair.ask())
    shortage.begin()
    begun.set()
    if "socket" in pair.a.kind:
        assert asked(PATIENCE_S).header == ("echo",) and len(attempts) == 1
    else:
        assert wait_until(lambda: len(attempts) > 3, PATIENCE_S)
        shortage.end()
        assert asked(PATIENCE_S).header == ("echo",)


def test_who_has_no_memory_for_a_message_is_still_in_step(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The large one costs neither those before it nor those behind it, and whoever sent it can be told its size."""
    pair.ask()
    numpy_empty = numpy.empty

    def empty(size: Any, *args: Any) -> numpy.ndarray:
        if not isinstance(size, int) or size < 1 << 20:
            return numpy_empty(size, *args)
        raise MemoryError(NO_MEMORY)

    monkeypatch.setattr(numpy, "empty", empty)
    seen: list[Message] = []
    served = pair.b.serve
    monkeypatch.setattr(pair.b.lane, "_serve", lambda message, reply: (seen.append(message), served(message, reply))[1])
    messages = [Message(("hold",), EMPTY), Message(("echo",), EMPTY._replace(payload=os.urandom(5 << 20)))]
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


def test_a_request_that_could_not_begin_is_in_flight_no_more(unix: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    unix.ask()
    connection = unix.a.lane._made["b"]  # type: ignore[attr-defined]
    fail_once(connection, "_ensure_reader", MemoryError(), monkeypatch)
    with pytest.raises(MemoryError):
        unix.a.lane.call("b", Message(("echo",), EMPTY), PATIENCE_S)
    assert not connection._pending and unix.ask().header == ("echo",)


@pytest.mark.parametrize("step", [10_000, 69_000, 300_000])
def test_a_frame_that_is_skipped_tells_what_it_was(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    message = Message(
        (1, 2, "t", "method", ("x" * 70_000,)), EMPTY._replace(payload=bytes(200_000)), manifests=(("shm",),)
    )
    data = b"".join(bytes(part) for part in frames.pack(frames.REQUEST, 7, message))
    monkeypatch.setattr(numpy, "empty", Failing([MemoryError()], numpy.empty))
    large = frames.LargeFrame(len(data))
    *none, frame = [large.add(memoryview(data)[begin : begin + step]) for begin in range(0, len(data), step)]
    assert frame is not None and not any(none)
    assert (frame.kind, frame.call) == (frames.REQUEST, 7)
    assert (frame.message.header, frame.message.manifests) == (message.header, message.manifests)
    assert frame.message.unread_bytes == len(data)


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
