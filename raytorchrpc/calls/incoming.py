"""Incoming requests: what a member does with each, from a lane's thread to the job or the reply."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls import gates, protocol
from raytorchrpc.calls.exposed import Exposed
from raytorchrpc.calls.gates import Work
from raytorchrpc.calls.job import Callee, Job
from raytorchrpc.calls.out_of_band import PendingTensors
from raytorchrpc.calls.payload import PayloadStep
from raytorchrpc.calls.peer_table import PeerTable
from raytorchrpc.calls.protocol import ControlHeader, RequestHeader
from raytorchrpc.calls.replies import Replies
from raytorchrpc.calls.services import builtin_services
from raytorchrpc.calls.spans import Tracer
from raytorchrpc.errors import LaneUnavailable, NotAMember, PeerLost
from raytorchrpc.lanes.base import Message, MessageLane, Reply
from raytorchrpc.process.workers import Workers
from raytorchrpc.tensors.codec import NOTHING, Codec

_ALIVE = Message((protocol.OK,), NOTHING)


class IncomingCalls:
    """Serves one member's requests. Thread-safe; never blocks a lane's thread."""

    tracer: Tracer | None = None
    """While the group is traced."""

    def __init__(
        self,
        name: str,
        token: str,
        instance: Any,
        methods: Mapping[str, Exposed],
        local: Any,
        peers: PeerTable,
        payloads: PayloadStep,
        codec: Codec,
        replies: Replies,
        workers: Workers,
    ) -> None:
        """``token``: of this process (``peers.process_token``). ``local``: what services get instead of the actor."""
        self.name, self.token, self.instance, self.methods = name, token, instance, methods
        self._peers, self._payloads, self._codec, self.replies = peers, payloads, codec, replies
        is_async = instance is not None and ray_internals.actor_is_async()
        self.callee = Callee(name, instance, local, is_async, codec, payloads, replies, workers, set())

    def serve(self, lane: MessageLane, message: Message, reply: Reply) -> Work | None:
        """Take a request; returns the work that it needs a thread for, if any.

        A reply is work too: its receiver may have stopped reading.
        """
        kind, caller, token = message.header[:3]
        try:
            # Before anything else: a request that is refused has to discard its out-of-band tensors.
            pending = self._pending(caller, message) if message.manifests else []
            if message.unread_bytes:
                raise MemoryError(
                    f"{self.name} has no memory for a request of {message.unread_bytes} bytes; it did not run there"
                )
            if token != self.token:
                raise PeerLost(self.name, "it belongs to another generation of the group", may_have_run=False)
            if caller in self._peers.removed:
                raise NotAMember(f"the caller was removed from the group of {self.name!r}")
            if kind in (protocol.CALL, protocol.REMOTE):
                header = RequestHeader._make(message.header)
                exposed = self._exposed(header.method)
                route = self._peers.route_back(caller)
                return self._dispatch(
                    Job(self.callee, lane, route, exposed, header, message, pending, reply, self.tracer)
                )
            return self._control(ControlHeader(*message.header), message, reply)
        except Exception as error:
            # Encoded here: the error itself leads to this frame, and by it to the tensors of the request.
            refusal = self.replies.refusal(kind, error)
            return partial(self.replies.send, reply, lambda: refusal)

    def _control(self, header: ControlHeader, message: Message, reply: Reply) -> Work | None:
        if header.kind == protocol.PING:
            return partial(self.replies.send, reply, lambda: _ALIVE)
        if header.kind == protocol.FETCH:
            kept = self.replies.take(header.number)
            kept.make_current()
            return partial(self.replies.send, reply, lambda: kept)
        return partial(self._ask, message, reply) if header.kind == protocol.ASK else None

    def _pending(self, caller: int, message: Message) -> list[PendingTensors]:
        try:
            return self._payloads.receive(self._peers.route_back(caller), message)
        except LaneUnavailable as error:
            raise PeerLost(self.name, "it has left the group", may_have_run=False) from error

    def _ask(self, message: Message, reply: Reply) -> None:
        try:
            function, arguments = self._codec.decode(*message.body)
            answer = Message((protocol.OK,), self._codec.encode(function(*arguments)))
        except Exception as error:
            answer = self.replies.refusal(protocol.ASK, error)
        self.replies.send(reply, lambda: answer)

    def _exposed(self, name: str) -> Exposed:
        exposed = self.methods.get(name) or builtin_services.get(name)
        if exposed is not None:
            return exposed
        if self.instance is None:
            raise NotAMember(f"{self.name!r} is a driver: it exposes no methods")
        offered = ", ".join(sorted(self.methods)) or "none"
        cls = type(self.instance).__name__
        if callable(getattr(type(self.instance), name, None)):
            raise NotAMember(
                f"{cls}.{name} is not exposed: decorate it with @raytorchrpc.method, or call {name}.remote() "
                f"(exposed: {offered})"
            )
        raise NotAMember(f"{cls} has no method {name!r} (exposed: {offered})")

    def _dispatch(self, job: Job) -> Work | None:
        if job.exposed.concurrent:
            return job.admit(None)
        gate = gates.gate_of(self.instance, job.exposed.concurrency_group)
        if gate is None:
            raise NotAMember(f"the actor of member {self.name!r} is gone from its process")
        admission = gate.held(job.scope.path) if job.scope.path else None
        if admission is None:
            return gate.request(job)
        if admission.owner is not None:
            return None if gate.post(admission, job) else gate.request(job)
        job.run_inside(admission)
        return None
