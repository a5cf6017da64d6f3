"""The driver's side: form a group of actors, show it, end it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from ray.actor import ActorHandle

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.counters import GroupStats
from raytorchrpc.calls.current import current_local, process_member
from raytorchrpc.calls.options import MAX_TIMEOUT_S
from raytorchrpc.calls.peers import Member
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import BootstrapError, ConfigurationError, NotAMember
from raytorchrpc.group.detached import find_detached, form_detached
from raytorchrpc.group.events import Change
from raytorchrpc.group.host import GroupHost, form
from raytorchrpc.group.participants import current_session, participants_of
from raytorchrpc.group.tracing import Trace
from raytorchrpc.membership import join
from raytorchrpc.membership.messages import GroupInfo
from raytorchrpc.membership.process_group import ProcessGroupInfo
from raytorchrpc.process import fork
from raytorchrpc.routing import routes as _routes
from raytorchrpc.tensors import devices
from raytorchrpc.topology import device_map

logger = logging.getLogger(__name__)

#: How long ``shutdown`` waits for members that are busy (seconds); they leave when they get to it.
SHUTDOWN_TIMEOUT_S = 10.0
#: How long ``stats`` waits (seconds).
STATS_TIMEOUT_S = 5.0


class Group:
    """A set of Ray actors that can call each other directly. Made by ``init_group``; a context manager.

    Picklable: a copy in another process shows the same members and routes; only the original, in the
    process that formed the group, can end it. Of a detached group, every ``get_group`` in a driver is an original.
    """

    def __init__(self, info: GroupInfo, keeper: GroupHost | None = None) -> None:
        """``keeper``: looks after it, for the process that formed it; None for a mere view."""
        self._first_info = info
        self._keeper = keeper
        self._session = () if keeper is None else current_session()

    @property
    def _info(self) -> GroupInfo:
        if self._keeper is not None:
            return self._keeper.info
        known, own = self._first_info, join.group_info()
        if own is None or own.generation != known.generation or own.members == known.members:
            return known
        return own  # a member hears of every change, but knows only its own routes

    @property
    def name(self) -> str:
        """As given to ``init_group``."""
        return self._info.name

    @property
    def generation(self) -> str:
        """Changes with every ``init_group``; calls of an older one are refused."""
        return self._info.generation

    @property
    def config(self) -> GroupConfig:
        """The settings the group was formed with."""
        return self._info.config

    @property
    def members(self) -> tuple[Member, ...]:
        """Everybody, by rank."""
        return self._info.members

    def routes(self) -> _routes.RoutePlan:
        """Who reaches whom by which lane, and why; ``print`` it for a table."""
        return self._info.plan

    def explain(self, a: Any, b: Any) -> str:
        """All that decided the route between two members (names, ranks, handles or Members), as text."""
        return self._info.plan.explain(self._member(a).name, self._member(b).name)

    def device_map(self, a: Any, b: Any) -> dict[devices.Device, devices.Device]:
        """Where a's tensors arrive on b: {a's gpu: b's gpu}, each as that process numbers its own, or "cpu".

        ConfigurationError in a member that is neither: it knows only its own maps and routes.
        """
        info, first, second = self._info, self._member(a).name, self._member(b).name
        if first != second:
            info.plan.route(first, second)
        return dict(info.device_maps.get(first, {}).get(second, {}))

    def stats(self, timeout_s: float = STATS_TIMEOUT_S) -> GroupStats:
        """Calls, bytes and seconds by pair and lane, since the group began; ``print`` it for a table.

        Asks every member through Ray: one that is busy in a method is listed in ``missing`` after ``timeout_s``.
        """
        return self._own("stats").stats(timeout_s)

    def trace(self, path: str | os.PathLike[str], *, events: int = 200_000) -> Trace:
        """Record what calls do, for Perfetto or chrome://tracing: ``with group.trace("run.json"): ...``.

        Each member records its calls, the methods that it runs and tensors that travel beside messages, with the thread
        and the time; arrows lead from calls to what they ran. When the block ends, this process fetches what was
        recorded, within 30 s, and writes one JSON file. Times are the host's: CUDA work goes on after them. Between
        hosts they are aligned by round trips; ``Trace.clock_error_s`` says how well.

        Args:
            path: the file to write, in a folder that exists.
            events: each member keeps so many, about 200 bytes each, and forgets the oldest (``Trace.dropped``).

        A trace takes an hour at most; members stop then by themselves. Works in the process that formed the group, and
        for detached groups. Entering raises ConfigurationError if a trace is under way, or the folder is missing.
        """
        keeper = self._own("trace")
        _check_events(events)
        return Trace(keeper, path, events)

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """End the group; the actors live on and can join another. Idempotent, never raises.

        Blocks until every member has left, at most ``timeout_s``: a member that is busy in a method Ray runs
        one at a time leaves when it gets to it. Calls under way fail with PeerLost, or still complete.
        """
        if fork.forked():
            return  # the group is the parent's
        keeper = self._own("shutdown")
        name = self._first_info.name
        if _groups.get(name) is self:
            del _groups[name]
        keeper.end(timeout_s)

    def process_group(
        self,
        backend: str,
        *,
        members: Sequence[Any] | None = None,
        timeout_s: float = 60,
        collective_timeout_s: float | None = None,
    ) -> ProcessGroupInfo:
        """Have members make a torch.distributed process group, for collectives, DDP and FSDP among them.

        It becomes the default process group of each one's process; a method gets it with
        ``raytorchrpc.process_group()``. One that was made before ends. So does this one when a member of it is lost or
        removed: then call this again. Members that are added later are not in it.

        Args:
            backend: ``"nccl"``, for CUDA tensors, needs a GPU of its own in each member; ``"gloo"``, for CPU tensors.
            members: those that make it (handles, names, ranks or Members), as learners without their collectors. The
                others then have none. None: all.
            timeout_s: seconds until BootstrapError names who could not. Waits so long for members that are away, too.
            collective_timeout_s: deadline of each collective, in seconds; None takes ``GroupConfig.rpc_timeout_s``.

        Returns torch's ranks by member name: without gaps, in the order of the group's ranks. Blocks until all have
        one, on threads of their own: methods that run there go on.

        Raises ConfigurationError for an unknown backend, no members or the same twice, members without what it needs,
        or one that has initialised torch.distributed by itself, NotAMember for who is not in the group, and
        BootstrapError.
        """
        if self._keeper is None:
            fork.check_process()
            raise NotAMember(
                "Group.process_group() works in the process that called init_group; a member gets its own with "
                "raytorchrpc.process_group()"
            )
        _check_timeout(timeout_s)
        collective_s = self.config.rpc_timeout_s if collective_timeout_s is None else collective_timeout_s
        _check_timeout(collective_s)
        names = None if members is None else self._names("process_group(members=...)", members)
        if names is not None and not 0 < len(names) == len(set(names)):
            raise ConfigurationError(
                f"process_group(members=...) takes each member once, and at least one; not {names}"
            )
        return self._keeper.process_group(backend, timeout_s, collective_s, names)

    # --- members come and go -----------------------------------------------------------------------------------

    def add(self, actors: Sequence[Any] | Mapping[str, Any], *, timeout_s: float = 60) -> tuple[Member, ...]:
        """Take more actors in, while calls go on; returns their ``Member``s. They get the next ranks.

        Blocks until everybody can call them. ``actors`` and errors as for ``init_group``; if it fails, nothing has
        changed. CUDA tensors to and from them do not go by torchrpc, whose device maps are fixed when its agents
        start; every other lane is open to them.
        """
        keeper = self._own("add")
        _check_timeout(timeout_s)
        names = keeper.add(actors, timeout_s)
        return tuple(member for member in self.members if member.name in names)

    def remove(self, actors: Sequence[Any], *, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Let members go (handles, names, ranks or Members), while calls go on among the others. The actors live on.

        Blocks until the others know. Calls under way to the leaving members, and from them, fail with PeerLost. Their
        ranks are not given to others. A member that is busy in a method that Ray runs leaves when it gets to it.

        Raises ConfigurationError for a member that is named twice, for the driver, for no members and for all of them,
        and NotAMember for who is not in the group; then nothing has changed.
        """
        keeper = self._own("remove")
        _check_timeout(timeout_s)
        keeper.remove(self._names("remove", actors), timeout_s)

    def on_change(self, callback: Callable[[Change], object]) -> Callable[[], None]:
        """Call ``callback(change)`` whenever members are lost, come back, die for good, are added or removed.

        On one thread of the group's own, in order; it may block, and what it raises is logged. Returns what ends it.
        ConfigurationError for a detached group, whose changes happen in another process.
        """
        return self._own("on_change").listen(callback)

    def wait_ready(self, timeout_s: float = 60) -> None:
        """Block until every member can be called by every other: those that were lost are back, or dead for good and
        out of the group, and those that stood still meanwhile have been told.

        In a member it waits for those to be back of whom it knows that they are away. Raises BootstrapError naming who
        is not ready after ``timeout_s``.
        """
        _check_timeout(timeout_s)
        local = current_local()
        if self._keeper is not None:
            away = self._keeper.wait_ready(timeout_s)
        elif local is not None and local.generation == self.generation:
            ready = local.peers.await_everybody(time.monotonic() + timeout_s)
            away = {} if ready else {name: absence.cause for name, absence in local.peers.away().items()}
        else:
            raise NotAMember("Group.wait_ready() works in the process that formed the group, and in its members")
        if away:
            reasons = "; ".join(f"{name!r}: {cause}" for name, cause in away.items())
            raise BootstrapError(f"not ready within {timeout_s:g} s: {reasons}", members=tuple(away))

    def _own(self, what: str) -> GroupHost:
        fork.check_process()
        if self._keeper is None:
            raise NotAMember(f"Group.{what}() works in the process that called init_group; this is a copy")
        return self._keeper

    def _names(self, what: str, actors: Any) -> list[str]:
        if isinstance(actors, (str, ActorHandle, Member)) or not isinstance(actors, Sequence):
            raise ConfigurationError(f"{what} takes a list of members, not {actors!r}")
        return [self._member(actor).name for actor in actors]

    def _member(self, target: Any) -> Member:
        if isinstance(target, Member):
            target = target.name
        elif isinstance(target, ActorHandle):
            target = ray_internals.actor_id_of(target)
        for member in self.members:
            if target in (member.name, member.rank, member.actor_id):
                return member
        names = ", ".join(f"{member.name} ({member.rank})" for member in self.members)
        raise NotAMember(f"{target!r} is not in group {self.name!r}; its members: {names}")

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __len__(self) -> int:
        return len(self.members)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the handles: a copy that held them would keep the actors alive from inside the group.
        return Group, (self._info,)

    def __repr__(self) -> str:
        names = ", ".join(member.name for member in self.members[:6])
        more = f", ... {len(self) - 6} more" if len(self) > 6 else ""
        hosts = len({member.node_id for member in self.members})
        where = f"{hosts} node{'s' if hosts > 1 else ''}"
        return f"<raytorchrpc.Group {self.name!r}: {len(self)} members on {where}: {names}{more}>"


_groups: dict[str, Group] = {}  # formed by this process and not shut down


def get_group(name: str = "default") -> Group:
    """The group this process belongs to, or has formed, or a detached one of the cluster that this process is connected
    to. Raises NotAMember, naming those there are.
    """
    fork.check_process()
    _forget_ended_sessions()
    if name in _groups:
        return _groups[name]
    if current_local() is None:
        with suppress(NotAMember):
            process_member()  # in a restarted actor
    info = join.group_info()
    if info is not None and info.name == name:
        return Group(info)
    if (keeper := find_detached(name)) is not None:
        return Group(keeper.info, keeper)
    known = sorted({*_groups, *([info.name] if info else [])})
    raise NotAMember(f"this process is in no group {name!r} (known here: {', '.join(known) or 'none'})")


def init_group(
    actors: Sequence[Any] | Mapping[str, Any],
    *,
    name: str = "default",
    config: GroupConfig | None = None,
    include_driver: bool = False,
    detached: bool = False,
    timeout_s: float = 60,
) -> Group:
    """Join living Ray actors into a group whose members call each other directly.

    Args:
        actors: handles of any actor class, decorated or not; a list, or a dict that names the members. From a
            list, names are made of the class and the rank (``learner_0``).
        name: of the group, for ``get_group``.
        config: settings; None reads ``RAYTORCHRPC_*`` from the environment (``GroupConfig.from_env``).
        include_driver: makes this process a member too (the last rank, named "driver").
        detached: has the group looked after by a small actor of its own, a detached one, and not by this process. So it
            goes on when this process has ended: restarted actors still come back, and any later driver of the cluster
            gets the group with ``get_group(name)`` and can change or end it. Its members should be detached actors,
            as Ray ends others with their driver. Without ``shutdown`` it stays as long as the cluster.
        timeout_s: seconds until BootstrapError names the member that did not answer. A sync actor answers
            between its methods.

    Blocks until every member can reach every other. On any error those that had joined are rolled back, and
    nothing keeps a later ``init_group`` of the same actors from working.

    Raises ConfigurationError for a request that cannot work (empty, duplicates, no handle, a bad device map)
    and BootstrapError for members that are dead, busy, taken or unreachable.
    """
    fork.check_process()
    config = GroupConfig.from_env() if config is None else config
    if not isinstance(config, GroupConfig):
        raise ConfigurationError(f"config is a GroupConfig, not {config!r}")
    if detached and include_driver:
        raise ConfigurationError(
            "a detached group outlives the driver, which can then be no member: leave out include_driver or detached"
        )
    participants = participants_of(actors, include_driver)
    _check_name(name)
    _check_timeout(timeout_s)
    device_map.given_maps(config, list(participants))
    forming = form_detached if detached else form
    keeper = forming(name, config, participants, timeout_s)
    try:
        info = keeper.info
        group = _groups[name] = Group(info, keeper)
    except BaseException:
        keeper.end(SHUTDOWN_TIMEOUT_S)
        raise
    for warning in info.plan.warnings:
        logger.warning("group %r: %s", name, warning)
    return group


def _check_events(events: Any) -> None:
    if isinstance(events, bool) or not isinstance(events, int) or events < 1:
        raise ConfigurationError(f"events is how many each member keeps, 1 or more; not {events!r}")


def _check_timeout(timeout_s: Any) -> None:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ConfigurationError(
            f"timeout_s must be above 0, and at most {MAX_TIMEOUT_S} (a day), in seconds; not {timeout_s!r}"
        )


def _check_name(name: Any) -> None:
    _forget_ended_sessions()
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"a group's name is a non-empty text, not {name!r}")
    if name in _groups:
        raise BootstrapError(f"group {name!r} exists; end it with its shutdown(), or choose another name=")


def _forget_ended_sessions() -> None:
    """Drop groups of a Ray session that is over: their actors are gone."""
    session = current_session()
    for group in list(_groups.values()):
        if group._session != session:
            group.shutdown()
