"""Decides how a body travels: by which lane, in the message or out of band, copied to which device."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

import torch

from raytorchrpc._compat import torch_internals
from raytorchrpc.calls.peers import PeerRoute
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.base import Arrived, Copies, Export, MessageLane, TensorLane, arrived
from raytorchrpc.process import fork
from raytorchrpc.process.locks import Lock
from raytorchrpc.tensors.codec import Encoded, as_tensor, nbytes_of
from raytorchrpc.tensors.devices import CPU, Device, check_mapped
from raytorchrpc.tensors.dtypes import DTYPE_NAMES, DTYPES, Shape, copied
from raytorchrpc.tensors.host_device_copy import copy_into, goes_to_cpu, inbound, outbound, placed, to_cpu

logger = logging.getLogger(__name__)

T = TypeVar("T")

_is_cuda = attrgetter("is_cuda")

#: Runs of equal dtype and shape: (dtype's name, shape, how many).
Runs = tuple[tuple[str, tuple[int, ...], int], ...]
#: Describes the out-of-band tensors of a message: (lane, positions in the body (None: all), runs, descriptor).
TensorManifest = tuple[str, tuple[int, ...] | None, Runs, Any]


#: In place of a tensor lane: CUDA tensors that are in the message, copied to the CPU. The descriptor has the GPUs on
#: which they arrive.
_IN_MESSAGE = ""
#: In place of positions: the RRefs of the body.
_RREFS: tuple[int, ...] = ()


def tensor_lane(manifests: Sequence[TensorManifest]) -> str | None:
    """The tensor lane of a message's out-of-band tensors, if there are any (of two lanes the first)."""
    return (manifests[0][0] or None) if manifests else None


class OutOfBand(NamedTuple):
    """The tensors of a message that travel out of band."""

    manifests: tuple[TensorManifest, ...] = ()
    exports: tuple[Export, ...] = ()
    began: float = 0.0
    """When their export began (``time.monotonic``)."""

    def cancel(self) -> None:
        """Take the out-of-band tensors back: the message was not sent."""
        for export in self.exports:
            export.cancel()


#: Of a message that has all its tensors.
IN_BAND = OutOfBand()
#: What is sent for a body: the body in the message, and the tensors beside it.
Packed = tuple[Encoded, OutOfBand]

#: In place of a pickle that travels as the message's only tensor. No encoding begins like this.
_IS_TENSOR = b"\0"


def _at_once(function: Callable[..., object], *args: Any) -> None:
    function(*args)


class Payloads:
    """Packs what one member sends, and unpacks what it receives. Thread-safe."""

    def __init__(self, rank: int, lanes: Mapping[str, TensorLane], leave: Callable[..., object] = _at_once) -> None:
        """``rank``: of this member. ``lanes``: its tensor lanes. ``leave``: see DeferredCleanup.leave; it discards what
        nobody takes.
        """
        self._rank, self._lanes, self.leave = rank, lanes, leave
        self._warned: set[str] = set()
        self._lock = Lock()

    # --- what is sent --------------------------------------------------------------------------------------------

    def pack_request(
        self, route: PeerRoute, body: Encoded, share: bool, in_context: bool
    ) -> tuple[MessageLane, Encoded, OutOfBand]:
        """The lane for a request, and what to send. Raises LaneUnavailable. Blocks while tensors are copied.

        ``share``: CUDA tensors may be shared with a peer on the same GPU instead of copied. ``in_context``: this thread
        is in a distributed autograd context.
        """
        # The tensors that a method computes from its own parameters belong to the caller's autograd context too.
        if body.rrefs or in_context:
            return route.torchrpc, outbound(body, route.devices) if route.devices else body, IN_BAND
        lane, can = route.calls, route.calls.capabilities
        most = can.in_band_bytes
        if not body.tensors:
            if most is None or len(body.payload) <= most:
                return lane, body, IN_BAND
            return lane, *self._without_tensors(route, lane, body)
        fits = most is None or sum(map(nbytes_of, body.tensors)) <= most
        if fits and (can.in_band_cuda or not any(map(_is_cuda, body.tensors))):
            return lane, outbound(body, route.devices) if route.devices else body, IN_BAND
        self._check_mapped(route, body.tensors, route.devices)
        return lane, *self._beside(route, lane, body, route.devices, share)

    def pack_reply(self, route: PeerRoute, lane: MessageLane, body: Encoded, share: bool, frozen: bool) -> Packed:
        """What to send of a result, over the lane that brought the request. Raises LaneUnavailable. Blocks while
        tensors are copied.

        ``share``: as for ``pack_request``. ``frozen``: this process does not change the tensors any more. All others
        are copied if a lane reads them later and the actor may still hold them.
        """
        if body.rrefs and not lane.capabilities.rrefs:
            packed = self.pack_reply(route, lane, body._replace(rrefs=()), share, frozen)
            return self._with_rrefs(route, body.rrefs, *packed)
        can, devices = lane.capabilities, route.devices_back
        most = can.in_band_bytes
        if not body.tensors:
            if most is None or len(body.payload) <= most:
                return body, IN_BAND
            return self._without_tensors(route, lane, body)
        fits = most is None or sum(map(nbytes_of, body.tensors)) <= most
        if fits and (can.in_band_cuda or not any(map(_is_cuda, body.tensors))):
            if can.in_band_cuda:  # else there is no CUDA tensor
                self._check_mapped(route, body.tensors, devices)
            body = outbound(body, devices) if devices else body
            as_is = can.copies_at_once or any(tensor.requires_grad for tensor in body.tensors)
            # A lane that reads CUDA tensors later cannot be told when they may change again.
            return body if as_is or (frozen and not any(map(_is_cuda, body.tensors))) else snapshot(body), IN_BAND
        self._check_mapped(route, body.tensors, devices)
        share = share and _on_one_gpu(body, devices, route.same_gpus)
        if not frozen:
            beside = self._lanes.get(route.beside.get(CPU, ""))
            if share:  # what is on GPUs may be changed
                if beside is not None and beside.capabilities.reads_later:
                    body = snapshot(body, on_cpu=True)
            elif (beside is not None and beside.capabilities.reads_later) or any(
                tensor.is_cuda and not goes_to_cpu(tensor, devices)  # it is copied later, from where it is
                for tensor in body.tensors
            ):
                body = snapshot(body)
        return self._beside(route, lane, body, devices, share)

    def _with_rrefs(self, route: PeerRoute, rrefs: Sequence[Any], body: Encoded, beside: OutOfBand) -> Packed:
        """A result whose RRefs the caller fetches over torchrpc."""
        try:
            lane: Any = route.torchrpc.beside
            export = lane.export_rrefs(rrefs, route.member.name)
        except BaseException:
            beside.cancel()
            raise
        manifest = (lane.name, _RREFS, (), export.descriptor)
        return body, OutOfBand((*beside.manifests, manifest), (*beside.exports, export), beside.began)

    def _without_tensors(self, route: PeerRoute, lane: MessageLane, body: Encoded) -> Packed:
        """A pickle that is large for a message travels like a tensor: a lane for those copies it once."""
        if body.rrefs or CPU not in route.beside:
            return body, IN_BAND
        lifted = Encoded(_IS_TENSOR, [as_tensor(memoryview(body.payload))], (), 1)
        packed = self._beside(route, lane, lifted, {}, False)
        return packed if packed[1].manifests else (body, IN_BAND)

    def check_reply(self, route: PeerRoute, tensors: Sequence[torch.Tensor]) -> None:
        """Raise LaneUnavailable for a result on a GPU that has no mapping to that caller."""
        self._check_mapped(route, tensors, route.devices_back)

    def _check_mapped(self, route: PeerRoute, tensors: Sequence[torch.Tensor], devices: Mapping[Any, Device]) -> None:
        if route.member.rank != self._rank:
            # A client's route names no lane.
            check_mapped(tensors, route.member.name, devices, getattr(route.calls, "name", "socket"))

    def _beside(
        self, route: PeerRoute, lane: MessageLane, body: Encoded, devices: Mapping[Device, Device], share: bool
    ) -> Packed:
        share = share and _on_one_gpu(body, devices, route.same_gpus)
        in_band, through_cpu = lane.capabilities.in_band_bytes, route.through_cpu
        return self.split(body, route.member.name, route.beside, devices, in_band, share, lane.name, through_cpu)

    def split(
        self,
        body: Encoded,
        peer: str,
        routes: Mapping[str, str],
        devices: Mapping[Any, Device],
        in_band: int | None,
        share: bool = False,
        lane: str = "",
        through_cpu: str | None = "",
    ) -> Packed:
        """Export the tensors that are too large for the message; see ``placement``. Those that no lane takes stay in
        it, CUDA tensors as copies on the CPU. Blocks while tensors are copied to the CPU.

        Args:
            routes: the tensor lanes to this peer, by device type.
            share: CUDA tensors may be shared instead of copied; the peer uses the same GPU.
            lane: the message's.
            through_cpu: see PeerRoute.
        """
        manifests: list[TensorManifest] = []
        exports: list[Export] = []
        began = time.monotonic()
        stay = dict(enumerate(body.tensors))
        try:
            for kind, positions in placement(body.tensors, devices, in_band).items():
                if (name := routes.get(kind)) is None:
                    continue
                tensors: Sequence[torch.Tensor] = [stay[position] for position in positions]
                try:
                    beside = self._lane(name)
                    if not beside.capabilities.takes_cuda:
                        tensors = to_cpu(tensors, devices)
                    export = (beside.share if share and kind == "cuda" else beside.export)(tensors, peer, devices)
                except LaneUnavailable as error:
                    self.warn(f"tensors to {peer} go by {lane} instead of {name}", error.reason)
                    continue
                exports.append(export)
                where = None if len(positions) == len(body.tensors) else tuple(positions)
                manifests.append((name, where, runs_of(tensors), export.descriptor))
                for position in positions:
                    del stay[position]
            on_gpu = {place: tensor.device.index for place, tensor in stay.items() if tensor.is_cuda}
            on_gpu = {place: index for place, index in on_gpu.items() if devices[index] != CPU}
            if on_gpu:
                if through_cpu is None:
                    raise LaneUnavailable(lane, "it carries no CUDA tensors; move them to the CPU first")
                if "cuda" not in routes:
                    self.warn(f"CUDA tensors to {peer} go by {lane}, copied to the CPU and back", through_cpu)
                arrive = tuple(devices[index] for index in on_gpu.values())
                manifests.append((_IN_MESSAGE, tuple(on_gpu), (), arrive))
                devices = {**devices, **dict.fromkeys(on_gpu.values(), CPU)}
            body = outbound(body._replace(tensors=list(stay.values())) if exports else body, devices)
        except BaseException:
            for export in exports:
                export.cancel()
            raise
        return body, OutOfBand(tuple(manifests), tuple(exports), began) if manifests else IN_BAND

    def _lane(self, name: str) -> TensorLane:
        lane = self._lanes.get(name)
        if lane is None:
            raise LaneUnavailable(name, "this member has left the group")
        return lane

    def warn(self, detour: str, reason: str) -> None:
        with self._lock:
            cause = re.sub(r"\d+", "", reason)  # one warning whatever the sizes
            known = cause in self._warned
            self._warned.add(cause)
        if not known:
            logger.warning("%s: %s", detour, reason)

    # --- what is received ----------------------------------------------------------------------------------------

    def receive(self, peer: str, manifests: Sequence[TensorManifest]) -> list[PendingTensors]:
        """Take charge of a message's out-of-band tensors; to be called for every message that has any.

        Raises LaneUnavailable after this process has left the group.
        """
        beside = [manifest for manifest in manifests if manifest[0] != _IN_MESSAGE]
        return [PendingTensors(self._lane(manifest[0]), peer, manifest, self.leave) for manifest in beside]

    def unpack(
        self,
        body: Encoded,
        pending: Sequence[PendingTensors],
        manifests: Sequence[TensorManifest] = (),
        *,
        arrives_on: Device | None = None,
        keep: bool,
    ) -> Encoded:
        """The body of a message with all its tensors, on the thread that will use them. Blocks while they are read.

        Args:
            pending: what ``receive`` returned.
            manifests: the message's.
            arrives_on: the GPU to copy CPU tensors to; None or "cpu" leaves them.
            keep: copy each tensor into memory of its own.
        """
        if pending:
            body = joined(body, pending)
            if is_out_of_band(body):
                return Encoded(cast(bytes, body.tensors[0].numpy().data), (), body.rrefs, 0)
        for lane, places, _, devices in manifests:
            if lane == _IN_MESSAGE:
                body = placed(body, places or (), devices)
        if arrives_on is not None and arrives_on != CPU and body.tensors:
            body = inbound(body, arrives_on)
        return owned(body) if keep else body


def is_out_of_band(body: Encoded) -> bool:
    """Whether even the pickle of a message is out of band, so that nothing is known of it before ``unpack``."""
    return body.payload == _IS_TENSOR


def placement(
    tensors: Sequence[torch.Tensor], devices: Mapping[Any, Device], in_band: int | None
) -> dict[str, Sequence[int]]:
    """Which tensors leave the message: their positions, by the type of the device that they arrive on.

    ``devices``: where tensors arrive, this process's GPU or "cpu" -> the peer's. CUDA tensors that arrive on the CPU
    travel as CPU tensors. ``in_band``: CPU bytes that may stay in the message; None: all.
    """
    positions_of: dict[str, list[int]] = {}
    crossing = CPU in devices.values()
    for position, tensor in enumerate(tensors):
        kind = "cpu" if tensor.is_cpu else "cuda" if tensor.is_cuda else tensor.device.type
        if crossing and goes_to_cpu(tensor, devices):
            kind = "cpu"
        positions_of.setdefault(kind, []).append(position)
    if in_band is None or sum(tensors[position].nbytes for position in positions_of.get("cpu", ())) <= in_band:
        positions_of.pop("cpu", None)
    return dict(positions_of)


def _on_one_gpu(body: Encoded, devices: Mapping[Device, Device], same: Set[tuple[Any, Any]]) -> bool:
    """Whether each CUDA tensor that stays on a GPU arrives on the same physical GPU."""
    stay = (tensor for tensor in body.tensors if tensor.is_cuda and not goes_to_cpu(tensor, devices))
    indices = {tensor.device.index for tensor in stay}
    return bool(same) and all((index, devices.get(index)) in same for index in indices)


class PendingTensors:
    """Out-of-band tensors to be read. They are released if the message is dropped before."""

    __slots__ = ("_descriptor", "_is_taken", "_lane", "_leave", "_peer", "_runs", "positions")

    def __init__(
        self, lane: TensorLane, peer: str, manifest: TensorManifest, leave: Callable[..., object] = _at_once
    ) -> None:
        self._lane, self._peer, self._leave, self._is_taken = lane, peer, leave, False
        _, self.positions, self._runs, self._descriptor = manifest
        """Of the tensors in the body; None: all of it."""

    @property
    def shapes(self) -> list[Shape]:
        return shapes_of(self._runs)

    def _take(self) -> tuple[str, Any, list[Shape]]:
        if self._is_taken:
            raise LaneUnavailable(self._lane.name, "these tensors have been read already")
        shapes = self.shapes
        self._is_taken = True
        return self._peer, self._descriptor, shapes

    def read(self, copies: Copies | None = None) -> Arrived:
        """Read, on the thread that will use the tensors. Blocks. See ``TensorLane.read``."""
        return self._lane.read(*self._take(), copies)

    def view(self) -> list[torch.Tensor] | None:
        """Flat tensors in the sender's memory, read-only; None if the lane has no such memory."""
        return self._lane.view(*self._take())

    def prepare(self) -> None:
        """Others in the same memory will be read soon."""
        self._lane.prepare(self._peer, self._descriptor)

    def used(self) -> None:
        """The method that was called with these tensors has returned, on this thread."""
        self._lane.used(self._peer, self._descriptor)

    def __del__(self) -> None:
        # A reply that arrives after its caller's deadline may be dropped in many places, but is finalized in one.
        if not self._is_taken and not fork.forked():  # then it is the parent's
            with suppress(Exception):
                self._leave(self._lane.release, self._peer, self._descriptor)


def owned(body: Encoded) -> Encoded:
    """The body with each tensor in memory of its own, apart from a lane's memory and from the other tensors.

    Copies only tensors that share memory.
    """
    own = [tensor if torch_internals.is_sole_owner(tensor) else copied(tensor) for tensor in body.tensors]
    return body._replace(tensors=own)


def snapshot(body: Encoded, *, on_cpu: bool = False) -> Encoded:
    """Copy the tensors (``on_cpu``: of the CPU) that this process could still change before a lane has sent them.

    A method may return a tensor of the actor's own state, and the next method must not change what the caller gets.
    A tensor with no other reference needs no copy, unless torch did not allocate its memory (``from_numpy``): then its
    holders are unknown.
    """
    if not body.tensors:
        return body
    lifted = len(body.tensors) - body.buffers
    tensors = [
        copied(tensor)
        if (index >= lifted or not torch_internals.is_sole_owner(tensor)) and not (on_cpu and tensor.is_cuda)
        else tensor
        for index, tensor in enumerate(body.tensors)
    ]
    return body._replace(tensors=tensors)


def kinds(body: Encoded, pending: Sequence[PendingTensors]) -> list[Shape]:
    """The dtypes and shapes of all tensors of a body, before any is read."""
    stayed = [(tensor.dtype, tuple(tensor.shape)) for tensor in body.tensors]
    return _in_places([(tensors.positions, tensors.shapes) for tensors in pending], stayed)


def joined(body: Encoded, pending: Sequence[PendingTensors]) -> Encoded:
    """The body with all its tensors in their places. Blocks while they are read."""
    body, pending = with_rrefs(body, pending)
    if not pending:
        return body
    read = [(tensors.positions, cast(list[torch.Tensor], tensors.read())) for tensors in pending]
    return body._replace(tensors=_in_places(read, body.tensors))


def with_rrefs(body: Encoded, pending: Sequence[PendingTensors]) -> tuple[Encoded, list[PendingTensors]]:
    """Read the RRefs of a result, if they are out of band. Blocks. Returns the body with them, and what else is."""
    tensors: list[PendingTensors] = []
    for each in pending:
        if each.positions == _RREFS:
            body = body._replace(rrefs=each.read())
        else:
            tensors.append(each)
    return body, tensors


def read_into(body: Encoded, pending: Sequence[PendingTensors], copies: Copies) -> Arrived:
    """Make copies out of the tensors of a body, in their places. Blocks. Returns what has no target, by the copy."""
    if not pending:
        return _copied(copies, arrived(body.tensors, copies))
    if pending[0].positions is None:
        return _copied(copies, pending[0].read(copies))
    reads: list[tuple[Sequence[int], Callable[[Copies], Arrived]]]
    reads = [(tensors.positions or (), tensors.read) for tensors in pending]
    count = len(body.tensors) + sum([len(positions) for positions, _ in reads])
    stayed = sorted(set(range(count)).difference(*[positions for positions, _ in reads]))
    reads.append((stayed, partial(arrived, body.tensors)))
    filled: Arrived = [None] * len(copies)
    for positions, read in reads:
        sources = {position: source for source, position in enumerate(positions)}
        indices = [index for index, copy in enumerate(copies) if copy.source in sources]
        if indices:
            described = [copies[index]._replace(source=sources[copies[index].source]) for index in indices]
            some = Copies(described, [copies.target(index) for index in indices])
            for index, tensor in zip(indices, _copied(some, read(some)), strict=True):
                filled[index] = tensor
    return filled


def _copied(copies: Copies, arrived: Arrived) -> Arrived:
    """Make the copies that a lane has left; returns what has no target."""
    targets, sources = list[torch.Tensor](), list[torch.Tensor]()
    for index, tensor in enumerate(arrived):
        if tensor is not None and (target := copies.target(index)) is not None:
            targets.append(target)
            sources.append(tensor)
            arrived[index] = None
    copy_into(targets, sources)
    return arrived


def _in_places(beside: Sequence[tuple[Sequence[int] | None, list[T]]], stayed: Sequence[T]) -> list[T]:
    """What came out of band (positions, None for all, and things) and what stayed, in the order of the body."""
    placed: dict[int, T] = {}
    for positions, things in beside:
        if positions is None:
            return things
        placed.update(zip(positions, things, strict=True))
    rest = iter(stayed)
    return [placed[place] if place in placed else next(rest) for place in range(len(placed) + len(stayed))]


def shapes_of(runs: Runs) -> list[Shape]:
    """The reverse of ``runs_of``."""
    return [shape for name, extents, count in runs for shape in [(DTYPES[name], extents)] * count]


def runs_of(tensors: Sequence[torch.Tensor]) -> Runs:
    """The dtypes and shapes of tensors; short if they are alike."""
    kinds = groupby(map(_dtype_and_shape, tensors))
    return tuple((DTYPE_NAMES[dtype], tuple(shape), len(list(run))) for (dtype, shape), run in kinds)


_dtype_and_shape = attrgetter("dtype", "shape")
