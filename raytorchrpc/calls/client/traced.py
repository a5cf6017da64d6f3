"""Outgoing calls while the group is traced."""

from __future__ import annotations

import time
from typing import Any

from raytorchrpc.calls.client.outgoing import OutgoingCall
from raytorchrpc.calls.counters import counted_name
from raytorchrpc.calls.payload import tensor_lane
from raytorchrpc.calls.spans import Span, Tracer
from raytorchrpc.lanes.base import Message
from raytorchrpc.tensors.codec import Encoded


class TracedCall(OutgoingCall):
    """Records the span of each of its requests, and those of out-of-band tensors."""

    _span: Span

    def __init__(self, tracer: Tracer, *call: Any) -> None:
        super().__init__(*call)
        self._tracer = tracer

    def send(self, args: tuple[Any, ...], kwargs: Any, timeout: float | None) -> None:
        label = f"{self._route.member.name}.{counted_name(self._method, args)}"
        span = self._span = self._tracer.call(label, self._options.caller_waits)
        self.mark = span.mark
        try:
            super().send(args, kwargs, timeout)
        except BaseException as error:
            span.end(bytes_in=0, error=type(error).__name__)
            raise
        if manifests := self._beside.manifests:
            span.beside("ship", tensor_lane(manifests) or self._lane.name, self._beside.began, self._started)

    def _receive(self, message: Message, into: Any, came_by: str) -> tuple[Encoded, Any, int, str]:
        began = time.monotonic()
        received = super()._receive(message, into, came_by)
        if message.manifests:
            self._span.beside("fetch", received[3], began)
        return received

    def _count(self, size: int, came_by: str, error: BaseException | None) -> None:
        sent, span = self._row is not None, self._span  # before the call is sent again
        super()._count(size, came_by, error)
        if sent:
            failed = {} if error is None else {"error": type(error).__name__}
            span.end(lane=self._lane.name, bytes_out=self._size, bytes_in=size, **failed)
