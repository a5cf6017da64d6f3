"""Connections between a group's supervisor and processes that are members, or are to become some.

They report the end of a process, and carry requests that busy methods do not hold up.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls import protocol
from raytorchrpc.calls.server.served_call import Replies
from raytorchrpc.errors import PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.lanes.base import Message, PeerAddress, Pending, Reply
from raytorchrpc.lanes.common.acceptor import SocketAddress
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.lanes.socket.lane import SocketLane
from raytorchrpc.process import threads
from raytorchrpc.process.fan_out import Answers, Outcome, ask_all, failed
from raytorchrpc.tensors.codec import NOTHING, Codec, Encoded
from raytorchrpc.tensors.exceptions import decode_exception

#: The arguments of a call to several members, by name.
Arguments = Mapping[str, tuple[Any, ...]]
#: Is called with the name of a member and what came of its request.
Answered = Callable[[str, Outcome], object]

#: The supervisor's name, for those that connect to it.
SUPERVISOR = "supervisor"
_NO_RANK = -1
"""The supervisor is not a member."""
#: To connect and authenticate (seconds).
_CONNECT_S = 2.0
#: To send to a member that does not read (seconds).
_SEND_S = 0.05
#: How many connections are made at a time.
_AT_A_TIME = 8


class ControlConnections:
    """One end of them. Thread-safe. Members answer on threads of their own, so no busy method holds a request up."""

    def __init__(
        self,
        credentials: Credentials,
        name: str = SUPERVISOR,
        run: Callable[..., Any] | None = None,
        tcp_host: str | None = None,
    ) -> None:
        """``name``: of this process. ``run(function, *arguments)``: carries out what the other end requests with
        ``call_all``; by default that is dropped. ``tcp_host``: listen there, too.
        """
        self._codec, self._run = Codec(ray_internals.cloudpickler()), run
        self._replies = Replies(name, self._codec)
        self._by_tcp = set[str]()  # the lane looks it up: replacing it for each of n members would cost n^2
        self._lane = SocketLane(name, credentials, tcp_host=tcp_host, by_tcp=self._by_tcp)
        self.address: SocketAddress = self._lane.open(self._serve, lambda work: work())
        self._tokens: dict[str, str] = {}
        self._watches: dict[str, Pending] = {}

    def _serve(self, message: Message, reply: Reply) -> Callable[[], None] | None:
        if self._run is None:
            return None
        if message.header[0] == protocol.PING:
            return partial(self._replies.send, reply, lambda: Message((protocol.OK,), NOTHING))
        return partial(self._replies.send, reply, partial(self._replies.run, self._run, message))

    def listen(self, tcp_host: str) -> None:
        """Also listen on that address of this host."""
        self.address = self._lane.reach(tcp_host, self._by_tcp) or self.address

    def set_address(self, name: str, token: str, address: SocketAddress, by_tcp: bool) -> None:
        """Set where a member's current process listens. Connects at the first request. ``by_tcp``: see LaneSetup."""
        self._lane.disconnect(name)
        self._tokens[name] = token
        (self._by_tcp.add if by_tcp else self._by_tcp.discard)(name)
        self._lane.connect([PeerAddress(name, address)])

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._watches.pop(name, None)
            self._tokens.pop(name, None)
            self._by_tcp.discard(name)
            self._lane.disconnect(name)

    def ping(self, name: str, patience_s: float) -> None:
        """Block until the process answers. Raises RayTorchRpcError if it does not within ``patience_s``."""
        ping = self._send(protocol.PING, name, patience_s)
        if not ping.wait(patience_s):
            raise RpcTimeout(f"{name!r} does not answer")
        if ping.take().header[0] != protocol.OK:
            raise PeerLost(name, "another process listens at its address", may_have_run=False)

    def is_over(self, name: str, patience_s: float) -> bool:
        """Whether nothing listens any more where this process did. Blocks."""
        for _ in range(2):  # the first may only find that the connection has ended
            try:
                self.ping(name, patience_s)
            except RayTorchRpcError as error:
                if isinstance(error.__cause__, ConnectionRefusedError):
                    return True
        return False

    def send(self, name: str, function: Callable[..., Any], *arguments: Any) -> None:
        """Have a process run a function, as ``call_all`` does. Waits for no answer, and does not raise."""
        with suppress(RayTorchRpcError):
            self._send(protocol.ASK, name, _CONNECT_S, self._codec.encode((function, arguments), own=True))

    def watch(self, name: str, patience_s: float) -> Callable[[Callable[[str], None]], None]:
        """Connect to the member's process; returns what is called with ``ended``, which is then called with a cause, on
        a thread of the lane's, when that process has ended.

        Blocks until the member has answered once, at most ``patience_s``. Raises RayTorchRpcError if it does not: a
        PeerLost whose ``__cause__`` is an OSError if the connection was refused.
        """
        token = self._tokens.get(name)
        self.ping(name, patience_s)
        pending = self._send(protocol.WATCH, name, _CONNECT_S)
        if self._tokens.get(name) != token:
            raise PeerLost(name, "another process has replaced it meanwhile", may_have_run=False)
        self._watches[name] = pending

        def over(ended: Callable[[str], None]) -> None:
            if self._watches.get(name) is pending:
                del self._watches[name]
                try:
                    pending.take()
                except RayTorchRpcError as error:
                    ended(getattr(error, "cause", None) or str(error))

        return lambda ended: pending.add_done_callback(partial(over, ended))

    def dial(self, work: Iterable[Callable[[], None]]) -> list[threading.Thread]:
        """Run what connects to processes, on threads that may block: several at a time. Raises ThreadShortage."""
        waiting = deque(work)

        def run() -> None:
            while True:
                try:
                    connect = waiting.popleft()
                except IndexError:
                    return
                connect()

        return [threads.start(run, name="raytorchrpc-dial") for _ in range(min(len(waiting), _AT_A_TIME))]

    def ask(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], names: Iterable[str], done: Answered
    ) -> None:
        """Have each of these run ``function(local, *arguments)``, as ``call_all`` does; they get the very same bytes.

        Does not block. ``done(name, outcome)`` is called once for each, on this or another thread, perhaps never for a
        member that stands still.
        """
        body = self._codec.encode((function, arguments), own=True)
        for name in names:
            try:
                self._ask(name, body, _SEND_S, partial(done, name))
            except RayTorchRpcError as error:
                done(name, failed(error))

    def call_all(self, function: Any, arguments: Arguments, deadline: float, *, gap_s: float = math.inf) -> Answers:
        """Run ``function(local, *arguments[name])``, of this package, in each member; ``local``: its LocalMember. Other
        processes do with both what they were made to ``run``.

        See ``ask_all``.
        """

        def begin(name: str, answered: Callable[[Outcome], object]) -> None:
            body = self._codec.encode((function, arguments[name]), own=True)
            self._ask(name, body, deadline - time.monotonic(), answered)

        return ask_all(arguments, begin, deadline, gap_s=gap_s)

    def _ask(self, name: str, body: Encoded, timeout_s: float, answered: Callable[[Outcome], object]) -> None:
        pending = self._send(protocol.ASK, name, timeout_s, body)
        pending.add_done_callback(partial(answered, partial(self._outcome, pending, name)))

    def _outcome(self, pending: Pending, name: str) -> Any:
        message = pending.take()
        if message.header[0] == protocol.OK:
            return self._codec.decode(*message.body)
        raised = decode_exception(self._codec, message.body, name)
        raise raised if isinstance(raised, Exception) else RayTorchRpcError(str(raised))

    def _send(self, kind: int, name: str, timeout_s: float, body: Encoded = NOTHING) -> Pending:
        token = self._tokens.get(name)
        if token is None:
            raise PeerLost(name, "it is not in the group (any more)", may_have_run=False)
        self._lane.count_silence(name)  # it may be on the host of one whose loss is announced to it
        return self._lane.call(name, Message((kind, _NO_RANK, token), body), max(0.001, timeout_s))

    def close(self) -> None:
        """Idempotent, never raises."""
        self._watches.clear()
        self._lane.close()
