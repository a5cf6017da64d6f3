"""The public interface of a group: form it, inspect it, change it, end it."""

from __future__ import annotations

import logging
import os
import reprlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any

from ray.actor import ActorHandle

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.clients import own_groups
from raytorchrpc.calls.member import current, process_member
from raytorchrpc.calls.metrics import GroupStats
from raytorchrpc.calls.options import check_timeout, checked_timeout, takes_timeout
from raytorchrpc.calls.peers import Member, by_key, described, find
from raytorchrpc.calls.rejoin import check_process, formed_here
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import BootstrapError, ConfigurationError, NotAMember
from raytorchrpc.group import join as _join
from raytorchrpc.group import joining, tickets
from raytorchrpc.group.changes import Change
from raytorchrpc.group.detached import DetachedHost, detached_names, find_detached, form_detached
from raytorchrpc.group.formation import participants_of, with_named_maps
from raytorchrpc.group.joining import Client
from raytorchrpc.group.messages import GroupInfo
from raytorchrpc.group.process_group import ProcessGroupInfo
from raytorchrpc.group.supervisor import Supervisor, form
from raytorchrpc.group.tracing import Trace, check_events
from raytorchrpc.process import fork
from raytorchrpc.routing import routes as _routes
from raytorchrpc.tensors import devices

logger = logging.getLogger(__name__)

#: How long ``shutdown`` waits for busy members (seconds); they leave when their methods return.
SHUTDOWN_TIMEOUT_S = 10.0
_LONGEST_NAME = 256
STATS_TIMEOUT_S = 5.0


Host = Supervisor | DetachedHost


class Group:
    """A set of Ray actors that can call each other directly. Created by ``init_group``; a context manager.

    Picklable: a copy in another process shows the same members and routes. Only the original, in the process that
    formed the group, can change or end it. For a detached group, every ``get_group`` in a driver returns an original.

    Examples:
        >>> group = rtr.get_group()
        >>> len(group), group.name
        (3, 'default')
        >>> print(group.explain("driver", "learner"))
        driver...learner...
    """

    def __init__(self, info: GroupInfo, host: Host | None = None, *, joined: bool = False) -> None:
        """``host``: in the process that formed the group; None for a copy. ``joined``: what ``join`` returns."""
        self._first_info = info
        self._host, self._joined = host, joined
        self._session_lasts, self._has_ended = ray_internals.session_check(), False
        if host is not None:
            own_groups.add(info.generation, Client(host, info.generation))

    @property
    def _info(self) -> GroupInfo:
        if self._host is not None:
            return self._host.info
        known = self._first_info
        own = _join.group_info(known.generation)
        return known if own is None or own.members == known.members else own  # a member learns of every change

    @property
    def name(self) -> str:
        """The name given to ``init_group``."""
        return self._info.name

    @property
    def generation(self) -> str:
        """Identifies this forming of the group. Members refuse calls of another generation."""
        return self._info.generation

    @property
    def config(self) -> GroupConfig:
        """The settings that the group was formed with."""
        return self._info.config

    @property
    def members(self) -> tuple[Member, ...]:
        """All members, in rank order."""
        return self._info.members

    def member(self, target: Any) -> Member:
        """The member that ``target`` (an actor handle, a name, a rank or a Member) stands for. Raises NotAMember."""
        members = self.members
        names = ((member.rank, member.name) for member in members)
        return find(target, by_key(members), lambda: described(f"group {self.name!r}", names))

    def routes(self) -> _routes.RoutePlan:
        """The lanes between each pair of members, and why they were chosen; shown as a table."""
        return self._info.plan

    def explain(self, a: Any, b: Any) -> str:
        """Everything that decided the route between ``a`` and ``b`` (names, ranks, handles or Members), as text."""
        return self._info.plan.explain(self.member(a).name, self.member(b).name)

    def device_map(self, a: Any, b: Any) -> dict[devices.Device, devices.Device]:
        """Where a's tensors arrive on b: {a's gpu: b's gpu}, each as that process numbers its own, or "cpu"."""
        return self._info.plan.device_map(self.member(a).name, self.member(b).name)

    @takes_timeout
    def stats(self, timeout: float = STATS_TIMEOUT_S) -> GroupStats:
        """Calls, bytes and seconds by pair and lane, since the group was formed; shown as tables.

        ``GroupStats.methods``, ``queues`` and ``weights`` show the calls by method, queues and topics, and versions of
        weights. Members answer beside their methods, so a busy one is not waited for. A member that is away, or does
        not answer within ``timeout`` seconds, is listed in ``missing``.
        """
        return self._own("stats").stats(timeout_s=checked_timeout(timeout))

    def trace(self, path: str | os.PathLike[str], *, events: int = 200_000) -> Trace:
        """Record calls for Perfetto or chrome://tracing: ``with group.trace("run.json"): ...``.

        Each member records its calls, the methods it runs and the tensors it transfers out of band, with thread and
        time; arrows lead from calls to the methods they ran. When the block ends, this process collects the events,
        within 30 s, and writes one JSON file.

        Times are host times: CUDA work may continue after them. Clocks of several hosts are aligned by round trips;
        ``Trace.clock_error_s`` gives the error.

        Args:
            path: the file to write, in an existing folder.
            events: how many events each member keeps, about 200 bytes each. The oldest are dropped
                (``Trace.dropped``).

        Members stop recording after an hour. Works in the process that formed the group, and for detached groups.
        Entering the block raises ConfigurationError if the group is being traced already, or the folder is missing.
        """
        host = self._own("trace")
        check_events(events)
        return Trace(path, partial(host.begin_trace, events), host.end_trace)

    @takes_timeout
    def shutdown(self, timeout: float = SHUTDOWN_TIMEOUT_S) -> None:
        """End the group. The actors keep running, and can join another. Idempotent; raises for a bad argument only.

        Blocks until every member has left, at most ``timeout`` seconds. A member that is busy in a method of a sync
        actor leaves when the method returns. Calls in flight fail with PeerLost, or still complete. The name of a
        detached group is free then. ``members``, ``routes`` and ``explain`` go on showing the group as it was; other
        methods raise BootstrapError.
        """
        if fork.forked():
            return  # the group is the parent's
        host, timeout = self._own("shutdown"), checked_timeout(timeout)
        name = self._first_info.name
        if name in _groups and _groups[name]._host is host:
            del _groups[name]
            formed_here.pop(name, None)
        self._has_ended = True
        own_groups.remove(self._first_info.generation)
        host.end(timeout)

    @takes_timeout
    def process_group(
        self,
        backend: str,
        *,
        members: Sequence[Any] | None = None,
        timeout: float = 60,
        collective_timeout: float | None = None,
    ) -> ProcessGroupInfo:
        """Create a torch.distributed process group across members, for collectives, DDP and FSDP.

        It becomes the default process group of each member's process; a method gets it with
        ``raytorchrpc.process_group()``. Previous ones that have any of these members end. This one ends when a member
        of it is lost or removed: call this again then. Members that are added later are not part of it.

        Args:
            backend: ``"nccl"`` for CUDA tensors, which needs a GPU of its own in each member, or ``"gloo"`` for CPU
                tensors.
            members: handles, names, ranks or Members, for instance the learners without their collectors. The other
                members get none, and keep one that has none of these members. None: all members.
            timeout: seconds until BootstrapError names the members that failed. Members that are away may return
                within this time.
            collective_timeout: deadline of each collective, in seconds. None: ``GroupConfig.rpc_timeout_s``.

        Returns torch's ranks by member name: without gaps, in the order of the group's ranks. Blocks until all of them
        have the process group. Running methods are not interrupted.

        Raises ConfigurationError for an unknown backend, an empty list, a duplicate, a member that lacks a requirement,
        or a member whose process has initialised torch.distributed by itself; NotAMember for a target outside the
        group; BootstrapError.
        """
        host = self._own("process_group", "a member gets its own with raytorchrpc.process_group()")
        check_timeout(timeout)
        collective_s = self.config.rpc_timeout_s if collective_timeout is None else collective_timeout
        check_timeout(collective_s, "collective_timeout")
        names = None if members is None else self._names("process_group(members=...)", members)
        if names is not None and not 0 < len(names) == len(set(names)):
            raise ConfigurationError(
                f"process_group(members=...) takes each member once, and at least one; not {names}"
            )
        return host.process_group(backend, timeout_s=timeout, collective_s=collective_s, names=names)

    # --- members come and go -----------------------------------------------------------------------------------

    @takes_timeout
    def add(self, actors: Sequence[Any] | Mapping[str, Any], *, timeout: float = 60) -> tuple[Member, ...]:
        """Add actors while calls continue; returns their ``Member``s. They get the next ranks.

        Blocks until every member can call them, at most ``timeout`` seconds; if it fails, up to a second longer, and
        nothing has changed. A member that is suspended is waited for 2 s: it learns of them when it goes on, and its
        calls to them wait for that; on an event loop they may raise NotAMember or PeerLost first. ``actors`` and errors
        are as for ``init_group``. An actor that Ray restarts meanwhile is waited for. CUDA tensors to and from added
        members do not use torchrpc, whose device maps are fixed when its agents start; all other lanes work.
        """
        host = self._own("add")
        check_timeout(timeout)
        names = host.add(actors, timeout_s=timeout)
        return tuple(member for member in self.members if member.name in names)

    @takes_timeout
    def remove(self, actors: Sequence[Any], *, timeout: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Remove members (handles, names, ranks or Members) while calls among the others continue. The actors keep
        running.

        Blocks until the other members have been told, at most ``timeout`` seconds, and 2 s for one that is suspended,
        which learns of it when it goes on. Calls in flight to and from the
        removed members fail with PeerLost. Their ranks are not used again. A member that is busy in a method called
        through Ray leaves when the method returns.

        Raises ConfigurationError for a duplicate, the driver, an empty list, or all members; NotAMember for a target
        outside the group, such as an actor whose death for good the group has noticed. Then nothing has changed.
        """
        host = self._own("remove")
        check_timeout(timeout)
        host.remove(self._names("remove", actors), timeout_s=timeout)

    def leave(self) -> None:
        """Have this process leave a group that it has joined by ``raytorchrpc.join``. It keeps running.

        Blocks until the group knows, at most a few seconds. Calls in flight fail with PeerLost. Does nothing if this
        process is in the group no more. Raises NotAMember in any other process: ``remove`` and ``shutdown`` are for
        those.
        """
        fork.check_process()
        if tickets.own(self.generation) is not None:
            joining.leave(self.generation)
        elif not self._joined:
            raise NotAMember("only a process that has joined a group by raytorchrpc.join() leaves it by itself")

    def on_change(self, callback: Callable[[Change], object]) -> Callable[[], None]:
        """Call ``callback(change)`` whenever members are lost, return, die for good, are added or removed.

        All callbacks run on one thread of the group's own, in order. A callback may block; exceptions are logged.
        Returns a function that removes the callback.

        Works in the process that formed the group, and for detached groups in any driver, which then asks the group's
        host over Ray. Callbacks end with the group, or with this process.
        """
        if not callable(callback):
            raise ConfigurationError(f"on_change takes a function of one change, not {callback!r}")
        return self._own("on_change").listen(callback)

    @takes_timeout
    def wait_ready(self, timeout: float = 60) -> None:
        """Block until every member can call every other: lost members have returned, or are dead and out of the group,
        and members that missed a change have caught up.

        In a member, waits only for peers it knows to be down. Raises BootstrapError, naming the members that are not
        ready after ``timeout`` seconds, or if the group ends.
        """
        check_timeout(timeout)
        local = current.members.get(self.generation)
        if self._host is not None:
            away = self._host.wait_ready(timeout_s=timeout)
        elif local is not None:
            ready = local.peers.await_everybody(time.monotonic() + timeout)
            away = {} if ready else {name: absence.cause for name, absence in local.peers.away().items()}
        else:
            raise NotAMember("Group.wait_ready() works in the process that formed the group, and in its members")
        if away:
            reasons = "; ".join(f"{name!r}: {cause}" for name, cause in away.items())
            raise BootstrapError(f"not ready within {timeout:g} s: {reasons}", members=tuple(away))

    def _own(self, method: str, hint: str = "this is a copy") -> Host:
        fork.check_process()
        if self._host is None:
            raise NotAMember(f"Group.{method}() works in the process that called init_group; {hint}")
        return self._host

    def _names(self, method: str, actors: Any) -> list[str]:
        if isinstance(actors, (str, ActorHandle, Member)) or not isinstance(actors, Sequence):
            raise ConfigurationError(f"{method} takes a list of members, not {actors!r}")
        return [self.member(actor).name for actor in actors]

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._joined:
            self.leave()
        else:
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
        state = "ended, had " if self._has_ended or not self._session_lasts() else ""
        return f"<raytorchrpc.Group {self.name!r}: {state}{len(self)} members on {where}: {names}{more}>"


_groups: dict[str, Group] = {}  # formed by this process and not shut down
_forming: dict[str, object] = {}  # by name: a token of the ``init_group`` that forms the group


def get_group(name: str = "default") -> Group:
    """The group of this name that this process has formed or is a member of, or that is detached. Raises NotAMember,
    naming the groups that exist, or saying why a detached group cannot be used: it is still forming, or its host does
    not answer within 30 s.

    Examples:
        >>> rtr.get_group().members[0].name
        'learner'
    """
    check_process()
    _forget_ended(name)
    if name in _groups:
        return _groups[name]
    if not current.members:
        with suppress(NotAMember):
            process_member()  # in a restarted actor
    if (info := _join.group_info(name)) is not None:
        return Group(info)
    if (host := find_detached(name)) is not None:
        return Group(host.info, host)
    known = sorted({*_groups, *(info.name for info in _join.infos())})
    others = f"; detached groups of this cluster: {', '.join(detached)}" if (detached := detached_names()) else ""
    raise NotAMember(f"this process is in no group {name!r} (known here: {', '.join(known) or 'none'}){others}")


@takes_timeout
def init_group(
    actors: Sequence[Any] | Mapping[str, Any],
    *,
    name: str = "default",
    config: GroupConfig | None = None,
    include_driver: bool = False,
    detached: bool = False,
    timeout: float = 60,
) -> Group:
    """Join running Ray actors into a group whose members call each other directly.

    Args:
        actors: handles of any actor class, decorated or not: a list, or a dict that names the members. In a list,
            names are generated from class and rank (``learner_0``). It may be empty with ``include_driver`` and
            ``GroupConfig(joinable_by="cluster")``, for processes that ``join`` later.
        name: the group's name, for ``get_group``. No other group of this process has it, and no other detached group
            of the cluster; a name is taken from the moment that ``init_group`` is called.
        config: settings. None reads ``RAYTORCHRPC_*`` from the environment (``GroupConfig.from_env``).
        include_driver: makes this process a member too (the last rank, named "driver").
        detached: runs the group's supervisor in a small detached actor instead of this process. The group then outlives
            this process: restarted actors still return, and any later driver of the cluster can get the group with
            ``get_group(name)``, change it or end it. Its members should be detached actors, as Ray ends other actors
            with their driver. Without ``shutdown`` the group lasts as long as the cluster.
        timeout: seconds until BootstrapError names the members that did not answer; up to a second later, while the
            others leave again. A sync actor answers between its methods. While processes of members still load
            raytorchrpc and torch, which takes minutes where many share few cores, this time runs anew with each module
            that one has loaded; five times as long at most in all. With ``detached`` it begins when the host has
            started.

    Blocks until every member can reach every other. After 3 s, and then every 10 s, it says whom it waits for and why
    ("a_3: pending resources {GPU: 1}"): in one line of a terminal, elsewhere in the log. On any error, and after
    Ctrl-C, members that had joined leave again, and a later ``init_group`` of the same actors works.

    Raises ConfigurationError for a request that cannot work (empty list, duplicates, no handle, invalid device map) and
    BootstrapError for members that are dead, busy, unreachable, or in a group of this name.

    Examples:
        >>> with rtr.init_group({"learner": first, "actor": second}, name="pair") as pair:
        ...     [member.name for member in pair.members]
        ['learner', 'actor']
    """
    check_process()
    config = GroupConfig.from_env() if config is None else config
    if not isinstance(config, GroupConfig):
        raise ConfigurationError(f"config is a GroupConfig, not {config!r}")
    if detached and include_driver:
        raise ConfigurationError(
            "a detached group outlives its driver, so the driver cannot be a member: leave out include_driver or "
            "detached"
        )
    participants = participants_of(actors, include_driver, others_join=config.joinable_by == "cluster")
    check_timeout(timeout)
    config = with_named_maps(config, participants)
    forming: Callable[..., Host] = form_detached if detached else form
    hosts: list[Host] = []
    with _reserved(name):
        try:
            host = forming(name, config, participants, timeout, uuid.uuid4().hex[:12], hosts.append)
            info = host.info
            group = _groups[name] = Group(info, host)
            formed_here[name] = detached
        except BaseException:  # Ctrl-C may come when the group has formed
            for host in hosts:
                Group(host.info, host).shutdown()
            raise
    for warning in (*info.plan.warnings, *info.plan.unused):
        logger.warning("group %r: %s", name, warning)
    return group


@takes_timeout
def join(group: str | None = None, name: str | None = None, *, instance: Any = None, timeout: float = 60) -> Group:
    """Make this process a member of a group, from inside: one that ``init_group`` and ``Group.add`` cannot reach.

    For a process that a member has started, directly or not (a child of an actor, a worker of torch.multiprocessing, an
    inference engine), which needs no Ray; and, with ``GroupConfig(joinable_by="cluster")``, for any process that is
    connected to the group's Ray cluster, such as a driver, or an actor in a method that never ends.

    Args:
        group: the group's name. None: the group of the nearest process above this one that is a member.
        name: the name of the new member. None: that of the parent and the pid (``trainer.4711``).
        instance: an object whose decorated methods members may call. None: the actor in this process, if there is one.
        timeout: seconds until BootstrapError.

    Blocks until every member can call this one. It is a member like the others, with the next rank, until its process
    ends, ``Group.leave`` or the group's end. Returns a copy of the group, which leaves at the end of a ``with`` block.

    Raises NotAMember if no group can be joined, ConfigurationError for a name that is taken, and BootstrapError. A
    child made by ``fork`` alone cannot join, as it has parts of its parent's membership: use ``spawn``, ``forkserver``
    or ``subprocess``.

    Examples:
        >>> def simulate():  # in a process that the actor "collector" has started
        ...     with rtr.join(name="simulator"):
        ...         rtr.rpc_sync("learner").double(1)
    """
    check_process()
    check_timeout(timeout)
    info = _join.group_info(joining.enter(group, name, instance, timeout))
    if info is None:
        raise BootstrapError("the group has ended just now")
    return Group(info, joined=True)


@contextmanager
def _reserved(name: Any) -> Iterator[None]:
    """Only this thread forms a group of that name within the block. Raises if the name is taken, or cannot be one."""
    _forget_ended(name)
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:  # it is part of each handshake
        raise ConfigurationError(
            f"a group's name is a string of 1 to {_LONGEST_NAME} characters, not {reprlib.repr(name)}"
        )
    token = object()
    try:
        if _forming.setdefault(name, token) is not token:
            raise BootstrapError(f"group {name!r} is being formed by another thread; choose another name=")
        if name in _groups:
            ended_by = f"raytorchrpc.get_group({name!r}).shutdown()"
            raise BootstrapError(f"group {name!r} exists; end it with {ended_by}, or choose another name=")
        yield
    finally:
        if _forming.get(name) is token:
            del _forming[name]


def _forget_ended(name: Any) -> None:
    """Drop groups of a Ray session that is over: their actors are gone; and one of this name whose host is dead."""
    for known, group in list(_groups.items()):
        host = group._host
        if not group._session_lasts() or (known == name and isinstance(host, DetachedHost) and host.has_ended()):
            group.shutdown()
