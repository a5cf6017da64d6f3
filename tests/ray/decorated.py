"""Actors whose methods have other decorators above ``@rtr.method``; see ``actors`` for why they live in a module."""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import raytorchrpc as rtr
from tests.ray.actors import AsyncRunner, Peer


def doubled(function: Callable[..., Any]) -> Any:
    """Shows in the result how often it ran."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return 2 * function(*args, **kwargs)

    return run


def doubled_async(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    async def run(*args: Any, **kwargs: Any) -> Any:
        return 2 * await function(*args, **kwargs)

    return run


def doubled_items(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for item in function(*args, **kwargs):
            yield 2 * item

    return run


def doubled_items_async(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    async def run(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async for item in function(*args, **kwargs):
            yield 2 * item

    return run


def in_time(function: Callable[..., Any]) -> Any:
    """On another thread, as time limits do."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function, *args, **kwargs).result(timeout=20)

    return run


def hiding(function: Callable[..., Any]) -> Any:
    """Without functools.wraps."""

    def run(*args: Any) -> Any:
        return function(*args)

    return run


def locked(function: Callable[..., Any]) -> Any:
    """Counts who is inside."""

    @functools.wraps(function)
    def run(self: Any, *args: Any) -> Any:
        with self.lock:
            return function(self, *args)

    return run


class Parent(Peer):
    @doubled
    @rtr.method
    def inherited(self) -> int:
        return 1

    @doubled
    @rtr.method
    def overridden(self) -> int:
        return 1


class Decorated(Parent):
    def __init__(self) -> None:
        super().__init__()
        self.lock, self.inside = threading.Lock(), 0
        self.weights = torch.ones(3, requires_grad=True)

    @rtr.method
    def modes_inside(self) -> Iterator[bool]:
        """What a generator sets stays while it is suspended."""
        with torch.no_grad():
            for _ in range(3):
                yield torch.is_grad_enabled()
        yield torch.is_grad_enabled()

    @in_time
    @rtr.method
    def in_time(self) -> int:
        return 1

    @doubled
    @rtr.method
    def overridden(self) -> int:
        return int(super().overridden()) + 1

    @doubled
    @doubled
    @rtr.method(concurrent=True)
    def concurrent(self) -> int:
        return 1

    @doubled
    @rtr.method(objectref=True)
    def ref(self) -> torch.Tensor:
        return torch.ones(3)

    @doubled
    @rtr.method
    def of_itself(self) -> int:
        return int(self.inherited()) + 1

    @doubled
    @rtr.method
    def chain(self, to: str, me: str) -> int:
        """Comes back to this actor."""
        return int(rtr.rpc_sync(to).of_peer(me))

    @doubled
    @rtr.method
    def of_peer(self, to: str) -> int:
        return int(rtr.rpc_sync(to).inherited())

    @torch.no_grad()
    @rtr.method
    def no_grad(self) -> bool:
        return (self.weights * 2).requires_grad

    @torch.inference_mode()
    @rtr.method
    def inference(self) -> bool:
        return torch.is_inference_mode_enabled()

    @torch.autocast("cpu", dtype=torch.bfloat16)
    @rtr.method
    def autocast(self) -> str:
        return str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)

    @doubled_items
    @rtr.method
    def items(self) -> Iterator[int]:
        yield from (1, 2)

    @torch.no_grad()
    @rtr.method
    def modes(self) -> Iterator[bool]:
        for _ in range(2):
            yield torch.is_grad_enabled()

    @locked
    @rtr.method
    def alone(self) -> int:
        """How many are here."""
        self.inside += 1
        try:
            threading.Event().wait(0.001)  # lets the other threads run
            return self.inside
        finally:
            self.inside -= 1

    @functools.lru_cache  # noqa: B019 - Ray has no such methods
    @rtr.method
    def cached(self) -> object:
        return id(object())

    @hiding
    @rtr.method
    def hidden(self) -> int:
        return 1


class DecoratedAsync(AsyncRunner):
    @doubled_async
    @rtr.method
    async def coroutine(self) -> int:
        return 1

    @doubled
    @rtr.method
    def plain(self) -> int:
        return 1

    @doubled_items_async
    @rtr.method
    async def items(self) -> AsyncIterator[int]:
        for item in (1, 2):
            yield item

    @torch.no_grad()
    @rtr.method
    async def not_awaited(self) -> int:
        return 1
