"""Actors for the tests of streams and of cancellation; see ``actors`` for why they live in a module."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

import raytorchrpc as rtr
from tests.ray.actors import AsyncPeer, Peer


class Producer(Peer):
    """A sync actor with generators."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.began, self.go = threading.Event(), threading.Event()

    @rtr.method
    def tensors(self, count: int, numel: int) -> Iterator[dict[str, Any]]:
        """One tensor, which it goes on changing."""
        tensor = torch.zeros(numel)
        try:
            for number in range(count):
                tensor.fill_(number)
                yield {"number": number, "tensor": tensor}
        finally:
            self.log.append("closed")

    @rtr.method
    def wait(self) -> str:
        self.began.set()
        self.go.wait(30)
        self.log.append("waited")
        return "waited"

    @rtr.method
    def note(self, what: str) -> None:
        self.log.append(what)

    @rtr.method(concurrent=True)
    def begun(self) -> bool:
        return self.began.wait(30)

    @rtr.method(concurrent=True)
    def release(self) -> None:
        self.go.set()

    @rtr.method(concurrent=True)
    def taken_log(self) -> list[str]:
        log, self.log = self.log, []
        return log


class AsyncProducer(AsyncPeer):
    """Likewise, an async actor."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @rtr.method
    async def tensors(self, count: int, numel: int) -> AsyncIterator[dict[str, Any]]:
        tensor = torch.zeros(numel)
        try:
            for number in range(count):
                await asyncio.sleep(0)
                tensor.fill_(number)
                yield {"number": number, "tensor": tensor}
        finally:
            self.log.append("closed")

    @rtr.method
    def plain_tensors(self, count: int, numel: int) -> Iterator[dict[str, Any]]:
        """No coroutine, in an async actor."""
        for number in range(count):
            yield {"number": number, "tensor": torch.full((numel,), number)}

    @rtr.method
    async def taken_log(self) -> list[str]:
        log, self.log = self.log, []
        return log

    @rtr.method
    async def read_one(self, target: str) -> int:
        """Keeps the stream open."""
        self.stream = await rtr.rpc_async(target).tensors(1000, 10)
        item = await self.stream.__anext__()
        return int(item["number"])
