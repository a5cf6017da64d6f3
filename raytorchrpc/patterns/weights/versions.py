"""The versions that a store has, by number, and who waits for them."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Generic, TypeVar

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import Empty, NotFound
from raytorchrpc.patterns.waits import ReplyLock, Waits
from raytorchrpc.tensors.kept_errors import again

KIND = "weight store"

V = TypeVar("V")


class Versions(Generic[V]):
    """What is known of each version that there is, by its number, and waits for versions. Thread-safe."""

    instance_id: int

    def __init__(self, local: LocalMember, name: str) -> None:
        """``name``: of the store."""
        self._local, self._name, self._lock = local, name, ReplyLock()
        self._waits: Waits[int] = Waits(local.deadlines, self._lock)
        self._versions: OrderedDict[int, V] = OrderedDict()
        self._broken: Exception | None = None

    def _newest(self) -> int:
        """The newest version; 0 before the first."""
        return next(reversed(self._versions), 0)

    def _find(self, version: int | None) -> V:
        """A version (None: the newest). The caller holds the lock. Raises NotFound."""
        if not self._versions:
            raise NotFound(f"version {version or 1} of {KIND} {self._name!r} is not there: none is published yet")
        chosen = self._newest() if version is None else version
        if chosen not in self._versions:
            kept = ", ".join(map(str, self._versions))
            raise NotFound(
                f"version {chosen} of {KIND} {self._name!r} is not there, or no longer (there: {kept}); a store with a "
                f"larger keep= keeps more"
            )
        return self._versions[chosen]

    def _check_open(self) -> None:
        if self._broken is not None:
            raise again(self._broken)

    def wait(self, version: int, until: float) -> int | DeferredReply:
        """Return the newest version as soon as it is at least ``version``; 0 at ``until``, or raise Empty."""
        with self._lock:
            self._check_open()
            if (newest := self._newest()) >= version:
                return newest
            if until > time.monotonic():
                return self._waits.add(version, until, lambda: (0, self._not_in_time(version)))
            if (error := self._not_in_time(version)) is not None:
                raise again(error)
            return 0

    def _not_in_time(self, version: int) -> Empty | None:
        """What a wait that ended raises; None: it returns 0. The caller holds the lock."""
        return None

    def close(self, error: Exception) -> None:
        """See ``Served``."""
        with self._lock:
            self._broken = error
            self._waits.settle(error=error)
            self._versions.clear()
