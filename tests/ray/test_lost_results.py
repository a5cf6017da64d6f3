"""Results whose member is lost before they are taken: its tensors are gone, and the method ran."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests import insides
from tests.polling import wait_until

Spawn = Callable[..., Any]

#: Elements: in float32 above what travels in a message.
LARGE = 300_000


class Maker:
    """Makes tensors that travel beside the message, and is killed."""

    def __init__(self) -> None:
        self.futures: list[Any] = []

    @rtr.method
    def make(self) -> tuple[int, torch.Tensor]:
        return os.getpid(), torch.ones(LARGE)

    @rtr.method
    def count(self, tensor: torch.Tensor) -> int:
        return tensor.numel()

    def pid(self) -> int:
        return os.getpid()

    def run(self, function: Any, *args: Any) -> Any:
        return function(*args)

    def begin(self, target: str, **options: Any) -> None:
        """A call that is answered, and whose result nobody takes yet."""
        self.futures.append(rtr.rpc_async(target, **options).make())
        while not self.futures[-1]._call.wait(1):
            pass

    def take(self) -> tuple[int, int]:
        pid, tensor = self.futures.pop().result()
        return pid, int(tensor.sum())

    def await_loss(self, target: str, pid: int) -> None:
        """Until this member knows that this process has ended; perhaps the next one is a member already."""

        def is_lost() -> bool:
            return target in insides.away() or pid not in [member.pid for member in rtr.get_group().members]

        assert wait_until(is_lost, 60)

    def take_by_await(self) -> tuple[int, int]:
        async def take() -> tuple[int, int]:
            pid, tensor = await self.futures.pop()
            return pid, int(tensor.sum())

        return asyncio.run(take())


@pytest.fixture
def caller(spawn: Spawn) -> Iterator[Any]:
    a, b, c = spawn(Maker), spawn(Maker), spawn(Maker, max_restarts=-1)
    with rtr.init_group({"a": a, "b": b, "c": c}):
        a.peers = {"b": b, "c": c}
        yield a


def kill(caller: Any, name: str) -> int:
    pid: int = ray.get(caller.peers[name].pid.remote())
    os.kill(pid, signal.SIGKILL)
    ray.get(caller.await_loss.remote(name, pid))
    return pid


def error_of(ref: Any) -> Any:
    with pytest.raises(ray.exceptions.RayTaskError) as raised:
        ray.get(ref, timeout=60)
    return raised.value.cause


def test_a_member_that_died_before_its_result_was_taken_is_lost(caller: Any) -> None:
    def by_remote() -> None:
        rtr.remote("b").count(torch.ones(LARGE))

    def by_sync() -> None:
        rtr.rpc_sync("b").count(torch.ones(LARGE))

    ray.get([caller.begin.remote("b"), caller.begin.remote("b")])
    kill(caller, "b")
    for take in (caller.take, caller.take_by_await):
        error = error_of(take.remote())
        assert isinstance(error, rtr.PeerLost)
        assert (error.peer, error.may_have_run) == ("b", True)
    for call in (by_remote, by_sync):  # nothing is sent any more
        error = error_of(caller.run.remote(call))
        assert isinstance(error, rtr.PeerLost), call
        assert (error.peer, error.may_have_run) == ("b", False)


def test_a_result_that_was_lost_is_asked_for_again(caller: Any) -> None:
    ray.get([caller.begin.remote("c", retry=2), caller.begin.remote("c", retry=2)])
    former = kill(caller, "c")
    for take in (caller.take, caller.take_by_await):
        pid, total = ray.get(take.remote(), timeout=60)
        assert total == LARGE and pid != former
