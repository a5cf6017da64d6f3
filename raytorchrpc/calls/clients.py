"""Groups that this process uses without being a member: it joins each as a client when it first uses it.

A client is a process that calls members and is known to those alone. It is a driver, or an actor, that formed the group
or fetched it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from raytorchrpc.calls.peers import Member
from raytorchrpc.errors import ConfigurationError, NotAMember, RayTorchRpcError
from raytorchrpc.process import fork
from raytorchrpc.process.locks import Lock
from raytorchrpc.tensors.kept_errors import again, untraced


class Client(Protocol):
    """This process as a client of one group; see ``group.joining``."""

    @property
    def lasts(self) -> bool:
        """Whether this process is connected to the same cluster as when it fetched the group."""

    def knows(self, home: Any) -> bool:
        """Whether ``home`` is a member, as far as this process has heard. Does not block."""

    def local(self, home: Any, timeout_s: float | None) -> Any:
        """What carries out the operations, a LocalMember, with a connection to ``home`` if that is a member. Blocks.

        ``timeout_s``: of the operation that follows; None: the default. Raises NotAMember if the group has ended, and
        another RayTorchRpcError if this process cannot join it now.
        """

    def close(self) -> None:
        """Leave the group. Idempotent, never raises."""


class OwnGroups:
    """The groups that this process has formed or fetched and that have not ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._clients: dict[str, Client] = {}
        """By the generation of the group."""

    def add(self, generation: str, client: Client) -> None:
        """This process formed or fetched this group. Idempotent."""
        with self._lock:
            self._clients.setdefault(generation, client)

    def remove(self, generation: str) -> None:
        """The group ends, as far as this process is concerned. Idempotent, never raises."""
        with self._lock:
            client = self._clients.pop(generation, None)
        if client is not None:
            client.close()

    def find(self, home: Any, timeout_s: float | None = None) -> tuple[Any, Member] | None:
        """The client of the group with the member ``home``, as a LocalMember, and that member. Blocks.

        ``timeout_s``: of the operation that follows; None: the default. None if there is no such group. Raises
        NotAMember, ConfigurationError if several groups have that member, and what keeps this process from joining.
        """
        fork.check_process()
        lasting, joining = self._lasting(), _Joining(self, home, timeout_s)
        knowing = {generation: client for generation, client in lasting.items() if client.knows(home)}
        joining.join(knowing)
        if joining.failed:
            raise again(joining.failed[0])
        if not (having := joining.having()):  # what this process knows of the others may be old
            joining.join({generation: client for generation, client in lasting.items() if generation not in knowing})
            having = joining.having()
        if len(having) > 1:
            groups = " and ".join(repr(local.group) for local, _ in having)
            raise ConfigurationError(
                f"groups {groups} have a member {home!r}, and this process is in none of them: give the members "
                f"different names, or join one group with init_group(..., include_driver=True)"
            )
        if having:
            return having[0]
        joining.raise_failures()
        if joining.locals:
            members = "; ".join(
                f"group {local.group!r} has {', '.join(member.name for member in local.peers.members)}"
                for local in joining.locals
            )
            raise NotAMember(f"no group that this process formed or fetched has a member {home!r}: {members}")
        return None

    def everywhere(self) -> tuple[list[Any], list[Exception]]:
        """The clients of all these groups, as LocalMembers, and why this process cannot join others now. Blocks.

        Raises NotAMember if there were groups and all have ended, and what failed if it can join none.
        """
        fork.check_process()
        joining = _Joining(self, None, None)
        joining.join(self._lasting())
        if not joining.locals:
            joining.raise_failures()
        return joining.locals, joining.failed

    def _lasting(self) -> dict[str, Client]:
        """All but those of a Ray session that is over, which end here."""
        clients = self._clients.copy()
        for generation, client in list(clients.items()):
            if not client.lasts:
                self.remove(generation)
                del clients[generation]
        return clients


class _Joining:
    """For one operation, this process joins groups that it has not joined yet."""

    def __init__(self, own: OwnGroups, home: Any, timeout_s: float | None) -> None:
        self._own, self._home, self._timeout_s = own, home, timeout_s
        self.locals: list[Any] = []
        self.failed: list[Exception] = []
        self._ended: NotAMember | None = None

    def join(self, clients: Mapping[str, Client]) -> None:
        for generation, client in clients.items():
            try:
                self.locals.append(client.local(self._home, self._timeout_s))
            except NotAMember as error:
                self._own.remove(generation)
                self._ended = untraced(error)
            except RayTorchRpcError as error:  # the next operation tries again
                self.failed.append(untraced(error))

    def having(self) -> list[tuple[Any, Member]]:
        """Those that have the member, with it."""
        return [(local, member) for local in self.locals if (member := member_of(local, self._home)) is not None]

    def raise_failures(self) -> None:
        """Raise why this process has not joined a group; that one has ended only if there is no other."""
        if self.failed:
            raise again(self.failed[0])
        if self._ended is not None and not self.locals:
            raise again(self._ended)


own_groups = OwnGroups()


def member_of(local: Any, target: Any) -> Member | None:
    """The member that ``target`` (a name, rank, handle or Member) stands for, or None."""
    try:
        member: Member = local.peers.member(target)
        return member
    except NotAMember:
        return None
