"""This process as a guest of groups: it uses their queues and topics without being a member; see ``calls.guests``."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import ray

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls import protocol
from raytorchrpc.calls.guests import LEASE_S, RENEW, member_of, new_rank
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.peers import Member, PeerRoute, process_token
from raytorchrpc.calls.scope import Limit, Scope, current_scope
from raytorchrpc.errors import BootstrapError, NotAMember, RayTorchRpcError
from raytorchrpc.group.here import endpoint
from raytorchrpc.group.roster import Directory
from raytorchrpc.lanes.base import PeerAddress, Pending
from raytorchrpc.lanes.socket.lane import SocketLane
from raytorchrpc.process import fork
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.this_process import default_capacity
from raytorchrpc.topology.endpoint import Endpoint

#: To connect to a member for the first time (seconds).
_CONNECT_S = 2.0


class Host(Protocol):
    """Knows the group: the supervisor, or a handle of it."""

    def directory(self, endpoint: Endpoint) -> Directory:
        """The members as they are now, for the process that ``endpoint`` describes. Raises BootstrapError."""


class Guest:
    """This process as a guest of one group. Connects when it is first used. Thread-safe."""

    def __init__(self, host: Host) -> None:
        self._host, self._session_lasts = host, ray_internals.session_check()
        self._lock = Lock()
        self._local: LocalMember | None = None
        self._lane: SocketLane | None = None
        self._endpoint: Endpoint | None = None
        self._watches: dict[str, Pending] = {}
        """A request to each member that was used, which fails when its process ends."""
        self._stale = True
        """Addresses may have changed: a member that was used has ended."""
        fork.register(self)

    def after_fork(self) -> tuple[()]:
        """See fork.ForkAware."""
        if self._local is not None:
            fork.forked_from(f"a process that uses queues of group {self._local.group!r}")
        return ()

    @property
    def lasts(self) -> bool:
        """Whether this process is connected to the same cluster as when it fetched the group."""
        return self._session_lasts()

    def local(self, home: Any = None) -> LocalMember:
        """What carries out this guest's operations, with a route to ``home``, if that is a member. Blocks to connect.

        Raises NotAMember if the group has ended.
        """
        with self._lock:
            if self._local is None or self._stale or (home is not None and member_of(self._local, home) is None):
                self._refresh()
            local = self._local
            assert local is not None
            member = None if home is None else member_of(local, home)
            if member is not None and member.name not in self._watches:
                self._watch(local, member)
        return local

    def _refresh(self) -> None:
        if self._endpoint is None:
            self._endpoint = endpoint("guest")
        try:
            directory = self._host.directory(self._endpoint)
        except BootstrapError as error:
            raise NotAMember(f"this process is in no group, and the one that it used has ended: {error}") from error
        local, lane = self._open(directory)
        lane.reach(None, frozenset(name for name, contact in directory.contacts.items() if contact.by_tcp))
        known = {member.name: member for member in local.peers.members}
        for name, member in known.items():
            if name not in directory.contacts:
                local.peers.remove_peer(member.rank)
                lane.disconnect(name)
        for name, (member, address, _) in directory.contacts.items():
            token = process_token(local.generation, member.rank, member.incarnation)
            if name not in known or known[name].incarnation != member.incarnation:
                lane.disconnect(name)
                lane.connect([PeerAddress(name, address)])
                near = member.node_id == local.me.node_id
                local.peers.add_peer(PeerRoute(member, lane, lane, token=token, same_clock=near))
        self._stale = False

    def _open(self, directory: Directory) -> tuple[LocalMember, SocketLane]:
        if self._local is not None and self._lane is not None:
            return self._local, self._lane
        credentials, config = directory.credentials, directory.config
        context = ray.get_runtime_context()
        me = Member(new_rank(), "guest", context.get_actor_id(), context.get_node_id(), os.getpid(), "", -1)
        max_bytes = config.max_bytes_in_flight or default_capacity()
        local = LocalMember(credentials.group, credentials.generation, me, config, None, {}, max_bytes)
        lane = SocketLane("guest", credentials, tcp_host=None, by_tcp=frozenset())
        local.lanes.append(lane)
        try:
            lane.open(lambda message, reply: None, local.workers.submit)  # no member calls a guest
        except BaseException:
            local.leave()
            raise
        self._local, self._lane = local, lane
        self._renew_later(local)
        return local, lane

    def _watch(self, local: LocalMember, member: Member) -> None:
        """Have the end of this member's process noticed. The operation that follows reports a failure to connect."""
        route = local.peers.route(member.name)
        try:
            pending = local.outgoing.control(route, route.calls, protocol.WATCH, _CONNECT_S)
        except RayTorchRpcError:
            self._stale = True
            return
        self._watches[member.name] = pending
        pending.add_done_callback(partial(self._ended, member.name, pending))

    def _ended(self, name: str, pending: Pending) -> None:
        if self._watches.get(name) is pending:
            del self._watches[name]
        self._stale = True

    def _renew_later(self, local: LocalMember) -> None:
        local.deadlines.at(time.monotonic() + LEASE_S / 3, partial(self._renew, local))

    def _renew(self, local: LocalMember) -> None:
        for name in list(self._watches):
            local.workers.submit(_renew_at, local, name)  # each on its own thread: one may not take its request
        self._renew_later(local)

    def close(self) -> None:
        """End all operations and free everything. Idempotent, never raises."""
        if self._local is not None:
            self._local.leave()


def _renew_at(local: LocalMember, name: str) -> None:
    # A scope of its own: what is in flight to this member must not hold the request up.
    before = current_scope.set(Scope(limit=Limit(time.monotonic() + LEASE_S / 3)))
    try:
        with suppress(RayTorchRpcError):
            local.outgoing.call(name, RENEW, options=CallOptions(LEASE_S / 3, retry=0))
    finally:
        current_scope.reset(before)
