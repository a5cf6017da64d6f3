"""Versions of weights: what readers are told of one, waits for one, and which this process has pulled."""

from __future__ import annotations

import operator
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, overload

from raytorchrpc.calls.member import LocalMember
from raytorchrpc.calls.server.services import DeferredReply
from raytorchrpc.errors import ConfigurationError, Empty
from raytorchrpc.patterns.handle import give_up_at
from raytorchrpc.patterns.weights.plan import PlaceInWhole, Row
from raytorchrpc.patterns.weights.snapshots import TensorSpec
from raytorchrpc.tensors.dtypes import DTYPE_NAMES

#: How many pulled versions a process remembers, the last ones.
_REMEMBERED = 1024


@overload
def checked_version(name: str, value: int) -> int: ...
@overload
def checked_version(name: str, value: int | None) -> int | None: ...
def checked_version(name: str, value: Any) -> int | None:
    """Return an argument that has to be None or a whole number, as an int. Raises ConfigurationError."""
    if value is None or type(value) is int:
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ConfigurationError(f"{name}= has to be the number of a version, not {value!r}") from None


class VersionLease(NamedTuple):
    """What a home tells a reader before it pulls."""

    version: int
    lease: int  # keeps the version until it is released. 0: the reader has this version
    layout: int
    rows: list[Row] | None  # None: the reader knows this layout
    changed: list[int] | None  # places of the tensors that differ from the version that the reader has; None: all
    turn: tuple[int | None, bool] | None = None  # others of its host pull the same: see ``RelayPlan.ask``
    deltas: list[tuple[int, int]] | None = None  # of what changed: see ``Deltas.counts``
    ties: Sequence[tuple[int, int]] = ()  # places of tensors that were published as one: see ``ties_of``


class Layout(NamedTuple):
    """The tensors that a version has."""

    number: int
    names: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    places: tuple[PlaceInWhole | None, ...]
    """Of shards, in their global tensors."""

    @property
    def rows(self) -> list[Row]:
        rows = zip(self.names, self.specs, self.places, strict=True)
        return [(name, DTYPE_NAMES[spec.dtype], spec.shape, place) for name, spec, place in rows]


class VersionWaits:
    """Waits for versions. Thread-safe."""

    instance_id: int

    def __init__(self, local: LocalMember) -> None:
        self._local = local
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, DeferredReply]] = []
        self._broken: Exception | None = None

    def _newest(self) -> int:
        """The newest version; 0 before the first."""
        raise NotImplementedError

    def _check_open(self) -> None:
        if self._broken is not None:
            raise self._broken

    def wait(self, version: int, until: float) -> int | DeferredReply:
        """Return the newest version as soon as it is at least ``version``; 0 at ``until``, or raise Empty."""
        with self._lock:
            self._check_open()
            newest = self._newest()
            if newest >= version or until <= time.monotonic():
                return newest if newest >= version else 0
            reply = DeferredReply()
            waits = version, reply
            self._waiting.append(waits)

        def give_up() -> None:
            with self._lock:
                if waits in self._waiting:
                    self._waiting.remove(waits)
                error = self._not_in_time(version)
            reply.settle(0, error)

        return give_up_at(self._local.deadlines, until, reply, give_up)

    def _not_in_time(self, version: int) -> Empty | None:
        """What a wait that ended raises; None: it returns 0. The caller holds the lock."""
        return None

    def _due(self, version: int) -> list[DeferredReply]:
        """Take the waits that end with this version. The caller holds the lock, and settles them without it."""
        due = [reply for wanted, reply in self._waiting if wanted <= version]
        self._waiting = [(wanted, reply) for wanted, reply in self._waiting if wanted > version]
        return due

    def close(self, error: Exception) -> None:
        """See ``Served``."""
        with self._lock:
            self._broken = error
            waiting, self._waiting = self._waiting, []
        for _, reply in waiting:
            reply.settle(0, error)


class PulledVersions:
    """The versions that this process has pulled, by the instance of their store. Thread-safe.

    A version number alone does not identify weights: another store of the same name has the same numbers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: OrderedDict[tuple[int, int, tuple[str, ...], Hashable], None] = OrderedDict()
        self.failures = 0
        """How many pulls have failed and may have left a model with tensors of several versions."""

    def add(
        self, instance_id: int, version: int, failures: int, only: tuple[str, ...] = (), form: Hashable = None
    ) -> None:
        """Note that a version has been pulled.

        Args:
            failures: when the pull began; no effect if there are more now. Otherwise it would count for the model of
                another thread, whose pull has failed meanwhile.
            only: the globs of its tensors; none for all.
            form: see ``Options.form``.
        """
        with self._lock:
            if failures != self.failures:
                return
            self._versions[instance_id, version, only, form] = None
            self._versions.move_to_end((instance_id, version, only, form))
            if len(self._versions) > _REMEMBERED:
                self._versions.popitem(last=False)

    def has(self, instance_id: int, version: int, only: tuple[str, ...] = (), form: Hashable = None) -> bool:
        """Whether a model of this process may have this version in this form, or these tensors of it."""
        with self._lock:
            pulled = self._versions
            return (instance_id, version, (), form) in pulled or (instance_id, version, only, form) in pulled

    def forget(self, instance_id: int) -> None:
        """Forget a store's versions: a pull has failed and may have left a model with tensors of several versions."""
        with self._lock:
            self.failures += 1
            for pulled in [pulled for pulled in self._versions if pulled[0] == instance_id]:
                del self._versions[pulled]
