"""The weights of a group, as ``raytorchrpc top`` shows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from raytorchrpc.calls.weight_counters import WeightStats
from raytorchrpc.text import tables as text_tables

if TYPE_CHECKING:  # it loads Ray and torch
    from raytorchrpc.group.status import GroupStatus

_MB = 1e6


def weights_table(status: GroupStatus, width: int) -> str:
    """One line for each member that pulls from a store, and one for each that publishes or relays."""
    heads = ("store", "home", "member", "", "version", "MB in", "MB\nto come", "MB out")
    rows = [
        (row.store, row.home, row.member, *line)
        for row in sorted(status.weights, key=lambda row: (row.store, row.home, not row.published))
        for line in _lines(row)
    ]
    return f"weights of group {status.group}\n" + text_tables.table(heads, rows, width=width, right=4)


def _lines(row: WeightStats) -> Iterator[tuple[str, ...]]:
    served = f"{row.served_of_newest / _MB:,.1f}"
    if row.published:
        yield "published", str(row.published), "", "", served
    if row.arriving or row.pulled or row.failures or not row.published:
        verb, version = ("pulls", row.arriving) if row.arriving else ("pulled", row.pulled)
        out = "" if row.published else served
        yield verb, str(version), f"{row.brought / _MB:,.1f}", f"{row.missing / _MB:,.1f}", out
