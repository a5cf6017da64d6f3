"""How connections of the socket and nng lanes begin: what a handshake takes, and what follows one that breaks off."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch

from raytorchrpc.errors import PeerLost, RpcTimeout
from raytorchrpc.lanes.common import acceptor, connections
from tests.conformance import peers
from tests.conformance.peers import EMPTY, PATIENCE_S, Message, Node, answer
from tests.conformance.test_idle_connections import spied_connects
from tests.conformance.test_socket_strangers import dial, hears_nothing_and_is_hung_up_on
from tests.polling import wait_until
from tests.shortage import Failing
from tests.threads import in_thread

#: Both lanes, both ways and TLS; test_message_lanes tries each lane in every way.
KINDS = ["socket over unix", "nng over tcp", *peers.ENCRYPTED[:1]]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(kind: str) -> Iterator[tuple[Node, Node]]:
    """A caller, which has not connected yet, and its callee."""
    with Node(kind, "b", 1) as callee, Node(kind, "a", 0) as caller:
        caller.meet("b", callee.address)
        yield caller, callee


def breaks_off(monkeypatch: pytest.MonkeyPatch, times: int) -> list[BaseException]:
    """The accepting ends of the next handshakes break off at once; returns what is left of the failures."""
    failing = Failing([ConnectionResetError()] * times, acceptor._Arrival.proceed)
    monkeypatch.setattr(acceptor._Arrival, "proceed", lambda arrival: failing(arrival))
    return failing.errors


def once_a_proof_comes(monkeypatch: pytest.MonkeyPatch, then: Callable[..., Any]) -> None:
    """Accepting ends go on so, given the socket, the handshake and what it has received: two bytes of that proof."""
    secure = acceptor.secure

    def changed(*accepting: Any) -> Any:
        sock, steps = accepting[0], secure(*accepting)
        received = yield steps.send((yield next(steps)))
        return (yield from then(sock, steps, received))

    monkeypatch.setattr(acceptor, "secure", changed)


def finish(_: socket.socket, steps: Any, received: bytes) -> Any:
    try:
        while True:
            received = yield steps.send(received)
    except StopIteration as done:
        return done.value


def ignore(*_: Any) -> Any:
    while True:
        yield (), 1


def reset(sock: socket.socket, *_: Any) -> Any:
    """As when the process ends: TCP may lose what was sent before."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.close(sock.detach())
    yield from Failing([ConnectionResetError()], list)()


# --- what a handshake takes ----------------------------------------------------------------------------------------


def test_who_proves_nothing_is_hung_up_on_in_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "CONNECT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)
    with Node(kind, "b", 1) as callee, dial(callee) as one, dial(callee) as other:
        with suppress(ConnectionError):  # it may have been hung up on already
            other.sendall(b"raytorchrpc/2\0\0\0")
        assert hears_nothing_and_is_hung_up_on(one) and hears_nothing_and_is_hung_up_on(other)


# --- while it is made ----------------------------------------------------------------------------------------------


@pytest.fixture
def accepts(pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The callee has no time for handshakes until this is set."""
    accepts, handle = threading.Event(), acceptor.Acceptor.handle
    monkeypatch.setattr(acceptor.Acceptor, "handle", lambda one: accepts.wait(PATIENCE_S) and handle(one))
    yield accepts
    accepts.set()


class Sent:
    """A request to keep some bytes, and how often it was over, and was taken back."""

    def __init__(self, caller: Node, payload: bytes = b"", timeout_s: float = PATIENCE_S) -> None:
        self.over: list[str] = []
        message = Message(("keep",), EMPTY._replace(payload=payload), take_back=lambda: self.over.append("taken back"))
        self.pending = caller.lane.call("b", message, timeout_s, on_released=lambda: self.over.append("released"))

    def result(self) -> Any:
        return answer(self.pending).header


def kept(callee: Node) -> list[bytes]:
    return [bytes(message.body.payload) for message in callee.served]


def test_calls_return_soon_and_arrive_in_order(pair: tuple[Node, Node], accepts: threading.Event) -> None:
    caller, callee = pair
    attempts = spied_connects(caller)
    payloads = [bytes([number]) * (0, 100, 20_000, 300_000)[number % 4] for number in range(40)]
    sent = [Sent(caller, payload) for payload in payloads]
    assert not any(each.pending.done for each in sent)
    accepts.set()
    assert [each.result() for each in sent] == [("kept",)] * len(sent)
    assert kept(callee) == payloads and attempts == ["b"]
    assert all(each.over == ["released"] for each in sent)


def test_tensors_may_change_while_their_request_waits(pair: tuple[Node, Node], accepts: threading.Event) -> None:
    caller, callee = pair
    tensors = torch.zeros(2, 100)
    pendings = [
        caller.lane.call("b", Message(("keep",), EMPTY._replace(tensors=[tensor])), PATIENCE_S) for tensor in tensors
    ]
    tensors.fill_(1)
    accepts.set()
    assert [answer(pending).header for pending in pendings] == [("kept",)] * 2
    assert not any(message.body.tensors[0].any() for message in callee.served)


def test_a_request_whose_caller_is_interrupted_is_not_sent(
    pair: tuple[Node, Node], accepts: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller takes back what it tells of."""
    caller, callee = pair
    with monkeypatch.context() as patched:
        interrupt = Failing([KeyboardInterrupt()], list)
        patched.setattr(connections.Request, "leave", lambda request: interrupt())
        with pytest.raises(KeyboardInterrupt):
            Sent(caller, b"first")
    later = Sent(caller, b"second")
    accepts.set()
    assert later.result() == ("kept",) and kept(callee) == [b"second"]


def test_a_request_ends_though_the_thread_that_sent_it_breaks_off(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, _ = pair
    follow = caller.lane._next  # type: ignore[attr-defined]
    steps = iter([follow, Failing([RuntimeError()], follow)])
    monkeypatch.setattr(caller.lane, "_next", lambda *of: next(steps, follow)(*of))
    assert caller.call("keep").header == ("kept",)


@pytest.mark.parametrize("late", [0, 1])
def test_a_request_that_waits_until_its_deadline_is_never_sent(
    pair: tuple[Node, Node], accepts: threading.Event, late: int
) -> None:
    caller, callee = pair
    sent = [Sent(caller, bytes([number]), 0.05 if number == late else PATIENCE_S) for number in range(3)]
    assert not sent[late].pending.wait(0.1) or late == 0
    accepts.set()
    with pytest.raises(RpcTimeout, match="no connection to 'b' by the deadline"):
        sent.pop(late).result()
    assert [each.result() for each in sent] == [("kept",)] * 2
    assert kept(callee) == [bytes([number]) for number in range(3) if number != late]


@pytest.mark.parametrize("end", ["it is removed from the group", "the caller leaves the group"])
def test_requests_that_wait_as_the_peer_goes_did_not_run(
    pair: tuple[Node, Node], accepts: threading.Event, end: str
) -> None:
    caller, callee = pair
    first, *sent = (Sent(caller, bytes([number])) for number in range(3))
    if end == "it is removed from the group":
        caller.lane.disconnect("b")
    else:
        caller.lane.close()
    for each in sent:
        with pytest.raises(PeerLost) as lost:
            each.result()
        assert not lost.value.may_have_run and each.over == ["taken back", "released"]
    accepts.set()
    assert first.pending.wait(PATIENCE_S)
    assert kept(callee) in ([], [b"\0"])


# --- what follows a handshake that breaks off ----------------------------------------------------------------------


def test_a_peer_that_hangs_up_on_every_attempt_is_not_reported_as_lost(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, _ = pair
    breaks_off(monkeypatch, 100_000)
    begun = time.monotonic()
    with pytest.raises(RpcTimeout, match="no connection to 'b' by the deadline"):
        caller.call("echo", timeout_s=0.5)
    assert time.monotonic() - begun < PATIENCE_S / 2


@pytest.mark.parametrize("kind", ["socket over unix", "socket over tcp", "nng over ipc", "nng over tcp"])
@pytest.mark.parametrize("attempt_s", [10.0, 0.1])
def test_a_peer_that_takes_no_connection_until_the_deadline_is_not_reported_as_lost(
    kind: str, attempt_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host may be silent for a while, or it may have no time to accept."""
    monkeypatch.setattr(connections, "CONNECT_TIMEOUT_S", attempt_s)
    tcp = kind.endswith("tcp")
    with Node(kind, "b", 1) as callee, Node(kind, "a", 0) as caller, ExitStack() as stack:
        family, where = (socket.AF_INET, ("127.0.0.1", 0)) if tcp else (socket.AF_UNIX, "")
        listener, waiting = (stack.enter_context(socket.socket(family)) for _ in range(2))
        listener.bind(where)
        listener.listen(0)
        name: Any = listener.getsockname()
        waiting.connect(name)  # there is no room for another one
        caller.meet("b", callee.address._replace(**({"tcp": name} if tcp else {"unix": name[1:].decode()})))
        with pytest.raises(RpcTimeout, match="no connection to 'b' by the deadline"):
            caller.call("echo", timeout_s=0.4)


@pytest.mark.parametrize("end", ["its process ends", "it is removed from the group", "the caller leaves the group"])
def test_a_peer_that_is_gone_meanwhile_is_lost_at_once(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    caller, callee = pair
    left = breaks_off(monkeypatch, 100_000)
    called = in_thread(caller.call, "echo")
    assert wait_until(lambda: len(left) < 99_990, PATIENCE_S)
    if end == "its process ends":
        callee.lane.close()
    elif end == "it is removed from the group":
        caller.lane.disconnect("b")
    else:
        caller.lane.close()
    with pytest.raises(PeerLost) as lost:
        called(PATIENCE_S / 2)
    assert not lost.value.may_have_run


@pytest.mark.parametrize("kind", ["socket over unix", "socket over tcp"])
def test_a_request_is_sent_again_if_its_proof_was_not_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaking = Failing([ConnectionResetError()] * 6, finish)
    once_a_proof_comes(monkeypatch, breaking)
    with Node(kind, "b", 1) as callee, Node(kind, "a", 0).meet("b", callee.address) as caller:
        assert caller.call("keep").header == ("kept",)
        assert not breaking.errors and len(callee.served) == 1


def test_a_request_is_not_sent_again_if_it_may_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset between hosts may overtake the confirmation."""
    once_a_proof_comes(monkeypatch, reset)
    kind = "socket over tcp"
    with Node(kind, "b", 1) as callee, Node(kind, "a", 0).meet("b", callee.address) as caller:
        attempts = spied_connects(caller)
        with pytest.raises(PeerLost) as lost:
            caller.call("keep")
        assert lost.value.may_have_run and attempts == ["b"]


@pytest.mark.parametrize("kind", ["socket over tcp"])
def test_a_request_that_is_not_confirmed_times_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run later, so it is not sent again."""
    once_a_proof_comes(monkeypatch, ignore)
    with Node(kind, "b", 1) as callee, Node(kind, "a", 0).meet("b", callee.address) as caller:
        attempts = spied_connects(caller)
        with pytest.raises(RpcTimeout, match="did not confirm"):
            caller.call("keep", timeout_s=1)  # long enough for the handshake, up to that
        assert attempts == ["b"]


@pytest.mark.parametrize("kind", ["socket over unix", "socket over tcp", *peers.ENCRYPTED[:1]])
@pytest.mark.parametrize("size", [0, 15_000, 17_000, 10**6])
def test_a_first_request_of_any_size_arrives_once(kind: str, size: int) -> None:
    with Node(kind, "b", 1) as callee, Node(kind, "a", 0).meet("b", callee.address) as caller:
        for number in range(2):
            assert caller.call("keep", payload=bytes([number]) * size).header == ("kept",)
        assert [bytes(message.body.payload) for message in callee.served] == [bytes([n]) * size for n in range(2)]
