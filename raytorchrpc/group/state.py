"""The state of a group, as its supervisor keeps it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from raytorchrpc.group.roster import Roster
from raytorchrpc.membership.messages import GroupInfo, Loss, Prepared

#: Pause before another attempt to admit a restarted actor (seconds): doubled each time, up to the limit.
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 5.0
#: How long an attempt may take (seconds): doubled each time, up to the limit. The process may be suspended, and losses
#: of others are announced only after the attempt.
_FIRST_PATIENCE_S, _LONGEST_PATIENCE_S = 2.0, 10.0


class LostMember:
    """A member whose process has ended, or may have."""

    def __init__(self, cause: str) -> None:
        self.cause = cause
        self.since = self.next_poll = self.next_dial = time.monotonic()
        self.ended = False
        """Ray does not report its process any more: it can only come back as another one."""
        self.announced = False
        """The other members have been told."""
        self.dialling = False
        """A thread is trying to connect to it again."""
        self.restarted = False
        """Ray has restarted the actor, and its new process listens for requests."""
        self.patience_s = _FIRST_PATIENCE_S
        """How long the next attempt to admit it may take."""
        self._retry_s = _FIRST_RETRY_S

    def retry_later(self) -> None:
        """Put the next attempt to admit it off."""
        self.restarted = False  # others that return by then do not wait for it
        self.next_poll = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
        self.patience_s = min(2 * self.patience_s, _LONGEST_PATIENCE_S)


@dataclass
class GroupState:
    """What the group is now. Only the supervisor's thread changes it, and the end of the group."""

    roster: Roster
    info: GroupInfo
    prepared: dict[str, Prepared]
    """Where each member listens."""
    lost: dict[str, LostMember] = field(default_factory=dict)
    dead: dict[str, Loss] = field(default_factory=dict)
    """Members that died for good and left the roster, for members that missed the announcement."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    """Notified when ``lost`` changes, and when a member has caught up."""

    def lose(self, name: str, cause: str) -> None:
        with self.changed:
            self.lost[name] = LostMember(cause)

    def loss(self, name: str, for_good: bool = False) -> Loss:
        """What the other members are told of a lost member."""
        lost, incarnation = self.lost[name], self.roster.records[name].member.incarnation
        return Loss(name, incarnation, lost.cause, for_good, lost.ended)

    def recover(self, names: Iterable[str]) -> None:
        with self.changed:
            for name in names:
                self.lost.pop(name, None)
            self.changed.notify_all()

    def retry_later(self, names: Iterable[str]) -> None:
        """Put off the next attempt to readmit these."""
        for name in names:
            if (lost := self.lost.get(name)) is not None:
                lost.retry_later()

    def causes(self) -> dict[str, str]:
        """Why each lost member is lost, by name."""
        with self.changed:
            return {name: lost.cause for name, lost in self.lost.items()}

    def notify(self) -> None:
        with self.changed:
            self.changed.notify_all()
