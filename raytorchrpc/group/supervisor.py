"""Supervises a formed group: detects lost members, readmits restarted ones, and makes the changes that are asked for.

One thread, in the process that hosts the group.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.metrics import GroupStats
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import BootstrapError, NotAMember, PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.group import ray_calls
from raytorchrpc.group.changes import Announcer, Change, EventBus, RequestedChange, return_s
from raytorchrpc.group.control_connections import ControlConnections
from raytorchrpc.group.failure_detector import FailureDetector
from raytorchrpc.group.formation import Formation, check_name, current_owner, form_group, participants_of
from raytorchrpc.group.process_groups import check_backend, create_process_group
from raytorchrpc.group.restarts import RestartedActors
from raytorchrpc.group.roster import Directory, GroupState, LostMember, Phase, Roster
from raytorchrpc.group.status import STATUS_S, GroupStatus, group_status, post_status
from raytorchrpc.group.tracing import GroupTrace, Tracing
from raytorchrpc.lanes.common.protection import make_identity
from raytorchrpc.membership import join
from raytorchrpc.membership.here import endpoint
from raytorchrpc.membership.messages import GroupInfo, JoinedProcess, JoinRequest, LeaveRequest, Loss, Prepared
from raytorchrpc.membership.process_group import ProcessGroupInfo
from raytorchrpc.membership.tickets import consent
from raytorchrpc.process import fork, threads
from raytorchrpc.topology.endpoint import Endpoint

logger = logging.getLogger(__name__)

#: How long members have to do what a change asks of them (seconds). One that does not catches up later.
_CHANGE_S = 10.0
#: How much longer an attempt to readmit members may take for each member of the group (seconds).
_ADMIT_EACH_S = 0.01
#: For a process that joined by itself to show that it runs, when another one wants its name (seconds).
_PING_S = 0.5
#: How long the end of a group waits for its threads (seconds); they end by themselves.
_STOP_S = 2.0


def form(name: str, config: GroupConfig, participants: dict[str, Any], timeout_s: float) -> Supervisor:
    """Form a group and supervise it in this process. Leaves nothing behind if it fails."""
    tls = make_identity(name) if config.tls else None
    roster = Roster(name, config, current_owner(), endpoint("supervisor"), tls=tls)
    return form_group(roster, participants, timeout_s, Supervisor)


class Supervisor:
    """One per group. ``add``, ``remove`` and readmissions run on its thread, one after another."""

    def __init__(self, roster: Roster, info: GroupInfo, prepared: Mapping[str, Prepared]) -> None:
        self._state = GroupState(roster, info, dict(prepared))
        self._session_lasts, self._ends, self._stopped = ray_internals.session_check(), False, False
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._events = EventBus(roster.name)
        self._process_group_lock, self._process_groups = threading.Lock(), 0
        """One is created at a time; how many there were."""
        self._connections = ControlConnections(roster.credentials)
        self._restarts = RestartedActors(roster, None if roster.config.joinable_by == "nobody" else self.take_in)
        self._announcer = Announcer(self._state, self._connections, self._submit)
        parts = self._state, self._connections, self._restarts
        self._detector = FailureDetector(*parts, self._submit, self._handle_dialled)
        self._tracing = Tracing(self._connections)
        self._threads, self._no_more_posts = list[threading.Thread](), threading.Event()
        try:
            self._detector.reserve(len(roster.records))
            self._restarts.post(roster)
            self._detector.watch(list(roster.records))
            fork.register(self)
            self._threads.append(threads.start(self._run, name=f"raytorchrpc-group-{roster.name}"))
            self._threads.append(self._events.start())
            post = (self.status, roster.generation, self._no_more_posts, self._goes_on)
            self._threads.append(threads.start(post_status, *post, name=f"raytorchrpc-post-{roster.generation}"))
        except BaseException:
            self.stop()
            raise

    @property
    def roster(self) -> Roster:
        return self._state.roster

    @property
    def info(self) -> GroupInfo:
        """The group as it is now."""
        return self._state.info

    # --- what a Group calls, also from another process (see ``detached``) --------------------------------------------

    def add(self, actors: Any, timeout_s: float) -> tuple[str, ...]:
        """Admit actors; returns their names."""
        deadline = time.monotonic() + timeout_s

        def add() -> tuple[str, ...] | None:
            """None: Ray has restarted one of them."""
            formation = Formation(self.roster, self._newcomers(actors), timeout_s, deadline=deadline)
            try:
                self._admit("added", formation)
            except BootstrapError as error:
                formation.raise_unless_restarted(error)
                return None
            return tuple(formation.participants)

        self._check_running()
        # Newcomers may be busy or restart. This thread waits for them: the supervisor's has to detect losses.
        ray_calls.wait_for_answers(self._newcomers(actors), deadline)
        names = self._request(add, timeout_s + _CHANGE_S)
        return self.add(actors, max(0.0, deadline - time.monotonic())) if names is None else tuple(names)

    def _newcomers(self, actors: Any) -> dict[str, Any]:
        return self.roster.check_newcomers(participants_of(actors, False, first_rank=self.roster.next_rank))

    def remove(self, names: Sequence[str], timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        leaving = self._request(lambda: self._remove(tuple(names)), timeout_s + _CHANGE_S)
        ray_calls.have_leave(self.roster, leaving, until, for_good=False)

    def take_in(self, request: JoinRequest | LeaveRequest) -> None:
        """Carry out the request of a process that joins or leaves by itself. Blocks."""
        known = hmac.compare_digest(request.consent, consent(self.roster.secret, self.roster.generation))
        if not known and not (isinstance(request, JoinRequest) and self.roster.config.joinable_by == "cluster"):
            raise NotAMember(f"group {self.roster.name!r} takes in only processes that its members have started")
        if isinstance(request, LeaveRequest):
            self._request(lambda: self._part_with(request), _CHANGE_S)
            return
        check_name("join(name=...)", request.name)
        newcomer, patience_s = {request.name: request.process}, min(request.timeout_s, _CHANGE_S)

        def admit() -> None:
            self._strike_ended(request.name)
            self.roster.check_newcomers(newcomer)
            call_all, attempt = self._restarts.call_all, request.attempt
            formation = Formation(self.roster, newcomer, patience_s, call_all, by_reference=False, attempt=attempt)
            self._admit("added", formation)

        try:
            # One that is suspended is not to hold up the supervisor's thread.
            self._restarts.find(request.process.key, request.address).ping(request.process.key, patience_s)
            self._request(admit, request.timeout_s)
            self._check_running()  # if the group ends, the end may have come too early to tell this one
        except (PeerLost, RpcTimeout) as error:
            message = (
                f"group {self.roster.name!r} cannot reach the process that would join as {request.name!r}: {error}"
            )
            raise BootstrapError(message) from error
        finally:
            self._restarts.forget(request.process.key)

    def _strike_ended(self, name: str) -> None:
        """Take a process off the roster that joined by itself and has ended: another one wants its name."""
        record = self.roster.records.get(name)
        if record is None or not isinstance(record.handle, JoinedProcess):
            return
        for _ in range(2):  # the first may only find that the connection has ended
            try:
                self._connections.ping(name, _PING_S)
            except RayTorchRpcError as error:
                if isinstance(error.__cause__, ConnectionRefusedError):
                    if name not in self._state.lost:
                        self._state.lose(name, "its process ended")
                    self._announce_losses([], Phase.ENDED, [name])
                    return

    def _part_with(self, request: LeaveRequest) -> None:
        record = self.roster.records.get(request.name)
        is_here = record is not None and record.member.incarnation == request.incarnation
        if is_here and request.name in self.roster.by_themselves and len(self.roster.records) > 1:
            self._remove((request.name,))

    def wait_ready(self, timeout_s: float, names: Sequence[str] | None = None) -> dict[str, str]:
        """Block until these members, or all, can be called, or the group ends; returns those that cannot, and why."""

        def not_ready() -> dict[str, str]:
            behind = dict.fromkeys(tuple(self._announcer.behind), "it has not yet learned who else is a member")
            causes = {**behind, **self._state.causes()}
            return {name: cause for name, cause in causes.items() if names is None or name in names}

        with self._state.changed:
            self._state.changed.wait_for(lambda: not not_ready() or self._stopped, timeout_s)
        return not_ready()

    def process_group(
        self, backend: str, timeout_s: float, collective_s: float, names: Sequence[str] | None = None
    ) -> ProcessGroupInfo:
        """Create a process group across these members, or all."""
        # On the caller's thread: the supervisor's has to detect losses meanwhile.
        deadline = time.monotonic() + timeout_s
        if not self._process_group_lock.acquire(timeout=timeout_s):
            raise BootstrapError(f"group {self.roster.name!r}: another process group is being created")
        try:
            check_backend(backend, {})  # a wrong name is refused before the wait
            if away := self.wait_ready(timeout_s, names):
                reasons = ", ".join(f"{name} ({cause})" for name, cause in away.items())
                raise BootstrapError(f"group {self.roster.name!r}: members are away: {reasons}", members=tuple(away))
            self._check_running()
            self._process_groups += 1
            left = max(1.0, deadline - time.monotonic())
            return create_process_group(
                self.roster, self._connections, self._process_groups, backend, left, collective_s, names
            )
        finally:
            self._process_group_lock.release()

    def stats(self, timeout_s: float) -> GroupStats:
        """What all members have counted, by peer."""
        status = self.status(timeout_s, peers=True)
        return GroupStats(status.reading, (*status.away, *status.silent))

    def status(self, timeout_s: float = STATUS_S, peers: bool | None = None) -> GroupStatus:
        """See ``group_status``. Collected over connections that no busy method holds up."""
        return group_status(self.roster, self._connections, self._state.causes(), timeout_s, peers)

    def begin_trace(self, capacity: int) -> None:
        self._check_running()
        self._tracing.begin(self.roster, capacity)

    def end_trace(self) -> GroupTrace:
        return self._tracing.end(self.roster)

    def directory(self, endpoint: Endpoint) -> Directory:
        """See guest.Host."""
        return self._state.directory(endpoint)

    def listen(self, listener: Callable[[Change], object]) -> Callable[[], None]:
        """Call ``listener`` with every change, on a thread; returns a function that ends it."""
        return self._events.listen(listener)

    def end(self, timeout_s: float) -> None:
        """End the group. Idempotent, never raises."""
        self._ends = True
        until = time.monotonic() + timeout_s
        self._send_off(self.roster.handles, for_good=True)
        self.stop()
        dismissed = self._dismiss(until, but=())
        for thread in self._threads:
            if thread is not threading.current_thread():  # a callback may end the group
                thread.join(min(_STOP_S, max(0.1, until - time.monotonic())))
        self._dismiss(until, but=dismissed)  # those that the thread was admitting
        # Last, so that an end which is interrupted (Ctrl-C) can be begun again. The handles keep the actors alive.
        self._state.roster = self.roster.without(self.roster.handles)

    def _dismiss(self, until: float, but: Collection[str]) -> Collection[str]:
        """Have all members leave; returns their names."""
        roster = self.roster
        # Calling actors of a session that has ended could start another one.
        reachable = roster.handles if self._session_lasts() else roster.local
        left_out = {*but, *roster.by_themselves}
        asked = {name: handle for name, handle in reachable.items() if name not in left_out}
        try:
            ray_calls.have_leave(roster, asked, until, for_good=True)
        except Exception:
            logger.warning("group %r: its end could not be announced to all members", roster.name, exc_info=True)
        return asked.keys()

    def _send_off(self, names: Iterable[str], for_good: bool = False) -> None:
        """Have those of these members leave that joined by themselves, without Ray, which may not reach them."""
        sent = self.roster.by_themselves.intersection(names) - self._state.lost.keys()
        asked = dict.fromkeys(sent, (self.roster.generation, for_good))
        # One that leaves closes the connection instead of an answer.
        self._connections.call_all(join.leave, asked, time.monotonic() + _STOP_S)

    def stop(self) -> None:
        """Stop supervising. Idempotent, quick, never raises."""
        with self._state.changed:
            stopped, self._stopped = self._stopped, True
            self._state.changed.notify_all()
        if not stopped:
            ray_calls.ended_here.append(self.roster.generation)
            self._tasks.put(None)
            self._no_more_posts.set()
            self._connections.close()
            self._events.stop()
            self._restarts.end(self._session_lasts())

    def after_fork(self) -> tuple[()]:
        """See fork.ForkAware."""
        if not self._stopped:
            self._stopped = True  # none of its threads runs here
            fork.forked_from(f"the process that formed group {self.roster.name!r}")
        return ()

    def _request(self, work: Callable[[], Any], patience_s: float) -> Any:
        """Have the thread make a change; returns or raises what came of it."""

        def checked() -> Any:
            self._check_running()
            return work()

        change = RequestedChange(self.roster.name, checked)
        self._tasks.put(change.run)
        if self._stopped:  # the thread may have ended already
            self._drain()
        return change.result(patience_s)

    def _check_running(self) -> None:
        if self._ends or self._stopped:
            raise BootstrapError(f"group {self.roster.name!r} was shut down")

    def _drain(self) -> None:
        """Run what is left in the queue: requested changes fail, as the group has ended."""
        with contextlib.suppress(queue.Empty):
            while True:
                if (task := self._tasks.get_nowait()) is not None:
                    task()

    def _submit(self, task: Callable[[], None]) -> None:
        """Have the thread run a task, unless the group has ended by then: its end clears the state that tasks use."""
        self._tasks.put(lambda: None if self._stopped else task())

    def _run(self) -> None:
        try:
            threads.serve(self._run_next, f"the supervisor of group {self.roster.name!r}")
        finally:
            self._drain()
            self._restarts.end(self._session_lasts())  # what it posted while the group ended

    def _run_next(self) -> bool:
        """Run the next task; False once the group has ended."""
        if self._stopped:
            return False
        due = [*self._detector.due(), *self._announcer.due()]
        try:
            task = self._tasks.get(timeout=max(0.0, min(due) - time.monotonic()) if due else None)
        except queue.Empty:
            task = self._poll
        if task is None:
            return False
        try:
            task()
        except Exception as error:
            if not self._goes_on():
                self.stop()
                return False
            if threads.is_shortage(error):
                if task != self._poll:
                    self._tasks.put(task)  # it may report a loss that nothing else reports
                raise
            logger.exception("group %r: a change failed", self.roster.name)
        return True

    def _goes_on(self) -> bool:
        return not self._stopped and self._session_lasts()

    def _poll(self) -> None:
        if not self._goes_on():
            self.stop()
            return
        found = self._detector.poll()
        if found.ended or found.dead:
            self._announce_losses(found.ended, Phase.ENDED, found.dead)
        if found.restarted:
            self._readmit(found.restarted)
        self._announcer.resync_due()

    def _handle_dialled(self, name: str, lost: LostMember, error: Exception | None) -> None:
        """A connection to a lost member was tried again, as Ray believes it alive."""
        if error is None:
            if lost.is_announced and not self._announcer.reunite(name):
                return
            self._state.recover([name])
            if lost.is_announced:
                self._events.put(Change("back", (name,)))
        elif isinstance(self.roster.records[name].handle, JoinedProcess) and isinstance(
            error.__cause__, ConnectionRefusedError
        ):
            lost.cause = "its process ended"
            self._announce_losses([], Phase.ENDED, [name])
        elif not lost.is_announced and isinstance(error.__cause__, OSError):
            # The connection was refused, where one existed: a process that only hangs would have accepted it.
            self._announce_losses([name], Phase.AWAY)

    # --- changes ----------------------------------------------------------------------------------------------------

    def _announce_losses(self, names: Sequence[str], phase: Phase, dead: Sequence[str] = ()) -> None:
        """``phase``: of these members from now on. ``dead``: further ones, which leave the roster."""
        losses, news = list[Loss](), {*dead}
        for name in (*names, *dead):
            lost = self._state.lost[name]
            if not lost.is_announced:
                news.add(name)
            lost.phase = phase
            self._connections.forget(name)
            losses.append(self._state.loss(name, name in dead))
        # With a short deadline: a member may be suspended, and callbacks and the next loss wait for this.
        self._announcer.announce_losses(losses)
        for loss in (loss for loss in losses if loss.name in news):
            logger.warning("group %r: lost %s: %s", self.roster.name, loss.name, loss.cause)
            self._events.put(Change("dead" if loss.for_good else "lost", (loss.name,), loss.cause))
        if dead:
            self._state.dead.update((loss.name, loss) for loss in losses if loss.for_good)
            self._strike(dead)

    def _strike(self, names: Sequence[str]) -> None:
        """Take members off the roster."""
        self._state.roster = self.roster.without(names)
        for name in names:
            self._state.prepared.pop(name, None)
        self._state.info = self.roster.info(self._state.prepared)
        self._restarts.post(self.roster)
        self._state.recover(names)

    def _readmit(self, names: Sequence[str]) -> None:
        # Together, but for those that have failed more often: one that does not answer holds up all that come with it.
        lost, members = self._state.lost, len(self.roster.records)
        patience_s = min(lost[name].patience_s for name in names)
        names = [name for name in names if lost[name].patience_s == patience_s]
        handles = {name: self.roster.records[name].handle for name in names}
        patience_s += _ADMIT_EACH_S * members
        try:
            undo_s = return_s(members)
            its = Formation(self.roster, handles, patience_s, self._restarts.call_all, undo_s, by_reference=False)
            self._admit("back", its)
        except RayTorchRpcError as error:
            logger.warning("group %r: %s could not return yet: %s", self.roster.name, ", ".join(names), error)
            failed = [name for name in names if name in getattr(error, "members", ())]
            self._state.retry_later(failed or names)  # the next poll readmits the others

    def _admit(self, kind: Literal["added", "back"], formation: Formation) -> None:
        state, announcer, others, handles = self._state, self._announcer, list[str](), formation.participants
        # How long the group waits for one that may be suspended.
        patience = (return_s(len(state.roster.records)),) if kind == "back" else ()
        self._detector.reserve(len(handles))
        formation.probe()
        try:
            prepared = {**state.prepared, **formation.prepare()}
            roster, info = formation.roster, formation.roster.info(prepared)
            others = announcer.others(handles)
            prepared.update(announcer.prepare_arrivals(list(handles), others, roster, info, prepared, *patience))
            away = {name: lost.cause for name, lost in state.lost.items() if lost.is_announced and name not in handles}
            formation.commit(info, prepared, away, {*state.lost, *announcer.behind}.difference(away, handles))
            self._check_running()
        except BaseException:
            formation.roll_back()
            announcer.revoke(list(handles), others, formation.roster)
            state.roster = state.roster.after_failure(formation.roster, handles)
            raise
        state.roster, state.info, state.prepared = roster, info, prepared
        for name in handles:
            state.dead.pop(name, None)
        self._restarts.admitted(handles)
        self._restarts.post(roster)
        announcer.mark_current(handles)
        announcer.activate(list(handles), others)
        state.recover(handles)
        self._events.put(Change(kind, tuple(handles)))
        # Last: one that does not answer is lost again, until it can be watched.
        self._detector.watch(list(handles), *patience)

    def _remove(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Returns the handles of those that were asked to leave."""
        self.roster.check_leavers(names)
        self._send_off(names)
        records, left_out = self.roster.records, self.roster.by_themselves
        leaving = {name: records[name].handle for name in names if name not in left_out}
        for name in names:
            self._connections.forget(name)
        self._announcer.announce_removal(names)
        ray_calls.ask_to_leave(self.roster, leaving)
        self._strike(names)
        self._events.put(Change("removed", names))
        return leaving
