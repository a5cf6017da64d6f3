"""Who does not have the group's secret gets nothing from the nng lane, and takes nothing from its members."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pynng
import pytest

from raytorchrpc.errors import PeerLost
from raytorchrpc.lanes.nng import sockets
from raytorchrpc.lanes.nng.connection import HandshakeStream
from tests.conformance import peers
from tests.conformance.peers import EMPTY, PATIENCE_S, Message, Node, PeerAddress, answer

KINDS = ["nng over ipc", "nng over tcp"]
NOISE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
    "zeros": b"\0" * 4096,
    "noise": os.urandom(100_000),
    "nng's own greeting, and a message of 2 GB": b"\0SP\0\0\x30\0\0" + (2 << 30).to_bytes(8, "big") + b"x" * 50_000,
}


@pytest.fixture(params=KINDS)
def member(request: pytest.FixtureRequest) -> Iterator[Node]:
    node = Node(request.param, "b", 1)
    yield node
    node.lane.close()


def door(member: Node) -> tuple[str, bytes]:
    """Where its door is, and what to say there."""
    tcp = member.kind == "nng over tcp"
    return (member.address.tcp, b"raytorchrpc/1 tcp") if tcp else (member.address.local, b"raytorchrpc/1 local")


def dial(url: str) -> socket.socket:
    """Bytes alone, without nng."""
    if url.startswith("tcp://"):
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=15)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(15)
    sock.connect("\0" + url.removeprefix("abstract://"))
    return sock


def soon() -> float:
    return time.monotonic() + 10


def get_wire(member: Node) -> sockets.PairSocket:
    """Anybody gets one; it leads to the handshake."""
    wire = sockets.PairSocket()
    wire.dial(sockets.request(*door(member), soon()).decode(), soon())
    return wire


def rightful(member: Node, secret: bytes = peers.SECRET) -> Node:
    node = Node(member.kind, "a", 0, secret)
    node.lane.connect([PeerAddress("b", member.address)])
    return node


def echo(node: Node, timeout_s: float = PATIENCE_S) -> None:
    pending = node.lane.call("b", Message(("echo",), EMPTY), timeout_s)
    assert answer(pending).header == ("echo",)


def hung_up_on(wire: sockets.PairSocket) -> bool:
    """Whether it is, and has heard no more than the other's half of the handshake."""
    heard = 0
    while True:
        gone = wire.gone
        if (data := wire.receive()) is not None:
            heard += len(data)
        elif gone:
            return heard <= 64
        elif not wire.await_data(soon()):
            return False


@pytest.mark.parametrize("where", ["door", "wire"])
@pytest.mark.parametrize("said", NOISE.values(), ids=NOISE.keys())
def test_garbage_is_hung_up_on_and_harms_nobody(member: Node, said: bytes, where: str) -> None:
    friend = rightful(member)
    try:
        echo(friend)
        url, question = door(member)
        if where == "wire":
            url = sockets.request(url, question, soon()).decode()
        with dial(url) as sock:
            with suppress(ConnectionError):
                sock.sendall(said)
            with suppress(ConnectionError):
                while data := sock.recv(4096):
                    assert len(data) <= 64
        echo(friend)
        assert not member.served
    finally:
        friend.lane.close()


@pytest.mark.parametrize("said", [b"x", b"raytorchrpc/1 nonsense", b"y" * 64], ids=["short", "wrong", "long"])
def test_a_wrong_question_at_the_door_is_hung_up_on(member: Node, said: bytes) -> None:
    with pytest.raises(ConnectionError):
        sockets.request(door(member)[0], said, soon())
    with pytest.raises(ConnectionError):
        sockets.request(door(member)[0], b"z" * 1000, soon())
    assert sockets.request(*door(member), soon())


@pytest.mark.parametrize("said", [b"\0" * 48, os.urandom(1 << 20), b"raytorchrpc/2\0\0\0" + b"n" * 200])
def test_messages_without_proof_are_hung_up_on(member: Node, said: bytes) -> None:
    friend = rightful(member)
    wire = get_wire(member)
    try:
        with suppress(OSError):
            for _ in range(3):
                wire.send([said], soon)
        assert hung_up_on(wire)
        echo(friend)
        assert not member.served
    finally:
        wire.close()
        friend.lane.close()


def test_an_empty_message_is_no_harm(member: Node) -> None:
    friend = rightful(member)
    url = sockets.request(*door(member), soon()).decode()
    try:
        with pynng.Pair0(recv_max_size=1000, recv_timeout=100) as stranger:
            stranger.dial(url, block=True)
            stranger.send(b"")
            echo(friend)
    finally:
        friend.lane.close()


def test_another_groups_secret_is_refused_and_the_caller_is_told(member: Node) -> None:
    stranger = rightful(member, b"another group's secret")
    try:
        start = time.monotonic()
        with pytest.raises(PeerLost, match="secret") as caught:
            echo(stranger)
        assert not caught.value.may_have_run
        assert time.monotonic() - start < 2
    finally:
        stranger.lane.close()


def test_a_listener_without_the_secret_learns_nothing_from_a_caller() -> None:
    """Somebody else sits at the address: the caller refuses to go on, and gives no proof away first."""
    impostor = Node("nng over ipc", "b", 1, b"no secret of theirs")
    caller = Node("nng over ipc", "a", 0)
    try:
        caller.lane.connect([PeerAddress("b", impostor.address)])
        with pytest.raises(PeerLost, match="secret"):
            echo(caller)
        assert not impostor.served
    finally:
        caller.lane.close()
        impostor.lane.close()


def test_a_recorded_handshake_cannot_be_played_again(member: Node) -> None:
    sent: list[bytes] = []
    wire = get_wire(member)
    try:
        member.prove(Recorder(wire, sent))
    finally:
        wire.close()
    wire = get_wire(member)
    try:
        with suppress(OSError):
            for data in sent:
                wire.send([data], soon)
        assert hung_up_on(wire)
    finally:
        wire.close()


class Recorder(HandshakeStream):
    def __init__(self, wire: sockets.PairSocket, sent: list[bytes]) -> None:
        super().__init__(wire)
        self._sent = sent

    def sendall(self, data: bytes) -> None:
        self._sent.append(data)
        super().sendall(data)


@pytest.mark.parametrize("where", ["door", "wire"])
def test_connections_that_say_nothing_keep_no_member_out(member: Node, where: str) -> None:
    with ExitStack() as stack:
        for _ in range(40):
            if where == "wire":
                stack.callback(get_wire(member).close)
            else:
                stack.enter_context(dial(door(member)[0]))
        for _ in range(80 if where == "door" else 0):  # these say who they are to nng
            asker = sockets.PairSocket(pynng.Req0)
            stack.callback(asker.close)
            asker.dial(door(member)[0], soon())
        friend = rightful(member)
        stack.callback(friend.lane.close)
        start = time.monotonic()
        echo(friend, timeout_s=5)
        assert time.monotonic() - start < 3


def test_a_second_one_on_a_members_wire_is_hung_up_on(member: Node) -> None:
    url = sockets.request(*door(member), soon()).decode()
    first, second = sockets.PairSocket(), sockets.PairSocket()
    try:
        first.dial(url, soon())
        with suppress(OSError):
            second.dial(url, soon())
        assert hung_up_on(second) and not first.gone
        member.prove(HandshakeStream(first))
    finally:
        first.close()
        second.close()


def test_close_hangs_up_on_those_who_have_proved_nothing_yet(member: Node) -> None:
    wire = get_wire(member)
    try:
        wire.send([b"raytorchrpc/2\0\0\0"], soon)
        member.lane.close()
        assert peers.wait_until(
            lambda: not any(thread.name.startswith("raytorchrpc-b") for thread in threading.enumerate()), 2
        )
        assert hung_up_on(wire)
    finally:
        wire.close()
