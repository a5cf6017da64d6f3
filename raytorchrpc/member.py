"""This process as a member: who it is, whom it knows, how a call leaves and how its answer is taken."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from raytorchrpc import _compat, execution, serving, staging
from raytorchrpc.codec import NOTHING, Codec, Encoded
from raytorchrpc.config import GroupConfig
from raytorchrpc.device_map import CPU, Device
from raytorchrpc.errors import ConfigurationError, NotAMember, RpcTimeout, SerializationError
from raytorchrpc.execution import current_scope
from raytorchrpc.lanes.base import Message, MessageLane, Pending, TensorLane
from raytorchrpc.metrics import CallCounters
from raytorchrpc.peers import Member, PeerRoad
from raytorchrpc.shipping import Parcel, Shipped, Shipper, Waybill
from raytorchrpc.streams import check_mapped
from raytorchrpc.underway import CallUnderWay, body_bytes
from raytorchrpc.workers import Alarms, Workers

logger = logging.getLogger(__name__)

#: The longest deadline of a call, as for ``GroupConfig.rpc_timeout_s``.
MAX_TIMEOUT_S = 86400


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
    ) -> None:
        """``methods``: name -> what ``calls.method`` noted."""
        self.group, self.generation, self.me, self.config = group, generation, me, config
        self.codec = Codec(_compat.cloudpickler())
        self.counters = CallCounters()
        self.workers = Workers(f"raytorchrpc-{me.name}")
        self.alarms = Alarms(f"raytorchrpc-{me.name}")
        self.shipper = Shipper({})
        self.server = serving.Server(me.name, generation, instance, methods, self.codec, self.workers, self)
        self.lanes: list[MessageLane] = []
        self.tensor_lanes: dict[str, TensorLane] = {}
        self._roads: dict[int, PeerRoad] = {}
        self._ranks: dict[Any, int] = {}
        self._heavy: set[tuple[int, str]] = set()
        """Methods whose last result needed another lane than its call: they go there at once."""
        self._left = False

    # --- peers ---------------------------------------------------------------------------------------------

    def know(self, road: PeerRoad) -> None:
        """Add a peer (or this member itself)."""
        peer = road.member
        self._roads[peer.rank] = road
        self._ranks[peer.name] = self._ranks[peer.rank] = peer.rank
        if peer.actor_id is not None:
            self._ranks[_compat.key_of_actor(peer.actor_id)] = peer.rank

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
                key = _compat.actor_key(target)
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
    ) -> CallUnderWay:
        """Send a call; returns before its result. Raises what keeps it from being sent.

        ``attended``: the caller is going to wait for it at once. ``share``: CUDA tensors need not be copied for a peer
        on the same GPU. ``keep``: the result's tensors shall be in memory of their own.
        """
        road = self._road_out(target)
        loop_token = execution.token_on_loop()
        header, body, budget = self._request(serving.CALL, road, method, args, kwargs, timeout, loop_token)
        lane, shipped = self._load(road, method, body, share)
        started = time.monotonic()
        try:
            message = Message(header, shipped.body, waybills=shipped.waybills)
            pending = lane.call(road.member.name, message, budget, attended=attended)
        except BaseException:
            shipped.cancel()
            raise
        self.counters.sent(road.member.name, shipped.lane or lane.name, body_bytes(body))
        return CallUnderWay(self, road, method, lane, pending, started, started + budget, loop_token, shipped, keep)

    def _load(self, road: PeerRoad, method: str, body: Encoded, share: bool) -> tuple[MessageLane, Shipped]:
        """The lane for a call's message, and its tensors in or beside it."""
        # What the method makes of its own parameters belongs to the caller's autograd context too.
        if body.rrefs or _compat.current_autograd_context() != _compat.NO_CONTEXT:
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

    def ship_back(self, rank: int, body: Encoded, share: bool) -> Shipped | None:
        """See serving.Roads."""
        road = self._roads[rank]
        devices = road.devices_back
        if not road.beside and CPU not in devices.values():
            return None
        share = share and _on_one_gpu(body, devices, road.same_gpus)
        # What stays on GPUs is copied later, from where it is.
        later = any(tensor.is_cuda and not staging.goes_to_cpu(tensor, devices) for tensor in body.tensors)
        return self._ship(road, serving.snapshot(body) if later and not share else body, devices, share)

    def staged_back(self, rank: int, body: Encoded) -> Encoded:
        """See serving.Roads."""
        return staging.outbound(body, self._roads[rank].devices_back)

    def arrived(self, rank: int, body: Encoded) -> Encoded:
        """See serving.Roads."""
        index = self._roads[rank].cpu_arrives_on
        return body if index is None or index == CPU or not body.tensors else staging.inbound(body, index)

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
        road = self._road_out(target)
        header, body, budget = self._request(serving.REMOTE, road, method, args, kwargs, timeout)
        lane: Any = road.fabric
        rref = lane.remote(road.member.name, Message(header, staging.outbound(body, road.devices)), budget)
        self.counters.sent(road.member.name, lane.name, body_bytes(body))
        return rref

    def system(self, road: PeerRoad, lane: MessageLane, kind: int, *fields: Any, timeout_s: float) -> Pending:
        """Send a request of the group's own over the given lane."""
        header = (kind, self.me.rank, self.generation, *fields)
        return lane.call(road.member.name, Message(header, NOTHING), timeout_s)

    def _road_out(self, target: Any) -> PeerRoad:
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
        loop_token: execution.Token | None = None,
    ) -> tuple[tuple[Any, ...], Encoded, float]:
        scope = current_scope.get()
        budget = self.config.rpc_timeout_s if timeout is None else _seconds(timeout)
        if scope.deadline is not None:
            budget = min(budget, scope.deadline - time.monotonic())
        if budget <= 0:
            raise RpcTimeout(f"no time left to call {road.member.name}.{method}: the deadline has passed")
        until = time.monotonic() + budget if road.same_clock else None
        context = _compat.current_autograd_context()
        try:
            given = (args, kwargs) if args or kwargs else None
            body = self.codec.encode(given, keep_graph=context != _compat.NO_CONTEXT, own=True)
        except SerializationError as error:
            raise SerializationError(
                f"an argument of {road.member.name}.{method} cannot be pickled: {error}"
            ) from error
        path = scope.path if loop_token is None else (*scope.path, loop_token)
        return (kind, self.me.rank, self.generation, method, path, budget, until), body, budget

    def note_weight(self, rank: int, method: str, heavy: bool) -> None:
        """Remember whether a method's results need the lane for tensors."""
        if heavy:
            self._heavy.add((rank, method))
        else:
            self._heavy.discard((rank, method))

    def leave(self) -> None:
        """Stop serving and calling. Idempotent, bounded, never raises."""
        self._left = True
        everything: list[MessageLane | TensorLane] = [*self.lanes, *self.tensor_lanes.values()]
        for lane in everything:
            with contextlib.suppress(Exception):
                lane.close()
        self.server.close()
        self.workers.stop()
        self.alarms.stop()
        # Their memory goes now, and not when the garbage collector finds this member, which is part of cycles.
        self.tensor_lanes, self.shipper = {}, Shipper({})


def _whole(body: Encoded, devices: Mapping[Device, Device]) -> Shipped:
    """All of it in the message."""
    return Shipped(staging.outbound(body, devices), (), ())


def _on_one_gpu(body: Encoded, devices: Mapping[Device, Device], same: Set[tuple[Any, Any]]) -> bool:
    """Whether every CUDA tensor that stays one is to arrive on the GPU it is on."""
    stay = (tensor for tensor in body.tensors if tensor.is_cuda and not staging.goes_to_cpu(tensor, devices))
    indices = {tensor.device.index for tensor in stay}
    return bool(same) and all((index, devices.get(index)) in same for index in indices)


def _seconds(timeout: Any) -> float:
    # Not "no limit" either: every wait ends, and what waits underneath takes no infinity.
    if isinstance(timeout, (int, float)) and timeout <= MAX_TIMEOUT_S:
        return float(timeout)
    raise ConfigurationError(f"timeout is a number of seconds up to {MAX_TIMEOUT_S}, not {timeout!r}")


# --- the one membership of this process ------------------------------------------------------------------

_local: LocalMember | None = None
_local_lock = threading.Lock()


def process_member() -> LocalMember:
    """This process's membership. Raises NotAMember, with the remedy, where there is none."""
    local = _local
    if local is None:
        raise NotAMember(
            "this process is in no group: call raytorchrpc.init_group([...]) with this actor first; a driver takes "
            "part with init_group(..., include_driver=True)"
        )
    return local


def current_local() -> LocalMember | None:
    """This process's membership, or None."""
    return _local


def set_local(local: LocalMember | None) -> None:
    """Enter or leave; the caller has made sure that the change is due."""
    global _local
    with _local_lock:
        _local = local


def current_member() -> Member:
    """This process's own ``Member``. Raises NotAMember outside a group."""
    return process_member().me
