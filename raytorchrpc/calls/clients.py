"""Groups that this process uses without being a member: it joins each as a client when it first uses it.

A client is a process that calls members and is known to those alone. It is a driver, or an actor, that formed the group
or fetched it. It joins on a thread, so that neither an event loop nor the deadline of a call waits for the supervisor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from raytorchrpc.calls.member import current
from raytorchrpc.calls.options import check_longest_wait
from raytorchrpc.calls.peers import Member
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import ConfigurationError, NotAMember, RayTorchRpcError, RpcTimeout
from raytorchrpc.process import fork
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.workers import Workers, process_deadlines
from raytorchrpc.tensors.kept_errors import again, untraced

#: Groups are joined on at most so many threads, which end when they have been idle for so long (seconds).
_THREADS, _IDLE_S = 16, 1.0
#: A client to which the supervisor has had no connection for this time tries to join again when it is used (seconds).
#: The supervisor connects again at once if it can, so it has dropped the client, or will, or has died.
_UNSUPERVISED_S = 10.0


class Client(Protocol):
    """This process as a client of one group; see ``group.joining``."""

    @property
    def lasts(self) -> bool:
        """Whether this process is connected to the same cluster as when it fetched the group."""

    @property
    def group(self) -> str:
        """The name of the group."""

    @property
    def timeout_s(self) -> float:
        """The time of an operation without ``timeout=``."""

    def member(self, target: Any) -> Member | None:
        """The member that ``target`` stands for, as far as this process has heard. Does not block."""

    def current(self) -> Any:
        """What carries out the operations, a LocalMember; None before this process has joined. Does not block."""

    def join(self, until: float) -> Any:
        """Join unless it has; returns ``current``. Blocks, about until then (``time.monotonic``).

        Raises NotAMember if the group has ended, and another RayTorchRpcError if this process cannot join it now.
        """

    def watch(self, local: Any, member: Member, until: float) -> None:
        """Have the member notice the end of this process, if it would not yet. ``until``: of the operation there."""

    def check_wait(self) -> None:
        """Raise RayTorchRpcError if this thread is joining the group."""

    def close(self) -> None:
        """Leave the group. Idempotent, never raises."""


class Supervision:
    """Whether a group's supervisor has a connection to this client, over which the client hears of changes."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._latest: Any = None
        self._lost_at: float | None = time.monotonic()  # it connects once this process has joined

    def begin(self, connection: Any) -> None:
        """The supervisor has connected. ``connection``: fails when the connection ends."""
        with self._lock:
            self._latest, self._lost_at = connection, None
        connection.add_done_callback(partial(self._end, connection))

    def _end(self, connection: Any) -> None:
        with self._lock:
            if self._latest is connection:
                self.go_on()

    def go_on(self) -> None:
        """It has no connection now: the client goes on with the view that it has, for a while."""
        self._lost_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        lost_at = self._lost_at
        return lost_at is not None and time.monotonic() - lost_at > _UNSUPERVISED_S


class Joining(DeferredReply):
    """Settled with what ``OwnGroups`` does on a thread for one operation, or with RpcTimeout at its deadline."""

    def __init__(self, home: Any, timeout_s: float) -> None:
        super().__init__()
        self._home, self._timeout_s, self.until = home, timeout_s, time.monotonic() + timeout_s
        cancel = process_deadlines().at(self.until, self._expire)
        self.add_done_callback(lambda _: cancel())

    def _expire(self) -> None:
        self.settle(None, RpcTimeout(self.why_late()))

    def why_late(self) -> str:
        """For the error of a call that waits for this."""
        group = "each of its groups" if self._home is None else f"a group with {self._home!r}"
        return f"this process has not become a client of {group} within {self._timeout_s:.3g} s"

    def run(self, work: Callable[[], Any]) -> None:
        """Settle it with the outcome of ``work``."""
        if not self.done():  # else its deadline has passed while others had the threads
            try:
                self.settle(work())
            except BaseException as error:
                self.settle(None, error)


class OwnGroups:
    """The groups that this process has formed or fetched and that have not ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._clients: dict[str, Client] = {}
        """By the generation of the group."""
        self._workers = Workers("raytorchrpc-joining", limit=_THREADS, idle_s=_IDLE_S)

    def add(self, generation: str, client: Client) -> None:
        """This process formed or fetched this group. Idempotent."""
        with self._lock:
            self._clients.setdefault(generation, client)
            current.change(clients=self._clients)

    def may_have(self, target: Any, group: str | None = None) -> bool:
        """Whether there is a group that may have this target, and of which this process is no member."""
        return bool(self._candidates(group, target))

    def remove(self, generation: str) -> None:
        """The group ends, as far as this process is concerned. Idempotent, never raises."""
        with self._lock:
            client = self._clients.pop(generation, None)
            current.change(clients=self._clients)
        if client is not None:
            client.close()

    def joined(self, home: Any, timeout_s: float | None = None, group: str | None = None) -> Any:
        """This process as a client of the group with the member ``home``, a LocalMember; None if it has not joined a
        group that may have it. Does not block.

        ``timeout_s``: of the operation that follows; None: the default. ``group``: see ``join``. Raises
        ConfigurationError if several groups have that member.
        """
        check_longest_wait(timeout_s)
        operation = _Operation(self, home, self._candidates(group, home), timeout_s)
        return operation.match() if operation.has_joined() else None

    def join(self, home: Any, timeout_s: float | None = None, group: str | None = None) -> Joining | None:
        """Begin to become a client of the group with the member ``home``, on a thread; settled with the LocalMember.
        Does not block. None if this process has formed and fetched no group that lasts.

        ``group``: the name or the generation of the group that has the member, if it is known and this process uses
        it. Settled with NotAMember, ConfigurationError if several groups have that member, and what keeps this process
        from joining.
        """
        if not (clients := self._candidates(group, home)):
            return None
        operation = _Operation(self, home, clients, timeout_s)
        return self._begin(operation, operation.local)

    def everywhere(self, timeout_s: float | None = None, group: str | None = None) -> tuple[list[Any], list[Exception]]:
        """The clients of these groups, as LocalMembers, and why this process cannot join others now. Blocks.

        Raises NotAMember if there were groups and all have ended, and what failed if it can join none.
        """
        if not (clients := self._candidates(group)):
            return [], []
        operation = _Operation(self, None, clients, timeout_s)
        outcome: tuple[list[Any], list[Exception]] = self._begin(operation, operation.everywhere).result()
        return outcome

    def name_of(self, target: Any, group: str | None = None) -> str | None:
        """The name of the member that ``target`` stands for in these groups, as far as this process has heard; None if
        that is not clear. Does not block.
        """
        members = [client.member(target) for client in self._candidates(group, target).values()]
        names = {member.name for member in members if member is not None}
        return names.pop() if len(names) == 1 else None

    def _begin(self, operation: _Operation, work: Callable[[], Any]) -> Joining:
        for client in operation.clients.values():
            client.check_wait()
        joining = Joining(operation.home, operation.timeout_s)
        self._workers.submit(joining.run, work)
        return joining

    def _candidates(self, group: str | None, target: Any = None) -> dict[str, Client]:
        """That group, or all; without those that this process is a member of, and those of a Ray session that is over,
        which end here.
        """
        fork.check_process()
        clients = {each: client for each, client in self._clients.copy().items() if each not in current.members}
        for generation, client in list(clients.items()):
            if not client.lasts:
                self.remove(generation)
                del clients[generation]
        wanted = target.group if group is None and isinstance(target, Member) else group
        return {each: client for each, client in clients.items() if not wanted or wanted in (each, client.group)}


class _Operation:
    """One operation at the member ``home``, for which this process joins groups that it has not joined yet."""

    def __init__(self, own: OwnGroups, home: Any, clients: Mapping[str, Client], timeout_s: float | None) -> None:
        self._own, self.home, self.clients = own, home, clients
        if timeout_s is None:
            timeout_s = max([client.timeout_s for client in clients.values()], default=0.0)
        self.timeout_s, self._until = timeout_s, time.monotonic() + timeout_s
        self._joined: list[tuple[Client, Any, Member | None]] = []
        self._failed: list[Exception] = []
        self._ended: NotAMember | None = None

    def has_joined(self) -> bool:
        """Whether this process has joined all groups that are known to have the member, and there are some."""
        for client in self.clients.values():
            local = client.current()
            member = client.member(self.home) if local is None else member_of(local, self.home)
            if member is not None:
                if local is None:
                    return False
                self._joined.append((client, local, member))
        return bool(self._joined)

    def match(self) -> Any:
        """The LocalMember of the group with the member, if it is among those that this process has joined."""
        having = [(client, local, member) for client, local, member in self._joined if member is not None]
        if len(having) > 1:
            groups = " and ".join(repr(local.group) for _, local, _ in having)
            raise ConfigurationError(
                f"groups {groups} have a member {self.home!r}, and this process is in none of them: say which, "
                f"group={having[0][1].group!r}, or give the members different names"
            )
        for client, local, member in having:
            client.watch(local, member, self._until)
            return local
        return None

    def local(self) -> Any:
        """Join what may have the member; see ``OwnGroups.join``."""
        known = {name: client for name, client in self.clients.items() if client.member(self.home) is not None}
        self._join(known)
        if self._failed:
            raise again(self._failed[0])
        if (local := self.match()) is None:  # what this process knows of the others may be old
            self._join({name: client for name, client in self.clients.items() if name not in known})
            local = self.match()
        if local is not None:
            return local
        self._raise_failures()
        members = "; ".join(
            f"group {local.group!r} has {', '.join(member.name for member in local.peers.members)}"
            for _, local, _ in self._joined
        )
        raise NotAMember(f"no group that this process formed or fetched has a member {self.home!r}: {members}")

    def everywhere(self) -> tuple[list[Any], list[Exception]]:
        self._join(self.clients)
        if not self._joined:
            self._raise_failures()
        return [local for _, local, _ in self._joined], self._failed

    def _join(self, clients: Mapping[str, Client]) -> None:
        for generation, client in clients.items():
            try:
                local = client.join(self._until)
                self._joined.append((client, local, member_of(local, self.home)))
            except NotAMember as error:
                self._own.remove(generation)
                self._ended = untraced(error)
            except RayTorchRpcError as error:  # the next operation tries again
                self._failed.append(untraced(error))

    def _raise_failures(self) -> None:
        """Raise why this process has not joined a group; that one has ended only if there is no other."""
        if self._failed:
            raise again(self._failed[0])
        if self._ended is not None and not self._joined:
            raise again(self._ended)


own_groups = OwnGroups()


def member_of(local: Any, target: Any) -> Member | None:
    """The member that ``target`` (a name, rank, handle or Member) stands for, or None."""
    with suppress(NotAMember):
        member: Member | None = local.peers.known(target)
        return member
    return None
