"""The weights of a group, as ``raytorchrpc top`` shows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from raytorchrpc.calls.weight_counters import WeightStats

if TYPE_CHECKING:  # it loads Ray and torch
    from raytorchrpc.group.status import GroupStatus

_MB = 1e6


def weights_table(status: GroupStatus) -> Any:
    """One line for each member that pulls from a store, and one for each that publishes or relays."""
    from rich.table import Column, Table

    numbers = [Column(head, justify="right") for head in ("version", "MB in", "MB to come", "MB out")]
    table = Table(
        *("store", "home", "member", ""), *numbers, title=f"weights of group {status.group}", title_justify="left"
    )
    for row in sorted(status.weights, key=lambda row: (row.store, row.home, not row.published)):
        for line in _lines(row):
            table.add_row(row.store, row.home, row.member, *line)
    return table


def _lines(row: WeightStats) -> Iterator[tuple[str, ...]]:
    served = f"{row.served_of_newest / _MB:,.1f}"
    if row.published:
        yield "published", str(row.published), "", "", served
    if row.arriving or row.pulled or row.failures or not row.published:
        verb, version = ("pulls", row.arriving) if row.arriving else ("pulled", row.pulled)
        out = "" if row.published else served
        yield verb, str(version), f"{row.brought / _MB:,.1f}", f"{row.missing / _MB:,.1f}", out
