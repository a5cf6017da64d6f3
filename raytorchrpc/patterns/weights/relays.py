"""Decides from where members pull weights, so that their home sends them once.

One member of each other host leads: it pulls for its host, and feeds one or two leaders of other hosts while it
receives. The other members of its host pull from it. On the home's own host, readers on GPUs copy one from the other.

Pure bookkeeping of ranks and nodes; sends nothing.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

from raytorchrpc.process.locks import Lock

#: How many rounds are remembered, the newest ones.
_REMEMBERED = 256


class Advice(NamedTuple):
    """What a reader is to do."""

    source: int | None  # the rank of the member to pull from; None: the home
    leads: bool  # it feeds others


class RelayPlan:
    """Who pulls the weights of one home from where. Thread-safe; never blocks."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._rounds: OrderedDict[Hashable, dict[str, int]] = OrderedDict()
        """For what members pull alike: the leaders by node, in the order in which they came."""
        self._readers: OrderedDict[str, dict[int, str]] = OrderedDict()
        """Who has pulled with the same signature, and to which GPU; see ``Selection.signature``."""

    def ask(self, pulled: Hashable, node: str, rank: int, pieces: int) -> Advice:
        """From where ``rank``, on ``node``, pulls this, in so many pieces. A leader that asks again: from the home.

        Leaders stand in a line; if they are more than the pieces, each feeds two.
        """
        with self._lock:
            leaders = self._rounds.setdefault(pulled, {})
            if len(self._rounds) > _REMEMBERED:
                self._rounds.popitem(last=False)
            leader = leaders.get(node)
            if leader is not None and leader != rank:
                return Advice(leader, False)
            before = list(leaders.values())
            leaders[node] = rank
            if leader == rank or not before:  # those that it feeds may be waiting for it: none of them can feed it
                return Advice(None, True)
            place = len(before)
            return Advice(before[place - 1 if place < pieces else (place - 1) // 2], True)

    def take_turn(self, version: int, signature: str, gpu: str, rank: int) -> Advice | None:
        """On one host: return where ``rank`` pulls a version from.

        None if no other GPU pulls what the signature names, or if another reader on the same one takes its turn: they
        would share that GPU's time.
        """
        with self._lock:
            readers = self._readers.setdefault(signature, {})
            readers[rank] = gpu
            if len(self._readers) > _REMEMBERED:
                self._readers.popitem(last=False)
            if len({*readers.values()}) == 1:
                return None
        advice = self.ask((version, signature), gpu, rank, sys.maxsize)
        return advice if advice.leads else None

    def failed(self, pulled: Hashable, rank: int) -> None:
        """Note that a leader could not pull it, or does not have it any more."""
        with self._lock:
            if leaders := self._rounds.get(pulled):
                _remove(leaders, rank)

    def lose(self, rank: int) -> None:
        """Note that a member is lost."""
        with self._lock:
            for leaders in self._rounds.values():
                _remove(leaders, rank)
            for readers in self._readers.values():
                readers.pop(rank, None)


def _remove(leaders: dict[str, int], rank: int) -> None:
    for node in [node for node, leader in leaders.items() if leader == rank]:
        del leaders[node]
