"""Replies: what is sent of a result, and when."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytorchrpc.calls.protocol import CALL, OK, RAISED, ReplyHeader, RequestHeader
from raytorchrpc.errors import NotFound
from raytorchrpc.lanes.base import Capabilities, Message
from raytorchrpc.tensors.codec import NOTHING, Codec, Encoded
from raytorchrpc.tensors.exceptions import decode_exception
from tests.polling import wait_until
from tests.unit.callees import TOKEN, Deadlines, DeferredReply, exposed, make_callee


def request_for(method: str, caller: int = 0, body: Encoded = NOTHING) -> Message:
    return Message(tuple(RequestHeader(CALL, caller, TOKEN, method, (), 5.0, None)), body)


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
