"""An actor that notices if two of its methods run at once; see ``actors`` for why it lives in a module."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import raytorchrpc as rtr
from tests.ray.actors import Latch, Peer


class Base(Peer):
    @rtr.method
    def inherited(self) -> None:
        self._update()

    @rtr.method
    def overridden(self) -> None:
        self._update()

    def _update(self) -> None:
        raise NotImplementedError


class Learner(Base):
    """Counts. A method that runs beside another loses an update, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.running = False
        self.begun = threading.Event()

    def _update(self) -> None:
        assert not self.running, "two methods run at once"
        self.running, before = True, self.count
        time.sleep(0.0005)  # what others could run in
        self.running, self.count = False, before + 1

    # Not decorated.

    def plain(self, times: int) -> int:
        for _ in range(times):
            self._update()
        return self.count

    def generate(self, times: int) -> Iterator[int]:
        for _ in range(times):
            self._update()
            yield self.count

    def total(self) -> int:
        return self.count

    def overridden(self) -> None:
        super().overridden()

    def work_on(self, queue: rtr.Queue[Any], times: int) -> None:
        for _ in range(times):
            queue.get()
            self._update()

    def waits(self, operation: Any, latch: Latch) -> int:
        """How many updates others made during the operation."""
        before = self.count
        self.begun.set()
        operation(latch)
        return self.count - before

    def stays(self, latch: Latch) -> None:
        self.begun.set()
        latch.pass_through()

    # Decorated.

    @rtr.method
    def add(self) -> int:
        self._update()
        return self.count

    @rtr.method
    def add_twice(self) -> None:
        self.add()
        self._update()

    @rtr.method
    def pass_on(self, target: str, times: int) -> None:
        """To the target and back, and an update at each end."""
        self._update()
        if times:
            rtr.rpc_sync(target).pass_on(rtr.current_member().name, times - 1)
        self._update()

    @rtr.method
    def stream(self, times: int) -> Iterator[int]:
        yield from self.generate(times)

    @rtr.method
    def hold_and_yield(self, latch: Latch) -> Iterator[str]:
        latch.pass_through()
        yield "released"

    @rtr.method(concurrent=True)
    def await_beginning(self) -> None:
        """Until ``waits`` or ``stays`` has begun."""
        assert self.begun.wait(60)
        self.begun.clear()
