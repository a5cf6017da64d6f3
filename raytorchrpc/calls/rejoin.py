"""A restarted actor before it has rejoined its group: how long its direct calls wait, and how the group reaches it.

In each restarted process one thread polls for the group's requests (see ``mailbox``) and runs them. So the actor joins
without an actor task, which could not start while Ray runs an interrupted method again that waits for the group.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NamedTuple

import ray
from ray import cloudpickle

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.scope import refuse_on_loop
from raytorchrpc.calls.server.exposed import take_turns
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import NotAMember, RayTorchRpcError, RpcTimeout
from raytorchrpc.process import fork, threads
from raytorchrpc.process.workers import process_deadlines

_GROUPS, REQUESTS, ANSWERS = "groups/", "requests/", "answers/"


def packed(value: Any) -> bytes:
    """A value as bytes for the store."""
    data: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    return data


class Owner(NamedTuple):
    """The process that formed a group. The group ends with it."""

    job: str
    """Hex id of the Ray job."""
    actor: str | None
    """Hex id of the actor; None for a driver."""


class Record(NamedTuple):
    """What a group posts about itself, for actors that may rejoin it."""

    group: str
    actors: tuple[str, ...]
    """Hex ids of those that may rejoin."""
    owner: Owner
    pid: int
    node_id: str
    """With ``pid``, the supervisor's process: if ``owner`` is an actor, it may be restarted too."""
    timeout_s: float
    """``GroupConfig.rpc_timeout_s``."""

    def lasts(self) -> bool:
        """Whether the supervisor's process is alive, as far as Ray reports."""
        if self.owner.actor is None:
            return self.owner.job not in ray_internals.dead_jobs()
        there = ray_internals.actor_state(self.owner.actor)
        return there.state != "DEAD" and (there.pid, there.node_id) == (self.pid, self.node_id)


def post_record(generation: str, record: Record | None) -> None:
    """Post a group's record, or remove it (None)."""
    ray_internals.store(_GROUPS + generation, None if record is None else packed(tuple(record)))


def find_record(actor_id: str) -> Record | None:
    """The record of the group that this actor may rejoin, if there is one."""
    for text in map(ray_internals.stored, ray_internals.stored_keys(_GROUPS)):
        fields = () if text is None else pickle.loads(text)
        if len(fields) == len(Record._fields):  # another release may post other fields
            record = Record(*fields)
            if actor_id in record.actors and record.lasts():
                return record
    return None


class Process(NamedTuple):
    """One process of an actor."""

    actor_id: str
    pid: int
    node_id: str

    def key(self, kind: str) -> str:
        """The key of its requests or answers."""
        return f"{kind}{self.actor_id}/{self.pid}@{self.node_id}"

    def is_current(self) -> bool:
        """Whether it is the actor's present process."""
        there = ray_internals.actor_state(self.actor_id)
        return there.state != "DEAD" and (there.pid, there.node_id) == (self.pid, self.node_id)


# --- in the restarted process ------------------------------------------------------------------------------------


class Request(NamedTuple):
    """A function for the restarted process to run."""

    number: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


class Mailbox:
    """The mailbox of this process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._taken: bytes | None = None

    def announce(self) -> None:
        """Post that this process polls for requests."""
        ray_internals.store(self._process.key(ANSWERS), packed(("", True, None)))

    def take(self) -> Request | None:
        """Take the posted request, if there is a new one.

        The group removes it when it has the answer. If it were removed here, the next one might be, too, unread.
        """
        text = ray_internals.stored(self._process.key(REQUESTS))
        if text is None or text == self._taken:
            return None
        self._taken = text
        return Request(*pickle.loads(text))

    def answer(self, request: Request, instance: Any) -> None:
        """Run the request, and post its result or error."""
        try:
            answer = (request.number, True, request.function(instance, *request.args))
        except Exception as error:
            answer = (request.number, False, error)
        ray_internals.store(self._process.key(ANSWERS), _answer_packed(answer))

    def is_over(self) -> bool:
        """Whether the group has removed the answers, and sends no more requests."""
        return ray_internals.stored(self._process.key(ANSWERS)) is None

    def close(self) -> None:
        """Remove everything from the store."""
        for kind in (REQUESTS, ANSWERS):
            ray_internals.store(self._process.key(kind), None)


def _answer_packed(answer: tuple[str, bool, Any]) -> bytes:
    try:
        return packed(answer)
    except Exception as error:
        return packed((answer[0], False, RayTorchRpcError(f"{answer[2]!r} cannot be pickled: {error}")))


def answer_of(process: Process) -> tuple[str, bool, Any] | None:
    """The last answer of a process: the request's number, whether it returned, and its result or error.

    None before the process polls for requests.
    """
    text = ray_internals.stored(process.key(ANSWERS))
    return None if text is None else pickle.loads(text)


logger = logging.getLogger(__name__)

#: The pause between two polls is this share of the time waited so far, within these limits (seconds).
_SHORTEST_S, _LONGEST_S, _SHARE = 0.005, 0.1, 0.02
#: How often the process checks that the group still exists (seconds).
_CHECK_S = 1.0
#: After it has rejoined, a process waits this long for the group to close the mailbox (seconds).
_CLOSE_S = 60.0
#: The patience of a call without a deadline of its own, until the group's ``rpc_timeout_s`` is known (seconds).
_UNKNOWN_S = 60.0
#: The error of a wait may come this much later than its deadline (seconds).
_GRACE_S = 1.0

#: The id of the task that creates an actor is this and the actor's id.
_INIT_TASK = "f" * 16

#: The groups that this process has formed and not ended, and whether each is detached.
formed_here: dict[str, bool] = {}


class _Waiter(NamedTuple):
    member: DeferredReply
    since: float
    timeout_s: float | None


class Rejoin:
    """The return of one restarted process into its group, and the calls that wait for it. Thread-safe."""

    def __init__(self, actor_id: str) -> None:
        self._actor_id = actor_id
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []
        self._deadlines = process_deadlines()
        self._record: Record | None = None
        self._local: Any = None
        self._refusal: NotAMember | None = None
        self._thread: threading.Thread | None = None
        self._came_by_mailbox = True

    def start(self) -> None:
        """Start to poll. Raises ThreadShortage."""
        self._thread = threads.start(self._work, name="raytorchrpc-rejoin")
        fork.register(self)

    def after_fork(self) -> tuple[()]:
        """See fork.ForkAware."""
        if not self.over:
            self._refusal = NotAMember(_no_group(self._actor_id))
            fork.forked_from("a restarted actor")
        return ()

    @property
    def over(self) -> bool:
        """Whether the thread has ended."""
        return self._refusal is not None or (self._thread is not None and not self._thread.is_alive())

    def member(self, timeout_s: float | None) -> DeferredReply:
        """Settled with the LocalMember, with NotAMember if the process cannot rejoin, or with RpcTimeout after
        ``timeout_s`` (None: the default of a call).
        """
        waiter = _Waiter(DeferredReply(), time.monotonic(), timeout_s)
        with self._lock:
            local, refusal = self._local, self._refusal
            if local is None and refusal is None:
                self._waiters.append(waiter)
        if local is not None or refusal is not None:
            waiter.member.settle(local, refusal if local is None else None)
        else:
            self._watch_deadline(waiter)
        return waiter.member

    def patience(self, timeout_s: float | None) -> float:
        """How long a call with this timeout waits (seconds)."""
        if timeout_s is not None:
            return timeout_s
        return _UNKNOWN_S if self._record is None else self._record.timeout_s

    def why_late(self, since: float) -> str:
        """For the error of a call that has waited since then."""
        group = "its group" if self._record is None else f"group {self._record.group!r}"
        return f"this process was restarted and has not rejoined {group} within {time.monotonic() - since:.3g} s"

    def _watch_deadline(self, waiter: _Waiter) -> None:
        cancel = self._deadlines.at(waiter.since + self.patience(waiter.timeout_s), lambda: self._expire(waiter))
        waiter.member.add_done_callback(lambda _: cancel())

    def _expire(self, waiter: _Waiter) -> None:
        if time.monotonic() - waiter.since < self.patience(waiter.timeout_s):  # which has become known meanwhile
            self._watch_deadline(waiter)
            return
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        waiter.member.settle(None, RpcTimeout(self.why_late(waiter.since)))

    def joined(self, local: Any) -> None:
        """This process is that member now; None: it has left the group."""
        with self._lock:
            self._local, self._came_by_mailbox = local, threading.current_thread() is self._thread
            waiters, self._waiters = (self._waiters, []) if local is not None else ([], self._waiters)
        for waiter in waiters:
            waiter.member.settle(local)

    def _refuse(self, refusal: NotAMember) -> None:
        with self._lock:
            self._refusal = refusal
            waiters, self._waiters = self._waiters, []
        take_turns(_was_member)
        for waiter in waiters:
            waiter.member.settle(None, refusal)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        refusal = NotAMember(_no_group(self._actor_id))
        try:
            self._serve_group()
        except Exception as error:
            logger.warning("this restarted actor cannot rejoin its group: %s", error, exc_info=True)
            refusal = NotAMember(f"this process was restarted and cannot rejoin its group: {error}")
        finally:
            if self._record is not None and self._local is None:
                refusal = NotAMember(
                    f"this process was restarted, and group {self._record.group!r} has ended meanwhile"
                )
            self._refuse(refusal)

    def _serve_group(self) -> None:
        self._record = find_record(self._actor_id)
        if self._record is None or self._local is not None:  # it has joined by another way just now
            return
        with self._lock:
            waiters = [waiter for waiter in self._waiters if waiter.timeout_s is None]
        for waiter in waiters:
            self._watch_deadline(waiter)
        mailbox = Mailbox(Process(self._actor_id, os.getpid(), ray.get_runtime_context().get_node_id()))
        mailbox.announce()
        try:
            self._poll(mailbox)
        finally:
            mailbox.close()

    def _poll(self, mailbox: Mailbox) -> None:
        since = time.monotonic()
        next_check = since + _CHECK_S
        while True:
            request, now = mailbox.take(), time.monotonic()
            if request is not None:
                mailbox.answer(request, ray_internals.actor_instance())
                since = time.monotonic()
                continue
            # A group that took it in by another way knows nothing of the mailbox.
            over = not self._came_by_mailbox or now - since > _CLOSE_S
            if self._local is not None and (over or mailbox.is_over()):
                return
            if now >= next_check:
                next_check = now + _CHECK_S
                if self._local is None and find_record(self._actor_id) is None:
                    return
            pause = min(_LONGEST_S, max(_SHORTEST_S, (now - since) * _SHARE))
            threading.Event().wait(pause)  # Ray's store offers nothing to wait on


# --- the rejoin of this process ---------------------------------------------------------------------------------------

_lock = threading.Lock()
_current: Rejoin | None = None
_was_member = False
"""This process has joined a group since it began; a group that it has left does not take it back."""
_restarted: bool | None = None


def begin(instance: Any = None) -> None:
    """If this process holds an actor that Ray has restarted, let its group reach it. Idempotent, quick.

    Runs when the package is imported, which a class with methods for direct calls does before the actor's ``__init__``;
    and through Ray (with the instance), if the process does not poll.
    """
    try:
        actor_id = _actor_here()
        if actor_id is not None and not _was_member:
            _begin(actor_id)
    except Exception as error:  # an import must not fail for this; the first call tries again
        logger.debug("this process cannot look for its group yet: %s", error)


def _begin(actor_id: str) -> Rejoin:
    global _current
    with _lock:
        if _current is None or _current.over:
            rejoin = Rejoin(actor_id)
            take_turns()  # Ray may run a method before the actor is a member again
            rejoin.start()  # if it raises, the next call tries again
            _current = rejoin
        return _current


def awaited(timeout_s: float | None) -> DeferredReply:
    """For a process outside any group: settled with the LocalMember that it becomes; see Rejoin.member.

    Raises NotAMember at once where there is no group to wait for.
    """
    fork.check_process()
    actor_id = _actor_here()
    left = _was_member and (_current is None or _current.over)
    if actor_id is not None and _runs_init(actor_id):
        raise NotAMember("this process is in no group: an actor can join one only when its __init__ has ended")
    if actor_id is None or left or not _was_restarted(actor_id):
        raise NotAMember(_no_group(actor_id))
    return _begin(actor_id).member(_number(timeout_s))


def wait(timeout_s: float | None) -> tuple[Any, float | None]:
    """The LocalMember that this process becomes, and what is left of ``timeout_s``. Blocks; raises as ``awaited``."""
    since = time.monotonic()
    member = awaited(timeout_s)
    if not member.done():
        refuse_on_loop("waiting until this restarted actor is a member again", "`await raytorchrpc.await_membership()`")
    try:
        local = member.result(patience(timeout_s) + _GRACE_S)
    except FutureTimeoutError:
        raise RpcTimeout(why_late(since)) from None
    return local, left_of(local, timeout_s, since)


def left_of(local: Any, timeout_s: float | None, since: float) -> float | None:
    """What is left of a call's time once this process is a member."""
    if timeout_s is not None and _number(timeout_s) is None:
        return timeout_s  # the call refuses it
    whole: float = local.config.rpc_timeout_s if timeout_s is None else timeout_s
    return max(_SHORTEST_S, whole - (time.monotonic() - since))


def patience(timeout_s: float | None) -> float:
    """See Rejoin.patience."""
    current, seconds = _current, _number(timeout_s)
    return (seconds or _UNKNOWN_S) if current is None else current.patience(seconds)


def why_late(since: float) -> str:
    """See Rejoin.why_late."""
    current = _current
    return "this process is in no group" if current is None else current.why_late(since)


def _number(timeout_s: Any) -> float | None:
    """None also for what is not a number: the call itself refuses that."""
    return timeout_s if isinstance(timeout_s, (int, float)) else None


def _actor_here() -> str | None:
    """Hex id of the actor in this process, or of the one it is about to create; None if there is none."""
    return ray.get_runtime_context().get_actor_id() if ray.is_initialized() else None


def _no_group(actor_id: str | None) -> str:
    """Why this process, which holds that actor or none, cannot call members, and what to do."""
    if actor_id is not None and _was_member:
        return "this process is in no group any more: its group has ended, or this actor was removed from it"
    if formed_here:
        name, detached = list(formed_here.items())[-1]
        if detached:
            return (
                f"this process is in no group: it formed the detached group {name!r}, which a driver cannot join; call "
                f"the actors through Ray, handle.method.remote()"
            )
        return (
            f"this process is in no group: it formed group {name!r} without joining it. To call members from here, "
            f"pass include_driver=True to init_group, or call them through Ray, handle.method.remote()"
        )
    if actor_id is not None:
        return "this process is in no group: call raytorchrpc.init_group([...]) with this actor first"
    if ray_internals.runs_tasks():
        return "this process is in no group: a Ray task cannot join one; make the call in an actor that is a member"
    return "this process is in no group: form one with raytorchrpc.init_group([...], include_driver=True)"


def _runs_init(actor_id: str) -> bool:
    """Whether this thread runs the actor's ``__init__``: the actor cannot join before that has ended."""
    return ray.get_runtime_context().get_task_id() == _INIT_TASK + actor_id


def _was_restarted(actor_id: str) -> bool:
    global _restarted
    if _restarted is None:
        _restarted = ray_internals.actor_state(actor_id).restarts > 0
    return _restarted


def joined(local: Any) -> None:
    """This process has become that member; None: it has left the group."""
    global _was_member
    _was_member = _was_member or local is not None
    if _current is not None:
        _current.joined(local)
