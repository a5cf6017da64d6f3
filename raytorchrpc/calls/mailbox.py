"""How a group reaches a restarted actor that has not rejoined it: through Ray's key-value store.

Calls through Ray wait until the actor has finished its current method, and Ray may at once run an interrupted method
again (``max_task_retries``). So the restarted process polls a mailbox of its own. The supervisor's process posts a
record of the actors that may rejoin, then requests; the restarted process posts the answers.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

from ray import cloudpickle

from raytorchrpc._compat import ray_internals
from raytorchrpc.errors import RayTorchRpcError

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
