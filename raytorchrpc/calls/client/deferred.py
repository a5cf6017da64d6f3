"""Calls made in a restarted actor before it has rejoined its group: sent as soon as it has."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any

from raytorchrpc.calls import rejoin
from raytorchrpc.calls.client.future import Call, call_back
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.scope import on_loop
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import CancelledError, RayTorchRpcError, RpcTimeout
from raytorchrpc.process import threads
from raytorchrpc.process.workers import Deadlines


@functools.cache
def _deadlines() -> Deadlines:
    return Deadlines("raytorchrpc-deferred")  # its thread starts with the first deferred call


def call(target: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Call:
    """As ``OutgoingCalls.call``. Blocks until this process is a member, except for ``rpc_async`` on an event loop."""

    def send(local: Any, timeout: float | None) -> Call:
        sent: Call = local.outgoing.call(target, method, args, kwargs, options._replace(timeout=timeout))
        return sent

    if not options.caller_waits and on_loop():
        return DeferredCall(f"{target}.{method}", send, options.timeout)
    return send(*rejoin.wait(options.timeout))


def remote(target: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None) -> Any:
    """As ``OutgoingCalls.remote``. Blocks until this process is a member."""
    local, left = rejoin.wait(timeout)
    return local.outgoing.remote(target, method, args, kwargs, left)


class DeferredCall(Call):
    """A call that waits for this process to become a member.

    It is sent by the event loop that it was made on, or by a thread that waits for it, whichever comes first.
    """

    cancellable = True

    def __init__(self, label: str, send: Callable[[Any, float | None], Call], timeout: float | None) -> None:
        self._label, self._send, self._timeout = label, send, timeout
        self._started = time.monotonic()
        self._context = copy_context()  # the call stays in its chain of calls and keeps its deadline
        self._sending = threading.Lock()
        self._sent = DeferredReply()
        """Settled with the call, or with the error that keeps it from being sent."""
        loop = asyncio.get_running_loop()

        def wake(_: object) -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile: nothing waits any more
                loop.call_soon_threadsafe(self._send_once)

        self._member = rejoin.awaited(timeout)
        self._member.add_done_callback(wake)

    def _send_once(self) -> None:
        if not self._sending.acquire(blocking=False):  # never released: it is sent once
            return
        try:
            local = self._member.result(0)
            call = self._context.run(self._send, local, rejoin.left_of(local, self._timeout, self._started))
        except BaseException as error:
            self._sent.settle(None, error.with_traceback(None))
            if not isinstance(error, RayTorchRpcError):
                raise
        else:
            self._sent.settle(call)

    @property
    def _call(self) -> Call | None:
        """The call, once it has been sent."""
        return self._sent.result(0) if self._sent.done() and self._sent.exception(0) is None else None

    @property
    def label(self) -> str:
        return self._label

    def remaining(self) -> float:
        call = self._call
        if call is not None:
            return call.remaining()
        return max(0.0, self._started + rejoin.patience(self._timeout) - time.monotonic())

    def wait(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        if not self._member.wait(timeout_s):
            return False
        self._send_once()
        if not self._sent.wait(max(0.0, until - time.monotonic())):
            return False
        call = self._call
        return call is None or call.wait(max(0.0, until - time.monotonic()))

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        def follow(_: object) -> None:
            call = self._call
            if call is None:
                callback()
            else:
                call.add_done_callback(callback)

        self._sent.add_done_callback(follow)

    def outcome(self) -> tuple[Any, BaseException | None] | None:
        call = self._call
        return (None, self._sent.exception(0)) if call is None else call.outcome()

    def cancel(self) -> None:
        if self._sending.acquire(blocking=False):  # never to be sent
            self._sent.settle(None, CancelledError(f"the call of {self._label} was cancelled"))
            return

        def follow(_: object) -> None:
            if (call := self._call) is not None:
                call.cancel()

        self._sent.add_done_callback(follow)

    def forget_failure(self) -> None:
        if (call := self._call) is not None:
            call.forget_failure()

    def expire(self) -> tuple[None, RpcTimeout]:
        call = self._call
        if call is not None:
            return call.expire()
        return None, RpcTimeout(f"{self._label} was not sent by its deadline: {rejoin.why_late(self._started)}")

    def at_deadline(self, callback: Callable[[], None]) -> Callable[[], None]:
        return _deadlines().at(time.monotonic() + self.remaining(), callback)

    def run_callback(self, callback: Callable[[Any], object], argument: Any) -> None:
        call = self._call
        if call is not None:
            call.run_callback(callback, argument)
        else:
            threads.start(call_back, callback, argument, name="raytorchrpc-deferred-callback")
