"""Served calls while the group is traced."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from raytorchrpc.calls.payload import tensor_lane
from raytorchrpc.calls.server.served_call import ServedCall
from raytorchrpc.calls.server.streams import ItemRequest, ServedStream
from raytorchrpc.calls.spans import Tracer
from raytorchrpc.lanes.base import Message
from raytorchrpc.tensors.codec import Encoded


class TracedCall(ServedCall):
    """Records its span, and those of out-of-band tensors."""

    def __init__(self, tracer: Tracer, *call: Any) -> None:
        super().__init__(*call)
        self._span = tracer.served(self.label, self.mark)
        self._packed_at = 0.0

    def answer_cancelled(self) -> None:
        self._span.end()
        super().answer_cancelled()

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._span.begin()
        return super()._arguments()

    def _unpacked(self, message: Message) -> Encoded:
        body = super()._unpacked(message)
        if (came_by := tensor_lane(message.manifests)) is not None:
            self._span.beside("fetch", came_by, self._span.began)
        return body

    def _answer(self, body: Encoded, result: Any) -> None:
        self._packed_at = time.monotonic()
        super()._answer(body, result)

    def reply(self, message: Message) -> None:
        if (sent_by := tensor_lane(message.manifests)) is not None:
            self._span.beside("ship", sent_by, self._packed_at)
        self._span.end()
        super().reply(message)


class _TracedStream(TracedCall, ServedStream):
    """Its span ends when the stream is open."""


class _TracedRequest(TracedCall, ItemRequest):
    """Its span ends when the item is sent."""


def traced_kinds(tracer: Tracer) -> Mapping[Any, Callable[..., ServedCall]]:
    """``incoming.KINDS`` that record their spans."""
    kinds = {None: TracedCall, ServedStream: _TracedStream, ItemRequest: _TracedRequest}
    return {kind: partial(traced, tracer) for kind, traced in kinds.items()}
