"""The one list of metrics: everything that ``Group.stats``, ``raytorchrpc top``, Prometheus and dashboards show.

A member reads its figures as rows (``Reading``); ``METRICS`` says which series the fields of the rows make. No series
names a member besides its own, but for subscribers at the home of their topic, so their number is linear in the
members. Loads neither Ray nor torch.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

from raytorchrpc.calls.counters import PairStats, WeightStats, combined, merged
from raytorchrpc.text import Shown, table, terminal_columns


@dataclass(frozen=True)
class QueueStats:
    """A queue, or the subscriptions of one member to a topic, at its home.

    Attributes:
        items: items that wait, of ``bytes`` bytes.
        oldest_s: seconds that the oldest item has waited.
        put, taken, dropped: items since it was made.
        putting, getting: members whose operations wait for room or for items, once for each operation.
        subscriber: empty for a queue, and in the row of a topic as a whole, which counts what was put.
    """

    KEY: ClassVar[tuple[str, ...]] = ("home", "kind", "name", "subscriber")
    COUNTS: ClassVar[tuple[str, ...]] = ("put", "taken", "dropped")

    home: str
    kind: str
    name: str
    subscriber: str
    items: int = 0
    bytes: int = 0
    oldest_s: float = 0.0
    put: int = 0
    taken: int = 0
    dropped: int = 0
    putting: tuple[str, ...] = ()
    getting: tuple[str, ...] = ()

    @property
    def waiting(self) -> dict[str, int]:
        """How many operations wait."""
        return {"put": len(self.putting), "get": len(self.getting)}

    @property
    def label(self) -> str:
        """Such as ``queue batches``, or ``topic news > collector_1``."""
        return f"{self.kind} {self.name}{f' > {self.subscriber}' if self.subscriber else ''}"

    @property
    def waiters(self) -> tuple[str, ...]:
        """The operations that wait, and whose they are."""
        return *(f"put: {who}" for who in self.putting), *(f"get: {who}" for who in self.getting)


@dataclass(frozen=True)
class MemberStats:
    """A member: how often it has ``returned`` to the group, how many peers are ``away`` for it, and its calls
    ``in_flight`` by peer, with the ``bytes_in_flight`` of their arguments.
    """

    member: str
    returned: int = 0
    away: int = 0
    in_flight: dict[str, int] = field(default_factory=dict)
    bytes_in_flight: int = 0

    @property
    def calls_in_flight(self) -> int:
        """Calls without an answer yet, to all peers."""
        return sum(self.in_flight.values())


@dataclass(frozen=True)
class Reading:
    """What one member, or several, have counted and measured."""

    calls: list[PairStats] = field(default_factory=list)
    queues: list[QueueStats] = field(default_factory=list)
    weights: list[WeightStats] = field(default_factory=list)
    members: list[MemberStats] = field(default_factory=list)

    @classmethod
    def of_all(cls, readings: Iterable[Reading]) -> Reading:
        """The readings of several members as one. Weights then have their ``lag``."""
        parts = [*readings]
        reading = cls(*([row for part in parts for row in getattr(part, each.name)] for each in fields(cls)))
        newest: dict[tuple[str, str], int] = {}
        for row in reading.weights:
            newest[row.store, row.home] = max(newest.get((row.store, row.home), 0), row.published)
        lags = (max(0, newest[row.store, row.home] - row.pulled) if row.pulled else 0 for row in reading.weights)
        weights = [replace(row, lag=lag) for row, lag in zip(reading.weights, lags, strict=True)]
        return replace(reading, weights=weights)

    def since(self, before: Reading) -> Reading:
        """With the counts of calls and queues since another reading; those of restarted members count from zero."""

        def grown(now: Iterable[Any], then: Iterable[Any]) -> Iterator[Any]:
            known = {tuple(getattr(row, name) for name in row.KEY): row for row in then}
            for row in now:
                old = known.get(tuple(getattr(row, name) for name in row.KEY))
                if old is None or getattr(old, row.COUNTS[0]) > getattr(row, row.COUNTS[0]):  # it was restarted
                    yield row
                    continue
                pairs = {name: (getattr(row, name), getattr(old, name)) for name in row.COUNTS}
                yield replace(row, **{name: combined(operator.sub, *pair) for name, pair in pairs.items()})

        calls, queues = grown(self.calls, before.calls), grown(self.queues, before.queues)
        return replace(self, calls=[*calls], queues=[*queues])


class Metric(NamedTuple):
    """What the series of one name show."""

    kind: Literal["counter", "gauge"]
    rows: str
    """The field of ``Reading`` with the rows that it is made of."""
    values: str | dict[str, str]
    """The field of the rows; a dict has one for each value of the label ``by``. A field may itself be such a dict."""
    help: str
    by: str = ""
    detail: bool = False
    """Exported only with ``GroupConfig.metrics_period_s``."""
    merge: Callable[[Any, Any], Any] = operator.add
    """Makes one value of those that differ only in what is no label."""

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels but ``group`` and ``member``."""
        tags, fine = TAGS[self.rows]
        return (*tags, *fine, *filter(None, (self.by,)))


#: By field of ``Reading``: the fields of a row that are labels, and those that are only with ``metrics_period_s``.
TAGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "calls": (("lane",), ("method",)),
    "queues": (("kind", "name"), ("subscriber",)),
    "weights": (("store", "home"), ()),
    "members": ((), ()),
}
_BYTES = {"out": "bytes_out", "in": "bytes_in"}
_MOVED = {"put": "put", "taken": "taken", "dropped": "dropped"}
_ROLES = {"pulled": "pulled", "arriving": "arriving", "published": "published"}
_STATES = {"brought": "brought", "missing": "missing", "served": "served_of_newest"}
METRICS = {
    "calls": Metric("counter", "calls", "calls", "calls sent"),
    "failures": Metric("counter", "calls", "errors", "calls that failed, by type of error", "error"),
    "bytes": Metric("counter", "calls", _BYTES, "payload and tensors of calls and results", "direction"),
    "finished": Metric("counter", "calls", "finished", "calls whose results were taken"),
    "call_seconds_sum": Metric("counter", "calls", "seconds", "seconds from sending these calls to their results"),
    "call_seconds_bucket": Metric("counter", "calls", "buckets", "those that took at most `le` seconds", "le", True),
    "calls_in_flight": Metric("gauge", "members", "calls_in_flight", "calls without an answer"),
    "bytes_in_flight": Metric("gauge", "members", "bytes_in_flight", "bytes of their arguments"),
    "queue_items": Metric("gauge", "queues", "items", "items that wait in a queue, or for subscribers of a topic"),
    "queue_bytes": Metric("gauge", "queues", "bytes", "bytes of these items"),
    "queue_oldest_seconds": Metric("gauge", "queues", "oldest_s", "how long the oldest of them has waited", merge=max),
    "queue_waiting": Metric("gauge", "queues", "waiting", "operations that wait for room or for items", "operation"),
    "queue_moved": Metric("counter", "queues", _MOVED, "items put, taken and dropped", "operation"),
    "weight_version": Metric("gauge", "weights", _ROLES, "version pulled or published last; 0: none", "role"),
    "weight_version_bytes": Metric("gauge", "weights", _STATES, "bytes of that version; see below", "state"),
    "weight_memory": Metric("gauge", "weights", {"held": "held", "mapped": "mapped"}, "bytes of its memory", "state"),
    "weight_bytes": Metric("counter", "weights", _BYTES, "bytes pulled, and pulled by others from here", "direction"),
    "weight_pulls": Metric("counter", "weights", {"ok": "pulls", "failed": "failures"}, "pulls that ended", "outcome"),
    "returns": Metric("gauge", "members", "returned", "how often the member has come back to the group"),
    "peers_away": Metric("gauge", "members", "away", "peers that the member cannot call"),
}


def series(name: str) -> str:
    """The name of a metric in Prometheus."""
    return f"ray_raytorchrpc_{name}{'_total' if METRICS[name].kind == 'counter' else ''}"


#: By metric and the values of its labels.
Samples = dict[tuple[str, tuple[str, ...]], float]


def samples(reading: Reading, fine: bool) -> Samples:
    """The series of one member. ``fine``: with the labels and the metrics that ``metrics_period_s`` turns on."""
    samples: Samples = {}
    for name, metric in METRICS.items():
        tags, more = TAGS[metric.rows]
        for row in getattr(reading, metric.rows) if fine or not metric.detail else ():
            who = *(getattr(row, tag) for tag in tags), *(getattr(row, tag) if fine else "" for tag in more)
            values = metric.values if isinstance(metric.values, dict) else {"": metric.values}
            for label, its_field in values.items():
                value = getattr(row, its_field)
                for by, number in (value if isinstance(value, dict) else {label: value}).items():
                    key = name, (*who, by) if metric.by else who
                    samples[key] = metric.merge(samples[key], number) if key in samples else number
    return samples


#: A table names at most so many of the members that wait at a queue.
_NAMED = 3
#: Columns of the tables: the field that each shows.
_CALLS = {"calls": "calls", "failed": "failures", "MB out": "bytes_out", "MB in": "bytes_in", "ms/call": "mean_ms"}
_QUEUES = {
    **{"queue or topic": "label", "home": "home", "waiting": "waiters", "items": "items", "MB": "bytes"},
    **{"oldest\ns": "oldest_s", "put": "put", "taken": "taken", "dropped": "dropped"},
}
_STORE = {"store": "store", "home": "home", "member": "member"}
_VERSIONS = {
    **{"pub-\nlished": "published", "pulled": "pulled", "behind": "lag", "arriving": "arriving"},
    **{"MB in": "brought", "MB\nto come": "missing"},
}
_MEMORY = {"MB out": "served_of_newest", "MB\nheld": "held", "MB\nmapped": "mapped"}
#: In fewer columns the figures of weights are two tables.
_WEIGHTS_WIDTH = 100


class GroupStats(Shown, tuple[PairStats, ...]):
    """Rows of ``PairStats``, one for each pair of members and lane; shown as tables.

    Attributes:
        methods: the same calls as rows of ``PairStats``, one for each peer and method. Operations of queues, topics and
            stores are methods of their homes.
        queues: rows of ``QueueStats``, one for each queue, topic, and member that subscribes to a topic.
        weights: rows of ``WeightStats``, one for each store and member that pulls, publishes or relays its weights.
        missing: members that are away, or that did not answer in time.
    """

    methods: list[PairStats]
    queues: list[QueueStats]
    weights: list[WeightStats]
    missing: tuple[str, ...]
    _reading: Reading

    def __new__(cls, reading: Reading | None = None, missing: Sequence[str] = ()) -> GroupStats:
        reading = reading or Reading()
        self = super().__new__(cls, merged(reading.calls, "caller", "peer", "lane"))
        self._reading, self.missing = reading, tuple(missing)
        in_flight = {row.member: row.in_flight for row in reading.members}
        for row in self:
            row.in_flight = in_flight.get(row.caller, {}).get(row.peer, 0)
        self.methods = merged(reading.calls, "peer", "method")
        self.queues, self.weights = reading.queues, reading.weights
        return self

    def __getnewargs__(self) -> tuple[Reading, tuple[str, ...]]:
        return self._reading, self.missing

    def __str__(self) -> str:
        text = self.table()
        return f"{text}\nno answer from: {', '.join(self.missing)} (away or stopped)" if self.missing else text

    def table(self, width: int | None = None, seconds: float = 0, steady: bool = False) -> str:
        """The rows as text, busiest first.

        Args:
            steady: by name instead, so that rows keep their places.
            width: columns that are available; None: those of the terminal, or 120 without one.
            seconds: show counts divided by this; 0: show them as they are.
        """
        width = terminal_columns() if width is None else width
        weights = [{**_VERSIONS, **_MEMORY}] if width >= _WEIGHTS_WIDTH else [_VERSIONS, _MEMORY]
        tables: list[tuple[Sequence[Any], dict[str, str], int]] = [
            (self, {"caller": "caller", "peer": "peer", "lane": "lane", **_CALLS, "in\nflight": "in_flight"}, 3),
            (self.methods, {"peer": "peer", "method": "method", **_CALLS}, 2),
            (self.queues, _QUEUES, 3),
            *((self.weights, {**_STORE, **part}, 3) for part in weights),
        ]
        return "\n\n".join(_table(*each, width, seconds, steady) for each in tables if each[0] or each[0] is self)


def _table(rows: Sequence[Any], columns: dict[str, str], texts: int, width: int, seconds: float, steady: bool) -> str:
    """``texts``: how many columns are texts."""
    names = list(columns.values())[:texts]
    counts = {"failures", *getattr(rows[0], "COUNTS", ())} if rows and seconds else set()
    heads = [f"{head}\n/s" if name in counts else head for head, name in columns.items()]
    lines = [
        [_cell(name, getattr(row, name), seconds if name in counts else 0) for name in columns.values()]
        for row in sorted(
            rows, key=lambda row: [getattr(row, name) for name in names] if steady else -getattr(row, "calls", 0)
        )
    ]
    return table(heads, lines, width=width, right=len(heads) - texts)


def _cell(name: str, value: Any, seconds: float) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        counts = Counter(value)
        shown = [who if count == 1 else f"{who} x{count}" for who, count in list(counts.items())[:_NAMED]]
        return "\n".join([*shown, f"{len(counts) - _NAMED} more"] if len(counts) > _NAMED else shown)
    if value is None:
        return "-"
    megabytes = name.startswith("bytes") or name in ("brought", "missing", "served_of_newest", "held", "mapped")
    if not megabytes and not seconds and isinstance(value, int):
        return str(value)
    value = value / (1e6 if megabytes else 1) / (seconds or 1)
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 or not value else 3
    return f"{value:,.{decimals}f}"
