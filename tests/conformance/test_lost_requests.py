"""What the socket lane says of a request whose connection ends: whether it may have run."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raytorchrpc.errors import PeerLost
from raytorchrpc.lanes.base import Message, Pending
from raytorchrpc.lanes.socket.lane import Connection, tune
from raytorchrpc.tensors.codec import NOTHING

SELECTOR: Any = SimpleNamespace(
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
    connection = Connection(SELECTOR, here, "b", None, lambda ended: None)
    yield connection, there
    connection.end("over")
    there.close()


def begin(connection: Connection, size: int = 7) -> Pending:
    message = Message(("request",), NOTHING._replace(payload=bytes(size)))
    return connection.call(message, time.monotonic() + 10, True, None)


@pytest.mark.parametrize("taken", [0, 10])
def test_a_request_that_was_not_sent_whole_did_not_run(ends: tuple[Connection, socket.socket], taken: int) -> None:
    connection, there = ends

    def take_a_part() -> None:
        there.recv(taken)
        there.close()

    taker = threading.Thread(target=take_a_part)
    taker.start()
    with pytest.raises(PeerLost, match="'b'") as lost:
        begin(connection, 64 << 20)
    taker.join(10)
    assert not lost.value.may_have_run


def test_a_request_that_was_sent_may_have_run(ends: tuple[Connection, socket.socket]) -> None:
    connection, there = ends
    pending = begin(connection)
    there.close()
    assert pending.wait(10)
    with pytest.raises(PeerLost, match="'b'") as lost:
        pending.take()
    assert lost.value.may_have_run
