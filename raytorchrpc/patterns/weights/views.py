"""Views of a version: its tensors where they were published, without a copy, kept as long as one of them is used."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from raytorchrpc.calls.client.future import Future
from raytorchrpc.calls.counters import PullCounter
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import OFTEN, CallOptions
from raytorchrpc.errors import ConfigurationError, RayTorchRpcError, RpcTimeout
from raytorchrpc.lanes.base import in_place
from raytorchrpc.patterns.handle import Handle, run
from raytorchrpc.patterns.weights.names import selected
from raytorchrpc.patterns.weights.published import HOLD, RELEASE, lease_is_valid_until
from raytorchrpc.patterns.weights.publishers import publishers_of
from raytorchrpc.patterns.weights.source_lease import Requests, SourceLease
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
    at_home, requests = store._is_home(local), Requests(local, until, PullCounter((store.name, store.home)))
    while True:
        lease = SourceLease(store, requests, None, "cpu")
        lease.ask(version, None)
        if (given := lease.answer()) is not None:
            break
        wait(1, requests.seconds_left())
    address = *store._address, given.lease
    release: Callable[[], object] = partial(_release, local, store.home, address)
    if at_home:
        release = partial(store._object(local).pool.release, given.lease)
    try:
        if at_home:
            pieces, is_copy = lease.snapshot().memory.readable, False
            flat = _read_only(local, pieces[0]) if pieces and pieces[0].is_cpu else None
        else:
            pieces, is_copy = lease.memory.view()
            flat = pieces[0] if pieces else None
        if flat is None or lease.layout is None:
            release()
            return (
                f"its tensors are not all in CPU memory that {store.home!r} shares: to read those of a GPU there, pull "
                f"them into tensors on that GPU"
            )
        if not at_home and not is_copy:  # from now on the lease has no end
            run(store._request(local, HOLD, address, requests.seconds_left()))
            if time.monotonic() > lease_is_valid_until(until):
                raise RpcTimeout(f"a view of {store.kind} {store.name!r} took much longer than its timeout; try again")
        rows = lease.layout.rows
        names = set(selected(globs, [name for name, *_ in rows], store.name))
        with torch.inference_mode(False):
            flat, offsets = _tracked(flat, partial(local.cleanup.leave, release)), lease.layout.offsets(None)
            tensors = {
                name: view_at(flat, offsets[place], (DTYPES[dtype], shape))
                for place, (name, dtype, shape, _) in enumerate(rows)
                if name in names
            }
    except BaseException:
        release()
        raise
    if not is_copy and not at_home:
        local.weights.viewed((store.name, store.home))
    return WeightView(store.name, given.version, tensors, "they came in a message" if is_copy else None)


def _obstacle(store: Handle, local: LocalMember) -> str | None:
    """Why this process cannot read the home's memory."""
    if publishers_of(store) is not None:
        return "several members publish it"
    if store._is_home(local):
        return None
    route = local.peers.route(store.home)
    if route.member.node_id != local.me.node_id:
        return f"{store.home!r} is on another host"
    if route.beside.get("cpu") not in [lane.name for lane in in_place(local.tensor_lanes)]:
        return f"no lane reads the memory of {store.home!r} in place"
    return None


def _read_only(local: LocalMember, lent: torch.Tensor) -> torch.Tensor | None:
    """See memory that this process lends as its peers see it."""
    for lane in in_place(local.tensor_lanes):
        if "cpu" in lane.capabilities.devices:
            descriptor = lane.export([lent], local.me.name, {}).descriptor
            if (seen := lane.view(local.me.name, descriptor, [(torch.uint8, (lent.nbytes,))])) is not None:
                return seen[0]
    return None


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
