"""What a server keeps for its callers, and for how long."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytorchrpc.calls.protocol import CALL, FETCH, OK, RAISED, ControlHeader, ReplyHeader, RequestHeader
from raytorchrpc.calls.server.incoming import IncomingCalls
from raytorchrpc.errors import NotFound, RpcTimeout
from raytorchrpc.lanes.base import Capabilities, Message
from raytorchrpc.tensors.codec import NOTHING, Codec, Encoded
from raytorchrpc.tensors.exceptions import decode_exception
from tests.polling import wait_until
from tests.unit.callees import TOKEN, Deadlines, DeferredReply, exposed, make_callee


@pytest.fixture
def server(deadlines: Deadlines) -> IncomingCalls:
    return make_callee(deadlines)


def a_result() -> tuple[Encoded, weakref.ref[torch.Tensor]]:
    tensor = torch.ones(3)
    return NOTHING._replace(tensors=[tensor]), weakref.ref(tensor)


def keep(server: IncomingCalls, body: Encoded, seconds: float) -> int:
    """The number under which the caller may fetch the result."""
    return ReplyHeader(*server.callee.replies.keep(body, seconds).header).number


def fetch(server: IncomingCalls, number: int) -> Message:
    """The reply to the caller that asks for it."""
    answers: list[Message] = []
    request = Message(tuple(ControlHeader(FETCH, 0, TOKEN, number)), NOTHING)
    work = server.serve(SimpleNamespace(), request, answers.append)  # type: ignore[arg-type]
    assert work is not None
    work()
    (answer,) = answers
    return answer


def request_for(method: str, caller: int = 0, body: Encoded = NOTHING) -> Message:
    return Message(tuple(RequestHeader(CALL, caller, TOKEN, method, (), 5.0, None)), body)


def test_a_result_that_nobody_fetches_is_dropped_though_no_other_is_kept(server: IncomingCalls) -> None:
    body, alive = a_result()
    number = keep(server, body, 0.02)
    del body
    assert wait_until(lambda: gc.collect() >= 0 and alive() is None, 5)
    error = decode_exception(Codec(), fetch(server, number).body, "callee")
    assert isinstance(error, RpcTimeout)


def test_a_result_that_was_fetched_leaves_nothing(server: IncomingCalls, deadlines: Deadlines) -> None:
    body, alive = a_result()
    number = keep(server, body, 3600)
    assert fetch(server, number).body is body
    del body
    gc.collect()
    assert alive() is None
    for _ in range(200):
        fetch(server, keep(server, a_result()[0], 3600))
    assert len(deadlines._heap) < 100


def test_what_is_kept_at_the_end_of_the_group_is_dropped(server: IncomingCalls) -> None:
    body, alive = a_result()
    server.callee.replies.keep(body, 3600)
    del body
    server.callee.replies.close()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("frozen", [False, True])
def test_a_result_that_nobody_changes_is_sent_as_it_is(deadlines: Deadlines, frozen: bool) -> None:
    state = torch.ones(3)
    note = exposed(lambda instance: [state], frozen=frozen)
    server = make_callee(deadlines, {"method": note})
    takes_later = Capabilities(in_band_bytes=None, in_band_cuda=True, copies_at_once=False, rrefs=True)
    lane: Any = SimpleNamespace(capabilities=takes_later)
    answers: list[Message] = []
    work = server.serve(lane, request_for("method"), answers.append)
    assert work is not None
    work()
    (answer,) = answers
    assert ReplyHeader(*answer.header).kind == OK
    assert (answer.body.tensors[0].data_ptr() == state.data_ptr()) is frozen


@pytest.mark.parametrize("error", [None, NotFound("nothing there")])
def test_a_service_answers_later_and_holds_no_thread_meanwhile(deadlines: Deadlines, error: Exception | None) -> None:
    later, given, threads = DeferredReply(), [], []
    later.convert = lambda value: (threads.append(threading.current_thread().name), value)[1]

    def service(*args: Any) -> DeferredReply:
        given.append(args)
        return later

    note = exposed(service, frozen=True, service=True)
    local = object()
    server = make_callee(deadlines, {"raytorchrpc.test": note}, local=local)
    lane: Any = SimpleNamespace(capabilities=Capabilities(None, True, True, True))
    answers: list[Message] = []
    body = Codec().encode((("a", 2), {}))
    work = server.serve(lane, request_for("raytorchrpc.test", 7, body), answers.append)
    assert work is not None
    work()
    assert not answers and given == [(local, 7, "a", 2)], "with the member and the caller's rank"
    assert later.settle("answer", error) and not later.settle("twice")
    assert wait_until(lambda: bool(answers), 5)
    (answer,) = answers
    assert ReplyHeader(*answer.header).kind == (OK if error is None else RAISED)
    if error is None:
        assert Codec().decode(*answer.body) == "answer"
    else:
        assert isinstance(decode_exception(Codec(), answer.body, "callee"), NotFound)
    assert error is not None or threads == ["test-1"], "a worker sends it, and not whoever settled it"
    server.callee.workers.stop()
