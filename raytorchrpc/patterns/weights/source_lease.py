"""A lease on a version at one home, and the requests that a pull makes under it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from raytorchrpc.calls.client.future import Future
from raytorchrpc.calls.counters import PullCounter
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.receive_into import Window
from raytorchrpc.errors import NotFound, RayTorchRpcError, RpcTimeout
from raytorchrpc.patterns.handle import Handle, run
from raytorchrpc.patterns.weights import published
from raytorchrpc.patterns.weights.published import VersionLease, lease_is_valid_until
from raytorchrpc.patterns.weights.slices import KnownLayout
from raytorchrpc.process.completion import nothing

#: A home, and the instance of what it has there.
Source = tuple[str, int | None]


class Requests:
    """Requests of one pull, by the thread that uses it."""

    def __init__(self, local: LocalMember, until: float, counter: PullCounter) -> None:
        """``until``: when the pull has to end (``time.monotonic``)."""
        self.local, self.until, self.counter = local, until, counter
        self._brought: dict[Any, int] = {}  # bytes, by the member that they came from, since the last report to it

    def seconds_left(self, least: float = 0.0) -> float:
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
        self.counter.add(size, source if isinstance(source, str) else published.name_of(self.local, source))
        self._brought[source] = self._brought.get(source, 0) + size

    def report(self, source: Any) -> tuple[Any, ...]:
        """What a member that granted a lease is told with the end of it."""
        size = self._brought.pop(source, 0)
        return (self.counter.store, self.counter.version, size) if size else ()

    def is_near(self, member: Any) -> bool:
        """Whether a member is on this node."""
        return self.local.peers.route(member).member.node_id == self.local.me.node_id

    def is_readable(self, member: Any, device_type: str | None) -> bool:
        """Whether a lane can read parts of a member's memory on such devices in place."""
        if device_type is None or not self.is_near(member):
            return False
        lane = self.local.tensor_lanes.get(self.local.peers.route(member).beside.get(device_type, ""))
        return lane is not None and lane.capabilities.in_place


def stream(requests: Iterable[Callable[[], Future[Any]]], ahead: int) -> Iterator[Any]:
    """Send requests, so many ahead, and yield their answers in order. Raises the error of the first that fails."""
    sent: deque[Future[Any]] = deque()
    for request in requests:
        sent.append(request())
        if len(sent) > ahead:
            yield sent.popleft().wait()
    while sent:
        yield sent.popleft().wait()


class SourceLease:
    """A lease of one pull at one home, by the thread that pulls: ``ask``, ``answer``, and ``release`` in any case."""

    def __init__(
        self,
        store: Handle,
        requests: Requests,
        layout: KnownLayout | None,
        device_type: str | None,
        needed: tuple[int, ...] = (),
        on_end: Callable[[VersionLease], object] = lambda lease: None,
    ) -> None:
        """
        Args:
            store: the handle of what the home has.
            requests: of the pull.
            layout: that this process knows of the home.
            device_type: of the memory that is to come with the lease, if a lane can read it in place; None: none is.
            needed: which pieces of that memory are; see ``Readable.serve_pieces``.
            on_end: called before the lease ends.
        """
        self.store, self.requests, self.layout = store, requests, layout
        self.home, self.is_home = store.home, store._is_home(requests.local)
        self.device_type = device_type if not self.is_home and requests.is_readable(self.home, device_type) else None
        self.given: VersionLease | None = None
        self.memory = Window()  # that has come with the lease
        self._needed, self._on_end = needed, on_end
        self._asked: Future[Any] | None = None

    @property
    def source(self) -> Source:
        return self.home, self.store._instance_id

    @property
    def leased(self) -> VersionLease:
        assert self.given is not None
        return self.given

    def ask(
        self, version: int | None, since: int | None, turn: tuple[str, str] | None = None, caller_waits: bool = False
    ) -> None:
        """Ask for a version (None: the newest). ``turn``: see ``PublishedWeights.serve_lease``."""
        local, seconds = self.requests.local, self.requests.seconds_left()
        args = version, since, 0 if self.layout is None else self.layout.number
        if self.is_home:
            lease = self.store._object(local).lease(local.me.rank, *args, None)
            if lease is not None:
                self._take(lease)
            return
        request = (*self.store._address, *args, seconds, self.device_type, self._needed, turn)
        options: dict[str, Any] = {"caller_waits": caller_waits, "into": self.memory}
        self._asked = self.store._send(local, published.LEASE, request, seconds, **options)

    def answer(self) -> VersionLease | None:
        """Wait for the lease; None if nothing is published yet."""
        sent, self._asked = self._asked, None
        if sent is not None:
            response = self.store._response(sent)
            del sent  # see _response
            run(response)  # into ``memory``, which has the answer
        if self.given is None and (answer := self.memory.result) is not None:
            self._take(VersionLease(*answer[0]))
        return self.given

    def _take(self, lease: VersionLease) -> None:
        self.given = lease
        if lease.lease and lease.rows is not None:
            self.layout = KnownLayout(lease.layout, lease.rows, lease.spans)
        elif lease.lease and (self.layout is None or self.layout.number != lease.layout):
            raise NotFound(f"the home of {self.requests.counter.store[0]!r} did not say what it has; pull again")

    def snapshot(self) -> Any:
        """What is leased, in the home itself."""
        return self.store._object(self.requests.local).pool.leased(self.leased.lease)

    def request(self, service: str, *args: Any, **options: Any) -> Future[Any]:
        """Send the home a request under the lease."""
        request = (*self.store._address, self.leased.lease, *args)
        return self.requests.call(self.home, service, request, self.requests.seconds_left(0.001), **options)

    def check(self) -> None:
        """Raise RpcTimeout if the lease may have ended before the tensors were copied."""
        if time.monotonic() > lease_is_valid_until(self.requests.until):
            raise RpcTimeout(
                f"a pull of {self.store.kind} {self.store.name!r} was suspended, or took much longer than its "
                f"timeout, and {self.home!r} has ended its lease: the model may have tensors of two versions; "
                f"pull again"
            )

    def give_back(self) -> Callable[[], None]:
        """End a lease on tensors that are lent; call the result to wait for the owner's word that they still were.

        That raises RpcTimeout if the owner had taken them back before. No effect on another lease.
        """
        lease = self.leased
        if not lease.lease or not lease.is_lent:
            return nothing
        self._on_end(lease)
        self.given = lease._replace(lease=0)
        if self.is_home:
            was_lent: Callable[[], bool] = partial(self.store._object(self.requests.local).pool.release, lease.lease)
        else:
            report = (*self.store._address, lease.lease, *self.requests.report(self.home))
            seconds = self.requests.seconds_left(0.001)
            was_lent = self.requests.call(self.home, published.RELEASE, report, seconds).wait

        def check() -> None:
            with suppress(NotFound):  # the store has ended
                if was_lent():
                    return
            raise self.taken_back()

        return check

    def taken_back(self) -> RpcTimeout:
        """The error of a pull that was slower than the loan."""
        return RpcTimeout(
            f"{self.home!r} has taken back version {self.leased.version} of {self.store.kind} {self.store.name!r}, "
            f"which it had only lent, before this pull had ended: the model may have tensors of two versions; pull "
            f"again, or lend with a longer timeout="
        )

    def release(self) -> None:
        """End the lease, also one that is still to come. Does not wait for the home's answer."""
        sent, self._asked = self._asked, None
        if sent is None:
            self._end()
        else:
            sent.add_done_callback(self._end_late)

    def _end_late(self, sent: Future[Any]) -> None:
        self._asked = sent
        with suppress(RayTorchRpcError):  # no lease then
            self.answer()
        self._end()

    def _end(self) -> None:
        if self.given is None or not self.given.lease:
            return
        self._on_end(self.given)
        if self.is_home:
            self.store._object(self.requests.local).pool.release(self.given.lease)
        else:
            report = (*self.store._address, self.given.lease, *self.requests.report(self.home))
            self.requests.notify(self.home, published.RELEASE, report)
