"""This process as a member of a group: the parts that make, serve and count its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.counters import CallCounters
from raytorchrpc.calls.exposed import Exposed
from raytorchrpc.calls.flow_control import CreditWindows
from raytorchrpc.calls.guests import Guests
from raytorchrpc.calls.incoming import IncomingCalls
from raytorchrpc.calls.job import Callee
from raytorchrpc.calls.out_of_band import PayloadSplitter
from raytorchrpc.calls.outgoing import OutgoingCalls
from raytorchrpc.calls.payload import PayloadStep
from raytorchrpc.calls.peer_table import PeerTable
from raytorchrpc.calls.peers import Member, process_token
from raytorchrpc.calls.replies import Replies
from raytorchrpc.calls.services import Services
from raytorchrpc.calls.spans import Tracer
from raytorchrpc.calls.weight_counters import WeightCounters
from raytorchrpc.config import GroupConfig
from raytorchrpc.lanes.base import MessageLane, TensorLane, windows
from raytorchrpc.process.workers import Deadlines, DeferredCleanup, Workers
from raytorchrpc.tensors.codec import Codec


class LocalMember:
    """This process's membership in one group. It holds the parts; each part does one task and is thread-safe."""

    def __init__(
        self,
        group: str,
        generation: str,
        me: Member,
        config: GroupConfig,
        instance: Any,
        methods: Mapping[str, Exposed],
        max_bytes: int,
    ) -> None:
        """``max_bytes``: of arguments in flight to one peer. Raises ThreadShortage."""
        self.group, self.generation, self.me, self.config = group, generation, me, config
        self.max_bytes = max_bytes
        self.step = 0
        """The last change of the group that has taken effect here."""
        with ExitStack() as undo:
            self.deadlines = Deadlines(f"raytorchrpc-{me.name}")
            undo.callback(self.deadlines.stop)
            self.cleanup = DeferredCleanup(f"raytorchrpc-{me.name}")
            undo.callback(self.cleanup.stop)
            self.workers = Workers(f"raytorchrpc-{me.name}", keep=True, deadlines=self.deadlines)
            undo.pop_all()
        self.lanes: list[MessageLane] = []
        self.tensor_lanes: dict[str, TensorLane] = {}
        self.at_end: list[Callable[[], None]] = []
        """Called when this process leaves the group; short, must not raise."""
        self.before_end: list[Callable[[], None]] = []
        """Likewise, before anything is closed."""
        self.codec = Codec(ray_internals.cloudpickler())
        self.counters, self.weights = CallCounters(), WeightCounters(self._mapped)
        self.services = Services()
        guests = Guests(lambda rank: self.services.lose(rank, ended=True), self.deadlines)
        self.peers = PeerTable(group, self.services, guests)
        self.payloads = PayloadStep(me.rank, PayloadSplitter(self.tensor_lanes, self.cleanup.leave), self.cleanup)
        self.credit = CreditWindows(config, max_bytes)
        self.outgoing = OutgoingCalls(
            me.rank,
            config.rpc_timeout_s,
            self.peers,
            self.payloads,
            self.codec,
            self.credit,
            self.counters,
            self.workers,
            self.deadlines,
        )
        self.replies = Replies(me.name, self.codec, self.deadlines)
        token = process_token(generation, me.rank, me.incarnation)
        callee = Callee(me.name, instance, self, self.codec, self.payloads, self.replies, self.workers, self.deadlines)
        self.incoming = IncomingCalls(token, methods, callee, self.peers)
        self.services.open("stream", "", lambda: callee.streams)

    def _mapped(self, peer: str) -> int:
        return sum(lane.mapped(peer) for lane in windows(self.tensor_lanes))

    @property
    def tracer(self) -> Tracer | None:
        """While the group is traced."""
        return self.outgoing.tracer

    def trace(self, tracer: Tracer | None) -> None:
        """Record calls from now on; None: no longer."""
        self.outgoing.tracer = self.incoming.tracer = tracer

    def leave(self) -> None:
        """Stop serving and calling. Idempotent, bounded, never raises."""
        for begin in self.before_end:
            begin()
        self.peers.close()
        everything: list[MessageLane | TensorLane] = [*self.lanes, *self.tensor_lanes.values()]
        for lane in everything:
            with suppress(Exception):
                lane.close()
        self.services.close()
        self.replies.close()
        self.workers.stop()
        self.deadlines.stop()
        self.cleanup.stop()
        # Free the lanes' memory now, and not when the garbage collector finds this member, which is part of cycles.
        self.tensor_lanes.clear()
        for end in self.at_end:
            end()
