"""What a PeerLost says of the call: whether it may have run, and whom it names."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raytorchrpc.calls.client.outgoing import OutgoingCall
from raytorchrpc.calls.client.retry import RetriedCall
from raytorchrpc.calls.counters import CallCounters
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.payload import Payload
from raytorchrpc.calls.protocol import CALL, KEPT, OK, RAISED, ReplyHeader, RequestHeader
from raytorchrpc.calls.server.exposed import Exposed
from raytorchrpc.errors import LaneUnavailable, NotAMember, PeerBusy, PeerLost, RayTorchRpcError
from raytorchrpc.lanes.base import Message, Pending
from raytorchrpc.lanes.socket.connection import Connection, SocketPending, tune
from raytorchrpc.process.workers import Deadlines
from raytorchrpc.tensors.codec import NOTHING, Codec
from raytorchrpc.tensors.exceptions import decode_exception, encode_exception
from tests.unit.callees import TOKEN, make_callee

LISTENERS: Any = SimpleNamespace(
    fd=-1,
    busy=False,
    arm=lambda fd, events=0: None,
    watch=lambda one: None,
    remove=lambda one: None,
    step_down=lambda: None,
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
    connection.begin(pending, caller_waits=True)
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
    peer_was_lost = False

    def __init__(self, error: RayTorchRpcError) -> None:
        self.error = error

    def wait(self, timeout_s: float) -> bool:
        return True

    def lost(self) -> PeerLost | None:
        return self.error if isinstance(self.error, PeerLost) else None

    def outcome(self) -> tuple[None, RayTorchRpcError]:
        return None, self.error

    def forget_failure(self) -> None:
        """Nothing to log."""


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


def retried(peers: Any, send: Any, repeats: int) -> RetriedCall:
    unused: Any = None
    return RetriedCall(peers, unused, unused, "b", "b.f", send, 10, repeats)


def outcome_of(attempts: list[RayTorchRpcError], returns: bool, repeats: int = 1) -> BaseException | None:
    def send(seconds: float) -> Any:
        error = attempts.pop(0)
        if isinstance(error, PeerBusy) or (isinstance(error, PeerLost) and not error.may_have_run):
            raise error
        return Attempt(error)

    call = retried(Away(returns), send, repeats)
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


def refused(tensor_lanes: dict[str, Any]) -> BaseException:
    """What the callee answers to a call with out-of-band tensors."""
    deadlines = Deadlines("test")
    exposed = Exposed(lambda instance: pytest.fail("it ran"), True, None, False, False, False)
    server = make_callee(deadlines, {"f": exposed}, tensor_lanes)
    answers: list[Message] = []
    request = Message(tuple(RequestHeader(CALL, 0, TOKEN, "f", (), 10.0, None)), NOTHING, manifests=BESIDE)
    work = server.serve(SimpleNamespace(), request, answers.append)  # type: ignore[arg-type]
    assert work is not None
    work()
    deadlines.stop()
    (answer,) = answers
    assert ReplyHeader(*answer.header).kind == RAISED
    return decode_exception(Codec(), answer.body, "callee.f")


BESIDE = (("shm", None, (), None),)


def test_arguments_that_could_not_be_fetched_name_the_callee_and_did_not_run() -> None:
    def fetch(*_: Any) -> Any:
        raise PeerLost("caller", "the route for tensors broke")

    lost = refused({"shm": SimpleNamespace(fetch=fetch, used=lambda *_: None)})
    assert isinstance(lost, PeerLost)
    assert (lost.peer, lost.may_have_run) == ("callee", False)
    assert "could not fetch the arguments: the route for tensors broke" in str(lost)


# --- results that are lost after the method ran ------------------------------------------------------------------


class Answer(Pending):
    def __init__(self, message: Message) -> None:
        self.message = message

    def wait(self, timeout_s: float) -> bool:
        return True

    def add_done_callback(self, callback: Any) -> None:
        callback()

    def take(self) -> Message:
        return self.message


class Caller(SimpleNamespace):
    """The calls of a member: what it fetches with fails, and its peer is gone or not."""

    codec = Codec()
    counters = CallCounters()

    def __init__(self, gone: bool, failure: RayTorchRpcError) -> None:
        super().__init__()
        self.gone, self.failure, self.peers, self.payloads = gone, failure, self, self

    def why_unreachable(self, route: Any) -> str | None:
        return "its actor died" if self.gone else None

    def receive(self, route: Any, message: Message) -> Any:
        raise self.failure

    def unpack(self, message: Message, pending: Any, *, keep: bool) -> Any:
        return message.body

    def control(self, *_: Any) -> Pending:
        if isinstance(self.failure, NotAMember):  # what the peer answers
            return Answer(Message((RAISED,), encode_exception(self.codec, UNSEEN)))
        raise self.failure


UNSEEN = PeerLost("b", "it belongs to another generation of the group", may_have_run=False)
WITH_TENSORS = Message((OK,), NOTHING, manifests=BESIDE)
KEPT_THERE = Message((KEPT, 3), NOTHING)


def outcome_after(answer: Message, gone: bool, failure: RayTorchRpcError) -> tuple[Any, bool]:
    lane: Any = SimpleNamespace(name="lane")
    route: Any = SimpleNamespace(member=SimpleNamespace(name="b"), calls=lane, tensors=lane, heavy_results=set())
    deadline = time.monotonic() + 10
    caller: Any = Caller(gone, failure)
    call = OutgoingCall(caller, route, "f", lane, Answer(answer), 0.0, deadline, Payload(NOTHING), CallOptions())
    assert call.wait(0)
    return call.outcome()[1], call.peer_was_lost


@pytest.mark.parametrize("answer", [WITH_TENSORS, KEPT_THERE], ids=["beside the answer", "kept for another lane"])
@pytest.mark.parametrize("failure", [LaneUnavailable("shm", "not mapped"), UNSEEN], ids=["lane", "peer"])
def test_a_result_that_went_with_its_process_has_been_made(answer: Message, failure: RayTorchRpcError) -> None:
    error, lost = outcome_after(answer, True, failure)
    assert isinstance(error, PeerLost) and lost
    assert (error.peer, error.may_have_run) == ("b", True)


def test_a_process_that_does_not_know_of_a_kept_result_is_another_one() -> None:
    error, lost = outcome_after(KEPT_THERE, True, NotAMember("it answers"))
    assert isinstance(error, PeerLost) and lost
    assert error.may_have_run


@pytest.mark.parametrize("answer", [WITH_TENSORS, KEPT_THERE], ids=["beside the answer", "kept for another lane"])
def test_memory_that_cannot_be_mapped_while_the_peer_lives_stays_the_lanes_fault(answer: Message) -> None:
    failure = LaneUnavailable("shm", "not mapped")
    error, lost = outcome_after(answer, False, failure)
    assert isinstance(error, LaneUnavailable) and error.reason == "not mapped" and not lost


class Answered(Attempt):
    def lost(self) -> PeerLost | None:
        return None


class TakenTooLate(Answered):
    """Answered, and the result is lost when it is taken."""

    peer_was_lost = True


def test_a_result_that_was_lost_is_asked_for_again_within_the_limit() -> None:
    attempts = [TakenTooLate(PeerLost("b", f"attempt {number}")) for number in range(4)]
    left: list[Any] = list(attempts)
    call = retried(Away(True), lambda seconds: left.pop(0), 2)
    for _ in range(2):
        assert call.wait(5)
        assert call.outcome() is None
        assert call.outcome() is None, "another thread that has waited too"
    assert call.wait(5)
    outcome = call.outcome()
    assert outcome is not None
    assert isinstance(outcome[1], PeerLost) and outcome[1].cause == "attempt 2" and len(left) == 1


def test_what_the_method_itself_lost_is_not_asked_for_again() -> None:
    error = PeerLost("c", "the method's own call")
    call = retried(Away(True), lambda seconds: Answered(error), 2)
    assert call.wait(5)
    assert call.outcome() == (None, error)


def test_a_request_with_tensors_for_a_member_that_has_left_did_not_run() -> None:
    lost = refused({})
    assert isinstance(lost, PeerLost)
    assert (lost.peer, lost.may_have_run) == ("callee", False)
