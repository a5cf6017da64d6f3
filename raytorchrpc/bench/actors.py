"""Inside the actors: the loops that measure a link."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import raytorchrpc as rtr
from raytorchrpc.bench.cases import Device, Failed
from raytorchrpc.bench.links import LINKS, Calls, take
from raytorchrpc.bench.patterns import Busy, Pattern

#: Share of a turn that its uncounted lead-in takes: other contestants have displaced the caches.
LEAD_IN = 0.25


class Window(NamedTuple):
    """When a caller measures; moments by ``time.monotonic``, which all processes of a host share."""

    seconds: float
    start: float = 0.0
    end: float = math.inf
    """When what makes the callee busy ends: later samples do not count."""
    fewest: int = 1
    """Samples that are taken even if the time is over."""
    lead: int = 1
    """Fewest uncounted samples before them."""


class Samples(NamedTuple):
    """What one caller measured in one turn."""

    seconds: list[float]
    """Of each call, or of each round of calls."""
    elapsed_s: float


def measure(calls: Sequence[Calls], pattern: Pattern, window: Window) -> Samples:
    """Make calls, of which there is one for each peer, in that window, after a lead-in.

    Raises Failed if no call of a busy callee ends in time.
    """
    if window.start:
        time.sleep(max(0.0, window.start - time.monotonic()))
    step, drain = _step(calls, pattern)
    _repeat(step, window.seconds * LEAD_IN, pattern.interval_s, window.lead)
    start = time.perf_counter()
    seconds = _repeat(step, window.seconds, pattern.interval_s, window.fewest, window.end)
    elapsed_s = time.perf_counter() - start
    drain()
    if not seconds:
        raise Failed("no call ended while the callee was busy")
    return Samples(seconds, elapsed_s)


def _repeat(
    step: Callable[[], Any], window_s: float, interval_s: float, fewest: int, end: float = math.inf
) -> list[float]:
    """Run a step until the time is over; returns the seconds of each run, but of none that ended after ``end``."""
    seconds: list[float] = []
    begin = time.perf_counter()
    while len(seconds) < fewest or time.perf_counter() - begin < window_s:
        if interval_s:
            time.sleep(max(0.0, begin + len(seconds) * interval_s - time.perf_counter()))
        start = time.perf_counter()
        step()
        took = time.perf_counter() - start
        if time.monotonic() > end:
            break
        seconds.append(took)
    return seconds


def _step(calls: Sequence[Calls], pattern: Pattern) -> tuple[Callable[[], Any], Callable[[], None]]:
    """What is timed, and what to do after the last time."""
    waiting: deque[Any] = deque()

    def keep_in_flight() -> None:
        if len(waiting) >= pattern.in_flight:
            calls[0].finish(waiting.popleft())
        waiting.append(calls[0].send())

    def drain() -> None:
        while waiting:
            calls[0].finish(waiting.popleft())

    def one_after_another() -> None:
        for each in calls:
            each.call()

    def all_at_once() -> None:
        handles = [each.send() for each in calls]
        for each, handle in zip(calls, handles, strict=True):
            each.finish(handle)

    if pattern.in_flight:
        return keep_in_flight, drain
    if len(calls) == 1:
        return calls[0].call, drain
    return all_at_once if pattern.asynchronous else one_after_another, drain


class Ready(NamedTuple):
    """What an actor reports once it has started."""

    gpu: str = ""
    """UUID of its GPU; empty without one."""
    gpu_name: str = ""
    gpu_free: int = 0
    """Bytes."""


class Member:
    """Calls and is called. The methods that drive it are called by the driver, through Ray."""

    _link: Any = None
    """See ``open``; None where the driver holds the only end."""
    _payload: tuple[tuple[Device, int, int], Any] | None = None

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda

    def ready(self) -> Ready:
        """Raises whatever prevents CUDA from starting if the actor has a GPU."""
        if not self._cuda:
            return Ready()
        properties = torch.cuda.get_device_properties(0)
        torch.zeros(1, device="cuda")
        return Ready(str(getattr(properties, "uuid", "")), properties.name, torch.cuda.mem_get_info(0)[0])

    def open(self, kind: str, rank: int, members: Sequence[Any], options: Any, meeting: Any) -> Any:
        """Open this end of a link; returns what the other ends' ``open`` needs."""
        self._link = LINKS[kind](rank, members, self._cuda, options)
        return self._link.open(meeting)

    def resume(self) -> None:
        """Begin turns."""
        self._link.resume()

    def pause(self) -> None:
        """End turns."""
        self._link.pause()

    def measure(
        self, device: Device, pattern: Pattern, size: int, peers: Sequence[int], window: Window, method: str
    ) -> Samples:
        """Call that method of these peers."""
        payload = self._link.payload(device, size, pattern.tensors, self.produce)
        if pattern.is_caller_busy:
            threading.Thread(target=self.work, args=(pattern.busy, window.end), daemon=True).start()
        samples: Samples = self._link.run(measure, peers, method, payload, pattern, window)
        return samples

    def serve(self, device: Device, size: int, count: int) -> None:
        """The other end of ``measure``, for links without calls."""
        self._link.serve(torch.zeros(size, dtype=torch.uint8, device=device), count)

    def produce(self, device: Device, size: int, count: int = 1) -> Any:
        """The tensor of that size, or a list of tensors; only the last one is kept."""
        key = device, size, count
        if self._payload is None or self._payload[0] != key:
            self._payload = None  # frees the last one first
            tensor = torch.full((size,), size % 251, dtype=torch.uint8, device=device)
            parts = [part.clone() for part in tensor.chunk(count)] if count > 1 else tensor
            take(parts)
            self._payload = key, parts
        return self._payload[1]

    def drop(self) -> None:
        """Free the memory of the last payload."""
        self._payload = None
        if self._link is not None:
            self._link.drop()
        if self._cuda:
            torch.cuda.empty_cache()

    def work(self, kind: Busy, end: float) -> None:
        """Keep this method busy until then, by ``time.monotonic``."""
        matrix = torch.ones(256, 256, device="cuda" if self._cuda else "cpu")
        while time.monotonic() < end:
            if kind == "sleep":
                time.sleep(max(0.0, end - time.monotonic()))
            elif kind == "torch":
                take(matrix @ matrix)
            else:
                sum(range(100))

    def cpu_s(self) -> float:
        """CPU time of this process."""
        used = os.times()
        return used.user + used.system

    def take(self, payload: Any = None) -> None:
        """The callee."""
        take(payload)

    def take_beside(self, payload: Any = None) -> None:
        """The callee that runs beside other methods, in a threaded Ray actor."""
        take(payload)


class GroupMember(Member):
    """A member of a group."""

    take = rtr.method(Member.take)
    take_beside = rtr.method(concurrent=True)(Member.take_beside)
    work = rtr.method(concurrent=True)(Member.work)  # else calls to this sync actor would wait for its end
