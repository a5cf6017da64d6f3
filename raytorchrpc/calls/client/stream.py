"""The caller's end of a stream: an iterator over the items of a generator method."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from raytorchrpc.calls import protocol
from raytorchrpc.calls.client.future import Call, Future, until_done
from raytorchrpc.calls.options import MAX_TIMEOUT_S, CallOptions
from raytorchrpc.calls.peers import PeerRoute
from raytorchrpc.calls.scope import Limit, Scope, current_scope, refuse_on_loop
from raytorchrpc.errors import RayTorchRpcError, RpcTimeout
from raytorchrpc.lanes.base import MessageLane
from raytorchrpc.process import fork


class Sender(Protocol):
    """See ``outgoing.OutgoingCalls``."""

    def send(self, route: PeerRoute, method: str, args: tuple[Any, ...], kwargs: Any, options: CallOptions) -> Call:
        """Send a call once."""

    def budget(self, peer: str, method: str, timeout: float | None) -> float:
        """Seconds until the deadline of a call that is made now. Raises RpcTimeout."""

    def notify(self, route: PeerRoute, lane: MessageLane, kind: int, number: int, *, later: bool = False) -> None:
        """As ``control``, but wait for no reply and ignore errors. ``later``: for finalizers."""


T = TypeVar("T")

#: The method of a request for one item.
NEXT = "raytorchrpc.next"


class Stream(Generic[T]):
    """The items that a generator method yields. Returned by a direct call of such a method; iterate over it once.

    Use ``for`` or, in a coroutine, ``async for``. The generator runs at most ``ahead`` items ahead (see ``method``).
    Each item has the call's timeout: after that the iteration raises RpcTimeout, and it can be continued. An error that
    the generator raises comes after the items before it. If the target is lost, PeerLost comes after those that have
    arrived.

    ``close`` ends the generator; so do dropping the stream and the end of this process. Not for several threads or
    tasks at a time.
    """

    _ended = True

    def __init__(self, calls: Sender, route: PeerRoute, method: str, number: int, ahead: int, options: CallOptions):
        """``number``: of the stream at the callee. ``options``: of the call."""
        self._calls, self._route, self._method, self._number = calls, route, method, number
        self._timeout = options.timeout
        self._options = CallOptions(MAX_TIMEOUT_S, keep=options.keep)
        self._reading = threading.Lock()
        self._requested = 0
        self._requests: deque[Future[tuple[T] | None] | RayTorchRpcError] = deque()
        self._ended = False
        for _ in range(ahead):
            self._request()

    @property
    def _label(self) -> str:
        return f"{self._route.member.name}.{self._method}"

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._turn():
            if (request := self._oldest()) is not None:
                if not request.done():
                    refuse_on_loop(f"waiting for the next item of {self._label}", "`async for`")
                seconds = self._calls.budget(self._route.member.name, self._method, self._timeout)
                taken = self._taken(request, _arrives(request, seconds), seconds)
                del request  # it may hold an error, whose traceback holds this frame
                if taken is not None:
                    return taken[0]
            raise StopIteration

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        with self._turn():
            if (request := self._oldest()) is not None:
                seconds = self._calls.budget(self._route.member.name, self._method, self._timeout)
                taken = self._taken(request, await _arrives_on_loop(request, seconds), seconds)
                del request
                if taken is not None:
                    return taken[0]
            raise StopAsyncIteration

    def close(self) -> None:
        """End the stream: close the generator at its next ``yield``, or cancel it at an ``await``. Idempotent.

        Items that have not been taken are dropped. Does not wait for the generator.
        """
        if not self._ended and not fork.forked():
            self._end()
            self._calls.notify(self._route, self._route.calls, protocol.CLOSE, self._number)

    async def aclose(self) -> None:
        """As ``close``, for ``contextlib.aclosing``."""
        self.close()

    def __del__(self) -> None:
        if not self._ended and not fork.forked():
            self._calls.notify(self._route, self._route.calls, protocol.CLOSE, self._number, later=True)

    def __repr__(self) -> str:
        return f"<raytorchrpc.Stream {self._label} {'ended' if self._ended else 'open'}>"

    # --- parts of an iteration -----------------------------------------------------------------------------------

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._reading.acquire(blocking=False):
            raise RayTorchRpcError(f"the stream of {self._label} is being read by another thread or task")
        try:
            yield
        finally:
            self._reading.release()

    def _request(self) -> None:
        """Ask for the next item. A lost callee shows when it is that item's turn."""
        # Free of this thread's deadline, and of the limits on calls in flight: a request may wait for long.
        before = current_scope.set(Scope(limit=Limit(time.monotonic() + MAX_TIMEOUT_S)))
        try:
            call = self._calls.send(self._route, NEXT, (self._number, self._requested), {}, self._options)
            self._requests.append(Future(call))
        except RayTorchRpcError as error:
            self._requests.append(error.with_traceback(None))
        finally:
            current_scope.reset(before)
        self._requested += 1

    def _oldest(self) -> Future[tuple[T] | None] | None:
        """The request for the next item; None after the end."""
        if self._ended:
            return None
        request = self._requests[0]
        if isinstance(request, Future):
            return request
        self.close()
        raise request

    def _taken(self, request: Future[tuple[T] | None], arrived: bool, seconds: float) -> tuple[T] | None:
        """What has arrived; None: the end. If the request failed, the stream is over."""
        if not arrived:
            raise RpcTimeout(f"{self._label} has not yielded the next item within {seconds:.3g} s")
        try:
            taken = request.result(0)
        except BaseException:
            self.close()
            raise
        finally:
            del request  # it holds the error, whose traceback holds this frame
        if taken is None:
            self._end()
            return None
        self._requests.popleft()
        if not self._ended:  # it may have been closed meanwhile
            self._request()
        return taken

    def _end(self) -> None:
        self._ended = True
        self._requests.clear()


def _arrives(request: Future[Any], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not request._settled(max(0.0, until - time.monotonic())):
        if time.monotonic() >= until:
            return False
    return True


async def _arrives_on_loop(request: Future[Any], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not (request.done() and request._settled(0)):
        left = until - time.monotonic()
        if left <= 0:
            return False
        await until_done(request, left)
    return True
