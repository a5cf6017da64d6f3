"""A restarted actor's process listens for its groups: each one's supervisor connects, and has it join.

On threads of its own, without an actor task: Ray could not start one while it runs an interrupted method again that
waits for the group. Ray's key-value store holds only what it takes to find each other, and a secret for these
connections; the group's own secret comes over them.
"""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray import cloudpickle

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls import rejoin
from raytorchrpc.calls.rejoin import Owner, Rejoin
from raytorchrpc.config import GroupConfig
from raytorchrpc.group.control_connections import SUPERVISOR, ControlConnections
from raytorchrpc.group.here import endpoint, listening_address
from raytorchrpc.lanes.common.acceptor import SocketAddress
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.topology.endpoint import Endpoint

_GROUPS, _ADDRESSES = "groups/", "restarted/"
#: How often the process checks that the group still exists (seconds).
_CHECK_S = 1.0
#: After it has joined, a process waits this long for the group to need it no more (seconds).
_CLOSE_S = 60.0


class Record(NamedTuple):
    """What a group posts about itself, for actors that may rejoin it."""

    credentials: Credentials
    """For connections to restarted processes: not the group's."""
    config: GroupConfig
    actors: tuple[str, ...]
    """Hex ids of those that may rejoin."""
    owner: Owner
    supervisor: Endpoint
    door: SocketAddress | None = None
    """Where the supervisor takes requests of processes that join by themselves; None: it takes none."""


def lasts(owner: Owner) -> bool:
    """Whether the process that formed a group is alive, as far as Ray reports."""
    if owner.worker is not None:
        return ray_internals.worker_lives(owner.worker, owner.node_id)
    if owner.actor is None:
        return owner.job not in ray_internals.dead_jobs()
    there = ray_internals.actor_state(owner.actor)
    return there.state != "DEAD" and (there.pid, there.node_id) == (owner.pid, owner.node_id)


def post_record(generation: str, record: Record | None) -> None:
    """Post a group's record, or remove it (None)."""
    text = None if record is None else cloudpickle.dumps(tuple(record))  # type: ignore[no-untyped-call]
    ray_internals.store(_GROUPS + generation, text)


def record_of(generation: str) -> Record | None:
    text = ray_internals.stored(_GROUPS + generation)
    return None if text is None else Record(*pickle.loads(text))


def records() -> dict[str, Record]:
    """The records of the cluster's groups, by generation. Some groups may have ended."""
    by_generation = {}
    for key in ray_internals.stored_keys(_GROUPS):
        generation = key.removeprefix(_GROUPS)
        with suppress(Exception):  # another release may post something else
            if (record := record_of(generation)) is not None:
                by_generation[generation] = record
    return by_generation


def records_of(actor_id: str) -> dict[str, Record]:
    """The records of the groups that this actor may rejoin, by generation."""
    listed = records().items()
    return {each: record for each, record in listed if actor_id in record.actors and lasts(record.owner)}


class Process(NamedTuple):
    """One process of an actor, as it listens for one group."""

    generation: str
    actor_id: str
    pid: int
    node_id: str

    def post(self, address: SocketAddress | None) -> None:
        """Post where it listens; None: it does not any more."""
        ray_internals.store(self._key, None if address is None else pickle.dumps(address))

    def address(self) -> SocketAddress | None:
        """Where it listens, once it does."""
        text = ray_internals.stored(self._key)
        return None if text is None else pickle.loads(text)

    @property
    def _key(self) -> str:
        return f"{_ADDRESSES}{self.actor_id}/{self.pid}@{self.node_id}/{self.generation}"


def begin(instance: Any = None) -> None:
    """If this process holds an actor that Ray has restarted, let its group reach it. Idempotent, quick.

    Runs when the package is imported, which a class with methods for direct calls does before the actor's ``__init__``;
    and through Ray (with the instance), if the process does not listen.
    """
    rejoin.begin(_serve_groups)


def finish(instance: Any, generation: str) -> None:
    """Requested by the group, when it needs to reach this process by other ways only."""
    rejoin.finish(generation)


def _serve_groups(this: Rejoin) -> None:
    """Listen for each of the groups, until it has this process back and needs it here no more, or will not return."""
    pid, node_id, doors = os.getpid(), ray.get_runtime_context().get_node_id(), dict[str, _Door]()
    try:
        while True:
            known = records_of(this.actor_id) if this.pending or not this.groups else {}
            lasting = known.keys() | this.members.keys()
            names = {each: (one.credentials.group, one.config.rpc_timeout_s) for each, one in known.items()}
            this.expect({**{each: about for each, about in this.groups.items() if each in lasting}, **names})
            for generation, record in known.items():
                if generation not in doors.keys() | this.members.keys() | this.finished:
                    doors[generation] = _Door(Process(generation, this.actor_id, pid, node_id), record)
            for generation in [each for each, door in doors.items() if door.is_over(this, each in lasting)]:
                doors.pop(generation).close()
            if not doors:
                return
            this.news.wait(_CHECK_S)
            this.news.clear()
    finally:
        for door in doors.values():
            door.close()


class _Door:
    """Where this process listens for one group."""

    def __init__(self, process: Process, record: Record) -> None:
        self._process, self._until = process, math.inf
        self._connections = connections_for(record, "a restarted actor", ray_internals.actor_instance)
        self._process.post(self._connections.address)

    def is_over(self, this: Rejoin, lasts: bool) -> bool:
        """``lasts``: the group may still take the process back, or has done so."""
        generation, now = self._process.generation, time.monotonic()
        self._until = min(self._until, now + _CLOSE_S) if generation in this.members else math.inf
        return generation in this.finished or not lasts or now > self._until

    def close(self) -> None:
        """Idempotent."""
        self._process.post(None)
        self._connections.close()


def connections_for(record: Record, name: str, instance: Callable[[], Any] | None = None) -> ControlConnections:
    """Connections by which the supervisor reaches this process before it is a member, and which reach the supervisor.

    ``name``: of this process. ``instance``: returns the first argument of the functions that the supervisor has it run;
    None: it runs none.
    """
    here = endpoint(name)
    is_far = record.config.always_tcp or not here.same_network(record.supervisor)
    host = listening_address(here, record.config) if is_far else None
    run = None if instance is None else lambda function, *arguments: function(instance(), *arguments)
    connections = ControlConnections(record.credentials, name, run, host)
    if record.door is not None:
        connections.set_address(SUPERVISOR, "", record.door, is_far)
    return connections
