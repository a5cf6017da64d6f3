"""A process without the secret gets nothing from the socket and nng lanes, and takes nothing from their members."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from raytorchrpc.errors import PeerLost
from raytorchrpc.lanes.common import acceptor
from tests.conformance import peers
from tests.conformance.peers import PATIENCE_S, Node, PeerAddress
from tests.shortage import no_descriptors

KINDS = ["socket over unix", "socket over tcp", "nng over ipc", "nng over tcp"]


@pytest.fixture(params=KINDS)
def member(request: pytest.FixtureRequest) -> Iterator[Node]:
    with Node(request.param, "b", 1) as node:
        yield node


def dial(member: Node) -> socket.socket:
    if member.is_tcp:
        return socket.create_connection(member.address.tcp, timeout=PATIENCE_S)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(PATIENCE_S)
    sock.connect("\0" + member.address.unix)
    return sock


def rightful(member: Node, secret: bytes = peers.SECRET) -> Node:
    return Node(member.kind, "a", 0, secret).meet("b", member.address)


def echo(node: Node) -> None:
    assert node.call("echo").header == ("echo",)


def hears_nothing_and_is_hung_up_on(sock: socket.socket) -> bool:
    try:
        while data := sock.recv(4096):
            assert len(data) <= 64  # its half of the handshake at most
    except ConnectionError:
        return True
    return True


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
        b"\0" * 4096,
        os.urandom(100_000),
        b"raytorchrpc/2\0\0\0" + b"n" * 200,
        b"\0SP\0\0\x10\0\0" + (2 << 30).to_bytes(8, "big") + b"x" * 50_000,
    ],
    ids=["http", "zeros", "noise", "right hello, wrong proof", "nng's own greeting, and a message of 2 GB"],
)
def test_garbage_is_hung_up_on_and_harms_nobody(member: Node, said: bytes) -> None:
    with rightful(member) as friend:
        echo(friend)
        with dial(member) as sock:
            with suppress(ConnectionError):
                sock.sendall(said)
            assert hears_nothing_and_is_hung_up_on(sock)
        echo(friend)
        assert not member.served


def test_another_groups_secret_is_refused_and_the_caller_is_told(member: Node) -> None:
    with rightful(member, b"another group's secret") as stranger:
        with pytest.raises(PeerLost, match="secret") as caught:
            echo(stranger)
        assert not caught.value.may_have_run


@pytest.mark.parametrize("kind", ["socket over unix", "nng over ipc"])
def test_a_listener_without_the_secret_learns_nothing_from_a_caller(kind: str) -> None:
    """Somebody else sits at the address: the caller refuses to go on, and gives no proof away first."""
    with socket.socket(socket.AF_UNIX) as impostor:
        name = "\0conformance-" + os.urandom(8).hex()
        impostor.bind(name)
        impostor.listen()
        heard: list[bytes] = []

        def answer_wrongly() -> None:
            sock, _ = impostor.accept()
            with sock:
                sock.settimeout(PATIENCE_S)
                heard.append(sock.recv(4096))
                sock.sendall(os.urandom(64))
                heard.append(sock.recv(4096))

        thread = threading.Thread(target=answer_wrongly)
        thread.start()
        with Node(kind, "a", 0) as caller:
            caller.meet("b", caller.address._replace(unix=name[1:]))
            with pytest.raises(PeerLost, match="secret"):
                echo(caller)
        thread.join(PATIENCE_S)
        assert heard[1] == b""


def test_a_recorded_handshake_cannot_be_played_again(member: Node) -> None:
    with dial(member) as sock:
        sent: list[bytes] = []
        recorder: Any = Recorder(sock, sent)
        member.prove(recorder)
    with dial(member) as sock:
        sock.sendall(b"".join(sent))
        assert hears_nothing_and_is_hung_up_on(sock)


class Recorder:
    def __init__(self, sock: socket.socket, sent: list[bytes]) -> None:
        self._sock, self._sent = sock, sent

    def sendall(self, data: bytes) -> None:
        self._sent.append(data)
        self._sock.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is hung up on because a handshake takes long."""
    monkeypatch.setattr(acceptor, "CONNECT_TIMEOUT_S", 1000.0)


def test_connections_that_say_nothing_keep_no_member_out(patient: None, member: Node) -> None:
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(dial(member))
        echo(stack.enter_context(rightful(member)))


def test_all_members_of_a_large_group_may_come_at_once(patient: None, member: Node) -> None:
    """As to one that is back: nobody is hung up on because of the others, however slowly they prove themselves."""
    member.lane.connect([PeerAddress(f"peer{number}", member.address) for number in range(60)])
    with ExitStack() as stack:
        waiting = [stack.enter_context(dial(member)) for _ in range(70)]
        friend = stack.enter_context(rightful(member))
        echo(friend)
        for sock in waiting:
            sock.settimeout(0.001)
            with pytest.raises(TimeoutError):
                sock.recv(1)


@pytest.fixture(params=KINDS)
def alone(request: pytest.FixtureRequest, process: peers.Process) -> Callable[..., None]:
    """Runs a function with a member in a process of its own: where the tests run, other threads need descriptors."""
    return lambda body: process.run(_with_member, request.param, body)


def _with_member(kind: str, body: Callable[[Node], None]) -> None:
    with Node(kind, "b", 1) as node:
        body(node)


def test_a_member_without_descriptors_takes_no_processor(alone: Callable[..., None]) -> None:
    """A connection that cannot be accepted waits, and is accepted when there is room again."""
    alone(_takes_no_processor)


def _takes_no_processor(member: Node) -> None:
    family = socket.AF_INET if member.is_tcp else socket.AF_UNIX
    with socket.socket(family) as sock:
        with no_descriptors():
            sock.settimeout(PATIENCE_S)
            sock.connect(member.address.tcp if family == socket.AF_INET else "\0" + member.address.unix)
            before = time.process_time()
            threading.Event().wait(0.5)
            assert time.process_time() - before < 0.2
        member.prove(sock)


def test_a_caller_without_descriptors_is_told_and_calls_again(alone: Callable[..., None]) -> None:
    alone(_told_and_calls_again)


def _told_and_calls_again(member: Node) -> None:
    with rightful(member) as friend:
        with no_descriptors(), pytest.raises(PeerLost, match="Too many open files") as caught:
            echo(friend)
        assert not caught.value.may_have_run
        echo(friend)
