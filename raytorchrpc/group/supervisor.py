"""Looking after a group that has formed: who is gone, who comes back, who is added or removed.

One thread, in the process that formed the group. It hears of a process's end by a connection of its own to each member,
asks Ray what became of the actor, and tells the others over the same connections.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.counters import GroupStats
from raytorchrpc.calls.peers import process_token
from raytorchrpc.errors import BootstrapError, RayTorchRpcError
from raytorchrpc.group.announcements import MEET_S, WORD_S, Announcer
from raytorchrpc.group.chrome_trace import GroupTrace
from raytorchrpc.group.control_connections import ControlConnections
from raytorchrpc.group.events import Change, EventBus
from raytorchrpc.group.formation import Forming
from raytorchrpc.group.participants import current_session, participants_of
from raytorchrpc.group.process_groups import boot, check_backend
from raytorchrpc.group.ray_round import Round
from raytorchrpc.group.requested_change import RequestedChange
from raytorchrpc.group.restarts import MailboxRound, Returns
from raytorchrpc.group.roster import Roster
from raytorchrpc.group.state import GroupState, LostMember
from raytorchrpc.group.status import LOOK_S, GroupStatus, Post, look
from raytorchrpc.group.tracing import Tracing
from raytorchrpc.membership import join, updates
from raytorchrpc.membership.messages import GroupInfo, Prepared
from raytorchrpc.membership.process_group import ProcessGroupInfo
from raytorchrpc.membership.updates import Loss
from raytorchrpc.process import fork, threads

logger = logging.getLogger(__name__)

#: How often Ray is asked about an actor whose process is gone, or seems so (seconds); later less often.
_LOOK_S = 0.02
_LOOK_SELDOM_S = 0.5
#: How long members have to do what a change asks of them (seconds). One that does not catches up later.
_CHANGE_S = 10.0
#: For a new line to a member whose line ended though Ray believes in it (seconds). A host without power answers
#: nothing, and Ray may believe in its actors for half a minute; so this is what the others wait to be told.
_DIAL_S = 0.4
#: How long the end of a group waits for its threads (seconds); they end by themselves.
_STOP_S = 2.0
#: A restarted actor that could not be taken in is tried again, at most so much later (seconds) than the last time.
_RETRY_S = 5.0


class Supervisor:
    """One per group."""

    def __init__(self, roster: Roster, info: GroupInfo, prepared: Mapping[str, Prepared]) -> None:
        self._now = GroupState(roster, info, dict(prepared))
        self._session = current_session()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._settled = threading.Condition()
        """Told when somebody is missing, or no longer."""
        self._news = EventBus(roster.name)
        self._tried: dict[str, int] = {}
        """The latest incarnation of each member that could not be taken in."""
        self._stopped = False
        self._booting, self._booted = threading.Lock(), 0
        """Process groups, one at a time; how many there were."""
        self._lines = ControlConnections(roster.credentials)
        self._returns = Returns(roster.generation)
        self._teller = Announcer(self._now, self._lines, self._soon, self._wake)
        self._tracing = Tracing(self._lines)
        names = [name for name, handle in roster.handles.items() if handle is not None]
        self._threads: list[threading.Thread] = []
        self._post: Post | None = None
        if roster.config.metrics_period_s is not None:
            self._post = Post(self._look_to_post, roster.generation, roster.config.metrics_period_s)
        try:
            self._returns.post(roster)
            self._watch(names)
            fork.register(self)
            self._threads.append(threads.start(self._look_after, name=f"raytorchrpc-group-{roster.name}"))
            self._threads.append(self._news.start())
            if self._post is not None:
                self._threads.append(self._post.start())
        except BaseException:
            self.stop()
            raise

    @property
    def roster(self) -> Roster:
        """Who is in the group now."""
        return self._now.roster

    @property
    def info(self) -> GroupInfo:
        """What everybody knows of the group now."""
        return self._now.info

    @property
    def prepared(self) -> Mapping[str, Prepared]:
        """Where each member listens, by name."""
        return self._now.prepared

    # --- what others ask for -----------------------------------------------------------------------------------

    def add(self, actors: Any, timeout_s: float) -> tuple[str, ...]:
        """See Group.add; returns the names."""
        deadline = time.monotonic() + timeout_s

        def come() -> tuple[str, ...]:
            handles = participants_of(actors, False, first_rank=self.roster.next_rank)
            self.roster.check_newcomers(handles)
            self._take_in(handles, deadline, timeout_s, "added")
            return tuple(handles)

        names: tuple[str, ...] = self._do(come, timeout_s + _CHANGE_S)
        return names

    def remove(self, names: Sequence[str], timeout_s: float) -> None:
        """See Group.remove."""
        self._do(lambda: self._let_go(tuple(names), timeout_s), timeout_s + _CHANGE_S)

    def _wake(self) -> None:
        with self._settled:
            self._settled.notify_all()

    def missing(self) -> dict[str, str]:
        """Who is away, and why."""
        with self._settled:
            return {name: missing.cause for name, missing in self._now.missing.items()}

    def wait_ready(self, timeout_s: float, names: Sequence[str] | None = None) -> dict[str, str]:
        """Block until none of these (None: of all) is away, and all know who is there, at most ``timeout_s``, or until
        the group ends; returns who is not ready, and why.
        """

        def waited_for() -> dict[str, str]:
            behind = dict.fromkeys(tuple(self._teller.behind), "it has not taken note yet of who else is there")
            return {
                name: cause for name, cause in {**behind, **self.missing()}.items() if names is None or name in names
            }

        with self._settled:
            self._settled.wait_for(lambda: not waited_for() or self._stopped, timeout_s)
        return waited_for()

    def process_group(
        self, backend: str, timeout_s: float, collective_s: float, names: Sequence[str] | None = None
    ) -> ProcessGroupInfo:
        """See Group.process_group. Not a task of the thread's: that one has to notice who is lost meanwhile."""
        deadline = time.monotonic() + timeout_s
        if not self._booting.acquire(timeout=timeout_s):
            raise BootstrapError(f"group {self.roster.name!r}: another process group is being made")
        try:
            check_backend(backend, {})  # a wrong name need not wait for anybody
            if away := self.wait_ready(timeout_s, names):
                gone = ", ".join(f"{name} ({cause})" for name, cause in away.items())
                raise BootstrapError(f"group {self.roster.name!r}: not back yet: {gone}", members=tuple(away))
            self._check_lasting()
            self._booted += 1
            left = max(1.0, deadline - time.monotonic())
            return boot(self.roster, self._lines, self._booted, backend, left, collective_s, names)
        finally:
            self._booting.release()

    def stats(self, timeout_s: float) -> GroupStats:
        """See Group.stats."""
        participants, generation = self.roster.handles, self.roster.generation
        asked = Round(participants, time.monotonic() + timeout_s)
        rows, failures = asked.all(join.stats, {name: (generation,) for name in participants})
        return GroupStats((row for name in participants for row in rows.get(name, [])), tuple(failures))

    def look(self, timeout_s: float = LOOK_S) -> GroupStatus:
        """The group as it is now; unlike ``stats`` it asks members on threads of their own. Blocks ``timeout_s``."""
        return look(self.roster, self._lines, self.missing(), timeout_s)

    def _look_to_post(self) -> GroupStatus | None:
        return self.look() if self._session_lasts() else None

    def begin_trace(self, capacity: int) -> None:
        """See Group.trace."""
        self._check_lasting()
        self._tracing.begin(self.roster, capacity)

    def end_trace(self) -> GroupTrace:
        """See Group.trace."""
        return self._tracing.end(self.roster)

    def end(self, timeout_s: float) -> None:
        """See Group.shutdown. Idempotent, never raises."""
        until = time.monotonic() + timeout_s
        self.stop()
        told = self._dismiss(until, but=())
        for thread in self._threads:
            if thread is not threading.current_thread():  # a callback may end the group
                thread.join(min(_STOP_S, max(0.1, until - time.monotonic())))
        self._dismiss(until, but=told)  # whom the thread was just taking in
        # Last, so that an end which is interrupted (Ctrl-C) can be begun again. The handles keep the actors alive.
        self._now.roster = self.roster.without(self.roster.handles)

    def _dismiss(self, until: float, but: Collection[str]) -> Collection[str]:
        """Tell them all that the group is over; returns whom."""
        roster = self.roster
        # Of an ended session there is nobody left to ask, and to try could start another one.
        there = roster.handles if current_session() == self._session else roster.local
        asked = {name: handle for name, handle in there.items() if name not in but}
        try:
            over = {name: (roster.generation, True) for name in asked}
            _, failures = Round(asked, until).all(join.leave, over)
            busy = [name for name, error in failures.items() if isinstance(error, TimeoutError)]
            if busy:
                logger.warning("group %r: %s will leave after what they run now", roster.name, ", ".join(busy))
        except Exception:
            logger.warning("group %r: not everybody could be told that it is over", roster.name, exc_info=True)
        return asked.keys()

    def listen(self, listener: Callable[[Change], object]) -> Callable[[], None]:
        """Call ``listener`` with every change, on a thread of the group's own; what this returns ends it."""
        return self._news.listen(listener)

    def stop(self) -> None:
        """Look after it no longer. Idempotent, quick, never raises."""
        with self._settled:
            stopped, self._stopped = self._stopped, True
            self._settled.notify_all()
        if not stopped:
            self._tasks.put(None)
            if self._post is not None:
                self._post.stop()
            self._lines.close()
            self._news.stop()
            if current_session() == self._session:
                self._returns.post(None)

    def after_fork(self) -> tuple[()]:
        """See fork.ForkAware."""
        if not self._stopped:
            self._stopped = True  # no thread of it is here
            fork.forked_from(f"the process that formed group {self.roster.name!r}")
        return ()

    def _do(self, work: Callable[[], Any], patience_s: float) -> Any:
        def checked() -> Any:
            self._check_lasting()
            return work()

        change = RequestedChange(self.roster.name, checked)
        self._tasks.put(change.run)
        if self._stopped:  # perhaps behind the end of the queue
            self._drain()
        return change.result(patience_s)

    def _check_lasting(self) -> None:
        if self._stopped:
            raise BootstrapError(f"group {self.roster.name!r} was shut down")

    def _drain(self) -> None:
        """Tell those who ask for a change that it is too late."""
        with contextlib.suppress(queue.Empty):
            while True:
                if (task := self._tasks.get_nowait()) is not None:
                    task()

    def _soon(self, task: Callable[[], None]) -> None:
        """Have the thread run it, unless the group is over by then: its end clears what tasks look at."""
        self._tasks.put(lambda: None if self._stopped else task())

    # --- the thread ------------------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        try:
            threads.serve(self._work, f"the supervisor of group {self.roster.name!r}")
        finally:
            self._drain()

    def _work(self) -> bool:
        """Do what comes next; False once the group is over."""
        if self._stopped:
            return False
        looks = [missing.next_look for missing in self._now.missing.values()]
        looks += self._teller.due()
        try:
            task = self._tasks.get(timeout=max(0.0, min(looks) - time.monotonic()) if looks else None)
        except queue.Empty:
            task = self._look
        if task is None:
            return False
        try:
            task()
        except Exception as error:
            if not self._session_lasts():
                self.stop()
                return False
            if threads.is_shortage(error):
                if task != self._look:
                    self._tasks.put(task)  # somebody's end, perhaps, of which nobody else tells
                raise
            logger.exception("group %r: a change failed", self.roster.name)
        return True

    def _session_lasts(self) -> bool:
        return not self._stopped and current_session() == self._session

    def _watch(self, names: Sequence[str]) -> None:
        """Have a line to each of these; one that has none is missing."""
        self._lines.reach({name for name in self.roster.records if self.roster.reached_by_tcp(name)})
        for name in names:
            self._meet(name)
            incarnation = self.roster.records[name].incarnation
            if (error := self._listen_to(name, incarnation, MEET_S)) is not None:
                self._suspect(name, incarnation, str(error))

    def _meet(self, name: str) -> None:
        record = self.roster.records[name]
        token = process_token(self.roster.generation, record.rank, record.incarnation)
        self._lines.meet(name, token, self._now.prepared[name].addresses["socket"])

    def _listen_to(self, name: str, incarnation: int, patience_s: float) -> RayTorchRpcError | None:
        """Returns why there is no line, if there is none."""

        def ended(cause: str) -> None:
            self._soon(lambda: self._suspect(name, incarnation, cause))

        try:
            self._lines.watch(name, ended, patience_s)
        except RayTorchRpcError as error:
            return error
        return None

    def _suspect(self, name: str, incarnation: int, cause: str) -> None:
        record = self.roster.records.get(name)
        if record is None or record.incarnation != incarnation or name in self._now.missing:
            return
        if not self._session_lasts():
            self.stop()
            return
        with self._settled:
            self._now.missing[name] = LostMember(cause)  # looked at next, with all others of whom there is word by then

    def _look(self) -> None:
        """Ask Ray about those that are missing, and do what follows from it."""
        now = time.monotonic()
        lost: list[str] = []
        dead: list[str] = []
        for name, missing in list(self._now.missing.items()):
            if missing.next_look > now:
                continue
            record = self.roster.records[name]
            there = ray_internals.actor_state(ray_internals.actor_id_of(record.handle))
            missing.next_look = now + (_LOOK_S if now - missing.since < 10 else _LOOK_SELDOM_S)
            same = (there.pid, there.node_id) == (record.probe.pid, record.probe.node_id)
            missing.returning = there.state == "ALIVE" and not same and self._returns.is_listening(record.handle, there)
            if there.state == "DEAD":
                missing.cause = f"its actor died: {there.cause}" if there.cause else "its actor died"
                dead.append(name)
            elif there.state == "ALIVE" and same:
                self._dial(name, missing, now)
            elif not missing.told:
                lost.append(name)
        if lost or dead:
            self._announce_losses(lost, dead)
        back = [name for name, missing in self._now.missing.items() if missing.returning and missing.next_look > now]
        if back:
            self._bring_back(back)
        self._teller.bring_up_to_date(now)

    # --- lines that broke -------------------------------------------------------------------------------------------

    def _dial(self, name: str, missing: LostMember, now: float) -> None:
        """Ray says that it lives, which may be old news: try another line, on a thread that may wait."""
        if missing.dialling or now < missing.next_dial:
            return
        missing.dialling, missing.next_dial = True, now + _LOOK_SELDOM_S
        incarnation = self.roster.records[name].incarnation
        self._meet(name)

        def dial() -> None:
            error: Exception | None = None
            try:
                error = self._listen_to(name, incarnation, _DIAL_S)
            except Exception as failure:
                error = failure
            threads.persist(lambda: self._soon(lambda: self._dialled(name, missing, error)), _CHANGE_S)

        try:
            threads.start(dial, name=f"raytorchrpc-dial-{name}")
        except threads.ThreadShortage:  # tried again at the next look that is due for it
            missing.dialling = False
            raise

    def _dialled(self, name: str, missing: LostMember, error: Exception | None) -> None:
        missing.dialling = False
        if self._now.missing.get(name) is not missing:
            return
        if error is None:
            if missing.told and not self._teller.reunite(name):
                return
            with self._settled:
                del self._now.missing[name]
                self._settled.notify_all()
            if missing.told:
                self._news.put(Change("back", (name,)))
        elif not missing.told and isinstance(error.__cause__, OSError):
            # No connection at all, where there was one. A process that only hangs would have taken this one.
            self._announce_losses([name], [])

    # --- changes ----------------------------------------------------------------------------------------------------

    def _announce_losses(self, lost: Sequence[str], dead: Sequence[str]) -> None:
        losses = []
        for name in (*lost, *dead):
            missing = self._now.missing[name]
            missing.told = True
            self._lines.part(name)
            losses.append(Loss(name, self.roster.records[name].incarnation, missing.cause, name in dead))
        # Not for long: one of them may stand still, and callbacks and the next loss wait for this.
        self._teller.tell_losses(losses)
        for loss in losses:
            logger.warning("group %r: lost %s: %s", self.roster.name, loss.name, loss.cause)
            self._news.put(Change("dead" if loss.for_good else "lost", (loss.name,), loss.cause))
        if dead:
            self._now.dead.update((loss.name, loss) for loss in losses if loss.for_good)
            self._strike(dead)

    def _strike(self, names: Sequence[str]) -> None:
        """They are on the roster no longer."""
        self._now.roster = self.roster.without(names)
        for name in names:
            self._now.prepared.pop(name, None)
        self._now.info = self.roster.info(self._now.prepared)
        self._returns.post(self.roster)
        with self._settled:
            for name in names:
                self._now.missing.pop(name, None)
            self._settled.notify_all()

    def _bring_back(self, names: Sequence[str]) -> None:
        handles = {name: self.roster.records[name].handle for name in names}
        try:
            self._take_in(handles, time.monotonic() + _CHANGE_S, _CHANGE_S, "back")
        except RayTorchRpcError as error:
            logger.warning("group %r: %s could not come back yet: %s", self.roster.name, ", ".join(names), error)
            for name in names:
                if (missing := self._now.missing.get(name)) is not None:
                    missing.next_look = time.monotonic() + missing.pause_s
                    missing.pause_s = min(2 * missing.pause_s, _RETRY_S)

    def _take_in(
        self, handles: dict[str, Any], deadline: float, timeout_s: float, kind: Literal["added", "back"]
    ) -> None:
        rounds = MailboxRound if kind == "back" else Round
        forming = Forming(self.roster, handles, deadline, timeout_s, self._tried, rounds)
        forming.probe()
        there: list[str] = []
        try:
            arriving = forming.prepare()
            roster = forming.roster
            info = roster.info({**self._now.prepared, **arriving})
            everybody = {**self._now.prepared, **arriving}
            there = self._teller.others(handles)
            coming = tuple(handles)
            arrivals = {peer: (roster.arrival(peer, info, everybody, timeout_s, coming),) for peer in there}
            met = self._teller.tell(updates.meet, arrivals, MEET_S)
            everybody.update(met)
            away = {name: gone.cause for name, gone in self._now.missing.items() if gone.told and name not in handles}
            forming.commit(info, everybody, away, {*self._now.missing, *self._teller.behind}.difference(away, handles))
            self._check_lasting()
        except BaseException:
            forming.roll_back()
            self._teller.missed(there)  # they may know of somebody who did not come, and where he listened
            self._tried.update(
                (name, record.incarnation) for name, record in forming.roster.records.items() if name in handles
            )
            raise
        self._now.roster, self._now.info, self._now.prepared = roster, info, everybody
        for name in handles:
            self._now.dead.pop(name, None)
        self._returns.post(roster)
        if kind == "back":
            self._returns.taken_back(handles)
        self._teller.told(handles)
        self._watch([name for name, handle in handles.items() if handle is not None])
        self._teller.tell(updates.welcome, {peer: (list(handles),) for peer in there}, WORD_S)
        with self._settled:
            for name in handles:
                self._now.missing.pop(name, None)
            self._settled.notify_all()
        self._news.put(Change(kind, tuple(handles)))

    def _let_go(self, names: tuple[str, ...], timeout_s: float) -> None:
        self.roster.check_leavers(names)
        leaving = {name: self.roster.records[name].handle for name in names}
        there = self._teller.others(names)
        for name in names:
            self._lines.part(name)
        self._teller.tell(updates.remove, {peer: (names,) for peer in there}, WORD_S)
        asked = Round(leaving, time.monotonic() + timeout_s)
        _, failures = asked.all(join.leave, {name: (self.roster.generation,) for name in names})
        for name, error in failures.items():
            logger.warning("group %r: %s leaves when it gets to it (%s)", self.roster.name, name, error)
        self._strike(names)
        self._news.put(Change("removed", names))
