"""The encoding of a message on a connection: one frame, with CPU tensors in band.

    prefix | header (marshal) | payload (pickle) | padding to 64 bytes | tensor area, each tensor padded to 64

The header is marshalled: it holds builtins only, and a frame comes from an authenticated peer. Tensors are sent without
a copy. Each arrives in a storage of its own, large ones without a copy too: a frame that takes several reads has its
layout read first, and its large tensors are received where they stay. A tag follows each frame on connections that
authenticate frames (see ``protection``).
"""

from __future__ import annotations

import ctypes
import marshal
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
import torch

from raytorchrpc.lanes.base import Message, size_of
from raytorchrpc.lanes.common.protection import TAG_BYTES, Protection, check_tag
from raytorchrpc.process.threads import is_shortage
from raytorchrpc.tensors.codec import NOTHING, Encoded, nbytes_of
from raytorchrpc.tensors.dtypes import (
    DTYPE_NAMES,
    DTYPES,
    STAYS_BYTES,
    Shape,
    all_independent,
    as_copyable,
    bytes_at,
    independent,
    tensor_in,
    within,
)

REQUEST, REPLY = 0, 1
#: Most bytes received at a time.
CHUNK = 1 << 16

#: call id, tensor area, payload, header (bytes), kind
_PREFIX = struct.Struct("<QQQIB")
PREFIX_BYTES = _PREFIX.size
_ALIGN = 64
#: Far above any frame: a greater length means that the stream is out of step (bytes).
_MAX_FRAME = 1 << 40

#: Tensors of a large frame from this size on are received where they stay: another buffer to receive in costs less than
#: their copy (bytes).
_STRAIGHT_BYTES = 32 * 1024
#: From this size on, numpy asks for memory of huge pages: to receive a tensor there takes a tenth to a third less time
#: (bytes).
_HUGE_BYTES = 4 << 20
#: Most buffers of one read.
_MOST_ROOMS = 64

_PADDING = bytes(_ALIGN)


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
    small = sum(map(nbytes_of, body.tensors), len(body.payload)) < CHUNK
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
    """View the memory of a contiguous tensor. Not by its ``numpy()``, after which torch never resizes or frees it."""
    return bytes_at(tensor.data_ptr(), tensor.nbytes, tensor).data


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

    def room(self) -> list[Any]:
        """The buffers to receive the rest of a large frame in, in order, followed by ``received``. None: receive
        elsewhere, and ``feed`` it.
        """
        return [] if self.large is None or self._decrypt is not None else self.large.room()

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


class _Head(NamedTuple):
    """What a frame says of its payload and tensors before they come."""

    kind: int
    call: int
    fields: tuple[Any, ...]
    """Of the message's header."""
    bytes: int
    """Of this head: the payload follows."""
    payload: int
    """Bytes of the payload."""
    area: int
    """Where the tensor area begins in the frame."""
    shapes: Sequence[Shape]
    offsets: Sequence[int]
    """Of the tensors in the area."""
    buffers: int
    manifests: tuple[Any, ...]

    @staticmethod
    def of(view: memoryview) -> _Head:
        """Read the head of a frame, which has arrived whole. Raises what a malformed one causes."""
        call, area, payload, header, kind = _PREFIX.unpack_from(view, 0)
        size = PREFIX_BYTES + header
        fields, described, buffers, manifests = marshal.loads(view[PREFIX_BYTES:size])
        end = size + payload
        shapes: Sequence[Shape] = ()
        offsets: Sequence[int] = ()
        if described:
            shapes = [(DTYPES[name], shape) for name, shape, _ in described]
            offsets = [offset for _, _, offset in described]
        return _Head(
            kind, call, fields, size, payload, end + (-end % _ALIGN if area else 0), shapes, offsets, buffers, manifests
        )

    def frame(self, body: Encoded, unread_bytes: int = 0) -> Frame:
        message = Message(self.fields, body, manifests=self.manifests, unread_bytes=unread_bytes)
        return Frame(self.kind, self.call, message)


def _empty(shape: Shape) -> torch.Tensor:
    if (size := size_of(shape)) >= _HUGE_BYTES:
        return tensor_in(numpy.empty(size, numpy.uint8), 0, shape)
    try:
        return torch.empty(shape[1], dtype=shape[0], device="cpu")
    except RuntimeError as error:
        raise (MemoryError(str(error)) if is_shortage(error) else error) from None


class LargeFrame:
    """A frame that arrives in several reads. Its large tensors are received in their own memory, the rest in buffers
    between them. Without memory for it, its body is skipped, and its sender can be told.
    """

    def __init__(self, size: int, authenticator: Any = None, tag_bytes: int = 0) -> None:
        """``authenticator``: of the frame, whose last ``tag_bytes`` are its tag, or None."""
        self.left = size
        """Bytes that have not arrived."""
        self._size, self._hash = size, authenticator
        self._tag = bytearray(tag_bytes)
        self._begun = bytearray()
        """What has arrived before all of the head is there."""
        self._head: _Head | None = None
        self._rooms: list[memoryview] = []
        """What remains to be filled, in the order of the stream, once the head is there."""
        self._buffers: list[numpy.ndarray] = []
        """What is not received where it stays. The first one begins with the frame; empty without memory."""
        self._tensors: list[torch.Tensor] = []
        self._small: list[tuple[int, int]] = []
        """Tensors that arrive in a buffer: (index, address there)."""

    def room(self) -> list[Any]:
        """The next buffers to receive in; empty before the head has arrived."""
        return self._rooms[: _MOST_ROOMS if self._buffers else 1]

    def add(self, data: memoryview) -> Frame | None:
        """Add the next bytes; returns the frame once it is complete. Raises ValueError if it is not authentic."""
        if not self._rooms:
            self._begun += data
            if len(self._begun) < PREFIX_BYTES or len(self._begun) < _head_bytes(self._begun):
                self.left -= len(data)
                return None
            self._lay_out(self._size - len(self._tag))
            self.left = self._size
            data = memoryview(self._begun)
        frame = None
        while len(data):
            part = data[: len(self._rooms[0])]
            self._rooms[0][: len(part)] = part
            if len(part):
                frame = self.advance(len(part))
            else:
                del self._rooms[0]
            data = data[len(part) :]
        return frame

    def advance(self, count: int) -> Frame | None:
        """So many more bytes are in ``room``; see ``add``."""
        while count:
            room = self._rooms.pop(0)
            filled = room[:count]
            if self._hash is not None and self.left > len(self._tag):  # while the rest is in transit
                self._hash.update(filled)
            self.left -= len(filled)
            count -= len(filled)
            if len(filled) < len(room):
                self._rooms.insert(0, room[len(filled) :])
        return None if self.left else self._complete()

    def _complete(self) -> Frame:
        if self._hash is not None:
            check_tag(self._hash.digest(), self._tag)
            if self._buffers:
                return parse(self._buffers[0].data)
        head = self._head or _read_head(self._begun)
        if not self._buffers:
            return head.frame(NOTHING, unread_bytes=self._size)
        for index, address in self._small:
            tensor = self._tensors[index]
            ctypes.memmove(tensor.data_ptr(), address, tensor.nbytes)
        payload = bytes(self._buffers[0].data[head.bytes : head.bytes + head.payload])
        return head.frame(Encoded(payload, self._tensors, (), head.buffers))

    def _lay_out(self, size: int) -> None:
        """Allocate memory for a frame of ``size`` bytes, whose head has arrived. Raises ValueError for a malformed one.

        Nothing in a frame with a tag is used before that is checked, not even the head: it arrives in one buffer.
        """
        if self._hash is None:
            self._head = _read_head(self._begun)
        try:
            if self._head is not None:
                self._cut(self._head, size)
            else:
                self._buffers.append(numpy.empty(size, numpy.uint8))
                self._rooms.append(self._buffers[0].data)
        except MemoryError:
            self._tensors, self._buffers, self._small = [], [], []
            skipped = memoryview(bytearray(CHUNK))  # for one read at a time
            self._rooms = [skipped] * (size // CHUNK) + [skipped[: size % CHUNK]]
        except _MALFORMED as error:
            raise ValueError(f"not a frame: {error}") from error
        self._rooms.append(memoryview(self._tag))

    def _cut(self, head: _Head, end: int) -> None:
        """Allocate memory for the first ``end`` bytes of the frame, and cut it into rooms. Raises OutOfBounds."""
        begin = 0
        """Of the next buffer, in the frame."""
        small: list[tuple[int, int, int]] = []
        """In the next buffer: (index, where in the frame, bytes)."""

        def add_buffer(until: int) -> None:
            within(begin, until - begin, end)
            buffer = numpy.empty(until - begin, numpy.uint8)
            address = buffer.ctypes.data
            for index, place, size in small:
                within(place - begin, size, until - begin)
                self._small.append((index, address + place - begin))
            small.clear()
            self._buffers.append(buffer)
            self._rooms.append(buffer.data)

        for index, (shape, offset) in enumerate(zip(head.shapes, head.offsets, strict=True)):
            place, size = head.area + offset, size_of(shape)
            within(offset, size, end - head.area)
            tensor = _empty(shape)
            self._tensors.append(tensor)
            if size >= _STRAIGHT_BYTES:
                add_buffer(place)
                self._rooms.append(_bytes_of(tensor))
                begin = place + size
            elif size:
                small.append((index, place, size))
        add_buffer(end)
        within(head.bytes, head.payload, len(self._buffers[0]))


def sizes(data: Any, start: int) -> tuple[int, int]:
    """Return the offset of the tensor area and the length of the whole frame. Raises ValueError."""
    _, area, payload, header, kind = _PREFIX.unpack_from(data, start)
    head: int = _PREFIX.size + header + payload
    if kind not in (REQUEST, REPLY) or head + area > _MAX_FRAME:
        raise ValueError("not a frame")
    return head, head + (-head % _ALIGN + area if area else 0)


def _read_head(begun: bytearray) -> _Head:
    try:
        return _Head.of(memoryview(begun))
    except _MALFORMED as error:
        raise ValueError(f"not a frame: {error}") from error


def _head_bytes(data: Any) -> int:
    header: int = _PREFIX.unpack_from(data)[3]
    return PREFIX_BYTES + header


#: What a malformed frame causes.
_MALFORMED = (EOFError, LookupError, RuntimeError, TypeError, ValueError)


def parse(view: memoryview) -> Frame:
    """Decode a whole frame. Raises ValueError if it is invalid. Its large tensors stay in the memory of ``view``, if
    that can be written.
    """
    try:
        call, area, payload, header, kind = _PREFIX.unpack_from(view, 0)
        begin = PREFIX_BYTES + header
        fields, described, buffers, manifests = marshal.loads(view[PREFIX_BYTES:begin])
        end = begin + payload
        tensors: Sequence[torch.Tensor] = ()
        if described:
            tensors = _tensors_in(view[end + (-end % _ALIGN if area else 0) :], described)
        body = Encoded(bytes(view[begin:end]), tensors, (), buffers)
        return Frame(kind, call, Message(fields, body, manifests=manifests))
    except _MALFORMED as error:
        raise ValueError(f"not a frame: {error}") from error


def _tensors_in(area: memoryview, described: Sequence[tuple[str, tuple[int, ...], int]]) -> list[torch.Tensor]:
    if area.readonly and len(area) >= STAYS_BYTES:
        area = memoryview(bytearray(area))
    if len(described) == 1:
        ((name, shape, offset),) = described
        return [independent(area, offset, (DTYPES[name], shape))]
    return all_independent(
        area, [offset for _, _, offset in described], [(DTYPES[name], shape) for name, shape, _ in described]
    )
