"""Counters of the weights that a member pulls, publishes and serves, and the statistics that a group shows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

#: Identifies a store in a member's counters: its name, and the name of its home.
StoreKey = tuple[str, str]

#: Bytes served are counted for so many versions, the newest ones.
_VERSIONS = 4


@dataclass(frozen=True)
class WeightStats:
    """The weights of one store in one member, which pulls, publishes or relays them.

    ``pulled`` is the version pulled last, ``arriving`` that of a pull under way (0: none). ``brought`` and ``missing``
    are the bytes that this member has of the one that arrives, else of the one pulled last, and those that are still to
    come. ``bytes_in`` and ``bytes_out`` are totals of what it has brought, and of what others have brought from it;
    ``served`` has the same by version, of the newest ones. ``published`` is the version published last, and
    ``published_bytes`` the size of what this member has of it. ``lag`` is by how many versions ``pulled`` is behind the
    one published last; only ``Group.stats`` and ``raytorchrpc top`` know it.
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

    def begin_again(self) -> None:
        """Bring everything from the beginning, maybe of another version."""
        self.in_vain += self.brought
        self.expected = self.brought = 0

    def expect(self, version: int, size: int) -> None:
        """So many more bytes of this version are to come."""
        self.version = version
        self.expected += size

    def add(self, size: int) -> None:
        """So many bytes have been brought, or their copies queued on a GPU."""
        self.brought += size


class _Store:
    __slots__ = ("arrived", "bytes_in", "bytes_out", "failures", "published", "pulled", "pulls", "served", "under_way")

    def __init__(self) -> None:
        self.under_way: list[PullCounter] = []
        self.pulled = self.arrived = 0  # the version pulled last, and its bytes
        self.pulls = self.failures = self.bytes_in = self.bytes_out = 0
        self.published = (0, 0)
        self.served: OrderedDict[int, int] = OrderedDict()


class WeightCounters:
    """One member's counters. Thread-safe; one short lock per event."""

    def __init__(self) -> None:
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

    def served(self, store: StoreKey, version: int, size: int) -> None:
        """Another member has brought so many bytes of a version from here."""
        with self._lock:
            found = self._of(store)
            found.bytes_out += size
            found.served[version] = found.served.pop(version, 0) + size
            if len(found.served) > _VERSIONS:
                found.served.popitem(last=False)

    def rows(self, member: str) -> list[WeightStats]:
        """A snapshot of the counters."""
        with self._lock:
            return [_row(member, key, found) for key, found in self._stores.items()]


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
    )
