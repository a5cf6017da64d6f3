"""A tensor lane: the CPU tensors of one message in a memfd, which the receiver maps.

The sender keeps the descriptor of a memfd until the receiver has set the memfd's
first byte; it looks at these bytes before it makes another memfd. The kernel frees
the memory with the last mapping, so nothing outlives both processes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.base import (
    Arrived,
    Copies,
    Export,
    PeerAddress,
    TensorCapabilities,
    TensorLane,
    arrived,
    never_fetched,
    size_of,
)
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.tensors.dtypes import Shape, as_copyable, tensor_in, view_at

_ALIGN = 64  # also the room for the first byte


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The offset of each tensor, and the size of the memfd."""
    offsets, end = [], _ALIGN
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGN) * _ALIGN
    return offsets, end


class MemfdLane(TensorLane):
    name: ClassVar[str] = "memfd"
    capabilities: ClassVar[TensorCapabilities] = TensorCapabilities(
        devices=frozenset({"cpu"})
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pids: dict[str, int] = {}
        self._exported: dict[str, tuple[int, str]] = {}  # tag: descriptor, peer
        self._is_open = False

    def open(self) -> int:
        self._is_open = True
        return os.getpid()

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        self._pids.update({peer.peer: peer.address for peer in peers})

    def export(
        self, tensors: Sequence[torch.Tensor], peer: str, devices: Mapping[Any, Any]
    ) -> Export:
        offsets, size = _layout([tensor.nbytes for tensor in tensors])
        tag = f"own-lanes-{uuid.uuid4().hex}"
        with self._lock:
            self._close_fetched()
            if not self._is_open:
                raise LaneUnavailable(self.name, "it is closed")
            try:
                fd = os.memfd_create(tag)
            except OSError as error:
                raise LaneUnavailable(
                    self.name, f"no memfd for {size} bytes: {error}"
                ) from error
            self._exported[tag] = fd, peer
        try:
            os.ftruncate(fd, size)
            memory = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
            for tensor, offset in zip(tensors, offsets, strict=True):
                if tensor.numel():
                    place = view_at(
                        memory, offset, (tensor.dtype, tuple(tensor.shape))
                    )
                    as_copyable(place).copy_(as_copyable(tensor))
        except (OSError, ValueError) as error:  # no memory, or closed meanwhile
            self.forget(tag)
            raise LaneUnavailable(
                self.name, f"cannot write {size} bytes to a memfd: {error}"
            ) from error
        except BaseException:
            self.forget(tag)
            raise
        return Export((fd, tag), cancel=partial(self.forget, tag))

    def read(
        self,
        peer: str,
        descriptor: Any,
        shapes: Sequence[Shape],
        copies: Copies | None = None,
    ) -> Arrived:
        fd = self._taken(peer, descriptor)
        try:
            memory = mmap.mmap(fd, 0)
        except (OSError, ValueError) as error:
            raise LaneUnavailable(
                self.name, f"cannot map a memfd of {peer!r}: {error}"
            ) from error
        finally:
            os.close(fd)
        offsets, _ = _layout([size_of(shape) for shape in shapes])
        tensors = [
            tensor_in(memory, offset, shape)
            for offset, shape in zip(offsets, shapes, strict=True)
        ]
        # Of regions, views: what it does not copy itself, the caller copies.
        return arrived(tensors, copies)

    def release(self, peer: str, descriptor: Any) -> None:
        with contextlib.suppress(Exception):
            os.close(self._taken(peer, descriptor))

    def _taken(self, peer: str, descriptor: tuple[int, str]) -> int:
        """Open a peer's memfd here, and tell it to close its own descriptor."""
        number, tag = descriptor
        try:
            fd = os.open(
                f"/proc/{self._pids[peer]}/fd/{number}", os.O_RDWR | os.O_CLOEXEC
            )
        except (KeyError, OSError) as error:
            raise never_fetched(peer) from error
        if tag not in os.readlink(
            f"/proc/self/fd/{fd}"
        ):  # another process or file has that number now
            os.close(fd)
            raise never_fetched(peer)
        os.pwrite(fd, b"\1", 0)
        return fd

    def _close_fetched(self) -> None:
        for tag, (fd, _) in list(self._exported.items()):
            if os.pread(fd, 1, 0) == b"\1":
                os.close(self._exported.pop(tag)[0])

    def forget(self, tag: str) -> None:
        """Close the descriptor of an export, unless that has been done."""
        with self._lock:
            fd, _ = self._exported.pop(tag, (-1, ""))
            if fd >= 0:
                os.close(fd)

    def disconnect(self, peer: str) -> None:
        self._pids.pop(peer, None)
        for tag, (_, receiver) in list(self._exported.items()):
            if receiver == peer:
                self.forget(tag)

    def close(self) -> None:
        self._is_open = False
        for tag in list(self._exported):
            self.forget(tag)


def make(setup: LaneSetup) -> MemfdLane:
    return MemfdLane()
