"""Lanes in a process without memory for a message, or without a thread for the rest of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from raytorchrpc.errors import PeerLost
from raytorchrpc.lanes.base import Message, Pending
from raytorchrpc.lanes.common import frames
from tests.conformance.peers import EMPTY, Node, answer
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


#: Of the socket lane alone.
by_unix = pytest.mark.parametrize("pair", ["socket over unix"], indirect=True)


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
    with pytest.raises(MemoryError, match=r"no memory for an answer of 52\d+ bytes.*send less at a time"):
        answer(held)
    assert pair.ask().header == ("echo",)


@by_unix
def test_half_a_request_whose_rest_cannot_be_sent_ends_the_connection(pair: Pair, shortage: Shortage) -> None:
    """Or nothing could be sent by it for ever."""
    pair.ask()
    lane: Any = pair.b.lane
    selector = lane.selector
    (accepted,) = selector.of(lane)
    selector.enable(accepted.fd, 0)  # it stands still
    shortage.begin()
    large = Message(("echo",), EMPTY._replace(payload=bytes(8 << 20)))
    with pytest.raises(PeerLost, match="the rest of it cannot be sent"):
        pair.a.lane.call("b", large, 0.1)
    shortage.end()
    selector.enable(accepted.fd)
    assert pair.ask().header == ("echo",)


@pytest.mark.parametrize("error", [KeyError("a fault"), OSError(9, "closed")], ids=repr)
def test_a_request_that_fails_at_its_listener_costs_its_connection(
    pair: Pair, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer cannot end the process."""
    pair.ask()
    failing = Failing([error] * 8, pair.b.lane._serve)  # more often than there are listeners
    monkeypatch.setattr(pair.b.lane, "_serve", failing)
    for _ in range(8):
        with pytest.raises(PeerLost):
            pair.ask()
    assert failing.errors == []
    assert pair.ask().header == ("echo",)


@by_unix
def test_a_request_that_could_not_begin_is_in_flight_no_more(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.ask()
    connection = pair.a.lane._made["b"]  # type: ignore[attr-defined]
    failing = Failing([MemoryError()], connection._ensure_reader)
    monkeypatch.setattr(connection, "_ensure_reader", failing)
    with pytest.raises(MemoryError):
        pair.a.lane.call("b", Message(("echo",), EMPTY), PATIENCE_S)
    assert not connection._pending and pair.ask().header == ("echo",)


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
