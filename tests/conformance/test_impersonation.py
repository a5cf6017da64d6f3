"""A process without the secret stands between members, or in the place of one that died; or it runs as another user."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raytorchrpc.errors import PeerLost
from raytorchrpc.lanes.common import handshake
from raytorchrpc.lanes.common.handshake import Credentials, Identity
from tests.conformance import peers
from tests.conformance.on_path import Relay, Tamper
from tests.conformance.peers import EMPTY, SECRET, Message, Node, Process, answer
from tests.polling import wait_until

KINDS = ["socket over unix", "socket over tcp", "nng over ipc", "nng over tcp"]
EXPECTED = "not the expected member"


# --- in the place of the dead --------------------------------------------------------------------------------------


def place_of(node: Node) -> tuple[int, Any]:
    """Where a member listens, for a socket of one's own."""
    return (socket.AF_INET, node.address.tcp) if node.is_tcp else (socket.AF_UNIX, "\0" + node.address.unix)


def bind_when_free(family: int, place: Any, target: Any) -> Relay:
    """A relay in the place of somebody whose listener is being closed."""
    until = time.monotonic() + 20
    while True:
        try:
            return Relay(family, place, target)
        except OSError:
            assert time.monotonic() < until, f"{place} is still in use"
            threading.Event().wait(0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_who_relays_to_another_member_from_the_place_of_a_dead_one_is_refused(kind: str) -> None:
    with Node(kind, "a", 0) as caller, Node(kind, "b", 1) as dead, Node(kind, "c", 2) as living:
        family, place = place_of(dead)
        caller.meet("b", dead.address)
        dead.lane.close()
        relay = bind_when_free(family, place, place_of(living)[1])
        try:
            with pytest.raises(PeerLost, match=EXPECTED) as caught:
                caller.call("keep")
            assert not caught.value.may_have_run
            assert relay.relayed.wait(20)  # the living one did answer: it was not the way that failed
            assert living.served == []
        finally:
            relay.close()


# --- the proof -----------------------------------------------------------------------------------------------------

RIGHT = Identity("group", "generation", 1, 0, "socket name")


def shake_hands(expected: Identity, actual: Identity, between: Callable[[bytes], bytes] = bytes) -> tuple[Any, Any]:
    """What ``offer`` and ``accept`` return or raise. ``between``: changes what the connecting end sends."""
    near, far = socket.socketpair()
    outcome: list[Any] = []

    class Changed:
        def __getattr__(self, name: str) -> Any:
            return getattr(near, name)

        def sendall(self, data: bytes) -> None:
            near.sendall(between(data))

    def accept() -> None:
        try:
            outcome.append(handshake.run(far, handshake.accept(SECRET, actual), 5))
        except (OSError, handshake.Refused) as error:
            outcome.append(error)
        far.close()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        caller = RIGHT._replace(rank=0, address="a caller's")
        offered: Any = handshake.run(Changed(), handshake.offer(SECRET, caller, expected), 5)
    except (OSError, handshake.Refused) as error:
        offered = error
    near.close()
    thread.join(10)
    return offered, outcome[0]


def test_both_ends_of_a_proved_connection_have_the_same_keys_one_for_each_direction() -> None:
    keys, others = shake_hands(RIGHT, RIGHT)
    assert (keys.sending, keys.receiving) == (others.receiving, others.sending)
    assert keys.sending != keys.receiving
    assert keys != shake_hands(RIGHT, RIGHT)[0]  # another connection has others


@pytest.mark.parametrize(
    "other",
    [
        RIGHT._replace(group="another"),
        RIGHT._replace(generation="another"),
        RIGHT._replace(rank=2),
        RIGHT._replace(incarnation=1),
        RIGHT._replace(address="socket another"),
    ],
    ids=["group", "generation", "rank", "incarnation", "address"],
)
def test_a_process_with_the_secret_that_is_not_the_expected_one_is_refused(other: Identity) -> None:
    offered, accepted = shake_hands(RIGHT, other)
    assert isinstance(offered, handshake.Refused) and EXPECTED in str(offered)
    assert isinstance(accepted, (OSError, handshake.Refused))


def test_a_changed_proof_is_refused() -> None:
    for place in (16, 60):  # in the random number, and in what follows it
        sent = bytearray()

        def flip(data: bytes, place: int = place, sent: bytearray = sent) -> bytes:
            start = len(sent)
            sent.extend(data)
            if start <= place < len(sent):
                data = data[: place - start] + bytes([data[place - start] ^ 1]) + data[place - start + 1 :]
            return data

        offered, accepted = shake_hands(RIGHT, RIGHT, flip)
        assert isinstance(accepted, (OSError, handshake.Refused)) or isinstance(offered, handshake.Refused)


encrypted = pytest.mark.skipif(not peers.ENCRYPTED, reason="the extra tls is not installed")

# --- on the path ---------------------------------------------------------------------------------------------------


class Path:
    """Members a and b over TCP, and somebody between them who passes everything on, changed or not."""

    def __init__(self, kind: str) -> None:
        self.a, self.b = Node(kind, "a", 0), Node(kind, "b", 1)
        self._relay = Relay(socket.AF_INET, ("127.0.0.1", 0), self.b.address.tcp)
        seen = self.b.address._replace(tcp=self._relay.address)
        # An attacker on the path has the member's own address; here that address leads to the attacker.
        self.b.lane._acceptor.address = seen
        self.a.meet("b", seen)

    def tamper(self, change: Tamper | None) -> None:
        self._relay.tamper = change

    def call(self, what: str = "echo", timeout_s: float = 20) -> Any:
        return self.a.call(what, timeout_s)

    def close(self) -> None:
        self._relay.close()
        self.a.lane.close()
        self.b.lane.close()


@pytest.fixture(params=["socket over tcp", "nng over tcp", *peers.ENCRYPTED])
def path(request: pytest.FixtureRequest) -> Iterator[Path]:
    path = Path(request.param)
    assert path.call().header == ("echo",)  # the connection is proved by now
    yield path
    path.close()


def flipped(data: bytes) -> bytes:
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


def test_a_frame_that_is_changed_ends_the_connection_unread(path: Path) -> None:
    path.tamper(flipped)
    with pytest.raises(PeerLost):
        path.call("keep", 5)
    path.tamper(None)
    assert path.call().header == ("echo",)  # by another connection
    assert path.b.served == []


def test_a_frame_that_is_replayed_is_served_once(path: Path) -> None:
    path.tamper(lambda data: data + data)
    with contextlib.suppress(PeerLost):  # the first is authentic, and the second ends the connection
        path.call("keep", 5)
    path.tamper(None)
    assert wait_until(lambda: _ends(path), 20)
    assert len(path.b.served) <= 1


def _ends(path: Path) -> bool:
    """Whether the connection that was tampered with is gone; calls go on by another one."""
    try:
        return path.call("echo", 5).header == ("echo",)
    except PeerLost:
        return False


def test_a_frame_that_is_injected_is_not_served(path: Path) -> None:
    recorded: list[bytes] = []
    path.tamper(lambda data: recorded.append(data) or data)  # type: ignore[func-returns-value]
    path.call("keep", 5)
    path.tamper(lambda data: recorded[0] + data)  # an old one, in front of a new one
    with pytest.raises(PeerLost):
        path.call("keep", 5)
    path.tamper(None)
    assert wait_until(lambda: _ends(path), 20)
    assert len(path.b.served) == 1


def test_frames_in_another_order_are_not_served(path: Path) -> None:
    held: list[bytes] = []

    def hold(data: bytes) -> bytes:
        held.append(data)
        return b"" if len(held) < 2 else held[1] + held[0]

    path.tamper(hold)
    first = path.a.lane.call("b", Message(("keep",), EMPTY), 20)
    assert wait_until(lambda: len(held) == 1, 20)
    second = path.a.lane.call("b", Message(("keep",), EMPTY), 20)
    for pending in (first, second):
        with pytest.raises(PeerLost):
            answer(pending)
    assert path.b.served == []


@encrypted
def test_tls_shows_nothing_to_who_listens() -> None:
    seen: list[bytes] = []
    found = {}
    for kind in ("socket over tcp", "socket over tls", "nng over tls"):
        path = Path(kind)
        try:
            path.tamper(lambda data: seen.append(data) or data)  # type: ignore[func-returns-value]
            path.call("keep")
            found[kind] = b"keep" in b"".join(seen)
        finally:
            path.close()
            seen.clear()
    assert found == {"socket over tcp": True, "socket over tls": False, "nng over tls": False}


@encrypted
def test_tls_with_another_groups_certificate_is_refused() -> None:
    with Node("socket over tls", "b", 1) as node, Node("socket over tls", "a", 0) as stranger:
        stranger.lane._credentials = Credentials(SECRET, 0, tls=peers.make_identity("another"))  # type: ignore[attr-defined]
        with pytest.raises(PeerLost, match="certificate"):
            stranger.meet("b", node.address).call("keep", 5)
        assert node.served == []


# --- another user --------------------------------------------------------------------------------------------------

root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
LOCAL = ["socket over unix", "nng over ipc"]


@pytest.fixture
def nobody(process: Process) -> Process:
    process.run(peers.become, 65534)
    return process


@root
@pytest.mark.parametrize("kind", LOCAL)
def test_another_user_with_the_secret_is_refused_on_unix_sockets(nobody: Process, kind: str) -> None:
    with Node(kind, "b", 1) as node:
        nobody.run(peers.begin, kind, "a", 0)
        nobody.run(peers.connect, "b", node.address)
        with pytest.raises(AssertionError, match="PeerLost"):
            nobody.run(peers.ask, "keep")
        assert node.served == []


@root
@pytest.mark.parametrize("kind", LOCAL)
def test_a_listener_of_another_user_is_refused_by_name(nobody: Process, kind: str) -> None:
    with Node(kind, "a", 0) as caller:
        caller.meet("b", nobody.run(peers.begin, kind, "b", 1))
        with pytest.raises(PeerLost, match=r"uid 65534.*across_users"):
            caller.call("keep", 5)


@root
@pytest.mark.parametrize("kind", LOCAL)
def test_users_of_a_group_that_was_formed_across_them_connect(nobody: Process, kind: str) -> None:
    with Node(kind, "b", 1, across_users=True) as node:
        nobody.run(peers.begin, kind, "a", 0, SECRET, True)
        nobody.run(peers.connect, "b", node.address)
        nobody.run(peers.ask, "keep")
        assert len(node.served) == 1
