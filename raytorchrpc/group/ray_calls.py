"""Calls to actors through Ray."""

from __future__ import annotations

import logging
import math
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayTaskError

from raytorchrpc import _loading
from raytorchrpc._compat import ray_internals
from raytorchrpc.group import join
from raytorchrpc.group.control_connections import Arguments
from raytorchrpc.process import this_process, threads
from raytorchrpc.process.fan_out import Answers, Outcome, ask_all

logger = logging.getLogger(__name__)

#: When a group that forms first says whom it waits for, how often then, and how many members it names (seconds).
_FIRST_NOTICE_S, _NOTICE_S, NAMED = 3.0, 10.0, 8
#: A group that forms waits so many times its timeout at most for processes that load modules all the time.
LONGEST = 5
_LOADING, _STARTING = "loading raytorchrpc and torch", "loading its class, or in its __init__"
#: A process that starts makes progress if it uses this share of a processor. One that only waits uses 1 %.
_BUSY = 0.05
#: At most so many members are examined for it each time: Ray takes a millisecond for each.
_EXAMINED = 64
#: What Ray adds to the name of a resource.
_IN_PLACEMENT_GROUP = re.compile(r"_group_(\d+_)?[0-9a-f]{36}$")

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
    patience: Patience | None = None,
) -> Answers:
    """Run ``function(instance, *arguments[name])`` at every named member; this process has the handle None.

    See ``ask_all``. With ``retry_restarting`` an actor that is restarting is called again. ``patience`` takes the place
    of the deadline, and says whom this waits for.
    """

    def begin(member: str, answered: Callable[[Outcome], object]) -> None:
        if (handle := handles[member]) is None:  # on a thread, so that Ctrl-C never breaks it off halfway
            done: Future[Any] = Future()
            done.add_done_callback(lambda done: answered(done.result))
            threads.start(threads.settle, done, function, None, *arguments[member], name="raytorchrpc-step")
            return
        reference = ray_internals.call_actor(handle, function, *arguments[member])
        # Ray prints an error that is not retrieved, also one that comes when nobody waits for it any more.
        reference.future().add_done_callback(lambda future: answered(partial(_result, future, future.exception())))

    def extend(members: Collection[str]) -> float:
        return 0.0 if patience is None else patience.extend({name: handles[name] for name in members}, len(arguments))

    return ask_all(
        arguments,
        begin,
        deadline if patience is None else patience.until,
        fail_fast=fail_fast,
        extend=extend,
        again=lambda error: retry_restarting and isinstance(error, ActorUnavailableError),
    )


def _result(answer: Any, error: BaseException | None) -> Any:
    """What an actor returned, or raised."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        raise error.cause
    return answer.result()


class Patience:
    """How long a group that forms waits for its members. Says whom it waits for, and why: after 3 s, then every 10 s.

    The time runs anew while a process loads modules, or works in its ``__init__`` on this node, until ``LONGEST`` times
    as much has passed.
    """

    def __init__(self, group: str, timeout_s: float) -> None:
        self._group, self._timeout_s, self._since = group, timeout_s, time.monotonic()
        self.deadline = self._since + timeout_s
        self.due = self._since + _FIRST_NOTICE_S
        """When the next notice is to be given (``time.monotonic``)."""
        self._loaded: dict[str, int] = {}
        self._progress: dict[str, float] = {}

    @property
    def until(self) -> float:
        """When to ask ``extend`` (``time.monotonic``)."""
        return min(self.deadline, self.due)

    def extend(self, handles: Mapping[str, Any], count: int) -> float:
        """Until when to wait on for these of ``count`` members, by name. Says so if a notice is due."""
        now, self._loaded = time.monotonic(), _loaded_modules(handles)
        progress = {name: spent_s - _BUSY * now for name, spent_s in _starting(handles).items()} | self._loaded
        if any(self._progress.get(name, -math.inf) < reached for name, reached in progress.items()):
            self.deadline = min(max(self.deadline, now + self._timeout_s), self._since + LONGEST * self._timeout_s)
        self._progress = progress
        if now >= self.due and now < self.deadline:
            self._give(handles, count)
        return self.until

    def _give(self, handles: Mapping[str, Any], count: int) -> None:
        self.due = time.monotonic() + _NOTICE_S
        shown = dict(list(handles.items())[:NAMED])
        reasons = "; ".join(f"{name}: {why}" for name, why in why_silent(shown, self._loaded).items())
        more = f"; and {len(handles) - len(shown)} more" if len(handles) > len(shown) else ""
        there = f"{_LOADING}: {count - len(handles)} of {count} are there, " if self._loaded else ""
        text = f"group {self._group!r}, after {time.monotonic() - self._since:.0f} s, {there}waits for {reasons}{more}"
        logger.warning("%s", text)


def _loaded_modules(handles: Mapping[str, Any]) -> dict[str, int]:
    """How many modules have been loaded in the processes of those of these actors that load now, by name."""
    names = {ray_internals.actor_id_of(handle): name for name, handle in handles.items() if handle is not None}
    try:
        loaded = _loading.loaded_modules(names)
    except Exception as error:  # Ray's control store may be busy
        logger.debug("Ray does not say which actors load modules: %s", error)
        loaded = {}
    return {names[actor_id]: modules for actor_id, modules in loaded.items()}


def _starting(handles: Mapping[str, Any]) -> dict[str, float]:
    """The processor time of those of these actors that start in a process of this node, by name (seconds).

    A class that uses torch has it loaded before this package, which therefore counts no modules.
    """
    spent, here = {}, ray.get_runtime_context().get_node_id()
    for name, handle in islice(handles.items(), _EXAMINED):
        with suppress(Exception):  # Ray's control store may be busy; the process may have ended
            state = None if handle is None else ray_internals.actor_state(ray_internals.actor_id_of(handle))
            if state is not None and state.state == "PENDING_CREATION" and state.pid and state.node_id == here:
                spent[name] = this_process.processor_s(state.pid)
    return spent


def why_silent(handles: Mapping[str, Any], loading: Collection[str] | None = None) -> dict[str, str]:
    """Why these members do not answer, by name; this process has the handle None.

    ``loading``: those that load modules, if that is known.
    """
    if not handles:
        return {}
    try:
        running = ray_internals.running_methods()
    except Exception as error:  # Ray may not keep task events
        logger.debug("Ray does not say what its actors run: %s", error)
        running = {}
    loading = _loaded_modules(handles) if loading is None else loading

    def reason(name: str, handle: Any) -> str:
        if handle is None:
            return "still starting, in this process"
        actor_id = ray_internals.actor_id_of(handle)
        return _LOADING if name in loading else _why_silent(actor_id, running.get(actor_id))

    return {name: reason(name, handle) for name, handle in handles.items()}


def _why_silent(actor_id: str, method: str | None) -> str:
    """``method``: what the actor runs, as far as Ray has said."""
    state, pid, *_ = ray_internals.actor_state(actor_id)
    if method is not None:  # __ray_call__ may be ours, for which its process imports this package first
        said = {"__ray_call__": "loading raytorchrpc, or busy in __ray_call__", "__init__": _STARTING}
        return said.get(method, f"busy in {method}")
    if state == "ALIVE":
        return "starting or busy"
    if state == "PENDING_CREATION" and pid:
        return _STARTING
    if state == "RESTARTING":
        return "restarting"
    if state == "DEPENDENCIES_UNREADY":
        return "waiting for the arguments of its __init__"
    asked = ray_internals.required_resources(actor_id)
    # In a placement group Ray asks for CPU_group_0_ID and CPU_group_ID where the actor asked for CPU, and for bundles.
    plain = {_IN_PLACEMENT_GROUP.sub("", name): amount for name, amount in asked.items()}
    needs = ", ".join(f"{name}: {amount:g}" for name, amount in plain.items() if name != "bundle" or name in asked)
    where = "" if plain.keys() <= asked.keys() else " of its placement group"
    return f"pending resources {{{needs}}}{where}" if plain else "starting"


def have_leave(
    group: str, generation: str, handles: Mapping[str, Any], until: float, *, for_good: bool = False
) -> None:
    """Have these members leave the group. Those that are busy leave later, and are logged."""
    arguments = dict.fromkeys(handles, (generation, for_good))
    _, failures = call_all(handles, join.leave, arguments, until)
    if busy := [name for name, error in failures.items() if isinstance(error, TimeoutError)]:
        logger.warning("group %r: leaving when their methods return: %s", group, ", ".join(busy))
