"""How much may be under way to one peer at a time: back-pressure for those who send faster than it works.

Calls that are made on behalf of a call being served have credit of their own, one for each call served. They must
not wait for what others sent: in a chain of calls that comes back, those may be waiting for them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from raytorchrpc.calls import waiting
from raytorchrpc.calls.event_loops import on_loop
from raytorchrpc.calls.peers import Member
from raytorchrpc.calls.scope import current_scope
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import PeerBusy, RpcTimeout


class Ticket:
    """Leave for one call, until ``give_back``."""

    __slots__ = ("_allowance", "_bytes")

    def __init__(self, allowance: Allowance, size: int) -> None:
        self._allowance: Allowance | None = allowance
        self._bytes = size

    def give_back(self) -> None:
        """The call is over, or was not sent. Idempotent, from any thread, never blocks."""
        allowance = self._allowance
        if allowance is not None:
            allowance.over(self)


class Turn:
    """A wait for a ticket; see ``execution.Waitable``."""

    loop_token = None

    def __init__(self, allowance: Allowance, size: int) -> None:
        self.size = size
        self.ticket: Ticket | None = None
        self._allowance = allowance
        self._told: list[Callable[[], None]] = []

    def wait(self, timeout_s: float) -> bool:
        """Block until there is a ticket, at most ``timeout_s``."""
        granted = threading.Lock()
        granted.acquire()
        self.add_done_callback(granted.release)
        return granted.acquire(timeout=max(0.0, timeout_s))

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, which is short, when there is a ticket."""
        with self._allowance.lock:
            if self.ticket is None:
                self._told.append(callback)
                return
        callback()

    def grant(self, ticket: Ticket) -> list[Callable[[], None]]:
        """Under the allowance's lock; returns whom to tell afterwards."""
        self.ticket = ticket
        return self._told

    def give_up(self) -> None:
        """Nobody waits any more."""
        with self._allowance.lock:
            if self.ticket is None:
                self._allowance.waiting.remove(self)
                return
        self.ticket.give_back()


class Allowance:
    """Calls and bytes under way from one caller to one peer. First come, first served. Thread-safe; hot path.

    A call that is larger than all the bytes allowed is let through when nothing else is under way.
    """

    __slots__ = ("bytes", "calls", "lock", "max_bytes", "max_calls", "waiting")

    def __init__(self, max_calls: int, max_bytes: int) -> None:
        self.max_calls, self.max_bytes = max_calls, max_bytes
        self.calls = self.bytes = 0
        self.lock = threading.Lock()
        self.waiting: deque[Turn] = deque()

    def take(self, size: int) -> Ticket | None:
        """A ticket for a call of so many bytes, if there is one now."""
        with self.lock:
            if self.waiting or not self._fits(size):
                return None
            self.calls += 1
            self.bytes += size
        return Ticket(self, size)

    def queue(self, size: int) -> Turn:
        """Wait for a ticket."""
        turn = Turn(self, size)
        with self.lock:
            self.waiting.append(turn)
            tell = self._grant()
        for callback in tell:
            callback()
        return turn

    def over(self, ticket: Ticket) -> None:
        """See Ticket.give_back."""
        with self.lock:
            if ticket._allowance is None:
                return
            ticket._allowance = None
            self.calls -= 1
            self.bytes -= ticket._bytes
            if not self.waiting:
                return
            tell = self._grant()
        for callback in tell:
            callback()

    def _fits(self, size: int) -> bool:
        if not self.calls:
            return True
        return self.calls < self.max_calls and self.bytes + size <= self.max_bytes

    def _grant(self) -> list[Callable[[], None]]:
        tell: list[Callable[[], None]] = []
        while self.waiting and self._fits(self.waiting[0].size):
            turn = self.waiting.popleft()
            self.calls += 1
            self.bytes += turn.size
            tell += turn.grant(Ticket(self, turn.size))
        return tell


class CreditWindows:
    """Those of one member, by peer."""

    def __init__(self, config: GroupConfig, max_bytes: int) -> None:
        self._max_calls, self._max_bytes = config.max_calls_in_flight, max_bytes
        self._rejects = config.when_full == "reject"
        self._by_rank: dict[int, Allowance] = {}

    def under_way(self, rank: int) -> tuple[int, int]:
        """Calls to a peer that have no answer yet, and bytes of their arguments; without those on behalf of others."""
        allowance = self._by_rank.get(rank)
        return (0, 0) if allowance is None else (allowance.calls, allowance.bytes)

    def take(self, peer: Member, method: str, size: int, patience_s: float) -> tuple[Ticket, float]:
        """A ticket for a call, and how long this took (seconds; 0 if there was one at once).

        Serves what comes back to this actor while it waits. Raises PeerBusy, RpcTimeout.
        """
        limit = current_scope.get().limit
        credit = self._by_rank if limit is None or limit.over else limit.credit
        allowance = credit.get(peer.rank)
        if allowance is None:
            allowance = credit.setdefault(peer.rank, Allowance(self._max_calls, self._max_bytes))
        ticket = allowance.take(size)
        return (self._wait(allowance, peer.name, method, size, patience_s)) if ticket is None else (ticket, 0.0)

    def _wait(self, allowance: Allowance, peer: str, method: str, size: int, patience_s: float) -> tuple[Ticket, float]:
        calls, many = allowance.calls, allowance.bytes
        under_way = f"{calls} calls with {many / 2**20:.1f} MiB of arguments are under way to {peer!r}"
        looping = on_loop()
        if looping or self._rejects:
            remedy = "await some of them" if looping else "wait for some of them"
            raise PeerBusy(
                f"{peer}.{method} was not sent: {under_way}; {remedy} first, or raise "
                f"GroupConfig.max_calls_in_flight ({self._max_calls}) or max_bytes_in_flight ({self._max_bytes})",
                peer,
                calls,
                many,
            )
        began = time.monotonic()
        turn = allowance.queue(size)
        try:
            if not waiting.wait_serving(turn, patience_s):
                raise RpcTimeout(f"{peer}.{method} was not sent by its deadline: {under_way}")
        except BaseException:
            turn.give_up()
            raise
        assert turn.ticket is not None
        return turn.ticket, max(time.monotonic() - began, 1e-9)
