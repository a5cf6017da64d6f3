"""A model's weights, published by one member and pulled by others into models of their own."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import torch

from raytorchrpc import execution
from raytorchrpc._published import (
    ADVISE,
    KIND,
    LOOK,
    LOOK_HERE,
    PULL,
    PULLED,
    RELEASE,
    WAIT,
    Look,
    Row,
    Weights,
    mirror_of,
    weights_of,
)
from raytorchrpc._relays import HOME, LEAD
from raytorchrpc._snapshots import Kind
from raytorchrpc.calls import Future
from raytorchrpc.errors import ConfigurationError, Empty, LaneUnavailable, NotFound, PeerLost, RayTorchRpcError
from raytorchrpc.handles import Handle, Steps, patience, run
from raytorchrpc.lanes.base import DTYPE_NAMES, DTYPES
from raytorchrpc.member import LocalMember, process_member
from raytorchrpc.services import Later

#: Of one message (bytes): lanes that bring tensors in memory of their own need no more of it than this.
_CHUNK_BYTES = 256 << 20
#: Of the first message where one GPU reads out of another's memory, which takes none in between: while it copies these,
#: the other message, with all the rest, is prepared (bytes).
_FIRST_BYTES = 128 << 20
#: Less than this is not passed on within a host: asking who has it takes as long (bytes).
_WORTH_PASSING_ON = 1 << 20

#: Moves tensors by other means than the group's lanes: ``carry(version, tensors)`` fills them at those who pull, and
#: sends them at the one that published. A collective fits.
Carry = Callable[[int, Sequence[torch.Tensor]], None]

#: A module, or its tensors by name.
Model = torch.nn.Module | Mapping[str, torch.Tensor]


class _Wanted(NamedTuple):
    """What one pull is to bring: places in the layout, as which dtypes (None: as they are), into what."""

    places: list[tuple[int, str | None]]
    targets: list[torch.Tensor]


class WeightStore(Handle):
    """The weights of one model under ascending versions, in the member that publishes them: their home.

    ``publish`` copies the tensors into memory of the store's, so the model can be trained on at once. ``pull`` brings a
    version into tensors that the caller has, in place. Within a host it reads CPU weights where they were published:
    one copy for each that pulls. Nobody ever gets tensors of two versions: what is being read stays as it is, and the
    next version goes to memory that nobody reads. The store has memory for two versions, and for as many more as are
    being read or kept.

    Where several members of another host pull the same version, one of them pulls it from the home, into memory that it
    keeps, and the others pull it from there.

    Everything is served beside the home's methods and takes no turn of theirs. PeerLost if the home is lost, NotFound
    if it was restarted since. The handle is picklable; thread-safe.
    """

    kind: ClassVar[str] = KIND

    def __init__(self, name: str, *, home: Any = None, keep: int = 1, track: bool = False) -> None:
        """The store of that name, as for ``Queue``; only its home can publish.

        Args:
            home: a member's name, rank or handle, or a Member. None: this member.
            keep: so many newest versions can be pulled.
            track: note which tensors change from version to version, so that ``pull(since=...)`` brings no others.
                ``publish`` then compares each tensor bit for bit with the version before, and copies only those that
                differ; however they were written to.
        """
        given: Any = keep
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ConfigurationError(f"keep= is how many versions can be pulled, 1 or more; not {keep!r}")
        super().__init__(name, home, (keep, bool(track)))

    def _begin(self) -> None:
        self._rows: dict[int, list[Row]] = {}

    # --- publishing ----------------------------------------------------------------------------------------------

    def publish(self, model: Model, version: int | None = None) -> int:
        """Make a copy of these tensors the newest version; returns its number.

        ``version``: any that is higher than the last; None: the next. Blocks while CPU tensors are copied; copies on a
        GPU are queued on this thread's current stream, and with ``track`` it waits for the comparison. Never waits for
        those who pull. ConfigurationError outside the home, and for what is no dense tensor.
        """
        local = process_member()
        if run(self._ready(local)) is not None:
            raise ConfigurationError(
                f"{self.kind} {self._name!r} lives in member {self._home!r}: publish there, or make one here"
            )
        return self._here(local).publish(_tensors_of(model, self), version)

    def broadcast(self, carry: Carry, version: int | None = None) -> int:
        """At the home: hand a version (None: the newest) to ``carry``, while those who pull call theirs.

        ``carry(version, tensors)`` gets the published copy in the order of publishing, for instance to broadcast it in
        a process group; it must have been sent when this returns. Returns the version. Blocks as ``carry`` does.
        """
        local = process_member()
        weights = self._here(local)
        look = weights.look(local.me.rank, version, None, 0, local.config.rpc_timeout_s)
        if look is None:
            raise NotFound(f"nothing has been published to {self.kind} {self._name!r} yet")
        try:
            snapshot = weights.shelf.leased(look.lease)
            carry(look.version, snapshot.tensors([(place, None) for place in range(len(snapshot.kinds))]))
        finally:
            weights.shelf.release(look.lease)
        return look.version

    def _here(self, local: LocalMember) -> Weights:
        return weights_of(local, self._name)

    # --- pulling -------------------------------------------------------------------------------------------------

    def version(self) -> int:
        """The newest version; 0 if there is none. Blocks for an answer of the home's."""
        return self._wait(0, 0)

    def wait(self, version: int = 1, timeout: float | None = None) -> int:
        """Block until that version or a newer one is there; returns the newest. Empty after ``timeout`` seconds."""
        newest = self._wait(version, timeout)
        if newest < version:
            raise Empty(f"version {version} was not published to {self.kind} {self._name!r} in time")
        return newest

    async def await_version(self, version: int = 1, timeout: float | None = None) -> int:
        """As ``wait``, for coroutines; a thread waits."""
        return await asyncio.to_thread(self.wait, version, timeout)

    def _wait(self, version: int, timeout: float | None) -> int:
        local = process_member()
        return int(run(self._wait_steps(local, version, patience(local, timeout))))

    def _wait_steps(self, local: LocalMember, version: int, wait_s: float) -> Steps[int]:
        road = yield from self._ready(local)
        if road is not None:
            return (yield from self._ask(local, WAIT, (self._name, version, wait_s), wait_s))  # type: ignore[no-any-return]
        found = self._here(local).wait(version, time.monotonic() + wait_s, local.alarms.at)
        return (yield found) if isinstance(found, Later) else found

    def pull(
        self,
        model: Model,
        version: int | None = None,
        *,
        since: int | None = None,
        convert: bool = False,
        strict: bool = True,
        timeout: float | None = None,
        carry: Carry | None = None,
    ) -> int:
        """Bring a version into the model's tensors, in place; returns its number.

        Args:
            model: a module, or tensors by name, on any device. Their memory is written as by ``rpc_sync(into=...)``.
            version: None: the newest; where there is none yet, the first is waited for.
            since: the version that the model has, as an earlier pull returned it. If that is still the newest, nothing
                is moved. In a store with ``track`` only tensors that have changed since are.
            convert: tensors of another floating dtype than published are converted, at the home, once for each
                version and dtype: bfloat16 for half the bytes of float32. Without it that is an error.
            strict: the model's names have to be those that were published. Else those in common are pulled.
            timeout: seconds, for all of it; None: ``rpc_timeout_s``.
            carry: moves the tensors instead of the lanes, while the home calls ``broadcast``. ``since`` has no effect.

        Blocks until tensors on the CPU are filled; copies to a GPU are queued on this thread's current stream.
        Before anything is written: ConfigurationError naming all that does not match, NotFound for a version that is
        not there (any more), Empty if nothing was published in time. If it fails later (PeerLost, RpcTimeout) the
        model may have tensors of two versions: pull again before it is used.
        """
        local = process_member()
        until = time.monotonic() + patience(local, timeout)
        run(self._ready(local))
        look = self._look(local, version, None if carry is not None else since, until)
        if not look.lease:
            return look.version
        try:
            rows = self._rows.get(look.layout) if look.rows is None else look.rows
            if rows is None:
                raise NotFound(f"{self.kind} {self._name!r} did not say what it has; pull again")
            self._rows = {look.layout: rows}
            wanted = _matched(self, _tensors_of(model, self), rows, look.changed, convert, strict)
            if carry is not None:
                _carry(carry, look.version, rows, wanted)
            elif wanted.targets:
                self._fetch(local, look, wanted, rows, until)
        finally:
            self._release(local, self._home, False, look.lease)
        return look.version

    async def apull(self, model: Model, version: int | None = None, **options: Any) -> int:
        """As ``pull``, for coroutines: on a thread, and there on the default stream of a GPU."""
        return await asyncio.to_thread(self.pull, model, version, **options)

    def _look(self, local: LocalMember, version: int | None, since: int | None, until: float) -> Look:
        while True:
            left = max(0.0, until - time.monotonic())
            args = (version, since, next(iter(self._rows), 0), left)
            if self._road(local) is None:
                look = self._here(local).look(local.me.rank, *args)
            else:
                told = run(self._ask(local, LOOK, (self._name, *args), left))
                look = None if told is None else Look(*told)
            if look is not None:
                return look
            self.wait(1, left)

    # --- moving them ---------------------------------------------------------------------------------------------

    def _fetch(self, local: LocalMember, look: Look, wanted: _Wanted, rows: list[Row], until: float) -> None:
        if self._road(local) is None:
            self._here(local).shelf.leased(look.lease).read(wanted.places, wanted.targets)
            return
        if not self._passes_on(local, wanted):
            self._fetch_from(local, self._home, False, look.lease, wanted, until)
            return
        signature = _signature(look, wanted)
        what = (look.version, signature)
        left = max(0.001, until - time.monotonic())
        advice = run(self._ask(local, ADVISE, (self._name, what, left / 2), left))
        if advice == LEAD:
            self._lead(local, look, wanted, rows, signature, until)
        elif advice == HOME or not self._follow(local, advice, look, wanted, signature, until):
            self._fetch_from(local, self._home, False, look.lease, wanted, until)

    def _passes_on(self, local: LocalMember, wanted: _Wanted) -> bool:
        """Whether others of this host may pull the same from another host."""
        home, here = local.road(self._home).member, local.road(local.me.rank).member.node_id
        if home.node_id == here or sum(target.nbytes for target in wanted.targets) < _WORTH_PASSING_ON:
            return False
        return sum(road.member.node_id == here for road in local.roads) > 1

    def _lead(
        self, local: LocalMember, look: Look, wanted: _Wanted, rows: list[Row], signature: str, until: float
    ) -> None:
        """Pull for all of this host."""
        mirror = mirror_of(local, self._name)
        kinds = [
            Kind(DTYPES[name or rows[place][1]], rows[place][2], target.device)
            for (place, name), target in zip(wanted.places, wanted.targets, strict=True)
        ]
        done = False
        try:
            flat = mirror.begin(kinds)
            self._fetch_from(local, self._home, False, look.lease, wanted._replace(targets=flat.tensors), until)
            mirror.keep(signature, look.version, kinds, flat)
            done = True
        finally:
            self._tell(local, self._home, PULLED, (self._name, (look.version, signature), local.me.rank, done))
        lease = mirror.look(local.me.rank, signature, look.version, max(0.0, until - time.monotonic()))
        try:
            places: list[tuple[int, str | None]] = [(number, None) for number in range(len(kinds))]
            mirror.shelf.leased(lease).read(places, wanted.targets)
        finally:
            mirror.shelf.release(lease)

    def _follow(
        self, local: LocalMember, leader: int, look: Look, wanted: _Wanted, signature: str, until: float
    ) -> bool:
        """Pull from the one that has it for this host; whether that worked."""
        left = max(0.001, until - time.monotonic())
        try:
            call = local.call(leader, LOOK_HERE, (self._name, signature, look.version, left), {}, left, retry=0)
            lease = Future[int](call).wait()
            if not lease:
                return False
            try:
                places: list[tuple[int, str | None]] = [(number, None) for number in range(len(wanted.targets))]
                self._fetch_from(local, leader, True, lease, wanted._replace(places=places), until)
            finally:
                self._release(local, leader, True, lease)
        except (PeerLost, NotFound, LaneUnavailable):
            self._tell(local, self._home, PULLED, (self._name, (look.version, signature), leader, False))
            return False
        return True

    def _fetch_from(
        self, local: LocalMember, target: Any, mirror: bool, lease: int, wanted: _Wanted, until: float
    ) -> None:
        # GPUs of this host copy them straight from the publisher's memory to the model's.
        in_place = local.road(target).beside.get("cuda") == "cuda_ipc" and all(one.is_cuda for one in wanted.targets)
        parts = _parts(wanted, _FIRST_BYTES if in_place else _CHUNK_BYTES, math.inf if in_place else _CHUNK_BYTES)

        def begin(part: _Wanted) -> Any:
            args = (self._name, mirror, lease, part.places)
            left = max(0.001, until - time.monotonic())
            return local.call(target, PULL, args, {}, left, into=part.targets, attended=True, retry=0)

        call = begin(parts[0])
        for part in parts[1:]:
            if in_place:
                execution.wait_serving(call, call.remaining())
                call, before = begin(part), call
                Future[Any](before).wait()
            else:  # what has come is copied out of the lane's memory before more comes
                Future[Any](call).wait()
                call = begin(part)
        Future[Any](call).wait()

    def _release(self, local: LocalMember, target: Any, mirror: bool, lease: int) -> None:
        if target == self._home and self._road(local) is None:
            self._here(local).shelf.release(lease)
        else:
            self._tell(local, target, RELEASE, (self._name, mirror, lease))

    def _tell(self, local: LocalMember, target: Any, service: str, args: tuple[Any, ...]) -> None:
        """Without waiting for the answer."""
        with suppress(RayTorchRpcError):
            local.call(target, service, args, {}, None, retry=0)


def _tensors_of(model: Any, store: WeightStore) -> dict[str, torch.Tensor]:
    if isinstance(model, torch.nn.Module):
        model = model.state_dict()
    if not isinstance(model, Mapping):
        raise ConfigurationError(f"weights are a module or tensors by name, not a {type(model).__name__}")
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.items():
        if not isinstance(tensor, torch.Tensor):
            raise ConfigurationError(
                f"{name!r} of the weights for {store.name!r} is a {type(tensor).__name__}, not a tensor: leave it out"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            raise ConfigurationError(f"{name!r} of the weights for {store.name!r} is no dense tensor with memory")
        found[str(name)] = tensor.detach()
    return found


def _matched(
    store: WeightStore,
    targets: Mapping[str, torch.Tensor],
    rows: Sequence[Row],
    changed: Sequence[int] | None,
    convert: bool,
    strict: bool,
) -> _Wanted:
    """Raises ConfigurationError, naming all that does not match."""
    wrong: list[str] = []
    wanted = _Wanted([], [])
    moved = None if changed is None else set(changed)
    for place, (name, dtype, shape) in enumerate(rows):
        target = targets.get(name)
        if target is None:
            if strict:
                wrong.append(f"the model has no {name!r}, which was published")
            continue
        its = DTYPE_NAMES[target.dtype]
        may_convert = convert and target.dtype.is_floating_point and DTYPES[dtype].is_floating_point
        if tuple(target.shape) != shape:
            wrong.append(f"{name!r} is {shape} as published, and {tuple(target.shape)} in the model")
        elif its != dtype and not may_convert:
            remedy = "" if convert else " (convert=True converts floating dtypes)"
            wrong.append(f"{name!r} is {dtype} as published, and {its} in the model{remedy}")
        elif moved is None or place in moved:
            wanted.places.append((place, None if its == dtype else its))
            wanted.targets.append(target)
    if strict:
        published = {name for name, _, _ in rows}
        wrong += [f"{name!r} of the model was not published" for name in targets if name not in published]
    if wrong:
        shown = "; ".join(wrong[:10]) + (f"; and {len(wrong) - 10} more" if len(wrong) > 10 else "")
        raise ConfigurationError(f"the weights of {store.name!r} do not fit: {shown}")
    return wanted


def _carry(carry: Carry, version: int, rows: Sequence[Row], wanted: _Wanted) -> None:
    if len(wanted.targets) != len(rows) or any(name is not None for _, name in wanted.places):
        raise ConfigurationError(
            "carry= brings all tensors as they were published: the model needs each of them, under the same dtype"
        )
    with torch.no_grad():
        carry(version, wanted.targets)


def _parts(wanted: _Wanted, first: float, others: float) -> list[_Wanted]:
    """What goes by one message each: so many bytes, or one tensor that has more."""
    parts: list[_Wanted] = []
    begin = size = 0
    for place, target in enumerate(wanted.targets):
        if place > begin and size + target.nbytes > (others if parts else first):
            parts.append(_Wanted(wanted.places[begin:place], wanted.targets[begin:place]))
            begin, size = place, 0
        size += target.nbytes
    return [*parts, _Wanted(wanted.places[begin:], wanted.targets[begin:])]


def _signature(look: Look, wanted: _Wanted) -> str:
    """The same for pulls of one version that bring the same, to the same kind of device."""
    text = repr((look.layout, wanted.places, [target.device.type for target in wanted.targets]))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
