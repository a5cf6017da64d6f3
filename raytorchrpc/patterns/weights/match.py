"""What one pull brings from one home, as its answers say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raytorchrpc.errors import NotFound
from raytorchrpc.lanes.base import Part
from raytorchrpc.patterns.weights.mismatch import check_fits, tied_mismatch
from raytorchrpc.patterns.weights.planned import Filled
from raytorchrpc.patterns.weights.selection import KnownLayout, Selection
from raytorchrpc.patterns.weights.ties import Tie
from raytorchrpc.patterns.weights.versions import VersionLease


class LayoutMatch:
    """What one pull brings from one home. The response to a lease request may fill the targets."""

    def __init__(
        self, store: str, known: KnownLayout | None, planned: Filled | None = None, to_prepare: str | None = None
    ) -> None:
        """
        Args:
            known: the layout of the pull before.
            planned: what to bring of that layout.
            to_prepare: the type of the device whose memory lanes are to prepare, while the pull is planned.
        """
        self._store, self.known, self.planned, self.to_prepare = store, known, planned, to_prepare
        self.filled = False  # the targets have their tensors already
        self.lease: VersionLease | None = None  # as soon as the home has answered; it may have to be released

    @property
    def layout(self) -> KnownLayout:
        assert self.known is not None
        return self.known

    @property
    def leased(self) -> VersionLease:
        assert self.lease is not None
        return self.lease

    @property
    def device_type(self) -> str | None:
        """The type of the device that all targets are on, if a lane can write each of them in place; else None."""
        return None if self.planned is None else self.planned.device_type

    @property
    def device_type_of_answer(self) -> str | None:
        """None also if the response to the lease request cannot bring the tensors: they have to be converted first."""
        return None if self.planned is None or self.planned.converts else self.planned.device_type

    @property
    def ties(self) -> Sequence[Tie]:
        """The pairs of published tensors that go into one tensor of the model."""
        return () if self.planned is None else self.planned.ties

    def set_lease(self, lease: VersionLease) -> None:
        """Take the answer of the home. Raises NotFound if it names an unknown layout."""
        self.lease = lease
        if lease.lease and lease.rows is not None:
            self.known, self.planned = KnownLayout.of(lease.layout, lease.rows), None  # the plan was for another one
        elif lease.lease and (self.known is None or self.known.number != lease.layout):
            raise NotFound(f"the home of {self._store!r} did not say what it has; pull again")

    def selection(self) -> Selection:
        """Return what the pull brings. There is a plan."""
        assert self.planned is not None
        return self.planned.selection.only(self.leased.changed)

    def doubtful(self) -> list[Tie]:
        """Return the pairs for one tensor of the model that the home has published as two tensors."""
        first = {place: one for one, place in self.leased.ties} if self.ties else {}
        return [tie for tie in self.ties if len({first.get(place, place) for place in tie.places}) > 1]

    def check_equal(self, ties: Sequence[Tie], equal: Sequence[bool]) -> None:
        """Raise ConfigurationError, which names them, if some of these pairs are not ``equal``."""
        both = zip(ties, equal, strict=True)
        check_fits(self._store, [tied_mismatch(*tie[1:]) for tie, is_equal in both if not is_equal])

    def bytes_of(self, selection: Selection) -> int:
        """The size of what the pull brings. Quick for all of it: to ask each tensor takes a while."""
        if self.planned is not None and selection is self.planned.selection:
            return self.planned.nbytes
        return selection.nbytes

    def parts_of(self, selection: Selection) -> Sequence[Sequence[Part]]:
        """Return which part of the home's memory goes to each target. ``selection``: see there."""
        if self.planned is not None and selection is self.planned.selection:
            return self.planned.parts
        return selection.parts(self.layout)

    def parts_of_answer(self, device_type: str | None, answer: Any) -> Sequence[Sequence[Part]] | None:
        """Take a whole response of the home, and return which parts of its tensors go where; see ``Spread``.

        ``device_type``: of the device on which the answer has all tensors in one piece, if it has. None: fill nothing.
        """
        if answer is None:
            return None
        fields, pieces = answer
        self.set_lease(VersionLease(*fields))
        if not pieces or self.device_type_of_answer != device_type or self.leased.deltas:
            return None
        selection = self.selection()
        if not selection.targets or self.doubtful():
            return None
        self.filled = True
        return self.parts_of(selection)
