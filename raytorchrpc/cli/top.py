"""``raytorchrpc top``: shows what the groups of a cluster are doing, and updates it."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from raytorchrpc.calls.counters import PairStats
from raytorchrpc.cli.top_weights import weights_table
from raytorchrpc.errors import ConfigurationError, RayTorchRpcError
from raytorchrpc.text import tables as text_tables

if TYPE_CHECKING:  # it loads Ray and torch
    from raytorchrpc.group.status import GroupStatus


class Rate(NamedTuple):
    """One member's calls to another over one lane, between two updates."""

    caller: str
    peer: str
    lane: str
    calls_per_s: float
    mb_per_s: float
    """Sent and received, in 10 ** 6 bytes."""
    mean_ms: float | None
    """Mean of the calls that finished in between; None if there were none."""
    failures: int
    """Since the group was formed."""
    failures_per_s: float


def run(*, address: str | None, group: str | None, interval_s: float, once: bool, as_json: bool) -> int:
    """Show until Ctrl-C, or once. Returns the exit code: 0, or 2 with one line on stderr."""
    try:
        if not 0.1 <= interval_s < math.inf:
            raise ConfigurationError("--interval must be a number of seconds, 0.1 or more")
        from raytorchrpc.process.ray_session import (
            running_cluster,  # here: bad options are reported without loading Ray
        )

        with running_cluster(address):
            _show(group, interval_s, once, as_json)
    except RayTorchRpcError as error:
        print(f"raytorchrpc top: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def _show(name: str | None, interval_s: float, once: bool, as_json: bool) -> None:
    from rich.live import Live
    from rich.text import Text

    from raytorchrpc.group.detached import cluster_status

    first = cluster_status(name)
    if name is not None and not first:
        raise ConfigurationError(
            f"no group {name!r} is visible: top shows detached groups and groups formed with "
            f"GroupConfig(metrics_period_s=...)"
        )
    known: dict[str, tuple[GroupStatus, list[Rate]]] = {status.generation: (status, []) for status in first}
    period_s = max([interval_s, *(status.period_s * 1.5 for status in first)]) if once else interval_s
    live = None if once or as_json else Live(Text(tables(list(known.values()))), auto_refresh=False)
    with live or nullcontext():
        while True:
            time.sleep(period_s)
            latest: dict[str, tuple[GroupStatus, list[Rate]]] = {}
            for status in cluster_status(name):
                before, found = known.get(status.generation, (None, []))
                if before is None or status.at > before.at:  # a published status may be the previous one
                    found = rates(before, status)
                latest[status.generation] = status, found
            known, shown = latest, list(latest.values())
            if as_json:
                print(json.dumps([as_data(*each) for each in shown]), flush=True)
            elif live is None:
                print(tables(shown), flush=True)
            else:
                live.update(Text(tables(shown)), refresh=True)
            if once:
                return


def rates(before: GroupStatus | None, now: GroupStatus) -> list[Rate]:
    """The rates between two states of a group; a restarted member counts from zero again."""
    seconds = 0.0 if before is None else now.at - before.at
    known = {(row.caller, row.peer, row.lane): row for row in before.rows} if before is not None else {}

    def per_s(count: float) -> float:
        return count / seconds if seconds > 0 else 0.0

    found = []
    for row in now.rows:
        pair = row.caller, row.peer, row.lane
        then = known.get(pair)
        if then is None or then.calls > row.calls:
            then = PairStats(*pair)
        calls, finished = row.calls - then.calls, row.finished - then.finished
        megabytes = (row.bytes_out + row.bytes_in - then.bytes_out - then.bytes_in) / 1e6
        mean_ms = 1000 * (row.seconds - then.seconds) / finished if finished else None
        failures_per_s = per_s(row.failures - then.failures)
        found.append(Rate(*pair, per_s(calls), per_s(megabytes), mean_ms, row.failures, failures_per_s))
    return found


def as_data(status: GroupStatus, found: Sequence[Rate]) -> dict[str, Any]:
    """For --json."""
    return {
        "group": status.group,
        "generation": status.generation,
        "members": list(status.members),
        "away": status.away,
        "silent": list(status.silent),
        "pairs": [rate._asdict() for rate in found],
        "in_flight": [one._asdict() for one in status.under_way],
        "weights": [dataclasses.asdict(one) for one in status.weights],
    }


def tables(shown: Sequence[tuple[GroupStatus, Sequence[Rate]]], width: int | None = None) -> str:
    """One table per group, busiest pairs first. ``width``: columns that are available; None: those of the terminal."""
    if not shown:
        return "no group is visible: top shows detached groups and groups formed with GroupConfig(metrics_period_s=...)"
    width = text_tables.terminal_columns() if width is None else width
    return "\n\n".join(_table(status, found, width) for status, found in shown)


def _table(status: GroupStatus, found: Sequence[Rate], width: int) -> str:
    in_flight = {(one.caller, one.peer): one.calls for one in status.under_way}
    heads = ("caller", "peer", "lane", "calls\n/s", "MB\n/s", "mean\nms", "in\nflight", "failed", "failed\n/s")
    rows = [
        (
            *(rate.caller, rate.peer, rate.lane, _number(rate.calls_per_s), _number(rate.mb_per_s)),
            "-" if rate.mean_ms is None else _number(rate.mean_ms),
            str(in_flight.get((rate.caller, rate.peer), 0)),
            *(str(rate.failures), _number(rate.failures_per_s)),
        )
        for rate in sorted(found, key=lambda rate: -rate.calls_per_s)
    ]
    missing = [text_tables.paragraph(f"away: {name} ", f"({cause})", width) for name, cause in status.away.items()]
    missing += [f"no answer: {name}" for name in status.silent]
    title = f"group {status.group}, {len(status.members)} members"
    weights = [f"\n{weights_table(status, width)}"] if status.weights else []
    return "\n".join((title, text_tables.table(heads, rows, width=width, right=6), *missing, *weights))


def _number(value: float) -> str:
    """At least three figures, in few columns."""
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 or not value else 3
    return f"{value:,.{decimals}f}"
