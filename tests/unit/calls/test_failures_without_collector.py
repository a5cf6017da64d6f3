"""Operations that fail in a program that has turned off the garbage collector: none of them keeps memory."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch

import raytorchrpc as rtr
from tests.polling import wait_until
from tests.unit.callees import exposed
from tests.unit.members import Members

SIZE = 100


class Unloadable:
    def __reduce__(self) -> Any:
        return _refuse, (torch.ones(SIZE),)


def _refuse(part: torch.Tensor) -> None:
    raise ValueError("no such class here")


def give(_: Any, *args: Any) -> torch.Tensor:
    return torch.ones(SIZE)


def fail(_: Any, *args: Any) -> None:
    raise ValueError("on purpose", torch.ones(SIZE))


def fail_by_name(_: Any, *args: Any) -> None:
    """Its own frame holds what it raises."""
    error: Any = ValueError("on purpose")
    error.lock, error.part = threading.Lock(), torch.ones(SIZE)
    raise error


def fail_again(_: Any, *args: Any) -> None:
    try:
        fail(_)
    except ValueError as error:
        raise KeyError("of it") from error


def give_lock(_: Any, *args: Any) -> Any:
    return torch.ones(SIZE), threading.Lock()


def give_unloadable(_: Any, *args: Any) -> Any:
    return Unloadable()


def relay(_: Any, *args: Any) -> Any:
    return rtr.rpc_sync("b").fail(torch.ones(SIZE))


def items(_: Any, *args: Any) -> Iterator[torch.Tensor]:
    yield torch.ones(SIZE)
    fail(_)


class Held:
    event: ClassVar[threading.Event]


def hold(_: Any, *args: Any) -> torch.Tensor:
    Held.event.wait(20)
    return torch.ones(SIZE)


FAIL = (fail, fail_by_name, fail_again, give_lock, give_unloadable, relay)


@pytest.fixture
def members() -> Iterator[Members]:
    methods = {each.__name__: exposed(each) for each in (*FAIL, give, hold)}
    config = rtr.GroupConfig(rpc_timeout_s=20)
    with (
        Members(config, {**methods, "items": exposed(items, ahead=2)}, by_socket=True) as made,
        made.acting("a"),
    ):
        yield made


def wrong_buffers() -> list[torch.Tensor]:
    return [torch.empty(SIZE + 1)]


def call(name: str, **options: Any) -> None:
    getattr(rtr.rpc_sync("home", **options), name)(torch.ones(SIZE))


def call_later(name: str, **options: Any) -> None:
    """The frame of the caller holds the future."""
    future = getattr(rtr.rpc_async("home", **options), name)(torch.ones(SIZE))
    for _ in range(2):
        with suppress(Exception):
            future.result()
    future.wait()


def call_back(name: str) -> None:
    called = threading.Event()

    def callback(future: rtr.Future[Any]) -> None:
        called.set()
        with suppress(ValueError, KeyError, rtr.RayTorchRpcError):
            future.result()

    getattr(rtr.rpc_async("home"), name)().add_done_callback(callback)
    assert called.wait(20)
    raise ValueError("that is all")


def gather(name: str, **options: Any) -> None:
    futures = [getattr(rtr.rpc_async("home"), name)() for _ in range(3)]
    rtr.wait(futures, num_returns=3)
    rtr.gather(*futures, **options)
    raise ValueError("returned")


def cancel() -> None:
    future = rtr.rpc_async("home").hold()
    future.cancel()
    Held.event.set()
    future.result()


def pass_deadline() -> None:
    try:
        rtr.rpc_sync("home", timeout=0.01).hold(torch.ones(SIZE))
    finally:
        Held.event.set()


def wait_shortly() -> None:
    future = rtr.rpc_async("home").hold(torch.ones(SIZE))
    try:
        future.result(timeout=0.01)
    finally:
        Held.event.set()
        future.wait()


def queue() -> rtr.Queue:
    return rtr.Queue("q", home="home", maxsize=1)


def put_too_much() -> None:
    full = rtr.Queue("full", home="home", maxsize=1)
    for _ in range(2):
        full.put(torch.ones(SIZE), timeout=0.01)


def get_unloadable() -> None:
    queue().put(Unloadable())
    queue().get()


def store(name: str = "none") -> rtr.WeightStore:
    return rtr.WeightStore(name, home="home")


CALLS: dict[str, Callable[[], object]] = {
    **{f"{way.__name__} {each.__name__}": (lambda way=way, each=each: way(each.__name__))  # type: ignore[misc]
       for way in (call, call_later) for each in FAIL},
    **{f"{way.__name__} {each.__name__}": (lambda way=way, each=each: way(each.__name__))  # type: ignore[misc]
       for way in (call_back, gather) for each in (fail_by_name, give_unloadable)},
    **{f"{way.__name__} into": (lambda way=way: way("give", into=wrong_buffers()))  # type: ignore[misc]
       for way in (call, call_later)},
    **{each.__name__: each for each in (cancel, pass_deadline, wait_shortly, put_too_much, get_unloadable)},
    "stream": lambda: list(rtr.rpc_sync("home").items()),
    "get_nothing": lambda: queue().get(timeout=0.01),
    "pull": lambda: store().pull({"a": torch.empty(SIZE)}, timeout=0.01),
    "prefetch": lambda: store().prefetch({"a": torch.empty(SIZE)}, timeout=0.01).wait(),
    "gather errors": lambda: gather("fail", return_exceptions=True),
    "an argument that cannot be pickled": lambda: rtr.rpc_sync("home").give(torch.ones(SIZE), threading.Lock()),
    "an argument that cannot be unpickled": lambda: rtr.rpc_sync("home").give(torch.ones(SIZE), Unloadable()),
    "no such method": lambda: rtr.rpc_sync("home").nothing(torch.ones(SIZE)),
    "no such member": lambda: rtr.rpc_sync("nobody").give(torch.ones(SIZE)),
    "into= for a generator": lambda: rtr.rpc_sync("home", into=wrong_buffers()).items(),
    "no such queue": lambda: rtr.Queue.find("none", home="home"),
    "weights of other shapes": lambda: store("w").pull({"a": torch.empty(SIZE + 1)}),
    "weights of other names": lambda: store("w").pull({"b": torch.empty(SIZE)}),
}  # fmt: skip


def failed(operation: Callable[[], object]) -> None:
    Held.event = threading.Event()
    try:
        operation()
    except Exception:
        return
    raise AssertionError("it did not fail")


def held() -> int:
    """The tensors, exceptions and frames of this process that have not been freed."""
    kinds = torch.Tensor, BaseException, FrameType
    return sum(issubclass(type(each), kinds) for each in gc.get_objects())  # isinstance would ask proxies


def is_flat(operation: Callable[[], object]) -> bool:
    """Whether ten times keep no more than a few."""
    for _ in range(2):
        failed(operation)
    gc.collect()
    gc.disable()
    try:
        before = held()
        for _ in range(10):
            failed(operation)
        return wait_until(lambda: held() < before + 10, 10)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", CALLS)
def test_a_failure_keeps_nothing(members: Members, kind: str) -> None:
    with members.acting("home"):
        store("w").publish({"a": torch.ones(SIZE)})
    assert is_flat(CALLS[kind])


def test_an_awaited_failure_keeps_nothing(members: Members) -> None:
    async def wait_for(operation: Callable[[], Any]) -> None:
        with suppress(Exception):
            await operation()

    def on_loop(operation: Callable[[], Any]) -> None:
        loop.run_until_complete(wait_for(operation))
        while others := asyncio.all_tasks(loop):  # gather returns with the first failure: the loop still has the other
            loop.run_until_complete(asyncio.wait(others))
        raise ValueError("that is all")

    operations: list[Callable[[], Any]] = [
        lambda: rtr.rpc_async("home").fail(torch.ones(SIZE)),
        lambda: rtr.rpc_async("home", into=wrong_buffers()).give(),
        lambda: asyncio.gather(rtr.rpc_async("home").fail(), rtr.rpc_async("home").fail()),
        lambda: queue().aget(timeout=0.01),
        lambda: store().apull({"a": torch.empty(SIZE)}, timeout=0.01),
    ]
    loop = asyncio.new_event_loop()
    try:
        for operation in operations:
            assert is_flat(lambda operation=operation: on_loop(operation))  # type: ignore[misc]
    finally:
        loop.close()


def test_a_lost_peer_keeps_nothing() -> None:
    def lose() -> None:
        lane.holds = lambda method: True
        future = rtr.rpc_async("home").give(torch.ones(SIZE))
        lane.lose(0)
        lane.holds = lambda method: False
        future.wait()

    with Members(rtr.GroupConfig(rpc_timeout_s=20), {"give": exposed(give)}) as members, members.acting("a"):
        lane = members.lanes["a"]
        assert is_flat(lose)
        lane.broken = True
        assert is_flat(lambda: rtr.rpc_sync("home").give(torch.ones(SIZE)))
