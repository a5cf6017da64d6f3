"""A restarted actor's process listens for its group: the supervisor connects, and has it join.

On threads of its own, without an actor task: Ray could not start one while it runs an interrupted method again that
waits for the group. Ray's key-value store holds only what it takes to find each other, and a secret for these
connections; the group's own secret comes over them.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import ray
from ray import cloudpickle

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls import protocol, rejoin
from raytorchrpc.calls.rejoin import Owner, Rejoin
from raytorchrpc.calls.server.served_call import Replies
from raytorchrpc.config import GroupConfig
from raytorchrpc.lanes.base import Message, MessageLane, Reply
from raytorchrpc.lanes.common.connections import SocketAddress
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.membership.here import endpoint, listening_address
from raytorchrpc.tensors.codec import NOTHING, Codec
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
    pid: int
    node_id: str
    """With ``pid``, the supervisor's process: if ``owner`` is an actor, it may be restarted too."""
    supervisor: Endpoint
    door: SocketAddress | None = None
    """Where the supervisor takes requests of processes that join by themselves; None: it takes none."""

    def lasts(self) -> bool:
        """Whether the supervisor's process is alive, as far as Ray reports."""
        if self.owner.actor is None:
            return self.owner.job not in ray_internals.dead_jobs()
        there = ray_internals.actor_state(self.owner.actor)
        return there.state != "DEAD" and (there.pid, there.node_id) == (self.pid, self.node_id)


def post_record(generation: str, record: Record | None) -> None:
    """Post a group's record, or remove it (None)."""
    text = None if record is None else cloudpickle.dumps(tuple(record))  # type: ignore[no-untyped-call]
    ray_internals.store(_GROUPS + generation, text)


def record_of(generation: str) -> Record | None:
    """The record of one group."""
    text = ray_internals.stored(_GROUPS + generation)
    return None if text is None else Record(*pickle.loads(text))


def records() -> dict[str, Record]:
    """The records of the cluster's groups, by generation. Some groups may have ended."""
    found = {}
    for key in ray_internals.stored_keys(_GROUPS):
        generation = key.removeprefix(_GROUPS)
        with suppress(Exception):  # another release may post something else
            if (record := record_of(generation)) is not None:
                found[generation] = record
    return found


def find_record(actor_id: str) -> Record | None:
    """The record of the group that this actor may rejoin, if there is one."""
    return next((record for record in records().values() if actor_id in record.actors and record.lasts()), None)


class Process(NamedTuple):
    """One process of an actor."""

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
        return f"{_ADDRESSES}{self.actor_id}/{self.pid}@{self.node_id}"


def begin(instance: Any = None) -> None:
    """If this process holds an actor that Ray has restarted, let its group reach it. Idempotent, quick.

    Runs when the package is imported, which a class with methods for direct calls does before the actor's ``__init__``;
    and through Ray (with the instance), if the process does not listen.
    """
    rejoin.begin(_serve_group)


def finish(instance: Any) -> None:
    """Requested by the group, when it needs to reach this process by other ways only."""
    rejoin.finish()


def _serve_group(this: Rejoin) -> None:
    record = find_record(this.actor_id)
    if record is None or this.local is not None:  # it has joined by another way just now
        return
    this.expect(record.credentials.group, record.config.rpc_timeout_s)
    process = Process(this.actor_id, os.getpid(), ray.get_runtime_context().get_node_id())
    lane = lane_for(record, "restarted")
    requests = Requests(ray_internals.actor_instance, "a restarted actor")
    try:
        process.post(lane.open(requests.serve, lambda work: work()))
        _wait(this, record.credentials.generation)
    finally:
        process.post(None)
        lane.close()


def lane_for(record: Record, name: str) -> MessageLane:
    """A lane by which the supervisor reaches this process before it is a member, and which reaches the supervisor."""
    here, config = endpoint(name), record.config
    host = listening_address(here, config) if is_far(record) else None
    setup = LaneSetup(record.credentials.group, record.credentials, config, lambda: here, tcp_host=host)
    return setup.control_lane(name)


def is_far(record: Record) -> bool:
    """Whether the supervisor and this process need TCP to reach each other."""
    return record.config.always_tcp or not endpoint("").same_network(record.supervisor)


def _wait(this: Rejoin, generation: str) -> None:
    """Block until the group has this process back and needs it here no more, or it will not return."""
    until = None
    while not this.finished:
        local = this.local
        if local is None:
            record, until = find_record(this.actor_id), None
            if record is None or record.credentials.generation != generation:
                return
        elif local.generation != generation:  # another group took it in through Ray
            return
        else:
            until = until or time.monotonic() + _CLOSE_S
            if time.monotonic() > until:
                return
        this.news.wait(_CHECK_S)
        this.news.clear()


class Requests:
    """Serves the requests of the other end of such a lane: it runs functions."""

    def __init__(
        self,
        first: Callable[[], Any],
        name: str,
        run: Callable[..., Any] = lambda first, function, *arguments: function(first, *arguments),
    ) -> None:
        """``first``: returns their first argument. ``name``: of this process, for messages. ``run``: what to do instead
        of calling the function.
        """
        self._first, self._run = first, run
        self._codec = Codec(ray_internals.cloudpickler())
        self._replies = Replies(name, self._codec, None)

    def serve(self, message: Message, reply: Reply) -> Any:
        """See ``lanes.base.Serve``."""
        return partial(self._replies.send, reply, partial(self._answer, message))

    def _answer(self, message: Message) -> Message:
        try:
            if message.header[0] == protocol.PING:
                return Message((protocol.OK,), NOTHING)
            function, arguments = self._codec.decode(*message.body)
            result = self._run(self._first(), function, *arguments)
            return Message((protocol.OK,), self._codec.encode(result))
        except Exception as error:
            return self._replies.refusal(protocol.ASK, error)
