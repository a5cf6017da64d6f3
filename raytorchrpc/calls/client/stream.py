"""The caller's end of a stream: an iterator over the items of a generator method."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Generic, NoReturn, TypeVar

from raytorchrpc.calls.client.future import Call, Future
from raytorchrpc.calls.options import MAX_TIMEOUT_S
from raytorchrpc.calls.scope import Limit, Scope, current_scope, refuse_on_loop
from raytorchrpc.errors import RayTorchRpcError, RpcTimeout
from raytorchrpc.process import fork
from raytorchrpc.tensors.kept_errors import again, untraced

T = TypeVar("T")

#: The method of a request for one item.
NEXT = "raytorchrpc.next"


class Stream(Generic[T]):
    """The items that a generator method yields. Returned by a direct call of such a method; iterate over it once.

    Use ``for`` or, in a coroutine, ``async for``. The generator runs at most ``ahead`` items ahead (see ``method``).
    Each item has the call's timeout: after that the iteration raises RpcTimeout, and it can be continued. An error that
    the generator raises comes after the items before it, and ends the stream. If the target is lost, PeerLost comes
    after those that have arrived.

    ``close`` ends the generator; so do dropping the stream and the end of this process. Not for several threads or
    tasks at a time.

    Examples:
        >>> list(rtr.rpc_sync("learner").count(3))
        [0, 1, 2]
    """

    _ended = True

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Stream stays in its process: pass its items, or have the other actor call the method")

    def __init__(
        self,
        label: str,
        send: Callable[[int], Call],
        budget: Callable[[], float],
        notify: Callable[..., None],
        ahead: int,
    ) -> None:
        """``send(n)`` asks the callee for item ``n``, and ``notify(later=...)`` has it close the stream, in a finalizer
        ``later``. ``budget()``: the seconds that the next item may take; raises RpcTimeout.
        """
        self._label, self._send, self._budget, self._notify = label, send, budget, notify
        self._reading = threading.Lock()
        self._requested = 0
        self._requests: deque[Future[tuple[T] | None] | RayTorchRpcError] = deque()
        self._ended = False
        for _ in range(ahead):
            self._request()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._turn():
            request = self._oldest(StopIteration)
            if not request.done():
                refuse_on_loop(f"waiting for the next item of {self._label}", "`async for`")
            seconds = self._budget()
            return self._taken(request, request._arrives(seconds), seconds, StopIteration)

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        with self._turn():
            request = self._oldest(StopAsyncIteration)
            seconds = self._budget()
            return self._taken(request, await request._arrives_on_loop(seconds), seconds, StopAsyncIteration)

    def close(self) -> None:
        """End the stream: close the generator at its next ``yield``, or cancel it at an ``await``. Idempotent.

        Items that have not been taken are dropped. Does not wait for the generator; an iteration that waits in another
        thread or task ends with it.
        """
        if not self._ended and not fork.forked():
            self._end()
            self._notify()

    async def aclose(self) -> None:
        """As ``close``, for ``contextlib.aclosing``."""
        self.close()

    def __del__(self) -> None:
        if not self._ended and not fork.forked():
            self._notify(later=True)

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
            self._requests.append(Future(self._send(self._requested)))
        except RayTorchRpcError as error:
            self._requests.append(untraced(error))
        finally:
            current_scope.reset(before)
        self._requested += 1

    def _oldest(self, end: type[Exception]) -> Future[tuple[T] | None]:
        """The request for the next item. Raises ``end`` after the last."""
        requests = self._requests  # before the look at whether it has ended: see _end
        if self._ended:
            raise end
        request = requests[0]
        if isinstance(request, Future):
            return request
        self.close()
        raise again(request)

    def _taken(self, request: Future[tuple[T] | None], arrived: bool, seconds: float, end: type[Exception]) -> T:
        """The item that has arrived; raises ``end`` after the last. If the request failed, the stream is over."""
        if not arrived:
            raise RpcTimeout(f"{self._label} has not yielded the next item within {seconds:.3g} s")
        try:
            taken = request.result(0)
        except BaseException:
            if self._ended:  # it was closed meanwhile, which may cancel the generator
                raise end from None
            self.close()
            raise
        requests = self._requests
        if taken is None or self._ended:
            self._end()
            raise end
        requests.popleft()
        self._request()
        return taken[0]

    def _end(self) -> None:
        self._ended = True
        self._requests = deque()  # another thread may be about to use the one before
