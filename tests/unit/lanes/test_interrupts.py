"""A signal handler raises at any point of a call: what follows on that lane is neither stuck nor out of step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raytorchrpc.errors import PeerLost
from tests.conformance.peers import EMPTY, Message, Node, answer
from tests.shortage import Failing

FILE = "lanes/socket/lane.py"
#: Does not fit in the buffers of a socket, so that it is sent and received in parts.
BIG = torch.arange(400_000, dtype=torch.int64)
TIMEOUT_S = 10.0


class Interruption:
    """Raises KeyboardInterrupt at one of the points at which a lane has called something, counted from 1."""

    def __init__(self, point: int) -> None:
        self.points, self._point = 0, point

    def _profile(self, frame: Any, event: str, _: object) -> None:
        if event == "c_return" and frame.f_code.co_filename.endswith(FILE):
            self.points += 1
            if self.points == self._point:
                raise KeyboardInterrupt

    def __enter__(self) -> Interruption:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


@pytest.fixture(params=["socket over unix", "nng over ipc"])
def caller(request: pytest.FixtureRequest) -> Iterator[Node]:
    with Node(request.param, "b", 1) as callee, Node(request.param, "a", 0) as caller:
        yield caller.meet("b", callee.address)


def ask(caller: Node, number: int, tensor: torch.Tensor = BIG[:9]) -> None:
    body = EMPTY._replace(payload=b"%d" % number, tensors=[tensor + number])
    came = answer(caller.lane.call("b", Message(("work",), body), TIMEOUT_S, caller_waits=True)).body
    assert bytes(came.payload) == b"%d" % number and torch.equal(came.tensors[0], tensor + number)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # some sockets are closed as they die
@pytest.mark.parametrize("caller", ["socket over unix"], indirect=True)
def test_calls_after_an_interrupted_one_are_answered_as_ever(caller: Node) -> None:
    lane: Any = caller.lane
    ask(caller, 0)
    with Interruption(0) as run:
        ask(caller, 0, BIG)
    assert run.points > 20
    for point in range(1, min(run.points, 150) + 1):
        interrupted = lane._made["b"]
        try:
            with Interruption(point):
                ask(caller, point, BIG)
        except (KeyboardInterrupt, PeerLost):
            pass
        assert interrupted.is_free or interrupted.ended
        ask(caller, -point)


@pytest.mark.parametrize("caller", ["nng over ipc"], indirect=True)
def test_a_frame_that_an_interrupt_cuts_off_is_followed_by_none(caller: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    lane: Any = caller.lane
    ask(caller, 0)
    interrupted = lane._made["b"]
    with monkeypatch.context() as patched:
        patched.setattr(interrupted.sock, "send", Failing([KeyboardInterrupt()], list))
        with pytest.raises(KeyboardInterrupt):
            ask(caller, 1)
    assert interrupted.ended
    ask(caller, 2)
