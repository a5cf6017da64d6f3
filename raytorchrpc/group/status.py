"""The status of a group: its members' figures, and members that are away.

Members answer on threads of their own, so no method is disturbed or waited for. ``raytorchrpc top``, in another
process, asks through the cluster's key-value store: groups post their status there while somebody looks.
"""

from __future__ import annotations

import functools
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.metrics import Reading
from raytorchrpc.process import threads

if TYPE_CHECKING:
    from pydantic import TypeAdapter

logger = logging.getLogger(__name__)

#: For the members to answer (seconds).
STATUS_S = 2.0
#: How often a group checks whether somebody looks, and posts its status while somebody does (seconds).
PERIOD_S = 1.0
#: A look ends unless it is renewed within this time, and a post counts as old (seconds).
_LOOK_S = 10.0
#: In a post, members of a larger group add up their calls over all peers: its size is linear in the members.
MOST_WITH_PEERS = 32
#: Where statuses are posted, and where a process that looks changes the value.
_POSTS, _LOOKS = "status/", "looking"


@dataclass(frozen=True)
class GroupStatus:
    """The status of a group at one time. Goes to JSON and back (``as_json``)."""

    group: str
    generation: str
    at: float
    """Seconds, by a clock that is the same for every status of this group."""
    members: tuple[str, ...]
    away: dict[str, str]
    """Members that are away, and why."""
    silent: tuple[str, ...]
    """Members that did not answer, though they are not known to be away."""
    reading: Reading


@functools.cache
def as_json() -> TypeAdapter[GroupStatus]:
    """Converts a status."""
    from pydantic import TypeAdapter  # takes as long to load as the whole of raytorchrpc

    return TypeAdapter(GroupStatus)


def post_status(
    status: Callable[[], GroupStatus], generation: str, stopped: threading.Event, lasts: Callable[[], bool]
) -> None:
    """Post the status in the cluster's key-value store while somebody looks, until the group is stopped.

    ``lasts``: whether this process is still connected to the cluster; this ends otherwise. Runs on a thread of its own.
    """
    key = _POSTS + generation
    look, until, posted, warned = b"", 0.0, False, False

    def step() -> bool:
        nonlocal look, until, posted, warned
        if stopped.wait(PERIOD_S) or not lasts():
            return False
        try:
            now = ray_internals.stored(_LOOKS) or b""
            if now != look:
                look, until = now, time.monotonic() + _LOOK_S
            if time.monotonic() < until:
                ray_internals.store(key, as_json().dump_json(status()))
                posted = True
            elif posted:
                ray_internals.store(key, None)
                posted = False
        except Exception as error:
            if not warned and not stopped.is_set():
                logger.warning("the status of group generation %s cannot be posted: %s", key, error)
            warned = True
        return True

    threads.serve(step, f"the post of group {key}")
    if posted and stopped.is_set():  # else the cluster is not there
        try:
            ray_internals.store(key, None)
        except Exception as error:  # the cluster is gone
            logger.debug("the status of a group stays posted: %s", error)


class ClusterWatch:
    """Looks at the groups of a cluster. They begin to post within ``PERIOD_S``."""

    def __init__(self) -> None:
        self._posts: dict[str, tuple[float, float, bool]] = {}
        """By key: time of the post by the group's clock, when it was first seen here, and whether it has changed."""

    def groups(self, name: str | None = None) -> list[GroupStatus]:
        """The latest status of each group, or of those of one name. Call it at least every few seconds.

        A post that has not changed since the watch began may be that of a process that was killed, and is left out.
        """
        ray_internals.store(_LOOKS, secrets.token_bytes(8))
        found = []
        for key in ray_internals.stored_keys(_POSTS):
            try:
                if (text := ray_internals.stored(key)) is None:  # removed meanwhile
                    continue
                one = as_json().validate_json(text)
            except ValueError as error:
                logger.debug("posted by another release: %s", error)
                continue
            now, (at, seen, changed) = time.monotonic(), self._posts.get(key, (one.at, 0.0, False))
            if at != one.at or key not in self._posts:
                self._posts[key] = at, seen, changed = one.at, now, key in self._posts
            if changed and now < seen + _LOOK_S and name in (None, one.group):
                found.append(one)
        return sorted(found, key=lambda status: (status.group, status.generation))
