"""Pulls of shards: from several publishers, or into parts of global tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.errors import ConfigurationError, NotFound, PeerLost
from raytorchrpc.patterns.handle import Handle
from raytorchrpc.patterns.weights.match import KnownLayout, LayoutMatch, Selection, writable_device_type
from raytorchrpc.patterns.weights.plan import Request, Row, plan, region_of
from raytorchrpc.patterns.weights.publishers import Committed
from raytorchrpc.patterns.weights.pull import Pull
from raytorchrpc.patterns.weights.shards import Shard
from raytorchrpc.patterns.weights.snapshots import Region


class _Bring(NamedTuple):
    """One region that a pull brings."""

    place: tuple[int, str | None]  # see ``Selection.places``
    region: Region
    target: str
    begin: tuple[int, ...] | None
    """In the model's tensor; None: it is all of it."""


class Planned(NamedTuple):
    """What pulls of a model bring, as long as the layouts stay the same."""

    asked: Any
    """What the model wants; see ``_signature``."""
    near: tuple[int, ...]
    layouts: tuple[KnownLayout, ...]
    """Of each source."""
    brings: list[list[_Bring]]
    """From each source."""

    def selection(self, source: int, targets: Mapping[str, Shard]) -> Selection:
        """What comes from one source, into the model's tensors as they are now."""
        brings = self.brings[source]
        views = [_view(targets[bring.target].tensor, bring) for bring in brings]
        return Selection([bring.place for bring in brings], views, [bring.region for bring in brings])


def _view(tensor: torch.Tensor, bring: _Bring) -> torch.Tensor:
    if bring.begin is None:
        return tensor
    strides = tensor.stride()
    begin = sum(first * stride for first, stride in zip(bring.begin, strides, strict=True))
    return tensor.as_strided(bring.region[1], strides, tensor.storage_offset() + begin)


def make_plan(request: Request, layouts: Sequence[KnownLayout], near: Sequence[int], turn: int) -> Planned:
    """See ``plan.plan``."""
    rows = [known.rows for known in layouts]
    moves = plan(request, rows, near, turn)
    brings = [
        [_bring(move, its[move.place], request.targets[move.target]) for move in wanted]
        for its, wanted in zip(rows, moves, strict=True)
    ]
    return Planned(_signature(request), tuple(near), tuple(layouts), brings)


def _bring(move: Any, row: Row, target: Shard) -> _Bring:
    offset, strides = region_of(row[2], move.source_begin, move.shape)
    begin = None if move.shape == tuple(target.tensor.shape) else move.target_begin
    return _Bring((move.place, move.dtype), (offset, move.shape, strides), move.target, begin)


def _signature(request: Request) -> Any:
    targets = [
        (name, shard.tensor.dtype, shard.tensor.shape, shard.global_shape, shard.offset)
        for name, shard in request.targets.items()
    ]
    return targets, {name: list(parts) for name, parts in request.mapping.items()}, request.convert, request.strict


class _SourceMatch(LayoutMatch):
    """What a pull brings from one source, by a plan."""

    def __init__(self, store: str, known: KnownLayout | None, planned: Selection | None) -> None:
        super().__init__(store, known)
        self.targets = {}
        self.follow(planned)

    def follow(self, planned: Selection | None) -> None:
        """Bring this; None: nothing is planned yet."""
        self._planned = planned
        self.device_type = writable_device_type(planned.targets) if planned is not None and planned.targets else None

    @property
    def likely_device_type(self) -> str | None:
        """None also if the response to the lease request cannot bring the tensors: they have to be converted first."""
        planned = self._planned
        if planned is None or any(name is not None for _, name in planned.places):
            return None
        return self.device_type

    @property
    def is_planned(self) -> bool:
        return self._planned is not None

    def set_lease(self, lease: Any) -> None:
        super().set_lease(lease)
        if lease.rows is not None:  # the plan was for another layout
            self.follow(None)

    def selection(self) -> Selection:
        assert self._planned is not None
        return self._planned.only(self.leased.changed)


class ShardedPull:
    """One pull into a model, by the thread that uses it."""

    def __init__(
        self,
        local: LocalMember,
        request: Request,
        until: float,
        look: Callable[[int | None], Committed | None],
        sources: Callable[[Committed | None], Sequence[Handle]],
        wait: Callable[[int, float], Any],
    ) -> None:
        """
        Args:
            look: the version to pull; None if the home alone decides.
            sources: handles of the members that have it.
            wait: ``wait(version, seconds)`` blocks until that version or a newer one is there.
        """
        self._local, self._request, self._until = local, request, until
        self._look, self._sources, self._wait = look, sources, wait
        self.planned: Planned | None = None
        """The plan of the pull before, then of this one."""

    def bring(self, version: int | None, since: int | None) -> int:
        """Bring a version into the model; returns its number. See ``WeightStore.pull``."""
        lost: dict[str, PeerLost] = {}
        while True:
            committed = self._look(version)
            if committed is not None and committed.version == since:
                return committed.version
            chosen = version if committed is None else committed.version
            try:
                return self._bring(chosen, since, self._sources(committed), lost)
            except NotFound:
                left = self._until - time.monotonic()
                if version is not None or committed is None or left <= 0:
                    raise
                # A publisher has retired or lost it: only a newer one helps.
                self._wait(committed.version + 1, left)
            except PeerLost as error:
                if error.peer in lost:
                    raise
                lost[error.peer] = error  # others may have the same
            since = None

    def _bring(
        self, version: int | None, since: int | None, sources: Sequence[Handle], lost: Mapping[str, PeerLost]
    ) -> int:
        near = tuple(self._distance(source, lost) for source in sources)
        planned = self.planned
        if planned is not None and (planned.near, planned.asked) != (near, _signature(self._request)):
            planned = None
        matches: list[_SourceMatch] = []
        pulls: list[tuple[int, Pull]] = []
        try:
            for number, source in enumerate(sources):
                known = planned.layouts[number] if planned is not None else None
                selection = planned.selection(number, self._request.targets) if planned is not None else None
                matches.append(_SourceMatch(self._request.store, known, selection))
                if near[number] < _LOST and (planned is None or planned.brings[number]):
                    pulls.append((number, Pull(source, self._local, matches[number], self._until)))
            found = version or 0
            for _, pull in pulls:
                found = pull.lease(version, since, True, self._wait).version
                if version is None and found == since:
                    return found
                version = found
            if not all(match.is_planned for match in matches):
                if planned is not None:  # some layout is another now; the others may be, too
                    self.planned = None
                    return self._bring(version, None, sources, lost)
                self._plan_anew(matches, near, lost)
            for number, pull in pulls:
                pull.bring(matches[number].selection())
            return found
        finally:
            for _, pull in pulls:
                pull.release()

    def _plan_anew(self, matches: Sequence[_SourceMatch], near: tuple[int, ...], lost: Mapping[str, PeerLost]) -> None:
        none = KnownLayout(0, [], [])
        layouts = [none if match.known is None or match.lease is None else match.known for match in matches]
        try:
            self.planned = make_plan(self._request, layouts, near, self._local.me.rank)
        except ConfigurationError:
            if lost:
                raise next(iter(lost.values())) from None
            raise
        for number, match in enumerate(matches):
            match.filled = False
            match.follow(self.planned.selection(number, self._request.targets))

    def _distance(self, source: Handle, lost: Mapping[str, PeerLost]) -> int:
        if source.home in lost:
            return _LOST
        route = self._local.peers.route(source.home)
        if route.member.rank == self._local.me.rank:
            return 0
        return 1 if route.member.node_id == self._local.me.node_id else 2


#: The distance of a source that is gone.
_LOST = 9
