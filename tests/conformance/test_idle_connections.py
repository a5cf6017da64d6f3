"""Connections of the socket and nng lanes that carry no call: they are closed, and opened again unseen."""

from __future__ import annotations

import itertools
import os
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from raytorchrpc.errors import PeerLost
from raytorchrpc.lanes.base import Message, PeerAddress, Pending
from raytorchrpc.lanes.common import connections
from raytorchrpc.lanes.nng import lane as nng_lane
from raytorchrpc.lanes.socket import lane as socket_lane
from tests.conformance import peers
from tests.conformance.peers import EMPTY, PATIENCE_S, Node, Process, answer, node
from tests.polling import wait_until
from tests.threads import in_threads

#: Both lanes, both ways and TLS; test_message_lanes tries each lane in every way.
KINDS = ["socket over unix", "nng over tcp", *peers.ENCRYPTED[:1]]
NAMES = [f"peer{number}" for number in range(200)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the limits of lanes that are made afterwards."""

    def change(sweep_s: float = 0.02, idle_s: float = 60.0, most: int = connections.MOST_IDLE) -> None:
        monkeypatch.setattr(connections, "SWEEP_S", sweep_s)
        monkeypatch.setattr(connections, "IDLE_S", idle_s)
        monkeypatch.setattr(connections, "MOST_IDLE", most)

    return change


@contextmanager
def caller_of_many(kind: str, count: int = len(NAMES)) -> Iterator[tuple[Node, Node]]:
    """A member and its peers, which all listen at one place."""
    with Node(kind, "b", 1) as callee, Node(kind, "a", 0) as caller:
        caller.lane.connect([PeerAddress(name, callee.address) for name in NAMES[:count]])
        yield caller, callee


def open_connections(member: Node) -> int:
    """To its peers."""
    lane: Any = member.lane
    return len(lane._made)


def accepted_connections(member: Node) -> int:
    """From its peers."""
    lane: Any = member.lane
    return len(lane.selector.of(lane) if member.kind.startswith("socket") else {*lane._by_fd.values()})


def both_ends(caller: Node, callee: Node) -> tuple[int, int]:
    return open_connections(caller), accepted_connections(callee)


def ask_all(caller: Node, names: list[str] = NAMES) -> None:
    pending = {name: send(caller, name, "echo", name.encode()) for name in names}
    assert all(bytes(answer(one).body.payload) == name.encode() for name, one in pending.items())


def send(caller: Node, name: str, what: str, payload: bytes = b"", **options: Any) -> Pending:
    return caller.lane.call(name, Message((what,), EMPTY._replace(payload=payload)), PATIENCE_S, **options)


def test_a_member_that_called_many_keeps_few_connections(kind: str, limits: Callable[..., None]) -> None:
    limits(sweep_s=0.1, most=64)
    with caller_of_many(kind) as (caller, callee):
        made, most = spied_connects(caller), connections.MOST_IDLE
        for _ in range(2):
            ask_all(caller)
            assert wait_until(lambda: both_ends(caller, callee) == (most, most), PATIENCE_S)
        assert {*made} == {*NAMES} and len(made) > len(NAMES)


def test_a_connection_is_closed_some_time_after_its_last_call(kind: str, limits: Callable[..., None]) -> None:
    limits(idle_s=0.1)
    with caller_of_many(kind, 5) as (caller, callee):
        for _ in range(3):
            ask_all(caller, NAMES[:5])
            assert wait_until(lambda: both_ends(caller, callee) == (0, 0), PATIENCE_S)
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            ask_all(caller, NAMES[:5])
            assert wait_until(lambda: both_ends(caller, callee) == (0, 0), PATIENCE_S)
        assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, PATIENCE_S)


def test_a_connection_stays_while_a_reply_is_outstanding(kind: str, limits: Callable[..., None]) -> None:
    """As that of a watch, which is answered when the process ends, or not at all."""
    limits(idle_s=0.0, most=0)
    with caller_of_many(kind, 2) as (caller, callee):
        held = send(caller, NAMES[0], "hold")
        assert callee.arrived.acquire(timeout=PATIENCE_S)
        for _ in range(3):  # each time a sweep has closed another one
            ask_all(caller, NAMES[1:2])
            assert wait_until(lambda: open_connections(caller) == 1, PATIENCE_S)
        assert not held.done
        callee.held.pop()(Message(("answered",), EMPTY))
        assert answer(held).header == ("answered",)
        assert wait_until(lambda: open_connections(caller) == 0, PATIENCE_S)
        lost = send(caller, NAMES[0], "hold")
        assert callee.arrived.acquire(timeout=PATIENCE_S)
        callee.lane.close()
        with pytest.raises(PeerLost):
            answer(lost)


def test_calls_that_race_with_closing_arrive_once(
    kind: str, limits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is lost, none is sent twice, each is over once, and no peer seems lost."""
    limits(sweep_s=0.001, idle_s=0.0, most=0)
    names, rounds, callers = NAMES[:5], 40, 8
    over = Counter[bytes]()
    lock = threading.Lock()
    with caller_of_many(kind, len(names)) as (caller, callee):
        made = spied_connects(caller)
        close_now_and_then(monkeypatch, caller)

        def ended(what: bytes) -> None:
            with lock:
                over[what] += 1

        def call(number: int) -> None:
            for count in range(rounds):
                for name in names:
                    what = f"{number} {count} {name}".encode()
                    waits = bool(count % 2)
                    released = partial(ended, what)
                    pending = send(caller, name, "keep", what, caller_waits=waits, on_released=released)
                    if waits or not number % 2:
                        assert answer(pending).header == ("kept",)
                threading.Event().wait(0.0005 * number)  # some calls follow each other at once, others do not

        in_threads(call, callers)
        expected = rounds * callers * len(names)
        assert wait_until(lambda: sum(over.values()) == expected, PATIENCE_S)
        assert {*over.values()} == {1}
        served = Counter(bytes(message.body.payload) for message in callee.served)
        assert served == over
        assert len(made) > 10 * len(names)


def spied_connects(caller: Node) -> list[str]:
    """The peers to which the member connects from now on."""
    lane: Any = caller.lane
    made, connect = list[str](), lane._connect

    def note(peer: str, *args: Any) -> Any:
        made.append(peer)
        return connect(peer, *args)

    lane._connect = note
    return made


def close_now_and_then(monkeypatch: pytest.MonkeyPatch, caller: Node) -> None:
    """Close a connection at the worst time, as another thread may: after a call has chosen it, before it is used."""
    kind: Any = (socket_lane if caller.kind.startswith("socket") else nng_lane).Connection
    call, chosen = kind.call, itertools.count()

    def closed(connection: Any, *args: Any) -> Any:
        if next(chosen) % 3 == 0:
            connection.end_idle()
        return call(connection, *args)

    monkeypatch.setattr(kind, "call", closed)


@pytest.mark.parametrize("closes", [True, False])
def test_a_peer_that_dies_fails_the_next_call_whether_its_connection_was_closed(
    kind: str, limits: Callable[..., None], process: Process, closes: bool
) -> None:
    limits(idle_s=0.0 if closes else 60.0)
    with Node(kind, "a", 0) as caller:
        caller.meet("b", process.run(peers.begin, kind, "b", 1))
        caller.call("echo")
        assert wait_until(lambda: open_connections(caller) == (not closes), PATIENCE_S)
        process.kill()
        for _ in range(2):
            with pytest.raises(PeerLost, match="'b'") as lost:
                caller.call("echo")
        assert not lost.value.may_have_run  # at the second attempt in any case
        if closes:
            assert "no connection to it" in lost.value.cause


def test_at_the_limit_of_descriptors_idle_connections_make_room(kind: str, spawn: Callable[[], Process]) -> None:
    """A member that may open fewer descriptors than it has peers reaches all of them."""
    caller, callee = spawn(), spawn()
    caller.run(peers.begin, kind, "a", 0)
    caller.run(_call_with_few_descriptors, callee.run(peers.begin, kind, "b", 1))


def _call_with_few_descriptors(address: Any) -> None:
    node().lane.connect([PeerAddress(name, address) for name in NAMES])
    ask_all(node(), NAMES[:1])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 60, limits[1]))
    try:
        for name in NAMES:
            assert bytes(answer(send(node(), name, "echo", b"here")).body.payload) == b"here"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert 0 < open_connections(node()) <= 60
