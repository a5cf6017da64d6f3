"""The deadlines of calls that methods make."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from tests.polling import wait_until
from tests.unit.callees import exposed
from tests.unit.members import Members

LONG = 20.0


def blocking() -> None:
    rtr.rpc_sync("b", timeout=LONG).hold()


def awaiting() -> None:
    async def call() -> Any:
        return await rtr.rpc_async("b", timeout=LONG).hold()

    asyncio.run(call())


def reading() -> None:
    next(rtr.rpc_sync("b", timeout=LONG).stream())


@pytest.mark.parametrize("nested", [blocking, awaiting, reading])
def test_a_nested_call_ends_no_later_than_the_call_that_it_serves(nested: Callable[[], None]) -> None:
    release, ended = threading.Event(), list[float]()

    def hold(_: None) -> None:
        release.wait(LONG)

    def stream(_: None) -> Any:
        yield release.wait(LONG)

    def pass_on(_: None) -> None:
        began = time.monotonic()
        try:
            nested()
        except rtr.RpcTimeout:
            ended.append(time.monotonic() - began)
            raise

    methods = {"hold": exposed(hold), "stream": exposed(stream, ahead=1), "pass_on": exposed(pass_on)}
    with Members(rtr.GroupConfig(rpc_timeout_s=LONG), methods) as members, members.acting("a"):
        with pytest.raises(rtr.RpcTimeout):
            rtr.rpc_sync("home", timeout=0.5).pass_on()
        assert wait_until(lambda: bool(ended), LONG) and ended[0] < LONG / 2
        release.set()


class Slow:
    """Takes that many seconds to be packed."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __reduce__(self) -> Any:
        time.sleep(self.seconds)
        return Slow, (self.seconds,)


def test_a_timeout_names_its_limit_and_the_remedy() -> None:
    released = threading.Event()
    methods = {"wait": exposed(lambda *_: released.wait(LONG))}
    with Members(rtr.GroupConfig(rpc_timeout_s=0.2), methods) as members, members.acting("a"):
        with pytest.raises(rtr.RpcTimeout, match=r"home.wait .* within 0\.2 s \(rpc_timeout_s\); .* pass timeout="):
            rtr.rpc_sync("home").wait()
        with pytest.raises(rtr.RpcTimeout, match=r"home.wait did not answer within 0\.1 s \(timeout\); it"):
            rtr.rpc_sync("home", timeout=0.1).wait()
        released.set()


def test_a_timeout_begins_before_its_arguments_are_packed() -> None:
    ran = list[Any]()
    methods = {"answer": exposed(lambda _, it: ran.append(it))}
    with Members(rtr.GroupConfig(rpc_timeout_s=LONG), methods) as members, members.acting("a"):
        lane = members.lanes["a"]
        lane.holds = lambda _: True
        future = rtr.rpc_async("home", timeout=LONG).answer(Slow(0.2))
        assert lane.held[0][0].args[1].header[5] <= LONG - 0.2
        lane.release()
        future.wait()
        with pytest.raises(rtr.RpcTimeout, match="answer was not sent: its deadline passed before"):
            rtr.rpc_sync("home", timeout=0.1).answer(Slow(0.2))
        assert len(ran) == 1 and not lane.held


@pytest.fixture
def answering() -> Iterator[None]:
    """This process is a member that calls ``answer`` of another."""
    config, methods = rtr.GroupConfig(rpc_timeout_s=LONG), {"answer": exposed(lambda _: 42)}
    with Members(config, methods) as members, members.acting("a"):
        yield


@pytest.mark.usefixtures("answering")
@pytest.mark.parametrize(
    "wait",
    [
        lambda _: rtr.rpc_sync("home", timeout=True).answer(),
        lambda _: rtr.rpc_async("home", timeout=False).answer(),
        lambda future: future.result(True),
        lambda future: future.exception(timeout=True),
        lambda future: rtr.wait([future], timeout=True),
        lambda _: rtr.current_member(timeout=True),
        lambda _: asyncio.run(rtr.await_membership(timeout=True)),
        lambda _: rtr.process_group(timeout=True),
        lambda _: rtr.process_group_info(timeout=True),
        lambda _: rtr.Topic("t", home="home").publish(1, True),
        lambda _: rtr.Topic("t", home="home").subscribe().get(True),
        lambda _: rtr.Queue.find("q", timeout=True),
        lambda _: rtr.WeightStore("w", home="home").wait(1, True),
        lambda _: rtr.WeightStore("w", home="home").pull({}, timeout=True),
        lambda _: rtr.WeightStore("w", home="home").layout(timeout=True),
        lambda _: rtr.WeightStore("w", home="home").view(timeout=True),
        lambda _: rtr.WeightStore("w", home="home").prefetch({"w": torch.ones(1)}, timeout=True).wait(),
        lambda _: rtr.WeightStore("w", home="home").prefetch({"w": torch.ones(1)}).wait(True),
        lambda _: rtr.rdt.wait(timeout=True),
        lambda _: asyncio.run(rtr.rdt.get([], timeout=True)),
        lambda _: rtr.join(timeout=True),
        lambda _: rtr.GroupConfig(rpc_timeout_s=True),
    ],
)
def test_a_bool_is_no_number_of_seconds(wait: Callable[[Any], Any]) -> None:
    """It would count as 0 or 1, and comes from other packages' ``block``."""
    future = rtr.rpc_async("home").answer()
    with pytest.raises(rtr.ConfigurationError, match=r"seconds.*(True|False)|True must be a number of seconds"):
        wait(future)
    assert future.wait() == 42


@pytest.mark.usefixtures("answering")
@pytest.mark.parametrize("wrong", ["x", float("nan"), float("inf"), [1]])
@pytest.mark.parametrize("ask", ["result", "exception"])
def test_what_is_no_time_to_wait_for_a_result_is_refused_by_name(ask: str, wrong: Any) -> None:
    future = rtr.rpc_async("home").answer()
    with pytest.raises(rtr.ConfigurationError, match="timeout is a number of seconds"):
        getattr(future, ask)(timeout=wrong)
    assert future.result(timeout=LONG) == 42
