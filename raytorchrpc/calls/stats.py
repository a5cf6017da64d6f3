"""The statistics that a group shows, and their tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from raytorchrpc.calls.counters import PairStats, merged
from raytorchrpc.calls.metrics import QueueStats, Reading
from raytorchrpc.calls.weight_counters import WeightStats
from raytorchrpc.text import table, terminal_columns

#: A table names at most so many of the members that wait at a queue.
_NAMED = 3
#: Columns of the tables: the field that each shows.
_CALLS = {"calls": "calls", "failed": "failures", "MB out": "bytes_out", "MB in": "bytes_in", "ms/call": "mean_ms"}
_QUEUES = {
    **{"queue or topic": "label", "home": "home", "waiting": "waiters", "items": "items", "MB": "bytes"},
    **{"oldest\ns": "oldest_s", "put": "put", "taken": "taken", "dropped": "dropped"},
}
_WEIGHTS = {
    **{"store": "store", "home": "home", "member": "member", "pub-\nlished": "published", "pulled": "pulled"},
    **{"behind": "lag", "arriving": "arriving", "MB in": "brought", "MB\nto come": "missing"},
    **{"MB out": "served_of_newest", "MB\nheld": "held", "MB\nmapped": "mapped"},
}


class GroupStats(tuple[PairStats, ...]):
    """Rows of ``PairStats``, one for each pair of members and lane; prints as tables.

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

    def table(self, width: int | None = None, seconds: float = 0) -> str:
        """The rows as text, busiest first.

        Args:
            width: columns that are available; None: those of the terminal, or 120 without one.
            seconds: show counts divided by this; 0: show them as they are.
        """
        width = terminal_columns() if width is None else width
        tables: list[tuple[Sequence[Any], dict[str, str], int]] = [
            (self, {"caller": "caller", "peer": "peer", "lane": "lane", **_CALLS, "in\nflight": "in_flight"}, 3),
            (self.methods, {"peer": "peer", "method": "method", **_CALLS}, 2),
            (self.queues, _QUEUES, 3),
            (self.weights, _WEIGHTS, 3),
        ]
        return "\n\n".join(_table(*each, width, seconds) for each in tables if each[0] or each[0] is self)


def _table(rows: Sequence[Any], columns: dict[str, str], texts: int, width: int, seconds: float) -> str:
    """``texts``: how many columns are texts."""
    counts = {"failures", *getattr(rows[0], "COUNTS", ())} if rows and seconds else set()
    heads = [f"{head}\n/s" if name in counts else head for head, name in columns.items()]
    lines = [
        [_cell(name, getattr(row, name), seconds if name in counts else 0) for name in columns.values()]
        for row in sorted(rows, key=lambda row: -getattr(row, "calls", 0))
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
