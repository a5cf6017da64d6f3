"""One sample of each road, as it runs inside the two actors. Rank 0 sends, rank 1 receives.

``open`` is called at rank 0 first; what it returns is given to rank 1's. ``send`` is one sample: it returns when the
tensor is at the other end, complete, and the acknowledgement is back.
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

#: No road waits longer for its peer (seconds).
PATIENCE_S = 120.0


class Seen(NamedTuple):
    """What arrived: enough to tell another size, other bytes, or nothing."""

    nbytes: int
    first: int
    last: int


def look(tensor: torch.Tensor) -> Seen:
    """Copies two bytes from wherever the tensor is."""
    return Seen(tensor.nbytes, int(tensor[0]), int(tensor[-1]))


def arrived(tensor: torch.Tensor) -> None:
    """Wait for the data itself."""
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()


class Setting(NamedTuple):
    """Where a road runs."""

    rank: int
    peer: Any
    """The other actor's handle."""
    address: str
    """Of this process's node."""
    cuda: bool


class Road(ABC):
    """One end of one road."""

    two_sided = False
    """Rank 1 has to ``serve`` while rank 0 sends."""
    within = False
    """Rank 0 does it all."""

    def __init__(self, setting: Setting, options: dict[str, Any]) -> None:
        self.setting, self.options = setting, options

    def open(self, met: Any) -> Any:
        """``met``: what rank 0's returned; None at rank 0."""
        return None

    def wake(self) -> None:  # noqa: B027 - most roads need nothing here
        """Get ready for a turn; both ends at once."""

    def rest(self) -> None:  # noqa: B027
        """The turn is over; both ends at once."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, check: bool) -> None:
        """One sample. ``check``: the receiver is to look at what comes; not to be timed."""

    def serve(self, like: torch.Tensor, count: int) -> None:
        """Take part in ``count`` samples of that size and device."""
        raise NotImplementedError

    def seen(self) -> Seen | None:
        """What rank 1 saw last, if the road keeps that itself."""
        return None

    def drop(self) -> None:  # noqa: B027
        """Give back what the last size needed."""


class GroupRoad(Road):
    """A call of this package."""

    def open(self, met: Any) -> Any:
        self._peer = rtr.rpc_sync(self.setting.peer)

    def send(self, tensor: torch.Tensor, check: bool) -> None:
        if check:
            self._peer.look(tensor)
        else:
            self._peer.take(tensor)


class RayRoad(Road):
    """A call of Ray's: the tensor goes through its object store (small ones in the message)."""

    def send(self, tensor: torch.Tensor, check: bool) -> None:
        peer = self.setting.peer
        ray.get((peer.look if check else peer.take).remote(tensor), timeout=PATIENCE_S)


_rpc_seen: Seen | None = None


def _rpc_take(tensor: torch.Tensor) -> None:
    arrived(tensor)


def _rpc_look(tensor: torch.Tensor) -> None:
    global _rpc_seen
    _rpc_seen = look(tensor)


class TorchRpcRoad(Road):
    """``torch.distributed.rpc`` with its own defaults. Agents live for one turn: an idle one polls."""

    def open(self, met: Any) -> Any:
        interface = probe.interface_for(
            probe.probe(node_ip=self.setting.address, wants_gpu=False), self.setting.address
        )
        if interface:  # else torch listens where the host name points, often 127.0.1.1
            os.environ.setdefault("TP_SOCKET_IFNAME", interface)
        if met is None:
            # init_rpc finds this server again in its own process, so that no port has to be guessed.
            self._store = TCPStore(self.setting.address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
            met = f"tcp://{self.setting.address}:{self._store.port}"
        self._meeting = met
        return met

    def wake(self) -> None:
        rank = self.setting.rank
        maps: Any = {f"end{1 - rank}": {0: 0}} if self.setting.cuda else None
        options = rpc.TensorPipeRpcBackendOptions(init_method=self._meeting, rpc_timeout=PATIENCE_S, device_maps=maps)
        name = f"end{rank}"
        rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)  # type: ignore[no-untyped-call]

    def rest(self) -> None:
        rpc.shutdown()

    def send(self, tensor: torch.Tensor, check: bool) -> None:
        rpc.rpc_sync("end1", _rpc_look if check else _rpc_take, args=(tensor,))

    def seen(self) -> Seen | None:
        return _rpc_seen


class NcclRoad(Road):
    """NCCL's send and receive; the acknowledgement is another message."""

    two_sided = True
    _seen: Seen | None = None

    def open(self, met: Any) -> Any:
        torch.cuda.set_device(0)
        if met is None:
            self._store = TCPStore(self.setting.address, 0, is_master=True, wait_for_workers=False)
            return self.setting.address, self._store.port
        self._store = TCPStore(met[0], met[1], is_master=False)
        return None

    def wake(self) -> None:
        if not dist.is_initialized():
            limit = timedelta(seconds=PATIENCE_S)
            dist.init_process_group("nccl", store=self._store, rank=self.setting.rank, world_size=2, timeout=limit)
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
        self._seen = look(like)

    def seen(self) -> Seen | None:
        return self._seen


_LENGTH = struct.Struct("!Q")


class SocketRoad(Road):
    """A TCP socket, or several that share each tensor; received into memory that stays warm."""

    def open(self, met: Any) -> Any:
        self._streams = int(self.options.get("streams", 1))
        self._sockets: list[socket.socket] = []
        self._buffers: list[bytearray] = [bytearray() for _ in range(self._streams)]
        self._lengths = [0] * self._streams
        self._pool = ThreadPoolExecutor(self._streams, "bench-socket")
        if met is None:
            self._listener = socket.create_server((self.setting.address, 0), backlog=self._streams)
            self._listener.settimeout(PATIENCE_S)
            return self._listener.getsockname()[:2]
        for number in range(self._streams):
            self._sockets.append(self._tuned(socket.create_connection(met, timeout=PATIENCE_S)))
            # Not in the pool: Python would wait for a pool's threads when the process ends.
            threading.Thread(target=self._receive, args=(number,), name="bench-receive", daemon=True).start()
        return None

    def _tuned(self, stream: socket.socket) -> socket.socket:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.settimeout(None if self.setting.rank else PATIENCE_S)
        return stream

    def wake(self) -> None:
        while self.setting.rank == 0 and len(self._sockets) < self._streams:
            self._sockets.append(self._tuned(self._listener.accept()[0]))

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
                if len(self._buffers[number]) < length:
                    self._buffers[number] = bytearray(length)
                view = memoryview(self._buffers[number])[:length]
                while view:
                    got = stream.recv_into(view)
                    if not got:
                        return
                    view = view[got:]
                self._lengths[number] = length
                stream.sendall(b"+")

    def seen(self) -> Seen | None:
        full = [number for number in range(self._streams) if self._lengths[number]]
        if not full:
            return None
        last = full[-1]
        ends = self._buffers[0][0], self._buffers[last][self._lengths[last] - 1]
        return Seen(sum(self._lengths), *ends)

    def drop(self) -> None:
        self._buffers = [bytearray() for _ in range(self._streams)]
        self._lengths = [0] * self._streams


class NngRoad(Road):
    """pynng's pair sockets over TCP. They take and give bytes, so a tensor is copied at either end."""

    _last = b""

    def open(self, met: Any) -> Any:
        import pynng

        limit = int(PATIENCE_S * 1000)
        self._socket = pynng.Pair0(recv_max_size=0, send_timeout=limit)
        if met is None:
            self._socket.recv_timeout = limit
            listener = self._socket.listen(f"tcp://{self.setting.address}:0")
            return f"tcp://{listener.local_address}"
        self._socket.dial(met, block=True)
        threading.Thread(target=self._receive, name="bench-receive", daemon=True).start()
        return None

    def send(self, tensor: torch.Tensor, check: bool) -> None:
        self._socket.send(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
        self._socket.recv()

    def _receive(self) -> None:
        while True:
            self._last = self._socket.recv()
            self._socket.send(b"+")

    def seen(self) -> Seen | None:
        return Seen(len(self._last), self._last[0], self._last[-1]) if self._last else None

    def drop(self) -> None:
        self._last = b""


class MemcpyRoad(Road):
    """No peer: a copy from memory to warm memory."""

    within = True
    _target: torch.Tensor | None = None

    def send(self, tensor: torch.Tensor, check: bool) -> None:
        if self._target is None or self._target.shape != tensor.shape:
            self._target = self._make(tensor)
        self._target.copy_(tensor)
        arrived(self._target)

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor)

    def seen(self) -> Seen | None:
        return None if self._target is None else look(self._target)

    def drop(self) -> None:
        self._target = None


class GpuCopyRoad(MemcpyRoad):
    """No peer: a process that sees all GPUs copies from the first to the last of them."""

    def send(self, tensor: torch.Tensor, check: bool) -> None:
        super().send(tensor, check)
        torch.cuda.synchronize(tensor.device)

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor, device=f"cuda:{torch.cuda.device_count() - 1}")


ROADS: dict[str, type[Road]] = {
    "group": GroupRoad,
    "ray": RayRoad,
    "torchrpc": TorchRpcRoad,
    "nccl": NcclRoad,
    "socket": SocketRoad,
    "nng": NngRoad,
    "memcpy": MemcpyRoad,
    "gpu_copy": GpuCopyRoad,
}
