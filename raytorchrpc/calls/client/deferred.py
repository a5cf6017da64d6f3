"""Calls made in a restarted actor before it has rejoined its group: sent as soon as it has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from raytorchrpc.calls import rejoin
from raytorchrpc.calls.client.future import call_back
from raytorchrpc.calls.client.outgoing import LOST, OutgoingCall
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.peers import PeerRoute
from raytorchrpc.calls.scope import on_loop
from raytorchrpc.errors import RpcTimeout
from raytorchrpc.process import threads
from raytorchrpc.process.completion import Completion
from raytorchrpc.process.workers import process_deadlines


def call(target: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> OutgoingCall:
    """As ``OutgoingCalls.call``. Blocks until this process is a member, except for ``rpc_async`` on an event loop."""
    if not options.caller_waits and on_loop():
        return DeferredCall(target, method, args, kwargs, options)
    local, left = rejoin.wait(options.timeout)
    sent: OutgoingCall = local.outgoing.call(target, method, args, kwargs, options._replace(timeout=left))
    return sent


def remote(target: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None) -> Any:
    """As ``OutgoingCalls.remote``. Blocks until this process is a member."""
    local, left = rejoin.wait(timeout)
    return local.outgoing.remote(target, method, args, kwargs, left)


class DeferredCall(OutgoingCall):
    """A call that waits for this process to become a member. A worker sends it then, as one whose peer was lost."""

    cancellable = True
    _phase = LOST
    _route: Any = None
    """Once it is being sent."""
    _is_member = False

    def __init__(self, target: Any, method: str, args: tuple[Any, ...], kwargs: Any, options: CallOptions) -> None:
        self._method, self._options, self._lock = method, options, threading.Lock()
        self._since, self._pending = time.monotonic(), Completion()
        self._keep(args, kwargs, target)
        rejoin.awaited(options.timeout).add_done_callback(self._joined)

    def _joined(self, awaited: Any) -> None:
        if (error := awaited.exception()) is not None:
            self._end_sending(self._pending, error)
            return
        self._calls = awaited.result().outgoing
        self._deadline = time.monotonic() + rejoin.left_of(awaited.result(), self._options.timeout, self._since)
        self._is_member = True
        self._calls.submit_repeat(self._send_again, self._pending)

    def _next_route(self) -> PeerRoute | None:
        if self._route is not None:
            return super()._next_route()
        route = self._calls.peers.route_for_call(self._target)
        self._retries = self._options.retries(route.retries, self._method)
        return route

    @property
    def label(self) -> str:
        return f"{self._target}.{self._method}"

    def remaining(self) -> float:
        if self._is_member:
            return super().remaining()
        return max(0.0, self._since + rejoin.patience(self._options.timeout) - time.monotonic())

    def _late(self) -> RpcTimeout:
        if self._error is not None or self._phase is not LOST:
            return super()._late()
        return RpcTimeout(f"{self.label} was not sent by its deadline: {rejoin.why_late(self._since)}")

    def at_deadline(self, callback: Callable[[], None]) -> Callable[[], None]:
        return process_deadlines().at(time.monotonic() + self.remaining(), callback)

    def run_callback(self, callback: Callable[[Any], object], argument: Any) -> None:
        threads.start(call_back, callback, argument, name="raytorchrpc-deferred-callback")
