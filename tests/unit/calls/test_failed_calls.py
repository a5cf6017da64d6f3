"""A call that failed keeps nothing alive once its exception is dropped, though no garbage is collected."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from tests.polling import wait_until
from tests.unit.callees import exposed
from tests.unit.members import Members

LONG = 20.0
#: How a call fails, and what is raised then.
FAILURES = {
    "raised by the method": KeyError,
    "peer lost": rtr.PeerLost,
    "late, says the lane": rtr.RpcTimeout,
    "late": rtr.RpcTimeout,
}


def fail(_: None) -> None:
    raise KeyError("on purpose")


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members(rtr.GroupConfig(rpc_timeout_s=LONG), {"fail": exposed(fail)})
    with made.acting("a"):
        yield made
    made.close()


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def failed(members: Members, how: str) -> rtr.Future[Any]:
    lane = members.lanes["a"]
    lane.holds = lambda method: True
    future: rtr.Future[Any] = rtr.rpc_async("home", timeout=0.01 if how == "late" else LONG).fail()
    if how == "raised by the method":
        lane.release()
    elif how == "peer lost":
        lane.lose(0)
    elif how == "late, says the lane":
        lane.held.pop()[1].settle(None, rtr.RpcTimeout("late"))
    assert wait_until(future.done, LONG)
    return future


Make = Callable[[], rtr.Future[Any]]

# No frame here may hold the Future: that would be the caller's own circle.
ASK: dict[str, Callable[[Make], Any]] = {
    "wait": lambda make: make().wait(),
    "result": lambda make: make().result(5),
    "await": lambda make: _awaited(make).send(None),  # it is done: no loop is asked, which would hold the exception
}


async def _awaited(make: Make) -> Any:
    return await make()


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("how", FAILURES)
def test_what_its_caller_held_dies_with_the_exception(members: Members, how: str, ask: str) -> None:
    futures: list[weakref.ref[Any]] = []

    def make() -> rtr.Future[Any]:
        future = failed(members, how)
        futures.append(weakref.ref(future))
        return future

    def caller() -> weakref.ref[torch.Tensor]:
        held_by_the_frame = torch.ones(3)
        with contextlib.suppress(FAILURES[how]):
            ASK[ask](make)
        return weakref.ref(held_by_the_frame)

    tensor = caller()
    assert tensor() is None
    assert futures[0]() is None


@pytest.mark.parametrize("asked", [False, True])
def test_a_failed_call_that_is_dropped_lets_go_of_its_member(members: Members, asked: bool) -> None:
    """Whose arena may be gigabytes."""
    future = failed(members, "peer lost")
    gone = weakref.ref(future), weakref.ref(future._call)
    error = future.exception() if asked else None
    del future
    assert wait_until(lambda: [one() for one in gone] == [None, None], LONG)
    assert isinstance(error, rtr.PeerLost) is asked


def test_a_failed_future_raises_the_same_again(members: Members) -> None:
    future = failed(members, "raised by the method")
    for _ in range(2):
        with pytest.raises(KeyError, match="on purpose"):
            future.wait()
    assert isinstance(future.exception(), KeyError)
