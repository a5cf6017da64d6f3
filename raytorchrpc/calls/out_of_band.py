"""Out-of-band tensors: those of a message that travel beside it, over a tensor lane."""

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
from raytorchrpc.lanes.base import Export, Part, TensorLane, WindowLane
from raytorchrpc.process import fork
from raytorchrpc.tensors.codec import Encoded
from raytorchrpc.tensors.devices import CPU, Device
from raytorchrpc.tensors.dtypes import DTYPE_NAMES, DTYPES, Shape, copied
from raytorchrpc.tensors.host_device_copy import copy_into, goes_to_cpu, outbound, to_cpu

logger = logging.getLogger(__name__)

#: Runs of equal dtype and shape: (dtype's name, shape, how many).
Runs = tuple[tuple[str, tuple[int, ...], int], ...]
#: Describes the out-of-band tensors of a message: (lane, positions in the body (None: all), runs, descriptor).
TensorManifest = tuple[str, tuple[int, ...] | None, Runs, Any]


class Payload(NamedTuple):
    """A body ready to be sent: the part in the message, and the out-of-band tensors."""

    body: Encoded
    manifests: tuple[TensorManifest, ...] = ()
    exports: tuple[Export, ...] = ()

    @property
    def lane(self) -> str | None:
        """The tensor lane of the out-of-band tensors, if there are any (of two lanes the first)."""
        return self.manifests[0][0] if self.manifests else None

    def cancel(self) -> None:
        """Take the out-of-band tensors back: the message was not sent."""
        for export in self.exports:
            export.cancel()


def _at_once(function: Callable[..., object], *args: Any) -> None:
    function(*args)


class PayloadSplitter:
    """Moves large tensors of messages out of band. One per member; thread-safe."""

    def __init__(self, lanes: Mapping[str, TensorLane], leave: Callable[..., object] = _at_once) -> None:
        """``leave``: see DeferredCleanup.leave; it discards tensors that are not fetched."""
        self._lanes, self._leave = lanes, leave
        self._warned: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def split(
        self,
        body: Encoded,
        peer: str,
        routes: Mapping[str, str],
        devices: Mapping[Any, Device],
        in_band: int,
        share: bool = False,
    ) -> Payload | None:
        """Export the tensors that are too large for the message. Blocks while tensors are copied to the CPU.

        Args:
            routes: the tensor lanes to this peer, by device type.
            devices: where tensors arrive: this process's GPU or "cpu" -> the peer's. CUDA tensors that arrive on the
                CPU travel as CPU tensors.
            in_band: CPU bytes that may stay in the message.
            share: CUDA tensors may be shared instead of copied; the peer uses the same GPU.

        Returns None if no lane takes some tensor: then torchrpc has to carry the message.
        """
        large = _by_kind(body.tensors, devices)
        if "cpu" in large and sum(body.tensors[position].nbytes for position in large["cpu"]) <= in_band:
            del large["cpu"]
        if not large:
            return Payload(outbound(body, devices))
        manifests: list[TensorManifest] = []
        exports: list[Export] = []
        for kind, positions in large.items():
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
        gone = {position for positions in large.values() for position in positions}
        left = [tensor for position, tensor in enumerate(body.tensors) if position not in gone]
        return Payload(outbound(body._replace(tensors=left), devices), tuple(manifests), tuple(exports))

    def _lane(self, name: str) -> TensorLane:
        lane = self._lanes.get(name)
        if lane is None:
            raise LaneUnavailable(name, "this member has left the group")
        return lane

    def _warn(self, peer: str, lane: str, error: LaneUnavailable) -> None:
        with self._lock:
            cause = (lane, re.sub(r"\d+", "", error.reason))  # one warning whatever the sizes
            known = cause in self._warned
            self._warned.add(cause)
        if not known:
            logger.warning("tensors to %s go by torchrpc instead of %s: %s", peer, lane, error.reason)

    def receive(self, peer: str, manifests: Sequence[TensorManifest]) -> list[PendingTensors]:
        """Take charge of a message's out-of-band tensors; to be called for every message that has any."""
        return [PendingTensors(self._lane(manifest[0]), peer, manifest, self._leave) for manifest in manifests]


class PendingTensors:
    """Out-of-band tensors to be fetched. They are discarded if the message is dropped before."""

    __slots__ = ("_descriptor", "_lane", "_leave", "_manifest", "_peer")

    def __init__(
        self, lane: TensorLane, peer: str, manifest: TensorManifest, leave: Callable[..., object] = _at_once
    ) -> None:
        self._lane, self._peer, self._leave = lane, peer, leave
        self._manifest: TensorManifest | None = manifest
        self._descriptor = manifest[3]

    @property
    def contents(self) -> tuple[tuple[int, ...] | None, list[Shape]]:
        """The tensors' positions in the body (None: all of it), dtypes and shapes."""
        if self._manifest is None:
            raise LaneUnavailable(self._lane.name, "these tensors have been fetched already")
        _, positions, runs, _ = self._manifest
        return positions, shapes_of(runs)

    def unpack(
        self, into: Sequence[torch.Tensor | None] | None = None
    ) -> tuple[tuple[int, ...] | None, list[torch.Tensor]]:
        """Fetch, on the thread that will use the tensors. Blocks. Returns positions (None: all) and tensors.

        ``into``: for each tensor of the body, a tensor to be filled and returned instead, or None.
        """
        positions, shapes = self.contents
        self._manifest = None
        if into is None:
            return positions, self._lane.fetch(self._peer, self._descriptor, shapes)
        mine = into if positions is None else [into[position] for position in positions]
        return positions, copy_into(mine, self._lane.fetch(self._peer, self._descriptor, shapes, mine))

    def scatter_into(self, parts: Sequence[Sequence[Part]]) -> None:
        """As ``unpack``, for parts of flat tensors: copy each part into its target."""
        _, shapes = self.contents
        self._manifest = None
        if isinstance(self._lane, WindowLane):
            sizes = [shape[0] for _, shape in shapes]
            left = self._lane.scatter_into(self._peer, self._descriptor, sizes, parts)
            copy_into([target for target, _ in left], [source for _, source in left])
        else:
            scatter_into(self._lane.fetch(self._peer, self._descriptor, shapes), parts)

    def prepare(self) -> None:
        """Others in the same memory will be fetched soon."""
        if isinstance(self._lane, WindowLane):
            self._lane.prepare(self._peer, self._descriptor)

    def used(self) -> None:
        """The method that was called with these tensors has returned, on this thread."""
        self._lane.used(self._peer, self._descriptor)

    def __del__(self) -> None:
        # A reply that arrives after its caller's deadline may be dropped in many places, but is finalized in one.
        if self._manifest is not None and not fork.forked():  # then it is the parent's
            with contextlib.suppress(Exception):
                self._leave(self._lane.discard, self._peer, self._manifest[3])


def owned(body: Encoded) -> Encoded:
    """The body with each tensor in memory of its own, apart from a lane's memory and from the other tensors.

    Copies only tensors that share memory.
    """
    own = [tensor if torch_internals.is_sole_owner(tensor) else copied(tensor) for tensor in body.tensors]
    return body._replace(tensors=own)


def snapshot(body: Encoded) -> Encoded:
    """Copy the tensors that this process could still change before a lane has sent them.

    A method may return a tensor of the actor's own state, and the next method must not change what the caller gets.
    A tensor with no other reference needs no copy, unless torch did not allocate its memory (``from_numpy``): then its
    holders are unknown.
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
    """Copy parts of flat uint8 tensors into their targets."""
    for tensor, its in zip(tensors, parts, strict=True):
        copy_into([part.target for part in its], [part.view_of(tensor) for part in its])


def kinds(body: Encoded, pending: Sequence[PendingTensors]) -> list[Shape]:
    """The dtypes and shapes of all tensors of a body, before any is fetched."""
    fetched: dict[int, Shape] = {}
    for fetching in pending:
        positions, shapes = fetching.contents
        if positions is None:
            return shapes
        fetched.update(zip(positions, shapes, strict=True))
    stayed = iter([(tensor.dtype, tuple(tensor.shape)) for tensor in body.tensors])
    total = len(fetched) + len(body.tensors)
    return [fetched[place] if place in fetched else next(stayed) for place in range(total)]


def filled(body: Encoded, pending: Sequence[PendingTensors], into: Sequence[torch.Tensor | None]) -> Encoded:
    """As ``joined``, with each tensor copied into the tensor of ``into`` in its place, if there is one."""
    body = joined(body, pending, into)
    return body._replace(tensors=copy_into(into, body.tensors))  # those that stayed in the message


def joined(
    body: Encoded, pending: Sequence[PendingTensors], into: Sequence[torch.Tensor | None] | None = None
) -> Encoded:
    """The body with all its tensors in their places. Blocks while they are fetched."""
    if not pending:
        return body
    fetched: dict[int, torch.Tensor] = {}
    for fetching in pending:
        positions, tensors = fetching.unpack(into)
        if positions is None:
            return body._replace(tensors=tensors)
        fetched.update(zip(positions, tensors, strict=True))
    stayed = iter(body.tensors)
    total = len(fetched) + len(body.tensors)
    return body._replace(tensors=[fetched[place] if place in fetched else next(stayed) for place in range(total)])


#: From this many tensors on it pays to check whether they are all alike, in loops that run in C.
_MANY = 8
_is_cpu, _is_cuda, _dtype, _shape = (attrgetter(name) for name in ("is_cpu", "is_cuda", "dtype", "shape"))


def _by_kind(tensors: Sequence[torch.Tensor], devices: Mapping[Any, Device]) -> dict[str, Sequence[int]]:
    """Positions of tensors by the type of the device that they arrive on."""
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
    """The dtypes and shapes of tensors; short if they are alike."""
    if len(tensors) >= _MANY and len(set(map(_dtype, tensors))) == 1:
        shapes = list(map(_shape, tensors))
        if shapes.count(shapes[0]) == len(shapes):
            return ((DTYPE_NAMES[tensors[0].dtype], tuple(shapes[0]), len(shapes)),)
    if not tensors:
        return ()
    runs: list[tuple[str, tuple[int, ...], int]] = []
    dtype, shape, count = tensors[0].dtype, tensors[0].shape, 0
    for its, extents in zip(map(_dtype, tensors), map(_shape, tensors), strict=True):
        if its is dtype and extents == shape:
            count += 1
        else:
            runs.append((DTYPE_NAMES[dtype], tuple(shape), count))
            dtype, shape, count = its, extents, 1
    return (*runs, (DTYPE_NAMES[dtype], tuple(shape), count))
