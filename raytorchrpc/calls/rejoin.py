"""A restarted actor before it has rejoined its groups: how long its direct calls wait.

``group.restarted`` is how the groups reach it meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NamedTuple

import ray

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.options import check_longest_wait
from raytorchrpc.calls.scope import refuse_on_loop
from raytorchrpc.calls.server.exposed import take_turns
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import NotAMember, RpcTimeout
from raytorchrpc.process import fork, threads
from raytorchrpc.process.locks import Lock
from raytorchrpc.process.workers import process_deadlines

logger = logging.getLogger(__name__)

#: The patience of a call without a deadline of its own, until the group's ``rpc_timeout_s`` is known (seconds).
_UNKNOWN_S = 60.0
#: The error of a wait may come this much later than its deadline (seconds).
_GRACE_S = 1.0
#: What is left of a call's time once this process is a member, at least (seconds).
_SHORTEST_S = 0.005

#: The id of the task that creates an actor is this and the actor's id.
_INIT_TASK = "f" * 16

#: The groups that this process has formed and not ended, and whether each is detached.
formed_here: dict[str, bool] = {}


class Owner(NamedTuple):
    """The process that formed a group. The group ends with it."""

    job: str
    """Hex id of the Ray job."""
    actor: str | None
    """Hex id of the actor; None for a driver and in a task."""
    pid: int = 0
    node_id: str = ""
    """With ``pid``, the actor's process: Ray may have restarted the actor since."""
    worker: str | None = None
    """Hex id of the worker process of a task; None for others."""


class Awaited(DeferredReply):
    """A LocalMember that this process becomes, once it is back in all its groups. NotAMember if it cannot rejoin, or
    RpcTimeout after ``timeout_s``.
    """

    def __init__(self, rejoin: Rejoin, timeout_s: float | None) -> None:
        """``timeout_s``: None: the longest ``rpc_timeout_s`` of its groups."""
        super().__init__()
        self._rejoin, self.timeout_s, self._since = rejoin, timeout_s, time.monotonic()

    @property
    def until(self) -> float:
        """The deadline (``time.monotonic``)."""
        timeout_s = self.timeout_s
        if timeout_s is None:
            timeout_s = max((each for _, each in self._rejoin.groups.values()), default=_UNKNOWN_S)
        return self._since + timeout_s

    def why_late(self) -> str:
        """For the error of a call that waits for this."""
        names = [repr(self._rejoin.groups[generation][0]) for generation in self._rejoin.pending]
        group = f"group {', '.join(names)}" if names else "its group"
        waited_s = time.monotonic() - self._since
        return f"this process was restarted and has not rejoined {group} within {waited_s:.3g} s"


class Rejoin:
    """The return of one restarted process into its groups, and the calls that wait for it. Thread-safe."""

    def __init__(self, actor_id: str) -> None:
        self.actor_id = actor_id
        self.members: dict[str, Any] = {}
        """By generation, the LocalMembers that this process is now."""
        self.finished: set[str] = set()
        """The generations of groups that need to reach it no more."""
        self.news = threading.Event()
        """Set when ``members`` or ``finished`` changes."""
        self._lock = Lock()
        self._waiters: list[Awaited] = []
        self._deadlines = process_deadlines()
        self.groups: dict[str, tuple[str, float]] = {}
        """By generation, those that are to take it back: the name, and ``rpc_timeout_s``."""
        self._refusal: NotAMember | None = None
        self._thread: threading.Thread | None = None

    def start(self, serve: Callable[[Rejoin], None]) -> None:
        """Have ``serve`` join the groups, on a thread; its end ends all waits. Raises ThreadShortage."""
        self._thread = threads.start(self._work, serve, name="raytorchrpc-rejoin")
        fork.register(self)

    def after_fork(self) -> tuple[()]:
        if not self.over:
            self._refusal = NotAMember(_no_group(self.actor_id))
            fork.forked_from("a restarted actor")
        return ()

    @property
    def over(self) -> bool:
        """Whether the thread has ended."""
        return self._refusal is not None or (self._thread is not None and not self._thread.is_alive())

    @property
    def pending(self) -> set[str]:
        """The generations of the groups that are to take it back, and have not."""
        return self.groups.keys() - self.members.keys()

    def expect(self, groups: dict[str, tuple[str, float]]) -> None:
        """These groups are to take this process back; see ``groups``."""
        with self._lock:
            changed, self.groups = groups != self.groups, groups
            waiters = [waiter for waiter in self._waiters if waiter.timeout_s is None] if changed else []
        for waiter in waiters:
            self._watch_deadline(waiter)
        self._settle()

    def _settle(self) -> None:
        """End the waits, if this process is back in all its groups."""
        changed()
        with self._lock:
            is_back = self.members and not self.pending
            waiters, self._waiters = (self._waiters, []) if is_back else ([], self._waiters)
            members = self.members
        for waiter in waiters:
            waiter.settle(next(iter(members.values())))

    def member(self, timeout_s: float | None) -> Awaited:
        """See Awaited."""
        waiter = Awaited(self, timeout_s)
        with self._lock:
            members, refusal = self.members, self._refusal
            waits = refusal is None and (not members or self.pending)
            if waits:
                self._waiters.append(waiter)
        if not waits:
            waiter.settle(next(iter(members.values()), None), None if members else refusal)
        else:
            self._watch_deadline(waiter)
        return waiter

    def _watch_deadline(self, waiter: Awaited) -> None:
        cancel = self._deadlines.at(waiter.until, lambda: self._expire(waiter))
        waiter.add_done_callback(lambda _: cancel())

    def _expire(self, waiter: Awaited) -> None:
        if time.monotonic() < waiter.until:  # which has become known meanwhile
            self._watch_deadline(waiter)
            return
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        waiter.settle(None, RpcTimeout(waiter.why_late()))

    def joined(self, locals_: Sequence[Any]) -> None:
        """These are the LocalMembers of this process now."""
        with self._lock:
            self.members = {local.generation: local for local in locals_}
        self.news.set()
        self._settle()

    def finish(self, generation: str) -> None:
        """That group needs to reach this process no more."""
        self.finished.add(generation)
        self.news.set()

    def _work(self, serve: Callable[[Rejoin], None]) -> None:
        refusal = NotAMember(_no_group(self.actor_id))
        try:
            serve(self)
        except Exception as error:
            logger.warning("this restarted actor cannot rejoin its group: %s", error, exc_info=True)
            refusal = NotAMember(f"this process was restarted and cannot rejoin its group: {error}")
        finally:
            if self.groups and not self.members:
                names = ", ".join(repr(name) for name, _ in self.groups.values())
                refusal = NotAMember(f"this process was restarted, and group {names} has ended meanwhile")
            with self._lock:
                self._refusal, self.groups = refusal, {}
                waiters, self._waiters = self._waiters, []
            take_turns(_was_member)
            changed()
            for waiter in waiters:
                waiter.settle(next(iter(self.members.values()), None), None if self.members else refusal)


# --- the rejoin of this process ---------------------------------------------------------------------------------------

_lock = Lock()
_current: Rejoin | None = None
_was_member = False
"""This process has joined a group since it began; a group that it has left does not take it back."""
_restarted: bool | None = None


_serve: Callable[[Rejoin], None]


def changed() -> None:
    """Have calls look at what ``pending`` is now; set by ``calls.member``."""


def pending() -> set[str]:
    """The generations of the groups that are to take this restarted process back, and have not."""
    return set() if _current is None else _current.pending


def begin(serve: Callable[[Rejoin], None]) -> None:
    """If this process holds an actor that Ray has restarted, have ``serve`` join its group. Idempotent, quick."""
    global _serve
    _serve = serve
    try:
        actor_id = _actor_here()
        if actor_id is not None and not _was_member:
            _begin(actor_id)
    except Exception as error:  # an import must not fail for this; the first call tries again
        logger.debug("this process cannot look for its group yet: %s", error)


def finish(generation: str) -> None:
    if _current is not None:
        _current.finish(generation)


def _begin(actor_id: str) -> Rejoin:
    global _current
    with _lock:
        if _current is None or _current.over:
            rejoin = Rejoin(actor_id)
            take_turns()  # Ray may run a method before the actor is a member again
            rejoin.start(_serve)  # if it raises, the next call tries again
            _current = rejoin
        return _current


def check_process() -> None:
    """Raise NotAMember in a process that cannot be in any group, nor form one: a forked child, or a Ray Client."""
    fork.check_process()
    if ray_internals.uses_ray_client():
        raise NotAMember(
            "this process uses Ray Client (ray://): it is not in the cluster, so it can neither form a group nor be in "
            "one; run the program in the cluster, as a job (`ray job submit`), or do what needs the group in a Ray "
            "task or actor"
        )


def awaited(timeout_s: float | None) -> Awaited:
    """For a process outside any group: settled with the LocalMember that it becomes.

    Raises NotAMember at once where there is no group to wait for, and ConfigurationError for what is no timeout.
    """
    check_longest_wait(timeout_s)
    check_process()
    actor_id = _actor_here()
    has_left = _was_member and (_current is None or _current.over)
    if actor_id is not None and runs_init(actor_id):
        raise NotAMember("this process is in no group: an actor can join one only when its __init__ has ended")
    if actor_id is None or has_left or not _was_restarted(actor_id):
        raise NotAMember(_no_group(actor_id))
    return _begin(actor_id).member(timeout_s)


def wait(timeout_s: float | None) -> Any:
    """The LocalMember that this process becomes. Blocks; raises as ``awaited``."""
    member = awaited(timeout_s)
    if not member.done():
        refuse_on_loop("waiting until this restarted actor is a member again", "`await raytorchrpc.await_membership()`")
    return outcome_of(member)[0]


def outcome_of(joining: Any) -> tuple[Any, float]:
    """The LocalMember that this process becomes, and what is left of the time of the operation that needs it (seconds).

    ``joining``: an ``Awaited``, or a ``clients.Joining``. Blocks for it; raises its error, and RpcTimeout.
    """
    try:
        local = joining.result(max(0.0, joining.until - time.monotonic()) + _GRACE_S)
    except FutureTimeoutError:
        raise RpcTimeout(joining.why_late()) from None
    return local, max(_SHORTEST_S, joining.until - time.monotonic())


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
                f"this process is in no group: it formed the detached group {name!r}, of which a driver can only be a "
                f"client, which calls members, uses their queues and pulls weights"
            )
        return (
            f"this process is in no group: it formed group {name!r} without joining it, so it is only a client, which "
            f"calls members, uses their queues and pulls weights. For more, pass include_driver=True to init_group"
        )
    by_itself = "or join one by its name, raytorchrpc.join(name), if it has GroupConfig(joinable_by='cluster')"
    if actor_id is not None:
        return f"this process is in no group: call raytorchrpc.init_group([...]) with this actor first, {by_itself}"
    if ray_internals.runs_tasks():
        return f"this process is in no group: let an actor that is a member do this instead of a Ray task, {by_itself}"
    return (
        "this process is in no group: form one with raytorchrpc.init_group([...], include_driver=True), or join one "
        "with raytorchrpc.join()"
    )


def runs_init(actor_id: str) -> bool:
    """Whether this thread runs the actor's ``__init__``: the actor cannot join before that has ended."""
    return ray.get_runtime_context().get_task_id() == _INIT_TASK + actor_id


def _was_restarted(actor_id: str) -> bool:
    global _restarted
    if _restarted is None:
        _restarted = ray_internals.actor_state(actor_id).restarts > 0
    return _restarted


def joined(locals_: Sequence[Any]) -> None:
    """These are the memberships of this process now, as LocalMembers."""
    global _was_member
    _was_member = _was_member or bool(locals_)
    if _current is not None:
        _current.joined(locals_)
