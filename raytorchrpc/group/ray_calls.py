"""Calls to actors through Ray: to participants by Ray's own calls, to restarted actors by their mailboxes.

See ``calls.rejoin`` for the mailboxes.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls import rejoin
from raytorchrpc.calls.rejoin import ANSWERS, REQUESTS, Process, Record, answer_of, packed, post_record
from raytorchrpc.errors import BootstrapError, RayTorchRpcError
from raytorchrpc.group.control_connections import Answers, Arguments
from raytorchrpc.group.roster import Roster
from raytorchrpc.membership import join

logger = logging.getLogger(__name__)

#: How often an answer is polled, and how often Ray is asked whether the process still runs (seconds).
_ANSWER_S = 0.005
_ALIVE_S = 0.1
#: While an actor restarts, it is called again this often (seconds).
_RESTART_POLL_S = 0.05
#: A restarted process that was asked to poll its mailbox and does not, for instance because it could start no thread,
#: is asked again after so long (seconds).
_ASK_AGAIN_S = 2.0

#: When a group that forms first says whom it waits for, how often then, and how many members it names (seconds).
_FIRST_NOTICE_S, _NOTICE_S, NAMED = 3.0, 10.0, 8
#: Erases the line of a terminal.
_ERASED = "\r\x1b[K"

#: Generations of groups that this process has ended. Their members may not have left yet.
ended_here: deque[str] = deque(maxlen=1024)


def call_all(
    handles: Mapping[str, Any],
    function: Callable[..., Any],
    arguments: Arguments,
    deadline: float,
    *,
    fail_fast: bool = False,
    retry_restarting: bool = False,
    notice: WaitingNotice | None = None,
) -> Answers:
    """Run ``function(instance, *arguments[name])`` at every named member; this process has the handle None.

    Returns results and failures by name; TimeoutError stands for no answer by the deadline. With ``fail_fast`` the
    first failure ends the wait, and members that have not answered are in neither. With ``retry_restarting`` an actor
    that is restarting is called again. ``notice`` says meanwhile whom this waits for.
    """
    results: dict[str, Any] = {}
    failures: dict[str, Exception] = {}
    pending: dict[Any, str] = {}

    def send(member: str) -> None:
        try:
            pending[_call(handles[member], function, arguments[member])] = member
        except RayError as error:  # its queue is full
            failures[member] = error

    def take(reference: Any, member: str) -> None:
        try:
            results[member] = ray.get(reference, timeout=max(1.0, deadline - time.monotonic()))
        except RayTaskError as error:
            failures[member] = error.cause if isinstance(error.cause, Exception) else error
        except RayError as error:
            restarting = isinstance(error, ActorUnavailableError)
            if restarting and retry_restarting and time.monotonic() < deadline:
                threading.Event().wait(_RESTART_POLL_S)  # Ray offers nothing to wait on
                send(member)
            else:
                failures[member] = error

    here = [member for member in arguments if handles[member] is None]
    for member in arguments:
        if member not in here:
            send(member)
    for member in here:
        try:
            results[member] = function(None, *arguments[member])
        except RayTorchRpcError as error:
            failures[member] = error
    while pending and not (fail_fast and failures):
        until = deadline if notice is None else min(deadline, notice.due)
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, until - time.monotonic()))
        if ready:
            take(ready[0], pending.pop(ready[0]))
        elif notice is not None and until < deadline:
            notice.give({member: handles[member] for member in pending.values()})
        else:
            failures.update({member: TimeoutError("no answer") for member in pending.values()})
            break
    for reference in pending:
        _ignore_error(reference)
    return results, failures


class WaitingNotice:
    """Says whom a group that forms waits for, and why: after 3 s, and then every 10 s.

    On a terminal it rewrites one line, which it erases in the end; elsewhere it is logged. A context manager.
    """

    def __init__(self, group: str) -> None:
        self._group, self._since = group, time.monotonic()
        self.due = self._since + _FIRST_NOTICE_S
        """When the next notice is to be given (``time.monotonic``)."""
        self._has_line = False

    def give(self, handles: Mapping[str, Any]) -> None:
        """Name these members. ``handles``: by name."""
        self.due = time.monotonic() + _NOTICE_S
        shown = dict(list(handles.items())[:NAMED])
        reasons = "; ".join(f"{name}: {why}" for name, why in why_silent(shown).items())
        more = f"; and {len(handles) - len(shown)} more" if len(handles) > len(shown) else ""
        text = f"group {self._group!r}, after {time.monotonic() - self._since:.0f} s, waits for {reasons}{more}"
        if sys.stderr.isatty():
            print(_ERASED + text[: shutil.get_terminal_size().columns - 1], end="", file=sys.stderr, flush=True)
            self._has_line = True
        else:
            logger.warning("%s", text)

    def __enter__(self) -> WaitingNotice:
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_line:
            print(_ERASED, end="", file=sys.stderr, flush=True)


def why_silent(handles: Mapping[str, Any]) -> dict[str, str]:
    """Why these actors do not answer, by name."""
    try:
        running = ray_internals.running_methods()
    except Exception as error:  # Ray may not keep task events
        logger.debug("Ray does not say what its actors run: %s", error)
        running = {}
    actors = {name: ray_internals.actor_id_of(handle) for name, handle in handles.items()}
    return {name: _why_silent(actor_id, running.get(actor_id)) for name, actor_id in actors.items()}


def _why_silent(actor_id: str, method: str | None) -> str:
    """``method``: what the actor runs, as far as Ray has said."""
    state = ray_internals.actor_state(actor_id).state
    if method is not None:  # ours: its process imports this package first
        said = {"__ray_call__": "loading raytorchrpc", "__init__": "still in its __init__"}
        return said.get(method, f"busy in {method}")
    if state == "ALIVE":
        return "starting or busy"
    if state == "RESTARTING":
        return "restarting"
    if state == "DEPENDENCIES_UNREADY":
        return "waiting for the arguments of its __init__"
    needs = ", ".join(f"{name}: {amount:g}" for name, amount in ray_internals.required_resources(actor_id).items())
    return f"pending resources {{{needs}}}" if needs else "starting"


def ask_to_leave(roster: Roster, handles: Mapping[str, Any]) -> None:
    """Does not block; ``have_leave`` waits for them, unless its caller is interrupted."""
    call_all(handles, join.leave, dict.fromkeys(handles, (roster.generation,)), time.monotonic())


def have_leave(roster: Roster, handles: Mapping[str, Any], until: float, for_good: bool) -> None:
    """Have these members leave the group. Those that are busy leave later, and are logged."""
    arguments = dict.fromkeys(handles, (roster.generation, for_good))
    _, failures = call_all(handles, join.leave, arguments, until)
    if busy := [name for name, error in failures.items() if isinstance(error, TimeoutError)]:
        logger.warning("group %r: leaving when their methods return: %s", roster.name, ", ".join(busy))


def wait_for_answers(handles: Mapping[str, Any], deadline: float) -> None:
    """Block until each actor runs a call, or one cannot."""
    call_all(handles, rejoin.begin, dict.fromkeys(handles, ()), deadline, fail_fast=True, retry_restarting=True)


def _call(handle: Any, function: Callable[..., Any], args: Any) -> Any:
    """In the actor's present process alone: with the actor's own ``max_task_retries`` Ray might run it in the next."""
    return handle.__ray_call__.options(max_task_retries=0).remote(function, *args)


def _ignore_error(reference: Any) -> None:
    """Retrieve an error that nobody waits for: Ray prints those that are not retrieved."""
    reference.future().add_done_callback(lambda late: late.exception())


class RestartedActors:
    """Used by the supervisor's thread, and by whoever ends the group."""

    def __init__(self, generation: str) -> None:
        self._generation = generation
        self._ended = threading.Event()
        self._asked: dict[str, Process] = {}
        """By actor: the last process that was asked to poll its mailbox."""
        self._ask_again: dict[Process, float] = {}
        """When these are asked once more, unless they poll by then (``time.monotonic``). At once if Ray has lost the
        request, for instance because it still took the actor for one that restarts."""
        self._pings: dict[Process, str] = {}
        """Numbers of the requests by which these processes show that they run."""

    def post(self, roster: Roster | None) -> None:
        """Post which actors the group readmits; None removes the record, and ends all waits for answers. Failures are
        only logged.
        """
        if roster is None and not self._ended.is_set():
            self._ended.set()
            ended_here.append(self._generation)
        try:
            if roster is not None:
                actors = [ray_internals.actor_id_of(handle) for handle in roster.handles.values() if handle is not None]
                node_id = ray.get_runtime_context().get_node_id()
                timeout_s = roster.config.rpc_timeout_s
                record = Record(roster.name, tuple(actors), roster.owner, os.getpid(), node_id, timeout_s)
                post_record(self._generation, record)
            else:
                post_record(self._generation, None)
                for process in list(self._asked.values()):  # the thread may be asking another
                    _clear(process)
        except Exception as error:
            logger.warning(
                "group of generation %s: restarted actors cannot find the group: %s", self._generation, error
            )

    def is_listening(self, handle: Any, there: ray_internals.ActorState) -> bool:
        """Whether the actor's current process answers requests now.

        It is asked to poll its mailbox, through Ray, in case that it has not imported this package. Before each attempt
        to readmit it, it has to answer a request: it may be suspended, or run a method that holds the interpreter lock,
        and the supervisor would wait for it.
        """
        process = Process(ray_internals.actor_id_of(handle), there.pid, there.node_id)
        before = self._asked.get(process.actor_id)
        if before != process:
            if before is not None:
                self._forget(before)
            self._asked[process.actor_id] = process
            self._ask(handle, process)
        answer = answer_of(process)
        if answer is None:
            if time.monotonic() >= self._ask_again.get(process, math.inf):
                self._ask(handle, process)
            return False
        number = self._pings.setdefault(process, uuid.uuid4().hex)
        if answer[0] != number:  # posted each time: the process may have closed its mailbox and opened it again
            ray_internals.store(process.key(REQUESTS), packed((number, rejoin.begin, ())))
            return False
        del self._pings[process]
        return True

    def _ask(self, handle: Any, process: Process) -> None:
        self._ask_again.pop(process, None)

        def asked(answer: Any) -> None:
            error = answer.exception()
            has_run = error is None or isinstance(error, RayTaskError)
            if self._asked.get(process.actor_id) == process:
                self._ask_again[process] = time.monotonic() + (_ASK_AGAIN_S if has_run else 0.0)

        try:
            _call(handle, rejoin.begin, ()).future().add_done_callback(asked)
        except RayError as error:  # its queue is full
            logger.debug("%s: %s", process, error)
            self._ask_again[process] = 0.0

    def _forget(self, process: Process) -> None:
        self._ask_again.pop(process, None)
        self._pings.pop(process, None)
        _clear(process)

    def readmitted(self, handles: Mapping[str, Any]) -> None:
        """These are members again: their processes see that their answers are gone, and stop polling."""
        for handle in handles.values():
            if (process := self._asked.get(ray_internals.actor_id_of(handle))) is not None:
                self._forget(process)

    def call_all(
        self,
        handles: Mapping[str, Any],
        function: Callable[..., Any],
        arguments: Arguments,
        deadline: float,
        *,
        fail_fast: bool = False,
        retry_restarting: bool = False,
    ) -> Answers:
        """As the function ``call_all``, for restarted actors that listen: works while they run a method.

        A process that has ended meanwhile is among the failures.
        """
        results: dict[str, Any] = {}
        failures: dict[str, Exception] = {}
        pending: dict[str, tuple[Process, str]] = {}
        for member, args in arguments.items():
            process, number = self._asked[ray_internals.actor_id_of(handles[member])], uuid.uuid4().hex
            ray_internals.store(process.key(REQUESTS), packed((number, function, args)))
            pending[member] = process, number
        next_check = time.monotonic() + _ALIVE_S
        while pending and not (fail_fast and failures):
            now = time.monotonic()
            checks = now >= next_check
            if checks:
                next_check = now + _ALIVE_S
            for member, (process, number) in pending.items():
                answer = answer_of(process)
                if answer is not None and answer[0] == number:
                    ray_internals.store(process.key(REQUESTS), None)  # it may hold the group's secret
                    _, is_result, value = answer
                    (results if is_result else failures)[member] = value
                elif now >= deadline:
                    failures[member] = TimeoutError("no answer")
                elif self._ended.is_set():
                    failures[member] = BootstrapError("the group was shut down meanwhile")
                elif checks and not process.is_current():
                    failures[member] = BootstrapError("its process has ended")
                    self._forget(process)
            pending = {member: asked for member, asked in pending.items() if member not in (results | failures)}
            if pending:
                self._ended.wait(_ANSWER_S)  # Ray's store offers nothing to wait on
        return results, failures


def _clear(process: Process) -> None:
    """Remove what was posted to and by this process."""
    for kind in (REQUESTS, ANSWERS):
        ray_internals.store(process.key(kind), None)
