"""The state of a group, as its supervisor keeps it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from raytorchrpc.group.roster import Roster
from raytorchrpc.membership.messages import GroupInfo, Prepared
from raytorchrpc.membership.updates import Loss

#: A restarted actor that could not be taken in is tried again after this (seconds), doubled each time.
_RETRY_S = 0.1


class LostMember:
    """A member whose process has ended, or may have."""

    def __init__(self, cause: str) -> None:
        self.cause = cause
        self.since = self.next_look = time.monotonic()
        self.told = False
        """The others know."""
        self.dialling = False
        """A thread tries to get another line to it."""
        self.next_dial = self.since
        self.returning = False
        """Ray has restarted it."""
        self.pause_s = _RETRY_S
        """Before the next attempt to take it in; doubled each time."""


@dataclass
class GroupState:
    """What the group is now. Only the thread that looks after the group changes it, and its end."""

    roster: Roster
    info: GroupInfo
    prepared: dict[str, Prepared]
    missing: dict[str, LostMember] = field(default_factory=dict)
    dead: dict[str, Loss] = field(default_factory=dict)
    """Who died for good and is on the roster no longer: for those who have missed it."""
