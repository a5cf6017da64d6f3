"""Counters of a member's calls."""

from __future__ import annotations

import operator
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar, Protocol, TypeVar

Row = TypeVar("Row")

#: Entries of ``PairStats.latency``: the last but one ends at 67 s.
BUCKETS = 28
_LAST = BUCKETS - 1
#: Upper ends of the latencies, in seconds, as Prometheus writes them.
_BOUNDS = (*(f"{2**place / 1e6:g}" for place in range(_LAST)), "+Inf")


@dataclass(slots=True)
class PairStats:
    """Calls from one member to another over one lane since the group was formed.

    ``method`` is a method of the peer, or an operation of one of its queues, topics or stores: ``queue batches.put``.
    Fields that a row adds up over, such as ``method`` in the rows of ``GroupStats`` itself, are empty.

    ``bytes_out`` and ``bytes_in`` count pickles and tensors. ``seconds`` is the total time from sending a call to
    taking its result, of the calls whose result was taken. ``latency[n]`` counts those that took at least 2 ** (n - 1)
    and less than 2 ** n microseconds; the last entry counts all longer ones. ``errors`` counts failed calls by the name
    of the exception's type. ``in_flight``: calls by all lanes without an answer, in rows of ``GroupStats``.
    """

    KEY: ClassVar = ("caller", "peer", "lane", "method")
    COUNTS: ClassVar = ("calls", "bytes_out", "bytes_in", "seconds", "errors", "latency")

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


def difference(now: Row, then: Row) -> Row:
    """``now`` with what its counts have grown by."""

    def grown(a: Any, b: Any) -> Any:
        if isinstance(a, dict):
            return {key: count - b.get(key, 0) for key, count in a.items() if count > b.get(key, 0)}
        return [*map(operator.sub, a, b)] if isinstance(a, list) else a - b

    row: Any = now
    counts: Row = replace(row, **{name: grown(getattr(now, name), getattr(then, name)) for name in row.COUNTS})
    return counts


def merged(rows: Iterable[PairStats], *keep: str) -> list[PairStats]:
    """Add up the rows that are alike in the fields ``keep``, such as "peer" and "method"; the others become empty."""
    alike: dict[tuple[str, ...], list[PairStats]] = {}
    for row in rows:
        alike.setdefault(tuple(getattr(row, name) for name in keep), []).append(row)
    found = []
    for key, parts in alike.items():
        who: dict[str, Any] = dict(zip(keep, key, strict=True))
        totals = {name: sum(getattr(row, name) for row in parts) for name in PairStats.COUNTS[:4]}
        errors: Counter[str] = Counter()
        for row in parts:
            errors.update(row.errors)
        latency = [*map(sum, zip(*(row.latency for row in parts), strict=True))]
        found.append(PairStats(**who, **totals, errors=dict(errors), latency=latency))
    return found


def counted_name(method: str, args: tuple[Any, ...]) -> str:
    """The name under which a call is counted and traced: a service names its object, as in ``queue batches.put``."""
    if not method.startswith("raytorchrpc."):
        return method
    operation = method.rpartition(".")[2]
    named = len(args) > 1 and type(args[0]) is type(args[1]) is str
    return f"{args[0]} {args[1]}.{operation}" if named else f"({operation})"


class CallCounters:
    """One member's counters, by peer, lane and method. Thread-safe; one short lock per event."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, str, str], PairStats] = {}

    def sent(self, peer: str, lane: str, method: str, size: int) -> None:
        """A call with ``size`` bytes was sent. ``method``: see ``counted_name``."""
        with self._lock:
            counter = self._counters.get((peer, lane, method)) or self._new_counter(peer, lane, method)
            counter.calls += 1
            counter.bytes_out += size

    def finished(
        self, peer: str, lane: str, method: str, came_by: str, size: int, seconds: float, error: BaseException | None
    ) -> None:
        """The outcome of a call over ``lane`` was taken; ``size`` bytes came back, over ``came_by``."""
        bucket = min(int(seconds * 1e6).bit_length(), _LAST)
        with self._lock:
            counter = self._counters.get((peer, lane, method)) or self._new_counter(peer, lane, method)
            counter.seconds += seconds
            counter.latency[bucket] += 1
            if error is not None:
                name = type(error).__name__
                counter.errors[name] = counter.errors.get(name, 0) + 1
            if came_by != lane:
                counter = self._counters.get((peer, came_by, method)) or self._new_counter(peer, came_by, method)
            counter.bytes_in += size

    def _new_counter(self, peer: str, lane: str, method: str) -> PairStats:
        counter = self._counters[peer, lane, method] = PairStats("", peer, lane, method)
        return counter

    def rows(self, caller: str) -> list[PairStats]:
        """A snapshot of the counters."""
        with self._lock:
            counters = self._counters.values()
            return [replace(row, caller=caller, errors={**row.errors}, latency=[*row.latency]) for row in counters]


#: Identifies a store in a member's counters: its name, and the name of its home.
StoreKey = tuple[str, str]

#: Bytes served are counted for so many versions, the newest ones.
_VERSIONS = 4


@dataclass(frozen=True)
class WeightStats:
    """The weights of one store in one member, which pulls, publishes or relays them. All sizes are bytes.

    ``pulled`` is the version pulled last, ``arriving`` that of a pull under way (0: none). ``brought`` and ``missing``
    are the bytes that this member has of the one that arrives, else of the one pulled last, and those that are still to
    come. ``bytes_in`` and ``bytes_out`` are totals of what it has brought, and of what others have brought from it;
    ``served`` has the same by version, of the newest ones. ``published`` is the version published last, and
    ``published_bytes`` the size of what this member has of it. ``lag`` is by how many versions ``pulled`` is behind the
    one published last; only ``Group.stats`` and ``raytorchrpc top`` know it.

    ``versions`` are those whose tensors this member has for others. ``held`` is the memory that it has for them,
    converted copies and room for the next version included. ``mapped`` is memory of other members on this host that it
    has mapped to read weights, of all their stores; it counts in their ``held``, too. ``readers`` has ``bytes_out`` by
    the member that has brought them. ``sources`` has what pulls that have ended brought from other members, by member.
    Both count every lane.
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
    def held(self) -> int:
        """Bytes of the memory for them, and of what is ready for the next."""


class _Store:
    __slots__ = (
        *("arrived", "bytes_in", "bytes_out", "failures", "holders", "published", "pulled", "pulls", "readers"),
        *("served", "sources", "under_way"),
    )

    def __init__(self) -> None:
        self.under_way: list[PullCounter] = []
        self.holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        self.readers: dict[str, int] = {}
        self.sources: dict[str, int] = {}
        self.pulled = self.arrived = 0  # the version pulled last, and its bytes
        self.pulls = self.failures = self.bytes_in = self.bytes_out = 0
        self.published = (0, 0)
        self.served: OrderedDict[int, int] = OrderedDict()


class WeightCounters:
    """One member's counters. Thread-safe; one short lock per event."""

    def __init__(self, mapped: Callable[[str], int] = lambda peer: 0) -> None:
        """``mapped(peer)``: bytes of that member's memory that are mapped here."""
        self._mapped = mapped
        self._lock = threading.Lock()
        self._stores: dict[StoreKey, _Store] = {}

    def _of(self, store: StoreKey) -> _Store:
        found = self._stores.get(store)
        if found is None:
            found = self._stores[store] = _Store()
        return found

    def begin_pull(self, store: StoreKey) -> PullCounter:
        """A pull begins. ``end_pull`` has to follow."""
        pull = PullCounter(store)
        with self._lock:
            self._of(store).under_way.append(pull)
        return pull

    def end_pull(self, pull: PullCounter, failed: bool) -> None:
        """A pull has ended. Unless it has failed, ``pull.version`` is what it returned."""
        with self._lock:
            found = self._of(pull.store)
            found.under_way.remove(pull)
            found.bytes_in += pull.in_vain + pull.brought
            for source, size in pull.sources.items():
                found.sources[source] = found.sources.get(source, 0) + size
            if failed:
                found.failures += 1
                return
            found.pulls += 1
            if pull.brought or pull.version != found.pulled:
                found.pulled, found.arrived = pull.version, pull.brought

    def published(self, store: StoreKey, version: int, size: int) -> None:
        """This member has published a version, of which it has ``size`` bytes."""
        with self._lock:
            found = self._of(store)
            if version <= found.published[0]:  # another store of that name
                found.served.clear()
            found.published = version, size

    def served(self, store: StoreKey, version: int, size: int, reader: str) -> None:
        """Another member has brought so many bytes of a version from here."""
        with self._lock:
            found = self._of(store)
            found.bytes_out += size
            found.readers[reader] = found.readers.get(reader, 0) + size
            found.served[version] = found.served.pop(version, 0) + size
            if len(found.served) > _VERSIONS:
                found.served.popitem(last=False)

    def watch(self, store: StoreKey, holder: Holder) -> None:
        """Count the memory of ``holder`` as long as it exists."""
        with self._lock:
            self._of(store).holders.add(holder)

    def rows(self, member: str) -> list[WeightStats]:
        """A snapshot of the counters."""
        with self._lock:
            rows = [(_row(member, key, one), one) for key, one in self._stores.items()]
            # Nothing has moved yet where one holds memory alone.
            used = [(row, list(one.holders)) for row, one in rows if one.under_way or row != _blank(row)]
        return [self._with_memory(row, holders) for row, holders in used]

    def row(self, member: str, store: StoreKey) -> WeightStats:
        """The counters of one store."""
        with self._lock:
            found = self._of(store)
            row, holders = _row(member, store, found), list(found.holders)
        return self._with_memory(row, holders)

    def _with_memory(self, row: WeightStats, holders: list[Holder]) -> WeightStats:
        versions = sorted({version for holder in holders for version in holder.kept})
        held, mapped = sum(holder.held for holder in holders), sum(self._mapped(source) for source, _ in row.sources)
        return replace(row, versions=tuple(versions), held=held, mapped=mapped)


def _blank(row: WeightStats) -> WeightStats:
    return WeightStats(row.member, row.store, row.home)


def _row(member: str, key: StoreKey, found: _Store) -> WeightStats:
    arriving = max((pull.version for pull in found.under_way), default=0)
    running = [pull for pull in found.under_way if pull.version == arriving]
    brought = sum(pull.brought for pull in running)
    return WeightStats(
        *(member, *key, found.pulled, arriving),
        brought=brought if arriving else found.arrived,
        missing=max(0, sum(pull.expected for pull in running) - brought),
        pulls=found.pulls,
        failures=found.failures,
        bytes_in=found.bytes_in + sum(pull.in_vain + pull.brought for pull in found.under_way),
        bytes_out=found.bytes_out,
        published=found.published[0],
        published_bytes=found.published[1],
        served=tuple(sorted(found.served.items())),
        readers=tuple(sorted(found.readers.items())),
        sources=tuple(sorted(found.sources.items())),
    )
