"""The services of a home of queues and topics: what its peers request, and the object that they reach.

An item is taken from the home once, whatever happens to it afterwards; a consumer may return it.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.metrics import QueueStats
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.patterns.home import Kind, object_services
from raytorchrpc.patterns.queues.items import PackedItems, SharedMemoryBudget, pack, unpack
from raytorchrpc.patterns.queues.store import Batch, BatchId, Buffer, Policy, Request, SequenceMark, Store
from raytorchrpc.process import threads

#: Waiting items may hold one part in so many of each sender's shared memory.
SHARED_PART = 4

QUEUE, TOPIC = "queue", "topic"
PUT, TAKE, PUT_BACK = "raytorchrpc.put", "raytorchrpc.take", "raytorchrpc.put_back"
WITHDRAW, END, STATS = "raytorchrpc.withdraw", "raytorchrpc.end", "raytorchrpc.stats"
SKIP, SUBSCRIBE, CANCEL = "raytorchrpc.skip", "raytorchrpc.subscribe", "raytorchrpc.cancel"
#: The key of a queue's only buffer.
QUEUE_BUFFER = ""


class EndedStore(NamedTuple):
    """What a home keeps of a queue or topic that is closed and empty, for those who come late or return an item."""

    local: LocalMember
    kind: str
    name: str
    settings: Any
    instance_id: int
    put: int
    buffers: tuple[tuple[str, int | None, str | None, int, int, dict[tuple[int, int], None]], ...]
    """Key, rank, process, items taken and dropped, and ``returned`` of each buffer."""

    def restored(self) -> HomeStore:
        """Return the store, closed and empty, as it was. Its home does not have it unless an item comes back."""
        store = HomeStore(self.local, self.kind, self.name, self.settings, 1)
        store.restore(self)
        return store


class HomeStore(Store):
    """The store of a queue or topic, as a member serves it."""

    def __init__(self, local: LocalMember, kind: str, name: str, settings: Any, closes: int) -> None:
        super().__init__(local.deadlines, closes, f"{kind} {name!r} in member {local.me.name!r}")
        self._local, self._kind, self._name, self.settings = local, kind, name, settings
        self.shared = kind == TOPIC
        """Whether several consumers get the same item."""
        self.budget = SharedMemoryBudget((local.config.shm_bytes or local.max_bytes) // SHARED_PART)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _rest(self) -> None:
        """From now on the home keeps only an EndedStore of it."""
        if not self._rests:
            self._rests = True
            self._record()

    def _record(self) -> None:
        buffers = tuple(
            (key, buffer.rank, buffer.process, buffer.taken, buffer.dropped, buffer.returned)
            for key, buffer in self._buffers.items()
        )
        kept = self._local, self._kind, self._name, self.settings, self.instance_id, self._put, buffers
        self._local.services.replace(self._kind, self._name, self, EndedStore(*kept))

    def remove_buffer(self, key: str) -> None:
        super().remove_buffer(key)
        if self._rests:
            self._record()

    def restore(self, ended: EndedStore) -> None:
        """Become the store of which only this is left. No other thread has it yet."""
        self.instance_id, self._put, self._rests = ended.instance_id, ended.put, True
        self._closes, self._has_ended = 0, True
        for key, rank, process, taken, dropped, returned in ended.buffers:
            buffer = self._buffers[key] = Buffer(0, 0, "block", rank, process)
            buffer.taken, buffer.dropped, buffer.returned = taken, dropped, returned

    def _wake(self) -> Store:
        there: Store = self
        if self._rests:
            there = self._local.services.put_in_place(self._kind, self._name, self)
            self._rests = there is not self  # else another thread was first
        return there

    def metric_rows(self, kind: str, name: str) -> list[QueueStats]:
        """What the metrics show of it: one row and, for a topic, another one for each member that has subscribed."""
        me, found = self._local.me, dict[str, QueueStats]()
        names = {member.rank: member.name for member in self._local.peers.members}

        def who(rank: int | None) -> str:
            return me.name if rank is None else names.get(rank, "(not a member)")

        def add(rank: int | None, *counts: int, oldest_s: float = 0.0, getting: Iterable[str] = ()) -> None:
            subscriber = who(rank) if self.shared else ""
            row = found.get(subscriber) or QueueStats(me.name, kind, name, subscriber)
            items, size, taken, dropped = map(operator.add, (row.items, row.bytes, row.taken, row.dropped), counts)
            row = replace(row, items=items, bytes=size, taken=taken, dropped=dropped)
            found[subscriber] = replace(row, oldest_s=max(row.oldest_s, oldest_s), getting=(*row.getting, *getting))

        with self._lock:
            putting = tuple(who(putter.rank) for putter in self._putters)
            found[""] = QueueStats(me.name, kind, name, "", put=self._put, putting=putting)
            for rank, ended in self._ended.items():
                add(rank, 0, 0, *ended)
            for buffer in self._buffers.values():
                getting = [who(getter.rank) for getter in buffer.getters]
                counts = buffer.count, buffer.bytes, buffer.taken, buffer.dropped
                add(buffer.rank, *counts, oldest_s=buffer.oldest_s(), getting=getting)
        return list(found.values())

    # --- requests of peers -----------------------------------------------------------------------------------------

    def serve_put(self, caller: int, packed: PackedItems, wait_s: float, mark: SequenceMark | None) -> Any:
        return self.put(unpack(packed, caller, self.budget), time.monotonic() + wait_s, caller, mark)

    def serve_take(
        self, caller: int, key: str, limit: int, least: int, iteration: int, wait_s: float, request_id: int
    ) -> Any:
        taken = self.take(key, Request(limit, least, iteration), time.monotonic() + wait_s, caller, request_id)
        reply = taken
        if not isinstance(taken, DeferredReply):
            reply = DeferredReply()
            reply.settle(taken)
        delivery = _Delivery(self, caller, key)
        reply.convert, reply.context = delivery.pack, lambda: delivery
        return reply

    def carriable(self, caller: int, key: str, taken: Batch) -> Batch:
        """Return the first items, which a lane can bring to a consumer; the others go back. If no lane can bring the
        very first one, it is lost and raises LaneUnavailable.
        """
        for place, item in enumerate(taken):
            try:
                if item.tensors:
                    self._local.payloads.check_reply(self._local.peers.route_back(caller), item.tensors)
            except LaneUnavailable:
                if rest := taken.part(max(1, place)):
                    self.put_back(key, rest)
                if not place:
                    raise
                return taken.part(0, place)
        return taken

    def serve_put_back(self, caller: int, key: str, batch_id: BatchId, packed: PackedItems) -> None:
        self.put_back(key, Batch(unpack(packed, caller, self.budget), *batch_id))

    def serve_subscribe(
        self, caller: int, key: str, policy: Policy, maxsize: int, max_bytes: int | None, process: str
    ) -> None:
        self.add_buffer(key, Buffer(maxsize, max_bytes or self._local.max_bytes, policy, caller, process))


class _Delivery:
    """Items on their way to a consumer. They go back if this process has no memory to send them."""

    _taken: Batch | None = None

    def __init__(self, store: HomeStore, caller: int, key: str) -> None:
        self._store, self._caller, self._key = store, caller, key

    def pack(self, taken: Any) -> tuple[BatchId, PackedItems] | bool | None:
        """Convert what was taken into the reply."""
        if not taken:
            return taken  # type: ignore[no-any-return]
        self._taken = taken = self._store.carriable(self._caller, self._key, taken)
        return taken.batch_id, pack(taken)

    def __enter__(self) -> None:
        """It is packed and sent in here."""

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        # The consumer gets an error instead: a lane that raises has not sent the reply.
        while error is not None and not threads.is_shortage(error):
            error = error.__cause__  # of what cannot be pickled
        if self._taken and error is not None:
            self._store.put_back(self._key, self._taken)


SERVICES = object_services(
    {
        PUT: HomeStore.serve_put,
        SKIP: HomeStore.skip,
        TAKE: HomeStore.serve_take,
        PUT_BACK: HomeStore.serve_put_back,
        WITHDRAW: lambda store, caller, key, request_id: store.withdraw(key, caller, request_id),
        END: lambda store, _, force: store.end(force),
        STATS: lambda store, _, key: store.stats(key),
        SUBSCRIBE: HomeStore.serve_subscribe,
        CANCEL: lambda store, _, key: store.remove_buffer(key),
    }
)


def _create_queue(local: LocalMember, name: str, settings: Any) -> HomeStore:
    maxsize, max_bytes, producers = settings
    store = HomeStore(local, QUEUE, name, settings, producers)
    store.add_buffer(QUEUE_BUFFER, Buffer(maxsize, max_bytes or local.max_bytes, "block"))
    return store


def _create_topic(local: LocalMember, name: str, settings: Any) -> HomeStore:
    return HomeStore(local, TOPIC, name, settings, settings[0])


KINDS = {
    QUEUE: Kind(_create_queue, ("maxsize", "max_bytes", "producers")),
    TOPIC: Kind(_create_topic, ("publishers",)),
}
