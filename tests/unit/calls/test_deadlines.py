"""The deadlines of calls that methods make."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

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
    members = Members(rtr.GroupConfig(rpc_timeout_s=LONG), methods)
    try:
        with members.acting("a"), pytest.raises(rtr.RpcTimeout):
            rtr.rpc_sync("home", timeout=2).pass_on()
        with members.acting("a"):
            assert wait_until(lambda: bool(ended), LONG) and ended[0] < LONG / 2
    finally:
        release.set()
        members.close()


@pytest.mark.parametrize("wrong", ["x", float("nan"), float("inf"), [1]])
@pytest.mark.parametrize("ask", ["result", "exception"])
def test_what_is_no_time_to_wait_for_a_result_is_refused_by_name(ask: str, wrong: Any) -> None:
    members = Members(rtr.GroupConfig(rpc_timeout_s=LONG), {"answer": exposed(lambda _: 42)})
    try:
        with members.acting("a"):
            future = rtr.rpc_async("home").answer()
            with pytest.raises(rtr.ConfigurationError, match="timeout is a number of seconds"):
                getattr(future, ask)(timeout=wrong)
            assert future.result(timeout=LONG) == 42
    finally:
        members.close()
