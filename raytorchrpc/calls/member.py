"""This process as a member: who it is, whom it knows, how a call leaves and how its answer is taken."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from raytorchrpc._compat import ray_internals, torch_internals
from raytorchrpc.calls import incoming
from raytorchrpc.calls.counters import CallCounters
from raytorchrpc.calls.event_loops import Token, token_on_loop
from raytorchrpc.calls.flow_control import CreditWindows
from raytorchrpc.calls.out_of_band import Payload, PayloadSplitter, PendingTensors, TensorManifest, snapshot
from raytorchrpc.calls.outgoing import CallUnderWay, body_bytes
from raytorchrpc.calls.peers import Member, PeerRoute, process_token
from raytorchrpc.calls.receive_into import Receiver, Spread, receiver
from raytorchrpc.calls.retry import RetriedCall
from raytorchrpc.calls.scope import current_scope
from raytorchrpc.calls.services import Services
from raytorchrpc.calls.spans import Tracer
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError, NotAMember, PeerLost, RpcTimeout, SerializationError
from raytorchrpc.lanes.base import Message, MessageLane, Pending, TensorLane
from raytorchrpc.process.deadlines import Deadlines
from raytorchrpc.process.deferred_cleanup import DeferredCleanup
from raytorchrpc.process.workers import Workers
from raytorchrpc.tensors import host_device_copy
from raytorchrpc.tensors.codec import NOTHING, Codec, Encoded
from raytorchrpc.tensors.cuda_streams import check_mapped
from raytorchrpc.tensors.devices import CPU, Device

logger = logging.getLogger(__name__)

#: The longest deadline of a call, as for ``GroupConfig.rpc_timeout_s``.
MAX_TIMEOUT_S = 86400

#: A peer that a call was lost to, and that nobody says is gone, is tried again after this (seconds).
_MISSED_AFTER_S = 2.0


class Absence(NamedTuple):
    """Why a peer cannot be called."""

    cause: str
    for_good: bool


class LocalMember:
    """This process's membership in one group. Thread-safe."""

    def __init__(
        self,
        group: str,
        generation: str,
        me: Member,
        config: GroupConfig,
        instance: Any,
        methods: Mapping[str, Any],
        max_bytes: int,
    ) -> None:
        """``methods``: name -> what ``calls.method`` noted. ``max_bytes``: under way to one peer at most.

        Raises ThreadShortage.
        """
        self.group, self.generation, self.me, self.config = group, generation, me, config
        self.max_bytes = max_bytes
        self.credit = CreditWindows(config, max_bytes)
        self.services = Services()
        self.codec = Codec(ray_internals.cloudpickler())
        self.counters = CallCounters()
        with contextlib.ExitStack() as undo:
            self.deadlines = Deadlines(f"raytorchrpc-{me.name}")
            undo.callback(self.deadlines.stop)
            self.cleanup = DeferredCleanup(f"raytorchrpc-{me.name}")
            undo.callback(self.cleanup.stop)
            self.workers = Workers(f"raytorchrpc-{me.name}", keep=True, deadlines=self.deadlines)
            undo.pop_all()
        self.splitter = PayloadSplitter({})
        self.tracer: Tracer | None = None
        """While the group is traced."""
        self.at_end: list[Callable[[], None]] = []
        """What ends with this membership; short, does not raise."""
        self.strangers: Set[int] = frozenset()
        token = process_token(generation, me.rank, me.incarnation)
        self.server = incoming.Server(me.name, token, instance, methods, self.codec, self.workers, self)
        self.lanes: list[MessageLane] = []
        self.tensor_lanes: dict[str, TensorLane] = {}
        self._routes: dict[int, PeerRoute] = {}
        self._ranks: dict[Any, int] = {}
        self._heavy: set[tuple[int, str]] = set()
        """Methods whose last result needed another lane than its call: they go there at once."""
        self._left = False
        self.step = 0
        """The last change of the group that has taken effect here."""
        self._absent: dict[int, Absence] = {}
        self._changed = threading.Condition()
        """Told when ``_absent`` or the routes change."""

    # --- peers ---------------------------------------------------------------------------------------------

    def know(self, route: PeerRoute) -> None:
        """Add a peer (or this member itself), or replace what was known of it."""
        peer = route.member
        with self._changed:
            self._routes[peer.rank] = route
            self._ranks[peer.name] = self._ranks[peer.rank] = peer.rank
            if peer.actor_id is not None:
                self._ranks[ray_internals.key_of_actor(peer.actor_id)] = peer.rank
            self._changed.notify_all()

    def miss(self, rank: int, absence: Absence) -> None:
        """A peer is away: calls to it fail at once, and those that can be repeated wait for it."""
        with self._changed:
            self._absent[rank] = absence
            self._heavy = {known for known in self._heavy if known[0] != rank}
            self._changed.notify_all()
        self.services.lose(rank, absence.for_good)

    def welcome(self, rank: int) -> None:
        """A peer can be called (again)."""
        with self._changed:
            self._absent.pop(rank, None)
            self._changed.notify_all()
        self.services.welcome(rank, self._routes[rank].token)

    def forget(self, rank: int) -> None:
        """A peer was removed: it is a member no longer, and nothing it asks is served."""
        with self._changed:
            self._routes.pop(rank, None)
            self._absent.pop(rank, None)
            self._ranks = {key: known for key, known in self._ranks.items() if known != rank}
            self.strangers = self.strangers | {rank}
            self._changed.notify_all()
        self.services.lose(rank, for_good=True)

    def absent(self) -> dict[str, Absence]:
        """Who is away, by name."""
        with self._changed:
            return {self._routes[rank].member.name: absence for rank, absence in self._absent.items()}

    def why_gone(self, route: PeerRoute) -> str | None:
        """See underway.Caller."""
        if self._left:
            return "this process has left the group"
        absence, now = self._absent.get(route.member.rank), self._routes.get(route.member.rank)
        if absence is not None:
            return absence.cause
        return None if now is not None and now.token == route.token else "its process was replaced, or removed"

    def await_everybody(self, until: float) -> bool:
        """Block until nobody is away; False at ``until``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._absent, max(0.0, until - time.monotonic()))

    def incarnation(self, target: Any) -> int:
        """See retrying.Returns."""
        return self.route(target).member.incarnation

    def await_return(self, target: Any, after: int, until: float) -> bool:
        """See retrying.Returns."""
        peer = self.route(target).member
        rank = peer.rank
        patience = time.monotonic() + _MISSED_AFTER_S
        with self._changed:
            while True:
                if self._left or rank not in self._routes:
                    raise PeerLost(peer.name, "it was removed from the group", may_have_run=False)
                absence, route = self._absent.get(rank), self._routes[rank]
                if absence is None and route.member.incarnation > after:
                    return True
                if absence is not None and absence.for_good:
                    raise PeerLost(route.member.name, absence.cause, may_have_run=False)
                now = time.monotonic()
                # Nobody says that it is gone: perhaps only the connection broke.
                if absence is None and now >= patience:
                    return True
                if now >= until:
                    return False
                self._changed.wait(min(until, patience) - now if absence is None else until - now)

    def trace(self, tracer: Tracer | None) -> None:
        """Record what calls do from now on, or no longer."""
        self.tracer = self.server.tracer = tracer

    def under_way(self) -> dict[str, tuple[int, int]]:
        """By peer: calls that have no answer yet, bytes of their arguments; see CreditWindows.under_way."""
        return {route.member.name: self.credit.under_way(route.member.rank) for route in self.routes}

    @property
    def routes(self) -> tuple[PeerRoute, ...]:
        """To everybody in the group, by rank, this member included."""
        return tuple(self._routes[rank] for rank in sorted(self._routes))

    def route(self, target: Any) -> PeerRoute:
        """Whom ``target`` (handle, name, rank, Member) means. Raises NotAMember, naming who there is."""
        key: Any = target
        if isinstance(target, Member):
            key = target.name
        elif not isinstance(target, (str, int)):
            try:
                key = ray_internals.actor_key(target)
            except AttributeError:
                raise NotAMember(
                    f"{target!r} is no call target: pass an actor handle, a member's name, its rank or a Member"
                ) from None
        rank = self._ranks.get(key)
        if rank is None:
            names = ", ".join(f"{route.member.name} ({route.member.rank})" for route in self.routes)
            raise NotAMember(f"{target!r} is not in group {self.group!r}; its members: {names}")
        return self._routes[rank]

    # --- calls -----------------------------------------------------------------------------------------------

    def call(
        self,
        target: Any,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        *,
        caller_waits: bool = False,
        share: bool = False,
        keep: bool = False,
        into: Sequence[torch.Tensor] | Spread | None = None,
        retry: int | None = None,
    ) -> CallUnderWay | RetriedCall:
        """Send a call; returns before its result. Raises what keeps it from being sent.

        ``caller_waits``: it is about to wait for the call. ``share``: CUDA tensors need not be copied for a peer
        on the same GPU. ``keep``: the result's tensors shall be in memory of their own. ``into``: tensors that the
        result's are to be received into, in their order (see ``calls.rpc_sync``), or what spreads them. ``retry``: how
        often it may be sent again to a peer that was lost; None: as often as the method says.
        """
        buffers = None if into is None else receiver(into)
        route = self._route_to(target)
        repeats = route.retries.get(method, 0) if retry is None else retry
        if not repeats:
            return self._call(route, method, args, kwargs, timeout, share, keep, buffers, caller_waits=caller_waits)

        def send(seconds: float) -> CallUnderWay:
            return self._call(self._route_to(target), method, args, kwargs, seconds, share, keep, buffers)

        budget = self._budget(f"{route.member.name}.{method}", timeout)
        return RetriedCall(self, target, f"{route.member.name}.{method}", send, budget, repeats)

    def _call(
        self,
        route: PeerRoute,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        share: bool,
        keep: bool,
        buffers: Receiver | None,
        *,
        caller_waits: bool = False,
    ) -> CallUnderWay:
        self._check_there(route)
        tracer = self.tracer
        span = None if tracer is None else tracer.call(f"{route.member.name}.{method}", caller_waits)
        loop_token = token_on_loop()
        header, body, budget = self._request(incoming.CALL, route, method, args, kwargs, timeout, loop_token)
        size = body_bytes(body)
        ticket, waited_s = self.credit.take(route.member, method, size, budget)
        shipped: Payload | None = None
        try:
            if waited_s:
                if self._left:
                    raise NotAMember(f"this process has left group {self.group!r} (it was shut down)")
                self._check_there(route)
                budget = max(0.001, budget - waited_s)
                header = (*header[:5], budget, *header[6:])
            if span is not None:
                header = (*header, span.mark)
                span.lap()
            lane, shipped = self._load(route, method, body, share)
            started = time.monotonic()
            message = Message(header, shipped.body, manifests=shipped.manifests)
            pending = lane.call(
                route.member.name, message, budget, caller_waits=caller_waits, on_released=ticket.give_back
            )
        except BaseException as error:
            ticket.give_back()
            if shipped is not None:
                shipped.cancel()
            if span is not None:
                span.end(0, error)
            raise
        self.counters.sent(route.member.name, shipped.lane or lane.name, size)
        until = started + budget
        call = CallUnderWay(self, route, method, lane, pending, started, until, loop_token, shipped, keep, buffers)
        if span is not None:
            span.sent(lane.name, shipped.lane, size, started)
            call.span = span
        return call

    def _check_there(self, route: PeerRoute) -> None:
        if self._absent and (absence := self._absent.get(route.member.rank)) is not None:
            raise PeerLost(route.member.name, absence.cause, may_have_run=False)

    def _load(self, route: PeerRoute, method: str, body: Encoded, share: bool) -> tuple[MessageLane, Payload]:
        """The lane for a call's message, and its tensors in or beside it."""
        # What the method makes of its own parameters belongs to the caller's autograd context too.
        if body.rrefs or torch_internals.current_autograd_context() != torch_internals.NO_CONTEXT:
            return route.fabric, _whole(body, route.devices)
        if not body.tensors:
            lane = route.tensors if (route.member.rank, method) in self._heavy else route.calls
            return lane, Payload(body, (), ())
        if route.calls.capabilities.carries(body.tensors):
            return route.calls, _whole(body, route.devices)
        if route.member.rank != self.me.rank:
            check_mapped(body.tensors, route.member.name, route.devices, "torchrpc")
        shipped = self._ship(route, body, route.devices, share and _on_one_gpu(body, route.devices, route.same_gpus))
        return (route.tensors, _whole(body, route.devices)) if shipped is None else (route.calls, shipped)

    def _ship(self, route: PeerRoute, body: Encoded, devices: Mapping[Device, Device], share: bool) -> Payload | None:
        if not route.beside and CPU not in devices.values():
            return None
        in_band = route.calls.capabilities.in_band_bytes or 0
        return self.splitter.ship(body, route.member.name, route.beside, devices, in_band, share)

    def ship_back(self, rank: int, body: Encoded, share: bool, frozen: bool) -> Payload | None:
        """See serving.ReplyRoutes."""
        route = self._routes[rank]
        devices = route.devices_back
        if not route.beside and CPU not in devices.values():
            return None
        share = share and _on_one_gpu(body, devices, route.same_gpus)
        # What stays on GPUs is copied later, from where it is.
        later = any(tensor.is_cuda and not host_device_copy.goes_to_cpu(tensor, devices) for tensor in body.tensors)
        copies = later and not share and not frozen
        return self._ship(route, snapshot(body) if copies else body, devices, share)

    def staged_back(self, rank: int, body: Encoded) -> Encoded:
        """See serving.ReplyRoutes."""
        return host_device_copy.outbound(body, self._routes[rank].devices_back)

    def arrived(self, rank: int, body: Encoded) -> Encoded:
        """See serving.ReplyRoutes."""
        index = self._routes[rank].cpu_arrives_on
        return body if index is None or index == CPU or not body.tensors else host_device_copy.inbound(body, index)

    def check_back(self, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        """See serving.ReplyRoutes."""
        route = self._routes[rank]
        if rank != self.me.rank:
            check_mapped(tensors, route.member.name, route.devices_back, "torchrpc")

    def receive(self, rank: int, manifests: Sequence[TensorManifest]) -> list[PendingTensors]:
        """See serving.ReplyRoutes."""
        return self.splitter.receive(self._routes[rank].member.name, manifests)

    def remote(
        self, target: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None
    ) -> Any:
        """Send a call whose result stays there; returns torch's RRef to it."""
        route = self._route_to(target)
        self._check_there(route)
        header, body, budget = self._request(incoming.REMOTE, route, method, args, kwargs, timeout)
        lane: Any = route.fabric
        rref = lane.remote(route.member.name, Message(header, host_device_copy.outbound(body, route.devices)), budget)
        self.counters.sent(route.member.name, lane.name, body_bytes(body))
        return rref

    def system(self, route: PeerRoute, lane: MessageLane, kind: int, *fields: Any, timeout_s: float) -> Pending:
        """Send a request of the group's own over the given lane."""
        header = (kind, self.me.rank, route.token, *fields)
        return lane.call(route.member.name, Message(header, NOTHING), timeout_s)

    def _route_to(self, target: Any) -> PeerRoute:
        if self._left:
            raise NotAMember(f"this process has left group {self.group!r} (it was shut down)")
        return self.route(target)

    def _request(
        self,
        kind: int,
        route: PeerRoute,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        loop_token: Token | None = None,
    ) -> tuple[tuple[Any, ...], Encoded, float]:
        scope = current_scope.get()
        budget = self._budget(f"{route.member.name}.{method}", timeout)
        until = time.monotonic() + budget if route.same_clock else None
        context = torch_internals.current_autograd_context()
        try:
            given = (args, kwargs) if args or kwargs else None
            body = self.codec.encode(given, keep_graph=context != torch_internals.NO_CONTEXT, own=True)
        except SerializationError as error:
            raise SerializationError(
                f"an argument of {route.member.name}.{method} cannot be pickled: {error}"
            ) from error
        path = scope.path if loop_token is None else (*scope.path, loop_token)
        return (kind, self.me.rank, route.token, method, path, budget, until), body, budget

    def _budget(self, label: str, timeout: float | None) -> float:
        """Seconds until the deadline of a call that is made now."""
        budget = self.config.rpc_timeout_s if timeout is None else _seconds(timeout)
        deadline = current_scope.get().deadline
        if deadline is not None:
            budget = min(budget, deadline - time.monotonic())
        if budget <= 0:
            raise RpcTimeout(f"no time left to call {label}: the deadline has passed")
        return budget

    def note_weight(self, rank: int, method: str, heavy: bool) -> None:
        """Remember whether a method's results need the lane for tensors."""
        if heavy:
            self._heavy.add((rank, method))
        else:
            self._heavy.discard((rank, method))

    def leave(self) -> None:
        """Stop serving and calling. Idempotent, bounded, never raises."""
        with self._changed:
            self._left = True
            self._changed.notify_all()
        everything: list[MessageLane | TensorLane] = [*self.lanes, *self.tensor_lanes.values()]
        for lane in everything:
            with contextlib.suppress(Exception):
                lane.close()
        self.services.close()
        self.server.close()
        self.workers.stop()
        self.deadlines.stop()
        self.cleanup.stop()
        # Their memory goes now, and not when the garbage collector finds this member, which is part of cycles.
        self.tensor_lanes, self.splitter = {}, PayloadSplitter({})
        for end in self.at_end:
            end()


def _whole(body: Encoded, devices: Mapping[Device, Device]) -> Payload:
    """All of it in the message."""
    return Payload(host_device_copy.outbound(body, devices), (), ())


def _on_one_gpu(body: Encoded, devices: Mapping[Device, Device], same: Set[tuple[Any, Any]]) -> bool:
    """Whether every CUDA tensor that stays one is to arrive on the GPU it is on."""
    stay = (tensor for tensor in body.tensors if tensor.is_cuda and not host_device_copy.goes_to_cpu(tensor, devices))
    indices = {tensor.device.index for tensor in stay}
    return bool(same) and all((index, devices.get(index)) in same for index in indices)


def _seconds(timeout: Any) -> float:
    # Not "no limit" either: every wait ends, and what waits underneath takes no infinity.
    if isinstance(timeout, (int, float)) and timeout <= MAX_TIMEOUT_S:
        return float(timeout)
    raise ConfigurationError(f"timeout is a number of seconds up to {MAX_TIMEOUT_S}, not {timeout!r}")


# --- the one membership of this process ------------------------------------------------------------------
