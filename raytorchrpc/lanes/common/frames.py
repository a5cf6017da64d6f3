"""The encoding of a message on a connection: one frame, with CPU tensors in band.

    prefix | header (marshal) | payload (pickle) | padding to 64 bytes | tensor area, each tensor padded to 64

The header is marshalled: it holds builtins only, and a frame comes from an authenticated peer. Tensors are sent without
a copy and arrive as writable views of their frame. A tag follows each frame on connections that authenticate frames
(see ``protection``).
"""

from __future__ import annotations

import ctypes
import marshal
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from raytorchrpc.lanes.base import Message
from raytorchrpc.lanes.common.protection import TAG_BYTES, Protection, check_tag
from raytorchrpc.tensors.codec import NOTHING, Encoded, body_bytes
from raytorchrpc.tensors.dtypes import DTYPE_NAMES, DTYPES, as_copyable, tensor_in, view_at

REQUEST, REPLY = 0, 1
#: Most bytes received at a time.
CHUNK = 1 << 16

#: call id, tensor area, payload, header (bytes), kind
_PREFIX = struct.Struct("<QQQIB")
PREFIX_BYTES = _PREFIX.size
_ALIGN = 64
#: Far above any frame: a greater length means that the stream is out of step (bytes).
_MAX_FRAME = 1 << 40

_PADDING = bytes(_ALIGN)
_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


class Frame(NamedTuple):
    """One message that has arrived."""

    kind: int
    call: int
    message: Message


def pack(kind: int, call: int, message: Message) -> list[Any]:
    """Return the buffers to send, in order. They include the tensors' memory, which must not change until sent."""
    header, body = message.header, message.body
    if not body.tensors:
        blob = marshal.dumps((header, None, body.buffers, message.manifests))
        prefix = _PREFIX.pack(call, 0, len(body.payload), len(blob), kind)
        return [prefix + blob + body.payload] if len(body.payload) < CHUNK else [prefix + blob, body.payload]
    described: list[tuple[str, tuple[int, ...], int]] = []
    parts: list[Any] = []
    area = 0
    small = body_bytes(body) < CHUNK
    for tensor in body.tensors:
        described.append((DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), area))
        if not (size := tensor.nbytes):
            continue
        contiguous = tensor if tensor.is_contiguous() else as_copyable(tensor).contiguous()
        parts.append(ctypes.string_at(contiguous.data_ptr(), size) if small else _bytes_of(contiguous))
        area += size
        if gap := -size % _ALIGN:
            parts.append(_PADDING[:gap])
            area += gap
    blob = marshal.dumps((header, described, body.buffers, message.manifests))
    head = _PREFIX.pack(call, area, len(body.payload), len(blob), kind) + blob
    gap = -(len(head) + len(body.payload)) % _ALIGN if area else 0
    buffers = [head, body.payload, _PADDING[:gap], *parts]
    return [b"".join(buffers)] if small else buffers


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


class FrameReader:
    """Cuts a stream into frames. One per connection; one thread at a time."""

    def __init__(self, protection: Protection | None = None) -> None:
        """``protection``: of the connection; None if the stream consists of bare frames."""
        self._decrypt = None if protection is None else protection.decrypt
        self._authenticator = None if protection is None else protection.incoming
        self._tag_bytes = 0 if self._authenticator is None else TAG_BYTES
        self._rest = b""  # the beginning of the next frame
        self.large: LargeFrame | None = None
        """A frame that arrives in several reads."""

    @property
    def between_frames(self) -> bool:
        """Whether no frame has arrived in part."""
        return not self._rest and self.large is None

    def room(self) -> memoryview | None:
        """Where to receive the rest of a large frame, followed by ``received``; None: receive elsewhere, and ``feed``
        it.
        """
        return None if self.large is None or self._decrypt is not None else self.large.room()

    def received(self, count: int) -> list[Frame]:
        """So many bytes are in ``room``; see ``feed``."""
        assert self.large is not None
        return self._completed(self.large.advance(count))

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Add any number of bytes of the stream; return the frames that are complete now.

        Raises ValueError if the stream is out of step or a frame is not authentic.
        """
        if self._decrypt is not None:
            data = self._decrypt(data)
        frames: list[Frame] = []
        if self.large is not None:
            taken = min(len(data), self.large.left)
            frames += self._completed(self.large.add(memoryview(data)[:taken]))
            data = data[taken:]
        if self._rest:
            data = self._rest + data
        start, end = 0, len(data)
        while end - start >= _PREFIX.size:
            size = sizes(data, start)[1] + self._tag_bytes
            if end - start < size:
                if size > CHUNK:
                    authenticator = self._authenticator
                    begun = None if authenticator is None else authenticator.begin(size - TAG_BYTES)
                    self.large = LargeFrame(size, begun, self._tag_bytes)
                    self.large.add(memoryview(data)[start:])
                    start = end
                break
            frame = memoryview(data)[start : start + size]
            if self._authenticator is not None:
                self._authenticator.check(frame[:-TAG_BYTES], frame[-TAG_BYTES:])
            frames.append(parse(frame))
            start += size
        self._rest = bytes(data[start:]) if start < end else b""
        return frames

    def _completed(self, frame: Frame | None) -> list[Frame]:
        if frame is None:
            return []
        self.large = None
        return [frame]


class LargeFrame:
    """A frame that arrives in several reads. Without memory for it, its body is skipped, and its sender can be told."""

    def __init__(self, size: int, authenticator: Any = None, tag_bytes: int = 0) -> None:
        """``authenticator``: of the frame, whose last ``tag_bytes`` are its tag, or None."""
        self.left = size
        self._size, self._body = size, size - tag_bytes
        self._hash = authenticator
        self._head = self._tag = b""  # without memory
        self._memory: torch.Tensor | None = None
        try:
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")  # a bytearray would be zeroed
        except (MemoryError, RuntimeError):  # torch raises RuntimeError
            return

    def room(self) -> memoryview | None:
        """Where to receive the rest; None without memory."""
        return None if self._memory is None else self._memory.numpy().data[self._size - self.left :]

    def add(self, data: memoryview) -> Frame | None:
        """Add the next bytes; returns the frame once it is complete. Raises ValueError if it is not authentic."""
        if (room := self.room()) is not None:
            room[: len(data)] = data
            return self.advance(len(data))
        body = data[: max(0, self._body - (self._size - self.left))]
        self.left -= len(data)
        self._tag += bytes(data[len(body) :])
        if len(self._head) < PREFIX_BYTES or len(self._head) < self._head_bytes():
            self._head += bytes(body[: 2 * CHUNK])  # one read, and the rest of the one before
        return self._complete(body, self._tag)

    def advance(self, count: int) -> Frame | None:
        """So many more bytes are in ``room``; see ``add``."""
        assert self._memory is not None
        view, before = self._memory.numpy().data, self._size - self.left
        self.left -= count
        return self._complete(view[before : min(before + count, self._body)], view[self._body :])

    def _complete(self, body: memoryview, tag: Any) -> Frame | None:
        if self._hash is not None:  # while the rest is in transit
            self._hash.update(body)
        if self.left:
            return None
        if self._hash is not None:
            check_tag(self._hash.digest(), tag)
        if self._memory is not None:
            return parse(self._memory.numpy().data[: self._body], self._memory[: self._body])
        call, _, _, _, kind = _PREFIX.unpack_from(self._head)
        fields, _, _, manifests = marshal.loads(memoryview(self._head)[PREFIX_BYTES : self._head_bytes()])
        return Frame(kind, call, Message(fields, NOTHING, manifests=manifests, unread_bytes=self._size))

    def _head_bytes(self) -> int:
        header: int = _PREFIX.unpack_from(self._head)[3]
        return PREFIX_BYTES + header


def sizes(data: Any, start: int) -> tuple[int, int]:
    """Return the offset of the tensor area and the length of the whole frame. Raises ValueError."""
    _, area, payload, header, kind = _PREFIX.unpack_from(data, start)
    head: int = _PREFIX.size + header + payload
    if kind not in (REQUEST, REPLY) or head + area > _MAX_FRAME:
        raise ValueError("not a frame")
    return head, head + (-head % _ALIGN + area if area else 0)


def parse(view: memoryview, storage: torch.Tensor | None = None) -> Frame:
    """Decode a whole frame. Raises ValueError if it is invalid.

    ``storage``: the tensor over the memory of ``view``, if the message may keep it; else the tensor area is copied.
    """
    try:
        call, area, payload, header, kind = _PREFIX.unpack_from(view, 0)
        begin = PREFIX_BYTES + header
        fields, described, buffers, manifests = marshal.loads(view[PREFIX_BYTES:begin])
        head = begin + payload
        tensors: Sequence[torch.Tensor] = ()
        if described:
            head_padded = head + (-head % _ALIGN if area else 0)
            if storage is not None or not area:
                source = _NO_BYTES if storage is None else storage[head_padded:]
                tensors = [view_at(source, offset, (DTYPES[name], shape)) for name, shape, offset in described]
            else:
                copy = bytearray(view[head_padded : head_padded + area])
                tensors = [tensor_in(copy, offset, (DTYPES[name], shape)) for name, shape, offset in described]
        body = Encoded(bytes(view[begin:head]), tensors, (), buffers)
        return Frame(kind, call, Message(fields, body, manifests=manifests))
    except (EOFError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"not a frame: {error}") from error
