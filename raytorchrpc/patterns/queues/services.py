"""The services of a home of queues and topics: what its peers request, and the object that they reach.

An item is taken from the home once, whatever happens to it afterwards; a consumer may return it.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.metrics import QueueStats
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.patterns.home import Kind, object_services
from raytorchrpc.patterns.queues.items import PackedItems, SharedMemoryBudget, pack, unpack
from raytorchrpc.patterns.queues.store import Batch, BatchId, Buffer, Policy, Request, Store

#: Waiting items may hold one part in so many of each sender's shared memory.
SHARED_PART = 4

QUEUE, TOPIC = "queue", "topic"
PUT, TAKE, PUT_BACK = "raytorchrpc.put", "raytorchrpc.take", "raytorchrpc.put_back"
WITHDRAW, END, STATS = "raytorchrpc.withdraw", "raytorchrpc.end", "raytorchrpc.stats"
FULL_UP = "raytorchrpc.full_up"
SUBSCRIBE, CANCEL = "raytorchrpc.subscribe", "raytorchrpc.cancel"
#: The key of a queue's only buffer.
QUEUE_BUFFER = ""


class HomeStore(Store):
    """The store of a queue or topic, as a member serves it."""

    def __init__(self, local: LocalMember, kind: str, name: str, settings: Any, closes: int) -> None:
        super().__init__(local.deadlines, closes, f"{kind} {name!r} in member {local.me.name!r}")
        self._local, self._kind, self._name, self.settings = local, kind, name, settings
        self.shared = kind == TOPIC
        """Whether several consumers get the same item."""
        self.budget = SharedMemoryBudget((local.config.shm_bytes or local.max_bytes) // SHARED_PART)

    def _rest(self) -> None:
        if not self._rests:
            self._rests = True
            self._local.services.retire(self._kind, self._name, self)

    def _wake(self) -> None:
        if self._rests:
            self._local.services.revive(self._kind, self._name, self)
            self._rests = False

    def metric_rows(self, kind: str, name: str) -> list[QueueStats]:
        """What the metrics show of it: one row and, for a topic, another one for each member that has subscribed."""
        me, rows = self._local.me, dict[str, QueueStats]()
        names = {member.rank: member.name for member in self._local.peers.members}

        def who(rank: int | None) -> str:
            return me.name if rank is None else names.get(rank, "(not a member)")

        def add(rank: int | None, *counts: int, oldest_s: float = 0.0, getting: Iterable[str] = ()) -> None:
            subscriber = who(rank) if self.shared else ""
            row = rows.get(subscriber) or QueueStats(me.name, kind, name, subscriber)
            items, size, taken, dropped = map(operator.add, (row.items, row.bytes, row.taken, row.dropped), counts)
            row = replace(row, items=items, bytes=size, taken=taken, dropped=dropped)
            rows[subscriber] = replace(row, oldest_s=max(row.oldest_s, oldest_s), getting=(*row.getting, *getting))

        with self._lock:
            putting = tuple(who(putter.rank) for putter in self._putters)
            rows[""] = QueueStats(me.name, kind, name, "", put=self._put, putting=putting)
            for rank, ended in self._ended.items():
                add(rank, 0, 0, *ended)
            for buffer in self._buffers.values():
                getting = [who(getter.rank) for getter in buffer.getters]
                counts = buffer.count, buffer.bytes, buffer.taken, buffer.dropped
                add(buffer.rank, *counts, oldest_s=buffer.oldest_s(), getting=getting)
        return list(rows.values())

    # --- requests of peers -----------------------------------------------------------------------------------------

    def serve_put(self, caller: int, packed: PackedItems, wait_s: float) -> Any:
        return self.put(unpack(packed, caller, self.budget), time.monotonic() + wait_s, caller)

    def serve_take(
        self, caller: int, key: str, limit: int, least: int, iteration: int, wait_s: float, request_id: int
    ) -> Any:
        taken = self.take(key, Request(limit, least, iteration), time.monotonic() + wait_s, caller, request_id)
        if not isinstance(taken, DeferredReply):
            return self._packed(caller, key, taken)
        taken.convert = partial(self._packed, caller, key)
        return taken

    def _packed(self, caller: int, key: str, taken: Any) -> tuple[BatchId, PackedItems] | bool | None:
        """Convert what was taken into the reply, on the thread that sends it."""
        if not taken:
            return taken  # type: ignore[no-any-return]
        taken = self._carriable(caller, key, taken)
        return taken.batch_id, pack(taken)

    def _carriable(self, caller: int, key: str, taken: Batch) -> Batch:
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


SERVICES = object_services(
    {
        PUT: HomeStore.serve_put,
        TAKE: HomeStore.serve_take,
        PUT_BACK: HomeStore.serve_put_back,
        WITHDRAW: lambda store, caller, key, request_id: store.withdraw(key, caller, request_id),
        END: lambda store, _, force: store.end(force),
        STATS: lambda store, _, key: store.stats(key),
        FULL_UP: lambda store, _, wait_s: store.await_full(time.monotonic() + wait_s),
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
