"""A process joins a group by itself, with a ticket; see ``tickets``.

It listens, and tells the supervisor where, which then has it join as it does with a restarted actor.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from typing import Any

import ray

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls import protocol, rejoin
from raytorchrpc.calls.member import current_local
from raytorchrpc.calls.server import gates
from raytorchrpc.errors import BootstrapError, NotAMember, RayTorchRpcError
from raytorchrpc.lanes.base import Message, MessageLane, PeerAddress
from raytorchrpc.membership import join, tickets
from raytorchrpc.membership.here import endpoint
from raytorchrpc.membership.messages import JoinRequest, LeaveRequest
from raytorchrpc.membership.restarted import Record, Requests, lane_for
from raytorchrpc.membership.tickets import Ticket
from raytorchrpc.tensors.codec import Codec
from raytorchrpc.tensors.exceptions import decode_exception

logger = logging.getLogger(__name__)

#: The supervisor, as a peer of the lane by which a process asks to join.
_SUPERVISOR = "supervisor"
#: For the supervisor to answer beyond the time that joining may take, and when a process leaves (seconds).
_GRACE_S = 5.0


# --- it joins, and leaves --------------------------------------------------------------------------------------------


def enter(group: str | None, name: str | None, instance: Any, timeout_s: float) -> None:
    """Make this process a member. Blocks; raises NotAMember, ConfigurationError, BootstrapError."""
    deadline = time.monotonic() + timeout_s
    actor_id = ray.get_runtime_context().get_actor_id() if ray.is_initialized() else None
    if actor_id is not None and rejoin.runs_init(actor_id):
        raise NotAMember("an actor can join a group only when its __init__ has ended")
    ticket = tickets.find_ticket(group, deadline)
    record = ticket.record
    if record.door is None:
        raise NotAMember(f"group {record.credentials.group!r} takes no process in: GroupConfig(joinable_by='nobody')")
    tickets.use(ticket)
    here = ray_internals.actor_instance() if instance is None else instance
    gates.serve(here)
    lane = lane_for(record, "joining")
    try:
        address = lane.open(Requests(lambda: here, "a process that joins").serve, lambda work: work())
        request = JoinRequest(
            name or _default_name(ticket, actor_id),
            address,
            os.getpid(),
            ticket.place.node_id,
            ticket.consent,
            None if actor_id is None else ray.get_runtime_context().current_actor,
            max(1.0, deadline - time.monotonic()),
        )
        _ask(lane, record, request, deadline)
        local = current_local()
        if local is None or local.generation != record.credentials.generation:
            raise BootstrapError(f"group {record.credentials.group!r} has ended while this process joined it")
    except BaseException:
        tickets.use(None)
        join.leave(None, record.credentials.generation)
        raise
    finally:
        lane.close()


def has_joined(generation: str) -> bool:
    """Whether this process has joined that group by itself."""
    ticket = tickets.own()
    return ticket is not None and ticket.record.credentials.generation == generation


def leave() -> None:
    """Leave the group that this process has joined by itself. Blocks until the group knows.

    Does nothing if it is in the group no more. Raises NotAMember in a process that did not join by itself.
    """
    local, ticket = current_local(), tickets.own()
    if ticket is None:
        raise NotAMember("only a process that has joined a group by raytorchrpc.join() leaves it by itself")
    if local is None or not has_joined(local.generation):
        return
    lane = lane_for(ticket.record, "leaving")
    try:
        lane.open(lambda message, reply: None, lambda work: work())
        request = LeaveRequest(local.me.name, local.me.incarnation, ticket.consent)
        _ask(lane, ticket.record, request, time.monotonic() + _GRACE_S)
    except RayTorchRpcError as error:
        logger.info("the group of %s is not told that it leaves: %s", local.me.name, error)
    finally:
        lane.close()
        tickets.use(None)
        join.leave(None, local.generation)


def _ask(lane: MessageLane, record: Record, request: JoinRequest | LeaveRequest, deadline: float) -> Any:
    """Have the supervisor carry out a request; returns or raises what comes of it."""
    assert record.door is not None
    codec = Codec(ray_internals.cloudpickler())
    group = record.credentials.group
    far = frozenset({_SUPERVISOR}) if record.door.tcp is not None and _is_far(record) else frozenset[str]()
    lane.reach(None, far)
    lane.connect([PeerAddress(_SUPERVISOR, record.door)])
    patience_s = max(1.0, deadline - time.monotonic()) + _GRACE_S
    pending = lane.call(_SUPERVISOR, Message((protocol.ASK, -1, ""), codec.encode((request, ()), own=True)), patience_s)
    if not pending.wait(patience_s):
        raise BootstrapError(f"the process that supervises group {group!r} does not answer")
    message = pending.take()
    if message.header[0] != protocol.OK:
        raised = decode_exception(codec, message.body, _SUPERVISOR)
        raise raised if isinstance(raised, Exception) else BootstrapError(str(raised))
    return codec.decode(*message.body)


def _is_far(record: Record) -> bool:
    return record.config.always_tcp or not endpoint("joining").same_network(record.supervisor)


def _default_name(ticket: Ticket, actor_id: str | None) -> str:
    above = ticket.parent or re.sub(r"[^A-Za-z0-9_.:-]", "-", socket.gethostname()) or "process"
    return f"{above[:48]}.{os.getpid()}" if actor_id is None else f"actor-{actor_id[:12]}"
