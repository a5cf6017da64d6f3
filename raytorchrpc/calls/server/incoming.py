"""Incoming requests: what a member does with each, from a lane's thread to the served call or the reply."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from raytorchrpc.calls import protocol
from raytorchrpc.calls.payload import PendingTensors
from raytorchrpc.calls.peers import PeerTable, is_client
from raytorchrpc.calls.protocol import ControlHeader
from raytorchrpc.calls.server.exposed import Exposed, gate_of, is_hidden
from raytorchrpc.calls.server.served_call import QUEUED, Callee, ServedCall
from raytorchrpc.calls.server.streams import ItemRequest, ServedStream
from raytorchrpc.errors import LaneUnavailable, NoSuchMethod, NotAMember, PeerLost, no_memory
from raytorchrpc.lanes.base import Message, MessageLane, Pending, Reply
from raytorchrpc.process.switch_interval import SwitchInterval
from raytorchrpc.process.workers import AtOnce
from raytorchrpc.tensors.codec import NOTHING

Work = Callable[[], None]

#: What serves a call, by ``Exposed.call``.
KINDS: Mapping[Any, Callable[..., ServedCall]] = {
    None: ServedCall,
    ServedStream: ServedStream,
    ItemRequest: ItemRequest,
}

_ALIVE = Message((protocol.OK,), NOTHING)


class IncomingCalls:
    """Serves one member's requests. Thread-safe; never blocks a lane's thread."""

    interval: SwitchInterval | None = None
    """To be short while calls come."""
    on_watch: Callable[[Pending], object] | None = None
    """Of a client: takes what fails when the connection ends by which the supervisor watches it."""

    def __init__(
        self,
        token: str,
        methods: Mapping[str, Exposed],
        services: Mapping[str, Exposed],
        callee: Callee,
        peers: PeerTable,
    ) -> None:
        """``token``: of this process; see ``peers.process_token``. ``methods``: of the actor, by name; ``services``:
        those of the package's own.
        """
        self.token, self.methods, self.services, self.callee, self._peers = token, methods, services, callee, peers
        self.kinds = KINDS
        """While the group is traced, those of ``traced``."""

    def serve(self, lane: MessageLane, message: Message, reply: Reply) -> Work | None:
        """Take a request; returns the work that it needs a thread for, if any.

        A reply is work too: its receiver may have stopped reading.
        """
        kind, caller, token = message.header[:3]
        name, replies = self.callee.name, self.callee.replies
        try:
            # Before anything else: a request that is refused has to discard its out-of-band tensors.
            pending = self._pending(caller, message) if message.manifests else []
            if message.unread_bytes:
                request = f"a request of {message.unread_bytes} bytes, which did not run"
                raise no_memory(name, request, MemoryError())
            if token != self.token:
                raise PeerLost(name, "it belongs to another generation of the group", may_have_run=False)
            if caller in self._peers.removed:
                raise NotAMember(f"the caller was removed from the group of {name!r}")
            if kind in (protocol.CALL, protocol.REMOTE):
                if self.interval is not None and not self.interval.used:
                    self.interval.shorten()
                method = message.header[3]
                exposed = self.methods.get(method) or self.services.get(method)
                if exposed is None:
                    raise NoSuchMethod(self._why_not(method))
                route = self._peers.by_rank.get(caller) or self._peers.route_back(caller)
                call = self.kinds[exposed.call](self.callee, lane, route, exposed, message, pending, reply)
                if call.number and not self.callee.cancellable.add(call):
                    return call.answer_cancelled
                if exposed.concurrent:
                    return call.run if call.admit(None) else None
                gate = gate_of(self.callee.instance, exposed.concurrency_group)
                if gate is None:
                    raise NotAMember(f"the actor of member {name!r} is gone from its process")
                if gate.request(call):
                    return call.run
                if call.phase is QUEUED:
                    gate.watch(call, self.callee.deadlines)
                return None
            return self._control(lane, ControlHeader(*message.header), message, reply)
        except Exception as error:
            # Encoded here: the error itself leads to this frame, and by it to the tensors of the request.
            return self._answer(reply, replies.refusal(kind, error))

    def _answer(self, reply: Reply, message: Message) -> Work:
        return AtOnce(self.callee.replies.send, reply, lambda: message).run

    def _control(self, lane: MessageLane, header: ControlHeader, message: Message, reply: Reply) -> Work | None:
        if header.kind == protocol.CANCEL:
            return partial(self._answer_cancelled, self.callee.cancellable.cancel(header.number), reply)
        if header.kind == protocol.CLOSE and (stream := self.callee.streams.get(header.number)) is not None:
            stream.close()
        if header.kind == protocol.ASK:
            replies = self.callee.replies
            return partial(replies.send, reply, partial(replies.run, self._run, message))
        if header.kind != protocol.WATCH:
            return self._answer(reply, _ALIVE)
        if self.on_watch is not None:
            self.on_watch(lane.watch(reply))
        elif is_client(header.caller):
            connection = lane.watch(reply)  # raises for one that has ended
            self._peers.add_connection(header.caller)
            ended = partial(self._peers.end_connection, header.caller)
            connection.add_done_callback(partial(self.callee.workers.submit, ended))
        return None

    def _answer_cancelled(self, call: ServedCall | None, reply: Reply) -> None:
        """Reply to a cancelled call, and to the cancellation."""
        if call is not None:
            call.answer_cancelled()
        self.callee.replies.send(reply, lambda: _ALIVE)

    def _pending(self, caller: int, message: Message) -> list[PendingTensors]:
        try:
            return self.callee.payloads.receive(self._peers.route_back(caller).member.name, message.manifests)
        except LaneUnavailable as error:
            raise PeerLost(self.callee.name, "it has left the group", may_have_run=False) from error

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.callee.local, *arguments)

    def _why_not(self, name: str) -> str:
        """Why this member does not serve a method of that name."""
        if self.callee.instance is None:
            return f"{self.callee.name!r} exposes no methods: it is a driver, or it joined without join(instance=...)"
        offered, cls = ", ".join(sorted(self.methods)) or "none", type(self.callee.instance)
        if isinstance(inspect.getattr_static(cls, name, None), (staticmethod, classmethod)):
            return (
                f"{cls.__name__}.{name} is a static or class method, which cannot be called directly: make it a method "
                f"of the actor (exposed: {offered})"
            )
        if callable(attribute := getattr(cls, name, None)):
            if is_hidden(attribute):
                return (
                    f"{cls.__name__}.{name} is not exposed: the decorator above @raytorchrpc.method hides it; put "
                    f"@raytorchrpc.method on top, or use functools.wraps in the decorator (exposed: {offered})"
                )
            return (
                f"{cls.__name__}.{name} is not exposed: decorate it with @raytorchrpc.method, or call {name}.remote() "
                f"(exposed: {offered})"
            )
        similar = difflib.get_close_matches(name, self.methods, 1)
        meant = f"; did you mean {similar[0]!r}?" if similar else ""
        return f"{cls.__name__} has no method {name!r} (exposed: {offered}){meant}"
