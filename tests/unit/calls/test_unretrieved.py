"""Failures of calls whose futures were dropped: logged once, with peer and method, and only if nobody saw them."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator

import pytest

import raytorchrpc as rtr
from tests.polling import wait_until
from tests.unit.callees import exposed
from tests.unit.members import Members, in_thread

LONG = 20.0


def fail(_: None, text: str = "on purpose") -> None:
    raise KeyError(text)


def ping(_: None) -> str:
    return "pong"


@pytest.fixture
def members() -> Iterator[Members]:
    methods = {"fail": exposed(fail), "ping": exposed(ping)}
    with Members(rtr.GroupConfig(rpc_timeout_s=LONG), methods) as made, made.acting("a"):
        yield made


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What was logged of such calls; a failure of each kind is logged once."""
    monkeypatch.setattr("raytorchrpc.process.threads._reported", {})

    def of_calls() -> list[str]:
        records = [record for record in caplog.records if "never retrieved" in record.getMessage()]
        assert all(record.levelno == logging.ERROR and record.exc_info for record in records)
        return [record.getMessage() + f" {record.exc_info[1]!r}" for record in records if record.exc_info]

    return of_calls


Logged = Callable[[], list[str]]


def flush(members: Members, logged: Logged) -> list[str]:
    """What was logged of all calls dropped so far: a last one, of another method, is behind them."""
    before = len(logged())
    rtr.rpc_async("home").no_such_method()
    gc.collect()
    assert wait_until(lambda: any("no_such_method" in line for line in logged()[before:]), LONG)
    return [line for line in logged() if "no_such_method" not in line]


def test_a_failure_is_logged_if_its_future_was_dropped_before_or_after_it(members: Members, logged: Logged) -> None:
    lane = members.lanes["a"]
    lane.holds = lambda method: method == "fail"
    rtr.rpc_async("home").fail()  # dropped while it is under way
    future = rtr.rpc_async("b").fail("later")
    lane.release()
    assert rtr.wait([future])[0] == [future]
    assert not any("b.fail" in line for line in logged()), "somebody may still ask"
    del future
    assert wait_until(lambda: len(logged()) == 2, LONG)
    for line, peer, text in zip(sorted(logged()), ("b", "home"), ("later", "on purpose"), strict=True):
        assert f"the exception of a call of {peer}.fail was never retrieved" in line and repr(KeyError(text)) in line
    for _ in range(20):
        rtr.rpc_async("home").fail()
    assert len(flush(members, logged)) == 2, "more of the kind are only counted"


def test_a_call_that_is_lost_or_late_is_logged(members: Members, logged: Logged) -> None:
    lane = members.lanes["a"]
    lane.holds = lambda method: method == "ping"
    rtr.rpc_async("home").ping()
    rtr.rpc_async("b", timeout=0.05).ping()
    lane.lose(0)
    assert wait_until(lambda: len(logged()) == 2, LONG)
    lost, late = sorted(logged(), key=lambda line: "RpcTimeout" in line)
    assert "home.ping" in lost and "PeerLost" in lost
    assert "b.ping" in late and "RpcTimeout" in late
    lane.release()
    members.mark_away("a", "home", "gone for now")
    rtr.rpc_async("home", retry=1, timeout=0.1).ping()
    assert wait_until(lambda: len(logged()) == 3, LONG)
    assert "home.ping" in logged()[2] and "gone for now" in logged()[2]


def test_what_somebody_saw_or_gave_up_is_not_logged(members: Members, logged: Logged) -> None:
    lane = members.lanes["a"]
    with pytest.raises(KeyError):
        rtr.rpc_sync("home").fail()
    with pytest.raises(KeyError):
        rtr.rpc_async("home").fail().result()
    assert isinstance(rtr.rpc_async("home").fail().exception(), KeyError)

    async def awaited() -> None:
        with pytest.raises(KeyError):
            await rtr.rpc_async("home").fail()

    asyncio.run(awaited())
    lane.holds = lambda method: method == "fail"
    cancelled = rtr.rpc_async("home").fail()
    late = rtr.rpc_async("home", timeout=0.05).fail()
    assert cancelled.cancel()
    lane.lose(0)
    with pytest.raises(rtr.RpcTimeout):
        late.result()
    first, second = rtr.rpc_async("home").fail(), rtr.rpc_async("b").fail()
    releasing = in_thread(lambda: lane.release(1) or True)
    with pytest.raises(KeyError):
        rtr.gather(first, second)
    releasing()
    del cancelled, late, first, second
    lane.release()
    assert rtr.rpc_async("home").ping()  # dropped, and no failure
    assert flush(members, logged) == []


def test_calls_that_end_with_the_group_are_not_logged(members: Members, logged: Logged) -> None:
    lane = members.lanes["a"]
    lane.holds = lambda method: method == "ping"
    rtr.rpc_async("home").ping()
    members.members["a"].leave()
    lane.lose(0)
    assert logged() == []
