"""Calls made in a restarted actor before it has rejoined its group: sent as soon as it has."""

from __future__ import annotations

import asyncio
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
from raytorchrpc.errors import CancelledError, RayTorchRpcError, RpcTimeout
from raytorchrpc.process import threads
from raytorchrpc.process.completion import Completion
from raytorchrpc.process.workers import process_deadlines


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
    _call: Call | None = None
    """Once it has been sent."""
    _error: BaseException | None = None

    def __init__(self, label: str, send: Callable[[Any, float | None], Call], timeout: float | None) -> None:
        self._label, self._send, self._timeout = label, send, timeout
        self._started = time.monotonic()
        self._context = copy_context()  # the call stays in its chain of calls and keeps its deadline
        self._sending = threading.Lock()
        self._sent = Completion()
        """Complete with the call, or with the error that keeps it from being sent."""
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
            self._settle(None, error.with_traceback(None))
            if not isinstance(error, RayTorchRpcError):
                raise
        else:
            self._settle(call)

    def _settle(self, call: Call | None, error: BaseException | None = None) -> None:
        self._call, self._error = call, error
        self._sent.complete()

    def _when_sent(self, follow: Callable[[Call | None], object]) -> None:
        """Call ``follow`` with the call, or with None if it will not be sent."""
        self._sent.add_done_callback(lambda: follow(self._call))

    @property
    def label(self) -> str:
        return self._label

    def remaining(self) -> float:
        if self._call is not None:
            return self._call.remaining()
        return max(0.0, self._started + rejoin.patience(self._timeout) - time.monotonic())

    def wait(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        if not self._member.wait(timeout_s):
            return False
        self._send_once()
        if not self._sent.wait(max(0.0, until - time.monotonic())):
            return False
        return self._call is None or self._call.wait(max(0.0, until - time.monotonic()))

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._when_sent(lambda call: callback() if call is None else call.add_done_callback(callback))

    def outcome(self) -> tuple[Any, BaseException | None] | None:
        return (None, self._error) if self._call is None else self._call.outcome()

    def cancel(self) -> None:
        if self._sending.acquire(blocking=False):  # never to be sent
            self._settle(None, CancelledError(f"the call of {self._label} was cancelled"))
        else:
            self._when_sent(lambda call: None if call is None else call.cancel())

    def forget_failure(self) -> None:
        if self._call is not None:
            self._call.forget_failure()

    def expire(self) -> tuple[None, RpcTimeout]:
        if self._call is not None:
            return self._call.expire()
        return None, RpcTimeout(f"{self._label} was not sent by its deadline: {rejoin.why_late(self._started)}")

    def at_deadline(self, callback: Callable[[], None]) -> Callable[[], None]:
        return process_deadlines().at(time.monotonic() + self.remaining(), callback)

    def run_callback(self, callback: Callable[[Any], object], argument: Any) -> None:
        if self._call is not None:
            self._call.run_callback(callback, argument)
        else:
            threads.start(call_back, callback, argument, name="raytorchrpc-deferred-callback")
