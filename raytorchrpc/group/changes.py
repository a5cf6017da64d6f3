"""Changes of a group's membership: requested by users, announced to all members in order, and reported to listeners.

The announcer resynchronises a member that missed a change.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Literal, NamedTuple

from raytorchrpc.errors import BootstrapError, PeerLost
from raytorchrpc.group.control_connections import Arguments, ControlConnections
from raytorchrpc.group.roster import GroupState, Roster
from raytorchrpc.membership import join
from raytorchrpc.membership.messages import Arrival, GroupInfo, Loss, Prepared
from raytorchrpc.process import threads

logger = logging.getLogger(__name__)

#: How many changes a ChangeLog keeps.
_LOGGED = 1000
#: How long members have to prepare for arrivals, and to activate or remove members (seconds).
_PREPARE_S, _ACTIVATE_S = 2.0, 0.5
#: The same to prepare for a member that returns: a base, and more for each member. The whole group waits for it, and a
#: suspended member takes all of it.
RETURN_S, _RETURN_EACH_S = 0.5, 0.002
#: The same for a loss, of which callbacks are to hear within 0.2 s: a base, and more for each member (seconds).
_LOSS_S, _LOSS_EACH_S = 0.05, 0.01
#: Pause before a member that did not answer is resynchronised (seconds), and how many are at a time: each takes a
#: thread and the full state of the group, and the supervisor would be late for the next change.
_RETRY_S, _AT_A_TIME = 0.5, 8


def return_s(members: int) -> float:
    """How long a group of so many members waits for one of them when another returns (seconds)."""
    return RETURN_S + _RETURN_EACH_S * members


class Change(NamedTuple):
    """A change of a group's membership, as ``Group.on_change`` reports it. Picklable."""

    kind: Literal["lost", "back", "dead", "added", "removed"]
    """``lost``: its process ended, or cannot be reached. ``back``: it can be called again, restarted or not. ``dead``:
    Ray will not restart it, so it has left the group. ``added`` and ``removed``: by ``Group.add`` and ``Group.remove``.
    """
    members: tuple[str, ...]
    """The names of the members that it concerns."""
    cause: str = ""
    """Why, for ``lost`` and ``dead``."""


class Listeners:
    """The callbacks of one group's changes. Thread-safe."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._entries: tuple[tuple[Callable[[Change], object]], ...] = ()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, listener: Callable[[Change], object]) -> Callable[[], None]:
        """Add a callback. Returns a function that removes it."""
        entry = (listener,)
        with self._lock:
            self._entries = (*self._entries, entry)

        def remove() -> None:
            with self._lock:
                self._entries = tuple(each for each in self._entries if each is not entry)

        return remove

    def call(self, change: Change) -> None:
        """Call all callbacks on this thread. Their exceptions are logged."""
        for (listener,) in self._entries:
            try:
                listener(change)
            except Exception:
                logger.exception("a callback of group %r raised", self._group)


class EventBus:
    """Calls listeners with every change, in order, on a thread of its own. Thread-safe."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._changes: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._listeners = Listeners(group)
        self.listen = self._listeners.add
        self.put: Callable[[Change], None] = self._changes.put

    def start(self) -> threading.Thread:
        """Start the thread. Raises ThreadShortage."""
        about = f"the event thread of group {self._group!r}"
        return threads.start(threads.serve, self._deliver_next, about, name=f"raytorchrpc-events-{self._group}")

    def stop(self) -> None:
        """End the thread once it has delivered what was queued before."""
        self._changes.put(None)

    def _deliver_next(self) -> bool:
        change = self._changes.get()
        if change is not None:
            self._listeners.call(change)
        return change is not None


class ChangeLog:
    """Keeps the latest changes, numbered from 1, for listeners in other processes. Thread-safe."""

    def __init__(self) -> None:
        self._changes: deque[Change] = deque(maxlen=_LOGGED)
        self._last = 0
        self._grown = threading.Condition()

    def put(self, change: Change) -> None:
        """Add a change."""
        with self._grown:
            self._changes.append(change)
            self._last += 1
            self._grown.notify_all()

    def after(self, number: int | None, wait_s: float) -> tuple[int, list[Change]]:
        """Return the number of the last change, and the changes after ``number``, as far as they are kept.

        Blocks until there is one, at most ``wait_s`` seconds. ``number`` None: return no changes, at once.
        """
        with self._grown:
            if number is None:
                return self._last, []
            self._grown.wait_for(lambda: self._last > number, wait_s)
            old = max(0, len(self._changes) - (self._last - number))
            return self._last, list(self._changes)[old:]


class RequestedChange:
    """A change that a user's thread requests and the supervisor's thread makes, at most once.

    One that was given up before its turn never runs.
    """

    def __init__(self, group: str, work: Callable[[], Any]) -> None:
        """``work`` checks all its input before it changes anything."""
        self._group, self._work = group, work
        self._done: Future[Any] = Future()

    def run(self) -> None:
        """Make the change. Never raises."""
        if not self._done.set_running_or_notify_cancel():
            return
        try:
            self._done.set_result(self._work())
        except BaseException as error:
            self._done.set_exception(error)

    def result(self, patience_s: float) -> Any:
        """Block for the result of ``work``; BootstrapError after ``patience_s`` seconds."""
        try:
            wait([self._done], patience_s)
        except BaseException:  # Ctrl-C
            self._done.cancel()
            raise
        if self._done.done():
            return self._done.result()
        if self._done.cancel():
            raise BootstrapError(f"group {self._group!r} is busy with another change; this one did not begin")
        raise BootstrapError(f"group {self._group!r}: this change began and has not finished after {patience_s:g} s")


class Announcer:
    """Used by the supervisor's thread."""

    def __init__(
        self,
        state: GroupState,
        connections: ControlConnections,
        submit: Callable[[Callable[[], None]], None],
    ) -> None:
        """``submit`` runs a function on the supervisor's thread."""
        self._state, self._connections, self._submit = state, connections, submit
        self._step = 0
        """Numbers the announcements."""
        self.behind: dict[str, float] = {}
        """Members that missed an announcement, and when each is resynchronised (``time.monotonic``)."""

    def mark_current(self, names: Iterable[str]) -> None:
        for name in names:
            self.behind.pop(name, None)
        self._state.notify()

    def others(self, names: Collection[str]) -> list[str]:
        """All other members that can be reached and have missed nothing."""
        out = {*names, *self._state.lost, *self.behind}
        return [name for name in self._state.roster.records if name not in out]

    def _announce(self, change: Callable[..., Any], arguments: Arguments, patience_s: float) -> dict[str, Any]:
        """Apply a change, one of ``join``'s, in each of these members; returns the answers in time."""
        self._step += 1
        asked = {name: (self._step, change, *args) for name, args in arguments.items()}
        results, failures = self._connections.call_all(join.apply, asked, time.monotonic() + patience_s)
        for name, error in failures.items():
            self.behind[name] = time.monotonic()
            if not isinstance(error, PeerLost):  # the failure detector reports that
                logger.info("%s missed a change of its group and will be resynchronised: %s", name, error)
        return results

    def prepare_arrivals(
        self,
        names: Sequence[str],
        others: Iterable[str],
        roster: Roster,
        info: GroupInfo,
        prepared: Mapping[str, Prepared],
        patience_s: float = _PREPARE_S,
    ) -> dict[str, Prepared]:
        """Have other members prepare for new or restarted ones; returns where they listen then.

        ``roster``, ``info``, ``prepared``: of the group with the arrivals. A member that does not answer within
        ``patience_s`` is resynchronised.
        """
        arrivals = {peer: (roster.arrival(peer, info, prepared, names),) for peer in others}
        return self._announce(join.prepare_arrivals, arrivals, patience_s)

    def activate(self, names: Sequence[str], others: Iterable[str]) -> None:
        ready = [peer for peer in others if peer not in self.behind]  # the others are resynchronised
        self._announce(join.activate, {peer: (names,) for peer in ready}, _ACTIVATE_S)

    def revoke(self, names: Sequence[str], others: Iterable[str], attempt: Roster) -> None:
        """Have other members that have prepared for these arrivals undo that: the attempt to admit them failed."""
        lost = self._state.lost
        losses = [
            Loss(name, attempt.records[name].member.incarnation, lost[name].cause, False, True)
            for name in names
            if name in lost
        ]
        new = [name for name in names if name not in lost]
        ready = [peer for peer in others if peer not in self.behind]  # the others are resynchronised
        if losses:
            self._announce(join.mark_lost, {peer: (losses,) for peer in ready}, return_s(len(ready)))
        if new:
            self._announce(join.remove_peers, {peer: (new,) for peer in ready}, return_s(len(ready)))

    def announce_removal(self, names: Sequence[str]) -> None:
        others = self.others(names)
        self._announce(join.remove_peers, {peer: (names,) for peer in others}, _ACTIVATE_S)

    def announce_losses(self, losses: Sequence[Loss]) -> None:
        """Blocks shortly: a member that does not answer in time is resynchronised later, on a thread that may block."""
        others = self.others(())
        self._announce(join.mark_lost, {peer: (losses,) for peer in others}, _LOSS_S + _LOSS_EACH_S * len(others))

    def reunite(self, name: str) -> bool:
        """Reconnect a member that was unreachable but did not end. False if it does not answer yet."""
        arrival = self._arrival(name, tuple(self._state.roster.records))
        told = self._announce(join.resync, {name: (arrival, self._away(name))}, _PREPARE_S)
        if name not in told:
            return False
        self._state.prepared.update(told)
        self.mark_current([name])
        self._reconnect(name)
        return True

    def _reconnect(self, name: str) -> None:
        """Have the other members connect to the same process again, as they dropped it or its addresses changed."""
        state, others = self._state, self.others([name])
        state.prepared.update(self.prepare_arrivals([name], others, state.roster, state.info, state.prepared))
        self.activate([name], others)

    def _arrival(self, name: str, coming: tuple[str, ...]) -> Arrival:
        roster = self._state.roster
        return Arrival(roster.spec(name), roster.table(self._state.info, self._state.prepared), coming)

    def _away(self, name: str) -> list[Loss]:
        """The losses that the other members know of."""
        lost = self._state.lost.items()
        away = [self._state.loss(other) for other, its in lost if its.is_announced and other != name]
        return [*away, *self._state.dead.values()]

    def due(self) -> list[float]:
        """When members are resynchronised next (``time.monotonic``)."""
        if self._is_resynchronising():
            return []
        return [when for name, when in self.behind.items() if name not in self._state.lost and when < math.inf]

    def _is_resynchronising(self) -> bool:
        """Whether so many members are being resynchronised that the next waits for the end of one."""
        return sum(when == math.inf for when in self.behind.values()) >= _AT_A_TIME

    def resync_due(self) -> None:
        """Send the full state to members whose time has come, on threads that may block."""
        now = time.monotonic()
        for name, when in list(self.behind.items()):
            if when <= now and name not in self._state.lost and not self._is_resynchronising():
                self._resync(name)

    def _resync(self, name: str) -> None:
        if name not in self._state.roster.records:
            self.mark_current([name])
            return
        self.behind[name] = math.inf
        self._step += 1
        step = self._step
        arguments = {name: (step, join.resync, self._arrival(name, ()), self._away(name))}

        def resync() -> None:
            answers: dict[str, Any] = {}
            try:
                answers, failures = self._connections.call_all(join.apply, arguments, time.monotonic() + _PREPARE_S)
                for error in failures.values():
                    logger.info("%s could not be resynchronised yet: %s", name, error)
            finally:
                done = answers.get(name)
                threads.persist(lambda: self._submit(lambda: self._handle_resynced(name, step, done)), _PREPARE_S)

        try:
            threads.start(resync, name=f"raytorchrpc-resync-{name}")
        except threads.ThreadShortage:
            self.behind[name] = time.monotonic() + _RETRY_S
            raise

    def _handle_resynced(self, name: str, step: int, prepared: Prepared | None) -> None:
        if name not in self._state.roster.records:
            self.mark_current([name])
        elif prepared is None:
            self.behind[name] = time.monotonic() + _RETRY_S
        elif step != self._step:
            self.behind[name] = 0.0  # there was another change meanwhile
        else:
            before, self._state.prepared[name] = self._state.prepared[name], prepared
            if prepared.addresses != before.addresses:
                self._reconnect(name)
            self.mark_current([name])
