"""When a restarted process stops to listen for its group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import raytorchrpc as rtr
from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.rejoin import Rejoin
from raytorchrpc.group import restarted
from tests.releases import needs

LONG_S = 30.0
GROUP: Any = SimpleNamespace(credentials=SimpleNamespace(generation="1"))


def member(generation: str) -> Any:
    """A LocalMember."""
    return SimpleNamespace(generation=generation, group="group", config=SimpleNamespace(rpc_timeout_s=LONG_S))


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a search for the actor's group finds: the first."""
    found = [GROUP]
    monkeypatch.setattr(restarted, "find_record", lambda actor_id: found[0])
    monkeypatch.setattr(restarted, "_CHECK_S", 0.01)
    return found


@pytest.fixture
def listening(records: list[Any]) -> tuple[Rejoin, threading.Thread]:
    rejoin = Rejoin("actor")
    thread = threading.Thread(target=restarted._wait, args=(rejoin, "1"), daemon=True)
    thread.start()
    return rejoin, thread


def ends(thread: threading.Thread, patience_s: float = LONG_S) -> bool:
    thread.join(patience_s)
    return not thread.is_alive()


def test_not_before_the_group_that_it_returned_to_needs_it_no_more(
    listening: tuple[Rejoin, threading.Thread], records: list[Any]
) -> None:
    rejoin, thread = listening
    rejoin.joined(member("1"))
    assert not ends(thread, 0.1)
    rejoin.finish()
    assert ends(thread)


def test_at_once_if_another_group_took_it_in_through_ray(listening: tuple[Rejoin, threading.Thread]) -> None:
    """That group knows nothing of it."""
    rejoin, thread = listening
    rejoin.joined(member("2"))
    assert ends(thread)


@pytest.mark.parametrize("after", [None, SimpleNamespace(credentials=SimpleNamespace(generation="2"))])
def test_once_its_group_has_ended(listening: tuple[Rejoin, threading.Thread], records: list[Any], after: Any) -> None:
    rejoin, thread = listening
    rejoin.joined(member("1"))
    rejoin.joined(None)  # the attempt failed
    assert not ends(thread, 0.1)
    records[0] = after
    assert ends(thread)


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
