"""Inside the actors: the ways to reach a peer, and the loops that measure them.

A call has a tensor argument, or none, and returns when all of it is at the other end and the acknowledgement has
arrived.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import raytorchrpc as rtr
from raytorchrpc.bench.cases import Failed
from raytorchrpc.bench.patterns import Busy, Pattern, Turn
from raytorchrpc.topology import probe

#: Longest wait for the peer, in seconds.
TIMEOUT_S = 120.0
#: Share of a turn that its uncounted lead-in takes: other contestants have displaced the caches.
LEAD_IN = 0.25
#: Samples of which a receiver is told at once, and the bytes that they may have together.
_EXCHANGES, _EXCHANGED_BYTES = 100, 4_000_000_000


def get(refs: Any, timeout_s: float) -> Any:
    """``ray.get`` with every failure reported as one line. Raises Failed."""
    try:
        return ray.get(refs, timeout=max(0.0, timeout_s))
    except GetTimeoutError:
        raise Failed(f"no answer within {timeout_s:.0f} s") from None
    except RayTaskError as error:
        raise Failed(one_line(error.cause if error.cause is not None else error)) from error
    except RayActorError as error:
        raise Failed("an actor died: " + one_line(error)) from error


def one_line(error: BaseException) -> str:
    """An exception's type and its first line, shortened."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    kind = type(error).__name__.removeprefix("RayTaskError(").removesuffix(")")
    return f"{kind}: {text}"[:240].rstrip(": ")


# --- the loops -------------------------------------------------------------------------------------------------------


class Calls(NamedTuple):
    """Ways to make one call."""

    call: Callable[[], Any]
    send: Callable[[], Any]
    """Start the call; returns a handle."""
    finish: Callable[[Any], Any]
    """Wait for a handle's result."""


def _only(call: Callable[[], Any]) -> Calls:
    """Where there are no calls in flight."""
    return Calls(call, call, lambda handle: None)


def measure(calls: Sequence[Calls], turn: Turn) -> list[float]:
    """Make calls, after a lead-in; returns the seconds of each, or of each round of calls.

    Args:
        calls: one for each peer.
        turn: how to call, and for how long.
    """
    pattern, waiting = turn.pattern, deque[Any]()

    def keep_in_flight() -> None:
        if len(waiting) >= pattern.in_flight:
            calls[0].finish(waiting.popleft())
        waiting.append(calls[0].send())

    def all_at_once() -> None:
        handles = [each.send() for each in calls]
        for each, handle in zip(calls, handles, strict=True):
            each.finish(handle)

    def one_after_another() -> None:
        for each in calls:
            each.call()

    step = keep_in_flight if pattern.in_flight else all_at_once if pattern.asynchronous else one_after_another
    _repeat(step, turn.window_s * LEAD_IN, pattern.interval_s)
    seconds = _repeat(step, turn.window_s, pattern.interval_s)
    for handle in waiting:
        calls[0].finish(handle)
    return seconds


def _repeat(step: Callable[[], None], window_s: float, interval_s: float) -> list[float]:
    """Run a step until the time is over; returns the seconds of each run."""
    seconds: list[float] = []
    begin = time.perf_counter()
    while not seconds or time.perf_counter() - begin < window_s:
        if interval_s:
            time.sleep(max(0.0, begin + len(seconds) * interval_s - time.perf_counter()))
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


def take(payload: torch.Tensor | None = None) -> None:
    """The callee: waits until the data of the tensor is there."""
    if payload is not None and payload.is_cuda:
        torch.cuda.current_stream().synchronize()


# --- the ends of each kind of link -----------------------------------------------------------------------------------


class Member:
    """An actor that calls others and is called. The driver drives it by Ray's calls."""

    polls = False
    """It keeps a core busy while it waits, so it works only during the turns of its contestant."""
    in_driver = False
    """The driver makes the calls, with an object of this class."""
    _payload: tuple[tuple[str, int], torch.Tensor] | None = None

    def __init__(self, rank: int, cuda: bool, transport: str | None) -> None:
        self.rank, self.cuda, self.transport = rank, cuda, transport
        self.address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def open(self, members: Sequence[Any], meeting: Any) -> Any:
        """Connect.

        Args:
            members: the actors, by their rank.
            meeting: the result on rank 0; None there, which comes first.
        """
        self.members = members

    def begin(self) -> None:
        """Begin a turn, if it polls; called on all members at once."""

    def end(self) -> None:
        """End a turn, if it polls; called on all members at once."""

    def calls(self, peer: int, *args: Any) -> Calls:
        """Ways to call a member with these arguments."""
        raise NotImplementedError

    def measure(self, turn: Turn, peers: Sequence[int]) -> list[float]:
        """Call these peers; see the function of that name."""
        args = [self.produce(turn)] if turn.size else []
        return measure([self.calls(peer, *args) for peer in peers], turn)

    def produce(self, turn: Turn) -> torch.Tensor:
        """The tensor of a turn; only the last one is kept."""
        key = turn.device, turn.size
        if self._payload is None or self._payload[0] != key:
            self._payload = None  # frees the last one first
            self._payload = key, torch.full((turn.size,), turn.size % 251, dtype=torch.uint8, device=turn.device)
            take(self._payload[1])
        return self._payload[1]

    def drop(self) -> None:
        """Free the memory of the last payload."""
        self._payload = None
        if self.cuda:
            torch.cuda.empty_cache()

    def take(self, payload: Any = None) -> None:
        """The callee."""
        take(payload)

    def work(self, kind: Busy, seconds: float) -> None:
        """Keep this method busy for so long."""
        matrix = torch.ones(256, 256, device="cuda" if self.cuda else "cpu")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if kind == "sleep":
                time.sleep(seconds)
            elif kind == "torch":
                take(matrix @ matrix)
            else:
                sum(range(100))

    def cpu_s(self) -> float:
        """CPU time of this process."""
        return time.process_time()


class GroupMember(Member):
    """Direct calls."""

    take = rtr.method(Member.take)
    # These let calls run meanwhile, also in this sync actor.
    measure = rtr.method(concurrent=True)(Member.measure)
    work = rtr.method(concurrent=True)(Member.work)

    def calls(self, peer: int, *args: Any) -> Calls:
        call, send = (partial(verb(self.members[peer]).take, *args) for verb in (rtr.rpc_sync, rtr.rpc_async))
        return Calls(call, send, lambda future: future.wait())


class RayMember(Member):
    """Ray actor calls: a tensor goes through the object store, a small one in the message."""

    def calls(self, peer: int, *args: Any) -> Calls:
        send, wait = partial(self.members[peer].take.remote, *args), partial(ray.get, timeout=TIMEOUT_S)
        return Calls(lambda: wait(send()), send, wait)


class ObjectRefMember(Member):
    """One actor's result is passed to the other, by Ray Direct Transport or, without one, through the object store."""

    in_driver = True

    def measure(self, turn: Turn, peers: Sequence[int]) -> list[float]:
        produce, receive = self.members[0].produce, self.members[-1].take
        if self.transport:
            produce = produce.options(tensor_transport=self.transport)
        return measure([_only(lambda: get(receive.remote(produce.remote(turn)), TIMEOUT_S))], turn)


class MonarchMember(Member):
    """Monarch's calls, from actor to actor in two processes that it starts."""

    def open(self, members: Sequence[Any], meeting: Any) -> Any:
        from monarch.actor import Actor, endpoint, this_host

        class Callee(Actor):  # type: ignore[misc]  # in here, so that both are pickled by value
            @endpoint  # type: ignore[untyped-decorator]
            def take(self, payload: Any = None) -> None:
                """The callee."""

        class Caller(Actor):  # type: ignore[misc]
            @endpoint  # type: ignore[untyped-decorator]
            def measure(self, callee: Any, args: list[Any], turn: Turn) -> list[float]:
                send = partial(callee.take.call_one, *args)
                return measure([Calls(lambda: send().get(), send, lambda future: future.get())], turn)

        actors = {"callee": Callee, "caller": Caller}
        self._ends = {name: this_host().spawn_procs().spawn(name, kind) for name, kind in actors.items()}
        self.measure(Turn(Pattern(), "cpu", 0, 0.0), [])

    def measure(self, turn: Turn, peers: Sequence[int]) -> list[float]:
        args = [self.produce(turn)] if turn.size else []
        started = self._ends["caller"].measure.call_one(self._ends["callee"], args, turn)
        seconds: list[float] = started.get(timeout=TIMEOUT_S)
        return seconds


class TorchRpcMember(Member):
    """``torch.distributed.rpc`` with its own defaults."""

    polls = True

    def open(self, members: Sequence[Any], meeting: Any) -> Any:
        super().open(members, meeting)
        interface = probe.probe(node_ip=self.address, wants_gpu=False).interface_of(self.address)
        if interface:  # else torch listens on the address of the host name, often 127.0.1.1
            os.environ.setdefault("TP_SOCKET_IFNAME", interface)
        if meeting is None:
            # init_rpc reuses this server, which it finds in its own process, so no port has to be guessed.
            self._store = TCPStore(self.address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
            meeting = f"tcp://{self.address}:{self._store.port}"
        self._meeting = meeting
        return meeting

    def begin(self) -> None:
        count = len(self.members)
        maps: Any = {str(peer): {0: 0} for peer in range(count) if peer != self.rank} if self.cuda else None
        options = rpc.TensorPipeRpcBackendOptions(init_method=self._meeting, rpc_timeout=TIMEOUT_S, device_maps=maps)
        init: Any = rpc.init_rpc
        init(str(self.rank), rank=self.rank, world_size=count, rpc_backend_options=options)

    def end(self) -> None:
        rpc.shutdown()

    def calls(self, peer: int, *args: Any) -> Calls:
        call, send = (partial(verb, str(peer), take, args=args) for verb in (rpc.rpc_sync, rpc.rpc_async))
        return Calls(call, send, lambda future: future.wait())


class _TwoSided(Member):
    """No calls: rank 0 sends, and rank 1 has to know how often. It is told of many samples at once, by Ray."""

    _due = 0
    """Samples that rank 1 still expects."""

    def calls(self, peer: int, *args: Any) -> Calls:
        return _only(partial(self._sample, *(args or [torch.zeros(1, dtype=torch.uint8)])))

    def measure(self, turn: Turn, peers: Sequence[int]) -> list[float]:
        seconds = super().measure(turn, peers)
        while self._due:
            self._sample(self._last)
        return seconds

    def _sample(self, tensor: torch.Tensor) -> None:
        if not self._due:
            self._due, self._last = max(3, min(_EXCHANGES, _EXCHANGED_BYTES // tensor.nbytes)), tensor
            self.members[1].serve.remote(tensor.device.type, tensor.nbytes, self._due)
        self._due -= 1
        self.send(tensor)

    def serve(self, device: str, size: int, count: int) -> None:
        """Take part in so many samples of that size."""
        target = torch.empty(size, dtype=torch.uint8, device=device)
        for _ in range(count):
            self.receive(target)

    def send(self, tensor: torch.Tensor) -> None:
        """Send it, and wait for the acknowledgement."""
        raise NotImplementedError

    def receive(self, target: torch.Tensor) -> None:
        """The other end of ``send``."""
        raise NotImplementedError


class NcclMember(_TwoSided):
    """NCCL's send and receive; the acknowledgement is a second message."""

    def open(self, members: Sequence[Any], meeting: Any) -> Any:
        super().open(members, meeting)
        torch.cuda.set_device(0)
        host, port = meeting or (self.address, 0)
        self._store = TCPStore(host, port, is_master=meeting is None, wait_for_workers=False)
        return self.address, self._store.port

    @cached_property
    def _ack(self) -> torch.Tensor:
        limit = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("nccl", store=self._store, rank=self.rank, world_size=2, timeout=limit)
        return torch.ones(1, device="cuda")

    def send(self, tensor: torch.Tensor) -> None:
        ack = self._ack  # connects, the first time
        dist.send(tensor, 1)
        dist.recv(ack, 1)
        torch.cuda.current_stream().synchronize()

    def receive(self, target: torch.Tensor) -> None:
        ack = self._ack
        dist.recv(target, 0)
        dist.send(ack, 0)
        torch.cuda.current_stream().synchronize()


class SocketMember(_TwoSided):
    """A TCP socket; the receiver reuses its buffer."""

    def open(self, members: Sequence[Any], meeting: Any) -> Any:
        super().open(members, meeting)
        self._meeting = meeting
        if meeting is None:
            self._listener = socket.create_server((self.address, 0))
            self._listener.settimeout(TIMEOUT_S)
            return self._listener.getsockname()[:2]

    @cached_property
    def _stream(self) -> socket.socket:
        stream = socket.create_connection(self._meeting, TIMEOUT_S) if self._meeting else self._listener.accept()[0]
        stream.settimeout(TIMEOUT_S)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return stream

    def send(self, tensor: torch.Tensor) -> None:
        self._stream.sendall(_bytes_of(tensor))
        if self._stream.recv(1) != b"+":
            raise ConnectionError("the receiver closed its socket")

    def receive(self, target: torch.Tensor) -> None:
        view = _bytes_of(target)
        while view:
            if not (count := self._stream.recv_into(view)):
                raise ConnectionError("the sender closed its socket")
            view = view[count:]
        self._stream.sendall(b"+")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr()))


class CopyMember(Member):
    """No peer: one process copies into memory that is already mapped; on GPUs from the first to the last of its own."""

    def calls(self, peer: int, *args: Any) -> Calls:
        (tensor,) = args
        there = f"cuda:{torch.cuda.device_count() - 1}" if tensor.is_cuda else "cpu"
        target = torch.zeros_like(tensor, device=there)

        def copy() -> None:
            target.copy_(tensor)
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)

        return _only(copy)


#: By the name in ``Contestant.link``.
KINDS: dict[str, type[Member]] = {
    "group": GroupMember,
    "ray": RayMember,
    "monarch": MonarchMember,
    "torchrpc": TorchRpcMember,
    "nccl": NcclMember,
    "socket": SocketMember,
    "copy": CopyMember,
    "rdt": ObjectRefMember,
}
