"""Inside the actors of ``--pattern``: links to the peers, the measuring loops, and what they cost the processes."""

from __future__ import annotations

import contextlib
import math
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed.rpc as rpc
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import raytorchrpc as rtr
from raytorchrpc.bench.patterns import Busy, Case
from raytorchrpc.bench.transports import TIMEOUT_S, Context, NcclTransport, synchronize
from raytorchrpc.topology import probe

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
        """What it has used. Switches of threads that have ended are not counted."""
        switches, cpu_s = self._read()
        return Usage(sum(n - self._switches.get(task, 0) for task, n in switches.items()), cpu_s - self._cpu_s)

    def _read(self) -> tuple[dict[str, int], float]:
        switches = {}
        for task in Path(f"/proc/{self._pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended
                lines = (task / "status").read_text().splitlines()
                switches[task.name] = sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
        return switches, cpu_seconds(self._pid)


def cpu_seconds(pid: int) -> float:
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


class Calls(NamedTuple):
    """Ways to make one call."""

    call: Callable[[], Any]
    send: Callable[[], Any]
    """Start the call; returns a handle."""
    finish: Callable[[Any], Any]
    """Wait for a handle's result."""


def take(payload: Any = None) -> None:
    """The callee: waits until a tensor's data is there; sleeps if the payload is a number of seconds."""
    if isinstance(payload, float):
        time.sleep(payload)
    elif payload is not None:
        synchronize(payload)


def make_tensor(size: int, device: str) -> torch.Tensor:
    """A payload of that many bytes."""
    tensor = torch.ones(size, dtype=torch.uint8, device=device)
    synchronize(tensor)
    return tensor


# --- measuring -------------------------------------------------------------------------------------------------------


class Window(NamedTuple):
    """When a caller measures; moments by ``time.monotonic``, which all processes of a host share."""

    seconds: float
    start: float = 0.0
    end: float = math.inf
    fewest: int = FEWEST
    """Samples that are taken even if the time is over."""


def measure(make: Callable[..., list[Calls]], case: Case, device: str, window: Window, callee: int) -> Sample:
    """Make calls in that window, after a lead-in.

    ``make(*args)`` returns one call with these arguments for each peer. ``callee``: the process whose usage counts as
    the callee's.
    """
    time.sleep(max(0.0, window.start - time.monotonic()))
    calls = make(make_tensor(case.size, device)) if case.size else make()
    step, drain = _step(calls, case)
    _repeat(step, window.seconds * LEAD_IN, case.interval_s, lead_in(window.fewest))
    for slow in make(SLOW_S) if case.slow_calls else ():
        for _ in range(case.slow_calls):
            slow.call()
    meters = Meter(os.getpid()), Meter(callee)
    start = time.perf_counter()
    seconds = _repeat(step, min(window.seconds, window.end - time.monotonic()), case.interval_s, window.fewest)
    elapsed_s = time.perf_counter() - start
    used = [meter.used() for meter in meters]
    drain()
    return Sample(seconds, elapsed_s, *used)


def lead_in(fewest: int) -> int:
    """Fewest uncounted samples."""
    return max(FEWEST, fewest // 4)


def _repeat(step: Callable[[], Any], window_s: float, interval_s: float, fewest: int) -> list[float]:
    """Run a step until the time is over; returns the seconds of each run."""
    seconds: list[float] = []
    begin = time.perf_counter()
    while len(seconds) < fewest or time.perf_counter() - begin < window_s:
        if interval_s:
            time.sleep(max(0.0, begin + len(seconds) * interval_s - time.perf_counter()))
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


def _step(calls: Sequence[Calls], case: Case) -> tuple[Callable[[], Any], Callable[[], None]]:
    """What is timed, and what to do after the last time."""
    if case.in_flight:
        return _window(calls[0], case.in_flight)
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


def _window(calls: Calls, most: int) -> tuple[Callable[[], None], Callable[[], None]]:
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


# --- links -----------------------------------------------------------------------------------------------------------


class Link(ABC):
    """How one actor calls the others of its row. Members are named by their rank."""

    def __init__(self, rank: int, members: Sequence[Any], cuda: bool) -> None:
        self.rank, self.members, self.cuda = rank, members, cuda

    def open(self, meeting: Any) -> Any:
        """Prepare; rank 0 comes first, with None, and its result is passed to the others."""
        return None

    def resume(self) -> None:  # noqa: B027 - most links need nothing here
        """Begin a turn; called on all members at once."""

    def pause(self) -> None:  # noqa: B027
        """End a turn; called on all members at once."""

    @abstractmethod
    def calls(self, peer: int, method: str, *args: Any) -> Calls:
        """Ways to call a member's method."""


class GroupLink(Link):
    """Direct calls."""

    def calls(self, peer: int, method: str, *args: Any) -> Calls:
        target = self.members[peer]
        call, send = (partial(getattr(verb(target), method), *args) for verb in (rtr.rpc_sync, rtr.rpc_async))
        return Calls(call, send, lambda future: future.wait())


class RayLink(Link):
    """Ray actor calls."""

    def calls(self, peer: int, method: str, *args: Any) -> Calls:
        send = partial(getattr(self.members[peer], method).remote, *args)
        return Calls(lambda: ray.get(send()), send, ray.get)


class TorchRpcLink(Link):
    """``torch.distributed.rpc`` with its own defaults. Agents live for one turn, because idle ones poll."""

    def open(self, meeting: Any) -> Any:
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        interface = probe.interface_for(probe.probe(node_ip=address, wants_gpu=False), address)
        if interface:  # else torch listens on the address of the host name, often 127.0.1.1
            os.environ.setdefault("TP_SOCKET_IFNAME", interface)
        if meeting is None:
            # init_rpc reuses this server, which it finds in its own process, so no port has to be guessed.
            self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
            meeting = f"tcp://{address}:{self._store.port}"
        self._meeting = meeting
        return meeting

    def resume(self) -> None:
        ranks = range(len(self.members))
        maps: Any = {str(peer): {0: 0} for peer in ranks if peer != self.rank} if self.cuda else None
        options = rpc.TensorPipeRpcBackendOptions(init_method=self._meeting, rpc_timeout=TIMEOUT_S, device_maps=maps)
        rpc.init_rpc(  # type: ignore[no-untyped-call]
            str(self.rank), rank=self.rank, world_size=len(self.members), rpc_backend_options=options
        )

    def pause(self) -> None:
        rpc.shutdown()

    def calls(self, peer: int, method: str, *args: Any) -> Calls:
        call, send = (partial(verb, str(peer), take, args=args) for verb in (rpc.rpc_sync, rpc.rpc_async))
        return Calls(call, send, lambda future: future.wait())


class NcclLink(Link):
    """A tensor from rank 0 to rank 1 and an acknowledgement; rank 1 must serve as many."""

    def open(self, meeting: Any) -> Any:
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self.transport = NcclTransport(Context(self.rank, None, address, self.cuda), {})
        return self.transport.open(meeting)

    def resume(self) -> None:
        self.transport.resume()

    def calls(self, peer: int, method: str, *args: Any) -> Calls:
        call = partial(self.transport.send, args[0], False)
        return Calls(call, call, lambda handle: None)


LINKS: dict[str, type[Link]] = {
    "auto": GroupLink,
    "bare-torchrpc": TorchRpcLink,
    "ray": RayLink,
    "ray-graph": RayLink,
    "bare-nccl": NcclLink,
}


# --- actors ----------------------------------------------------------------------------------------------------------


class Member:
    """Calls and is called. The methods that drive it are called by the driver, through Ray."""

    def __init__(self, cuda: bool) -> None:
        self._device = "cuda" if cuda else "cpu"

    def ready(self) -> tuple[int, str]:
        """Its process id and the name of its GPU, if it has one. Raises whatever prevents CUDA from starting."""
        make_tensor(1, self._device)
        return os.getpid(), torch.cuda.get_device_name(0) if self._device == "cuda" else ""

    def open(self, row: str, rank: int, members: Sequence[Any], meeting: Any) -> Any:
        """Prepare the link to the others."""
        self._link = LINKS[row](rank, members, self._device == "cuda")
        return self._link.open(meeting)

    def resume(self) -> None:
        """Begin a turn."""
        self._link.resume()

    def pause(self) -> None:
        """End a turn."""
        self._link.pause()

    def measure(self, case: Case, peers: Sequence[int], window: Window, callee: int) -> Sample:
        """Call these peers."""
        method = "take_beside" if case.beside else "take"

        def make(*args: Any) -> list[Calls]:
            return [self._link.calls(peer, method, *args) for peer in peers]

        return measure(make, case, self._device, window, callee)

    def exchange(self, case: Case, count: int, callee: int) -> Sample | None:
        """Send, or serve, ``count`` tensors over a link without calls; the sender returns the sample."""
        assert isinstance(self._link, NcclLink)
        if self._link.rank:
            self._link.transport.serve(make_tensor(case.size, self._device), count + lead_in(count))
            return None
        return self.measure(case, [1], Window(0.0, fewest=count), callee)

    def work(self, kind: Busy, end: float) -> None:
        """Keep this method busy until then, by ``time.monotonic``."""
        matrix = torch.ones(256, 256, device=self._device)
        while time.monotonic() < end:
            if kind == "sleep":
                time.sleep(max(0.0, end - time.monotonic()))
            elif kind == "torch":
                synchronize(matrix @ matrix)
            else:
                sum(range(100))

    def take(self, payload: Any = None) -> None:
        """The callee."""
        take(payload)

    def take_beside(self, payload: Any = None) -> None:
        """The callee that runs beside other methods, in a threaded Ray actor."""
        take(payload)


class GroupMember(Member):
    """A member of a group."""

    @rtr.method
    def take(self, payload: Any = None) -> None:
        """The callee."""
        take(payload)

    @rtr.method(concurrent=True)
    def take_beside(self, payload: Any = None) -> None:
        """The callee that runs beside other methods."""
        take(payload)


class AsyncMember(Member):
    """A Ray actor whose callee is a coroutine."""

    async def take(self, payload: Any = None) -> None:  # type: ignore[override]
        """The callee."""
        take(payload)


class AsyncGroupMember(Member):
    """A member of a group whose callee is a coroutine."""

    @rtr.method
    async def take(self, payload: Any = None) -> None:  # type: ignore[override]
        """The callee."""
        take(payload)
