"""Views of a version: its tensors where they were published, without a copy, kept as long as one of them is used."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from raytorchrpc.calls.client.future import Future
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import OFTEN, CallOptions
from raytorchrpc.calls.receive_into import Window
from raytorchrpc.errors import ConfigurationError, RayTorchRpcError, RpcTimeout
from raytorchrpc.lanes.base import WindowLane, windows
from raytorchrpc.patterns.handle import Handle, run
from raytorchrpc.patterns.weights.plan import KnownLayout, selected
from raytorchrpc.patterns.weights.published import HOLD, LEASE, RELEASE, VersionLease, lease_is_valid_until
from raytorchrpc.patterns.weights.publishers import publishers_of
from raytorchrpc.tensors.dtypes import DTYPES, view_at


class WeightView(Mapping[str, torch.Tensor]):
    """The tensors of one version by name, for reading. Made by ``WeightStore.view``; a context manager. Thread-safe.

    Attributes:
        version: the version's number.
        copied_because: why the tensors are copies; None: they are in the publisher's memory.
    """

    def __init__(
        self, store: str, version: int, tensors: Mapping[str, torch.Tensor], copied_because: str | None = None
    ) -> None:
        """Made by ``WeightStore.view``."""
        self.version, self.copied_because = version, copied_because
        self._store, self._tensors = store, dict(tensors)
        self._is_released = False

    def release(self) -> None:
        """Drop the tensors. The publisher keeps the version until nothing uses a tensor of it any more. Idempotent."""
        self._is_released, self._tensors = True, {}

    def __enter__(self) -> WeightView:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def _held(self) -> dict[str, torch.Tensor]:
        if self._is_released:
            raise ConfigurationError(f"this view of {self._store!r} was released: call view() again")
        return self._tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        state = "released" if self._is_released else f"{len(self)} tensors"
        copied = "" if self.copied_because is None else ", copied"
        return f"<raytorchrpc.WeightView of {self._store!r}: version {self.version}, {state}{copied}>"


class _Leased(NamedTuple):
    """A version under a lease."""

    lease: VersionLease
    flat: torch.Tensor | None  # its memory; None: this process cannot read it in place
    is_copy: bool
    release: Callable[[], object]  # ends the lease


def view_in_place(
    store: Handle,
    local: LocalMember,
    version: int | None,
    globs: tuple[str, ...],
    until: float,
    wait: Callable[[int, float], Any],
) -> WeightView | str:
    """View a version (None: the newest) where it was published, or return why this process cannot.

    ``wait``: blocks until that version or a newer one is there.
    """
    if (obstacle := _obstacle(store, local)) is not None:
        return obstacle
    lease = _lease_here if store._is_home(local) else _lease_there
    while (leased := lease(store, local, version, until)) is None:
        wait(1, max(0.0, until - time.monotonic()))
    try:
        if leased.flat is None or leased.lease.rows is None:
            leased.release()
            return (
                f"its tensors are not all in CPU memory that {store.home!r} shares: to read those of a GPU there, pull "
                f"them into tensors on that GPU"
            )
        layout = KnownLayout(leased.lease.layout, leased.lease.rows)
        wanted = set(selected(globs, [name for name, *_ in layout.rows], store.name))
        with torch.inference_mode(False):
            flat = _tracked(leased.flat, partial(local.cleanup.leave, leased.release))
            tensors = {
                name: view_at(flat, layout.offset((place, None)), (DTYPES[dtype], shape))
                for place, (name, dtype, shape, _) in enumerate(layout.rows)
                if name in wanted
            }
    except BaseException:
        leased.release()
        raise
    if not leased.is_copy and not store._is_home(local):
        local.weights.viewed((store.name, store.home))
    return WeightView(store.name, leased.lease.version, tensors, "they came in a message" if leased.is_copy else None)


def _obstacle(store: Handle, local: LocalMember) -> str | None:
    """Why this process cannot read the home's memory."""
    if publishers_of(store) is not None:
        return "several members publish it"
    if store._is_home(local):
        return None
    route = local.peers.route(store.home)
    if route.member.node_id != local.me.node_id:
        return f"{store.home!r} is on another host"
    if not isinstance(local.tensor_lanes.get(route.beside.get("cpu", "")), WindowLane):
        return f"no lane reads the memory of {store.home!r} in place"
    return None


def _lease_here(store: Handle, local: LocalMember, version: int | None, until: float) -> _Leased | None:
    weights = store._object(local)
    lease = weights.lease(local.me.rank, version, None, 0, None)
    if lease is None:
        return None
    whole, release = weights.pool.leased(lease.lease).memory.whole, partial(weights.pool.release, lease.lease)
    return _Leased(lease, None if whole is None or whole.is_cuda else _read_only(local, whole), False, release)


def _read_only(local: LocalMember, lent: torch.Tensor) -> torch.Tensor | None:
    """See memory that this process lends as its peers see it."""
    for lane in windows(local.tensor_lanes):
        if "cpu" in lane.capabilities.devices:
            descriptor = lane.export([lent], local.me.name, {}).descriptor
            if (found := lane.view(local.me.name, descriptor, [lent.nbytes])) is not None:
                return found[0]
    return None


def _lease_there(store: Handle, local: LocalMember, version: int | None, until: float) -> _Leased | None:
    def left() -> float:
        return max(0.0, until - time.monotonic())

    memory = Window()
    request = (*store._address, version, None, 0, left(), "cpu", None)
    answer = run(store._response(store._send(local, LEASE, request, left(), into=memory)))
    if answer is None:
        return None
    lease = VersionLease(*answer[0])
    pieces, are_copies = memory.view()
    flat = pieces[0] if pieces else None
    release = partial(_release, local, store.home, (*store._address, lease.lease))
    try:
        if flat is not None and not are_copies:  # from now on the lease has no end
            run(store._request(local, HOLD, (*store._address, lease.lease), left()))
            if time.monotonic() > lease_is_valid_until(until):
                raise RpcTimeout(f"a view of {store.kind} {store.name!r} took much longer than its timeout; try again")
    except BaseException:
        release()
        raise
    return _Leased(lease, flat, are_copies, release)


def _release(local: LocalMember, home: str, request: Sequence[Any]) -> None:
    with suppress(RayTorchRpcError):
        Future(local.outgoing.call(home, RELEASE, tuple(request), {}, CallOptions(retry=OFTEN)))


def _tracked(flat: torch.Tensor, on_dropped: Callable[[], object]) -> torch.Tensor:
    """View a flat tensor by a storage of its own; ``on_dropped`` is called after the last tensor on it has died."""
    array = flat.numpy()[:]
    weakref.finalize(array, _dropped, os.getpid(), on_dropped).atexit = False
    return torch.from_numpy(array)


def _dropped(pid: int, on_dropped: Callable[[], object]) -> None:
    if os.getpid() == pid:  # the parent may still use what a forked child drops
        on_dropped()
