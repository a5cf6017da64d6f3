"""This process as a member of a group: the parts that make, serve and count its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls import rejoin
from raytorchrpc.calls.client.outgoing import OutgoingCall, OutgoingCalls
from raytorchrpc.calls.client.traced import TracedCall
from raytorchrpc.calls.counters import CallCounters, WeightCounters
from raytorchrpc.calls.flow_control import CreditWindows
from raytorchrpc.calls.options import checked_timeout, takes_timeout
from raytorchrpc.calls.payload import Payloads
from raytorchrpc.calls.peers import Member, PeerTable, process_token
from raytorchrpc.calls.server.exposed import Exposed
from raytorchrpc.calls.server.incoming import KINDS, IncomingCalls
from raytorchrpc.calls.server.served_call import Callee
from raytorchrpc.calls.server.services import Services
from raytorchrpc.calls.server.streams import SERVICES as STREAM_SERVICES
from raytorchrpc.calls.server.traced import traced_kinds
from raytorchrpc.calls.spans import Tracer
from raytorchrpc.config import GroupConfig
from raytorchrpc.lanes.base import MessageLane, TensorLane
from raytorchrpc.process import fork
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
        services: Mapping[str, Exposed] | None = None,
    ) -> None:
        """``max_bytes``: of arguments in flight to one peer. ``services``: that upper packages have every member serve.

        Raises ThreadShortage.
        """
        self.group, self.generation, self.me, self.config = group, generation, me, config
        self.max_bytes = max_bytes
        with ExitStack() as undo:
            self.deadlines = Deadlines(f"raytorchrpc-{me.name}")
            undo.callback(self.deadlines.stop)
            self.cleanup = DeferredCleanup(f"raytorchrpc-{me.name}")
            undo.callback(self.cleanup.stop)
            undo.pop_all()
        self.workers = Workers(f"raytorchrpc-{me.name}")
        self.tracer: Tracer | None = None
        """While the group is traced."""
        self.lanes: list[MessageLane] = []
        self.tensor_lanes: dict[str, TensorLane] = {}
        self.at_end: list[Callable[[], None]] = []
        """Called when this process leaves the group; short, must not raise."""
        self.before_end: list[Callable[[], None]] = []
        """Likewise, before anything is closed."""
        self.codec = Codec(ray_internals.cloudpickler())
        self.counters, self.weights = CallCounters(), WeightCounters(self._mapped)
        self.services = Services()
        self.peers = PeerTable(group, self.services)
        self.peers.has_unread = lambda: any(lane.has_unread for lane in self.lanes)
        self.payloads = Payloads(me.rank, self.tensor_lanes, self.cleanup.leave)
        self.credit = CreditWindows(config, max_bytes)
        self.outgoing = OutgoingCalls(self)
        token = process_token(generation, me.rank, me.incarnation)
        callee = Callee(me.name, instance, self, self.codec, self.payloads, self.workers, self.deadlines)
        served = {**STREAM_SERVICES, **(services or {})}
        self.incoming = IncomingCalls(token, methods, served, callee, self.peers)
        self.services.open("stream", "", lambda: callee.streams)

    def _mapped(self, peer: str) -> int:
        return sum(lane.mapped(peer) for lane in tuple(self.tensor_lanes.values()))

    def trace(self, tracer: Tracer | None) -> None:
        """Record calls from now on; None: no longer."""
        self.tracer = tracer
        self.outgoing.make = OutgoingCall if tracer is None else partial(TracedCall, tracer)
        self.incoming.kinds = KINDS if tracer is None else traced_kinds(tracer)

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
        self.outgoing.close()
        self.workers.stop()
        self.deadlines.stop()
        self.cleanup.stop()
        # Free the lanes' memory now, and not when the garbage collector finds this member, which is part of cycles.
        self.tensor_lanes.clear()
        for end in self.at_end:
            end()


class _Current:
    """Holds this process's membership, and drops it in a forked child."""

    def __init__(self) -> None:
        self.local: LocalMember | None = None
        self._parents: LocalMember | None = None

    def after_fork(self) -> tuple[()]:
        """See fork.ForkAware. Freeing the parent's membership could wait for threads that the child lacks."""
        if self.local is not None:
            self._parents, self.local = self.local, None
            fork.forked_from(f"member {self._parents.me.name!r} of group {self._parents.group!r}")
        return ()


current = _Current()
"""Its ``local`` is this process's membership, if any."""


def process_member(timeout_s: float | None = None) -> LocalMember:
    """This process's membership. Raises NotAMember, with the remedy, if there is none.

    In a restarted actor, blocks until it has rejoined its group, at most ``timeout_s`` (None: the default of a call);
    then raises RpcTimeout.
    """
    local = current.local
    if local is None:
        local = rejoin.wait(timeout_s)
    return local


def current_local() -> LocalMember | None:
    """This process's membership, or None."""
    return current.local


def set_local(local: LocalMember | None) -> None:
    """Enter or leave a group."""
    current.local = local
    if local is not None:
        fork.register(current)
    rejoin.joined(local)


@takes_timeout
def current_member(timeout: float | None = None) -> Member:
    """This process's own ``Member``. Raises NotAMember outside a group.

    In an actor that Ray has restarted, blocks until its group has taken it back, at most ``timeout`` seconds (None:
    the group's ``rpc_timeout_s``); then raises RpcTimeout. Raises NotAMember if the group has ended meanwhile, or if
    the actor's ``__init__`` is still running. On an event loop use ``await_membership``.

    Examples:
        >>> rtr.current_member().name
        'driver'
    """
    return process_member(None if timeout is None else checked_timeout(timeout)).me


async def await_membership(timeout: float | None = None) -> Member:
    """Like ``current_member``, for coroutines: ``me = await rtr.await_membership(timeout=30)``.

    Examples:
        >>> asyncio.run(rtr.await_membership(timeout=30)).name
        'driver'
    """
    checked = None if timeout is None else checked_timeout(timeout)
    local = current.local
    if local is not None:
        return local.me
    member: Member = (await asyncio.wrap_future(rejoin.awaited(checked))).me
    return member
