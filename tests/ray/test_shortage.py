"""Members without memory for a message, which fail that call; and members that cannot go on, whose process ends."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

import raytorchrpc as rtr
from tests import insides
from tests.ray.actors import Peer

Spawn = Callable[..., Any]
MIB = 1 << 20
LARGE = 64 * MIB
#: For each wait that ends by itself (seconds).
PATIENCE_S = 30.0

_limit: tuple[int, int] | None = None


class Served(Peer):
    """Runs methods side by side, and does what keeps it short of something."""

    @rtr.method(concurrent=True)
    def wait(self) -> None:
        threading.Event().wait(PATIENCE_S)

    @rtr.method(concurrent=True)
    def size(self, data: bytes) -> int:
        return len(data)

    @rtr.method(concurrent=True)
    def make(self, size: int) -> bytes:
        return bytes(size)


def lack_memory() -> None:
    """Leave a little room, for whatever else the process does."""
    global _limit
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + LARGE // 2, _limit[1]))


def have_memory() -> None:
    global _limit
    if _limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, _limit)
        _limit = None


def lack_threads() -> None:
    """The kernel refuses a thread whose stack is larger than any address space."""
    threading.stack_size(1 << 47)


def lack_memory_for_requests() -> None:
    """As if the smallest allocation failed there."""
    insides.fail_to_take_requests(MemoryError())


def write_errors_to(path: str) -> None:
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)


@pytest.fixture
def actors(spawn: Spawn) -> dict[str, Any]:
    return {"caller": spawn(Served), "starved": spawn(Served, max_restarts=1, max_task_retries=-1)}


@pytest.fixture
def group(actors: dict[str, Any]) -> Iterator[rtr.Group]:
    # All by the socket lane: what comes by others is mapped, and takes no memory of the receiver's.
    with rtr.init_group(actors, config=rtr.GroupConfig(lanes=["socket"])) as group:
        yield group


@contextmanager
def short_of_memory(actor: Any) -> Iterator[None]:
    try:
        ray.get(actor.run.remote(lack_memory), timeout=PATIENCE_S)
        yield
    finally:
        ray.get(actor.run.remote(have_memory), timeout=PATIENCE_S)


def outcome(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def sent(target: str) -> Any:
    return outcome(lambda: rtr.rpc_sync(target, timeout=PATIENCE_S).size(bytes(LARGE)))


def received(target: str) -> Any:
    return outcome(lambda: len(rtr.rpc_sync(target, timeout=PATIENCE_S).make(LARGE)))


def at_once(target: str, count: int, method: str) -> list[Any]:
    """So many calls side by side; from one connection, so that several come in one read."""
    futures = [getattr(rtr.rpc_async(target, timeout=PATIENCE_S), method)() for _ in range(count)]
    return [outcome(future.wait) for future in futures]


def test_a_member_without_memory_for_a_message_fails_that_call_and_goes_on(
    actors: dict[str, Any], group: rtr.Group
) -> None:
    caller, starved = actors["caller"], actors["starved"]
    changes: list[Any] = []
    forget = group.on_change(changes.append)

    def ask(function: Any) -> Any:
        return ray.get(caller.run.remote(function, "starved"), timeout=2 * PATIENCE_S)

    with short_of_memory(starved):
        failure = ask(sent)
        assert failure.startswith("MemoryError: starved has no memory for a request of 671"), failure
        assert "send less at a time" in failure
        assert ask(received).startswith("MemoryError")
        assert ray.get(caller.call.remote("starved", "double", 4), timeout=PATIENCE_S) == 8
    with short_of_memory(caller):
        failure = ask(received)
        assert failure.startswith("MemoryError: this process has no memory for an answer of 671"), failure
    assert (ask(sent), ask(received)) == (LARGE, LARGE)
    forget()
    assert changes == []


@pytest.mark.parametrize(
    ("lack", "method", "cause"),
    [
        (lack_threads, "wait", "ThreadShortage: cannot start the thread"),
        (lack_memory_for_requests, "double", "MemoryError"),
    ],
)
def test_a_member_that_cannot_go_on_ends_at_once_and_comes_back(
    actors: dict[str, Any], group: rtr.Group, tmp_path: Path, lack: Any, method: str, cause: str
) -> None:
    caller, starved = actors["caller"], actors["starved"]
    log = tmp_path / "stderr"
    back = threading.Event()
    group.on_change(lambda change: back.set() if change.kind == "back" else None)
    ray.get(starved.run.remote(write_errors_to, str(log)), timeout=PATIENCE_S)
    assert ray.get(caller.call.remote("starved", "double", 4), timeout=PATIENCE_S) == 8
    ray.get(starved.run.remote(lack), timeout=PATIENCE_S)
    failures = ray.get(caller.run.remote(at_once, "starved", 24, method), timeout=PATIENCE_S)  # all before the deadline
    assert all(failure.startswith("PeerLost") for failure in failures), failures
    (said,) = [line for line in log.read_text().splitlines() if "this process ends" in line]
    assert "cannot go on: " + cause in said
    assert back.wait(2 * PATIENCE_S), "the group can seem ready until the supervisor has noticed the loss"
    assert group.wait_ready(PATIENCE_S) is None
    assert ray.get(caller.call.remote("starved", "double", 21), timeout=PATIENCE_S) == 42
