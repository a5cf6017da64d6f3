"""A call that failed keeps nothing alive once its exception is dropped, though no garbage is collected."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytorchrpc import Future
from raytorchrpc.calls import protocol
from raytorchrpc.calls.client.outgoing import OutgoingCall
from raytorchrpc.calls.counters import CallCounters
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.payload import Payload, Payloads
from raytorchrpc.errors import PeerLost, RpcTimeout
from raytorchrpc.lanes.base import Message, Pending
from raytorchrpc.tensors.codec import NOTHING, Codec
from raytorchrpc.tensors.exceptions import encode_exception

CODEC = Codec()
PAYLOADS = Payloads(0, {})


class Held(SimpleNamespace):
    """One that can be looked after by a weak reference."""


class Answered(Pending):
    """Has its outcome already, or never gets one."""

    def __init__(self, outcome: Message | Exception | None) -> None:
        self.outcome = outcome

    def wait(self, timeout_s: float) -> bool:
        return self.outcome is not None

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        if self.outcome is not None:
            callback()

    def take(self) -> Message:
        if isinstance(self.outcome, Message):
            return self.outcome
        assert self.outcome is not None
        raise self.outcome


def under_way(outcome: Message | Exception | None, member: Any = None) -> Future[Any]:
    lane: Any = SimpleNamespace(name="lane")
    route: Any = SimpleNamespace(member=SimpleNamespace(name="peer"), calls=lane, tensors=lane, heavy_results=set())
    local = member or SimpleNamespace(codec=CODEC, counters=CallCounters(), payloads=PAYLOADS, unretrieved=None)
    call = OutgoingCall(local, route, "method", CallOptions())
    seconds = 60.0 if outcome is not None else 0.0
    call.begin(lane, Answered(outcome), Payload(NOTHING), time.monotonic(), seconds, 0)
    return Future(call)


def outcomes() -> dict[str, tuple[Message | Exception | None, type[Exception]]]:
    raised = Message((protocol.RAISED,), encode_exception(CODEC, KeyError("on purpose")))
    return {
        "raised by the method": (raised, KeyError),
        "peer lost": (PeerLost("peer", "it went away"), PeerLost),
        "late, says the lane": (RpcTimeout("late"), RpcTimeout),
        "late": (None, RpcTimeout),
    }


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


Make = Callable[[], Future[Any]]

# No frame here may hold the Future: that would be the caller's own circle.
ASK: dict[str, Callable[[Make], Any]] = {
    "wait": lambda make: make().wait(),
    "result": lambda make: make().result(5),
    "await": lambda make: _awaited(make).send(None),  # it is done: no loop is asked, which would hold the exception
}


async def _awaited(make: Make) -> Any:
    return await make()


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("how", outcomes())
def test_what_its_caller_held_dies_with_the_exception(how: str, ask: str) -> None:
    expected = outcomes()[how][1]
    futures: list[weakref.ref[Any]] = []

    def make() -> Future[Any]:
        future = under_way(outcomes()[how][0])
        futures.append(weakref.ref(future))
        return future

    def caller() -> weakref.ref[torch.Tensor]:
        held_by_the_frame = torch.ones(3)
        with contextlib.suppress(expected):
            ASK[ask](make)
        return weakref.ref(held_by_the_frame)

    tensor = caller()
    assert tensor() is None
    assert futures[0]() is None


@pytest.mark.parametrize("asked", [False, True])
def test_a_failed_call_that_is_dropped_lets_go_of_its_member(asked: bool) -> None:
    """Whose arena may be gigabytes."""
    member = Held(codec=CODEC, counters=CallCounters(), payloads=PAYLOADS, unretrieved=None)
    gone = weakref.ref(member)
    future = under_way(PeerLost("peer", "it went away"), member)
    if asked:
        error = future.exception()
        assert error is not None
    del future, member
    assert gone() is None
    if asked:
        assert isinstance(error, PeerLost)


def test_a_failed_future_raises_the_same_again() -> None:
    future = under_way(outcomes()["raised by the method"][0])
    for _ in range(2):
        with pytest.raises(KeyError, match="on purpose"):
            future.wait()
    assert isinstance(future.exception(), KeyError)
