"""Items of queues and topics, as they travel and as they wait.

An item is taken apart where it is put and put together where it is taken; its home never looks into it. Many that hold
nothing but numbers and text travel and wait as one, a run: pickling them one by one takes several times as long. A home
takes a run apart if somebody wants a part of it; that makes nothing but numbers and text either.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from raytorchrpc.errors import SerializationError
from raytorchrpc.tensors.codec import Codec
from raytorchrpc.tensors.containers import is_ordinary
from raytorchrpc.tensors.cuda_streams import handoff_streams, nothing
from raytorchrpc.tensors.dtypes import copied

#: Of one message: beyond, ``put_many`` sends another (bytes).
CHUNK_BYTES = 32 << 20
#: A message with fewer bytes of tensors brings them in itself, in memory of the receiver's own (bytes).
_IN_MESSAGE = 256 * 1024
_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None)})
#: What a run may be made of: no unpickler has to look up a class for these.
_RUN_ATOMS = _ATOMS - {complex}
#: Items of one run at most, and bytes: whoever wants fewer makes the home take it apart.
_RUN, _RUN_BYTES = 64, 64 * 1024

#: Several items in one message: (their pickles, how many tensors and buffers each has (None: none has any), tensors,
#: how many items each pickle is of (None: each of one)).
Chunk = tuple[list[bytes], list[tuple[int, int]] | None, list[torch.Tensor], list[int] | None]


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
    """One that waits at home, or a run of them."""

    payload: bytes
    """Its pickle; nothing if it is a tensor and no more."""
    tensors: Sequence[torch.Tensor]
    buffers: int
    size: int
    """Bytes."""
    make_current: Callable[[], None] = nothing
    """As in ``lanes.base.Message``."""
    loan: Loan | None = None
    many: int = 1
    """Of a run: how many. Its payload is of a list."""


def all_taken_apart(codec: Codec, values: Sequence[Any], most: int) -> list[Item]:
    """As ``taken_apart``, each or in runs of at most ``most``."""
    step = min(_RUN, most)
    if len(values) < 2 or step < 2:
        return [taken_apart(codec, value) for value in values]
    items: list[Item] = []
    for begin in range(0, len(values), step):
        part = list(values[begin : begin + step])
        run = _run(part)
        if run is None:
            items += [taken_apart(codec, value) for value in part]
        else:
            items.append(run)
    return items


def _run(values: list[Any]) -> Item | None:
    """Them as one; None if they cannot be. Hot path: what looks at each of them are loops that run in C."""
    kinds = set(map(type, values))
    inside: Iterable[Any]
    if kinds == {dict}:
        inside = chain(chain.from_iterable(values), chain.from_iterable(map(dict.values, values)))
    elif kinds <= {tuple, list}:
        inside = chain.from_iterable(values)
    else:
        inside = values
    # One that is there twice would be one object where they arrive; nobody can tell of what cannot change.
    if len(values) < 2 or not _RUN_ATOMS.issuperset(map(type, inside)):
        return None
    if not kinds.isdisjoint({dict, list}) and len(set(map(id, values))) < len(values):
        return None
    payload = pickle.dumps(values, 5)
    return Item(payload, (), 0, len(payload), many=len(values)) if len(payload) <= _RUN_BYTES else None


class _OfAtoms(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        raise pickle.UnpicklingError(f"a run of items holds a {module}.{name}")


def singles(run: Item) -> list[Item]:
    """The items of a run, each by itself."""
    payloads = [pickle.dumps(value, 5) for value in _OfAtoms(io.BytesIO(run.payload)).load()]
    return [Item(payload, (), 0, len(payload)) for payload in payloads]


def count(items: Sequence[Item]) -> int:
    """How many they are, those in runs counted."""
    return sum(item.many for item in items)


def taken_apart(codec: Codec, value: Any) -> Item:
    """Raises SerializationError. The tensors are views of the value's own."""
    if _is_simple(value):
        payload = pickle.dumps(value, 5)
        return Item(payload, (), 0, len(payload))
    if is_ordinary(value):
        return Item(b"", (value,), 0, value.nbytes)
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


class Unusable(Exception):
    """An item cannot be unpickled here. Holds the values of those before it, its index, and what its code raised."""

    def __init__(self, values: list[Any], place: int, cause: BaseException) -> None:
        super().__init__(place)
        self.values, self.place, self.cause = values, place, cause


def put_together(codec: Codec, items: Sequence[Item]) -> list[Any]:
    """The values, on the thread that will use them. Raises Unusable."""
    values: list[Any] = []
    place = 0
    try:
        for place, (payload, tensors, buffers, _, make_current, _, number) in enumerate(items):  # noqa: B007
            if number > 1:
                values += pickle.loads(payload)
            elif tensors:
                make_current()
                values.append(codec.decode(payload, tensors, (), buffers) if payload else tensors[0])
            else:
                values.append(pickle.loads(payload))
    except (Exception, SystemExit) as error:  # an item's own code may do anything
        raise Unusable(values, place, error) from error
    return values


def private(item: Item) -> Item:
    """The same in memory of its own."""
    if not item.tensors:
        return item
    item.make_current()
    tensors = [copied(tensor) for tensor in item.tensors]
    return item._replace(tensors=tensors, make_current=handoff_streams(tensors), loan=None)


def chunks(items: Sequence[Item], most: int) -> Iterator[Sequence[Item]]:
    """Parts of at most so many, and of not too many bytes. No run has more than ``most``."""
    begin = size = number = 0
    for place, item in enumerate(items):
        if place > begin and (number + item.many > most or size + item.size > CHUNK_BYTES):
            yield items[begin:place]
            begin, size, number = place, 0, 0
        size += item.size
        number += item.many
    if begin < len(items):
        yield items[begin:]


def packed(items: Sequence[Item]) -> Chunk:
    """For a message; on the thread that sends it."""
    payloads = [item.payload for item in items]
    counts = [item.many for item in items]
    runs = None if max(counts, default=1) == 1 else counts
    tensors: list[torch.Tensor] = []
    for item in items:
        if item.tensors:
            item.make_current()
            tensors += item.tensors
    if not tensors:
        return payloads, None, tensors, runs
    return payloads, [(len(item.tensors), item.buffers) for item in items], tensors, runs


def unpacked(chunk: Chunk, rank: int | None = None, loans: Loans | None = None) -> list[Item]:
    """What came in a message. ``rank``, ``loans``: of its sender, if it is to wait here."""
    payloads, marks, tensors, runs = chunk
    counts = [1] * len(payloads) if runs is None else runs
    if marks is None:
        return [Item(payload, (), 0, len(payload), many=n) for payload, n in zip(payloads, counts, strict=True)]
    lent = rank is not None and sum(tensor.nbytes for tensor in tensors if tensor.is_cpu) > _IN_MESSAGE
    items, begin = [], 0
    for payload, (held, buffers), number in zip(payloads, marks, counts, strict=True):
        mine = tensors[begin : begin + held]
        begin += held
        size = len(payload) + sum(tensor.nbytes for tensor in mine)
        item = Item(payload, mine, buffers, size, handoff_streams(mine) if rank is not None else nothing, many=number)
        if lent and mine and rank is not None and loans is not None:
            loan = loans.take(rank, size)
            item = private(item) if loan is None else item._replace(loan=loan)
        items.append(item)
    return items
