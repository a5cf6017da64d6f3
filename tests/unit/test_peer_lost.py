"""What a PeerLost says of the call: whether it may have run, and whom it names."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raytorchrpc.codec import NOTHING, Codec
from raytorchrpc.errors import PeerBusy, PeerLost, RayTorchRpcError
from raytorchrpc.exceptions import decode_exception
from raytorchrpc.execution import NO_SCOPE
from raytorchrpc.lanes._connection import Connection, SocketPending, tune
from raytorchrpc.lanes.base import Message
from raytorchrpc.retrying import RetriedCall
from raytorchrpc.serving import CALL, Server, _Job
from raytorchrpc.workers import Alarms, Workers

LISTENERS: Any = SimpleNamespace(
    arm=lambda fd: None, disarm=lambda fd: None, watch=lambda one: None, forget=lambda one: None
)


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    here, there = socket.socketpair()
    tune(here)
    connection = Connection(LISTENERS, here, "b")
    yield connection, there
    connection.end("over")
    there.close()


def began(connection: Connection) -> SocketPending:
    pending = SocketPending(connection, time.monotonic() + 10)
    connection.begin(pending, attended=True)
    return pending


def test_a_request_that_could_not_be_sent_did_not_run(ends: tuple[Connection, socket.socket]) -> None:
    connection, there = ends
    began(connection)
    there.close()
    with pytest.raises(PeerLost, match="'b'") as lost:
        connection.send([b"request"], time.monotonic() + 10)
    assert not lost.value.may_have_run


def test_a_request_of_which_a_part_was_taken_did_not_run(ends: tuple[Connection, socket.socket]) -> None:
    connection, there = ends
    began(connection)

    def take_a_part() -> None:
        there.recv(10)
        there.close()

    taker = threading.Thread(target=take_a_part)
    taker.start()
    with pytest.raises(PeerLost, match="'b'") as lost:
        connection.send([bytes(64 << 20)], time.monotonic() + 10)
    taker.join(10)
    assert not lost.value.may_have_run


def test_a_request_that_was_sent_may_have_run(ends: tuple[Connection, socket.socket]) -> None:
    connection, there = ends
    pending = began(connection)
    connection.send([b"request"], time.monotonic() + 10)
    there.close()
    assert pending.wait(10)
    with pytest.raises(PeerLost, match="'b'") as lost:
        pending.take()
    assert lost.value.may_have_run


class Attempt:
    """A call under way that was lost."""

    loop_token = None

    def __init__(self, error: RayTorchRpcError) -> None:
        self.error = error

    def wait(self, timeout_s: float) -> bool:
        return True

    def lost(self) -> PeerLost | None:
        return self.error if isinstance(self.error, PeerLost) else None

    def outcome(self) -> tuple[None, RayTorchRpcError]:
        return None, self.error


class Away:
    """The member that calls: its peer comes back, or never does."""

    def __init__(self, returns: bool) -> None:
        self.returns = returns

    def incarnation(self, target: Any) -> int:
        return 0

    def await_return(self, target: Any, after: int, until: float) -> bool:
        if not self.returns:
            raise PeerLost("b", "its actor died: killed", may_have_run=False)
        return True


def outcome_of(attempts: list[RayTorchRpcError], returns: bool, repeats: int = 1) -> BaseException | None:
    def send(seconds: float) -> Any:
        error = attempts.pop(0)
        if isinstance(error, PeerBusy) or (isinstance(error, PeerLost) and not error.may_have_run):
            raise error
        return Attempt(error)

    call = RetriedCall(Away(returns), "b", "b.f", send, 10, repeats)  # type: ignore[arg-type]
    assert call.wait(5)
    return call.outcome()[1]


@pytest.mark.parametrize("first_ran", [True, False])
def test_a_repeated_call_remembers_that_an_earlier_attempt_may_have_run(first_ran: bool) -> None:
    first = PeerLost("b", "connection closed", may_have_run=first_ran)
    for attempts, returns in ([first], False), ([first, PeerLost("b", "refused", may_have_run=False)], True):
        error = outcome_of(list(attempts), returns)
        assert isinstance(error, PeerLost)
        assert error.peer == "b"
        assert error.may_have_run == first_ran
        assert ("its actor died: killed" in str(error)) == (not returns)


def test_a_call_that_cannot_be_repeated_for_another_reason_says_so() -> None:
    busy = PeerBusy("b.f was not sent", "b", 1, 1)
    assert outcome_of([PeerLost("b", "connection closed"), busy], True, repeats=3) is busy


def test_arguments_that_could_not_be_fetched_name_the_callee_and_did_not_run() -> None:
    def unpack(*_: Any) -> Any:
        raise PeerLost("caller", "the road for tensors broke")

    parcel: Any = SimpleNamespace(unpack=unpack, used=lambda: None)
    alarms = Alarms("test")
    roads: Any = SimpleNamespace(strangers=frozenset(), alarms=alarms, arrived=lambda rank, body: body)
    server = Server("callee", "1", None, {}, Codec(), Workers("test"), roads)
    note: Any = SimpleNamespace(function=lambda instance: pytest.fail("it ran"), keep=False, concurrent=True)
    answers: list[Message] = []
    message = Message((CALL, 0, "1", "f", (), 10.0, None), NOTHING)
    job = _Job(server, SimpleNamespace(), note, "f", message, answers.append, NO_SCOPE, [parcel])  # type: ignore[arg-type]
    job._run(None)
    (answer,) = answers
    lost = decode_exception(server.codec, answer.body, "callee.f")
    assert isinstance(lost, PeerLost)
    assert (lost.peer, lost.may_have_run) == ("callee", False)
    assert "could not fetch the arguments: the road for tensors broke" in str(lost)
