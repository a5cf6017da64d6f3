"""What a server keeps for its callers, and for how long."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytorchrpc.calls.exposed import Exposed
from raytorchrpc.calls.incoming import CALL, FETCH, OK, RAISED, Server, builtin_services
from raytorchrpc.calls.services import DeferredReply
from raytorchrpc.errors import NotFound, RpcTimeout
from raytorchrpc.lanes.base import Capabilities, Message
from raytorchrpc.process.deadlines import Deadlines
from raytorchrpc.process.workers import Workers
from raytorchrpc.tensors.codec import NOTHING, Codec
from raytorchrpc.tensors.exceptions import decode_exception
from tests.conformance.peers import wait_until


@pytest.fixture
def deadlines() -> Iterator[Deadlines]:
    made = Deadlines("test")
    yield made
    made.stop()


@pytest.fixture
def server(deadlines: Deadlines) -> Server:
    routes: Any = SimpleNamespace(strangers=frozenset(), deadlines=deadlines)
    return Server("callee", "1", None, {}, Codec(), Workers("test"), routes)


def a_result() -> tuple[Message, weakref.ref[torch.Tensor]]:
    tensor = torch.ones(3)
    return Message((OK,), NOTHING._replace(tensors=[tensor])), weakref.ref(tensor)


def fetch(server: Server, number: int) -> Message:
    """What the caller that asks for it is answered."""
    answers: list[Message] = []
    work = server.serve(SimpleNamespace(), Message((FETCH, 0, "1", number), NOTHING), answers.append)  # type: ignore[arg-type]
    assert work is not None
    work()
    (answer,) = answers
    return answer


def test_a_result_that_nobody_fetches_is_dropped_though_no_other_is_kept(server: Server) -> None:
    message, alive = a_result()
    number = server.keep(message, 0.02)
    del message
    assert wait_until(lambda: gc.collect() >= 0 and alive() is None, 5)
    error = decode_exception(server.codec, fetch(server, number).body, "callee")
    assert isinstance(error, RpcTimeout)


def test_a_result_that_was_fetched_leaves_nothing(server: Server, deadlines: Deadlines) -> None:
    message, alive = a_result()
    number = server.keep(message, 3600)
    assert fetch(server, number) is message
    del message
    gc.collect()
    assert alive() is None
    for _ in range(200):
        fetch(server, server.keep(a_result()[0], 3600))
    assert len(deadlines._heap) < 100


def test_what_is_kept_at_the_end_of_the_group_is_dropped(server: Server) -> None:
    message, alive = a_result()
    server.keep(message, 3600)
    del message
    server.close()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("frozen", [False, True])
def test_a_result_that_nobody_changes_is_sent_as_it_is(deadlines: Deadlines, frozen: bool) -> None:
    state = torch.ones(3)
    note = Exposed(lambda instance: [state], True, None, False, False, False, frozen)
    routes: Any = SimpleNamespace(
        strangers=frozenset(),
        deadlines=deadlines,
        arrived=lambda rank, body: body,
        check_back=lambda rank, tensors: None,
        staged_back=lambda rank, body: body,
    )
    server = Server("callee", "1", None, {"method": note}, Codec(), Workers("test"), routes)
    takes_later = Capabilities(in_band_bytes=None, in_band_cuda=True, copies_at_once=False, rrefs=True)
    lane: Any = SimpleNamespace(capabilities=takes_later)
    answers: list[Message] = []
    work = server.serve(lane, Message((CALL, 0, "1", "method", (), 5.0, None), NOTHING), answers.append)
    assert work is not None
    work()
    (answer,) = answers
    assert answer.header == (OK,)
    assert (answer.body.tensors[0].data_ptr() == state.data_ptr()) is frozen


@pytest.mark.parametrize("error", [None, NotFound("nothing there")])
def test_a_service_answers_later_and_holds_no_thread_meanwhile(
    deadlines: Deadlines, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    later, given, threads = DeferredReply(), [], []
    later.convert = lambda value: (threads.append(threading.current_thread().name), value)[1]

    def service(*args: Any) -> DeferredReply:
        given.append(args)
        return later

    note = Exposed(service, True, None, False, False, False, frozen=True, service=True)
    monkeypatch.setitem(builtin_services, "raytorchrpc.test", note)
    routes: Any = SimpleNamespace(
        strangers=frozenset(),
        deadlines=deadlines,
        arrived=lambda rank, body: body,
        check_back=lambda rank, tensors: None,
        staged_back=lambda rank, body: body,
    )
    workers = Workers("test")
    server = Server("callee", "1", None, {}, Codec(), workers, routes)
    lane: Any = SimpleNamespace(capabilities=Capabilities(None, True, True, True))
    answers: list[Message] = []
    body = server.codec.encode((("a", 2), {}))
    work = server.serve(lane, Message((CALL, 7, "1", "raytorchrpc.test", (), 5.0, None), body), answers.append)
    assert work is not None
    work()
    assert not answers and given == [(routes, 7, "a", 2)], "with the member and the caller's rank"
    assert later.settle("answer", error) and not later.settle("twice")
    assert wait_until(lambda: bool(answers), 5)
    (answer,) = answers
    assert answer.header == ((OK,) if error is None else (RAISED,))
    if error is None:
        assert server.codec.decode(*answer.body) == "answer"
    else:
        assert isinstance(decode_exception(server.codec, answer.body, "callee"), NotFound)
    assert error is not None or threads == ["test-1"], "a worker sends it, and not whoever settled it"
    workers.stop()
