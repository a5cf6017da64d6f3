"""One authenticated connection of the nng lane, and the calls in flight on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost, RpcTimeout
from raytorchrpc.lanes.base import Message
from raytorchrpc.lanes.common import frames
from raytorchrpc.lanes.common.pending import PendingReply, complete_with, fail_all
from raytorchrpc.lanes.common.protection import TAG_BYTES, Protection
from raytorchrpc.lanes.nng.sockets import PairSocket
from raytorchrpc.tensors.codec import Encoded

_CLOSED = "connection closed (the process ended or left the group)"
#: Messages read from one connection before others are read.
_BATCH = 64


class HandshakeStream:
    """A pair socket as a byte stream; see handshake.Stream."""

    def __init__(self, sock: PairSocket) -> None:
        self._sock = sock
        self._rest = b""
        self._timeout: float | None = None

    def settimeout(self, seconds: float | None) -> None:
        """Set the limit of each following operation."""
        self._timeout = seconds

    def sendall(self, data: bytes) -> None:
        """Send. Raises OSError."""
        until = time.monotonic() + (self._timeout or 0.0)
        self._sock.send([data], lambda: until)

    def recv(self, size: int) -> bytes:
        """Return at most ``size`` bytes; none once the other end hung up. Raises OSError or TimeoutError."""
        until = time.monotonic() + (self._timeout or 0.0)
        while not self._rest:
            gone = self._sock.gone
            if (arrived := self._sock.receive()) is not None:
                self._rest = bytes(arrived)
            elif gone:
                return b""
            elif not self._sock.await_data(until):
                raise TimeoutError
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


class _Assembly:
    """Assembles frames from messages, each of which holds a whole frame or the next piece of one."""

    def __init__(self) -> None:
        self._large: torch.Tensor | None = None
        self._filled = 0
        self._unread: frames.Unread | None = None

    def add(self, data: Any) -> frames.Frame | None:
        """Return the frame that this message completes, if any. Raises ValueError for anything else."""
        if self._large is not None:
            return self._fill(data)
        if self._unread is not None:
            return self._skip(self._unread, data)
        if len(data) < frames.PREFIX_BYTES:
            raise ValueError("not a frame")
        tensors, size = frames.sizes(data, 0)
        if len(data) < size:
            try:
                self._large, self._filled = torch.empty(size, dtype=torch.uint8), 0
            except (MemoryError, RuntimeError):  # torch raises RuntimeError
                self._unread = frames.Unread(size)
                return self._skip(self._unread, data)
            return self._fill(data)
        if len(data) > size:
            raise ValueError("more than a frame")
        # The frame's tensors are views of nng's own memory.
        return frames.parse(memoryview(data), torch.frombuffer(data, dtype=torch.uint8) if size > tensors else None)

    def _fill(self, data: Any) -> frames.Frame | None:
        assert self._large is not None
        end = self._filled + len(data)
        if not len(data) or end > len(self._large):
            raise ValueError("more than a frame")
        self._large[self._filled : end].copy_(torch.frombuffer(data, dtype=torch.uint8))
        self._filled = end
        if end < len(self._large):
            return None
        whole, self._large = self._large, None
        return frames.parse(whole.numpy().data, whole)

    def _skip(self, unread: frames.Unread, data: Any) -> frames.Frame | None:
        if not 0 < len(data) <= unread.left:
            raise ValueError("more than a frame")
        unread.add(data)
        if unread.left:
            return None
        self._unread = None
        return unread.frame()


class Connection:
    """Sends requests and receives replies (``peer`` is set), or receives requests. One thread reads it."""

    def __init__(
        self, sock: PairSocket, protection: Protection | None, peer: str | None, on_end: Callable[[Connection], None]
    ) -> None:
        """``protection``: of each nng message. ``on_end``: called once, before the socket is closed, to stop
        reading.
        """
        self.sock, self.peer = sock, peer
        self._seal = None if protection is None else protection.seal
        self._incoming = None if protection is None else protection.incoming
        self._decrypt = None if protection is None else protection.decrypt
        self._on_end = on_end
        self._assembly = _Assembly()
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._pending: dict[int, PendingReply] = {}
        self._calls = 0
        self._ended: str | None = None

    @property
    def ended(self) -> bool:
        """Whether it can carry nothing more."""
        return self._ended is not None

    def call(self, message: Message, deadline: float, on_released: Callable[[], None] | None = None) -> PendingReply:
        """Send a request. Raises LaneUnavailable, PeerLost, RpcTimeout."""
        check_carried(message.body)
        pending = PendingReply(on_released)
        with self._state:
            if self._ended is not None:
                raise PeerLost(self.peer or "?", self._ended, may_have_run=False)
            self._calls += 1
            number = self._calls
            self._pending[number] = pending
        try:
            self._send(frames.pack(frames.REQUEST, number, message), deadline, lambda: deadline)
        except BaseException:
            with self._state:
                self._pending.pop(number, None)
            raise
        return pending

    def reply(self, number: int, message: Message, patience_s: float) -> None:
        """Answer a request; each piece may take ``patience_s``. Raises LaneUnavailable, PeerLost, RpcTimeout."""
        check_carried(message.body)

        def until() -> float:
            return time.monotonic() + patience_s

        self._send(frames.pack(frames.REPLY, number, message), until(), until)

    def _send(self, buffers: list[Any], deadline: float, until: Callable[[], float]) -> None:
        if not self._sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise RpcTimeout(f"the route to {self.peer or 'the caller'} was busy until the deadline")
        try:
            if self._ended is not None:
                raise ConnectionResetError(self._ended)
            self.sock.send(buffers, until, self._seal)
            return
        except (OSError, MemoryError) as error:
            reason = str(error)
        finally:
            self._sending.release()
        # A part of the frame may have been sent, and no other frame can follow it.
        self.end(reason)
        raise PeerLost(self.peer or "the caller", reason, may_have_run=False)

    def read(self) -> list[frames.Frame]:
        """Read without blocking: completes the calls whose replies have arrived, and returns the requests."""
        gone = self.sock.gone  # read first: data that arrived before the end is still served
        requests: list[frames.Frame] = []
        try:
            for _ in range(_BATCH):
                data = self.sock.receive()
                if data is None:
                    if gone:
                        self.end(_CLOSED)
                    break
                if self._incoming is not None:
                    whole = memoryview(data)
                    data = whole[:-TAG_BYTES]
                    self._incoming.check(data, whole[-TAG_BYTES:])
                elif self._decrypt is not None:
                    data = self._decrypt(data)
                frame = self._assembly.add(data)
                if frame is not None and frame.kind == frames.REQUEST:
                    requests.append(frame)
                elif frame is not None:
                    with self._state:
                        pending = self._pending.pop(frame.call, None)
                    if pending is not None:
                        complete_with(pending, frame.message)
        except Exception as error:
            self.end(f"connection broke: {error}")
        return requests

    def end(self, reason: str) -> None:
        """Close; calls in flight fail with PeerLost. Idempotent. Not to be called while sending."""
        with self._state:
            if self._ended is not None:
                return
            self._ended = reason
        try:  # even if memory runs out, both the other end and the waiting callers must be told
            self.sock.hang_up()
            self._on_end(self)
        finally:
            fail_all(self._pending, self.peer or "?", reason)
            with self._sending:  # a thread that was sending has been woken
                self.sock.close()


def check_carried(body: Encoded) -> None:
    """Raise LaneUnavailable for a body that this lane cannot carry."""
    if body.rrefs:
        raise LaneUnavailable("nng", "it carries no RRefs; allow torchrpc in GroupConfig.lanes")
    if any(not tensor.is_cpu for tensor in body.tensors):
        raise LaneUnavailable("nng", "it carries CPU tensors only; move them there, or allow a lane for CUDA tensors")
