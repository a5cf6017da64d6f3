"""Groups that this process uses without being a member: it joins each as a client when it first uses it.

A client is a process that calls members and is known to those alone. It is a driver, or an actor, that formed the group
or fetched it.
"""

from __future__ import annotations

from typing import Any, Protocol

from raytorchrpc.calls.peers import Member
from raytorchrpc.errors import ConfigurationError, NotAMember
from raytorchrpc.process import fork
from raytorchrpc.process.locks import Lock
from raytorchrpc.tensors.kept_errors import again, untraced


class Client(Protocol):
    """This process as a client of one group; see ``group.joining``."""

    @property
    def lasts(self) -> bool:
        """Whether this process is connected to the same cluster as when it fetched the group."""

    def local(self, home: Any) -> Any:
        """What carries out the operations, a LocalMember, with a connection to ``home`` if that is a member. Blocks.

        Raises NotAMember if the group has ended.
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

    def find(self, home: Any) -> tuple[Any, Member] | None:
        """The client of the group with the member ``home``, as a LocalMember, and that member. Blocks.

        None if there is no such group. Raises NotAMember, or ConfigurationError if several groups have that member.
        """
        locals_ = self.everywhere(home)
        having = [(local, member) for local in locals_ if (member := member_of(local, home)) is not None]
        if len(having) > 1:
            groups = " and ".join(repr(local.group) for local, _ in having)
            raise ConfigurationError(
                f"groups {groups} have a member {home!r}, and this process is in none of them: give the members "
                f"different names, or join one group with init_group(..., include_driver=True)"
            )
        if locals_ and not having:
            members = "; ".join(
                f"group {local.group!r} has {', '.join(member.name for member in local.peers.members)}"
                for local in locals_
            )
            raise NotAMember(f"no group that this process formed or fetched has a member {home!r}: {members}")
        return having[0] if having else None

    def everywhere(self, home: Any = None) -> list[Any]:
        """The clients of all these groups, as LocalMembers. Blocks. ``home``: a member to be called, if a group has it.

        Raises NotAMember if there were groups and all have ended.
        """
        fork.check_process()
        locals_: list[Any] = []
        ended = None
        for generation, client in list(self._clients.items()):
            if not client.lasts:
                self.remove(generation)
                continue
            try:
                locals_.append(client.local(home))
            except NotAMember as error:
                self.remove(generation)
                ended = untraced(error)
        if ended is not None and not locals_:
            raise again(ended)
        return locals_


own_groups = OwnGroups()


def member_of(local: Any, target: Any) -> Member | None:
    """The member that ``target`` (a name, rank, handle or Member) stands for, or None."""
    try:
        member: Member = local.peers.member(target)
        return member
    except NotAMember:
        return None
