"""One pull from one home: leases a version there, and brings its tensors from there or from a member of this host."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from raytorchrpc.calls.future import Future
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.options import CallOptions
from raytorchrpc.calls.receive_into import Spread
from raytorchrpc.errors import LaneUnavailable, NotFound, PeerLost, RayTorchRpcError, RpcTimeout
from raytorchrpc.patterns.handle import Handle, run
from raytorchrpc.patterns.weights import published
from raytorchrpc.patterns.weights.match import KnownLayout, LayoutMatch, Selection
from raytorchrpc.patterns.weights.published import RelayedWeights, lease_is_valid_until
from raytorchrpc.patterns.weights.relays import HOME, LEAD
from raytorchrpc.patterns.weights.versions import VersionLease

#: Most bytes of one message: tensors that lanes bring in memory of their own need this much of it.
MESSAGE_BYTES = 256 << 20
#: Smaller pulls do not use a relay: asking which member has it takes as long (bytes).
_WORTH_RELAYING = 1 << 20

#: The address of the object that serves tensors: a store's, or that of a member's relayed weights.
Address = tuple[str, str, int | None]


class Pull:
    """One pull of a version into a model, by the thread that uses it."""

    def __init__(self, store: Handle, local: LocalMember, match: LayoutMatch, until: float) -> None:
        """``store``: bound. ``until``: when the pull has to end (``time.monotonic``)."""
        self._store, self._local, self._match, self._until = store, local, match, until
        self.home, self._address = store.home, store._address
        self._is_home = store._is_home(local)

    def _left(self, least: float = 0.0) -> float:
        return max(least, self._until - time.monotonic())

    # --- the lease -----------------------------------------------------------------------------------------------

    def lease(
        self, version: int | None, since: int | None, in_place: bool, wait: Callable[[int, float], Any]
    ) -> VersionLease:
        """Lease a version for this pull. ``wait(1, seconds)`` blocks until the first one is published.

        ``in_place``: if the tensors can be read in place, the same request brings them.
        """
        match = self._match
        while True:
            left = self._left()
            args = (version, since, 0 if match.known is None else match.known.number)
            if self._is_home:
                found = self._store._object(self._local).lease(self._local.me.rank, *args, None)
                if found is not None:
                    match.set_lease(found)
            else:
                device_type = None
                if in_place and not match.converts:
                    device_type = self._readable_in_place(self.home, match.likely_device_type)
                answer = Spread(partial(match.parts_of_answer, device_type))
                request = (*self._address, *args, left, device_type)
                sent = self._store._send(self._local, published.LEASE, request, left, caller_waits=True, into=answer)
                response = self._store._response(sent)
                del sent  # see _response
                match.match_ahead()
                run(response)
            _ = match.targets  # raises if the model is invalid, though there may be nothing to pull
            if match.lease is not None:
                return match.lease
            wait(1, left)

    def _check_lease(self) -> None:
        """Raise RpcTimeout if the lease may have ended before the tensors were copied."""
        if time.monotonic() > lease_is_valid_until(self._until):
            raise RpcTimeout(
                f"a pull of {self._store.kind} {self._store.name!r} was suspended, or took much longer than its "
                f"timeout, and {self.home!r} has ended its lease: the model may have tensors of two versions; "
                f"pull again"
            )

    def release(self) -> None:
        """End the lease. Does not wait for the home's answer."""
        lease = self._match.lease
        if lease is not None and lease.lease:
            if self._is_home:
                self._store._object(self._local).pool.release(lease.lease)
            else:
                self._notify(self.home, published.RELEASE, (*self._address, lease.lease))

    # --- moving tensors ------------------------------------------------------------------------------------------

    def bring(self, selection: Selection) -> None:
        """Bring these tensors into the model, unless the lease request has brought them."""
        if selection.targets:
            if not self._match.filled:
                self._fetch(selection)
            self._check_lease()

    def _fetch(self, selection: Selection) -> None:
        lease, layout = self._match.leased, self._match.layout
        if self._is_home:
            snapshot = self._store._object(self._local).pool.leased(lease.lease)
            snapshot.copy_into(selection.targets, selection.places, selection.regions)
            return
        if self._uses_relay(selection):
            left, what = self._left(0.001), (lease.version, selection.signature(lease.layout))
            advice = run(self._store._request(self._local, published.ADVISE, (*self._address, what, left / 2), left))
            if advice == LEAD:
                self._lead(selection, what)
                return
            if advice != HOME and self._follow(advice, selection, what):
                return
        self._fetch_from(self.home, self._address, lease.lease, selection, layout)

    def _uses_relay(self, selection: Selection) -> bool:
        """Whether other members of this host may pull the same from another host."""
        if self._is_near(self.home) or sum(target.nbytes for target in selection.targets) < _WORTH_RELAYING:
            return False
        return sum(self._is_near(route.member.rank) for route in self._local.peers.routes) > 1

    def _lead(self, selection: Selection, what: tuple[int, str]) -> None:
        """Pull for all members of this host."""
        local, layout = self._local, self._match.layout
        homes = [local.peers.route(home).member.rank for home in self._store._lives_with]
        relayed = local.services.open(published.RELAYED, self._relayed_name, lambda: RelayedWeights(local, homes))
        done = False
        try:
            specs = selection.specs(layout.rows)
            memory = relayed.pool.memory(specs)
            shared = selection._replace(targets=memory.tensors)
            self._fetch_from(self.home, self._address, self._match.leased.lease, shared, layout)
            self._check_lease()
            version, signature = what
            relayed.add(signature, version, specs, memory)
            done = True
        finally:
            self._notify(self.home, published.REPORT, (*self._address, what, local.me.rank, done))
        lease = relayed.lease(local.me.rank, signature, version, None)
        try:
            relayed.pool.leased(lease).copy_into(selection.targets, selection.as_relayed().places)
        finally:
            relayed.pool.release(lease)

    def _follow(self, leader: int, selection: Selection, what: tuple[int, str]) -> bool:
        """Pull from the member that leads on this host; whether that worked."""
        address: Address = (published.RELAYED, self._relayed_name, None)
        version, signature = what
        left = self._left(0.001)
        try:
            lease: int = self._call(leader, published.LEASE_RELAYED, (*address, signature, version, left), left).wait()
            if not lease:
                return False
            layout = KnownLayout.of(self._match.leased.layout, selection.rows(self._match.layout.rows))
            try:
                self._fetch_from(leader, address, lease, selection.as_relayed(), layout)
            finally:
                self._notify(leader, published.RELEASE, (*address, lease))
        except (PeerLost, NotFound, LaneUnavailable):
            self._notify(self.home, published.REPORT, (*self._address, what, leader, False))
            return False
        return True

    def _fetch_from(self, source: Any, address: Address, lease: int, selection: Selection, layout: KnownLayout) -> None:
        """Bring tensors from a member, which has them in this layout: in place if possible, else by messages."""

        def request(service: str, *args: Any, into: Any) -> Any:
            left = self._left(0.001)
            return self._call(source, service, (*address, lease, *args), left, into=into, caller_waits=True).wait()

        device_type = self._readable_in_place(source, self._match.device_type)
        if device_type is not None:
            parts = selection.parts(layout)
            into = Spread(lambda pieces: parts if pieces else None)
            if request(published.PIECES, selection.places, device_type, into=into):
                return
        for message in selection.messages(MESSAGE_BYTES):  # each is copied out of the lane's memory before the next
            request(published.TENSORS, message.places, message.regions, into=message.targets)

    # --- members -------------------------------------------------------------------------------------------------

    @property
    def _relayed_name(self) -> str:
        """Members relay the weights of this instance of the store under it."""
        return f"{self._store.name} {self._address[2]}"

    def _readable_in_place(self, source: Any, device_type: str | None) -> str | None:
        """Return ``device_type`` if a lane can read parts of the source's memory on such devices in place."""
        if device_type is None or not self._is_near(source):
            return None
        lane = self._local.tensor_lanes.get(self._local.peers.route(source).beside.get(device_type, ""))
        return device_type if lane is not None and lane.capabilities.in_parts else None

    def _is_near(self, member: Any) -> bool:
        """Whether a member is on this node."""
        peers = self._local.peers
        return peers.route(member).member.node_id == peers.route(self._local.me.rank).member.node_id

    def _call(
        self, target: Any, service: str, args: tuple[Any, ...], timeout: float | None, **options: Any
    ) -> Future[Any]:
        return Future(self._local.outgoing.call(target, service, args, {}, CallOptions(timeout, retry=0, **options)))

    def _notify(self, target: Any, service: str, args: tuple[Any, ...]) -> None:
        """Send a request without waiting for its answer; ignores errors."""
        with suppress(RayTorchRpcError):
            self._call(target, service, args, None)
