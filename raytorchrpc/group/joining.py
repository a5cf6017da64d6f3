"""A process joins a group by itself: as a member with a ticket (see ``tickets``), or as a client of ``calls.clients``.

It listens, and tells the supervisor where, which then has it join as it does with a restarted actor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
import uuid
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import ray

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls import protocol, rejoin
from raytorchrpc.calls.clients import member_of
from raytorchrpc.calls.member import LocalMember, current, memberships
from raytorchrpc.calls.peers import Member, by_key, find
from raytorchrpc.calls.server.exposed import methods_of, serve, serve_no_more
from raytorchrpc.errors import BootstrapError, ConfigurationError, NotAMember, PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.group import join, tickets
from raytorchrpc.group.control_connections import SUPERVISOR, ControlConnections
from raytorchrpc.group.here import place
from raytorchrpc.group.join import Membership
from raytorchrpc.group.messages import GroupInfo, JoinedProcess, JoinRequest, LeaveRequest
from raytorchrpc.group.restarted import Record, connections_for, record_of
from raytorchrpc.group.tickets import Ticket
from raytorchrpc.lanes.base import Pending
from raytorchrpc.process import fork
from raytorchrpc.process.locks import Turn
from raytorchrpc.tensors import thread_modes

logger = logging.getLogger(__name__)

#: For the supervisor to report that it has not carried out a request in time, and for it to let a process leave
#: (seconds).
_GRACE_S, _LEAVE_S = 1.0, 5.0
#: For a client to connect to a member beyond the time of what it does there first, and to join again (seconds).
_CONNECT_S, _AGAIN_S = 2.0, 2.0


_entering = Turn()


# --- it joins, and leaves --------------------------------------------------------------------------------------------


def enter(group: str | None, name: str | None, instance: Any, timeout_s: float) -> str:
    """Make this process a member; returns the group's generation. Blocks; raises NotAMember, ConfigurationError,
    BootstrapError.
    """
    deadline = time.monotonic() + timeout_s
    if not _entering.once("join").acquire(timeout=timeout_s):
        raise BootstrapError(f"another thread of this process has been joining a group for {timeout_s:g} s")
    try:
        return _enter(group, name, instance, deadline)
    finally:
        _entering.release()


def _enter(group: str | None, name: str | None, instance: Any, deadline: float) -> str:
    if group is not None and memberships(group):
        raise BootstrapError(f"this process is in group {group!r} already")
    actor_id = ray.get_runtime_context().get_actor_id() if ray.is_initialized() else None
    here = ray_internals.actor_instance() if instance is None else instance
    if instance is None and actor_id is not None and rejoin.runs_init(actor_id):
        if methods := ", ".join(methods_of(here)):
            raise NotAMember(
                f"an actor joins a group only when its __init__ has ended, as members may call its methods "
                f"({methods}): join after that, or name an object whose methods they call instead: join(instance=...)"
            )
        here = None
    if not ray_internals.actor_is_async():
        for method, note in methods_of(here).items():
            if note.is_coroutine:
                raise ConfigurationError(
                    f"join(instance=...): {type(here).__name__}.{method} is a coroutine, and only an async actor has "
                    "an event loop that runs it: make it an ordinary method"
                )
    ticket = tickets.find_ticket(group, deadline)
    record, attempt = ticket.record, uuid.uuid4().hex[:12]
    generation = record.credentials.generation
    if generation in current.members:
        raise BootstrapError(f"this process is in group {record.credentials.group!r} already")
    join.preload()  # before the supervisor waits for this process
    try:
        tickets.use(ticket)
        serve(here, generation)
        if instance is not None:
            thread_modes.note()
        with contextlib.closing(connections_for(record, "a process that joins", lambda: here)) as connections:
            request = JoinRequest(
                _default_name(ticket, actor_id) if name is None else name,
                connections.address,
                JoinedProcess(f"{os.getpid()}@{ticket.place.node_id}/{attempt}", actor_id),
                ticket.consent,
                attempt,
                max(0.001, deadline - time.monotonic()),
            )
            _ask(connections, record, request, deadline)
        if generation not in current.members:
            raise BootstrapError(f"group {record.credentials.group!r} has ended while this process joined it")
        return generation
    except BaseException:
        join.give_up(None, attempt)  # the supervisor's next step, if it comes, is refused
        _forget(generation)
        raise


def become_client(admit: Callable[[JoinRequest], object], generation: str, until: float) -> None:
    """Make this process a client of that group. ``admit``: the supervisor's. Blocks, about until then
    (``time.monotonic``); raises BootstrapError.
    """
    if (record := record_of(generation)) is None:
        raise BootstrapError("it has ended, or Ray's control store has lost its record")
    attempt, here = uuid.uuid4().hex[:12], place()
    process = JoinedProcess(f"{os.getpid()}@{here.node_id}/{attempt}", ray.get_runtime_context().get_actor_id())
    with contextlib.closing(connections_for(record, "a process that becomes a client", lambda: None)) as connections:
        try:
            remaining_s = max(0.001, until - time.monotonic())
            admit(JoinRequest(f"client-{attempt}", connections.address, process, b"", attempt, remaining_s))
        except BaseException:
            join.give_up(None, attempt)  # the supervisor's next step, if it comes, is refused
            raise


def leave(generation: str) -> None:
    """Leave a group that this process has joined by itself. Blocks until the group knows."""
    local, ticket = current.members.get(generation), tickets.own(generation)
    if local is None or ticket is None:
        return
    try:
        with contextlib.closing(connections_for(ticket.record, "a process that leaves")) as connections:
            request = LeaveRequest(local.me.name, local.me.incarnation, join.own_consent(generation))
            _ask(connections, ticket.record, request, time.monotonic() + _LEAVE_S)
    except RayTorchRpcError as error:
        logger.info("the group of %s is not told that it leaves: %s", local.me.name, error)
    finally:
        join.leave(None, generation)
        _forget(generation)


def _forget(generation: str) -> None:
    tickets.drop(generation)
    serve_no_more(generation)


def _ask(connections: ControlConnections, record: Record, request: JoinRequest | LeaveRequest, deadline: float) -> None:
    """Have the supervisor carry out a request. Raises what comes of it."""
    supervises = f"the process that supervises group {record.credentials.group!r}"
    until = max(deadline, time.monotonic()) + _GRACE_S
    _, failures = connections.call_all(request, {SUPERVISOR: ()}, until)
    for error in failures.values():
        if isinstance(error, PeerLost):
            raise BootstrapError(f"{supervises} has ended: {error.cause}") from error
        raise BootstrapError(f"{supervises} does not answer") if isinstance(error, RpcTimeout) else error


def _default_name(ticket: Ticket, actor_id: str | None) -> str:
    above = ticket.parent or re.sub(r"[^A-Za-z0-9_.:-]", "-", socket.gethostname()) or "process"
    return f"{above[:48]}.{os.getpid()}" if actor_id is None else f"actor-{actor_id[:12]}"


# --- this process as a client ----------------------------------------------------------------------------------------


class Host(Protocol):
    """The supervisor of a group, or a handle of it."""

    @property
    def last_info(self) -> GroupInfo:
        """The group as this process last knew it. Does not block."""

    def has_ended(self) -> bool:
        """Whether the group has ended. Blocks for Ray."""

    def admit_client(self, request: JoinRequest) -> None:
        """Have the process that requests it join as a client. Blocks. Raises BootstrapError."""


class Client:
    """Joins when it is first used. Thread-safe."""

    def __init__(self, host: Host, generation: str) -> None:
        self._host, self._generation = host, generation
        self._session_lasts = ray_internals.session_check()
        self._turn = Turn()
        """Held while it joins the group."""
        self._joined: Callable[[], LocalMember | None] = lambda: None
        """Returns what it is since it has joined, if that is still in use."""
        self._known: tuple[GroupInfo, dict[Any, Member]] | None = None
        """The group that ``member`` has last looked at, and its members by key."""
        self._watches: dict[str, Pending] = {}
        """By member: a request that keeps a connection open. By its end the member notices that of this process."""
        fork.register(self)

    def after_fork(self) -> tuple[()]:
        join.forget(self._generation)
        fork.forked_from(f"a client of group {self._host.last_info.name!r}")
        return ()

    @property
    def lasts(self) -> bool:
        """See ``calls.clients.Client``, also for the other methods."""
        return self._session_lasts()

    @property
    def group(self) -> str:
        return self._host.last_info.name

    @property
    def timeout_s(self) -> float:
        return self._host.last_info.config.rpc_timeout_s

    def member(self, target: Any) -> Member | None:
        if (local := self.current()) is not None:
            return member_of(local, target)
        info, known = self._host.last_info, self._known
        if known is None or known[0] is not info:
            known = self._known = info, by_key(info.members)
        with contextlib.suppress(NotAMember):
            return find(target, known[1])
        return None

    def current(self) -> LocalMember | None:
        membership = self._membership()
        return None if membership is None or membership.supervision.is_over else membership.local

    def _membership(self) -> Membership | None:
        """What this process is since it has joined, unless it has left; the supervisor may have dropped it."""
        local, membership = self._joined(), join.client(self._generation)
        return membership if membership is not None and membership.local is local else None

    def check_wait(self) -> None:
        self._turn.once("a call that joins a group")

    def join(self, until: float) -> LocalMember:
        turn = self._turn.once("a call that joins a group")
        if not turn.acquire(timeout=max(0.0, until - time.monotonic())):
            raise RpcTimeout(f"another operation has been joining group {self._host.last_info.name!r} all the time")
        try:
            if (membership := self._membership()) is None:
                return self._join(until)
            return membership.local if not membership.supervision.is_over else self._join_again(membership, until)
        finally:
            turn.release()

    def _join_again(self, dropped: Membership, until: float) -> LocalMember:
        """Members can be called also if the supervisor has died, or cannot be reached."""
        try:
            now = time.monotonic()  # at most half of what is left, so that the call itself has time, too
            return self._join(min((now + until) / 2, now + _AGAIN_S))
        except RayTorchRpcError as error:
            if self._membership() is not dropped:  # the supervisor has sent it off
                raise
            logger.info("group %s may have changed, as this process cannot join it again: %s", self._generation, error)
            dropped.supervision.go_on()
            return dropped.local

    def _join(self, until: float) -> LocalMember:
        """Raises NotAMember only if the group has ended."""
        group = f"group {self._host.last_info.name!r}"
        try:
            become_client(self._host.admit_client, self._generation, until)
            if (membership := join.client(self._generation)) is None:
                raise BootstrapError(f"{group} has sent this process off just now")
            self._watches.clear()
            self._joined = weakref.ref(membership.local)
            return membership.local
        except (BootstrapError, NotAMember) as error:
            if self._has_ended():
                raise NotAMember(f"this process is in no group, and {group}, which it used, has ended") from error
            raise BootstrapError(f"this process cannot join {group} now, but a later call may: {error}") from error

    def _has_ended(self) -> bool:
        """Whether the group has ended for all that is known: Ray may not answer either."""
        try:
            return self._host.has_ended()
        except Exception as error:
            logger.debug("it is not known whether group %s has ended: %s", self._generation, error)
            return False

    def watch(self, local: LocalMember, member: Member, until: float) -> None:
        """Open a connection to a member. If that fails, so does the operation that follows, which has no more time."""
        if member.name in self._watches:
            return
        route = local.peers.route(member.name)
        patience_s = max(local.config.rpc_timeout_s, until - time.monotonic()) + _CONNECT_S
        try:
            pending = local.outgoing.control(route, route.calls, protocol.WATCH, patience_s)
        except RayTorchRpcError:
            return
        self._watches[member.name] = pending
        pending.add_done_callback(partial(self._ended, member.name, pending))

    def _ended(self, name: str, pending: Pending) -> None:
        if self._watches.get(name) is pending:
            del self._watches[name]

    def close(self) -> None:
        if join.client(self._generation) is not None:
            join.leave(None, self._generation)
