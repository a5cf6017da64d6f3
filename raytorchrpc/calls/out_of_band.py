"""Which tensors of a message travel in it, and which beside it by a tensor lane."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from raytorchrpc._compat import torch_internals
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.base import Export, Part, TensorLane
from raytorchrpc.process import fork
from raytorchrpc.tensors.codec import Encoded
from raytorchrpc.tensors.devices import CPU, Device
from raytorchrpc.tensors.dtypes import DTYPE_NAMES, DTYPES, Shape, copied, view_at
from raytorchrpc.tensors.host_device_copy import copy_into, goes_to_cpu, outbound, to_cpu

logger = logging.getLogger(__name__)

#: Runs of tensors that are alike: (dtype's name, shape, how many).
Runs = tuple[tuple[str, tuple[int, ...], int], ...]
#: What a message says of the tensors beside it: (lane, their positions in the body (None: all of it), what they are,
#: descriptor).
TensorManifest = tuple[str, tuple[int, ...] | None, Runs, Any]


class Payload(NamedTuple):
    """A body ready to go: what stays in the message, and what goes beside it."""

    body: Encoded
    manifests: tuple[TensorManifest, ...] = ()
    exports: tuple[Export, ...] = ()

    @property
    def lane(self) -> str | None:
        """The lane that most of it goes by, if any went beside."""
        return self.manifests[0][0] if self.manifests else None

    def cancel(self) -> None:
        """The message was not sent after all."""
        for export in self.exports:
            export.cancel()


def _at_once(function: Callable[..., object], *args: Any) -> None:
    function(*args)


class PayloadSplitter:
    """Splits and joins the tensors of messages. One per member; thread-safe."""

    def __init__(self, lanes: Mapping[str, TensorLane], leave: Callable[..., object] = _at_once) -> None:
        """``leave``: see workers.DeferredCleanup; it gives up what nobody fetches."""
        self._lanes, self._leave = lanes, leave
        self._warned: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def ship(
        self,
        body: Encoded,
        peer: str,
        routes: Mapping[str, str],
        devices: Mapping[Any, Device],
        in_band: int,
        share: bool = False,
    ) -> Payload | None:
        """Export what is too large for the message.

        Args:
            routes: tensor lane by device type, for this peer.
            devices: where tensors are to arrive, this process's GPU or "cpu" -> the peer's. CUDA tensors that are to
                arrive on the CPU travel as CPU tensors; blocks until they are copied.
            in_band: CPU bytes that may stay in the message.
            share: CUDA tensors may be shared instead of copied; the peer uses the same GPU.

        Returns None if some tensor can travel neither way: then torchrpc has to carry the message.
        """
        beside = _by_kind(body.tensors, devices)
        if "cpu" in beside and sum(body.tensors[position].nbytes for position in beside["cpu"]) <= in_band:
            del beside["cpu"]
        if not beside:
            return Payload(outbound(body, devices), (), ())
        manifests: list[TensorManifest] = []
        exports: list[Export] = []
        for kind, positions in beside.items():
            name = routes.get(kind)
            try:
                if name is None:
                    raise LaneUnavailable(kind, "")
                whole = len(positions) == len(body.tensors)
                tensors = body.tensors if whole else [body.tensors[position] for position in positions]
                lane = self._lane(name)
                if not lane.capabilities.takes_cuda:
                    tensors = to_cpu(tensors, devices)
                export = (lane.share if share and kind == "cuda" else lane.export)(tensors, peer, devices)
            except BaseException as error:
                for export in exports:
                    export.cancel()
                if not isinstance(error, LaneUnavailable):
                    raise
                if name is not None:
                    self._warn(peer, name, error)
                return None
            exports.append(export)
            manifests.append((name, None if whole else tuple(positions), runs_of(tensors), export.descriptor))
        gone = {position for positions in beside.values() for position in positions}
        left = [tensor for position, tensor in enumerate(body.tensors) if position not in gone]
        return Payload(outbound(body._replace(tensors=left), devices), tuple(manifests), tuple(exports))

    def _lane(self, name: str) -> TensorLane:
        lane = self._lanes.get(name)
        if lane is None:
            raise LaneUnavailable(name, "this member has left the group")
        return lane

    def _warn(self, peer: str, lane: str, error: LaneUnavailable) -> None:
        with self._lock:
            cause = (lane, re.sub(r"\d+", "", error.reason))  # the same whatever the sizes
            known = cause in self._warned
            self._warned.add(cause)
        if not known:
            logger.warning("tensors to %s go by torchrpc instead of %s: %s", peer, lane, error.reason)

    def receive(self, peer: str, manifests: Sequence[TensorManifest]) -> list[PendingTensors]:
        """Take charge of what came beside a message; to be called for every message that has any."""
        return [PendingTensors(self._lane(manifest[0]), peer, manifest, self._leave) for manifest in manifests]


class PendingTensors:
    """Tensors that wait to be fetched. One that nobody fetches is given up when the message is dropped."""

    __slots__ = ("_descriptor", "_lane", "_leave", "_peer", "_waybill")

    def __init__(
        self, lane: TensorLane, peer: str, manifest: TensorManifest, leave: Callable[..., object] = _at_once
    ) -> None:
        self._lane, self._peer, self._leave = lane, peer, leave
        self._waybill: TensorManifest | None = manifest
        self._descriptor = manifest[3]

    @property
    def contents(self) -> tuple[tuple[int, ...] | None, list[Shape]]:
        """What is in it: positions in the body (None: all of it), dtypes and shapes."""
        if self._waybill is None:
            raise LaneUnavailable(self._lane.name, "these tensors have been fetched already")
        _, positions, runs, _ = self._waybill
        return positions, shapes_of(runs)

    def unpack(
        self, into: Sequence[torch.Tensor | None] | None = None
    ) -> tuple[tuple[int, ...] | None, list[torch.Tensor]]:
        """Fetch, on the thread that will use the tensors; returns them with their positions (None: all of the body).

        ``into``: for each tensor of the body, one to be filled and returned instead, or None.
        """
        positions, shapes = self.contents
        self._waybill = None
        if into is None:
            return positions, self._lane.fetch(self._peer, self._descriptor, shapes)
        mine = into if positions is None else [into[position] for position in positions]
        return positions, copy_into(mine, self._lane.fetch(self._peer, self._descriptor, shapes, mine))

    def scatter_into(self, parts: Sequence[Sequence[Part]]) -> None:
        """Fetch parts of flat tensors, likewise."""
        _, shapes = self.contents
        self._waybill = None
        if self._lane.capabilities.in_parts:
            sizes = [shape[0] for _, shape in shapes]
            left = self._lane.scatter_into(self._peer, self._descriptor, sizes, parts)
            copy_into([target for target, _ in left], [source for _, source in left])
        else:
            scatter_into(self._lane.fetch(self._peer, self._descriptor, shapes), parts)

    def used(self) -> None:
        """The method that was called with these has returned, on this thread."""
        self._lane.used(self._peer, self._descriptor)

    def __del__(self) -> None:
        # A reply that comes after its caller gave up is dropped in many places; only its end is one place.
        if self._waybill is not None and not fork.forked():  # then it is the parent's
            with contextlib.suppress(Exception):
                self._leave(self._lane.discard, self._peer, self._waybill[3])


def body_bytes(body: Encoded) -> int:
    """Bytes that cross for this body: the pickle and the tensors' data."""
    return len(body.payload) + sum(tensor.nbytes for tensor in body.tensors)


def owned(body: Encoded) -> Encoded:
    """The body with each tensor in memory of its own, so that keeping it keeps nothing of a lane's, nor of its
    neighbours'. Copies only where that is not so yet.
    """
    own = [tensor if torch_internals.is_sole_owner(tensor) else copied(tensor) for tensor in body.tensors]
    return body._replace(tensors=own)


def snapshot(body: Encoded) -> Encoded:
    """Copy those tensors that somebody here could still change before a lane has sent them.

    A method may return a tensor of the actor's own state; the next method must not change what the caller
    gets. A tensor that nobody else holds needs no copy; whose memory torch did not allocate (``from_numpy``),
    nobody can tell who holds it.
    """
    if not body.tensors:
        return body
    lifted = len(body.tensors) - body.buffers
    tensors = [
        copied(tensor) if index >= lifted or not torch_internals.is_sole_owner(tensor) else tensor
        for index, tensor in enumerate(body.tensors)
    ]
    return body._replace(tensors=tensors)


def scatter_into(tensors: Sequence[torch.Tensor], parts: Sequence[Sequence[Part]]) -> None:
    """Copy parts of flat uint8 tensors to where they belong."""
    for tensor, its in zip(tensors, parts, strict=True):
        views = [view_at(tensor, offset, (target.dtype, tuple(target.shape))) for offset, target in its]
        copy_into([target for _, target in its], views)


def kinds(body: Encoded, parcels: Sequence[PendingTensors]) -> list[Shape]:
    """What all the tensors of a body are, before any is fetched."""
    beside: dict[int, Shape] = {}
    for parcel in parcels:
        positions, shapes = parcel.contents
        if positions is None:
            return shapes
        beside.update(zip(positions, shapes, strict=True))
    stayed = iter([(tensor.dtype, tuple(tensor.shape)) for tensor in body.tensors])
    total = len(beside) + len(body.tensors)
    return [beside[place] if place in beside else next(stayed) for place in range(total)]


def filled(body: Encoded, parcels: Sequence[PendingTensors], into: Sequence[torch.Tensor | None]) -> Encoded:
    """As ``joined``, with each tensor copied into the one of ``into`` in its place, where there is one."""
    body = joined(body, parcels, into)
    return body._replace(tensors=copy_into(into, body.tensors))  # what stayed in the message


def joined(
    body: Encoded, parcels: Sequence[PendingTensors], into: Sequence[torch.Tensor | None] | None = None
) -> Encoded:
    """The body with all its tensors in their places. Blocks as long as fetching does."""
    if not parcels:
        return body
    beside: dict[int, torch.Tensor] = {}
    for parcel in parcels:
        positions, tensors = parcel.unpack(into)
        if positions is None:
            return body._replace(tensors=tensors)
        beside.update(zip(positions, tensors, strict=True))
    stayed = iter(body.tensors)
    total = len(beside) + len(body.tensors)
    return body._replace(tensors=[beside[place] if place in beside else next(stayed) for place in range(total)])


#: From so many tensors on it pays to look whether they are all alike, by loops that run in C.
_MANY = 8
_is_cpu, _is_cuda, _dtype, _shape = (attrgetter(name) for name in ("is_cpu", "is_cuda", "dtype", "shape"))


def _by_kind(tensors: Sequence[torch.Tensor], devices: Mapping[Any, Device]) -> dict[str, Sequence[int]]:
    """Positions by type of the device that they are to arrive on."""
    crossing = CPU in devices.values()
    if len(tensors) >= _MANY:
        for kind, is_one in (("cpu", _is_cpu), ("cuda", _is_cuda)):
            if not (crossing and kind == "cuda") and all(map(is_one, tensors)):
                return {kind: range(len(tensors))}
    kinds: dict[str, list[int]] = {}
    for position, tensor in enumerate(tensors):
        kind = "cpu" if tensor.is_cpu else "cuda" if tensor.is_cuda else tensor.device.type
        if crossing and goes_to_cpu(tensor, devices):
            kind = "cpu"
        kinds.setdefault(kind, []).append(position)
    return dict(kinds)


def shapes_of(runs: Runs) -> list[Shape]:
    """The reverse of ``runs_of``."""
    shapes: list[Shape] = []
    for name, shape, count in runs:
        shapes += [(DTYPES[name], shape)] * count
    return shapes


def runs_of(tensors: Sequence[torch.Tensor]) -> Runs:
    """What the tensors are, in few words if they are alike."""
    if len(tensors) >= _MANY and len(set(map(_dtype, tensors))) == 1:
        shapes = list(map(_shape, tensors))
        if shapes.count(shapes[0]) == len(shapes):
            return ((DTYPE_NAMES[tensors[0].dtype], tuple(shapes[0]), len(shapes)),)
    runs: list[list[Any]] = []
    dtype, shape = None, None
    for tensor in tensors:
        if tensor.dtype is dtype and tensor.shape == shape:
            runs[-1][2] += 1
        else:
            dtype, shape = tensor.dtype, tensor.shape
            runs.append([DTYPE_NAMES[dtype], tuple(shape), 1])
    return tuple((name, extents, count) for name, extents, count in runs)
