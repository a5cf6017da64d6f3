"""One sample over each transport, inside the two actors. Rank 0 sends, rank 1 receives.

``open`` is called on rank 0 first; its result is passed to ``open`` on rank 1. ``send`` takes one sample: it returns
when the whole tensor is at the other end and the acknowledgement has arrived.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import raytorchrpc as rtr
from raytorchrpc.topology import probe

#: Longest wait for the peer, in seconds.
TIMEOUT_S = 120.0


class Digest(NamedTuple):
    """Enough of a tensor to detect another size, other bytes, or nothing."""

    nbytes: int
    first: int
    last: int


def digest(tensor: torch.Tensor) -> Digest:
    """Copies two bytes from the tensor's device."""
    return Digest(tensor.nbytes, int(tensor[0]), int(tensor[-1]))


def synchronize(tensor: torch.Tensor) -> None:
    """Block until the tensor's data is there."""
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()


class Context(NamedTuple):
    """Where one end of a transport runs."""

    rank: int
    peer: Any
    """The other actor's handle."""
    address: str
    """Of this process's node."""
    cuda: bool


class Transport(ABC):
    """One end of one transport."""

    two_sided = False
    """Rank 1 must ``serve`` while rank 0 sends."""
    local = False
    """Rank 0 works alone."""

    def __init__(self, context: Context, options: dict[str, Any]) -> None:
        self.context, self.options = context, options

    def open(self, meeting: Any) -> Any:
        """``meeting``: the result on rank 0; None on rank 0."""
        return None

    def resume(self) -> None:  # noqa: B027 - most transports need nothing here
        """Prepare for a turn; called on both ends at once."""

    def pause(self) -> None:  # noqa: B027
        """End a turn; called on both ends at once."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, check: bool) -> None:
        """Take one sample. ``check``: untimed; the receiver keeps a digest."""

    def serve(self, like: torch.Tensor, count: int) -> None:
        """Take part in ``count`` samples of that size and device."""
        raise NotImplementedError

    def received(self) -> Digest | None:
        """Digest of the last tensor on rank 1, if the transport keeps it itself."""
        return None

    def drop(self) -> None:  # noqa: B027
        """Free what the last size needed."""


class GroupTransport(Transport):
    """A direct call."""

    def open(self, meeting: Any) -> Any:
        self._peer = rtr.rpc_sync(self.context.peer)

    def send(self, tensor: torch.Tensor, check: bool) -> None:
        (self._peer.take_checked if check else self._peer.take)(tensor)


class RayTransport(Transport):
    """A Ray call: the tensor goes through the object store (small ones in the message)."""

    def send(self, tensor: torch.Tensor, check: bool) -> None:
        peer = self.context.peer
        ray.get((peer.take_checked if check else peer.take).remote(tensor), timeout=TIMEOUT_S)


_rpc_digest: Digest | None = None


def _rpc_take_checked(tensor: torch.Tensor) -> None:
    global _rpc_digest
    _rpc_digest = digest(tensor)


class TorchRpcTransport(Transport):
    """``torch.distributed.rpc`` with its own defaults. Agents live for one turn, because idle ones poll."""

    def open(self, meeting: Any) -> Any:
        here = probe.probe(node_ip=self.context.address, wants_gpu=False)
        if interface := probe.interface_for(
            here, self.context.address
        ):  # else torch listens on the address of the host name, often 127.0.1.1
            os.environ.setdefault("TP_SOCKET_IFNAME", interface)
        if meeting is None:
            # init_rpc reuses this server, which it finds in its own process, so no port has to be guessed.
            self._store = TCPStore(self.context.address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
            meeting = f"tcp://{self.context.address}:{self._store.port}"
        self._meeting = meeting
        return meeting

    def resume(self) -> None:
        rank = self.context.rank
        maps: Any = {f"end{1 - rank}": {0: 0}} if self.context.cuda else None
        options = rpc.TensorPipeRpcBackendOptions(init_method=self._meeting, rpc_timeout=TIMEOUT_S, device_maps=maps)
        name = f"end{rank}"
        rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)  # type: ignore[no-untyped-call]

    def pause(self) -> None:
        rpc.shutdown()

    def send(self, tensor: torch.Tensor, check: bool) -> None:
        rpc.rpc_sync("end1", _rpc_take_checked if check else synchronize, args=(tensor,))

    def received(self) -> Digest | None:
        return _rpc_digest


class NcclTransport(Transport):
    """NCCL's send and receive; the acknowledgement is a second message."""

    two_sided = True
    _digest: Digest | None = None

    def open(self, meeting: Any) -> Any:
        torch.cuda.set_device(0)
        if meeting is None:
            self._store = TCPStore(self.context.address, 0, is_master=True, wait_for_workers=False)
            return self.context.address, self._store.port
        self._store = TCPStore(meeting[0], meeting[1], is_master=False)
        return None

    def resume(self) -> None:
        if not dist.is_initialized():
            limit = timedelta(seconds=TIMEOUT_S)
            dist.init_process_group("nccl", store=self._store, rank=self.context.rank, world_size=2, timeout=limit)
            self._ack = torch.ones(1, device="cuda")

    def send(self, tensor: torch.Tensor, check: bool) -> None:
        dist.send(tensor, 1)
        dist.recv(self._ack, 1)
        torch.cuda.current_stream().synchronize()

    def serve(self, like: torch.Tensor, count: int) -> None:
        for _ in range(count):
            dist.recv(like, 0)
            dist.send(self._ack, 0)
            torch.cuda.current_stream().synchronize()
        self._digest = digest(like)

    def received(self) -> Digest | None:
        return self._digest


_LENGTH = struct.Struct("!Q")


class SocketTransport(Transport):
    """A TCP socket, or several that share each tensor; the receiver reuses its buffers."""

    def open(self, meeting: Any) -> Any:
        self._streams = int(self.options.get("streams", 1))
        self._sockets: list[socket.socket] = []
        self._parts = [memoryview(b"")] * self._streams
        self._pool = ThreadPoolExecutor(self._streams, "bench-socket")
        if meeting is None:
            self._listener = socket.create_server((self.context.address, 0), backlog=self._streams)
            self._listener.settimeout(TIMEOUT_S)
            return self._listener.getsockname()[:2]
        for number in range(self._streams):
            self._add(socket.create_connection(meeting, timeout=TIMEOUT_S), None)
            # Daemon threads, because Python waits for a pool's threads at exit.
            threading.Thread(target=self._receive, args=(number,), name="bench-receive", daemon=True).start()
        return None

    def _add(self, stream: socket.socket, timeout_s: float | None) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.settimeout(timeout_s)
        self._sockets.append(stream)

    def resume(self) -> None:
        while self.context.rank == 0 and len(self._sockets) < self._streams:
            self._add(self._listener.accept()[0], TIMEOUT_S)

    def send(self, tensor: torch.Tensor, check: bool) -> None:
        data = memoryview((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr()))
        part = -(-len(data) // self._streams)
        parts = [data[i * part : (i + 1) * part] for i in range(self._streams)]
        if self._streams == 1:
            self._send_part(0, parts[0])
        else:
            list(self._pool.map(self._send_part, range(self._streams), parts))

    def _send_part(self, number: int, part: memoryview) -> None:
        stream = self._sockets[number]
        stream.sendall(_LENGTH.pack(len(part)))
        stream.sendall(part)
        if stream.recv(1) != b"+":
            raise ConnectionError("the receiver closed its socket")

    def _receive(self, number: int) -> None:
        stream = self._sockets[number]
        with contextlib.suppress(OSError):
            while len(head := stream.recv(_LENGTH.size, socket.MSG_WAITALL)) == _LENGTH.size:
                (length,) = _LENGTH.unpack(head)
                if len(self._parts[number]) != length:
                    self._parts[number] = memoryview(bytearray(length))
                view = self._parts[number]
                while view:
                    got = stream.recv_into(view)
                    if not got:
                        return
                    view = view[got:]
                stream.sendall(b"+")

    def received(self) -> Digest | None:
        parts = [part for part in self._parts if part]
        return Digest(sum(map(len, parts)), parts[0][0], parts[-1][-1]) if parts else None

    def drop(self) -> None:
        self._parts = [memoryview(b"")] * self._streams


class NngTransport(Transport):
    """pynng's pair sockets over TCP. Their payload is bytes, so the tensor is copied at both ends."""

    _last = b""

    def open(self, meeting: Any) -> Any:
        import pynng

        limit = int(TIMEOUT_S * 1000)
        self._socket = pynng.Pair0(recv_max_size=0, send_timeout=limit)
        if meeting is None:
            self._socket.recv_timeout = limit
            listener = self._socket.listen(f"tcp://{self.context.address}:0")
            return f"tcp://{listener.local_address}"
        self._socket.dial(meeting, block=True)
        threading.Thread(target=self._receive, name="bench-receive", daemon=True).start()
        return None

    def send(self, tensor: torch.Tensor, check: bool) -> None:
        self._socket.send(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
        self._socket.recv()

    def _receive(self) -> None:
        while True:
            self._last = self._socket.recv()
            self._socket.send(b"+")

    def received(self) -> Digest | None:
        return Digest(len(self._last), self._last[0], self._last[-1]) if self._last else None

    def drop(self) -> None:
        self._last = b""


class CopyTransport(Transport):
    """No peer: one process copies into memory that is already mapped; on GPUs from the first to the last of its own."""

    local = True
    _target: torch.Tensor | None = None

    def send(self, tensor: torch.Tensor, check: bool) -> None:
        if self._target is None or self._target.shape != tensor.shape:
            there = f"cuda:{torch.cuda.device_count() - 1}" if tensor.is_cuda else "cpu"
            self._target = torch.zeros_like(tensor, device=there)
        self._target.copy_(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)

    def received(self) -> Digest | None:
        return None if self._target is None else digest(self._target)

    def drop(self) -> None:
        self._target = None


#: By the name in ``Row.transport``.
TRANSPORTS: dict[str, type[Transport]] = {
    "group": GroupTransport,
    "ray": RayTransport,
    "torchrpc": TorchRpcTransport,
    "nccl": NcclTransport,
    "socket": SocketTransport,
    "nng": NngTransport,
    "copy": CopyTransport,
}
