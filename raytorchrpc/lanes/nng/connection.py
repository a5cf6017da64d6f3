"""One authenticated connection of the nng lane, and the calls in flight on it."""

from __future__ import annotations

import itertools
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
        self._reader = frames.FrameReader()
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._pending: dict[int, PendingReply] = {}
        self._numbers = itertools.count(1)
        self._ended: str | None = None

    @property
    def ended(self) -> bool:
        return self._ended is not None

    def call(self, message: Message, deadline: float, on_released: Callable[[], None] | None = None) -> PendingReply:
        """Send a request. Raises LaneUnavailable, PeerLost, RpcTimeout."""
        check_carried(message.body)
        pending = PendingReply(on_released)
        with self._state:
            if self._ended is not None:
                raise PeerLost(self.peer or "?", self._ended, may_have_run=False)
            number = next(self._numbers)
            self._pending[number] = pending
        try:
            self._send(frames.pack(frames.REQUEST, number, message), deadline, lambda: deadline)
        except BaseException:
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
                for frame in self._frames_in(data):
                    if frame.kind == frames.REQUEST:
                        requests.append(frame)
                    elif (pending := self._pending.pop(frame.call, None)) is not None:
                        complete_with(pending, frame.message)
        except Exception as error:
            self.end(f"connection broke: {error}")
        return requests

    def _frames_in(self, data: Any) -> list[frames.Frame]:
        """Return the frames that a message completes. It holds a whole frame, or the next piece of one."""
        if self._reader.between_frames and len(data) >= frames.PREFIX_BYTES:
            tensors, size = frames.sizes(data, 0)
            if size == len(data):  # the frame's tensors are views of nng's own memory
                own = torch.frombuffer(data, dtype=torch.uint8) if size > tensors else None
                return [frames.parse(memoryview(data), own)]
        return self._reader.feed(memoryview(data))

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
