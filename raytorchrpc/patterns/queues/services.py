"""The services of a home of queues and topics: what its peers request, and the object that they reach.

An item is taken from the home once, whatever happens to it afterwards; a consumer may return it.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.services import DeferredReply
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.patterns.handle import register_method
from raytorchrpc.patterns.queues.budget import SharedMemoryBudget
from raytorchrpc.patterns.queues.buffer import Batch, BatchId, Buffer, Policy
from raytorchrpc.patterns.queues.items import PackedItems, pack, unpack
from raytorchrpc.patterns.queues.sequence import ReorderBuffer, SequenceMark
from raytorchrpc.patterns.queues.store import Store

#: Waiting items may hold one part in so many of each sender's shared memory.
SHARED_PART = 4

PUT, TAKE, PUT_BACK = "raytorchrpc.put", "raytorchrpc.take", "raytorchrpc.put_back"
WITHDRAW, END, STATS = "raytorchrpc.withdraw", "raytorchrpc.end", "raytorchrpc.stats"
SKIP, SUBSCRIBE, CANCEL = "raytorchrpc.skip", "raytorchrpc.subscribe", "raytorchrpc.cancel"


class HomeStore(Store):
    """The store of a queue or topic, as a member serves it."""

    def __init__(self, local: LocalMember, label: str, settings: Any, closes: int, *, shared: bool) -> None:
        """``label``: names it in error messages. ``shared``: several consumers get the same item."""
        super().__init__(local.deadlines, closes, f"{label} in member {local.me.name!r}")
        self.settings, self.shared = settings, shared
        self.budget = SharedMemoryBudget((local.config.shm_bytes or local.max_bytes) // SHARED_PART)
        self.arrivals = ReorderBuffer(self.put, local.deadlines)

    def lose(self, rank: int) -> None:
        self.arrivals.lose(rank)
        super().lose(rank)

    def stats(self, key: str | None = None) -> dict[str, int | bool]:
        stats = super().stats(key)
        stats["waiting_to_put"] += self.arrivals.held
        return stats

    def close(self, error: Exception) -> None:
        super().close(error)
        self.arrivals.close(error)


def _put(
    local: LocalMember, caller: int, store: HomeStore, packed: PackedItems, wait_s: float, mark: SequenceMark | None
) -> Any:
    items, until = unpack(packed, caller, store.budget), time.monotonic() + wait_s
    return store.put(items, until) if mark is None else store.arrivals.put(caller, mark, items, until)


def _take(
    local: LocalMember, caller: int, store: HomeStore, key: str, limit: int, wait_s: float, request_id: int
) -> Any:
    taken = store.take(key, limit, time.monotonic() + wait_s, caller, request_id)
    convert = partial(_pack_taken, local, caller, store, key)
    if isinstance(taken, DeferredReply):
        taken.convert = convert
        return taken
    return convert(taken)


def _pack_taken(
    local: LocalMember, caller: int, store: HomeStore, key: str, taken: Any
) -> tuple[BatchId, PackedItems] | bool | None:
    """Pack items for a consumer. If no lane can bring it the first one, that is lost and raises; the others go back."""
    if not taken:
        return taken  # type: ignore[no-any-return]
    for place, item in enumerate(taken):
        try:
            if item.tensors:
                local.payloads.check_reply(local.peers.route_back(caller), item.tensors)
        except LaneUnavailable:
            if rest := taken.part(max(1, place)):
                store.put_back(key, rest)
            if not place:
                raise
            taken = taken.part(0, place)
            break
    return taken.batch_id, pack(taken)


def _put_back(
    local: LocalMember, caller: int, store: HomeStore, key: str, batch_id: BatchId, packed: PackedItems
) -> None:
    store.put_back(key, Batch(unpack(packed, caller, store.budget), batch_id))


def _subscribe(
    local: LocalMember,
    caller: int,
    store: HomeStore,
    key: str,
    policy: Policy,
    maxsize: int,
    max_bytes: int | None,
    process: str,
) -> None:
    store.add_buffer(key, Buffer(maxsize, max_bytes or local.max_bytes, policy, caller, process))


register_method(PUT, _put)
register_method(SKIP, lambda _, caller, store, sequence_id, first: store.arrivals.skip(caller, sequence_id, first))
register_method(TAKE, _take)
register_method(PUT_BACK, _put_back)
register_method(WITHDRAW, lambda _, caller, store, key, request_id: store.withdraw(key, caller, request_id))
register_method(END, lambda _, caller, store, force: store.end(force))
register_method(STATS, lambda _, caller, store, key: store.stats(key))
register_method(SUBSCRIBE, _subscribe)
register_method(CANCEL, lambda _, caller, store, key: store.remove_buffer(key))
