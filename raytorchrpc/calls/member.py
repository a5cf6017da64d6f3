"""This process as a member of a group: the parts that make, serve and count its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
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
from raytorchrpc.calls.scope import current_scope
from raytorchrpc.calls.server.exposed import Exposed
from raytorchrpc.calls.server.incoming import KINDS, IncomingCalls
from raytorchrpc.calls.server.served_call import Callee
from raytorchrpc.calls.server.services import Services
from raytorchrpc.calls.server.streams import SERVICES as STREAM_SERVICES
from raytorchrpc.calls.server.traced import traced_kinds
from raytorchrpc.calls.spans import Tracer
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError, NotAMember
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
        self.deadlines = Deadlines()
        try:
            self.cleanup = DeferredCleanup()
        except BaseException:
            self.deadlines.stop()
            raise
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
    """Holds this process's memberships, and drops them in a forked child."""

    def __init__(self) -> None:
        self.local: LocalMember | None = None
        """The membership, if it is the only group that this process uses. Calls look no further. Hot path."""
        self.members: Mapping[str, LocalMember] = {}
        """All memberships, by generation, in the order in which this process joined. Replaced when they change."""
        self.clients: frozenset[str] = frozenset()
        """The generations of the groups that this process may join as a client; see ``clients.OwnGroups``."""
        self._parents: Any = None

    def change(self, members: Mapping[str, LocalMember] | None = None, clients: Iterable[str] | None = None) -> None:
        """Set either; None: as before. Quick."""
        if members is not None:
            self.members = members
        if clients is not None:
            self.clients = frozenset(clients)
        used = self.members.keys() | self.clients | rejoin.pending()
        self.local = next(iter(self.members.values())) if self.members and len(used) == 1 else None

    def after_fork(self) -> tuple[()]:
        """See fork.ForkAware. Freeing the parent's memberships could wait for threads that the child lacks."""
        for local in self.members.values():
            fork.forked_from(f"member {local.me.name!r} of group {local.group!r}")
        self._parents, self.members, self.local = (self._parents, self.members), {}, None
        return ()


current = _Current()
rejoin.changed = current.change


def set_locals(*locals_: LocalMember) -> None:
    """These are this process's memberships from now on, in the order in which it joined."""
    current.change({local.generation: local for local in locals_})
    if locals_:
        fork.register(current)
    rejoin.joined(locals_)


def memberships(group: str | None = None) -> list[LocalMember]:
    """This process's memberships that an operation may mean.

    ``group``: a name or a generation. None: any; if there are others, none whose name begins with an underscore, as it
    is a library's.
    """
    if group is None:
        locals_ = [*current.members.values()]
        return [local for local in locals_ if not local.group.startswith("_")] or locals_
    return [local for local in current.members.values() if group in (local.generation, local.group)]


def membership(group: str | None = None) -> LocalMember | None:
    """This process's membership in that group; None: in the group whose call this thread serves, or in the only one.

    ``group``: a name or a generation. None if it is in no such group, or is about to rejoin one that may be meant.
    Raises ConfigurationError if it is in several.
    """
    if group is None and (served := current.members.get(current_scope.get().group)) is not None:
        return served
    if group is None and rejoin.pending():
        return None
    candidates = memberships(group)
    if len(candidates) > 1:
        raise ConfigurationError(f"this process is in {_named(candidates)}: say which, {_example(candidates)}")
    return candidates[0] if candidates else None


def reaching(target: Any, group: str | None = None) -> LocalMember | None:
    """The membership by which this process reaches ``target``; None if it is in no group that is known to have it, or
    is about to rejoin one that may be meant.

    A handle or a Member is found in whichever group has it. A name means, without ``group``, a member of the group
    whose call this thread serves, or of the only group that has the name; a rank that of the served group, or of the
    only group. Raises ConfigurationError where that leaves several.
    """
    known = target.group or group if isinstance(target, Member) else group
    candidates = [*current.members.values()] if known is None else memberships(known)
    having = [local for local in candidates if local.peers.known(target) is not None]
    if group is None and (served := current.members.get(current_scope.get().group)) in having:
        return served
    if isinstance(target, (int, str)):
        if group is None and rejoin.pending():
            return None
        is_rank = isinstance(target, int) or target.isdecimal()
        if group is None:  # first of all it means the program's
            candidates = memberships()
            having = [local for local in having if local in candidates] or ([] if is_rank else having)
        several = candidates if is_rank and having else having
        if len(several) > 1:
            which = f"a rank in each of {_named(several)}" if is_rank else f"a member of {_named(several)}"
            raise ConfigurationError(
                f"{target!r} is {which}: say which, {_example(several)}, or pass an actor handle or a Member"
            )
    return having[0] if having else None


def awaiting(target: Any, timeout_s: float | None, group: str | None = None) -> LocalMember:
    """The membership in which ``target``, which none is known to have, has been announced meanwhile.

    Raises NotAMember; see ``PeerTable.route_for_call``.
    """
    candidates = memberships(group)
    if len(candidates) == 1:
        return candidates[0]  # which looks for it by itself
    for local in candidates:
        with suppress(NotAMember):
            local.peers.route_for_call(target, timeout_s)
            return local
    if not candidates:
        raise NotAMember(_not_in(group))
    raise NotAMember(f"{target!r} is in none of this process's {_named(candidates)}")


def resolved(waited: LocalMember, target: Any, group: str | None = None) -> LocalMember:
    """The membership, or client, by which an operation reaches ``target`` after a wait for one: ``waited``."""
    if len(current.members) < 2 or waited.generation not in current.members:
        return waited
    return reaching(target, group) or awaiting(target, None, group)


def _not_in(group: str | None) -> str:
    there = _named([*current.members.values()]) if current.members else "none"
    return f"this process is in no group {group!r}; it is in {there}"


def _named(locals_: Sequence[LocalMember]) -> str:
    names = [repr(local.group) for local in locals_]
    return f"group {names[0]}" if len(names) == 1 else f"groups {', '.join(names[:-1])} and {names[-1]}"


def _example(locals_: Sequence[LocalMember]) -> str:
    return f"group={locals_[0].group!r}"


def process_member(timeout_s: float | None = None, group: str | None = None) -> LocalMember:
    """This process's membership; see ``membership``. Raises NotAMember, with the remedy, if there is none.

    In a restarted actor, blocks until it has rejoined its group, at most ``timeout_s`` (None: the default of a call);
    then raises RpcTimeout.
    """
    if (local := current.local) is not None and group is None:
        return local
    if (local := membership(group)) is None and (not current.members or rejoin.pending()):
        waited: LocalMember = rejoin.wait(timeout_s)
        local = waited if group is None and len(current.members) < 2 else membership(group)
    if local is None:
        raise NotAMember(_not_in(group))
    return local


@takes_timeout
def current_member(timeout: float | None = None, *, group: str | None = None) -> Member:
    """This process's own ``Member``. Raises NotAMember outside a group.

    In an actor that Ray has restarted, blocks until its group has taken it back, at most ``timeout`` seconds (None:
    the group's ``rpc_timeout_s``); then raises RpcTimeout. Raises NotAMember if the group has ended meanwhile, or if
    the actor's ``__init__`` is still running. On an event loop use ``await_membership``.

    Args:
        timeout: see above.
        group: the group's name. None: that of the call that this thread serves, or the only one that this process is
            in; in several groups raises ConfigurationError.

    Examples:
        >>> rtr.current_member().name
        'driver'
    """
    return process_member(None if timeout is None else checked_timeout(timeout), group).me


async def await_membership(timeout: float | None = None, *, group: str | None = None) -> Member:
    """Like ``current_member``, for coroutines: ``me = await rtr.await_membership(timeout=30)``.

    Examples:
        >>> asyncio.run(rtr.await_membership(timeout=30)).name
        'driver'
    """
    checked = None if timeout is None else checked_timeout(timeout)
    if not current.members or rejoin.pending():
        await asyncio.wrap_future(rejoin.awaited(checked))
    return process_member(checked, group).me
