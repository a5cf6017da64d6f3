"""Which publishers one pull uses: not those that are lost or restarted, nor those that are silent if others have it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.errors import NotFound, PeerLost
from raytorchrpc.patterns.handle import Handle
from raytorchrpc.patterns.weights.pull import Pull, Source

#: A publisher that has not answered after this time is silent: the pull tries to do without it (seconds).
PATIENCE_S = 0.25
#: The distance of a source that is not used.
UNUSED = 9


class Silent(Exception):
    """A publisher does not answer. Never leaves a pull."""


class UsableSources:
    """The sources that one pull uses, by the thread that pulls."""

    def __init__(self, local: LocalMember, silent: set[Source]) -> None:
        """``silent``: publishers that have not answered earlier pulls, and have not since; shared by all pulls."""
        self._local, self._silent = local, silent
        self._silent_here: set[Source] = set()
        self._lost: dict[Source, NotFound | PeerLost] = {}
        self._version: int | None = None
        self._several = self._waits = self._leaves_out = False
        self.asked: Source | None = None
        """The source that raises what is raised now; None: it is not one of them."""

    def begin(self, version: int | None, sources: Sequence[Handle]) -> tuple[int, ...]:
        """Begin to bring a version; returns the distance of each source."""
        if version != self._version:  # a source that has lost one version may have the next
            self._lost = {source: error for source, error in self._lost.items() if isinstance(error, PeerLost)}
        self._version, self._several, self._leaves_out = version, len(sources) > 1, False
        return tuple(map(self._distance, sources))

    def _distance(self, handle: Handle) -> int:
        source, peers = (handle.home, handle._instance_id), self._local.peers
        route = peers.route(handle.home)
        if self._several:
            try:
                peers.check_present(route)
            except PeerLost as error:
                self._lost.setdefault(source, handle._home_lost(error))
            if not self._waits and (source in self._silent_here or source in self._silent):
                self._leaves_out = True
                return UNUSED
        if source in self._lost:
            return UNUSED
        if route.member.rank == self._local.me.rank:
            return 0
        return 1 if route.member.node_id == self._local.me.node_id else 2

    def silent(self, pulls: Sequence[Pull]) -> list[Pull]:
        """Wait for the answers to requests for leases that were sent just now; returns the pulls without one.

        Waits for ``PATIENCE_S``. Does not wait at all if there is no choice: then it returns none.
        """
        if self._waits or not self._several:
            return []
        until = time.monotonic() + PATIENCE_S
        return [pull for pull in pulls if not pull.answers_within(max(0.0, until - time.monotonic()))]

    def leave_out(self, pulls: Sequence[Pull]) -> None:
        """Do without these from now on, until they have answered. Raises Silent."""
        for pull in pulls:
            self._leave_out(pull.source, pull)
        raise Silent

    def _leave_out(self, source: Source, pull: Pull) -> None:
        self._silent_here.add(source)
        self._silent.add(source)
        pull.abandon(lambda: self._silent.discard(source))

    def can_do_without(self, error: Exception) -> bool:
        """Note what a source has raised, or that the others do not have it all; whether to try once more."""
        asked, self.asked = self.asked, None
        if isinstance(error, Silent):
            self._waits = asked is None
            return True
        if asked is None or asked in self._lost or not self._several:
            return False
        assert isinstance(error, (NotFound, PeerLost))
        self._lost[asked] = error
        return True

    def peer_lost(self) -> PeerLost | None:
        """The first loss of a publisher in this pull, which may have left something written."""
        return next((error for error in self._lost.values() if isinstance(error, PeerLost)), None)

    def check_whole(self) -> None:
        """The sources in use do not have it all: raise the reason, if others were left out."""
        self.asked = None
        if self._leaves_out:
            raise Silent
        if (error := self.peer_lost() or next(iter(self._lost.values()), None)) is not None:
            raise error.with_traceback(None)
