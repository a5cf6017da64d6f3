"""How a group reaches the process of a restarted actor that has not joined it again: through Ray's key-value store.

Calls through Ray wait until the actor has finished the method that it runs, and Ray may have it run an interrupted one
again at once (``max_task_retries``). So the process looks into a mailbox of its own meanwhile. The process that looks
after the group posts a record of those whom it would take back, then requests; the process posts the answers.
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
    """As the store keeps it."""
    data: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    return data


class Owner(NamedTuple):
    """The process that formed a group; a group outlives it only by accident."""

    job: str
    """Hex id of the Ray job."""
    actor: str | None
    """Hex id of the actor, if it was one; None for a driver."""


class Record(NamedTuple):
    """What a group posts about itself: whom it takes back."""

    group: str
    actors: tuple[str, ...]
    """Hex ids."""
    owner: Owner
    pid: int
    node_id: str
    """The process that looks after the group, if ``owner`` is an actor: that actor may be restarted too."""
    timeout_s: float
    """``GroupConfig.rpc_timeout_s``."""

    def lasts(self) -> bool:
        """Whether the process that looks after the group is still there, as far as Ray knows."""
        if self.owner.actor is None:
            return self.owner.job not in ray_internals.dead_jobs()
        there = ray_internals.actor_state(self.owner.actor)
        return there.state != "DEAD" and (there.pid, there.node_id) == (self.pid, self.node_id)


def post_record(generation: str, record: Record | None) -> None:
    """Post what a group says about itself; None: take it down."""
    ray_internals.store(_GROUPS + generation, None if record is None else packed(tuple(record)))


def find_record(actor_id: str) -> Record | None:
    """The group that takes this actor back, if there is one."""
    for text in map(ray_internals.stored, ray_internals.stored_keys(_GROUPS)):
        fields = () if text is None else pickle.loads(text)
        if len(fields) == len(Record._fields):  # another release may post others
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
        """Where its requests or answers are."""
        return f"{kind}{self.actor_id}/{self.pid}@{self.node_id}"

    def is_current(self) -> bool:
        """Whether it is the actor's present process."""
        there = ray_internals.actor_state(self.actor_id)
        return there.state != "DEAD" and (there.pid, there.node_id) == (self.pid, self.node_id)


# --- in the restarted process ------------------------------------------------------------------------------------


class Request(NamedTuple):
    """What the process is to do."""

    number: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


class Mailbox:
    """The process's own."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def announce(self) -> None:
        """Tell that requests are looked for."""
        ray_internals.store(self._process.key(ANSWERS), packed(("", True, None)))

    def take(self) -> Request | None:
        """The request that waits, if there is one."""
        key = self._process.key(REQUESTS)
        text = ray_internals.stored(key)
        if text is None:
            return None
        ray_internals.store(key, None)  # it may hold the group's secret
        return Request(*pickle.loads(text))

    def answer(self, request: Request, instance: Any) -> None:
        """Do what is asked, and post what came of it."""
        try:
            answer = (request.number, True, request.function(instance, *request.args))
        except Exception as error:
            answer = (request.number, False, error)
        ray_internals.store(self._process.key(ANSWERS), _answer_packed(answer))

    def is_over(self) -> bool:
        """Whether the group has taken the answers away, and wants no more."""
        return ray_internals.stored(self._process.key(ANSWERS)) is None

    def close(self) -> None:
        """Leave nothing in the store."""
        for kind in (REQUESTS, ANSWERS):
            ray_internals.store(self._process.key(kind), None)


def _answer_packed(answer: tuple[str, bool, Any]) -> bytes:
    try:
        return packed(answer)
    except Exception as error:
        return packed((answer[0], False, RayTorchRpcError(f"{answer[2]!r} cannot be pickled: {error}")))


def answer_of(process: Process) -> tuple[str, bool, Any] | None:
    """The last answer of a process: the number of the request, whether it came to a result, and that or the error.
    None before it has looked for any.
    """
    text = ray_internals.stored(process.key(ANSWERS))
    return None if text is None else pickle.loads(text)
