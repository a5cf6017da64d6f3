"""When a restarted process stops to listen for its group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import raytorchrpc as rtr
from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.rejoin import Rejoin
from raytorchrpc.group import restarted
from tests.polling import wait_until
from tests.releases import needs

LONG_S = 30.0
CONFIG = SimpleNamespace(rpc_timeout_s=LONG_S)


def member(generation: str) -> Any:
    """A LocalMember."""
    return SimpleNamespace(generation=generation, group="group", config=CONFIG)


class Connections:
    """By which a group reaches the process."""

    address = "address"

    def __init__(self, record: Any, *_: Any) -> None:
        self.generation = record.credentials.generation
        OPEN.append(self.generation)

    def close(self) -> None:
        OPEN.remove(self.generation)


OPEN: list[str] = []
"""The generations for which the process listens."""


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The groups that the actor may rejoin, by generation."""
    posted = {each: record(each) for each in ("1", "2")}
    monkeypatch.setattr(restarted, "records_of", lambda actor_id: dict(posted))
    monkeypatch.setattr(restarted, "_CHECK_S", 0.01)
    monkeypatch.setattr(restarted, "connections_for", Connections)
    monkeypatch.setattr(restarted.Process, "post", lambda self, address: None)
    monkeypatch.setattr(restarted.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    OPEN.clear()
    return posted


def record(generation: str) -> Any:
    return SimpleNamespace(
        credentials=SimpleNamespace(generation=generation, group=f"group {generation}"), config=CONFIG
    )


@pytest.fixture
def listening(records: dict[str, Any]) -> Iterator[tuple[Rejoin, threading.Thread]]:
    rejoin = Rejoin("actor")
    thread = threading.Thread(target=restarted._serve_groups, args=(rejoin,), daemon=True)
    thread.start()
    yield rejoin, thread
    for generation in ("1", "2"):
        rejoin.finish(generation)
    assert ends(thread), "else it goes on without what the test has replaced"


def ends(thread: threading.Thread, patience_s: float = LONG_S) -> bool:
    thread.join(patience_s)
    return not thread.is_alive()


def test_it_listens_for_each_group_until_that_needs_it_no_more(listening: tuple[Rejoin, threading.Thread]) -> None:
    rejoin, thread = listening
    assert wait_until(lambda: OPEN == ["1", "2"], LONG_S) and rejoin.pending == {"1", "2"}
    rejoin.joined([member("1")])
    rejoin.finish("1")
    assert wait_until(lambda: OPEN == ["2"], LONG_S) and rejoin.pending == {"2"}
    rejoin.joined([member("1"), member("2")])
    assert not ends(thread, 0.1) and not rejoin.pending
    rejoin.finish("2")
    assert ends(thread) and OPEN == []


def test_it_waits_for_no_group_that_took_it_in_through_ray(listening: tuple[Rejoin, threading.Thread]) -> None:
    rejoin, thread = listening
    rejoin.joined([member("2"), member("3")])
    assert rejoin.pending <= {"1"}
    rejoin.finish("1")
    rejoin.finish("2")
    assert ends(thread)


def test_once_its_groups_have_ended(listening: tuple[Rejoin, threading.Thread], records: dict[str, Any]) -> None:
    rejoin, thread = listening
    assert wait_until(lambda: OPEN == ["1", "2"], LONG_S)
    rejoin.joined([member("1")])
    rejoin.joined([])  # the attempt failed
    assert not ends(thread, 0.1)
    del records["1"]
    assert wait_until(lambda: OPEN == ["2"], LONG_S) and rejoin.pending == {"2"}
    records.clear()
    assert ends(thread) and not rejoin.pending


def test_an_operation_waits_until_it_is_back_in_all_its_groups(listening: tuple[Rejoin, threading.Thread]) -> None:
    rejoin, _ = listening
    assert wait_until(lambda: rejoin.pending == {"1", "2"}, LONG_S)
    waiting, short = rejoin.member(None), rejoin.member(0.05)
    rejoin.joined([member("2")])
    with pytest.raises(rtr.RpcTimeout, match="has not rejoined group 'group 1' within"):
        short.result(LONG_S)
    assert not waiting.done()
    rejoin.joined([member("2"), member("1")])
    assert waiting.result(LONG_S).generation == "2"


@pytest.mark.parametrize(
    "use",
    [
        lambda: rtr.init_group([object()]),
        rtr.get_group,
        rtr.join,
        lambda: rtr.rpc_sync("a").double(1),
        lambda: rtr.Queue("q", home="a").put(1),
        rtr.current_member,
        pytest.param(rtr.rdt.enable, marks=needs("objectrefs")),
        pytest.param(lambda: rtr.method(objectref=True)(lambda self: None), marks=needs("objectrefs")),
    ],
)
def test_a_ray_client_is_told_what_to_do(use: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_internals, "uses_ray_client", lambda: True)
    with pytest.raises(
        (rtr.NotAMember, rtr.ConfigurationError), match=r"Ray Client .*as a job .* in a Ray task or actor"
    ):
        use()
