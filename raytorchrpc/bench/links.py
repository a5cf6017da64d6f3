"""Links: the ways to reach a peer, inside the actors or, for what only a driver can request, in the driver.

``open`` is called on rank 0 first; its result is passed to ``open`` on the others. A call has a tensor argument, or
none, and returns when all of it is at the other end and the acknowledgement has arrived.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import raytorchrpc as rtr
from raytorchrpc.bench.cases import Device, Failed, Stuck
from raytorchrpc.topology import probe

#: Longest wait for the peer, in seconds.
TIMEOUT_S = 120.0


def get(refs: Any, timeout_s: float) -> Any:
    """``ray.get`` with every failure reported as one line. Raises Failed."""
    try:
        return ray.get(refs, timeout=max(0.0, timeout_s))
    except GetTimeoutError:
        raise Stuck(f"no answer within {timeout_s:.0f} s") from None
    except RayTaskError as error:
        raise Failed(one_line(error.cause if error.cause is not None else error)) from error
    except RayActorError as error:
        raise Stuck("an actor died: " + one_line(error)) from error


def one_line(error: BaseException) -> str:
    """An exception's type and its first line, shortened."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    kind = type(error).__name__.removeprefix("RayTaskError(").removesuffix(")")
    return f"{kind}: {text}"[:240].rstrip(": ")


def take(payload: Any = None) -> None:
    """The callee: waits until the data of tensors is there."""
    if payload is not None and (payload[0] if isinstance(payload, list) else payload).is_cuda:
        torch.cuda.current_stream().synchronize()


class Calls(NamedTuple):
    """Ways to make one call."""

    call: Callable[[], Any]
    send: Callable[[], Any]
    """Start the call; returns a handle."""
    finish: Callable[[Any], Any]
    """Wait for a handle's result."""


def _only(call: Callable[[], Any]) -> Calls:
    """Of a link without calls in flight."""
    return Calls(call, call, lambda handle: None)


class Link(ABC):
    """One member's way to call the others, which are named by their rank."""

    two_sided = False
    """Rank 1 must ``serve`` while rank 0 sends."""
    in_driver = False
    """The driver holds the only end."""

    def __init__(self, rank: int, members: Sequence[Any], cuda: bool, options: dict[str, Any]) -> None:
        self.rank, self.members, self.cuda, self.options = rank, members, cuda, options
        self.address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def open(self, meeting: Any) -> Any:
        """Prepare; ``meeting``: the result on rank 0, None there."""
        return None

    def resume(self) -> None:  # noqa: B027 - most links need nothing here
        """Begin a turn; called on all members at once."""

    def pause(self) -> None:  # noqa: B027
        """End a turn; called on all members at once."""

    @abstractmethod
    def calls(self, peer: int, method: str, *args: Any) -> Calls:
        """Ways to call a member's method; the method says little where the link has no calls."""

    def run(self, loop: Callable[..., Any], peers: Sequence[int], method: str, payload: list[Any], *more: Any) -> Any:
        """Run ``loop(calls of each peer, *more)`` where calls start."""
        return loop([self.calls(peer, method, *payload) for peer in peers], *more)

    def payload(self, device: Device, size: int, count: int, produce: Callable[[Device, int, int], Any]) -> list[Any]:
        """The arguments of calls with so many tensors of that size together, which ``produce`` makes."""
        return [produce(device, size, count)] if size else []

    def serve(self, like: torch.Tensor, count: int) -> None:
        """Take part in ``count`` samples of that size and device."""
        raise NotImplementedError

    def drop(self) -> None:  # noqa: B027
        """Free what the last size needed."""


class GroupLink(Link):
    """Direct calls."""

    def calls(self, peer: int, method: str, *args: Any) -> Calls:
        target, share = self.members[peer], bool(self.options.get("share"))
        verbs = rtr.rpc_sync(target, share=share), rtr.rpc_async(target, share=share)
        call, send = (partial(getattr(verb, method), *args) for verb in verbs)
        return Calls(call, send, lambda future: future.wait())


class RayLink(Link):
    """Ray actor calls: a tensor goes through the object store, a small one in the message."""

    def calls(self, peer: int, method: str, *args: Any) -> Calls:
        send, wait = partial(getattr(self.members[peer], method).remote, *args), partial(ray.get, timeout=TIMEOUT_S)
        return Calls(lambda: wait(send()), send, wait)


class MonarchLink(Link):
    """Monarch's calls, from actor to actor in two processes that it starts."""

    def open(self, meeting: Any) -> Any:
        from monarch.actor import Actor, endpoint, this_host

        class Callee(Actor):  # type: ignore[misc]  # in here, so that both are pickled by value
            @endpoint  # type: ignore[untyped-decorator]
            def take(self, payload: Any = None) -> None:
                """The callee."""

        class Caller(Actor):  # type: ignore[misc]
            @endpoint  # type: ignore[untyped-decorator]
            def run(self, callee: Any, loop: Callable[..., Any], payload: list[Any], *more: Any) -> Any:
                send = partial(callee.take.call_one, *payload)
                return loop([Calls(lambda: send().get(), send, lambda future: future.get())], *more)

        actors = {"callee": Callee, "caller": Caller}
        self._ends = {name: this_host().spawn_procs().spawn(name, kind) for name, kind in actors.items()}
        self.run(len, [], "", [])

    def calls(self, peer: int, method: str, *args: Any) -> Calls:
        raise NotImplementedError

    def run(self, loop: Callable[..., Any], peers: Sequence[int], method: str, payload: list[Any], *more: Any) -> Any:
        started = self._ends["caller"].run.call_one(self._ends["callee"], loop, payload, *more)
        return started.get(timeout=TIMEOUT_S)


class TorchRpcLink(Link):
    """``torch.distributed.rpc`` with its own defaults. Agents live for one turn, because idle ones poll."""

    def open(self, meeting: Any) -> Any:
        interface = probe.probe(node_ip=self.address, wants_gpu=False).interface_of(self.address)
        if interface:  # else torch listens on the address of the host name, often 127.0.1.1
            os.environ.setdefault("TP_SOCKET_IFNAME", interface)
        if meeting is None:
            # init_rpc reuses this server, which it finds in its own process, so no port has to be guessed.
            self._store = TCPStore(self.address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
            meeting = f"tcp://{self.address}:{self._store.port}"
        self._meeting = meeting
        return meeting

    def resume(self) -> None:
        count = len(self.members)
        maps: Any = {str(peer): {0: 0} for peer in range(count) if peer != self.rank} if self.cuda else None
        options = rpc.TensorPipeRpcBackendOptions(init_method=self._meeting, rpc_timeout=TIMEOUT_S, device_maps=maps)
        init: Any = rpc.init_rpc
        init(str(self.rank), rank=self.rank, world_size=count, rpc_backend_options=options)

    def pause(self) -> None:
        rpc.shutdown()

    def calls(self, peer: int, method: str, *args: Any) -> Calls:
        call, send = (partial(verb, str(peer), take, args=args) for verb in (rpc.rpc_sync, rpc.rpc_async))
        return Calls(call, send, lambda future: future.wait())


class NcclLink(Link):
    """NCCL's send and receive; the acknowledgement is a second message."""

    two_sided = True

    def open(self, meeting: Any) -> Any:
        torch.cuda.set_device(0)
        if meeting is None:
            self._store = TCPStore(self.address, 0, is_master=True, wait_for_workers=False)
            return self.address, self._store.port
        self._store = TCPStore(meeting[0], meeting[1], is_master=False)
        return None

    def resume(self) -> None:
        if not dist.is_initialized():
            limit = timedelta(seconds=TIMEOUT_S)
            dist.init_process_group("nccl", store=self._store, rank=self.rank, world_size=2, timeout=limit)
            self._ack = torch.ones(1, device="cuda")

    def calls(self, peer: int, method: str, *args: Any) -> Calls:
        return _only(partial(self._send, *args))

    def _send(self, tensor: torch.Tensor) -> None:
        dist.send(tensor, 1)
        dist.recv(self._ack, 1)
        torch.cuda.current_stream().synchronize()

    def serve(self, like: torch.Tensor, count: int) -> None:
        for _ in range(count):
            dist.recv(like, 0)
            dist.send(self._ack, 0)
            torch.cuda.current_stream().synchronize()


_LENGTH = struct.Struct("!Q")


class SocketLink(Link):
    """A TCP socket; the receiver reuses its buffer."""

    _buffer = memoryview(b"")

    def open(self, meeting: Any) -> Any:
        if meeting is None:
            self._listener = socket.create_server((self.address, 0))
            self._listener.settimeout(TIMEOUT_S)
            return self._listener.getsockname()[:2]
        stream = socket.create_connection(meeting, timeout=TIMEOUT_S)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.settimeout(None)
        threading.Thread(target=self._receive, args=(stream,), name="bench-receive", daemon=True).start()
        return None

    def resume(self) -> None:
        if self.rank == 0:
            self._stream, _ = self._listener.accept()
            self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._stream.settimeout(TIMEOUT_S)

    def calls(self, peer: int, method: str, *args: Any) -> Calls:
        return _only(partial(self._send, *args))

    def _send(self, tensor: torch.Tensor | None = None) -> None:
        data = b"" if tensor is None else (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
        self._stream.sendall(_LENGTH.pack(len(data)))
        self._stream.sendall(data)
        if self._stream.recv(1) != b"+":
            raise ConnectionError("the receiver closed its socket")

    def _receive(self, stream: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while len(head := stream.recv(_LENGTH.size, socket.MSG_WAITALL)) == _LENGTH.size:
                (length,) = _LENGTH.unpack(head)
                if len(self._buffer) != length:
                    self._buffer = memoryview(bytearray(length))
                view = self._buffer
                while view:  # Linux receives at most 2 GiB at once, even with MSG_WAITALL
                    got = stream.recv_into(view)
                    if not got:
                        return
                    view = view[got:]
                stream.sendall(b"+")

    def drop(self) -> None:
        self._buffer = memoryview(b"")


class CopyLink(Link):
    """No peer: one process copies into memory that is already mapped; on GPUs from the first to the last of its own."""

    _target: torch.Tensor | None = None

    def calls(self, peer: int, method: str, *args: Any) -> Calls:
        return _only(partial(self._copy, *args))

    def _copy(self, tensor: torch.Tensor) -> None:
        if self._target is None or self._target.shape != tensor.shape:
            there = f"cuda:{torch.cuda.device_count() - 1}" if tensor.is_cuda else "cpu"
            self._target = torch.zeros_like(tensor, device=there)
        self._target.copy_(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)

    def drop(self) -> None:
        self._target = None


class ObjectRefLink(Link):
    """One actor's result is passed to the other, by Ray Direct Transport or, without one, through the object store."""

    in_driver = True

    def payload(self, device: Device, size: int, count: int, produce: Callable[[Device, int, int], Any]) -> list[Any]:
        return [device, size, count]  # the source produces them in its actor

    def calls(self, peer: int, method: str, *args: Any) -> Calls:
        produce, receive = self.members[0].produce, getattr(self.members[-1], method)
        if transport := self.options["tensor_transport"]:
            produce = produce.options(tensor_transport=transport)
        return _only(lambda: get(receive.remote(produce.remote(*args)), TIMEOUT_S))


#: By the name in ``Contestant.link``.
LINKS: dict[str, type[Link]] = {
    "group": GroupLink,
    "ray": RayLink,
    "monarch": MonarchLink,
    "torchrpc": TorchRpcLink,
    "nccl": NcclLink,
    "socket": SocketLink,
    "copy": CopyLink,
    "rdt": ObjectRefLink,
}
