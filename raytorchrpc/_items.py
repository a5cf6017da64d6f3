"""Items of queues and topics, as they travel and as they wait.

An item is taken apart where it is put and put together where it is taken; its home never looks into it.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from raytorchrpc.codec import Codec
from raytorchrpc.errors import SerializationError
from raytorchrpc.lanes.base import copied
from raytorchrpc.streams import hand_over, nothing

#: Of one message: beyond, ``put_many`` sends another (bytes).
CHUNK_BYTES = 32 << 20
#: A message with fewer bytes of tensors brings them in itself, in memory of the receiver's own (bytes).
_IN_MESSAGE = 256 * 1024
_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None)})

#: Several items in one message: (their pickles, how many tensors and buffers each has (None: none has any), tensors).
Chunk = tuple[list[bytes], list[tuple[int, int]] | None, list[torch.Tensor]]


class Loans:
    """Bytes of items that wait in memory which their senders share, by sender. Thread-safe."""

    def __init__(self, limit: int) -> None:
        """``limit``: bytes of one sender at most; what would be more is copied instead."""
        self.limit = limit
        self._out: Counter[int] = Counter()
        self._ended: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def take(self, rank: int, size: int) -> Loan | None:
        """None if it would be too much."""
        with self._lock:
            while self._ended:
                lender, ended = self._ended.popleft()
                self._out[lender] -= ended
            if self._out[rank] + size > self.limit:
                return None
            self._out[rank] += size
        return Loan(self, rank, size)

    def end(self, rank: int, size: int) -> None:
        """See Loan. Only noted: an item may die in the middle of anything."""
        self._ended.append((rank, size))


class Loan:
    """Ends when it dies, with the item that holds it."""

    __slots__ = ("_loans", "_rank", "_size")

    def __init__(self, loans: Loans, rank: int, size: int) -> None:
        self._loans, self._rank, self._size = loans, rank, size

    def __del__(self) -> None:
        self._loans.end(self._rank, self._size)


class Item(NamedTuple):
    """One that waits at home."""

    payload: bytes
    tensors: Sequence[torch.Tensor]
    buffers: int
    size: int
    """Bytes."""
    adopt: Callable[[], None] = nothing
    """As in ``lanes.base.Message``."""
    loan: Loan | None = None


def taken_apart(codec: Codec, value: Any) -> Item:
    """Raises SerializationError. The tensors are views of the value's own."""
    if _is_simple(value):
        payload = pickle.dumps(value, 5)
        return Item(payload, (), 0, len(payload))
    payload, tensors, rrefs, buffers = codec.encode(value)
    if rrefs:
        raise SerializationError("an item holds an RRef, which cannot wait in a queue: send it in a call")
    size = len(payload)
    if tensors:
        size += sum(tensor.nbytes for tensor in tensors)
    return Item(payload, tensors, buffers, size)


def _is_simple(value: Any) -> bool:
    """Whether there is nothing in it but numbers and text: then it needs no more than a plain pickle. Hot path."""
    kind = type(value)
    if kind is dict:
        return _ATOMS.issuperset(map(type, value.values())) and _ATOMS.issuperset(map(type, value))
    if kind is tuple or kind is list:
        return _ATOMS.issuperset(map(type, value))
    return kind in _ATOMS


def put_together(codec: Codec, items: Sequence[Item]) -> list[Any]:
    """The values, on the thread that will use them."""
    values = []
    for payload, tensors, buffers, _, adopt, _ in items:
        if tensors:
            adopt()
            values.append(codec.decode(payload, tensors, (), buffers))
        else:
            values.append(pickle.loads(payload))
    return values


def private(item: Item) -> Item:
    """The same in memory of its own."""
    if not item.tensors:
        return item
    item.adopt()
    tensors = [copied(tensor) for tensor in item.tensors]
    return item._replace(tensors=tensors, adopt=hand_over(tensors), loan=None)


def chunks(items: Sequence[Item], most: int) -> Iterator[Sequence[Item]]:
    """Parts of at most so many, and of not too many bytes."""
    begin = size = 0
    for place, item in enumerate(items):
        if place > begin and (place - begin >= most or size + item.size > CHUNK_BYTES):
            yield items[begin:place]
            begin, size = place, 0
        size += item.size
    if begin < len(items):
        yield items[begin:]


def packed(items: Sequence[Item]) -> Chunk:
    """For a message; on the thread that sends it."""
    payloads = [item.payload for item in items]
    tensors: list[torch.Tensor] = []
    for item in items:
        if item.tensors:
            item.adopt()
            tensors += item.tensors
    if not tensors:
        return payloads, None, tensors
    return payloads, [(len(item.tensors), item.buffers) for item in items], tensors


def unpacked(chunk: Chunk, rank: int | None = None, loans: Loans | None = None) -> list[Item]:
    """What came in a message. ``rank``, ``loans``: of its sender, if it is to wait here."""
    payloads, marks, tensors = chunk
    if marks is None:
        return [Item(payload, (), 0, len(payload)) for payload in payloads]
    lent = rank is not None and sum(tensor.nbytes for tensor in tensors if tensor.is_cpu) > _IN_MESSAGE
    items, begin = [], 0
    for payload, (count, buffers) in zip(payloads, marks, strict=True):
        mine = tensors[begin : begin + count]
        begin += count
        size = len(payload) + sum(tensor.nbytes for tensor in mine)
        item = Item(payload, mine, buffers, size, hand_over(mine) if rank is not None else nothing)
        if lent and mine and rank is not None and loans is not None:
            loan = loans.take(rank, size)
            item = private(item) if loan is None else item._replace(loan=loan)
        items.append(item)
    return items
