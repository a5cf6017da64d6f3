"""Inside the actors: the loops that measure a link, and what they cost the processes."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import raytorchrpc as rtr
from raytorchrpc.bench.cases import Busy, Case
from raytorchrpc.bench.links import LINKS, Calls, Digest, Failed, Link, digest, take
from raytorchrpc.bench.results import Device

#: Fewest samples of one measurement, however long they take.
FEWEST = 2
#: Share of a measurement that its uncounted lead-in takes.
LEAD_IN = 0.25
#: Seconds of a slow call.
SLOW_S = 0.005


class Usage(NamedTuple):
    """What a process has used in some time."""

    switches: int
    """Context switches of its threads, voluntary and involuntary."""
    cpu_s: float


class Meter:
    """Measures what a process of this host uses from now on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._switches, self._cpu_s = self._read()

    def used(self) -> Usage:
        """What it has used. Of another process, switches of threads that have ended are not counted."""
        switches, cpu_s = self._read()
        return Usage(sum(n - self._switches.get(task, 0) for task, n in switches.items()), cpu_s - self._cpu_s)

    def _read(self) -> tuple[dict[str, int], float]:
        if self._pid == os.getpid():  # in one step: a thread of a busy process waits for the lock at each file
            own = resource.getrusage(resource.RUSAGE_SELF)
            return {"": own.ru_nvcsw + own.ru_nivcsw}, own.ru_utime + own.ru_stime
        switches = {}
        for task in Path(f"/proc/{self._pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended
                lines = (task / "status").read_text().splitlines()
                switches[task.name] = sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
        return switches, _cpu_seconds(self._pid)


def _cpu_seconds(pid: int) -> float:
    """The CPU time of a process of this host."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the clock of clock_getcpuclockid(3)
    except OSError:  # the kernel has no such clock: count in ticks of 10 ms
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Sample(NamedTuple):
    """One measurement by one caller."""

    seconds: list[float]
    """Of each call, or of each round of calls."""
    elapsed_s: float
    caller: Usage
    callee: Usage


class Window(NamedTuple):
    """When a caller measures; moments by ``time.monotonic``, which all processes of a host share."""

    seconds: float
    start: float = 0.0
    end: float = math.inf
    """When what makes the callee busy ends: later samples do not count."""
    fewest: int = FEWEST
    """Samples that are taken even if the time is over."""
    lead: int = FEWEST
    """Fewest uncounted samples before them."""


def measure(
    make: Callable[..., list[Calls]], case: Case, payload: Sequence[Any], window: Window, callee: int | None
) -> Sample:
    """Make calls in that window, after a lead-in.

    ``make(*args)`` returns one call with these arguments for each peer. ``callee``: the process whose usage counts as
    the callee's, unless it is busy; None: no process's. Raises Failed if no call of a busy callee ends in time.
    """
    if window.start:
        time.sleep(max(0.0, window.start - time.monotonic()))
    calls = make(*payload)
    step, drain = _step(calls, case)
    _repeat(step, window.seconds * LEAD_IN, case.interval_s, window.lead)
    for slow in make(SLOW_S) if case.slow_calls else ():
        for _ in range(case.slow_calls):
            slow.call()
    mine, its = Meter(os.getpid()), None if callee is None or case.busy else Meter(callee)
    start = time.perf_counter()
    seconds = _repeat(step, window.seconds, case.interval_s, window.fewest, window.end)
    elapsed_s = time.perf_counter() - start
    caller_used, callee_used = mine.used(), Usage(0, 0.0) if its is None else its.used()
    drain()
    if not seconds:
        raise Failed("no call ended while the callee was busy")
    return Sample(seconds, elapsed_s, caller_used, callee_used)


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


def _step(calls: Sequence[Calls], case: Case) -> tuple[Callable[[], Any], Callable[[], None]]:
    """What is timed, and what to do after the last time."""
    if case.in_flight:
        return _in_flight(calls[0], case.in_flight)
    if len(calls) == 1:
        return calls[0].call, lambda: None

    def one_after_another() -> None:
        for each in calls:
            each.call()

    def all_at_once() -> None:
        handles = [each.send() for each in calls]
        for each, handle in zip(calls, handles, strict=True):
            each.finish(handle)

    return all_at_once if case.asynchronous else one_after_another, lambda: None


def _in_flight(calls: Calls, most: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Start one call and finish the oldest, once ``most`` are in flight; finish all that are left."""
    waiting: deque[Any] = deque()
    send, finish = calls.send, calls.finish

    def step() -> None:
        if len(waiting) >= most:
            finish(waiting.popleft())
        waiting.append(send())

    def drain() -> None:
        while waiting:
            finish(waiting.popleft())

    return step, drain


class Ready(NamedTuple):
    """What an actor reports once it has started."""

    pid: int
    gpu: str = ""
    """UUID of its GPU; empty without one."""
    gpu_name: str = ""
    gpu_free: int = 0
    """Bytes."""


class Member:
    """Calls and is called. The methods that drive it are called by the driver, through Ray."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._links: dict[str, Link] = {}
        self._payloads: dict[str, Any] = {}
        self._digest: Digest | None = None

    def ready(self) -> Ready:
        """Raises whatever prevents CUDA from starting if the actor has a GPU."""
        if not self._cuda:
            return Ready(os.getpid())
        properties = torch.cuda.get_device_properties(0)
        torch.zeros(1, device="cuda")
        uuid = str(getattr(properties, "uuid", ""))
        return Ready(os.getpid(), uuid, properties.name, torch.cuda.mem_get_info(0)[0])

    def open(self, name: str, kind: str, rank: int, members: Sequence[Any], options: Any, meeting: Any) -> Any:
        """Open this end of a link; returns what the other ends' ``open`` needs."""
        link = LINKS[kind](rank, members, self._cuda, options)
        meeting = link.open(meeting)
        self._links[name] = link
        return meeting

    def resume(self, name: str) -> None:
        """Begin a turn."""
        self._links[name].resume()

    def pause(self, name: str) -> None:
        """End a turn."""
        self._links[name].pause()

    def measure(
        self,
        name: str,
        device: Device,
        case: Case,
        peers: Sequence[int],
        window: Window,
        pid: int | None,
        method: str,
    ) -> Sample:
        """Call that method of these peers; ``pid``: the process of the last."""
        link = self._links[name]
        payload = link.payload(device, case, self.produce)
        if case.is_caller_busy:
            threading.Thread(target=self.work, args=(case.busy, window.end), daemon=True).start()
        return measure(lambda *args: [link.calls(p, method, *args) for p in peers], case, payload, window, pid)

    def serve(self, name: str, device: Device, case: Case, count: int) -> None:
        """The other end of ``measure``, for links without calls."""
        self._links[name].serve(torch.zeros(case.size, dtype=torch.uint8, device=device), count)

    def produce(self, device: Device, case: Case) -> Any:
        """The tensor of that size, or list of tensors."""
        key = f"{device} {case.size} {case.tensors}"
        if key not in self._payloads:
            for old in [old for old in self._payloads if old.startswith(f"{device} ")]:
                del self._payloads[old]
            tensor = torch.full((case.size,), case.size % 251, dtype=torch.uint8, device=device)
            tensor[-1] = case.size * 7 % 251
            parts = [part.clone() for part in tensor.chunk(case.tensors)] if case.tensors > 1 else tensor
            take(parts)
            self._payloads[key] = parts
        return self._payloads[key]

    def prepare(self, device: Device, case: Case) -> Digest:
        """Create the payload; returns the digest that its receiver must compute."""
        return digest(self.produce(device, case))

    def received(self, name: str) -> Digest | None:
        """Digest of the last payload that arrived; forgets it."""
        own, self._digest = self._digest, None
        return own or (self._links[name].received() if name in self._links else None)

    def drop(self) -> None:
        """Free the memory of the last payload."""
        self._payloads.clear()
        for link in self._links.values():
            link.drop()
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

    def take(self, payload: Any = None) -> None:
        """The callee."""
        take(payload)

    def take_beside(self, payload: Any = None) -> None:
        """The callee that runs beside other methods, in a threaded Ray actor."""
        take(payload)

    def take_checked(self, payload: Any) -> None:
        """The callee, which also keeps a digest of the payload."""
        self._digest = digest(payload)


class GroupMember(Member):
    """A member of a group."""

    take, take_checked = rtr.method(Member.take), rtr.method(Member.take_checked)
    take_beside = rtr.method(concurrent=True)(Member.take_beside)
    work = rtr.method(concurrent=True)(Member.work)  # else calls to this sync actor would wait for its end


class AsyncMember(Member):
    """A Ray actor whose callee is a coroutine."""

    async def take(self, payload: Any = None) -> None:  # type: ignore[override]
        """The callee."""
        take(payload)


class AsyncGroupMember(AsyncMember):
    """A member of a group whose callee is a coroutine."""

    take = rtr.method(AsyncMember.take)
