"""This process as a client of a group; see ``calls.clients``."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls import protocol
from raytorchrpc.calls.clients import member_of
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.peers import Member
from raytorchrpc.errors import BootstrapError, NotAMember, RayTorchRpcError
from raytorchrpc.group import join, joining
from raytorchrpc.group.messages import JoinRequest
from raytorchrpc.lanes.base import Pending
from raytorchrpc.process import fork
from raytorchrpc.process.locks import Lock

#: To connect to a member for the first time (seconds).
_CONNECT_S = 2.0


class Host(Protocol):
    """The supervisor of a group, or a handle of it."""

    def admit_client(self, request: JoinRequest) -> None:
        """Have the process that requests it join as a client. Blocks. Raises BootstrapError."""


class Client:
    """Joins when it is first used. Thread-safe."""

    def __init__(self, host: Host, generation: str) -> None:
        self._host, self._generation = host, generation
        self._session_lasts = ray_internals.session_check()
        self._lock = Lock()
        self._watches: dict[str, Pending] = {}
        """By member: a request that keeps a connection open. By its end the member notices that of this process."""
        fork.register(self)

    def after_fork(self) -> tuple[()]:
        """See fork.ForkAware."""
        if (local := join.forget_client(self._generation)) is not None:
            fork.forked_from(f"a client of group {local.group!r}")
        return ()

    @property
    def lasts(self) -> bool:
        """See ``calls.clients.Client``, also for the other methods."""
        return self._session_lasts()

    def local(self, home: Any = None) -> LocalMember:
        with self._lock:
            if (local := join.client(self._generation)) is None:
                self._watches.clear()
                try:
                    joining.become_client(self._host.admit_client, self._generation)
                except BootstrapError as error:
                    raise NotAMember(f"this process is in no group, and cannot be a client of one: {error}") from error
                if (local := join.client(self._generation)) is None:
                    raise NotAMember("this process is in no group, and the one that it used has ended just now")
            member = None if home is None else member_of(local, home)
            if member is not None and member.name not in self._watches:
                self._watch(local, member)
        return local

    def _watch(self, local: LocalMember, member: Member) -> None:
        """Open a connection to a member. If that fails, the operation that follows reports it."""
        route = local.peers.route(member.name)
        try:
            pending = local.outgoing.control(route, route.calls, protocol.WATCH, _CONNECT_S)
        except RayTorchRpcError:
            return
        self._watches[member.name] = pending
        pending.add_done_callback(partial(self._ended, member.name, pending))

    def _ended(self, name: str, pending: Pending) -> None:
        if self._watches.get(name) is pending:
            del self._watches[name]

    def close(self) -> None:
        join.leave_client(self._generation)
