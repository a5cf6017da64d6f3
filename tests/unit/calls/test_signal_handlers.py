"""Calls in a signal handler that has interrupted another operation of the package on the same thread."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc.lanes.base import PeerAddress
from tests.unit.callees import exposed
from tests.unit.members import Members

LONG = 20.0
#: What a handler calls ends, or is refused, within this time (seconds).
AT_ONCE = 1.0
#: Of each operation so many points are tried.
POINTS = 30
BIG = torch.arange(1 << 18, dtype=torch.float32)


def count_up(_: Any, number: int) -> Iterator[int]:
    yield from range(number)


def slow(_: Any, x: Any) -> Any:
    time.sleep(0.002)
    return x


METHODS = {"echo": exposed(lambda _, x: x), "slow": exposed(slow), "count_up": exposed(count_up, ahead=2)}


def make_members(**config: Any) -> Members:
    return Members(rtr.GroupConfig(rpc_timeout_s=LONG, **config), METHODS, by_socket=True, beside={"cpu": "shm"})


@pytest.fixture
def members() -> Iterator[Members]:
    with make_members() as made, made.acting("a"):
        yield made


class Interruption:
    """Runs a handler on this thread at one of the points where Python may run that of a signal: where a function
    begins, and after a call of one that is written in C.
    """

    def __init__(self, point: int, handler: Callable[[], object]) -> None:
        self.points, self._point, self._handler = 0, point, handler
        self.longest = 0.0
        self.refusals: list[rtr.RayTorchRpcError] = []

    def _profile(self, frame: Any, event: str, _: object) -> None:
        if event in ("call", "c_return"):
            self.points += 1
            if self.points == self._point:
                began = time.monotonic()
                try:
                    self._handler()
                except rtr.RayTorchRpcError as error:
                    self.refusals.append(error)
                self.longest = time.monotonic() - began

    def __enter__(self) -> Interruption:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        assert self.longest < AT_ONCE
        for refusal in self.refusals:
            assert "interrupted on this thread" in str(refusal) and "set a flag" in str(refusal)


def interrupted(
    operation: Callable[[], object],
    handler: Callable[[], object],
    points: int = POINTS,
    prepare: Callable[[], object] = lambda: None,
) -> int:
    """Run the operation again and again, interrupted at one point after another; returns how often that was refused."""
    prepare()
    with Interruption(0, handler) as run:
        operation()
    refused = 0
    for point in range(1, run.points + 1, max(1, run.points // points)):
        prepare()
        with Interruption(point, handler) as interruption:
            operation()
        refused += len(interruption.refusals)
    return refused


names = map(str, itertools.count())


def ask() -> None:
    assert rtr.rpc_sync("b").echo(1) == 1


def ask_another() -> None:
    assert rtr.rpc_sync("home").echo(2) == 2


def wait_for() -> None:
    assert rtr.rpc_async("b").slow(3).wait() == 3


def gather() -> None:
    assert rtr.gather(rtr.rpc_async("b").echo(4), rtr.rpc_async("home").slow(5)) == [4, 5]


def put_and_get() -> None:
    queue: rtr.Queue[int] = rtr.Queue(next(names), home="home")
    queue.put(6)
    assert queue.get() == 6


def put_and_get_here() -> None:
    queue: rtr.Queue[int] = rtr.Queue(next(names), home="a")
    queue.put(7)
    assert queue.get() == 7


def stream() -> None:
    assert list(rtr.rpc_sync("b").count_up(3)) == [0, 1, 2]


def send_a_megabyte() -> None:
    assert torch.equal(rtr.rpc_sync("b").echo(BIG), BIG)


OPERATIONS = [ask, ask_another, wait_for, gather, put_and_get, put_and_get_here, stream, send_a_megabyte]
#: Those that are refused more often: they wait for other threads, or use what lives in this process.
REFUSED = {gather, send_a_megabyte, put_and_get_here}


@pytest.mark.parametrize(
    ("operation", "handler"),
    [*((each, ask_another) for each in OPERATIONS), *((ask, each) for each in OPERATIONS)],
)
def test_what_a_handler_calls_works_or_is_refused_at_once(
    members: Members, operation: Callable[[], None], handler: Callable[[], None]
) -> None:
    operation()  # connects
    handler()
    refused = interrupted(operation, handler)
    assert refused <= (POINTS // 2 if handler in REFUSED else POINTS // 8)


def test_a_handler_may_call_at_any_point_of_a_call(members: Members) -> None:
    ask()
    assert interrupted(ask, ask, points=10_000) < 10


def test_a_handler_that_another_one_interrupts(members: Members) -> None:
    ask()
    assert interrupted(ask, lambda: interrupted(ask, ask, points=3), points=20) < 5


def test_a_call_while_this_thread_connects(members: Members) -> None:
    lane: Any = members.lanes["a"]
    address = lane._addresses["b"]

    def disconnect() -> None:
        lane.disconnect("b")
        lane.connect([PeerAddress("b", address)])

    assert interrupted(ask, ask, 60, disconnect) < 60
    assert interrupted(ask, ask_another, 60, disconnect) < 10


def test_a_handler_needs_no_credit(members: Members) -> None:
    with make_members(max_calls_in_flight=1) as others, others.acting("a"):
        ask()
        assert interrupted(ask, ask) < 5


@pytest.mark.parametrize("what", ["wait", "done", "cancel"])
def test_a_call_that_was_made_before(members: Members, what: str) -> None:
    futures: list[rtr.Future[Any]] = []

    def operation() -> None:
        futures[:] = [rtr.rpc_async("b").slow(8)]
        ask()
        try:
            assert futures[0].wait() == 8
        except rtr.CancelledError:
            assert what == "cancel"

    ask()
    interrupted(operation, lambda: [getattr(future, what)() for future in futures])


def test_no_other_locks_are_taken() -> None:
    """A ``threading.Lock`` hangs for good if a handler takes it once more: use ``process.locks``."""
    package = Path(rtr.__file__).parent
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if "threading.Lock()" in path.read_text()}
    assert found <= {
        *("process/threads.py", "process/completion.py", "calls/client/future.py"),  # not for sections
        "lanes/common/connections.py",  # likewise
        *(
            "calls/client/stream.py",
            "tensors/host_device_copy.py",
            "lanes/nng/lane.py",
            "lanes/socket/lane.py",
        ),  # not waited for, in a handler
        "integrations/team.py",
    }
