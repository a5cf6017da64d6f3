"""Items of queues and topics: encoded by the producer, kept encoded at the home, decoded by the consumer.

Items that hold only numbers and text are encoded together, up to 64 in one pickle: a run. Pickling them one by one
takes several times as long. The home splits a run if a consumer wants only a part of it; this loads no classes.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from raytorchrpc.errors import SerializationError, no_memory
from raytorchrpc.process.completion import nothing
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.threads import is_shortage
from raytorchrpc.tensors.codec import Codec
from raytorchrpc.tensors.cuda_streams import handoff_streams
from raytorchrpc.tensors.dtypes import copied
from raytorchrpc.tensors.plain_values import is_ordinary, is_plain

#: ``put_many`` starts another message beyond this size (bytes).
MESSAGE_BYTES = 32 << 20
#: Tensors of a message below this size travel in the message itself, and arrive in the receiver's own memory (bytes).
_IN_MESSAGE = 256 * 1024
_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None)})
#: Types that a run may consist of: unpickling them looks up no class.
_RUN_ATOMS = _ATOMS - {complex}
#: Most items and bytes of one run. A consumer that takes fewer makes the home split it.
_RUN, _RUN_BYTES = 64, 64 * 1024

#: Items as one message carries them: (payload, number of tensors, number of buffers, length) of each, and all tensors.
PackedItems = tuple[list[tuple[bytes, int, int, int]], list[torch.Tensor]]


class SharedMemoryBudget:
    """Counts the bytes that waiting items hold in their senders' shared memory, by sender. Thread-safe."""

    def __init__(self, limit: int) -> None:
        """``limit``: most bytes of one sender. Items beyond it are copied instead."""
        self.limit = limit
        self._used: Counter[int] = Counter()
        self._released: deque[tuple[int, int]] = deque()
        self._lock = Lock()

    def reserve(self, rank: int, size: int) -> Reservation | None:
        """Reserve ``size`` bytes of this sender's; None if that would exceed the limit."""
        with self._lock:
            while self._released:
                sender, released = self._released.popleft()
                self._used[sender] -= released
            if self._used[rank] + size > self.limit:
                return None
            self._used[rank] += size
        return Reservation(self, rank, size)

    def release(self, rank: int, size: int) -> None:
        """Note that a reservation has ended. Takes no lock: finalizers run in the middle of anything."""
        self._released.append((rank, size))


class Reservation:
    """Bytes of a sender's shared memory; released when the item that holds this is deleted."""

    __slots__ = ("_budget", "_rank", "_size")

    def __init__(self, budget: SharedMemoryBudget, rank: int, size: int) -> None:
        self._budget, self._rank, self._size = budget, rank, size

    def __del__(self) -> None:
        self._budget.release(self._rank, self._size)


class Item(NamedTuple):
    """One encoded item, or a run of them."""

    payload: bytes
    """The pickled value; empty if the value is a tensor and nothing else. Of a run: a pickled list."""
    tensors: Sequence[torch.Tensor]
    buffers: int
    size: int  # bytes, tensors included
    make_current: Callable[[], None] = nothing
    """To be called on the thread that is about to use the tensors: orders its CUDA streams after the producer's."""
    reservation: Reservation | None = None
    length: int = 1  # how many items this is; more than 1 for a run


def total_length(items: Sequence[Item]) -> int:
    """Return how many items these are, counting each item of a run."""
    return sum(item.length for item in items)


# --- encoding and decoding -----------------------------------------------------------------------------------


def encode_items(codec: Codec, values: Sequence[Any], limit: int) -> list[Item]:
    """Encode values, as runs of at most ``limit`` items where possible; see ``encode_item``."""
    step = min(_RUN, limit)
    if len(values) < 2 or step < 2:
        return [encode_item(codec, value) for value in values]
    items: list[Item] = []
    for begin in range(0, len(values), step):
        part = list(values[begin : begin + step])
        run = _encode_run(part)
        items += [encode_item(codec, value) for value in part] if run is None else [run]
    return items


def encode_item(codec: Codec, value: Any) -> Item:
    """Encode one value. The item's tensors are views of the value's. Raises SerializationError."""
    if _is_simple(value):
        payload = pickle.dumps(value, 5)
        return Item(payload, (), 0, len(payload))
    if is_ordinary(value):
        return Item(b"", (value,), 0, value.nbytes)
    payload, tensors, rrefs, buffers = codec.encode(value)
    if rrefs:
        raise SerializationError("an item holds an RRef, which cannot wait in a queue: send it in a call")
    return Item(payload, tensors, buffers, len(payload) + sum(tensor.nbytes for tensor in tensors))


def _is_simple(value: Any) -> bool:
    """Whether a plain pickle suffices: the value holds only numbers and text. Hot path."""
    kind = type(value)
    if kind is dict:
        return _ATOMS.issuperset(map(type, value.values())) and _ATOMS.issuperset(map(type, value))
    if kind is tuple or kind is list:
        return _ATOMS.issuperset(map(type, value))
    return kind in _ATOMS


def _encode_run(values: list[Any]) -> Item | None:
    """Encode the values as one run; None if they cannot be one. Hot path: the loops over all values run in C."""
    kinds = set(map(type, values))
    inside: Iterable[Any]
    if kinds == {dict}:
        inside = chain(chain.from_iterable(values), chain.from_iterable(map(dict.values, values)))
    elif kinds <= {tuple, list}:
        inside = chain.from_iterable(values)
    else:
        inside = values
    if len(values) < 2 or not _RUN_ATOMS.issuperset(map(type, inside)):
        return None
    # An object that is in the list twice would arrive as one object; that matters only if it can be changed.
    if not kinds.isdisjoint({dict, list}) and len(set(map(id, values))) < len(values):
        return None
    payload = pickle.dumps(values, 5)
    return Item(payload, (), 0, len(payload), length=len(values)) if len(payload) <= _RUN_BYTES else None


class _AtomUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        raise pickle.UnpicklingError(f"a run of items holds a {module}.{name}")


def split_run(run: Item) -> list[Item]:
    """Return the items of a run one by one. Loads no class, and so runs no code that a producer could choose."""
    payloads = [pickle.dumps(value, 5) for value in _AtomUnpickler(io.BytesIO(run.payload)).load()]
    return [Item(payload, (), 0, len(payload)) for payload in payloads]


class UndecodableItem(Exception):
    """An item cannot be unpickled here. Has the values before it, its position, and the error that its code raised."""

    def __init__(self, values: list[Any], position: int, cause: BaseException) -> None:
        super().__init__(position)
        self.values, self.position, self.cause = values, position, cause


def decode_items(codec: Codec, items: Sequence[Item]) -> list[Any]:
    """Return the values, on the thread that will use them. Raises UndecodableItem, MemoryError."""
    values: list[Any] = []
    position = 0
    try:
        for position, (payload, tensors, buffers, _, make_current, _, length) in enumerate(items):  # noqa: B007
            if length > 1:
                values += pickle.loads(payload)
            elif tensors:
                make_current()
                values.append(codec.decode(payload, tensors, (), buffers) if payload else tensors[0])
            else:
                values.append(codec.decode(payload) if is_plain(payload) else pickle.loads(payload))
    except (Exception, SystemExit) as error:  # an item's own code may do anything
        if is_shortage(error):
            raise no_memory("this process", "an item", error) from error
        raise UndecodableItem(values, position, error) from error
    return values


# --- messages ------------------------------------------------------------------------------------------------


def private_copy(item: Item) -> Item:
    """Return the item with its tensors in memory of their own."""
    if not item.tensors:
        return item
    item.make_current()
    tensors = [copied(tensor) for tensor in item.tensors]
    return item._replace(tensors=tensors, make_current=handoff_streams(tensors), reservation=None)


def messages(items: Sequence[Item], limit: int) -> Iterator[Sequence[Item]]:
    """Divide items into messages of at most ``limit`` items and MESSAGE_BYTES. No run may be longer than ``limit``."""
    begin = size = length = 0
    for place, item in enumerate(items):
        if place > begin and (length + item.length > limit or size + item.size > MESSAGE_BYTES):
            yield items[begin:place]
            begin, size, length = place, 0, 0
        size += item.size
        length += item.length
    if begin < len(items):
        yield items[begin:]


def pack(items: Sequence[Item]) -> PackedItems:
    """Pack items into a message, on the thread that sends it."""
    tensors: list[torch.Tensor] = []
    for item in items:
        if item.tensors:
            item.make_current()
            tensors += item.tensors
    return [(item.payload, len(item.tensors), item.buffers, item.length) for item in items], tensors


def unpack(packed: PackedItems, rank: int | None = None, budget: SharedMemoryBudget | None = None) -> list[Item]:
    """Return the items of a message. ``rank`` and ``budget``: the sender, for items that are going to wait here."""
    entries, tensors = packed
    arrived = set[int]() if len(set(map(id, tensors))) < len(tensors) else None  # a tensor is in two items
    shared = budget is not None and sum(tensor.nbytes for tensor in tensors if tensor.is_cpu) > _IN_MESSAGE
    items, begin = [], 0
    for payload, held, buffers, length in entries:
        if not held:
            items.append(Item(payload, (), 0, len(payload), length=length))
            continue
        own = tensors[begin : begin + held]
        begin += held
        size = len(payload) + sum(tensor.nbytes for tensor in own)
        item = Item(payload, own, buffers, size, handoff_streams(own) if rank is not None else nothing, length=length)
        if shared and rank is not None and budget is not None:
            reservation = budget.reserve(rank, size)
            item = private_copy(item) if reservation is None else item._replace(reservation=reservation)
        if arrived is not None:
            if not arrived.isdisjoint(map(id, own)):
                item = private_copy(item)
            arrived.update(map(id, own))
        items.append(item)
    return items
