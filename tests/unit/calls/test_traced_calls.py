"""Calls of a member that is traced: which events they leave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc.calls.spans import Event, Tracer
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import PeerLost
from tests.unit.callees import exposed
from tests.unit.members import Members


def count(actor: Any, number: int) -> Iterator[int]:
    yield from range(number)


METHODS = {"double": exposed(lambda actor, x: 2 * x), "count": exposed(count, ahead=1)}
LARGE = torch.ones(1 << 18)


def test_a_call_its_method_and_their_tensors_are_recorded_and_no_longer_than_asked_for() -> None:
    tracer = Tracer(1, 100)
    with Members(GroupConfig(), METHODS, by_socket=True, beside={"cpu": "shm"}) as members, members.acting("a"):
        for local in members.members.values():
            local.trace(tracer)
        assert rtr.rpc_sync("home").double(LARGE).sum() == 2 * LARGE.numel()
        large = events_of(tracer)
        assert list(rtr.rpc_sync("home").count(2)) == [0, 1]
        stream = events_of(tracer)[len(large) :]
        for local in members.members.values():
            local.trace(None)
        before = tracer.taken()
        assert rtr.rpc_sync("home").double(21) == 42
        assert tracer.taken() == before
    assert sorted(event.name for event in large) == [
        *("fetch by shm", "fetch by shm", "home.double", "home.double", "ship by shm", "ship by shm")
    ]
    called, served = (next(event for event in large if event.kind == kind) for kind in ("call", "serve"))
    assert called.mark == served.mark is not None and called.begin <= served.begin <= served.end <= called.end
    assert called.about["lane"] == "socket" and called.about["ship"] == called.about["fetch"] == "shm"
    assert min(called.about["bytes_out"], called.about["bytes_in"]) >= LARGE.nbytes
    assert [event.name for event in stream if event.kind == "call"] == ["home.count", *["home.(next)"] * 3]
    assert {event.mark for event in stream if event.kind == "serve"} == {
        event.mark for event in stream if event.kind == "call"
    }


def test_a_call_that_cannot_be_sent_is_recorded_with_its_error() -> None:
    tracer = Tracer(1, 100)
    with Members(GroupConfig(), METHODS) as members, members.acting("a") as local:
        local.trace(tracer)
        members.mark_away("a", "b", "it ended")
        with pytest.raises(PeerLost):
            rtr.rpc_sync("b").double(1)
        (event,) = events_of(tracer)
    assert (event.kind, event.name, event.about["error"]) == ("call", "b.double", "PeerLost")


def events_of(tracer: Tracer) -> list[Event]:
    return tracer.taken()[0]
