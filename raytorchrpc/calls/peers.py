"""Who the members are, and by which lanes one reaches another."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, overload

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.scope import current_scope, on_loop
from raytorchrpc.calls.server.services import Services
from raytorchrpc.errors import NotAMember, PeerLost
from raytorchrpc.lanes.base import MessageLane
from raytorchrpc.process import locks
from raytorchrpc.tensors.devices import Device

T = TypeVar("T")


#: The first rank of a client: a process that calls members and that only those know. Members have lower ranks.
FIRST_CLIENT = 1 << 32


def is_client(rank: int) -> bool:
    """Whether the process of this rank is a client."""
    return rank >= FIRST_CLIENT


@dataclass(frozen=True)
class Member:
    """One member of a group, as every other sees it. Small and picklable.

    Examples:
        >>> member = rtr.get_group().members[1]
        >>> member.rank, member.name
        (1, 'collector')
    """

    rank: int
    name: str
    actor_id: str | None
    """Hex id of the Ray actor; None for a driver that joined."""
    node_id: str
    """Ray's id of the node, and ``pid``: the process."""
    pid: int
    rpc_name: str
    """Its name in torch's own API: ``torch.distributed.rpc.rpc_sync(member.rpc_name, ...)``."""
    worker_id: int
    """Its torchrpc id: its rank in a group of new actors. Unique in the group, never used again for another process."""
    incarnation: int = 0
    """How often its actor has come back into the group after a restart."""
    group: str = ""
    """The name of its group."""

    def __repr__(self) -> str:
        return f"Member(rank={self.rank}, name={self.name!r}, pid={self.pid}, node_id={self.node_id[:8]!r})"


@dataclass(frozen=True)
class PeerRoute:
    """How messages reach one peer."""

    member: Member
    calls: MessageLane
    """Carries calls, with the tensors that no other lane takes."""
    torchrpc: MessageLane
    """torchrpc: carries RRefs and what distributed autograd follows."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Lanes for tensors that travel beside a message of ``calls``, by device type."""
    through_cpu: str | None = ""
    """Why CUDA tensors stay in the messages of ``calls``, copied to the CPU, if no tensor lane takes them. None: those
    do not carry them."""
    devices: Mapping[Device, Device] = field(default_factory=dict)
    """Where arguments arrive: this process's GPU, or "cpu" -> the peer's, or "cpu"."""
    devices_back: Mapping[Device, Device] = field(default_factory=dict)
    """Where CUDA results for the peer's calls arrive, likewise."""
    cpu_arrives_on: Device | None = None
    """The GPU of this process on which CPU arguments of the peer's calls arrive; None leaves them on the CPU."""
    same_gpus: frozenset[tuple[int, int]] = frozenset()
    """(index here, index there) of each GPU that both processes use."""
    token: str = ""
    """Names the very process: what is meant for an earlier or later incarnation is refused."""
    retries: Mapping[str, int] = field(default_factory=dict)
    """By method: how often a call may be repeated there, if the member is lost and comes back."""
    same_clock: bool = False
    """Both are on one node, so ``time.monotonic`` is the same on both: a deadline need not wait to be read."""


def process_token(generation: str, rank: int, incarnation: int) -> str:
    """Names one member's present process in requests to it."""
    return f"{generation}.{rank}.{incarnation}"


def keys_of(rank: int, name: str, actor: Any = None) -> tuple[Any, ...]:
    """The keys by which ``find`` finds a member. ``actor``: its ``ray_internals.actor_key``, if it has one."""
    return (rank, name) if actor is None else (rank, name, actor)


@overload
def find(target: Any, by_key: Mapping[Any, T], group: Callable[[], str]) -> T: ...
@overload
def find(target: Any, by_key: Mapping[Any, T], group: None = None) -> T | None: ...
def find(target: Any, by_key: Mapping[Any, T], group: Callable[[], str] | None = None) -> T | None:
    """Find a member by what users pass for one: an actor handle, a name, a rank or a ``Member``. Hot path.

    Args:
        target: what was passed. Text of digits alone is a rank.
        by_key: what to return, by ``keys_of`` each member.
        group: describes the group for an error; see ``described``. Without it, None stands for no member.

    Raises NotAMember.
    """
    key: Any = target
    if isinstance(target, Member):
        key = target.name
    elif not isinstance(target, (str, int)) or type(target) is bool:
        try:
            key = ray_internals.actor_key(target)
        except AttributeError:
            raise NotAMember(
                f"{target!r} does not name a member: pass an actor handle, a member's name, its rank or a Member"
            ) from None
    value = by_key.get(key)
    if value is None and isinstance(key, str) and key.isdecimal():
        value = by_key.get(int(key))
    if value is None and group is not None:
        raise NotAMember(f"{target!r} is not in {group()}")
    return value


def by_key(members: Iterable[Member]) -> dict[Any, Member]:
    """Members by all their keys, for ``find``."""
    return {key: member for member in members for key in _keys_of(member)}


def described(group: str, names: Iterable[tuple[int, str]]) -> str:
    """A group and its members, for an error. ``names``: with ranks."""
    shown = [f"{name} ({rank})" for rank, name in names]
    rest = f", ... {len(shown) - 16} more" if len(shown) > 16 else ""
    return f"{group}; its members: {', '.join(shown[:16])}{rest}"


#: A call to an unknown target waits as long as messages that have arrived are unread, at most (seconds).
_UNREAD_S = 1.0
#: How often it looks. They are read if they are so twice: between two steps of a reader nothing shows.
_LOOK_S = 0.01
#: A call to a member that joins waits for that, at most (seconds).
_JOINING_S = 10.0
#: A call that lost a peer, without a report that the peer is away, is sent again after this time (seconds).
UNREPORTED_LOSS_S = 2.0


class Absence(NamedTuple):
    """Why a peer cannot be called."""

    cause: str
    for_good: bool
    ended: bool = False
    """It can only come back as another process, if at all."""
    joins: bool = False
    """It is about to join."""


def _keys_of(member: Member) -> tuple[Any, ...]:
    actor = None if member.actor_id is None else ray_internals.key_of_actor(member.actor_id)
    return keys_of(member.rank, member.name, actor)


def _wait_until(timeout_s: float | None, limit_s: float) -> float:
    """Until when a call that takes so long at most may wait before it is sent; ``time.monotonic``."""
    now, deadline = time.monotonic(), current_scope.get().deadline
    if on_loop():
        return now
    until = now + (limit_s if timeout_s is None else min(limit_s, timeout_s))
    return until if deadline is None else min(until, deadline)


def _route_to_client(rank: int) -> PeerRoute:
    """It names no lane: a reply takes the connection that brought the request."""
    no_lane: Any = None
    return PeerRoute(Member(rank, "a client", None, "", 0, "", -1), no_lane, no_lane, through_cpu=None)


class _Routes(dict[int, PeerRoute]):
    """By rank; one that is missing is made."""

    def __init__(self, make: Callable[[int], PeerRoute]) -> None:
        self._make = make

    def __missing__(self, rank: int) -> PeerRoute:
        return self._make(rank)


class PeerTable:
    """The members of a group as one of them reaches them. Thread-safe."""

    def __init__(self, group: str, services: Services) -> None:
        """``services``: told of every peer that is lost or comes back."""
        self._group, self._services = group, services
        self._members: dict[int, Member] = {}
        self.by_rank = _Routes(self._make)
        """The routes. Makes one when it is first used."""
        self._makers: dict[int, Callable[[Member], PeerRoute]] = {}
        self._ranks: dict[Any, int] = {}  # by rank, name and actor
        self.absences: dict[int, Absence] = {}
        """Of the peers that are away, by rank."""
        self._clients: dict[int, PeerRoute] = {}
        self._connections_of = Counter[int]()
        """By client: how many of its connections are watched."""
        self._closed = False
        self._changed = locks.condition()
        self.has_unread: Callable[[], bool] = lambda: False
        """Whether messages have arrived that are not handled yet: after this process was suspended, for instance."""
        self.removed: frozenset[int] = frozenset()
        """Ranks that were removed from the group."""

    # --- changes of the group --------------------------------------------------------------------------------

    def add_peer(self, route: PeerRoute) -> None:
        """Add a peer (or this member itself), or replace the route to it."""
        self.add_peers([route.member], lambda _: route)

    def add_peers(self, peers: Sequence[Member], make: Callable[[Member], PeerRoute]) -> None:
        """Add peers, or replace the routes to them. ``make``: makes the route to one of them when it is first used."""
        with self._changed:
            for peer in peers:
                self._members[peer.rank], self._makers[peer.rank] = peer, make
                self.by_rank.pop(peer.rank, None)
                self._ranks.update(dict.fromkeys(_keys_of(peer), peer.rank))
            if self.removed:  # an attempt to add one that failed removed its rank
                self.removed = self.removed.difference(peer.rank for peer in peers)
            self._changed.notify_all()

    def _make(self, rank: int) -> PeerRoute:
        with self._changed:
            if (route := self.by_rank.get(rank)) is None:
                route = self.by_rank[rank] = self._makers[rank](self._members[rank])
            return route

    def wait_for_route(self, rank: int, seconds: float) -> None:
        """Block until there is a route to this rank, or this process leaves the group; at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: rank in self._members or self._closed, seconds)

    def mark_away(self, rank: int, absence: Absence) -> None:
        """From now on calls to this peer fail at once; those that may be retried wait for its return."""
        with self._changed:
            self.absences[rank] = absence
            self._changed.notify_all()
        self._services.lose(rank, absence.for_good or absence.ended)

    def activate(self, rank: int) -> None:
        """Make a peer callable, for the first time or again."""
        with self._changed:
            self.absences.pop(rank, None)
            self._changed.notify_all()
        self._services.activate(rank, self.by_rank[rank].token)

    def remove_peer(self, rank: int) -> None:
        """Remove a peer that has left the group; its requests are refused from now on."""
        with self._changed:
            for key in _keys_of(self._members[rank]):
                if self._ranks.get(key) == rank:  # a later member may have the name of one that is dead
                    del self._ranks[key]
            for table in (self._members, self._makers, self.by_rank, self.absences):
                table.pop(rank, None)
            self.removed = self.removed | {rank}
            self._changed.notify_all()
        self._services.lose(rank, ended=True)

    def close(self) -> None:
        """This process leaves the group: every later look-up for a call fails, and waits for a return end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- routes ----------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[Member, ...]:
        """All members, by rank, this one included."""
        members = self._members.copy()  # another thread may add some
        return tuple(members[rank] for rank in sorted(members))

    @property
    def routes(self) -> tuple[PeerRoute, ...]:
        """The routes to all members, by rank, this member included. Makes those that do not exist yet."""
        return tuple(self.by_rank[member.rank] for member in self.members)

    def member(self, target: Any) -> Member:
        """The member that a target stands for; see ``route``. Makes no route."""
        return self._members[find(target, self._ranks, self._described)]

    def known(self, target: Any) -> Member | None:
        """As ``member``; None if the target is not known to be in the group."""
        rank = find(target, self._ranks)
        return None if rank is None else self._members.get(rank)

    def route(self, target: Any) -> PeerRoute:
        """The route to a target: an actor handle, a member's name, its rank or a ``Member``.

        Raises NotAMember, with the names of the members.
        """
        return self.by_rank[find(target, self._ranks, self._described)]

    def _described(self) -> str:
        return described(f"group {self._group!r}", ((member.rank, member.name) for member in self.members))

    def route_for_call(self, target: Any, timeout_s: float | None = None) -> PeerRoute:
        """As ``route``. Raises NotAMember also after this process has left the group.

        A target that is unknown while messages are unread may be announced by one: waits for it, but not on an event
        loop.
        """
        if self._closed:
            self.check_open()
        try:
            rank = self._ranks.get(target) if type(target) is str else None
            return self.by_rank[find(target, self._ranks, self._described) if rank is None else rank]
        except NotAMember:
            if not self._await_announcement(target, timeout_s):
                raise
        return self.by_rank[find(target, self._ranks, self._described)]

    def _await_announcement(self, target: Any, timeout_s: float | None) -> bool:
        """Block while messages are unread; whether the target has been announced."""

        def is_over() -> bool:
            with suppress(NotAMember):
                find(target, self._ranks, str)
                return True
            return self._closed

        until, looks = _wait_until(timeout_s, _UNREAD_S), 0
        while looks < 2 and time.monotonic() < until:
            looks = 0 if self.has_unread() else looks + 1
            with self._changed:
                if self._changed.wait_for(is_over, _LOOK_S):
                    return not self._closed
        return False

    def check_open(self) -> None:
        """Raise NotAMember if this process has left the group."""
        if self._closed:
            raise NotAMember(f"this process has left group {self._group!r} (it was shut down)")

    def route_back(self, rank: int) -> PeerRoute:
        """The route for replies to a caller. Raises NotAMember for a rank that is not, or no longer, in the group."""
        if rank not in self._members:
            if is_client(rank):
                return self._clients.get(rank) or self._clients.setdefault(rank, _route_to_client(rank))
            state = "was removed from" if rank in self.removed else "is not in"
            raise NotAMember(f"the caller (rank {rank}) {state} group {self._group!r}")
        return self.by_rank[rank]

    def add_connection(self, rank: int) -> None:
        """A client has opened a connection that is watched: it is there until the last of them ends."""
        with self._changed:
            self._connections_of[rank] += 1

    def end_connection(self, rank: int) -> None:
        """A client's connection has ended. With its last one, what this member holds for it is dropped."""
        with self._changed:
            self._connections_of[rank] -= 1
            if self._connections_of[rank]:
                return
            del self._connections_of[rank]
            self._clients.pop(rank, None)
        self._services.lose(rank, ended=True)

    # --- absence ---------------------------------------------------------------------------------------------

    def away(self) -> dict[str, Absence]:
        """The peers that are away, by name."""
        with self._changed:
            return {self._members[rank].name: absence for rank, absence in self.absences.items()}

    def check_present(self, route: PeerRoute, timeout_s: float | None = 0.0) -> None:
        """Raise PeerLost if the peer is away.

        ``timeout_s``: of a call to it (None: none given), which waits if it joins for the first time, but not on an
        event loop.
        """
        if (absence := self.absences.get(route.member.rank)) is not None:
            if absence.joins and not route.member.incarnation:
                absence = self._await_arrival(route.member.rank, timeout_s)
            if absence is not None:
                raise PeerLost(route.member.name, absence.cause, may_have_run=False)

    def _await_arrival(self, rank: int, timeout_s: float | None) -> Absence | None:
        """Block until a peer has joined, or does not; why it cannot be called then."""
        removed = Absence("it was removed from the group", for_good=True)

        def absence() -> Absence | None:
            return self.absences.get(rank) if rank in self._members else removed

        with self._changed:
            until = _wait_until(timeout_s, _JOINING_S)
            while (now := absence()) is not None and now.joins and (remaining := until - time.monotonic()) > 0:
                self._changed.wait(remaining)
            return now

    def why_unreachable(self, route: PeerRoute) -> str | None:
        """Why the process that a route leads to cannot be called any more; None if it can, as far as is known here."""
        if self._closed:
            return "this process has left the group"
        absence, now = self.absences.get(route.member.rank), self._members.get(route.member.rank)
        if absence is not None:
            return absence.cause
        same = now is not None and now.incarnation == route.member.incarnation
        return None if same else "its process was replaced, or removed"

    def await_everybody(self, until: float) -> bool:
        """Block until no peer is away that may come back, at most until that time (``time.monotonic``); False if it
        ran out.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: all(absence.for_good for absence in self.absences.values()), max(0.0, until - time.monotonic())
            )

    def incarnation(self, target: Any) -> int:
        """The incarnation of the process that a call to the target would reach now."""
        return self.member(target).incarnation

    def await_return(self, target: Any, after: int, until: float) -> bool:
        """Block until the peer is back as a later incarnation than ``after``, or was there all the time; False if
        ``until`` passes first. Raises PeerLost for a peer that will not come back.
        """
        peer = self.member(target)
        rank = peer.rank
        patience = time.monotonic() + UNREPORTED_LOSS_S
        with self._changed:
            while True:
                if self._closed or rank not in self._members:
                    raise PeerLost(peer.name, "it was removed from the group", may_have_run=False)
                absence, member = self.absences.get(rank), self._members[rank]
                if absence is None and member.incarnation > after:
                    return True
                if absence is not None and absence.for_good:
                    raise PeerLost(member.name, absence.cause, may_have_run=False)
                now = time.monotonic()
                # No report that the process ended: perhaps only the connection broke.
                if absence is None and now >= patience:
                    return True
                if now >= until:
                    return False
                self._changed.wait(min(until, patience) - now if absence is None else until - now)
