"""A message lane: pickled messages over one Unix stream socket for each direction
between two members.

Each connection has a thread that reads, and one that writes, so ``call`` never
blocks. Both ends prove that they know the group's secret before anything else is
read.
"""

from __future__ import annotations

import itertools
import os
import pickle
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import ClassVar

import torch

from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.lanes.base import (
    Capabilities,
    Message,
    MessageLane,
    PeerAddress,
    Pending,
    Serve,
    Spawn,
)
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.tensors.codec import Encoded
from raytorchrpc.tensors.dtypes import as_copyable, tensor_in

_REQUEST, _REPLY = 0, 1


def _pack(kind: int, number: int, message: Message) -> bytes:
    tensors = [
        (tensor.dtype, tuple(tensor.shape), _bytes_of(tensor))
        for tensor in message.body.tensors
    ]
    body = bytes(message.body.payload), message.body.buffers
    return pickle.dumps(
        (kind, number, message.header, message.manifests, body, tensors), protocol=5
    )


def _bytes_of(tensor: torch.Tensor) -> pickle.PickleBuffer:
    """The tensor's data, which arrives as a bytearray."""
    return pickle.PickleBuffer(
        as_copyable(tensor).contiguous().view(-1).view(torch.uint8).numpy()
    )


def _unpack(data: bytes) -> tuple[int, int, Message]:
    kind, number, header, manifests, (payload, buffers), tensors = pickle.loads(data)
    arrived = [
        tensor_in(memory, 0, (dtype, shape)) for dtype, shape, memory in tensors
    ]
    return (
        kind,
        number,
        Message(header, Encoded(payload, arrived, (), buffers), manifests=manifests),
    )


class Stream:
    """One connection. The end that called sends requests, the other one replies."""

    def __init__(
        self,
        lane: UnixStreamLane,
        sock: socket.socket,
        peer: str,
        address: str | None,
    ) -> None:
        """``address``: to connect to; None for a connection that was accepted."""
        self._lane, self._sock, self._peer, self._address = lane, sock, peer, address
        self._lock = threading.Lock()
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._pending: dict[int, Pending] = {}
        self._numbers = itertools.count()
        self._cause = ""
        self._proved = False
        threading.Thread(
            target=self._run, name="unix-stream-read", daemon=True
        ).start()

    def request(
        self, message: Message, on_released: Callable[[], None] | None
    ) -> Pending:
        pending = Pending(on_released)
        number = next(self._numbers)
        self._send(_pack(_REQUEST, number, message), {number: pending})
        return pending

    def _send(self, data: bytes, pending: dict[int, Pending]) -> None:
        with self._lock:
            if self._cause:
                raise PeerLost(self._peer, self._cause, may_have_run=False)
            self._pending.update(pending)
            self._outgoing.put(data)

    def _run(self) -> None:
        """Connect, prove, then read until the connection ends."""
        pipe, writer = Connection(os.dup(self._sock.fileno())), None
        try:
            if self._address is None:
                deliver_challenge(pipe, self._lane.secret)
                answer_challenge(pipe, self._lane.secret)
            else:
                self._sock.connect(self._address)
                answer_challenge(pipe, self._lane.secret)
                deliver_challenge(pipe, self._lane.secret)
            self._proved = True
            writer = threading.Thread(
                target=self._write,
                args=(pipe,),
                name="unix-stream-write",
                daemon=True,
            )
            writer.start()
            while True:
                self._arrived(*_unpack(pipe.recv_bytes()))
        except (OSError, EOFError, AuthenticationError) as error:
            self.end(f"its connection ended: {error!r}")
        finally:
            self.end("a message could not be read")
            if writer is not None:
                writer.join()
            pipe.close()
            self._sock.close()
            self._lane.ended(self)

    def _write(self, pipe: Connection) -> None:
        with suppress(OSError):
            while (data := self._outgoing.get()) is not None:
                pipe.send_bytes(data)

    def _arrived(self, kind: int, number: int, message: Message) -> None:
        if kind == _REPLY:
            pending = self._pending.pop(number, None)
            if pending is not None:  # else the connection has just ended
                pending.settle(message)
            return

        def reply(answer: Message) -> None:
            self._send(_pack(_REPLY, number, answer), {})

        work = self._lane.serve(message, reply)
        if work is not None:
            self._lane.spawn(work)

    def end(self, cause: str) -> None:
        """Close it; calls that wait for a reply fail with ``cause``.

        Only the first cause counts.
        """
        with self._lock:
            if self._cause:
                return
            self._cause = cause
            self._outgoing.put(None)
        with suppress(OSError):
            # Ends both threads' reads and writes.
            self._sock.shutdown(socket.SHUT_RDWR)
        while self._pending:
            lost = PeerLost(self._peer, cause, may_have_run=self._proved)
            self._pending.popitem()[1].settle(None, lost)


class UnixStreamLane(MessageLane):
    name: ClassVar[str] = "unix_stream"
    capabilities: ClassVar[Capabilities] = Capabilities(
        in_band_bytes=64 << 10, in_band_cuda=False, copies_at_once=True, rrefs=False
    )

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self._lock = threading.RLock()
        self._addresses: dict[str, str] = {}
        self._outgoing: dict[str, Stream] = {}
        self._streams: set[Stream] = set()
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def open(self, serve: Serve, spawn: Spawn) -> str:
        self.serve, self.spawn = serve, spawn
        try:
            self._listener.bind(address := "\0own-lanes-" + os.urandom(12).hex())
            self._listener.listen(128)
        except OSError as error:
            raise LaneUnavailable(self.name, f"cannot listen: {error}") from error
        threading.Thread(
            target=self._accept, name="unix-stream-accept", daemon=True
        ).start()
        return address

    def _accept(self) -> None:
        with suppress(OSError):  # ``close`` ends it
            while True:
                self._add(self._listener.accept()[0], "a caller", None)

    def _add(self, sock: socket.socket, peer: str, address: str | None) -> Stream:
        with self._lock:
            if self._closed:
                sock.close()
                raise PeerLost(
                    peer, "this member has left the group", may_have_run=False
                )
            stream = Stream(self, sock, peer, address)
            self._streams.add(stream)
        return stream

    def ended(self, stream: Stream) -> None:
        with self._lock:
            self._streams.discard(stream)
            for peer, outgoing in list(self._outgoing.items()):
                if outgoing is stream:
                    del self._outgoing[peer]

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        self._addresses.update({peer.peer: peer.address for peer in peers})

    def call(
        self,
        peer: str,
        message: Message,
        timeout_s: float,
        *,
        caller_waits: bool = False,
        on_released: Callable[[], None] | None = None,
    ) -> Pending:
        if message.body.rrefs:
            raise LaneUnavailable(self.name, "it carries no RRefs")
        with self._lock:
            stream, address = self._outgoing.get(peer), self._addresses.get(peer)
            if address is None:
                raise PeerLost(
                    peer, "it is not in the group (any more)", may_have_run=False
                )
            if stream is None:
                stream = self._add(
                    socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), peer, address
                )
                self._outgoing[peer] = stream
        return stream.request(message, on_released)

    def disconnect(self, peer: str) -> None:
        self._addresses.pop(peer, None)
        stream = self._outgoing.pop(peer, None)
        if stream is not None:
            stream.end("it left the group, or its process ended")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread that accepts
        self._listener.close()
        for stream in streams:
            stream.end("this member has left the group")


def make(setup: LaneSetup) -> UnixStreamLane:
    return UnixStreamLane(setup.credentials.secret)
