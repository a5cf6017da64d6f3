"""A Carrier without GPUs: CPU tensors over a Unix socket between two processes, two-sided as NCCL is.

Each channel has one socket and one thread, its "device", which does what was begun in the order in which it was begun
and blocks until the other end does its part. What is posted in another order at the other end arrives wrong, or never.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import socket
import threading
from collections.abc import Mapping, Sequence

import torch

from raytorchrpc.lanes.common import packing
from raytorchrpc.lanes.nccl.carrier import RECEIVER, Broken, Carrier, Channel, Mark
from raytorchrpc.tensors.dtypes import Shape


class PipeMark:
    def __init__(self, reached: bool = False) -> None:
        self.event = threading.Event()
        if reached:
            self.event.set()

    def __call__(self) -> bool:
        return self.event.is_set()


class PipeCarrier(Carrier):
    """``identity``: of its one device. The other attributes are for tests to make trouble with."""

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.busy = False
        """While set, what is exported is not complete; ``marks`` has what tells."""
        self.marks: list[PipeMark] = []
        self.refuse = False
        """While set, nothing can be joined here."""
        self.halfway: threading.Event | None = None
        """If given, a channel stands still in the middle of its next tensor, and sets this."""
        self.channels: list[PipeChannel] = []
        self._waiting: dict[bytes, socket.socket] = {}

    def open(self, devices: Sequence[int]) -> Mapping[int, str]:
        return dict.fromkeys(devices, self.identity)

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def mark(self, device: int) -> Mark:
        mark = PipeMark(reached=not self.busy)
        self.marks.append(mark)
        return mark

    def ticket(self) -> bytes:
        ticket = os.urandom(12).hex().encode()
        self._waiting[ticket] = listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(b"\0" + ticket)
        listener.listen(1)
        return ticket

    def join(self, ticket: bytes, end: int, device: int) -> Channel:
        listener = self._waiting.pop(ticket) if end == RECEIVER else None
        if self.refuse:
            if listener is not None:
                listener.close()
            raise Broken("this device is refused")
        self.channels.append(channel := PipeChannel(self, ticket, listener))
        return channel


class PipeChannel(Channel):
    def __init__(self, carrier: PipeCarrier, ticket: bytes, listener: socket.socket | None) -> None:
        self._carrier, self._ticket, self._listener = carrier, ticket, listener
        self._given_up = threading.Event()
        self._sock = listener or socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._work: queue.SimpleQueue[tuple[str, Sequence[torch.Tensor]] | PipeMark | None] = queue.SimpleQueue()
        self._joined, self._ended = threading.Event(), threading.Event()
        self._broken = ""
        threading.Thread(target=self._run, name="pipe", daemon=True).start()

    def _run(self) -> None:
        try:
            if self._listener is None:
                self._sock.connect(b"\0" + self._ticket)
            else:
                self._sock, _ = self._listener.accept()
                self._listener.close()
            self._joined.set()
            while (item := self._work.get()) is not None:
                if isinstance(item, PipeMark):
                    item.event.set()
                else:
                    self._move(*item)
        except OSError as error:
            self._broken = self._broken or str(error)
        finally:
            self._sock.close()
            while not self._work.empty():  # as on a GPU: what was aborted lets the stream go on
                if isinstance(item := self._work.get(), PipeMark):
                    item.event.set()
            self._ended.set()

    def _move(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            view = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
            if what == "send":
                self._sock.sendall(view[: len(view) // 2])
                if self._carrier.halfway is not None:
                    self._carrier.halfway.set()
                    self._given_up.wait()
                self._sock.sendall(view[len(view) // 2 :])
            while what == "receive" and view:
                count = self._sock.recv_into(view)
                if not count:
                    raise OSError("the other end of the pipe is closed")
                view = view[count:]

    def _begin(self, item: tuple[str, Sequence[torch.Tensor]] | PipeMark) -> None:
        if self._broken:
            raise Broken(self._broken)
        self._work.put(item)

    def enqueued(self) -> bool:
        if self._broken:
            raise Broken(self._broken)
        return self._joined.is_set()

    def room(self, shapes: Sequence[Sequence[Shape]]) -> list[torch.Tensor]:
        return [packing.room(piece, torch.device("cpu")) for piece in shapes]

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        self._begin(("send", list(tensors)))

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        self._begin(("receive", list(tensors)))

    def follow(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def over(self) -> bool:
        return self._ended.is_set()

    def mark(self) -> Mark:
        mark = PipeMark()
        self._begin(mark)
        return mark

    def make_current(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def precede(self) -> None:
        mark = PipeMark()
        with contextlib.suppress(Broken):
            self._begin(mark)
            mark.event.wait(20)

    def abort(self) -> None:
        self._broken = self._broken or "the channel was given up"
        self._given_up.set()
        self._work.put(None)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
