"""What calls that were sent need of the member that sent them."""

from __future__ import annotations

from typing import Any, Protocol

from raytorchrpc.calls.counters import CallCounters
from raytorchrpc.calls.future import Call
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.payload import PayloadStep
from raytorchrpc.calls.peer_table import PeerTable
from raytorchrpc.calls.peers import PeerRoute
from raytorchrpc.calls.unretrieved import UnretrievedFailures
from raytorchrpc.lanes.base import MessageLane, Pending
from raytorchrpc.process.workers import Deadlines, Workers
from raytorchrpc.tensors.codec import Codec


class Sender(Protocol):
    """See ``outgoing.OutgoingCalls``."""

    peers: PeerTable
    payloads: PayloadStep
    codec: Codec
    counters: CallCounters
    workers: Workers
    deadlines: Deadlines
    unretrieved: UnretrievedFailures

    def send(self, route: PeerRoute, method: str, args: tuple[Any, ...], kwargs: Any, options: CallOptions) -> Call:
        """Send a call once."""

    def budget(self, peer: str, method: str, timeout: float | None) -> float:
        """Seconds until the deadline of a call that is made now. Raises RpcTimeout."""

    def control(self, route: PeerRoute, lane: MessageLane, kind: int, timeout_s: float, number: int = 0) -> Pending:
        """Send a request without a body."""

    def notify(self, route: PeerRoute, lane: MessageLane, kind: int, number: int, *, later: bool = False) -> None:
        """As ``control``, but wait for no reply and ignore errors. ``later``: for finalizers."""
