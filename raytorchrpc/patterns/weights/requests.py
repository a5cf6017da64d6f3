"""The requests that a pull sends to other members."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from raytorchrpc.calls.client.future import Future
from raytorchrpc.calls.counters import PullCounter
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.errors import NotAMember, RayTorchRpcError

#: The address of the object that serves tensors: a store's, or that of a member's relayed weights.
Address = tuple[str, str, int | None]
#: Requests for large messages that are sent before the first of them has to be answered.
AHEAD = 2


class Requests:
    """Requests of one pull, by the thread that uses it."""

    def __init__(self, local: LocalMember, until: float, counter: PullCounter) -> None:
        """``until``: when the pull has to end (``time.monotonic``)."""
        self.local, self.until, self.counter = local, until, counter
        self._brought: dict[Any, int] = {}
        """Bytes, by the member that they came from, since the last report to it."""

    def left(self, least: float = 0.0) -> float:
        """Seconds until the pull has to end."""
        return max(least, self.until - time.monotonic())

    def call(
        self, target: Any, service: str, args: tuple[Any, ...], timeout: float | None, **options: Any
    ) -> Future[Any]:
        """Send a request. Raises PeerLost."""
        return Future(self.local.outgoing.call(target, service, args, {}, CallOptions(timeout, retry=0, **options)))

    def notify(self, target: Any, service: str, args: tuple[Any, ...]) -> None:
        """Send a request without waiting for its answer; ignores errors."""
        with suppress(RayTorchRpcError):
            self.call(target, service, args, None)

    def count(self, source: Any, size: int) -> None:
        """Count bytes that have come from a member."""
        self.counter.add(size, self._name_of(source))
        self._brought[source] = self._brought.get(source, 0) + size

    def _name_of(self, member: Any) -> str:
        if isinstance(member, str):
            return member
        with suppress(NotAMember):  # it has just left
            return str(self.local.peers.route(member).member.name)
        return f"rank {member}"

    def report(self, source: Any) -> tuple[Any, ...]:
        """What a member that granted a lease is told with the end of it."""
        size = self._brought.pop(source, 0)
        return (self.counter.store, self.counter.version, size) if size else ()

    def is_near(self, member: Any) -> bool:
        """Whether a member is on this node."""
        return self.local.peers.route(member).member.node_id == self.local.me.node_id


def stream(requests: Iterable[Callable[[], Future[Any]]], ahead: int) -> Iterable[Any]:
    """Send requests, so many ahead, and yield their answers in order. Raises the error of the first that fails."""
    sent: deque[Future[Any]] = deque()
    for request in requests:
        sent.append(request())
        if len(sent) > ahead:
            yield sent.popleft().wait()
    while sent:
        yield sent.popleft().wait()
