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
from raytorchrpc.calls.flow_control import Allowances
from raytorchrpc.calls.out_of_band import Parcel, Shipped, Shipper, Waybill, snapshot
from raytorchrpc.calls.outgoing import CallUnderWay, body_bytes
from raytorchrpc.calls.peers import Member, PeerRoad, process_token
from raytorchrpc.calls.receive_into import Receiver, Spread, receiver
from raytorchrpc.calls.retry import RetriedCall
from raytorchrpc.calls.scope import current_scope
from raytorchrpc.calls.services import Services
from raytorchrpc.calls.spans import Tracer
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError, NotAMember, PeerLost, RpcTimeout, SerializationError
from raytorchrpc.lanes.base import Message, MessageLane, Pending, TensorLane
from raytorchrpc.process.deadlines import Alarms
from raytorchrpc.process.deferred_cleanup import Leftovers
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
        self.allowances = Allowances(config, max_bytes)
        self.services = Services()
        self.codec = Codec(ray_internals.cloudpickler())
        self.counters = CallCounters()
        with contextlib.ExitStack() as undo:
            self.alarms = Alarms(f"raytorchrpc-{me.name}")
            undo.callback(self.alarms.stop)
            self.leftovers = Leftovers(f"raytorchrpc-{me.name}")
            undo.callback(self.leftovers.stop)
            self.workers = Workers(f"raytorchrpc-{me.name}", keep=True, alarms=self.alarms)
            undo.pop_all()
        self.shipper = Shipper({})
        self.tracer: Tracer | None = None
        """While the group is traced."""
        self.at_end: list[Callable[[], None]] = []
        """What ends with this membership; short, does not raise."""
        self.strangers: Set[int] = frozenset()
        token = process_token(generation, me.rank, me.incarnation)
        self.server = incoming.Server(me.name, token, instance, methods, self.codec, self.workers, self)
        self.lanes: list[MessageLane] = []
        self.tensor_lanes: dict[str, TensorLane] = {}
        self._roads: dict[int, PeerRoad] = {}
        self._ranks: dict[Any, int] = {}
        self._heavy: set[tuple[int, str]] = set()
        """Methods whose last result needed another lane than its call: they go there at once."""
        self._left = False
        self.step = 0
        """The last change of the group that has taken effect here."""
        self._absent: dict[int, Absence] = {}
        self._changed = threading.Condition()
        """Told when ``_absent`` or the roads change."""

    # --- peers ---------------------------------------------------------------------------------------------

    def know(self, road: PeerRoad) -> None:
        """Add a peer (or this member itself), or replace what was known of it."""
        peer = road.member
        with self._changed:
            self._roads[peer.rank] = road
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
        self.services.welcome(rank, self._roads[rank].token)

    def forget(self, rank: int) -> None:
        """A peer was removed: it is a member no longer, and nothing it asks is served."""
        with self._changed:
            self._roads.pop(rank, None)
            self._absent.pop(rank, None)
            self._ranks = {key: known for key, known in self._ranks.items() if known != rank}
            self.strangers = self.strangers | {rank}
            self._changed.notify_all()
        self.services.lose(rank, for_good=True)

    def absent(self) -> dict[str, Absence]:
        """Who is away, by name."""
        with self._changed:
            return {self._roads[rank].member.name: absence for rank, absence in self._absent.items()}

    def why_gone(self, road: PeerRoad) -> str | None:
        """See underway.Caller."""
        if self._left:
            return "this process has left the group"
        absence, now = self._absent.get(road.member.rank), self._roads.get(road.member.rank)
        if absence is not None:
            return absence.cause
        return None if now is not None and now.token == road.token else "its process was replaced, or removed"

    def await_everybody(self, until: float) -> bool:
        """Block until nobody is away; False at ``until``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._absent, max(0.0, until - time.monotonic()))

    def incarnation(self, target: Any) -> int:
        """See retrying.Returns."""
        return self.road(target).member.incarnation

    def await_return(self, target: Any, after: int, until: float) -> bool:
        """See retrying.Returns."""
        peer = self.road(target).member
        rank = peer.rank
        patience = time.monotonic() + _MISSED_AFTER_S
        with self._changed:
            while True:
                if self._left or rank not in self._roads:
                    raise PeerLost(peer.name, "it was removed from the group", may_have_run=False)
                absence, road = self._absent.get(rank), self._roads[rank]
                if absence is None and road.member.incarnation > after:
                    return True
                if absence is not None and absence.for_good:
                    raise PeerLost(road.member.name, absence.cause, may_have_run=False)
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
        """By peer: calls that have no answer yet, bytes of their arguments; see Allowances.under_way."""
        return {road.member.name: self.allowances.under_way(road.member.rank) for road in self.roads}

    @property
    def roads(self) -> tuple[PeerRoad, ...]:
        """To everybody in the group, by rank, this member included."""
        return tuple(self._roads[rank] for rank in sorted(self._roads))

    def road(self, target: Any) -> PeerRoad:
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
            names = ", ".join(f"{road.member.name} ({road.member.rank})" for road in self.roads)
            raise NotAMember(f"{target!r} is not in group {self.group!r}; its members: {names}")
        return self._roads[rank]

    # --- calls -----------------------------------------------------------------------------------------------

    def call(
        self,
        target: Any,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        *,
        attended: bool = False,
        share: bool = False,
        keep: bool = False,
        into: Sequence[torch.Tensor] | Spread | None = None,
        retry: int | None = None,
    ) -> CallUnderWay | RetriedCall:
        """Send a call; returns before its result. Raises what keeps it from being sent.

        ``attended``: the caller is going to wait for it at once. ``share``: CUDA tensors need not be copied for a peer
        on the same GPU. ``keep``: the result's tensors shall be in memory of their own. ``into``: tensors that the
        result's are to be received into, in their order (see ``calls.rpc_sync``), or what spreads them. ``retry``: how
        often it may be sent again to a peer that was lost; None: as often as the method says.
        """
        buffers = None if into is None else receiver(into)
        road = self._road_to(target)
        repeats = road.retries.get(method, 0) if retry is None else retry
        if not repeats:
            return self._call(road, method, args, kwargs, timeout, share, keep, buffers, attended=attended)

        def send(seconds: float) -> CallUnderWay:
            return self._call(self._road_to(target), method, args, kwargs, seconds, share, keep, buffers)

        budget = self._budget(f"{road.member.name}.{method}", timeout)
        return RetriedCall(self, target, f"{road.member.name}.{method}", send, budget, repeats)

    def _call(
        self,
        road: PeerRoad,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        share: bool,
        keep: bool,
        buffers: Receiver | None,
        *,
        attended: bool = False,
    ) -> CallUnderWay:
        self._check_there(road)
        tracer = self.tracer
        span = None if tracer is None else tracer.call(f"{road.member.name}.{method}", attended)
        loop_token = token_on_loop()
        header, body, budget = self._request(incoming.CALL, road, method, args, kwargs, timeout, loop_token)
        size = body_bytes(body)
        ticket, waited_s = self.allowances.take(road.member, method, size, budget)
        shipped: Shipped | None = None
        try:
            if waited_s:
                if self._left:
                    raise NotAMember(f"this process has left group {self.group!r} (it was shut down)")
                self._check_there(road)
                budget = max(0.001, budget - waited_s)
                header = (*header[:5], budget, *header[6:])
            if span is not None:
                header = (*header, span.mark)
                span.lap()
            lane, shipped = self._load(road, method, body, share)
            started = time.monotonic()
            message = Message(header, shipped.body, waybills=shipped.waybills)
            pending = lane.call(road.member.name, message, budget, attended=attended, settled=ticket.give_back)
        except BaseException as error:
            ticket.give_back()
            if shipped is not None:
                shipped.cancel()
            if span is not None:
                span.end(0, error)
            raise
        self.counters.sent(road.member.name, shipped.lane or lane.name, size)
        until = started + budget
        call = CallUnderWay(self, road, method, lane, pending, started, until, loop_token, shipped, keep, buffers)
        if span is not None:
            span.sent(lane.name, shipped.lane, size, started)
            call.span = span
        return call

    def _check_there(self, road: PeerRoad) -> None:
        if self._absent and (absence := self._absent.get(road.member.rank)) is not None:
            raise PeerLost(road.member.name, absence.cause, may_have_run=False)

    def _load(self, road: PeerRoad, method: str, body: Encoded, share: bool) -> tuple[MessageLane, Shipped]:
        """The lane for a call's message, and its tensors in or beside it."""
        # What the method makes of its own parameters belongs to the caller's autograd context too.
        if body.rrefs or torch_internals.current_autograd_context() != torch_internals.NO_CONTEXT:
            return road.fabric, _whole(body, road.devices)
        if not body.tensors:
            lane = road.tensors if (road.member.rank, method) in self._heavy else road.calls
            return lane, Shipped(body, (), ())
        if road.calls.capabilities.carries(body.tensors):
            return road.calls, _whole(body, road.devices)
        if road.member.rank != self.me.rank:
            check_mapped(body.tensors, road.member.name, road.devices, "torchrpc")
        shipped = self._ship(road, body, road.devices, share and _on_one_gpu(body, road.devices, road.same_gpus))
        return (road.tensors, _whole(body, road.devices)) if shipped is None else (road.calls, shipped)

    def _ship(self, road: PeerRoad, body: Encoded, devices: Mapping[Device, Device], share: bool) -> Shipped | None:
        if not road.beside and CPU not in devices.values():
            return None
        in_band = road.calls.capabilities.in_band_bytes or 0
        return self.shipper.ship(body, road.member.name, road.beside, devices, in_band, share)

    def ship_back(self, rank: int, body: Encoded, share: bool, frozen: bool) -> Shipped | None:
        """See serving.Roads."""
        road = self._roads[rank]
        devices = road.devices_back
        if not road.beside and CPU not in devices.values():
            return None
        share = share and _on_one_gpu(body, devices, road.same_gpus)
        # What stays on GPUs is copied later, from where it is.
        later = any(tensor.is_cuda and not host_device_copy.goes_to_cpu(tensor, devices) for tensor in body.tensors)
        copies = later and not share and not frozen
        return self._ship(road, snapshot(body) if copies else body, devices, share)

    def staged_back(self, rank: int, body: Encoded) -> Encoded:
        """See serving.Roads."""
        return host_device_copy.outbound(body, self._roads[rank].devices_back)

    def arrived(self, rank: int, body: Encoded) -> Encoded:
        """See serving.Roads."""
        index = self._roads[rank].cpu_arrives_on
        return body if index is None or index == CPU or not body.tensors else host_device_copy.inbound(body, index)

    def check_back(self, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        """See serving.Roads."""
        road = self._roads[rank]
        if rank != self.me.rank:
            check_mapped(tensors, road.member.name, road.devices_back, "torchrpc")

    def receive(self, rank: int, waybills: Sequence[Waybill]) -> list[Parcel]:
        """See serving.Roads."""
        return self.shipper.receive(self._roads[rank].member.name, waybills)

    def remote(
        self, target: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None
    ) -> Any:
        """Send a call whose result stays there; returns torch's RRef to it."""
        road = self._road_to(target)
        self._check_there(road)
        header, body, budget = self._request(incoming.REMOTE, road, method, args, kwargs, timeout)
        lane: Any = road.fabric
        rref = lane.remote(road.member.name, Message(header, host_device_copy.outbound(body, road.devices)), budget)
        self.counters.sent(road.member.name, lane.name, body_bytes(body))
        return rref

    def system(self, road: PeerRoad, lane: MessageLane, kind: int, *fields: Any, timeout_s: float) -> Pending:
        """Send a request of the group's own over the given lane."""
        header = (kind, self.me.rank, road.token, *fields)
        return lane.call(road.member.name, Message(header, NOTHING), timeout_s)

    def _road_to(self, target: Any) -> PeerRoad:
        if self._left:
            raise NotAMember(f"this process has left group {self.group!r} (it was shut down)")
        return self.road(target)

    def _request(
        self,
        kind: int,
        road: PeerRoad,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        loop_token: Token | None = None,
    ) -> tuple[tuple[Any, ...], Encoded, float]:
        scope = current_scope.get()
        budget = self._budget(f"{road.member.name}.{method}", timeout)
        until = time.monotonic() + budget if road.same_clock else None
        context = torch_internals.current_autograd_context()
        try:
            given = (args, kwargs) if args or kwargs else None
            body = self.codec.encode(given, keep_graph=context != torch_internals.NO_CONTEXT, own=True)
        except SerializationError as error:
            raise SerializationError(
                f"an argument of {road.member.name}.{method} cannot be pickled: {error}"
            ) from error
        path = scope.path if loop_token is None else (*scope.path, loop_token)
        return (kind, self.me.rank, road.token, method, path, budget, until), body, budget

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
        self.alarms.stop()
        self.leftovers.stop()
        # Their memory goes now, and not when the garbage collector finds this member, which is part of cycles.
        self.tensor_lanes, self.shipper = {}, Shipper({})
        for end in self.at_end:
            end()


def _whole(body: Encoded, devices: Mapping[Device, Device]) -> Shipped:
    """All of it in the message."""
    return Shipped(host_device_copy.outbound(body, devices), (), ())


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
