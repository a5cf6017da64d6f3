"""Counters of a member's calls."""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar, Protocol

from raytorchrpc.process.locks import Lock

#: How the names of the package's own services begin.
PACKAGES_OWN = "raytorchrpc."
#: Entries of ``PairStats.latency``: the last but one ends at 67 s.
BUCKETS = 28
_LAST = BUCKETS - 1
#: Upper ends of the latencies, in seconds, as Prometheus writes them.
_BOUNDS = (*(f"{2**place / 1e6:g}" for place in range(_LAST)), "+Inf")


@dataclass(slots=True)
class PairStats:
    """Calls from one member to another over one lane since the group was formed.

    Fields that a row adds up over, such as ``method`` in the rows of ``GroupStats`` itself, are empty.

    Attributes:
        method: a method of the peer, or an operation of one of its queues, topics or stores: ``queue batches.put``.
        bytes_out, bytes_in: bytes of pickles and tensors.
        seconds: total time from sending a call to taking its result, of the calls whose result was taken.
        latency: ``latency[n]`` counts calls that took at least 2 ** (n - 1) and less than 2 ** n microseconds, the last
            entry all longer ones.
        errors: failed calls, by the name of the exception's type.
        in_flight: calls by all lanes without an answer, in rows of ``GroupStats``.
    """

    KEY: ClassVar[tuple[str, ...]] = ("caller", "peer", "lane", "method")
    COUNTS: ClassVar[tuple[str, ...]] = ("calls", "bytes_out", "bytes_in", "seconds", "errors", "latency")

    caller: str = ""
    peer: str = ""
    lane: str = ""
    method: str = ""
    calls: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    seconds: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    latency: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    in_flight: int = 0

    @property
    def failures(self) -> int:
        """Calls that failed."""
        return sum(self.errors.values())

    @property
    def finished(self) -> int:
        """Calls whose result was taken."""
        return sum(self.latency)

    @property
    def mean_ms(self) -> float | None:
        """Mean time of the calls whose result was taken, in milliseconds; None if there are none."""
        return 1000 * self.seconds / self.finished if self.finished else None

    @property
    def buckets(self) -> dict[str, int]:
        """By seconds: calls that took at most so long, as Prometheus has them."""
        return dict(zip(_BOUNDS, accumulate(self.latency), strict=True)) if self.finished else {}


def combined(operation: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """The sum or difference of two fields of rows; of dicts only what is above 0."""
    if isinstance(a, dict):
        return dict(operation(Counter(a), Counter(b)))
    return [*map(operation, a, b)] if isinstance(a, list) else operation(a, b)


def merged(rows: Iterable[PairStats], *keep: str) -> list[PairStats]:
    """Add up the rows that are alike in the fields ``keep``, such as "peer" and "method"; the others become empty."""
    totals: dict[tuple[str, ...], PairStats] = {}
    for row in rows:
        key = tuple(getattr(row, name) for name in keep)
        if (total := totals.get(key)) is None:
            alike: dict[str, Any] = dict(zip(keep, key, strict=True))
            total = totals[key] = PairStats(**alike)
        for name in PairStats.COUNTS:
            setattr(total, name, combined(operator.add, getattr(total, name), getattr(row, name)))
    return [*totals.values()]


def counted_name(method: str, args: tuple[Any, ...]) -> str:
    """The name under which a call is counted and traced: a service names its object, as in ``queue batches.put``."""
    if not method.startswith(PACKAGES_OWN):
        return method
    operation = method.rpartition(".")[2]
    named = len(args) > 1 and type(args[0]) is type(args[1]) is str
    return f"{args[0]} {args[1]}.{operation}" if named else f"({operation})"


class CallCounters:
    """One member's counters, by peer, lane and method. Thread-safe; hot path.

    A count is read and written without a call or a jump in between. Python changes threads and runs signal handlers
    only at those, so counts need no lock.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], PairStats] = {}
        self._lock = Lock()
        """Of the errors."""

    def row(self, peer: str, lane: str, method: str) -> PairStats:
        """The counters of these calls. ``method``: see ``counted_name``."""
        row = self._rows.get((peer, lane, method))
        return row or self._rows.setdefault((peer, lane, method), PairStats("", peer, lane, method))

    def sent(self, peer: str, lane: str, method: str, size: int) -> PairStats:
        """A call was sent, with ``size`` bytes. Returns its counters, for ``finished``."""
        row = self._rows.get((peer, lane, method)) or self.row(peer, lane, method)
        row.calls += 1
        row.bytes_out += size
        return row

    def came(self, peer: str, lane: str, method: str, size: int) -> None:
        """``size`` more bytes came back, after the outcome of a call was taken."""
        self.row(peer, lane, method).bytes_in += size

    def finished(self, row: PairStats, came_by: str, size: int, seconds: float, error: BaseException | None) -> None:
        """The outcome of a call was taken; ``size`` bytes came back, over the lane ``came_by``."""
        bucket = min(int(seconds * 1e6).bit_length(), _LAST)
        row.seconds += seconds
        row.latency[bucket] += 1
        if error is not None:
            name = type(error).__name__
            with self._lock:
                row.errors[name] = row.errors.get(name, 0) + 1
        if came_by != row.lane:
            row = self.row(row.peer, came_by, row.method)
        row.bytes_in += size

    def rows(self, caller: str) -> list[PairStats]:
        """A snapshot of the counters."""
        rows = list(self._rows.values())
        return [replace(row, caller=caller, errors={**row.errors}, latency=[*row.latency]) for row in rows]


#: Identifies a store in a member's counters: its name, and the name of its home.
StoreKey = tuple[str, str]

#: Bytes served are counted for so many versions, the newest ones.
_VERSIONS = 4


@dataclass(slots=True)
class WeightStats:
    """The weights of one store in one member, which pulls, publishes or relays them. All sizes are bytes.

    Attributes:
        pulled: the version pulled last.
        arriving: that of a pull under way; 0: none.
        brought, missing: bytes of the version that arrives, else of the one pulled last: here, and still to come.
        bytes_in, bytes_out: totals of what this member has brought, and of what others have brought from it.
        served: ``bytes_out`` by version, of the newest ones.
        published: the version published last.
        published_bytes: the size of what this member has of it.
        lag: by how many versions ``pulled`` is behind the one published last; only ``Group.stats`` and
            ``raytorchrpc top`` know it.
        versions: those whose tensors this member has for others.
        held: memory for them, converted copies and room for the next version included.
        held_on: the same by device.
        mapped: memory of other members on this host that is mapped to read weights of any store; it counts in their
            ``held``, too.
        readers: ``bytes_out`` by the member that has brought them, over every lane.
        sources: what pulls that have ended brought from other members, by member, over every lane.
    """

    member: str
    store: str
    home: str
    pulled: int = 0
    arriving: int = 0
    brought: int = 0
    missing: int = 0
    pulls: int = 0
    failures: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    published: int = 0
    published_bytes: int = 0
    served: tuple[tuple[int, int], ...] = ()
    versions: tuple[int, ...] = ()
    held: int = 0
    held_on: tuple[tuple[str, int], ...] = ()
    mapped: int = 0
    readers: tuple[tuple[str, int], ...] = ()
    sources: tuple[tuple[str, int], ...] = ()
    lag: int = 0

    @property
    def served_of_newest(self) -> int:
        """Bytes that others have brought of the version published last or, in a member that relays, pulled last."""
        return dict(self.served).get(self.published or self.pulled, 0)


class PullCounter:
    """What one pull brings. The thread that pulls calls the methods; others read the attributes."""

    def __init__(self, store: StoreKey) -> None:
        self.store = store
        self.version = 0
        self.expected = self.brought = 0
        """Bytes, of this version."""
        self.in_vain = 0
        """Bytes brought before the pull began again."""
        self.sources: dict[str, int] = {}
        """Bytes by the member that they came from."""

    @property
    def total(self) -> int:
        """Bytes brought in all."""
        return self.in_vain + self.brought

    def begin_again(self) -> None:
        """Bring everything from the beginning, maybe of another version."""
        self.in_vain += self.brought
        self.expected = self.brought = 0

    def expect(self, version: int, size: int) -> None:
        """So many more bytes of this version are to come."""
        self.version = version
        self.expected += size

    def add(self, size: int, source: str | None = None) -> None:
        """So many bytes have been brought, or their copies queued on a GPU.

        ``source``: the member that they came from; None: this one.
        """
        self.brought += size
        if source is not None:
            self.sources[source] = self.sources.get(source, 0) + size


class Holder(Protocol):
    """Has memory for versions of a store."""

    @property
    def kept(self) -> tuple[int, ...]:
        """The versions whose tensors are here."""

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes of the memory for them, and of what is ready for the next, by device."""


class WeightCounters:
    """One member's counters. Thread-safe; one short lock per event."""

    def __init__(self, mapped: Callable[[str], int] = lambda peer: 0) -> None:
        """``mapped(peer)``: bytes of that member's memory that are mapped here."""
        self._mapped = mapped
        self._lock = Lock()
        self._ended: dict[StoreKey, WeightStats] = {}
        """Without memory and the pulls under way."""
        self._pulls: list[PullCounter] = []
        self._viewed: set[StoreKey] = set()
        """Whose tensors were read in their home's memory."""
        self._holders: dict[StoreKey, weakref.WeakSet[Holder]] = {}

    def _of(self, store: StoreKey) -> WeightStats:
        return self._ended.setdefault(store, WeightStats("", *store))

    def begin_pull(self, store: StoreKey) -> PullCounter:
        """A pull begins. ``end_pull`` has to follow."""
        pull = PullCounter(store)
        with self._lock:
            self._pulls.append(pull)
        return pull

    def end_pull(self, pull: PullCounter, failed: bool) -> None:
        """A pull has ended. Unless it has failed, ``pull.version`` is what it returned."""
        with self._lock:
            row = self._of(pull.store)
            self._pulls.remove(pull)
            row.bytes_in += pull.total
            for source, size in pull.sources.items():
                row.sources = _added(row.sources, source, size)
            if failed:
                row.failures += 1
                return
            row.pulls += 1
            if pull.brought or pull.version != row.pulled:
                row.pulled, row.brought = pull.version, pull.brought

    def published(self, store: StoreKey, version: int, size: int) -> None:
        """This member has published a version, of which it has ``size`` bytes."""
        with self._lock:
            row = self._of(store)
            if version <= row.published:  # another store of that name
                row.served = ()
            row.published, row.published_bytes = version, size

    def served(self, store: StoreKey, version: int, size: int, reader: str) -> None:
        """Another member has brought so many bytes of a version from here."""
        with self._lock:
            row = self._of(store)
            row.bytes_out += size
            row.readers = _added(row.readers, reader, size)
            row.served = _added(row.served, version, size)[-_VERSIONS:]

    def viewed(self, store: StoreKey) -> None:
        """This member reads a version of another one in its memory, without a copy."""
        with self._lock:
            self._of(store)
            self._viewed.add(store)

    def watch(self, store: StoreKey, holder: Holder) -> None:
        """Count the memory of ``holder`` as long as it exists."""
        with self._lock:
            self._holders.setdefault(store, weakref.WeakSet()).add(holder)

    def forget(self, store: StoreKey) -> None:
        """The store was deleted."""
        with self._lock:
            self._ended.pop(store, None)
            self._holders.pop(store, None)
            self._viewed.discard(store)

    def rows(self, member: str) -> list[WeightStats]:
        """A snapshot of the counters; nothing of a store that has only memory."""
        with self._lock:
            stores = dict.fromkeys([*self._ended, *(pull.store for pull in self._pulls)])
        return [self.row(member, store) for store in stores]

    def row(self, member: str, store: StoreKey) -> WeightStats:
        with self._lock:
            row = self._ended.get(store) or WeightStats("", *store)
            pulls = [pull for pull in self._pulls if pull.store == store]
            arriving = max((pull.version for pull in pulls), default=0)
            running = [pull for pull in pulls if pull.version == arriving]
            brought = sum(pull.brought for pull in running)
            stats = replace(
                row,
                member=member,
                arriving=arriving,
                brought=brought if arriving else row.brought,
                missing=max(0, sum(pull.expected for pull in running) - brought),
                bytes_in=row.bytes_in + sum(pull.total for pull in pulls),
            )
            holders = list(self._holders.get(store, ()))
        stats.versions = tuple(sorted({version for holder in holders for version in holder.kept}))
        held = sum((Counter(holder.held) for holder in holders), Counter[str]())
        stats.held, stats.held_on = sum(held.values()), tuple(sorted(held.items()))
        sources = {source for source, _ in stats.sources} | ({store[1]} if store in self._viewed else set())
        stats.mapped = sum(map(self._mapped, sources))
        return stats


def _added(counts: tuple[tuple[Any, int], ...], key: Any, size: int) -> tuple[tuple[Any, int], ...]:
    return tuple(sorted((Counter({key: size}) + Counter(dict(counts))).items()))
