"""Decides from where members pull weights: one member of each other host pulls from the home, the others from it.

Pure bookkeeping of ranks and nodes; sends nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from raytorchrpc.calls.services import DeferredReply

#: Answers besides the rank of the member to pull from: pull from the home; or pull for this node and report it.
HOME, LEAD = "home", "lead"
Advice = str | int

#: How many rounds are remembered, the newest ones.
_REMEMBERED = 256


@dataclass
class _Round:
    """One pull that members of one node make alike."""

    leader: int
    ready: bool = False  # the leader has pulled it, and others can pull it from there
    waiting: list[tuple[int, DeferredReply]] = field(default_factory=list)


class RelayPlan:
    """Who pulls the weights of one home from where. Thread-safe; never blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rounds: OrderedDict[tuple[Hashable, str], _Round] = OrderedDict()

    def ask(self, what: Hashable, node: str, rank: int) -> Advice | DeferredReply:
        """Return where ``rank``, on ``node``, pulls ``what`` from; a reply while the node's leader is pulling it."""
        key, expired = (what, node), []
        with self._lock:
            found = self._rounds.get(key)
            if found is not None and found.leader != rank:
                if found.ready:
                    return found.leader
                reply = DeferredReply()
                found.waiting.append((rank, reply))
                return reply
            if found is not None:  # the leader pulls it again
                expired = found.waiting
            self._rounds[key] = _Round(rank)
            if len(self._rounds) > _REMEMBERED:
                expired = [*expired, *self._rounds.popitem(last=False)[1].waiting]
        for _, waiting in expired:
            waiting.settle(HOME)
        return LEAD

    def done(self, what: Hashable, node: str, rank: int) -> None:
        """Note that the leader has pulled it: others can pull it from there."""
        with self._lock:
            found = self._rounds.get((what, node))
            if found is None or found.leader != rank:
                return
            found.ready, waiting, found.waiting = True, found.waiting, []
        for _, reply in waiting:
            reply.settle(rank)

    def failed(self, what: Hashable, node: str, rank: int) -> None:
        """Note that the leader could not pull it, or does not have it any more: the next in line leads."""
        self._promote_next([(what, node)], rank)

    def lose(self, rank: int) -> None:
        """Note that a member is lost: the next in line leads."""
        with self._lock:
            for found in self._rounds.values():
                found.waiting = [(waiting, reply) for waiting, reply in found.waiting if waiting != rank]
            rounds = list(self._rounds)
        self._promote_next(rounds, rank)

    def _promote_next(self, rounds: Sequence[tuple[Hashable, str]], rank: int) -> None:
        """In those of the rounds that ``rank`` leads, let the next waiting member lead."""
        promoted: list[DeferredReply] = []
        with self._lock:
            for key in rounds:
                found = self._rounds.get(key)
                if found is None or found.leader != rank:
                    continue
                found.waiting = [(waiting, reply) for waiting, reply in found.waiting if not reply.done()]
                if found.waiting:
                    (found.leader, reply), found.ready = found.waiting.pop(0), False
                    promoted.append(reply)
                else:
                    del self._rounds[key]
        for reply in promoted:
            reply.settle(LEAD)

    def close(self, error: Exception) -> None:
        """End every wait with this error."""
        with self._lock:
            waiting = [reply for found in self._rounds.values() for _, reply in found.waiting]
            self._rounds.clear()
        for reply in waiting:
            reply.settle(None, error)
