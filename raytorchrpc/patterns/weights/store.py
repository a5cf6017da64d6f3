"""A model's weights, published by one member and pulled by others into models of their own."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from raytorchrpc._compat import torch_internals
from raytorchrpc.calls.current import process_member
from raytorchrpc.calls.future import Future
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.receive_into import Spread
from raytorchrpc.calls.services import DeferredReply
from raytorchrpc.errors import (
    ConfigurationError,
    Empty,
    LaneUnavailable,
    NotFound,
    PeerLost,
    RayTorchRpcError,
    RpcTimeout,
)
from raytorchrpc.patterns.handle import Handle, Steps, membership, run
from raytorchrpc.patterns.weights.published import Look, Weights, held_until
from raytorchrpc.patterns.weights.pull import Carry, Known, Model, Pull, Pulled, Wanted, tensors_of
from raytorchrpc.patterns.weights.relays import HOME, LEAD
from raytorchrpc.patterns.weights.services import (
    ADVISE,
    KIND,
    LOOK,
    LOOK_HERE,
    PULL,
    PULLED,
    RELEASE,
    WAIT,
    WHOLE,
    mirror_of,
    weights_of,
)
from raytorchrpc.patterns.weights.snapshots import Kind
from raytorchrpc.process import threads

#: Of one message (bytes): lanes that bring tensors in memory of their own need no more of it than this.
_CHUNK_BYTES = 256 << 20
#: Less than this is not passed on within a host: asking who has it takes as long (bytes).
_WORTH_PASSING_ON = 1 << 20

_pulled = Pulled()


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
    if this store has ended: the home was restarted, or the group formed again, since this handle was first used. The
    handle is picklable; thread-safe.
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
        self._known_layout: Known | None = None

    # --- publishing ----------------------------------------------------------------------------------------------

    def publish(self, model: Model, version: int | None = None) -> int:
        """Make a copy of these tensors the newest version; returns its number.

        ``version``: any that is higher than the last; None: the next. Blocks while CPU tensors are copied; copies on a
        GPU are queued on this thread's current stream, and with ``track`` it waits for the comparison. Never waits for
        those who pull. ConfigurationError outside the home, and for what is no dense tensor.
        """
        local = process_member()
        return self._at_home(local).publish(tensors_of(model, self._name), version)

    def broadcast(self, carry: Carry, version: int | None = None) -> int:
        """At the home: hand a version (None: the newest) to ``carry``, while those who pull call theirs.

        ``carry(version, tensors)`` gets the published copy in the order of publishing, for instance to broadcast it in
        a process group; it must have been sent when this returns. Returns the version. Blocks as ``carry`` does.
        """
        local = process_member()
        weights = self._at_home(local)
        look = weights.look(local.me.rank, version, None, 0, None)
        if look is None:
            raise NotFound(f"nothing has been published to {self.kind} {self._name!r} yet")
        try:
            snapshot = weights.shelf.leased(look.lease)
            carry(look.version, snapshot.tensors([(place, None) for place in range(len(snapshot.kinds))]))
        finally:
            weights.shelf.release(look.lease)
        return look.version

    def _at_home(self, local: LocalMember) -> Weights:
        if run(self._ready(local)) is not None:
            raise ConfigurationError(
                f"{self.kind} {self._name!r} lives in member {self._home!r}: publish there, or make one here"
            )
        return self._here(local)

    def _here(self, local: LocalMember) -> Weights:
        return weights_of(local, self._name, self._life)

    # --- pulling -------------------------------------------------------------------------------------------------

    def version(self) -> int:
        """The newest version; 0 if there is none. Blocks for an answer of the home's."""
        return self._wait(0, None)

    def wait(self, version: int = 1, timeout: float | None = None) -> int:
        """Block until that version or a newer one is there; returns the newest. Empty after ``timeout`` seconds."""
        newest = self._wait(version, timeout)
        if newest < version:
            raise Empty(f"version {version} was not published to {self.kind} {self._name!r} in time")
        return newest

    async def await_version(self, version: int = 1, timeout: float | None = None) -> int:
        """As ``wait``, for coroutines; a thread waits."""
        return await threads.in_thread(self.wait, version, timeout)

    def _wait(self, version: int, timeout: float | None) -> int:
        return int(run(self._wait_steps(version, timeout)))

    def _wait_steps(self, version: int, timeout: float | None) -> Steps[int]:
        local, wait_s = yield from membership(timeout)
        until = time.monotonic() + wait_s
        route = yield from self._ready(local, wait_s)
        if route is not None:
            left = max(0.0, until - time.monotonic())
            asked = (self._name, self._life, version, left)
            return (yield from self._ask(local, WAIT, asked, left))  # type: ignore[no-any-return]
        found = self._here(local).wait(version, until, local.deadlines.at)
        return (yield found) if isinstance(found, DeferredReply) else found

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
            since: the version that the model has, as an earlier pull of this process from this store returned it. If
                that is still the newest, nothing is moved. In a store with ``track`` only tensors that have changed
                since are. Any other number has no effect: everything is brought.
            convert: tensors of another floating dtype than published are converted, at the home, once for each
                version and dtype: bfloat16 for half the bytes of float32. Without it that is an error.
            strict: the model's names have to be those that were published. Else those in common are pulled.
            timeout: seconds, for all of it; None: ``rpc_timeout_s``.
            carry: moves the tensors instead of the lanes, while the home calls ``broadcast``. ``since`` has no effect.

        Blocks until tensors on the CPU are filled; copies to a GPU are queued on this thread's current stream.
        Before anything is written: ConfigurationError naming what does not match (up to ten tensors), NotFound for a
        version that is not there (any more), Empty if nothing was published in time. If it fails later (PeerLost,
        RpcTimeout) the model may have tensors of two versions: pull again before it is used.
        """
        local, wait_s = run(membership(timeout))
        until = time.monotonic() + wait_s
        run(self._ready(local, wait_s))
        life = self._life or 0
        if carry is not None or (since is not None and not _pulled.has(life, since)):
            since = None
        pull = Pull(self._name, model, self._known_layout, convert, strict)
        try:
            # What is brought has no history, whoever asks for it.
            with torch_internals.autograd_context(torch_internals.NO_CONTEXT):
                look = self._look(local, pull, version, since, carry is None, until)
                if look.lease:
                    wanted = pull.wanted()
                    self._known_layout = pull.remembered()
                    if carry is None and wanted.targets:
                        if not pull.filled:
                            self._fetch(local, pull, look, wanted, until)
                        self._check_lease(until)
            if carry is not None:
                pull.carry_by(carry)
        except BaseException:
            if pull.look is not None:
                _pulled.forget(life)
            raise
        finally:
            if pull.look is not None and pull.look.lease:
                self._release(local, self._home, False, pull.look.lease)
        _pulled.add(life, look.version)
        return look.version

    def _check_lease(self, until: float) -> None:
        """What was read until now was kept for this pull. Raises RpcTimeout."""
        if time.monotonic() > held_until(until):
            raise RpcTimeout(
                f"a pull of {self.kind} {self._name!r} stood still, or took so much longer than its timeout that "
                f"{self._home!r} has let go of what it read: the model may have tensors of two versions; pull again"
            )

    async def apull(self, model: Model, version: int | None = None, **options: Any) -> int:
        """As ``pull``, for coroutines: on a thread, and there on the default stream of a GPU."""
        return await threads.in_thread(self.pull, model, version, **options)

    def _look(
        self, local: LocalMember, pull: Pull, version: int | None, since: int | None, at_once: bool, until: float
    ) -> Look:
        """Ask what there is. ``at_once``: the answer is to bring it, if it can be read where it is."""
        while True:
            left = max(0.0, until - time.monotonic())
            args = (version, since, 0 if pull.known is None else pull.known.number)
            if self._route(local) is None:
                look = self._here(local).look(local.me.rank, *args, None)
                if look is not None:
                    pull.told(look)
            else:
                kind = None
                if at_once and not pull.converts:
                    kind = self._kind_in_place(local, self._home, pull.likely_kind)
                answer = Spread(partial(pull.plan, kind))
                sent = self._sent(
                    local, LOOK, (self._name, self._life, *args, left, kind), left, caller_waits=True, into=answer
                )
                asked = self._answered(sent)
                del sent  # see there
                pull.foresee()
                run(asked)
            _ = pull.targets  # says what is wrong with the model, though perhaps nothing is to be pulled
            if pull.look is not None:
                return pull.look
            self.wait(1, left)

    # --- moving them ---------------------------------------------------------------------------------------------

    def _kind_in_place(self, local: LocalMember, target: Any, kind: str | None) -> str | None:
        """That kind of device, if what a member has on such is read where it is."""
        if kind is None or not self._is_near(local, target):
            return None
        lane = local.tensor_lanes.get(local.peers.route(target).beside.get(kind, ""))
        return kind if lane is not None and lane.capabilities.in_parts else None

    def _is_near(self, local: LocalMember, target: Any) -> bool:
        """Whether it is on this node."""
        return local.peers.route(target).member.node_id == local.peers.route(local.me.rank).member.node_id

    def _fetch(self, local: LocalMember, pull: Pull, look: Look, wanted: Wanted, until: float) -> None:
        assert pull.known is not None
        if self._route(local) is None:
            self._here(local).shelf.leased(look.lease).read(wanted.places, wanted.targets)
            return
        if not self._passes_on(local, wanted):
            kind = self._kind_in_place(local, self._home, pull.kind)
            self._fetch_from(local, self._home, False, look.lease, wanted, until, kind, pull.known)
            return
        signature = wanted.signature(look)
        what = (look.version, signature)
        left = max(0.001, until - time.monotonic())
        advice = run(self._ask(local, ADVISE, (self._name, self._life, what, left / 2), left))
        if advice == LEAD:
            self._lead(local, look, wanted, wanted.kinds(pull.known.rows), signature, until)
        elif advice == HOME or not self._follow(local, advice, pull, look, wanted, signature, until):
            self._fetch_from(local, self._home, False, look.lease, wanted, until)

    def _passes_on(self, local: LocalMember, wanted: Wanted) -> bool:
        """Whether others of this host may pull the same from another host."""
        if self._is_near(local, self._home) or sum(target.nbytes for target in wanted.targets) < _WORTH_PASSING_ON:
            return False
        return sum(self._is_near(local, route.member.rank) for route in local.peers.routes) > 1

    def _lead(
        self, local: LocalMember, look: Look, wanted: Wanted, kinds: list[Kind], signature: str, until: float
    ) -> None:
        """Pull for all of this host."""
        mirror = mirror_of(local, self._name, self._life, local.peers.route(self._home).member.rank)
        done = False
        try:
            flat = mirror.begin(kinds)
            self._fetch_from(local, self._home, False, look.lease, wanted._replace(targets=flat.tensors), until)
            self._check_lease(until)
            mirror.keep(signature, look.version, kinds, flat)
            done = True
        finally:
            self._tell(
                local, self._home, PULLED, (self._name, self._life, (look.version, signature), local.me.rank, done)
            )
        lease = mirror.look(local.me.rank, signature, look.version, None)
        try:
            mirror.shelf.leased(lease).read(_all_of(wanted), wanted.targets)
        finally:
            mirror.shelf.release(lease)

    def _follow(
        self, local: LocalMember, leader: int, pull: Pull, look: Look, wanted: Wanted, signature: str, until: float
    ) -> bool:
        """Pull from the one that has it for this host; whether that worked."""
        assert pull.known is not None
        left = max(0.001, until - time.monotonic())
        try:
            args = (self._name, self._life, signature, look.version, left)
            call = local.outgoing.call(leader, LOOK_HERE, args, {}, CallOptions(left, retry=0))
            lease = Future[int](call).wait()
            if not lease:
                return False
            there = Known.of(look.layout, wanted.rows(pull.known.rows))
            kind = self._kind_in_place(local, leader, pull.kind)
            try:
                wanted = wanted._replace(places=_all_of(wanted))
                self._fetch_from(local, leader, True, lease, wanted, until, kind, there)
            finally:
                self._release(local, leader, True, lease)
        except (PeerLost, NotFound, LaneUnavailable):
            self._tell(local, self._home, PULLED, (self._name, self._life, (look.version, signature), leader, False))
            return False
        return True

    def _fetch_from(
        self,
        local: LocalMember,
        target: Any,
        mirror: bool,
        lease: int,
        wanted: Wanted,
        until: float,
        kind: str | None = None,
        known: Known | None = None,
    ) -> None:
        """``kind``: of the devices at both ends, if it is read where it is; ``known``: what lies there."""

        def ask(service: str, *args: Any, into: Any) -> Any:
            left = max(0.001, until - time.monotonic())
            args = (self._name, self._life, mirror, lease, *args)
            options = CallOptions(left, into=into, caller_waits=True, retry=0)
            return Future(local.outgoing.call(target, service, args, {}, options)).wait()

        if kind is not None and known is not None:
            parts = wanted.parts(known)
            if ask(WHOLE, wanted.places, kind, into=Spread(lambda pieces: parts if pieces else None)):
                return
        for chunk in wanted.chunks(_CHUNK_BYTES):  # what has come is copied out of the lane's memory before more comes
            ask(PULL, chunk.places, into=chunk.targets)

    def _release(self, local: LocalMember, target: Any, mirror: bool, lease: int) -> None:
        if target == self._home and self._route(local) is None:
            self._here(local).shelf.release(lease)
        else:
            self._tell(local, target, RELEASE, (self._name, self._life, mirror, lease))

    def _tell(self, local: LocalMember, target: Any, service: str, args: tuple[Any, ...]) -> None:
        """Without waiting for the answer."""
        with suppress(RayTorchRpcError):
            local.outgoing.call(target, service, args, {}, CallOptions(retry=0))


def _all_of(wanted: Wanted) -> list[tuple[int, str | None]]:
    """Places in a mirror: it has what was wanted, and as it was wanted."""
    return [(number, None) for number in range(len(wanted.targets))]
