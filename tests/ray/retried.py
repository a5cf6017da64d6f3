"""Actors whose interrupted methods Ray runs again, for the tests of ``max_task_retries``."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import ray
import torch

import raytorchrpc as rtr
from tests.ray.actors import Latch


def first_time(marker: str) -> bool:
    """Whether this is the first run; makes the file that says so."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Retried:
    """Its methods end their process the first time, after a direct call, and then run again from their beginning."""

    def __init__(self) -> None:
        self.runs = 0
        self.called_early = ""
        try:
            rtr.rpc_sync("peer", timeout=60).double(1)
        except rtr.RayTorchRpcError as error:
            self.called_early = type(error).__name__

    @rtr.method
    def double(self, value: Any) -> Any:
        return value * 2

    @rtr.method(concurrent=True)
    def pid(self) -> int:
        return os.getpid()

    def early_error(self) -> str:
        """What a call made in ``__init__`` came to."""
        return self.called_early

    def sync_call(self, marker: str) -> tuple[int, torch.Tensor, float]:
        doubled = rtr.rpc_sync("peer", timeout=40).double(torch.ones(3))
        if first_time(marker):
            os._exit(1)
        return os.getpid(), doubled, time.monotonic()

    def remote_call(self, marker: str) -> Any:
        doubled = rtr.remote("peer", timeout=40).double(21).to_here()
        if first_time(marker):  # after its first connection by torchrpc was complete, see docs/limits.md
            os._exit(1)
        return doubled

    def through_queue(self, marker: str) -> Any:
        queue: rtr.Queue[int] = rtr.Queue("items", home="peer")
        queue.put(7)
        if first_time(marker):
            os._exit(1)
        return queue.get(timeout=30), rtr.Queue("own").home

    def through_weights(self, marker: str) -> Any:
        store = rtr.WeightStore("weights", home="peer")
        newest = store.version()
        if first_time(marker):
            os._exit(1)
        return newest, rtr.current_member().name, rtr.get_group("retried").name

    def busy(self, marker: str, latch: Latch) -> str:
        """Makes no direct call at all."""
        if first_time(marker):
            os._exit(1)
        latch.pass_through()
        return "released"


class AsyncRetried:
    """The same on an event loop."""

    @rtr.method
    async def double(self, value: Any) -> Any:
        return value * 2

    async def call(self, marker: str) -> Any:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking, begun = asyncio.ensure_future(tick()), time.monotonic()
        me = await rtr.await_membership(timeout=40)
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        future = rtr.rpc_async("peer", timeout=40).double(torch.ones(3))
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
        doubled = await future
        await asyncio.wait_for(done.wait(), 40)
        queue: rtr.Queue[int] = rtr.Queue("async items", home="peer")
        await queue.aput(7)
        item = await queue.aget(timeout=30)
        ticking.cancel()
        if first_time(marker):
            os._exit(1)
        assert me == rtr.current_member() and me.incarnation > 0
        return doubled, item, ticks, time.monotonic() - begun


class Alone:
    """In no group."""

    def attempt(self, marker: str) -> tuple[str, float]:
        if first_time(marker):
            os._exit(1)
        started = time.monotonic()
        try:
            rtr.rpc_sync("peer", timeout=30).double(1)
        except rtr.NotAMember:
            return "NotAMember", time.monotonic() - started
        return "answered", 0.0

    def restarted(self) -> bool:
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
