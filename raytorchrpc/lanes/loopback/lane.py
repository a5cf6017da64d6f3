"""The lane of a member to itself: no connection, but the same rules (private copies, one admission for each call)."""

from __future__ import annotations

from typing import ClassVar

from raytorchrpc.lanes.base import Capabilities, Message, MessageLane, Pending, Released, Serve, Spawn
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.tensors.cuda_streams import handoff_streams
from raytorchrpc.tensors.dtypes import copied


class LoopbackLane(MessageLane):
    """Serves a request in the process that makes it. Tensors are copied, unless autograd tracks them."""

    name: ClassVar[str] = "loopback"
    capabilities: ClassVar[Capabilities] = Capabilities(
        in_band_bytes=None, in_band_cuda=True, copies_at_once=True, rrefs=True
    )

    def open(self, serve: Serve, spawn: Spawn) -> None:
        self._serve, self._spawn = serve, spawn

    def call(
        self, peer: str, message: Message, timeout_s: float, *, caller_waits: bool = False, on_released: Released = None
    ) -> Pending:
        pending = Pending(on_released)
        work = self._serve(_private(message), lambda reply: pending.settle(_private(reply)))
        if work is not None:
            self._spawn(work)
        return pending


def _private(message: Message) -> Message:
    tensors = [
        tensor if tensor.requires_grad and not tensor.is_leaf else copied(tensor) for tensor in message.body.tensors
    ]
    return message._replace(body=message.body._replace(tensors=tensors), make_current=handoff_streams(tensors))


def make(setup: LaneSetup) -> LoopbackLane:
    return LoopbackLane()
