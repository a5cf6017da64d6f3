"""Actors that end with their test, and no group left behind."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray

import raytorchrpc as rtr
from tests import insides
from tests.polling import wait_until
from tests.ray.actors import AsyncPeer, Latch, Peer

#: Makes an actor of a class (plain or ``ray.remote``) with these options; it is killed after the test.
Spawn = Callable[..., Any]


@functools.cache
def _remote(cls: Any) -> Any:
    """Ray exports it once."""
    return cls if hasattr(cls, "remote") else ray.remote(cls)


def _spawner(made: list[Any]) -> Spawn:
    def spawn(cls: Any, *args: Any, **options: Any) -> Any:
        handle = _remote(cls).options(**{"num_cpus": 0, **options}).remote(*args)
        made.append(handle)
        return handle

    return spawn


def _kill(handles: list[Any]) -> None:
    for handle in handles:
        ray.kill(handle)


def pid_of(actor: Any) -> int | None:
    """The process of an actor; None while it restarts."""
    try:
        return int(ray.get(actor.run.remote(os.getpid), timeout=60))
    except ray.exceptions.RayActorError:
        return None


def kill_for_good(actor: Any) -> None:
    """Returns when Ray takes the actor for dead, and its process has ended: ``ray.kill`` returns before."""
    pid = insides.actor_state(actor).pid
    ray.kill(actor)
    assert wait_until(lambda: insides.actor_state(actor).state == "DEAD" and insides.has_ended(pid), 60)


@pytest.fixture
def spawn(cluster: None) -> Iterator[Spawn]:
    made: list[Any] = []
    yield _spawner(made)
    _kill(made)


@pytest.fixture(scope="module")
def spawn_for_module(cluster: None) -> Iterator[Spawn]:
    """As ``spawn``; an actor costs about a second, so tests that leave it as it was can share one."""
    made: list[Any] = []
    yield _spawner(made)
    _kill(made)


@pytest.fixture(scope="session")
def peers(cluster: None) -> Iterator[list[Any]]:
    """Three living sync actors that every test may use and none may break."""
    made: list[Any] = []
    spawn = _spawner(made)
    yield [spawn(Peer) for _ in range(3)]
    _kill(made)


@pytest.fixture(scope="session")
def special(cluster: None) -> Iterator[dict[str, Any]]:
    """Likewise: a threaded actor, and an async one."""
    made: list[Any] = []
    spawn = _spawner(made)
    yield {"threaded": spawn(Peer, max_concurrency=4), "asynchronous": spawn(AsyncPeer)}
    _kill(made)


@pytest.fixture
def latch(tmp_path: Path) -> Iterator[Callable[[], Latch]]:
    """Makes latches: an actor's method waits at one, without sleeping, until the test opens it."""
    made: list[Latch] = []

    def make() -> Latch:
        made.append(Latch.make(tmp_path / f"latch-{len(made)}"))
        return made[-1]

    yield make
    for one in made:
        one.open_for_all()


def _groups_here() -> str:
    """The groups that this process has formed or is in, and itself as a member."""
    with pytest.raises(rtr.NotAMember) as known:
        rtr.get_group("no such group")
    try:
        return f"{known.value} {rtr.current_member()}"
    except rtr.NotAMember:
        return str(known.value).partition(";")[0]  # without detached groups, which a killed host may leave for a moment


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """After each test there are the groups that were there before it: none, or one that serves a module."""
    before = _groups_here()
    yield
    after = _groups_here()
    if after != before and "(known here: none)" in before:
        with suppress(rtr.NotAMember):  # one test's fault is not to become the next one's
            rtr.get_group().shutdown()
    assert after == before
