"""The callee's end of streams: generator methods that run as their callers ask for items."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any

from raytorchrpc.calls.client.stream import NEXT
from raytorchrpc.calls.options import MAX_TIMEOUT_S
from raytorchrpc.calls.protocol import OK, REMOTE, STREAM
from raytorchrpc.calls.scope import allow_calls, wait_serving
from raytorchrpc.calls.server.exposed import Exposed
from raytorchrpc.calls.server.served_call import ServedCall, complete
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import ConfigurationError, RpcTimeout
from raytorchrpc.lanes.base import Message
from raytorchrpc.process.locks import Lock
from raytorchrpc.tensors import thread_modes
from raytorchrpc.tensors.codec import NOTHING

logger = logging.getLogger(__name__)


class ServedStream(ServedCall):
    """A call of a generator method. It replies at once, with the number of the stream.

    From then on it answers requests for items, and advances the generator only for a request, until the generator ends
    or the stream is closed. Between two items it lends its admission, as any method that waits. A stream without a
    request by the call's deadline is closed.
    """

    _number: int | None = None
    _generator: Any = None
    _is_stepping = False
    _is_closed = False
    _position = 0
    _awaited: DeferredReply | None = None
    """Settled when there is a request for the next item, or when the stream is closed."""

    def __init__(self, *call: Any) -> None:
        super().__init__(*call)
        self._lock = Lock()
        self._requests: dict[int, ItemRequest] = {}
        """By the positions of the items."""

    # --- for the caller's requests -----------------------------------------------------------------------------------

    def request(self, position: int, request: ItemRequest) -> bool:
        """Take a request for an item; False if the stream is closed."""
        with self._lock:
            if self._is_closed:
                return False
            self._requests[position] = request
            awaited = self._awaited if position == self._position else None
        if awaited is not None:
            awaited.settle(None)
        return True

    def close(self) -> None:
        """End the stream as soon as the generator yields. A coroutine is cancelled where it awaits. Quick."""
        with self._lock:
            self._is_closed = True
            awaited = self._awaited
        if awaited is not None:
            awaited.settle(None)
        self._on_its_loop(self._cancel_step)

    def _cancel_step(self) -> None:
        if self._is_stepping and self._task is not None:
            self._task.cancel(f"the caller of {self.label} closed its stream")

    # --- running the generator ---------------------------------------------------------------------------------------

    def _call(self) -> Coroutine[Any, Any, None] | None:
        self._open()
        if self._task is not None:
            return self._answer_requests()
        # Once for all items: what the generator sets for itself stays while it is suspended at a yield.
        thread_modes.run(complete, self._answer_requests())
        return None

    async def _answer_requests(self) -> None:
        try:
            while (request := await self._next_request()) is not None:
                self._is_stepping = True
                try:
                    item = (await _next(self._generator),)
                except BaseException as error:
                    self._send_end(request, error)
                    break
                finally:
                    self._is_stepping = False
                if not self._send_item(request, item):
                    break
                del request, item
        finally:
            self._finish()
            try:
                await _close(self._generator)
            except BaseException:
                logger.exception("%s raised when its stream was closed", self.label)

    def _open(self) -> None:
        """Make the generator, which does not begin to run, and reply."""
        if self.kind == REMOTE:
            raise ConfigurationError(f"{self.label} is a generator: call it with rpc_sync or rpc_async")
        self._generator = self._invoked()
        self._number = self.callee.streams.add(self)
        try:
            self.reply(Message((STREAM, self._number, self.exposed.ahead), NOTHING))
        except BaseException:
            self._finish()
            raise

    def _look(self) -> ItemRequest | DeferredReply | None:
        """The request for the next item; None if the stream is closed; else what is settled when that changes."""
        with self._lock:
            if self._is_closed:
                return None
            request = self._requests.pop(self._position, None)
            if request is None:
                self._awaited = DeferredReply()
                return self._awaited
        self.limit.at = time.monotonic() + self.seconds  # each item has the call's whole time
        return request

    def _patience(self) -> float:
        """How long to wait for a request: the caller may take its time once it has begun (seconds)."""
        deadline = self.scope.deadline
        return MAX_TIMEOUT_S if self._position or deadline is None else max(0.0, deadline - time.monotonic())

    async def _next_request(self) -> ItemRequest | None:
        with allow_calls():  # those that wait already, as in any wait; the next request may be here
            pass
        while isinstance(request := self._look(), DeferredReply):
            done: Any
            if self._task is None:
                done = wait_serving(request, self._patience())
            else:
                done, _ = await asyncio.wait([asyncio.wrap_future(request)], timeout=self._patience())
            if not done and not self._position:
                return None
        return request

    def _send_item(self, request: ItemRequest, item: Any) -> bool:
        """Answer a request with an item; False if that failed."""
        # The reply as for this method, and with its name in errors.
        request.exposed, request.label, request.scope = self.exposed, self.label, self.scope
        try:
            request._answer(request._encoded(item), None)
        except BaseException as error:
            request._refuse(error)
            return False
        with self._lock:
            self._position += 1
        return True

    def _send_end(self, request: ItemRequest, error: BaseException) -> None:
        if isinstance(error, StopAsyncIteration):
            request.end()
        else:
            request._refuse(error)

    def _finish(self) -> None:
        """Answer the requests that are left."""
        with self._lock:
            self._is_closed = True
            unanswered, self._requests = list(self._requests.values()), {}
        if self._number is not None:
            self.callee.streams.pop(self._number, None)
        for request in unanswered:
            request.end()


class ItemRequest(ServedCall):
    """A request for one item. The stream answers it."""

    def _call(self) -> None:
        (number, position), _ = self._arguments()
        stream = self.callee.streams.get(number)
        if stream is None or not stream.request(position, self):
            raise RpcTimeout(
                f"{self.callee.name} has ended this stream: its caller did not begin to read it by the deadline of the "
                f"call, or was cut off; call again, and read sooner or with a longer timeout="
            )

    def _explained(self, result: Any, error: Exception) -> str:
        return self.callee.codec.explain(f"an item of {self.label}", result[0], error)

    def end(self) -> None:
        """Reply that there are no more items. Does not raise."""
        self.callee.replies.send(self.reply, lambda: Message((OK,), NOTHING))


async def _next(generator: Generator[Any, None, None] | AsyncGenerator[Any, None]) -> Any:
    if isinstance(generator, AsyncGenerator):
        return await generator.__anext__()
    try:
        return next(generator)
    except StopIteration:
        raise StopAsyncIteration from None  # a coroutine may not raise the other
    except StopAsyncIteration as error:  # it is no end here
        raise RuntimeError("generator raised StopAsyncIteration") from error


async def _close(generator: Generator[Any, None, None] | AsyncGenerator[Any, None]) -> None:
    if isinstance(generator, AsyncGenerator):
        await generator.aclose()
    else:
        generator.close()


def _never(*_: Any) -> None:
    raise AssertionError("an ItemRequest answers itself")


SERVICES = {NEXT: Exposed(_never, concurrent=True, service=True, call=ItemRequest)}
