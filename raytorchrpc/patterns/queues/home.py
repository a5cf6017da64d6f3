"""Queues and topics at their home: what it does when a member asks.

An item is taken from the home once, whatever becomes of it afterwards; a member may give it back.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.services import DeferredReply
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.patterns import handle
from raytorchrpc.patterns.queues.items import Chunk, Loans, packed, unpacked
from raytorchrpc.patterns.queues.order import Arrivals, Mark
from raytorchrpc.patterns.queues.outlet import Batch, Stub
from raytorchrpc.patterns.queues.store import Store

#: Of the shared memory of one sender, what its items may hold while they wait in another member.
_LENT_SHARE = 4

PUT, TAKE, PUT_BACK = "raytorchrpc.put", "raytorchrpc.take", "raytorchrpc.put_back"
WITHDRAW, END, NUMBERS = "raytorchrpc.withdraw", "raytorchrpc.end", "raytorchrpc.numbers"
SKIP = "raytorchrpc.skip"


class Home(Store):
    """A queue or a topic in its home."""

    def __init__(self, local: LocalMember, label: str, settings: Any, closes: int, *, shared: bool) -> None:
        """``label``: what it is, for messages. ``shared``: several consumers get the same item."""
        super().__init__(local.deadlines, closes, f"{label} in member {local.me.name!r}")
        self.settings, self.shared = settings, shared
        self.loans = Loans((local.config.shm_bytes or local.max_bytes) // _LENT_SHARE)
        self.arrivals = Arrivals(self.put, local.deadlines)

    def lose(self, rank: int) -> None:
        self.arrivals.lose(rank)
        super().lose(rank)

    def numbers(self, key: str | None = None) -> dict[str, int | bool]:
        numbers = super().numbers(key)
        numbers["waiting_to_put"] += self.arrivals.held
        return numbers

    def close(self, error: Exception) -> None:
        super().close(error)
        self.arrivals.close(error)


def home_of(local: LocalMember, kind: str, name: str, life: int | None) -> Home:
    home: Home = local.services.find(kind, name, life, local.me.name)
    return home


def _put(
    local: LocalMember, caller: int, kind: str, name: str, life: int, chunk: Chunk, wait_s: float, mark: Mark | None
) -> Any:
    home = home_of(local, kind, name, life)
    items, until = unpacked(chunk, caller, home.loans), time.monotonic() + wait_s
    return home.put(items, until) if mark is None else home.arrivals.put(caller, mark, items, until)


def _skip(local: LocalMember, caller: int, kind: str, name: str, life: int, producer: int, first: int) -> None:
    home_of(local, kind, name, life).arrivals.skip(caller, producer, first)


def _take(
    local: LocalMember, caller: int, kind: str, name: str, life: int, key: str, limit: int, wait_s: float, ticket: int
) -> Any:
    home = home_of(local, kind, name, life)
    taken = home.take(key, limit, time.monotonic() + wait_s, caller, ticket)
    convert = partial(_packed, local, caller, home, key)
    if isinstance(taken, DeferredReply):
        taken.convert = convert
        return taken
    return convert(taken)


def _packed(local: LocalMember, caller: int, home: Home, key: str, taken: Any) -> tuple[Stub, Chunk] | bool | None:
    """One that cannot reach the caller is lost, and the caller told; the others are not."""
    if not taken:
        return taken  # type: ignore[no-any-return]
    for place, item in enumerate(taken):
        try:
            if item.tensors:
                local.payloads.check_reply(local.peers.route_back(caller), item.tensors)
        except LaneUnavailable:
            if rest := taken.part(max(1, place)):
                home.put_back(key, rest)
            if not place:
                raise
            taken = taken.part(0, place)
            break
    return taken.stub, packed(taken)


def _put_back(
    local: LocalMember, caller: int, kind: str, name: str, life: int, key: str, stub: Stub, chunk: Chunk
) -> None:
    home = home_of(local, kind, name, life)
    home.put_back(key, Batch(unpacked(chunk, caller, home.loans), stub))


def _withdraw(local: LocalMember, caller: int, kind: str, name: str, life: int, key: str, ticket: int) -> None:
    home_of(local, kind, name, life).withdraw(key, caller, ticket)


def _end(local: LocalMember, caller: int, kind: str, name: str, life: int, force: bool) -> None:
    home_of(local, kind, name, life).end(force)


def _numbers(local: LocalMember, caller: int, kind: str, name: str, life: int, key: str | None) -> Any:
    return home_of(local, kind, name, life).numbers(key)


for _name, _function in (
    (PUT, _put),
    (SKIP, _skip),
    (TAKE, _take),
    (PUT_BACK, _put_back),
    (WITHDRAW, _withdraw),
    (END, _end),
    (NUMBERS, _numbers),
):
    handle.serve(_name, _function)
