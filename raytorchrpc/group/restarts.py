"""How the supervisor reaches actors that Ray has restarted; see ``group.restarted`` for their side."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError, RayTaskError

from raytorchrpc._compat import ray_internals
from raytorchrpc.errors import BootstrapError, RayTorchRpcError
from raytorchrpc.group import restarted
from raytorchrpc.group.control_connections import Arguments, ControlConnections
from raytorchrpc.group.core import Fate
from raytorchrpc.group.here import listening_address
from raytorchrpc.group.messages import JoinedProcess, JoinRequest, LeaveRequest
from raytorchrpc.group.restarted import Process, Record, post_record
from raytorchrpc.group.roster import MemberRecord, Roster, is_actor
from raytorchrpc.lanes.common.acceptor import SocketAddress
from raytorchrpc.lanes.common.protection import make_identity
from raytorchrpc.process.fan_out import Answers

logger = logging.getLogger(__name__)

#: A restarted process that was asked to listen and does not, for instance because it could start no thread, is asked
#: again after so long (seconds).
_ASK_AGAIN_S = 2.0
#: To connect to a restarted process, and for it to answer (seconds). It may be suspended, or slow.
_ANSWER_S = 10.0
#: Once one of several processes has answered, how long the next may take (seconds). The others are admitted without it.
_GAP_S = 1.0


def _key_of(handle: Any) -> str:
    """Of the process of a member, or of one that is to be."""
    return handle.key if isinstance(handle, JoinedProcess) else ray_internals.actor_id_of(handle)


class _Restarted:
    """One process of a restarted actor."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.answers = self.is_dialled = False
        self.ask_at = 0.0
        """When it is asked to listen, unless it does by then (``time.monotonic``)."""


class RestartedActors:
    """Used by the supervisor's thread, and by whoever ends the group."""

    def __init__(self, roster: Roster, take_in: Callable[[JoinRequest | LeaveRequest], Any]) -> None:
        """``take_in``: carries out the request of a process that joins by itself; may block."""
        tls = make_identity(roster.name) if roster.tls else None
        self._credentials = replace(roster.credentials, secret=secrets.token_bytes(32), tls=tls)
        self._connections = ControlConnections(self._credentials, run=take_in)
        """To restarted processes and those that join by themselves, by their keys."""
        self._known: dict[str, _Restarted] = {}

    def post(self, roster: Roster) -> None:
        """Post which actors the group readmits. Failures are only logged."""
        actors = tuple(ray_internals.actor_id_of(handle) for handle in roster.handles.values() if is_actor(handle))
        self._post(
            Record(self._credentials, roster.config, actors, roster.owner, roster.watcher, self._address(roster))
        )

    def _address(self, roster: Roster) -> SocketAddress | None:
        """Where processes ask to join: over TCP too if a member is on another host."""
        if roster.config.joinable_by == "nobody":
            return None
        if roster.config.joinable_by == "cluster" or any(map(roster.reached_by_tcp, roster.records)):
            self._connections.listen(listening_address(roster.watcher, roster.config))
        return self._connections.address

    def _post(self, record: Record | None) -> None:
        try:
            post_record(self._credentials.generation, record)
        except Exception as error:
            logger.warning("group %r: restarted actors cannot find the group: %s", self._credentials.group, error)

    def end(self, session_lasts: bool) -> None:
        """Remove the record, and end all waits for answers. Can be repeated."""
        if session_lasts:
            self._post(None)
            for actor in list(self._known.values()):
                actor.process.post(None)
        self._connections.close()

    def fate(self, record: MemberRecord, ended: bool) -> tuple[Fate, str]:
        """What Ray says of a lost member's actor, with the cause of a death. ``ended``: see core.AskRay."""
        if record.handle is None:  # this process
            return Fate.SAME, ""
        if isinstance(record.handle, JoinedProcess):
            return Fate.UNKNOWN, ""
        actor, fate = ray_internals.actor_state(ray_internals.actor_id_of(record.handle)), Fate.ENDED
        if actor.state == "DEAD":
            fate = Fate.DEAD
        elif actor.state == "ALIVE" and (actor.pid, actor.node_id) == (record.probe.pid, record.probe.node_id):
            fate = Fate.SAME
        elif actor.state == "ALIVE" and ended and self.is_listening(record.handle, actor):
            fate = Fate.RESTARTED
        return fate, actor.cause

    def is_listening(self, handle: Any, there: ray_internals.ActorState) -> bool:
        """Whether the actor's current process has answered a request since the last attempt to readmit it.

        It is asked to listen, through Ray, in case that it has not imported this package. It may be suspended, or run a
        method that holds the interpreter lock, and the supervisor would wait for it.
        """
        process = Process(self._credentials.generation, ray_internals.actor_id_of(handle), there.pid, there.node_id)
        actor = self._known.get(process.actor_id)
        if actor is None or actor.process != process:
            if actor is not None:
                actor.process.post(None)
            actor = self._known[process.actor_id] = _Restarted(process)
        if actor.answers:
            actor.answers = False
            return True
        if actor.is_dialled:
            return False
        if (address := process.address()) is not None:
            self._dial(actor, address)
        elif time.monotonic() >= actor.ask_at:
            self._ask(handle, actor)
        return False

    def find(self, key: str, address: SocketAddress) -> ControlConnections:
        """Note where a process listens: by TCP only for a supervisor that needs it."""
        self._connections.set_address(key, "", address, by_tcp=address.tcp is not None)
        return self._connections

    def forget(self, key: str) -> None:
        """This process need not be reached here any more."""
        self._connections.forget([key])

    def _dial(self, actor: _Restarted, address: SocketAddress) -> None:
        actor_id = actor.process.actor_id
        connections = self.find(actor_id, address)

        def dial() -> None:
            try:
                connections.ping(actor_id, _ANSWER_S)
                actor.answers = True
            except RayTorchRpcError as error:
                logger.debug("%s: %s", actor.process, error)
            finally:
                actor.is_dialled = False

        actor.is_dialled = True
        connections.dial([dial])

    def _ask(self, handle: Any, actor: _Restarted) -> None:
        actor.ask_at = math.inf

        def asked(answer: Any) -> None:
            error = answer.exception()
            # At once if Ray has lost the request, for instance because it still took the actor for one that restarts.
            lost = error is not None and not isinstance(error, RayTaskError)
            actor.ask_at = time.monotonic() + (0.0 if lost else _ASK_AGAIN_S)

        try:
            ray_internals.call_actor(handle, restarted.begin).future().add_done_callback(asked)
        except RayError as error:  # its queue is full
            logger.debug("%s: %s", actor.process, error)
            actor.ask_at = 0.0

    def admitted(self, handles: Mapping[str, Any]) -> None:
        """These are members now: their processes need not be reached here any more."""
        for key in map(_key_of, handles.values()):
            if self._known.pop(key, None) is not None:
                self._connections.send(key, restarted.finish, self._credentials.generation)
            self.forget(key)

    def call_all(
        self, handles: Mapping[str, Any], function: Callable[..., Any], arguments: Arguments, deadline: float, **_: Any
    ) -> Answers:
        """As ``ray_calls.call_all``, for processes that listen: works while they run a method.

        No answer in time is a BootstrapError: to ask Ray why would take longer than the next attempt.
        """
        names = {_key_of(handles[name]): name for name in arguments}
        asked = {key: arguments[name] for key, name in names.items()}
        results, failures = self._connections.call_all(function, asked, deadline, gap_s=_GAP_S)
        silent = BootstrapError("no answer in time: it is suspended, or a method holds the interpreter lock")
        return (
            {names[key]: value for key, value in results.items()},
            {names[key]: silent if isinstance(error, TimeoutError) else error for key, error in failures.items()},
        )
