"""What the members of a group did with each other: one line of a file for each operation, and what they exchange.

Every value says which life of its object it belongs to. A life is that of the home's process: the first one of a
member is 1, the next one 2, and so on.
"""

from __future__ import annotations

import itertools
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

import raytorchrpc as rtr
from tests.faults.scenarios import Object

#: Between two looks of a process at whether it stood still (seconds).
BEAT_S = 0.05
#: A version of weights in a life; see ``stamp``.
_LIFE = 1_000_000


class Record(NamedTuple):
    """One operation; times as of ``time.monotonic``, in seconds."""

    member: str
    life: int
    """Of the process that did it."""
    op: str
    """start, member: of a process. call, and ran: where it did. open, put, get, next (of an iteration), subscribe,
    publish (weights), pull, publish_shards, read_shards, close."""
    object: str
    """Its name; of a call: which one."""
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
    """See ``roles``."""


class Recorder:
    """Writes the records of one process. Each goes out in one write, so it outlives the process. Thread-safe.

    A process that is killed as it writes may leave part of one: Linux ends a write that fills two pages between them.
    Each record begins a line of its own, so that such a part spoils no other record.
    """

    def __init__(self, member: str, directory: Path) -> None:
        self.member = member
        lives = directory / f"{member}.lives"
        with lives.open("ab") as file:
            file.write(b".")
        self.life = lives.stat().st_size
        self._file = os.open(directory / "records", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        self._numbers = itertools.count(1)
        self.lags: list[tuple[float, float]] = []
        """When this process stood still: stopped, or short of processors."""

    def beat(self) -> None:
        """Fill in ``lags``, for ever."""
        while True:
            before = time.monotonic()
            time.sleep(BEAT_S)
            now = time.monotonic()
            if now - before > 3 * BEAT_S:
                self.lags.append((before, now))
                del self.lags[:-200]

    def write(
        self,
        op: str,
        object: str = "",
        home: str = "",
        held: int = 0,
        handle: str = "",
        *,
        began: float | None = None,
        ended: float | None = None,
        allowed: float | None = None,
        error: BaseException | None = None,
        data: dict[str, Any] | None = None,
    ) -> Record:
        """Also when memory is short for a moment. An operation without times is one that takes none."""
        ended = ended or time.monotonic()
        began = began or ended
        if allowed is not None and ended - began > allowed:
            time.sleep(3 * BEAT_S)  # whether the process stood still is known a moment later
        still = sum(max(0.0, min(ended, up) - max(began, since)) for since, up in list(self.lags))
        verdict = verdict_of(error)
        text = "" if verdict in ("ok", "end", "Empty") else str(error)[:200]
        record = Record(
            self.member, self.life, op, object, home, held, handle, began, ended, allowed, still, verdict, text,
            data or {},
        )  # fmt: skip
        while True:
            with suppress(MemoryError):
                os.write(self._file, b"\n" + json.dumps(record).encode() + b"\n")
                return record
            time.sleep(0.02)

    def note(
        self, op: str, of: Object, held: int, handle: str, allowed: float | None, act: Callable[[dict[str, Any]], Any]
    ) -> tuple[str, Any]:
        """Do it and write down what came of it; returns the verdict and the result. ``act`` fills in the data."""
        data: dict[str, Any] = {}
        result, error, began = None, None, time.monotonic()
        try:
            result = act(data)
        except Exception as raised:
            error = raised
        ended = time.monotonic()
        record = self.write(
            op, of.name, of.home, held, handle, began=began, ended=ended, allowed=allowed, error=error, data=data
        )
        return record.verdict, result

    def handle(self) -> str:
        """For a new one."""
        return f"{self.member}.{self.life}.{next(self._numbers)}"


def read(path: Path, offset: int) -> tuple[list[Record], int]:
    """Those after so many bytes, and where they end. A process may still be writing the last one."""
    with path.open("rb") as file:
        file.seek(offset)
        lines = file.read()
    end = lines.rfind(b"\n") + 1
    records: list[Record] = []
    for line in filter(None, lines[:end].splitlines()):
        with suppress(json.JSONDecodeError):  # see Recorder
            records.append(Record(*json.loads(line)))
    return records, offset + end


def verdict_of(error: BaseException | None) -> str:
    """See Record."""
    if error is None:
        return "ok"
    if isinstance(error, (StopIteration, StopAsyncIteration)):
        return "end"
    ours = isinstance(error, rtr.RayTorchRpcError) and not isinstance(error, rtr.RemoteError)
    return type(error).__name__ if ours else f"other: {error!r:.300}"


# --- values of calls -----------------------------------------------------------------------------------------------


class Corrupt(Exception):
    """What arrived is not what was sent."""


def payload(number: int, size: int) -> torch.Tensor:
    """Int64, like no other."""
    return torch.arange(number, number + size // 8)


def crc(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.numpy().data)


def check_answer(call: str, back: str, expected: torch.Tensor, result: torch.Tensor) -> None:
    """Raises Corrupt, with what tells where a wrong answer comes from: see ``payload``."""
    if back != call or result.shape != expected.shape:
        raise Corrupt(f"{call}: the answer to {back}, {tuple(result.shape)} instead of {tuple(expected.shape)}")
    wrong = (result != expected).nonzero()[:, 0]
    if len(wrong):
        first, last = int(wrong[0]), int(wrong[-1])
        raise Corrupt(
            f"{call}: {len(wrong)} of {len(result)} wrong, from {first} to {last}: {(~result[wrong[:2]]).tolist()} ... "
            f"{(~result[wrong[-2:]]).tolist()} instead of {(~expected[wrong[:1]]).tolist()} on"
        )


# --- items and weights -----------------------------------------------------------------------------------------------


def make_item(object: str, life: int, producer: str, number: int, size: int) -> tuple[Any, ...]:
    """``number``: one more each time, for this producer; ``size``: of the int64 tensor in it; 0: none."""
    return (object, life, producer, number, torch.full((size,), life * _LIFE + number) if size else None)


def described(item: Any) -> list[Any]:
    """Object, life, producer, number, and whether its tensor is its own, for a record."""
    object, life, producer, number, tensor = item
    good = tensor is None or bool((tensor == life * _LIFE + number).all())
    return [object, life, producer, number, good]


_ELEMENTS = 4_000


def layout(of: Object, life: int) -> list[tuple[str, int]]:
    """Names and numbers of elements. ``turned``: equal tensors in another order; ``resized``: larger ones, then
    smaller ones.
    """
    names = ["a", "b", "c", "d", "e"]
    if of.shape == "turned":
        names = names[life % 5 :] + names[: life % 5]
        return [(name, _ELEMENTS * of.scale) for name in names]
    factor = 1 if of.shape == "same" else 3 - (life - 1) % 3
    return [(name, _ELEMENTS * of.scale * factor * (1 + 8 * (name == "c"))) for name in names]


def stamp(life: int, version: int, name: str, track: bool) -> int:
    """Every element of that tensor. With ``track`` some tensors change with every second version, third version..."""
    every = 1 + "abcde".index(name) if track else 1
    return life * _LIFE + version - version % every


def stamped(value: int) -> tuple[int, int]:
    """The life and the version that an element tells."""
    return divmod(value, _LIFE)


def weights(of: Object, life: int, version: int) -> dict[str, torch.Tensor]:
    """What is published."""
    return {name: torch.full((size,), stamp(life, version, name, of.track)) for name, size in layout(of, life)}


def ends_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Sequence[int]]:
    """The smallest and the largest element of each."""
    return {name: [int(tensor.min()), int(tensor.max())] for name, tensor in tensors}
