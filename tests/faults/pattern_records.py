"""What members did with queues, topics and weights, and with each other: one line of a file for each operation.

Every value says which life of its object it belongs to. A life is that of the home's process: the first one of a
member is 1, the next one 2, and so on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

import raytorchrpc as rtr

#: A version of weights in a life; see ``stamp``.
_LIFE = 1_000_000


class Record(NamedTuple):
    """One operation; times as of ``time.monotonic``, in seconds."""

    member: str
    life: int
    """Of the process that did it."""
    op: str
    """open, put, get, next (of an iteration), subscribe, publish (weights), pull, call, close."""
    object: str
    home: str
    held: int
    """The life that the handle belongs to: the object's when the handle was made. 0: not known yet."""
    handle: str
    """Each handle, iteration and subscription has one of its own."""
    began: float
    ended: float
    allowed: float | None
    """What it may last by what is promised; None: as long as it takes."""
    still: float
    """For how long of that its process stood still."""
    verdict: str
    """ok, end (of an iteration), the class of an error of the package's, or other: what else was raised."""
    text: str
    data: dict[str, Any]
    """See ``pattern_roles``."""


class Journal:
    """Writes them. Each goes out in one write, so it outlives the process. Thread-safe."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)

    def write(self, record: Record) -> None:
        """Also when memory is short for a moment."""
        while True:
            with suppress(MemoryError):
                os.write(self._file, json.dumps(record).encode() + b"\n")
                return
            time.sleep(0.02)


def read(path: Path, skip: int = 0) -> list[Record]:
    """All of them, but the first so many; a process that was killed may have left half a line."""
    return [Record(*json.loads(line)) for line in path.read_text().splitlines()[skip:]]


def next_life(path: str) -> int:
    """How many times this has been called for that file, this time included."""
    file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
    os.write(file, b".")
    size = os.fstat(file).st_size
    os.close(file)
    return size


def verdict_of(error: BaseException | None) -> str:
    """See Record."""
    if error is None:
        return "ok"
    if isinstance(error, (StopIteration, StopAsyncIteration)):
        return "end"
    ours = isinstance(error, rtr.RayTorchRpcError) and not isinstance(error, rtr.RemoteError)
    return type(error).__name__ if ours else f"other: {error!r:.200}"


# --- values ------------------------------------------------------------------------------------------------------


class Item(NamedTuple):
    """In a queue or a topic."""

    object: str
    life: int
    """Of the object, as its producer's handle had it."""
    producer: str
    number: int
    """One more each time, for this producer."""
    tensor: torch.Tensor | None


def make_item(object: str, life: int, producer: str, number: int, size: int) -> tuple[Any, ...]:
    """``size``: of the int64 tensor in it; 0: none."""
    return (object, life, producer, number, torch.full((size,), life * _LIFE + number) if size else None)


def described(item: Any) -> list[Any]:
    """Object, life, producer, number, and whether its tensor is its own, for a record."""
    object, life, producer, number, tensor = item
    good = tensor is None or bool((tensor == life * _LIFE + number).all())
    return [object, life, producer, number, good]


#: How the tensors of a store differ from life to life.
SHAPES = ("same", "turned", "resized")
_ELEMENTS = 4_000


def layout(shape: str, life: int, scale: int = 1) -> list[tuple[str, int]]:
    """Names and numbers of elements. ``turned``: equal tensors in another order; ``resized``: larger ones, then
    smaller ones.
    """
    names = ["a", "b", "c", "d", "e"]
    if shape == "turned":
        names = names[life % 5 :] + names[: life % 5]
        return [(name, _ELEMENTS * scale) for name in names]
    factor = 1 if shape == "same" else 3 - (life - 1) % 3
    return [(name, _ELEMENTS * scale * factor * (1 + 8 * (name == "c"))) for name in names]


def stamp(life: int, version: int, name: str, track: bool) -> int:
    """Every element of that tensor. With ``track`` some tensors change with every second version, third version..."""
    every = 1 + "abcde".index(name) if track else 1
    return life * _LIFE + version - version % every


def stamped(value: int) -> tuple[int, int]:
    """The life and the version that an element tells."""
    return divmod(value, _LIFE)


def ends_of(tensors: Sequence[tuple[str, torch.Tensor]]) -> dict[str, list[int]]:
    """The smallest and the largest element of each."""
    return {name: [int(tensor.min()), int(tensor.max())] for name, tensor in tensors}
