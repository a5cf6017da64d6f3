"""Actors for the tests. In a module of their own, so that Ray's workers import them by name."""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import raytorchrpc as rtr

#: The longest wait for somebody to come to a latch, and for a latch to open (seconds).
ARRIVAL_S, HELD_S = 60.0, 300.0


@dataclass(frozen=True)
class Latch:
    """Holds whoever passes, in any process of this machine, until the test opens it."""

    path: str

    @classmethod
    def make(cls, path: Path) -> Latch:
        os.mkfifo(path)
        return cls(str(path))

    def pass_through(self) -> None:
        """Block until the latch is open. Raises TimeoutError if nobody opens it within ``HELD_S``."""
        waiter = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            opened = select.poll()
            opened.register(waiter, select.POLLIN)  # it ends, as the latch opens by closing the other end
            if not opened.poll(HELD_S * 1000):
                raise TimeoutError(f"nobody opened {Path(self.path).name} within {HELD_S:g} s")
        finally:
            os.close(waiter)

    def await_arrival(self) -> int:
        """Block until somebody waits at the latch, which stays closed; returns what ``release`` takes.

        Raises TimeoutError if nobody comes within ``ARRIVAL_S``.
        """
        until = time.monotonic() + ARRIVAL_S
        while True:
            try:
                held = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:  # ENXIO: there is no reader
                if error.errno != errno.ENXIO:
                    raise
                if time.monotonic() > until:
                    name = Path(self.path).name
                    raise TimeoutError(f"nobody came to {name} within {ARRIVAL_S:g} s: the call never ran") from None
                threading.Event().wait(0.001)
            else:
                os.set_blocking(held, True)
                return held

    def release(self, held: int) -> None:
        os.close(held)

    def open(self) -> None:
        """Let the next (or the present) one through."""
        self.release(self.await_arrival())

    def open_for_all(self) -> None:
        """Let through whoever waits now or comes later; never blocks. For those who may never come."""
        held = os.open(self.path, os.O_RDWR)
        try:
            empty = f"{self.path}-empty"
            os.close(os.open(empty, os.O_CREAT | os.O_WRONLY))
            os.replace(empty, self.path)
        finally:
            self.release(held)


class Peer:
    """A sync actor unless its options say otherwise."""

    def __init__(self, tag: str = "") -> None:
        self.tag = tag
        self.kept: list[Any] = []

    # For the other members.

    @rtr.method
    def double(self, x: Any) -> Any:
        return x * 2

    @rtr.method
    def who(self) -> tuple[str, int]:
        """This member's name, and the process it is."""
        return rtr.current_member().name, os.getpid()

    @rtr.method
    def give(self, what: Any) -> Any:
        """What ``what()`` returns."""
        return what()

    @rtr.method
    def hold(self, latch: Latch) -> str:
        """Stay in this method until the latch opens."""
        latch.pass_through()
        return "released"

    @rtr.method
    def keep(self, value: Any) -> int:
        self.kept.append(value)
        return len(self.kept)

    def undecorated(self) -> str:
        return "never over raytorchrpc"

    @staticmethod
    @rtr.method
    def unbound() -> str:
        return "never over raytorchrpc"

    # For the test, through Ray.

    def run(self, function: Any, *args: Any) -> Any:
        """``function(*args)`` in this actor's process, as if a method of it did it."""
        return function(*args)

    def call(self, target: Any, name: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        return getattr(rtr.rpc_sync(target, timeout=timeout), name)(*args, **kwargs)

    def busy(self, latch: Latch) -> None:
        """Keep Ray's own queue of this actor waiting."""
        latch.pass_through()

    def threads(self) -> list[str]:
        return [thread.name for thread in threading.enumerate()]


class AsyncPeer:
    """Its methods are coroutines: Ray runs it on an event loop."""

    @rtr.method
    async def double(self, x: Any) -> Any:
        return x * 2

    @rtr.method
    async def who(self) -> tuple[str, int]:
        return rtr.current_member().name, os.getpid()

    @rtr.method
    async def hold(self, latch: Latch) -> str:
        import asyncio

        await asyncio.get_running_loop().run_in_executor(None, latch.pass_through)
        return "released"

    async def run(self, function: Any, *args: Any) -> Any:
        """``function(*args)`` on the loop, as if a method of this actor did it."""
        return function(*args)

    async def call(self, target: Any, name: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        return await getattr(rtr.rpc_async(target, timeout=timeout), name)(*args, **kwargs)


class AsyncRunner(AsyncPeer):
    async def arun(self, function: Any, *args: Any) -> Any:
        """``await function(*args)`` on the loop."""
        return await function(*args)
