"""The serving side of one member, and the methods that it exposes, without a group and without Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from raytorchrpc.calls.payload import Payloads
from raytorchrpc.calls.peers import Member, PeerRoute, PeerTable
from raytorchrpc.calls.rejoin import Awaited, Rejoin
from raytorchrpc.calls.server.exposed import Exposed, in_turn, methods_of
from raytorchrpc.calls.server.gates import Gate
from raytorchrpc.calls.server.incoming import IncomingCalls
from raytorchrpc.calls.server.served_call import Callee
from raytorchrpc.calls.server.services import DeferredReply, Services
from raytorchrpc.calls.server.streams import ServedStream
from raytorchrpc.lanes.base import TensorLane
from raytorchrpc.process.workers import Deadlines, Workers
from raytorchrpc.tensors.codec import Codec

__all__ = [
    "TOKEN",
    "Awaited",
    "Deadlines",
    "DeferredReply",
    "Exposed",
    "Gate",
    "Rejoin",
    "deferred",
    "exposed",
    "in_turn",
    "make_callee",
    "methods_of",
]

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
        peers.add_peer(PeerRoute(Member(rank, f"caller {rank}", None, "node", 0, "", rank + 1), unused, unused))
    payloads = Payloads(99, tensor_lanes or {})
    workers = Workers("test")
    callee = Callee("callee", None, local, codec, payloads, workers, deadlines)
    return IncomingCalls(TOKEN, methods or {}, {}, callee, peers)


def exposed(function: Callable[..., Any], **options: Any) -> Exposed:
    """A method as ``@rtr.method(concurrent=True)`` exposes it; ``options`` are other fields of ``Exposed``. With
    ``ahead`` it is a generator.
    """
    if "ahead" in options:
        options["call"] = ServedStream
    return Exposed(function, **{"concurrent": True, **options})


def deferred(reply: object) -> DeferredReply:
    """The reply of a service that waits."""
    assert isinstance(reply, DeferredReply), reply
    return reply
