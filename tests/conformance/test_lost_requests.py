"""A connection of the socket lane whose other end reads late or never: requests that did not run, late replies."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytorchrpc.errors import PeerLost
from raytorchrpc.lanes.base import Message, Pending
from raytorchrpc.lanes.common.frames import FrameReader
from raytorchrpc.lanes.socket.lane import Connection, tune
from raytorchrpc.process.completion import nothing
from raytorchrpc.tensors.codec import NOTHING
from tests.polling import wait_until

SELECTOR = SimpleNamespace(fd=-1, busy=False, remove=lambda one: None, step_down=lambda: None)
LANE: Any = SimpleNamespace(selector=SELECTOR, _discard=lambda one: None)


@pytest.fixture(params=["b"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Connection, socket.socket]]:
    here, there = socket.socketpair()
    tune(here)
    connection = Connection(LANE, here, request.param, None)
    yield connection, there
    connection.end("over")
    there.close()


#: The other end has made the connection, and gets replies.
accepted = pytest.mark.parametrize("ends", [None], indirect=True)


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


def reply_on_a_loop(connection: Connection, tensor: torch.Tensor, take_back: Callable[[], object] = nothing) -> None:
    """More than the kernel takes, 20 times."""

    async def reply() -> None:
        for call in range(20):
            tensor.fill_(call)
            connection.reply(call, Message((), NOTHING._replace(tensors=[tensor]), take_back=take_back))

    asyncio.run(reply())


@accepted
def test_replies_of_an_event_loop_wait_for_a_peer_that_reads_late(ends: tuple[Connection, socket.socket]) -> None:
    connection, there = ends
    tensor = torch.empty(1 << 20, dtype=torch.uint8)
    reply_on_a_loop(connection, tensor)  # nobody has read anything when this returns
    tensor.fill_(99)
    reader, arrived = FrameReader(), dict[int, torch.Tensor]()
    there.settimeout(60)
    while len(arrived) < 20:
        arrived.update((frame.call, frame.message.body.tensors[0]) for frame in reader.feed(there.recv(1 << 16)))
    assert all((found == call).all() for call, found in arrived.items())


@accepted
def test_late_replies_are_taken_back_if_the_peer_is_gone(ends: tuple[Connection, socket.socket]) -> None:
    connection, there = ends
    taken_back = list[int]()
    reply_on_a_loop(connection, torch.empty(1 << 20, dtype=torch.uint8), lambda: taken_back.append(1))
    there.close()
    assert wait_until(lambda: len(taken_back) == 20, 60)
    assert connection.ended
    with pytest.raises(PeerLost):
        reply_on_a_loop(connection, torch.empty(1))
