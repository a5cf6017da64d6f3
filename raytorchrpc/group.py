"""The driver's side: form a group of actors, show it, end it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError

from raytorchrpc import _compat, device_map, joining, routing
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import BootstrapError, ConfigurationError, NotAMember
from raytorchrpc.forming import Forming, Round, current_owner, participants_of
from raytorchrpc.joining import GroupInfo
from raytorchrpc.member import MAX_TIMEOUT_S
from raytorchrpc.metrics import GroupStats
from raytorchrpc.peers import Member

logger = logging.getLogger(__name__)

#: How long ``shutdown`` waits for members that are busy (seconds); they leave when they get to it.
SHUTDOWN_TIMEOUT_S = 10.0
#: How long ``stats`` waits (seconds).
STATS_TIMEOUT_S = 5.0


class Group:
    """A set of Ray actors that can call each other directly. Made by ``init_group``; a context manager.

    Picklable: a copy in another process shows the same members and routes; only the original, in the
    process that formed the group, can end it.
    """

    def __init__(self, info: GroupInfo, participants: Mapping[str, Any] | None = None) -> None:
        """``participants``: by member name, the actor handle (None for this driver); None for a mere view."""
        self._info = info
        self._participants = participants

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

    def routes(self) -> routing.RoutePlan:
        """Who reaches whom by which lane, and why; ``print`` it for a table."""
        return self._info.plan

    def explain(self, a: Any, b: Any) -> str:
        """All that decided the road between two members (names, ranks, handles or Members), as text."""
        return self._info.plan.explain(self._member(a).name, self._member(b).name)

    def device_map(self, a: Any, b: Any) -> dict[device_map.Device, device_map.Device]:
        """Where a's tensors arrive on b: {a's gpu: b's gpu}, each as that process numbers its own, or "cpu"."""
        return dict(self._info.device_maps[self._member(a).name].get(self._member(b).name, {}))

    def stats(self, timeout_s: float = STATS_TIMEOUT_S) -> GroupStats:
        """Calls, bytes and seconds by pair and lane, since the group began; ``print`` it for a table.

        Asks every member through Ray: one that is busy in a method is listed in ``missing`` after ``timeout_s``.
        """
        participants = self._own("stats")
        asked = Round(participants, time.monotonic() + timeout_s)
        rows, failures = asked.all(joining.stats, {name: (self.generation,) for name in participants})
        return GroupStats((row for name in participants for row in rows.get(name, [])), tuple(failures))

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """End the group; the actors live on and can join another. Idempotent, never raises.

        Blocks until every member has left, at most ``timeout_s``: a member that is busy in a method Ray runs
        one at a time leaves when it gets to it. Calls under way fail with PeerLost, or still complete.
        """
        participants = self._own("shutdown")
        if _groups.get(self.name) is self:
            del _groups[self.name]
        if not ray.is_initialized():
            return
        asked = Round(participants, time.monotonic() + timeout_s)
        _, failures = asked.all(joining.leave, {name: (self.generation,) for name in participants})
        busy = [name for name, error in failures.items() if isinstance(error, TimeoutError)]
        if busy:
            logger.warning("group %r: %s will leave after what they run now", self.name, ", ".join(busy))

    def _own(self, what: str) -> Mapping[str, Any]:
        if self._participants is None:
            raise NotAMember(f"Group.{what}() works in the process that called init_group; this is a copy")
        return self._participants

    def _member(self, target: Any) -> Member:
        if isinstance(target, Member):
            target = target.name
        elif isinstance(target, ActorHandle):
            target = _compat.actor_id_of(target)
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
    """The group this process belongs to, or has formed. Raises NotAMember, naming those there are."""
    _forget_ended_sessions()
    if name in _groups:
        return _groups[name]
    info = joining.group_info()
    if info is not None and info.name == name:
        return Group(info)
    known = sorted({*_groups, *([info.name] if info else [])})
    raise NotAMember(f"this process is in no group {name!r} (known here: {', '.join(known) or 'none'})")


def init_group(
    actors: Sequence[Any] | Mapping[str, Any],
    *,
    name: str = "default",
    config: GroupConfig | None = None,
    include_driver: bool = False,
    timeout_s: float = 60,
) -> Group:
    """Join living Ray actors into a group whose members call each other directly.

    Args:
        actors: handles of any actor class, decorated or not; a list, or a dict that names the members. From a
            list, names are made of the class and the rank (``learner_0``).
        name: of the group, for ``get_group``.
        config: settings; None reads ``RAYTORCHRPC_*`` from the environment (``GroupConfig.from_env``).
        include_driver: makes this process a member too (the last rank, named "driver").
        timeout_s: seconds until BootstrapError names the member that did not answer. A sync actor answers
            between its methods.

    Blocks until every member can reach every other. On any error those that had joined are rolled back, and
    nothing keeps a later ``init_group`` of the same actors from working.

    Raises ConfigurationError for a request that cannot work (empty, duplicates, no handle, a bad device map)
    and BootstrapError for members that are dead, busy, taken or unreachable.
    """
    config = GroupConfig.from_env() if config is None else config
    if not isinstance(config, GroupConfig):
        raise ConfigurationError(f"config is a GroupConfig, not {config!r}")
    participants = participants_of(actors, include_driver)
    _check_name(name)
    _check_timeout(timeout_s)
    device_map.given_maps(config, list(participants))
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            info = _form(Forming(name, config, participants, deadline, timeout_s))
            break
        except BootstrapError as error:
            # An actor that went away for a restart after it was asked comes back as another process: begin again.
            if not isinstance(error.__cause__, ActorUnavailableError) or time.monotonic() >= deadline:
                raise
    for warning in info.plan.warnings:
        logger.warning("group %r: %s", name, warning)
    group = _groups[name] = Group(info, participants)
    return group


def _form(forming: Forming) -> GroupInfo:
    """One attempt; leaves nothing behind if it fails."""
    probes = forming.probe()
    plan, maps = forming.decide(probes)
    try:
        prepared = forming.prepare(probes, plan, maps)
        return forming.commit(probes, prepared, plan, maps)
    except BaseException:
        forming.roll_back()
        raise


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
    owner = current_owner() if ray.is_initialized() else None
    for name, group in list(_groups.items()):
        if group._info.owner != owner:
            del _groups[name]
