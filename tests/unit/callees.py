"""The serving side of one member, without a group and without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from raytorchrpc.calls.exposed import Exposed
from raytorchrpc.calls.incoming import IncomingCalls
from raytorchrpc.calls.job import Callee
from raytorchrpc.calls.out_of_band import PayloadSplitter
from raytorchrpc.calls.payload import PayloadStep
from raytorchrpc.calls.peer_table import PeerTable
from raytorchrpc.calls.peers import Member, PeerRoute
from raytorchrpc.calls.replies import Replies
from raytorchrpc.calls.services import Services
from raytorchrpc.lanes.base import TensorLane
from raytorchrpc.process.workers import Deadlines, DeferredCleanup, Workers
from raytorchrpc.tensors.codec import Codec

TOKEN = "1"
"""Of the callee's process."""


def make_callee(
    deadlines: Deadlines,
    methods: Mapping[str, Exposed] | None = None,
    tensor_lanes: Mapping[str, TensorLane] | None = None,
    *,
    local: Any = None,
    callers: int = 8,
) -> IncomingCalls:
    """A member named ``callee`` that serves these methods. Its callers have the ranks below ``callers``."""
    peers, codec, unused = PeerTable("group", Services()), Codec(), cast("Any", None)
    for rank in range(callers):
        peers.add_peer(PeerRoute(Member(rank, f"caller {rank}", None, "node", 0, "", rank + 1), unused, unused, unused))
    payloads = PayloadStep(99, PayloadSplitter(tensor_lanes or {}), cast("DeferredCleanup", None))
    replies = Replies("callee", codec, deadlines)
    workers = Workers("test")
    callee = Callee("callee", None, local, codec, payloads, replies, workers, deadlines)
    return IncomingCalls(TOKEN, methods or {}, callee, peers)
