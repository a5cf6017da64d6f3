"""Members that are short of memory or threads for a moment: what they cannot do fails with its cause, and they go on.

The address space of a process is limited for memory; for threads, the stack of a new one is made larger than any
address space, so that the kernel refuses it and nothing else.
"""

from __future__ import annotations

import resource
import threading
import time
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
PATIENCE_S = 20.0

_limit: tuple[int, int] | None = None


class Served(Peer):
    """Runs methods side by side, and does what keeps it short of something."""

    def __init__(self) -> None:
        super().__init__()
        self.two = threading.Barrier(2, timeout=PATIENCE_S)

    @rtr.method(concurrent=True)
    def nap(self) -> None:
        threading.Event().wait(0.1)

    @rtr.method(concurrent=True)
    def meet(self) -> None:
        """Returns once two are here at a time."""
        self.two.wait()

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
    threading.stack_size(1 << 47)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        threading.Thread(target=int).start()


def have_threads() -> None:
    threading.stack_size(0)


@pytest.fixture(scope="module")
def actors(spawn_for_module: Spawn) -> dict[str, Any]:
    return {name: spawn_for_module(Served) for name in ("caller", "starved")}


@pytest.fixture(scope="module", autouse=True)
def group(actors: dict[str, Any]) -> Iterator[rtr.Group]:
    # All by the socket lane: what comes by others is mapped, and takes no memory of the receiver's.
    with rtr.init_group(actors, config=rtr.GroupConfig(lanes=["socket", "torchrpc"])) as group:
        yield group


@pytest.fixture
def changes(group: rtr.Group) -> Iterator[list[Any]]:
    seen: list[Any] = []
    forget = group.on_change(seen.append)
    yield seen
    forget()


@contextmanager
def short_of(what: str, actor: Any) -> Iterator[None]:
    lack, have = {"memory": (lack_memory, have_memory), "threads": (lack_threads, have_threads)}[what]
    try:
        ray.get(actor.run.remote(lack), timeout=PATIENCE_S)
        yield
    finally:
        ray.get(actor.run.remote(have), timeout=PATIENCE_S)


def outcome(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def sent(target: str, count: int) -> list[Any]:
    """So many large requests, one after the other."""
    data = bytes(LARGE)
    return [outcome(lambda: rtr.rpc_sync(target, timeout=PATIENCE_S).size(data)) for _ in range(count)]


def received(target: str) -> Any:
    return outcome(lambda: len(rtr.rpc_sync(target, timeout=PATIENCE_S).make(LARGE)))


def at_once(target: str, count: int, method: str) -> list[Any]:
    """So many calls side by side; from one connection, so that several come in one read."""
    futures = [getattr(rtr.rpc_async(target, timeout=PATIENCE_S), method)() for _ in range(count)]
    return [outcome(future.wait) for future in futures]


def is_well(actors: dict[str, Any], group: rtr.Group) -> None:
    """Everybody reaches everybody, new connections included."""
    for one, other in (("caller", "starved"), ("starved", "caller")):
        for _ in range(3):
            assert ray.get(actors[one].call.remote(other, "double", 21, timeout=PATIENCE_S), timeout=60) == 42
    assert group.wait_ready(PATIENCE_S) is None


def test_a_member_without_memory_for_a_request_says_so_and_goes_on(
    actors: dict[str, Any], group: rtr.Group, changes: list[Any]
) -> None:
    caller, starved = actors["caller"], actors["starved"]
    with short_of("memory", starved):
        # More of them than it has listeners.
        for failure in ray.get(caller.run.remote(sent, "starved", 3), timeout=90):
            assert failure.startswith("MemoryError: starved has no memory for a request of 671"), failure
        assert ray.get(caller.call.remote("starved", "double", 4), timeout=PATIENCE_S) == 8
    assert ray.get(caller.run.remote(sent, "starved", 1), timeout=60) == [LARGE]
    is_well(actors, group)
    assert changes == []


def test_a_member_without_memory_for_an_answer_says_so_and_goes_on(actors: dict[str, Any], group: rtr.Group) -> None:
    caller, starved = actors["caller"], actors["starved"]
    with short_of("memory", caller):
        failure = ray.get(caller.run.remote(received, "starved"), timeout=60)
        assert failure.startswith("MemoryError: this process has no memory for the answer (671"), failure
    with short_of("memory", starved):
        failure = ray.get(caller.run.remote(received, "starved"), timeout=60)
        assert failure.startswith("MemoryError"), failure
    assert ray.get(caller.run.remote(received, "starved"), timeout=60) == LARGE
    is_well(actors, group)


def test_a_member_without_threads_serves_with_those_it_has_and_goes_on(
    actors: dict[str, Any], group: rtr.Group, changes: list[Any]
) -> None:
    caller, starved = actors["caller"], actors["starved"]
    with short_of("threads", starved):
        assert ray.get(caller.run.remote(at_once, "starved", 24, "nap"), timeout=60) == [None] * 24
    assert ray.get(caller.run.remote(at_once, "starved", 24, "meet"), timeout=60) == [None] * 24, "side by side again"
    is_well(actors, group)
    assert changes == []


@pytest.mark.parametrize("what", ["memory", "threads"])
def test_waits_at_a_starved_home_end_in_time(
    actors: dict[str, Any], group: rtr.Group, request: pytest.FixtureRequest, what: str
) -> None:
    queue: Any = rtr.Queue(request.node.name, home="starved")

    def wait_for_nothing() -> float:
        began = time.monotonic()
        with insides.late_answers(), pytest.raises(rtr.Empty):
            queue.get(timeout=0.5)
        return time.monotonic() - began

    with short_of(what, actors["starved"]):
        for _ in range(2):
            assert 0.5 <= ray.get(actors["caller"].run.remote(wait_for_nothing), timeout=PATIENCE_S) < 15
    is_well(actors, group)
