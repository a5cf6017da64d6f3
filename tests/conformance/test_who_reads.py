"""Which thread reads a connection of the socket lane: a caller that waits, or the leader."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from raytorchrpc.lanes.base import Message, Pending
from tests.conformance.peers import EMPTY, Node, answer
from tests.polling import wait_until

PATIENCE_S = 10.0


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    with Node("socket over unix", "a", 0) as a, Node("socket over unix", "b", 1) as b:
        a.meet("b", b.address)
        yield a, b


def hold(a: Node, b: Node, *, caller_waits: bool) -> Pending:
    """A request that b has got and not answered."""
    pending = a.lane.call("b", Message(("hold",), EMPTY), PATIENCE_S, caller_waits=caller_waits)
    assert b.arrived.acquire(timeout=PATIENCE_S)
    return pending


def shown(node: Node) -> str:
    """Its only connection."""
    lane: Any = node.lane
    (connection,) = lane.selector.of(lane)
    return repr(connection)


def is_shown(node: Node, text: str) -> bool:
    return wait_until(lambda: shown(node) == text, PATIENCE_S)


def test_a_caller_that_waits_reads_its_reply_and_the_leader_what_no_caller_waits_for(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    for caller_waits in (False, True):  # the leader may read the reply of the call that connects
        answer(a.lane.call("b", Message(("echo",), EMPTY), PATIENCE_S, caller_waits=caller_waits))
    pending = hold(a, b, caller_waits=True)
    assert shown(a) == "<connection to 'b', not polled, 1 calls in flight>"
    waits = threading.Thread(target=pending.wait, args=(PATIENCE_S,))
    waits.start()
    assert is_shown(a, "<connection to 'b', read by a thread, 1 calls in flight>")
    later = hold(a, b, caller_waits=False)
    b.held.pop(0)(Message(("first",), EMPTY))
    waits.join(PATIENCE_S)
    assert pending.take().header == ("first",)
    # The caller has left it with a reply to come: the leader polls it soon.
    assert is_shown(a, "<connection to 'b', polled, 1 calls in flight>")
    b.held.pop(0)(Message(("later",), EMPTY))
    assert wait_until(lambda: later.done, PATIENCE_S) and later.take().header == ("later",)


def test_a_callback_has_the_leader_read_at_once(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    a.call("echo")
    pending, came = hold(a, b, caller_waits=True), threading.Event()
    pending.add_done_callback(came.set)
    assert shown(a) == "<connection to 'b', polled, 1 calls in flight>"
    b.held.pop()(Message(("reply",), EMPTY))
    assert came.wait(PATIENCE_S)


def test_the_leader_reads_what_others_connect_until_it_ends(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    a.call("echo")
    lane: Any = b.lane
    (accepted,) = lane.selector.of(lane)
    assert is_shown(b, "<connection from a caller, polled, 0 calls in flight>")
    a.lane.close()
    assert wait_until(
        lambda: repr(accepted).startswith("<connection from a caller, ended: connection closed"), PATIENCE_S
    )
