"""Guests: processes that use the queues and topics of a group without being members of it.

A guest is a driver, or an actor, that formed the group or fetched it. It has a negative rank and connects to members;
no member connects to it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from raytorchrpc.calls.peers import Member, PeerRoute
from raytorchrpc.calls.server.exposed import service
from raytorchrpc.errors import ConfigurationError, NotAMember
from raytorchrpc.process import fork
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.workers import Deadlines
from raytorchrpc.tensors.kept_errors import again, untraced

#: A member drops what it holds for a guest that has sent nothing for this time (seconds).
LEASE_S = 15.0
#: A guest sends this request to each member that it uses, several times within a lease.
RENEW = "raytorchrpc.renew"

_GUESTS_BELOW = -1  # the rank of a supervisor


#: This process as a guest of one group: a ``group.guest.Guest``, in a package above this one.
Guest = Any


class OwnGroups:
    """The groups that this process has formed or fetched and that have not ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._guests: dict[str, Guest] = {}
        """By the generation of the group."""

    def add(self, generation: str, guest: Guest) -> None:
        """This process formed or fetched this group. Idempotent."""
        with self._lock:
            self._guests.setdefault(generation, guest)

    def remove(self, generation: str) -> None:
        """The group ends, as far as this process is concerned. Idempotent, never raises."""
        with self._lock:
            guest = self._guests.pop(generation, None)
        if guest is not None:
            guest.close()

    def find(self, home: Any) -> tuple[Any, Member] | None:
        """This process as a guest of the group with the member ``home`` (a LocalMember), and that member. Blocks.

        None if there is no such group. Raises NotAMember, or ConfigurationError if several groups have that member.
        """
        locals_ = self.everywhere(home)
        found = [(local, member) for local in locals_ if (member := member_of(local, home)) is not None]
        if len(found) > 1:
            groups = " and ".join(repr(local.group) for local, _ in found)
            raise ConfigurationError(
                f"groups {groups} have a member {home!r}, and this process is in none of them: give the members "
                f"different names, or join one group with init_group(..., include_driver=True)"
            )
        if locals_ and not found:
            members = "; ".join(
                f"group {local.group!r} has {', '.join(member.name for member in local.peers.members)}"
                for local in locals_
            )
            raise NotAMember(f"no group that this process formed or fetched has a member {home!r}: {members}")
        return found[0] if found else None

    def everywhere(self, home: Any = None) -> list[Any]:
        """This process as a guest of each of its groups. Blocks. ``home``: a member to be called, if a group has it.

        Raises NotAMember if there were groups and all have ended.
        """
        fork.check_process()
        found: list[Any] = []
        ended = None
        for generation, guest in list(self._guests.items()):
            if not guest.lasts:
                self.remove(generation)
                continue
            try:
                found.append(guest.local(home))
            except NotAMember as error:
                self.remove(generation)
                ended = untraced(error)
        if ended is not None and not found:
            raise again(ended)
        return found


own_groups = OwnGroups()


def member_of(local: Any, target: Any) -> Member | None:
    """The member that ``target`` (a name, rank, handle or Member) stands for, or None."""
    try:
        member: Member = local.peers.route(target).member
        return member
    except NotAMember:
        return None


def new_rank() -> int:
    """Return a rank for a guest. No two guests have the same."""
    return _GUESTS_BELOW - 1 - secrets.randbits(62)


def is_guest(rank: int) -> bool:
    """Whether a caller of this rank is a guest."""
    return rank < _GUESTS_BELOW


class Guests:
    """The guests that call one member. Thread-safe."""

    def __init__(self, lose: Callable[[int], None], deadlines: Deadlines) -> None:
        """``lose``: drops what the member holds for the guest of that rank. Quick, never raises."""
        self._lose, self._deadlines = lose, deadlines
        self._lock = Lock()
        self._routes: dict[int, PeerRoute] = {}
        self._seen: dict[int, float] = {}

    def route_back(self, rank: int) -> PeerRoute | None:
        """The route for replies to a guest, which has just sent something; None for a rank that is no guest's.

        It names no lane: a reply takes the connection that brought the request.
        """
        if not is_guest(rank):
            return None
        now = time.monotonic()
        with self._lock:
            route = self._routes.get(rank)
            self._seen[rank] = now
            if route is not None:
                return route
            member = Member(rank, "a process that is no member", None, "", 0, "", -1)
            no_lane: Any = None
            route = self._routes[rank] = PeerRoute(member, no_lane, no_lane)
        self._deadlines.at(now + LEASE_S, lambda: self._check(rank))
        return route

    def _check(self, rank: int) -> None:
        with self._lock:
            until = self._seen[rank] + LEASE_S
            ended = until <= time.monotonic()
            if ended:
                del self._seen[rank], self._routes[rank]
        if ended:
            self._lose(rank)
        else:
            self._deadlines.at(until, lambda: self._check(rank))


def _renew(local: Any, caller: int) -> None:
    """Does nothing: that the request arrived is what counts."""


SERVICES = {RENEW: service(_renew)}
