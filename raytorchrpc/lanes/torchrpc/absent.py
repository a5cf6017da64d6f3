"""What stands where torchrpc would, between members that may not use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.base import Capabilities, Message, MessageLane, PeerAddress, Pending, Serve, Spawn


class AbsentLane(MessageLane):
    """Refuses every call, with the reason."""

    name: ClassVar[str] = "torchrpc"
    capabilities: ClassVar[Capabilities] = Capabilities(
        in_band_bytes=0, in_band_cuda=False, copies_at_once=True, rrefs=False
    )

    def __init__(self, reason: str) -> None:
        """``reason``: why torchrpc is not used."""
        self._reason = reason

    def _refuse(self) -> NoReturn:
        raise LaneUnavailable(
            self.name,
            f"{self._reason}; RRefs, distributed autograd, and tensors that no other lane takes need it: allow it in "
            "GroupConfig.lanes",
        )

    def open(self, serve: Serve, spawn: Spawn) -> None:
        """Nothing to do."""

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        """Nothing to do."""

    def call(
        self,
        peer: str,
        message: Message,
        timeout_s: float,
        *,
        caller_waits: bool = False,
        on_released: Callable[[], None] | None = None,
    ) -> Pending:
        self._refuse()

    def remote(self, peer: str, message: Message, timeout_s: float) -> Any:
        """See TorchRpcLane."""
        self._refuse()

    def disconnect(self, peer: str) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""
