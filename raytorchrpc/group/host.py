"""Where a group's supervisor runs: the interface of both hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ray.exceptions import ActorUnavailableError

from raytorchrpc.calls.counters import GroupStats
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import BootstrapError
from raytorchrpc.group.chrome_trace import GroupTrace
from raytorchrpc.group.events import Change
from raytorchrpc.group.formation import Forming
from raytorchrpc.group.participants import current_owner
from raytorchrpc.group.roster import Roster
from raytorchrpc.group.status import GroupStatus
from raytorchrpc.group.supervisor import Supervisor
from raytorchrpc.lanes.common.tls import make_identity
from raytorchrpc.membership import local_setup
from raytorchrpc.membership.messages import GroupInfo
from raytorchrpc.membership.process_group import ProcessGroupInfo


class GroupHost(Protocol):
    """Who looks after a group, in this process or elsewhere: what a Group needs of it. See Group."""

    @property
    def info(self) -> GroupInfo:
        """What the group is now."""

    def add(self, actors: Any, timeout_s: float) -> tuple[str, ...]:
        """Returns the names of those who came in."""

    def remove(self, names: Sequence[str], timeout_s: float) -> None:
        """Let these go."""

    def wait_ready(self, timeout_s: float) -> dict[str, str]:
        """Returns who is still away, and why."""

    def process_group(
        self, backend: str, timeout_s: float, collective_s: float, names: Sequence[str] | None
    ) -> ProcessGroupInfo:
        """Have these members, or all, make one."""

    def stats(self, timeout_s: float) -> GroupStats:
        """What the members counted."""

    def look(self, timeout_s: float) -> GroupStatus:
        """The group as it is now."""

    def begin_trace(self, capacity: int) -> None:
        """Have the members record."""

    def end_trace(self) -> GroupTrace:
        """What they recorded."""

    def listen(self, listener: Callable[[Change], object]) -> Callable[[], None]:
        """Returns what ends it."""

    def end(self, timeout_s: float) -> None:
        """Idempotent, never raises."""


def form(name: str, config: GroupConfig, participants: dict[str, Any], timeout_s: float) -> Supervisor:
    """Form a group that this process looks after. Leaves nothing behind if it fails."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _attempt(name, config, participants, deadline, timeout_s)
        except BootstrapError as error:
            # An actor that went away for a restart after it was asked comes back as another process: begin again.
            if not isinstance(error.__cause__, ActorUnavailableError) or time.monotonic() >= deadline:
                raise


def _attempt(
    name: str, config: GroupConfig, participants: dict[str, Any], deadline: float, timeout_s: float
) -> Supervisor:
    tls = make_identity(name) if config.tls else None
    roster = Roster(name, config, current_owner(), local_setup.endpoint("supervisor"), tls=tls)
    forming = Forming(roster, participants, deadline, timeout_s)
    forming.probe()
    try:
        prepared = forming.prepare()
        info = forming.roster.info(prepared)
        forming.commit(info, prepared)
        return Supervisor(forming.roster, info, prepared)
    except BaseException:
        forming.roll_back()
        raise
