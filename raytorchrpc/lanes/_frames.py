"""How a message looks on a socket: one frame, with CPU tensors in band.

    prefix | header (marshal) | payload (pickle) | padding to 64 bytes | tensor area, each tensor padded to 64

The header is marshalled: it holds builtins only, and a frame comes from a peer that proved it has the group's
secret. Tensors are sent from where they lie and arrive as writable views of the frame they came in.
"""

from __future__ import annotations

import marshal
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from raytorchrpc.codec import Encoded
from raytorchrpc.lanes.base import DTYPE_NAMES, DTYPES, Message, numbers, view_at

REQUEST, REPLY = 0, 1

#: call id, tensor area, payload, header (bytes), kind
_PREFIX = struct.Struct("<QQQIB")
PREFIX_BYTES = _PREFIX.size
_ALIGN = 64
_CHUNK = 1 << 16
#: Far above anything sensible; a length beyond it means the stream is out of step.
_MAX_FRAME = 1 << 40

_PADDING = bytes(_ALIGN)


class Frame(NamedTuple):
    """One message as it arrived."""

    kind: int
    call: int
    message: Message


def pack(kind: int, call: int, message: Message) -> list[Any]:
    """The buffers to send, in order. The tensors' memory is among them: it must not change until sent."""
    header, body = message.header, message.body
    if not body.tensors:
        blob = marshal.dumps((header, None, body.buffers, message.waybills))
        prefix = _PREFIX.pack(call, 0, len(body.payload), len(blob), kind)
        return [prefix + blob + body.payload] if len(body.payload) < _CHUNK else [prefix + blob, body.payload]
    described: list[tuple[str, tuple[int, ...], int]] = []
    parts: list[Any] = []
    area = 0
    for tensor in body.tensors:
        described.append((DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), area))
        raw = _bytes_of(tensor)
        if raw is not None:
            parts.append(raw)
            area += raw.nbytes
            if gap := -raw.nbytes % _ALIGN:
                parts.append(_PADDING[:gap])
                area += gap
    blob = marshal.dumps((header, described, body.buffers, message.waybills))
    head = _PREFIX.pack(call, area, len(body.payload), len(blob), kind) + blob
    gap = -(len(head) + len(body.payload)) % _ALIGN if area else 0
    return [head, body.payload, _PADDING[:gap], *parts]


def _bytes_of(tensor: torch.Tensor) -> memoryview | None:
    if not tensor.numel():
        return None
    flat = (tensor if tensor.is_contiguous() else numbers(tensor).contiguous()).view(-1).view(torch.uint8)
    return flat.numpy().data


class FrameReader:
    """Cuts a stream into frames. One per connection; one thread at a time."""

    def __init__(self) -> None:
        self._rest = b""  # the beginning of a frame
        self._large: torch.Tensor | None = None  # a frame too large for one read, being filled
        self._filled = 0

    def read(self, sock: socket.socket, flags: int = 0) -> list[Frame]:
        """Read once and return the frames that are complete now.

        Raises BlockingIOError if nothing is there, EOFError at the end of the stream, ValueError if it is
        out of step.
        """
        if self._large is not None:
            return self._fill(sock, flags)
        data = sock.recv(_CHUNK, flags)
        if not data:
            raise EOFError
        if self._rest:
            data = self._rest + data
        frames: list[Frame] = []
        start, end = 0, len(data)
        while end - start >= _PREFIX.size:
            _, size = sizes(data, start)
            if end - start < size:
                if size > _CHUNK:
                    self._begin_large(data[start:], size)
                    start = end
                break
            frames.append(parse(memoryview(data)[start : start + size]))
            start += size
        self._rest = data[start:] if start < end else b""
        return frames

    def _begin_large(self, head: bytes, size: int) -> None:
        self._large = torch.empty(size, dtype=torch.uint8)  # a bytearray would be zeroed first
        self._large.numpy()[: len(head)] = memoryview(head)
        self._filled = len(head)

    def _fill(self, sock: socket.socket, flags: int) -> list[Frame]:
        assert self._large is not None
        view = self._large.numpy().data
        count = sock.recv_into(view[self._filled :], 0, flags)
        if not count:
            raise EOFError
        self._filled += count
        if self._filled < len(view):
            return []
        frame = parse(view, self._large)
        self._large = None
        return [frame]


def sizes(data: Any, start: int) -> tuple[int, int]:
    """Where the tensor area begins, and the whole frame's length, both from the frame's start. Raises ValueError."""
    _, area, payload, header, kind = _PREFIX.unpack_from(data, start)
    head: int = _PREFIX.size + header + payload
    if kind not in (REQUEST, REPLY) or head + area > _MAX_FRAME:
        raise ValueError("not a frame")
    return head, head + (-head % _ALIGN + area if area else 0)


def parse(view: memoryview, storage: torch.Tensor | None = None) -> Frame:
    """Read a whole frame. Raises ValueError for what is none.

    ``storage``: the tensor whose memory ``view`` is, if it may be kept; else the tensor area is copied.
    """
    try:
        return _parsed(view, storage)
    except (EOFError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"not a frame: {error}") from error


def _parsed(view: memoryview, storage: torch.Tensor | None) -> Frame:
    call, area, payload, header, kind = _PREFIX.unpack_from(view, 0)
    begin = _PREFIX.size + header
    fields, described, buffers, waybills = marshal.loads(view[_PREFIX.size : begin])
    head = begin + payload
    tensors: Sequence[torch.Tensor] = ()
    if described:
        head_padded = head + (-head % _ALIGN if area else 0)
        if storage is not None:
            source: torch.Tensor = storage[head_padded:]
        elif area:
            source = torch.frombuffer(bytearray(view[head_padded : head_padded + area]), dtype=torch.uint8)
        else:
            source = torch.empty(0, dtype=torch.uint8)
        tensors = [view_at(source, offset, (DTYPES[name], shape)) for name, shape, offset in described]
    body = Encoded(bytes(view[begin:head]), tensors, (), buffers)
    return Frame(kind, call, Message(fields, body, waybills=waybills))
