"""Supervises a formed group: detects lost members, readmits restarted ones, and makes the changes that are asked for.

One thread, in the process that hosts the group.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.metrics import GroupStats, Reading
from raytorchrpc.calls.peers import FIRST_CLIENT, process_token
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import BootstrapError, NotAMember, PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.group import core, join, ray_calls, restarted
from raytorchrpc.group.changes import Change, ChangeFeed, ChangeLog, RequestedChange
from raytorchrpc.group.control_connections import ControlConnections
from raytorchrpc.group.core import Core, Step
from raytorchrpc.group.formation import (
    ClientFormation,
    Formation,
    check_name,
    current_owner,
    form_group,
    participants_of,
)
from raytorchrpc.group.here import endpoint
from raytorchrpc.group.messages import GroupInfo, JoinedProcess, JoinRequest, LeaveRequest, Prepared
from raytorchrpc.group.process_group import ProcessGroupInfo, check_backend, create_process_group
from raytorchrpc.group.restarts import RestartedActors
from raytorchrpc.group.roster import Roster
from raytorchrpc.group.status import MOST_WITH_PEERS, STATUS_S, GroupStatus, post_status, reading
from raytorchrpc.group.tickets import consent
from raytorchrpc.group.tracing import GroupTrace, Tracing
from raytorchrpc.group.view import Answer, Delta
from raytorchrpc.lanes.common.protection import make_identity
from raytorchrpc.process import fork, threads
from raytorchrpc.process.locks import Turn
from raytorchrpc.process.this_process import reserve_descriptors

logger = logging.getLogger(__name__)

#: How much longer than asked for a change may take (seconds).
_CHANGE_S = 10.0
#: To connect to a member for the first time (seconds).
_CONNECT_S = 2.0
#: How long a change waits for a member to follow, and where a restarted member returns for each after the first one
#: (seconds). They may be slow, on a busy machine; the change goes on without one that is suspended.
_FIRST_S, GAP_S = 2.0, 0.3
#: How much longer an attempt to readmit members may take for each member of the group (seconds).
_ADMIT_EACH_S = 0.01
#: For a process that joined by itself to show that it runs, when another one wants its name (seconds).
_PING_S = 0.5
#: How long the end of a group waits for its threads (seconds); they end by themselves.
_STOP_S = 2.0


def form(
    name: str,
    config: GroupConfig,
    participants: dict[str, Any],
    timeout_s: float,
    generation: str,
    register: Callable[[Supervisor], object],
) -> Supervisor:
    """Form a group and supervise it in this process. Leaves nothing behind if it fails.

    ``register`` is called with the supervisor, which Ctrl-C may keep this from returning.
    """
    tls = make_identity(name) if config.tls else None
    roster = Roster(name, config, current_owner(), endpoint("supervisor"), generation, tls=tls)

    def supervise(*formed: Any) -> Supervisor:
        return threads.uninterrupted(Supervisor, *formed, register, name=f"raytorchrpc-form-{name}")

    return form_group(roster, participants, timeout_s, supervise)


class Supervisor:
    """One per group. All that changes the group happens on its thread, which never waits for a member: whoever asks for
    a change waits, and readmissions have threads of their own.
    """

    def __init__(
        self, roster: Roster, prepared: Mapping[str, Prepared], register: Callable[[Supervisor], object]
    ) -> None:
        self.info = roster.info(prepared)
        """The group as it is now."""
        self._joining = dict[str, Any]()
        """The handles of those that are being added, by name."""
        self._core = Core(roster, prepared)
        self._session_lasts, self._ends, self._stopped = ray_internals.session_check(), False, False
        self._changed = threading.Condition()
        """Notified when members may be ready, and at the end."""
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._reported: deque[core.Event] = deque()
        self.changes = ChangeLog()
        """What is reported to listeners."""
        self._feed = ChangeFeed(roster.name, self.changes.after, self.changes.lasts)
        self._making, self._process_groups = Turn(), 0
        """Held while a process group is created; how many were."""
        self._client_ranks = itertools.count(FIRST_CLIENT)
        self._connections = ControlConnections(roster.credentials)
        self._restarts = RestartedActors(roster, self.take_in)
        self._tracing = Tracing(self._connections)
        self._threads, self._no_more_posts = list[threading.Thread](), threading.Event()
        self._readmissions: list[threading.Thread] = []
        try:
            self._reserve(roster.records)
            self._restarts.post(roster)
            self._dial(roster.records, _CONNECT_S)  # a loss by then is found when it has connected
            fork.register(self)
            self._threads.append(threads.start(self._run, name=f"raytorchrpc-group-{roster.name}"))
            post = (self.status, roster.generation, self._no_more_posts, self._goes_on)
            self._threads.append(threads.start(post_status, *post, name=f"raytorchrpc-post-{roster.generation}"))
            register(self)
        except BaseException:
            self.stop()
            raise

    @property
    def last_info(self) -> GroupInfo:
        """The group as this process last knew it. Does not block."""
        return self.info

    def has_ended(self) -> bool:
        """Whether the group has ended, or ends."""
        return self._ends or self._stopped

    @property
    def roster(self) -> Roster:
        return self._core.roster

    # --- what a Group calls, also from another process (see ``detached``) --------------------------------------------

    def add(self, actors: Any, timeout_s: float) -> tuple[str, ...]:
        """Admit actors; returns their names."""
        deadline = time.monotonic() + timeout_s
        self._check_running()
        while True:
            waiting = self.roster.check_newcomers(self._newcomers(actors))
            # Until each runs a call, or one cannot: they may be busy, or restart.
            asked = dict.fromkeys(waiting, ())
            ray_calls.call_all(waiting, restarted.begin, asked, deadline, fail_fast=True, retry_restarting=True)
            with self._joining_as(partial(self._newcomers, actors), deadline) as newcomers:
                formation = Formation(self.roster, newcomers, timeout_s, deadline=deadline)
                try:
                    self._admit("added", formation)
                    return tuple(newcomers)
                except BootstrapError as error:
                    formation.raise_unless_restarted(error)

    def _newcomers(self, actors: Any) -> dict[str, Any]:
        taken = {*self.roster.records, *self._joining}
        return participants_of(actors, False, first_rank=self.roster.next_rank, taken=taken)

    @contextlib.contextmanager
    def _joining_as(self, named: Callable[[], dict[str, Any]], deadline: float) -> Iterator[dict[str, Any]]:
        """Those that ``named`` returns are being added within the block. Blocks while others are under their names;
        raises if they cannot be added to the group as it is then, nor to others that are being added.
        """
        with self._changed:
            self._check_running()
            handles = named()
            left_s = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: not self._joining.keys() & handles.keys(), left_s)
            self.roster.check_newcomers(handles, self._joining)
            self._joining = {**self._joining, **handles}
        try:
            yield handles
        finally:
            with self._changed:
                self._joining = {name: handle for name, handle in self._joining.items() if name not in handles}
                self._changed.notify_all()

    def remove(self, names: Sequence[str], timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        roster = self._part_with(names)
        leaving = {name: roster.records[name].handle for name in names if name not in roster.by_themselves}
        try:
            self._await_members(min(_FIRST_S, timeout_s))
        finally:
            ray_calls.have_leave(roster.name, roster.generation, leaving, until)

    def _part_with(self, names: Sequence[str]) -> Roster:
        """Remove these members; returns the roster that still had them."""
        ranks: dict[str, int] = {}
        before = self.roster

        def part() -> None:
            self.roster.check_leavers(names)
            ranks.update({name: self.roster.records[name].member.rank for name in names})
            self._core.parting(names)

        def remove() -> None:
            nonlocal before
            before = self.roster
            # One that has died meanwhile is out of the group already.
            now = {name: record.member.rank for name, record in before.records.items()}
            if leaving := [name for name in names if now.get(name) == ranks[name]]:
                self._core.removed(leaving)

        self._request(part)
        try:
            self._send_off(names)
            self._request(remove)
        except BaseException:  # what they were asked cannot be taken back
            self._report(remove)
            raise
        return before

    def take_in(self, request: JoinRequest | LeaveRequest) -> None:
        """Carry out the request of a process that joins or leaves by itself. Blocks."""
        joinable_by = self.roster.config.joinable_by
        if joinable_by == "nobody":  # their listener is for restarted members alone
            raise NotAMember(f"group {self.roster.name!r} takes in no processes: GroupConfig(joinable_by='nobody')")
        known = hmac.compare_digest(request.consent, consent(self.roster.secret, self.roster.generation))
        if not known and not (isinstance(request, JoinRequest) and joinable_by == "cluster"):
            raise NotAMember(f"group {self.roster.name!r} takes in only processes that its members have started")
        if isinstance(request, LeaveRequest):
            record = self.roster.records.get(request.name)
            is_here = record is not None and record.member.incarnation == request.incarnation
            if is_here and request.name in self.roster.by_themselves and len(self.roster.records) > 1:
                self._part_with((request.name,))
                self._await_members()
            return
        check_name("join(name=...)", request.name)
        newcomer, patience_s = {request.name: request.process}, min(request.timeout_s, _CHANGE_S)
        with self._reaching(request, patience_s):
            self._strike_ended(request)
            with self._joining_as(lambda: newcomer, time.monotonic() + patience_s):
                call_all, attempt = self._restarts.call_all, request.attempt
                formation = Formation(self.roster, newcomer, patience_s, call_all, attempt=attempt)
                self._admit("added", formation)

    def admit_client(self, request: JoinRequest) -> None:
        """Have the process that requests it join as a client: it follows the group, whose members do not know it."""
        self._check_running()
        with self._reaching(request, request.timeout_s):
            formation = ClientFormation(self.roster, request, next(self._client_ranks), self._restarts.call_all)
            self._admit("client", formation)

    @contextlib.contextmanager
    def _reaching(self, request: JoinRequest, patience_s: float) -> Iterator[None]:
        """Within the block a process joins by itself; afterwards it is reached as members are."""
        try:
            self._restarts.find(request.process.key, request.address).ping(request.process.key, patience_s)
            yield
            # It may be suspended from now on: over this connection it hears of the end of the group when it runs again.
            with contextlib.suppress(RayTorchRpcError):  # it is found lost like others
                self._connections.ping(request.name, patience_s)
            self._check_running()  # if the group ends, the end may have come too early to tell this one
        except (PeerLost, RpcTimeout) as error:
            process = f"the process that would join as {request.name!r}"
            raise BootstrapError(f"group {self.roster.name!r} cannot reach {process}: {error}") from error
        finally:
            self._restarts.forget(request.process.key)

    def _strike_ended(self, request: JoinRequest) -> None:
        """Take processes off the roster that joined by themselves and have ended: another one wants the name, or is the
        next process of the actor, under any name.
        """
        for name, record in [*self.roster.records.items()]:
            if not isinstance(record.handle, JoinedProcess):
                continue
            of_actor = record.handle.actor_id is not None and record.handle.actor_id == request.process.actor_id
            if (name == request.name or of_actor) and self._connections.is_over(name, _PING_S):
                self._report(partial(self._core.dialled, name, record.process, "its process ended", ended=True))

    def wait_ready(self, timeout_s: float, names: Sequence[str] | None = None) -> dict[str, str]:
        """Block until these members, or all, can be called; returns those that cannot, and why.

        Raises BootstrapError if the group ends.
        """

        def not_ready() -> dict[str, str]:
            return {name: cause for name, cause in self._core.unready().items() if names is None or name in names}

        with self._changed:
            self._changed.wait_for(lambda: not not_ready() or self._stopped, timeout_s)
        self._check_running()
        return not_ready()

    def process_group(
        self, backend: str, timeout_s: float, collective_s: float, names: Sequence[str] | None = None
    ) -> ProcessGroupInfo:
        deadline = time.monotonic() + timeout_s
        check_backend(backend, {})  # a wrong name is refused before the wait
        if away := self.wait_ready(timeout_s, names):
            reasons = ", ".join(f"{name} ({cause})" for name, cause in away.items())
            raise BootstrapError(f"group {self.roster.name!r}: members are away: {reasons}", members=tuple(away))
        if not self._making.once("a process group").acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise BootstrapError(f"group {self.roster.name!r}: another process group is being created")
        try:
            self._check_running()
            self._process_groups += 1
            making = self.roster, self._connections, self._process_groups, backend
            return create_process_group(*making, max(1.0, deadline - time.monotonic()), collective_s, names)
        finally:
            self._making.release()

    def stats(self, timeout_s: float) -> GroupStats:
        self._check_running()
        status = self.status(timeout_s, peers=True)
        return GroupStats(status.reading, (*status.away, *status.silent))

    def status(self, timeout_s: float = STATUS_S, peers: bool | None = None) -> GroupStatus:
        """Ask all members that are not away. Blocks until all have answered, at most ``timeout_s``.

        ``peers``: whether to have calls by peer; None: only in a small group.
        """
        roster, away, until = self.roster, self._core.causes(), time.monotonic() + timeout_s
        peers = len(roster.records) <= MOST_WITH_PEERS if peers is None else peers
        asked = {name: (peers,) for name in roster.records if name not in away}
        readings, failures = self._connections.call_all(reading, asked, until)
        together = Reading.of_all(readings[name] for name in asked if name in readings)
        group = roster.name, roster.generation, time.monotonic(), tuple(roster.records)
        return GroupStatus(*group, away, tuple(failures), together)

    def begin_trace(self, capacity: int) -> None:
        self._check_running()
        self._tracing.begin(self.roster, capacity)

    def end_trace(self) -> GroupTrace:
        return self._tracing.end(self.roster)

    def listen(self, listener: Callable[[Change], object]) -> Callable[[], None]:
        """Call ``listener`` with every change, on a thread; returns a function that ends it."""
        self._check_running()
        return self._feed.listen(listener)

    def end(self, timeout_s: float) -> None:
        """End the group. Idempotent, never raises."""
        self._ends = True
        until = time.monotonic() + timeout_s
        self._send_off([*self.roster.handles, *self.roster.clients], for_good=True)
        self.stop()
        dismissed = self._dismiss(until, but=())
        for thread in (*self._threads, *self._readmissions, self._feed.thread):
            if thread is not None and thread is not threading.current_thread():  # a callback may end the group
                thread.join(min(_STOP_S, max(0.1, until - time.monotonic())))
        self._dismiss(until, but=dismissed)  # those that the thread was admitting
        # Last, so that an end which is interrupted (Ctrl-C) can be begun again. The handles keep the actors alive.
        self._core.roster = self.roster.without(self.roster.handles)

    def _dismiss(self, until: float, but: Collection[str]) -> Collection[str]:
        """Have all members leave; returns their names."""
        roster, lasts = self.roster, self._session_lasts()
        left_out = {*but, *roster.by_themselves}
        # This process (None) at least: calling actors of a session that has ended could start another one.
        reachable = {name: handle for name, handle in roster.handles.items() if lasts or handle is None}
        asked = {name: handle for name, handle in reachable.items() if name not in left_out}
        try:
            ray_calls.have_leave(roster.name, roster.generation, asked, until, for_good=True)
        except Exception:
            logger.warning("group %r: its end could not be announced to all members", roster.name, exc_info=True)
        return asked.keys()

    def _send_off(self, names: Iterable[str], for_good: bool = False) -> None:
        """Have those of these members leave that joined by themselves, without Ray, which may not reach them."""
        by_themselves = self.roster.by_themselves | self.roster.clients.keys()
        # One that is lost is told if its connection is there again within the time that the others take.
        lost = self._core.lost.copy().keys()
        sent = by_themselves.intersection(names)
        for name in sent & lost:
            self._connections.send(name, join.leave, self.roster.generation, for_good)
        asked = dict.fromkeys(sent - lost, (self.roster.generation, for_good))
        # One that leaves closes the connection instead of an answer.
        self._connections.call_all(join.leave, asked, time.monotonic() + _STOP_S)

    def stop(self) -> None:
        """Stop supervising. Idempotent, quick, never raises."""
        with self._changed:
            stopped, self._stopped = self._stopped, True
            self._changed.notify_all()
        if not stopped:
            ray_calls.ended_here.append(self.roster.generation)
            self._tasks.put(None)
            self._no_more_posts.set()
            self._connections.close()
            self.changes.close()
            self._restarts.end(self._session_lasts())

    def after_fork(self) -> tuple[()]:
        if not self._stopped:
            self._stopped = True  # none of its threads runs here
            fork.forked_from(f"the process that formed group {self.roster.name!r}")
        return ()

    def _request(self, event: core.Event) -> None:
        """Have the thread handle an event, which waits for nobody. Blocks until it has; raises what that raises."""

        def handle() -> None:
            self._check_running()
            self._handle(event)

        change = RequestedChange(self.roster.name, handle)
        self._tasks.put(change.run)
        if self._stopped:  # the thread may have ended already
            self._drain()
        change.result(_CHANGE_S)

    def _check_running(self) -> None:
        if self.has_ended():
            raise BootstrapError(f"group {self.roster.name!r} was shut down")

    def _drain(self) -> None:
        """Run what is left in the queue: requested changes fail, as the group has ended."""
        with contextlib.suppress(queue.Empty):
            while True:
                if (task := self._tasks.get_nowait()) is not None:
                    task()

    def _submit(self, task: Callable[[], object]) -> None:
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
        due = self._core.due()
        try:
            task = self._tasks.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
        except queue.Empty:
            task = self._tick
        if task is None:
            return False
        try:
            task()
        except Exception as error:
            if not self._goes_on():
                self.stop()
                return False
            if threads.is_shortage(error):
                raise
            logger.exception("group %r: a change failed", self.roster.name)
        return True

    def _goes_on(self) -> bool:
        return not self._stopped and self._session_lasts()

    def _tick(self) -> None:
        if self._goes_on():
            self._handle(self._core.tick)
        else:
            self.stop()

    def _reserve(self, members: Collection[str]) -> None:
        reserve_descriptors(len(members), f"watching {len(members)} members of group {self.roster.name!r}")

    # --- events and instructions --------------------------------------------------------------------------------------

    def _report(self, event: core.Event) -> None:
        """Have the thread handle an event."""
        self._reported.append(event)
        self._submit(self._note_reports)

    def _note_reports(self) -> None:
        """Handle what was reported by now together: each change goes to all members."""
        if events := [self._reported.popleft() for _ in range(len(self._reported))]:
            self._handle(*events)

    def _handle(self, *events: core.Event) -> None:
        """Carry out what the core decides. What comes of that is reported, so nothing here handles events in turn.

        Raises the first shortage of memory or threads, after it has carried out the rest.
        """
        shortages: list[Exception] = []
        for instruction in self._core.handle(events, time.monotonic()):
            try:
                self._carry_out(instruction)
            except Exception as error:
                if threads.is_shortage(error):
                    shortages.append(error)
                else:
                    logger.exception("group %r: %s failed", self.roster.name, type(instruction).__name__)
        with self._changed:
            self._changed.notify_all()
        if shortages:
            raise shortages.pop(0)

    def _carry_out(self, instruction: core.Instruction) -> None:
        match instruction:
            case core.Announce(delta, members):
                self._announce(delta, members)
            case core.AskRay(names, ended):
                self._ask_ray(names, ended)
            case core.Dial(names, patience_s):
                self._dial(names, patience_s)
            case core.Forget(names):
                self._connections.forget(names)
            case core.Post(arrived):
                self._post(arrived)
            case core.Admit(ranks, patience_s):
                name = f"raytorchrpc-admit-{self.roster.name}"
                thread = threads.start(self._readmit, ranks, patience_s, name=name)
                self._readmissions = [*(each for each in self._readmissions if each.is_alive()), thread]
            case core.Report(change):
                if change.kind in ("lost", "dead"):
                    logger.warning("group %r: lost %s: %s", self.roster.name, change.members[0], change.cause)
                elif change.kind == "back":  # as loud: who has read of the loss waits for it
                    logger.warning("group %r: %s is back", self.roster.name, ", ".join(change.members))
                self.changes.put(change)

    def _announce(self, delta: Delta, members: Mapping[str, core.ProcessId]) -> None:
        def answered(name: str, outcome: Callable[[], Answer]) -> None:
            answer = None
            try:
                answer = outcome()
            except Exception as error:
                if not isinstance(error, PeerLost):  # that is reported by its connection
                    logger.info("%s could not follow a change of its group yet: %s", name, error)
            self._report(partial(self._core.answered, {(name, members[name]): answer}))

        self._connections.ask(join.follow, (delta,), members, answered)

    def _await_members(self, first_s: float = _FIRST_S, gap_s: float = _FIRST_S) -> None:
        """Block until the members have followed. The change goes on without one that has not, ``gap_s`` after another
        one has, or ``first_s`` after none. Not on the supervisor's thread.
        """
        version, until = self._core.view.version, time.monotonic() + first_s
        limit, before = until + first_s, self._core.awaited(version)

        def moves() -> bool:
            return self._stopped or self._core.awaited(version) != before

        with self._changed:
            while before and not self._stopped:
                if not self._changed.wait_for(moves, max(0.0, min(until, limit) - time.monotonic())):
                    self._report(partial(self._core.overdue, version))
                    return
                before, until = self._core.awaited(version), time.monotonic() + gap_s

    def _ask_ray(self, names: Sequence[str], ended: Collection[str]) -> None:
        began = time.monotonic()
        fates = {name: self._restarts.fate(self.roster.record(name), name in ended) for name in names}
        self._report(partial(self._core.ray_said, fates, time.monotonic() - began))

    def _dial(self, names: Iterable[str], patience_s: float) -> None:
        """Connect to members, on threads; each reports what came of it."""
        roster, prepared = self.roster, self._core.listening()
        prepared.update({name: client.prepared for name, client in self._core.clients.items()})
        work: list[Callable[[], None]] = []
        for name in names:
            record = roster.record(name)
            member = record.member
            token = process_token(roster.generation, member.rank, member.incarnation)
            address, by_tcp = prepared[name].addresses["socket"], roster.reached_by_tcp(name)
            self._connections.set_address(name, token, address, by_tcp)
            work.append(partial(self._connect, record.handle, name, record.process, patience_s))
        self._connections.dial(work)

    def _connect(self, handle: Any, name: str, process: core.ProcessId, patience_s: float) -> None:
        why, refused, ended, watch = None, False, False, None
        try:
            # Also to this process: a connection that is watched is never idle, so changes wait for no new one.
            watch = self._connections.watch(name, patience_s)
        except Exception as error:
            # Where a connection existed, one that is refused tells that nothing listens there any more.
            why, refused = getattr(error, "cause", None) or str(error), isinstance(error.__cause__, OSError)
            alone = isinstance(handle, JoinedProcess)
            ended = alone and isinstance(error.__cause__, ConnectionRefusedError)
        self._report(partial(self._core.dialled, name, process, why, refused=refused, ended=ended))
        if watch is not None:  # from now on, so that the end of the process is reported after this
            watch(lambda cause: self._report(partial(self._core.broke, name, process, cause)))

    # --- changes ----------------------------------------------------------------------------------------------------

    def _post(self, arrived: Mapping[str, Any]) -> None:
        roster = self.roster
        if roster.records.keys() != {member.name for member in self.info.members} or arrived:
            self.info = roster.info(self._core.listening())
            self._restarts.admitted(arrived)
            self._restarts.post(roster)

    def _readmit(self, ranks: Mapping[str, int], patience_s: float) -> None:
        roster = self.roster
        here = {name: roster.records[name] for name in ranks if name in roster.records}
        handles = {name: record.handle for name, record in here.items() if record.member.rank == ranks[name]}
        patience_s += _ADMIT_EACH_S * len(roster.records)
        call_all = self._restarts.call_all
        formation = Formation(roster, handles, patience_s, call_all, returns=True)
        failed, later = list(ranks), list(ranks)
        try:
            self._admit("back", formation)
            failed = later = formation.left_out
        except Exception as error:
            logger.warning("group %r: %s could not return yet: %s", roster.name, ", ".join(handles), error)
            later = [name for name in handles if name in getattr(error, "members", handles)] or failed
        self._report(partial(self._core.failed, {name: ranks[name] for name in failed}, later))

    def _admit(self, kind: Literal["added", "back", "client"], formation: Formation) -> None:
        """Have the participants join. Carries out the steps that the core decides. Blocks: not on the supervisor's
        thread.
        """
        self._reserve({*formation.participants, *self._joining})
        formation.probe()
        admission = core.Admission(kind, formation)
        try:
            self._request(partial(self._core.assign, admission))
            while admission.step is Step.ASSIGNED:
                coming = formation.prepare()
                self._request(partial(self._core.announce, admission, coming))
            if admission.step is Step.ANNOUNCED:
                # Half of the time that an attempt to readmit has at first, if nobody follows.
                self._await_members(*((_FIRST_S / 2, GAP_S) if kind == "back" else ()))
                self._request(partial(self._core.connect, admission))
            formation.commit(admission.prepared, admission.away, admission.silent, admission.version)
            self._request(partial(self._core.arrive, admission))
        except BaseException:
            if admission.step not in (Step.BEGUN, Step.JOINED):  # else Ctrl-C came too late
                formation.roll_back()
                self._report(partial(self._core.give_up, admission))
            raise
        if kind == "added":
            self._await_members()
