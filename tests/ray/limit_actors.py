"""Actors whose results stay with them, in each of the kinds that Ray's limits distinguish."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ray

import raytorchrpc as rtr
from tests.releases import skip_module_without

skip_module_without("objectrefs")


class Maker:
    """Makes what it is told to make, and looks at what it gets."""

    def __init__(self) -> None:
        self.last: Any = None

    @rtr.method(objectref=True)
    def make(self, what: Callable[..., Any], *args: Any) -> Any:
        """What ``what(*args)`` returns; its tensors stay here."""
        self.last = made = what(*args)  # a threaded actor's other calls write to it as well
        return made

    def look(self, value: Any, how: Callable[..., Any]) -> Any:
        return how(value)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self, *args)

    def pid(self) -> int:
        return os.getpid()


class AsyncMaker:
    """The same, as an async actor."""

    @rtr.method(objectref=True)
    async def make(self, what: Callable[..., Any], *args: Any) -> Any:
        return what(*args)

    async def look(self, value: Any, how: Callable[..., Any]) -> Any:
        return how(value)

    async def wait_for(self, refs: list[ray.ObjectRef[Any]]) -> float:
        return float((await refs[0]).sum())

    async def get(self, refs: list[ray.ObjectRef[Any]]) -> float:
        return float((await rtr.rdt.get(refs[0])).sum())


class Undecorated:
    """Names no transport."""

    def make(self, what: Callable[..., Any], *args: Any) -> Any:
        return what(*args)

    def look(self, value: Any, how: Callable[..., Any]) -> Any:
        return how(value)
