"""Who pulls weights from whom: across hosts once for each host, and within a host from the one that did.

Pure: knows ranks and the nodes that they are on, and sends nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

from raytorchrpc.calls.services import DeferredReply

#: What a member is told: pull from the home; pull for your node, then say so; or pull from that rank.
HOME, LEAD = "home", "lead"
Advice = str | int

#: What is remembered: the newest, so many.
_REMEMBERED = 256


class _Round:
    """One thing that is pulled by the members of one node."""

    def __init__(self, leader: int) -> None:
        self.leader = leader
        self.ready = False
        self.waiting: list[tuple[int, DeferredReply]] = []


class Relays:
    """For one home's weights. Thread-safe; never blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rounds: OrderedDict[tuple[Hashable, str], _Round] = OrderedDict()

    def ask(self, what: Hashable, node: str, rank: int) -> Advice | DeferredReply:
        """Where ``rank``, which is on ``node``, pulls that from. A DeferredReply: once the first of the node has it."""
        with self._lock:
            at = self._rounds.get((what, node))
            if at is None or at.leader == rank:
                self._rounds[what, node] = _Round(rank)
                while len(self._rounds) > _REMEMBERED:
                    _, old = self._rounds.popitem(last=False)
                    told = old.waiting
                    break
                else:
                    told = [] if at is None else at.waiting
                advice: Advice | DeferredReply = LEAD
            elif at.ready:
                return at.leader
            else:
                later = DeferredReply()
                at.waiting.append((rank, later))
                return later
        for _, waiting in told:
            waiting.settle(HOME)
        return advice

    def done(self, what: Hashable, node: str, rank: int) -> None:
        """The one that leads has it: the others can pull from there."""
        with self._lock:
            at = self._rounds.get((what, node))
            if at is None or at.leader != rank:
                return
            at.ready, waiting, at.waiting = True, at.waiting, []
        for _, later in waiting:
            later.settle(rank)

    def failed(self, what: Hashable, node: str, rank: int) -> None:
        """It will not have it, or has it no more: the next in line leads."""
        with self._lock:
            told = self._succeed((what, node), rank)
        for later in told:
            later.settle(LEAD)

    def lose(self, rank: int) -> None:
        """A member is gone."""
        with self._lock:
            for at in self._rounds.values():
                at.waiting = [(waiting, later) for waiting, later in at.waiting if waiting != rank]
            told = [later for key in list(self._rounds) for later in self._succeed(key, rank)]
        for later in told:
            later.settle(LEAD)

    def _succeed(self, key: tuple[Hashable, str], rank: int) -> list[DeferredReply]:
        """Under the lock: who leads after ``rank``, if that led."""
        at = self._rounds.get(key)
        if at is None or at.leader != rank:
            return []
        while at.waiting:
            leader, later = at.waiting.pop(0)
            if not later.done():
                at.leader, at.ready = leader, False
                return [later]
        del self._rounds[key]
        return []

    def close(self, error: Exception) -> None:
        """End every wait with this."""
        with self._lock:
            waiting = [later for at in self._rounds.values() for _, later in at.waiting]
            self._rounds.clear()
        for later in waiting:
            later.settle(None, error)
