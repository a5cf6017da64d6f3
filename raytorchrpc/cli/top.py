"""``raytorchrpc top``: shows what the groups of a cluster are doing, and updates it."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from typing import Any, NamedTuple, TextIO

from raytorchrpc.calls.metrics import GroupStats
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.group.status import PERIOD_S, ClusterWatch, GroupStatus
from raytorchrpc.process.ray_session import running_cluster
from raytorchrpc.text import paragraph, terminal_columns

#: How long to wait for the first status of a group (seconds).
_FIRST_S = 6.0


class Update(NamedTuple):
    """A group, and what its members have counted in the last ``seconds``; 0: since the group was formed."""

    status: GroupStatus
    stats: GroupStats
    seconds: float = 0.0


def run(*, address: str | None, group: str | None, interval_s: float, once: bool, as_json: bool) -> None:
    """Show until Ctrl-C, or once. Raises ConfigurationError for a bad interval, no cluster and an unknown group."""
    if not 0.1 <= interval_s < math.inf:
        raise ConfigurationError("--interval must be a number of seconds, 0.1 or more")
    out = sys.stdout
    with suppress(KeyboardInterrupt), running_cluster(address):
        _show(out, group, interval_s, once, as_json)


def _show(out: TextIO, name: str | None, interval_s: float, once: bool, as_json: bool) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    watch = ClusterWatch()
    first = _watch(watch, name, _FIRST_S, until_found=True)
    if name is not None and not first:
        raise ConfigurationError(f"no group {name!r} is visible in this cluster")
    known = {status.generation: update(None, status) for status in first}
    console, live = Console(file=out), None
    if console.is_terminal and not console.is_dumb_terminal and not (once or as_json):  # Live shows nothing elsewhere
        live = Live(Text(tables(list(known.values()))), console=console, auto_refresh=False)
    with live or nullcontext():
        while True:
            statuses = _watch(watch, name, max(interval_s, 2 * PERIOD_S) if once else interval_s)
            known = {status.generation: update(known.get(status.generation), status) for status in statuses}
            if as_json:
                print(json.dumps([as_data(each) for each in known.values()]), file=out, flush=True)
            elif live is None:
                print(tables(list(known.values())), file=out, flush=True)
            else:
                live.update(Text(tables(list(known.values()))), refresh=True)
            if once:
                return


def _watch(watch: ClusterWatch, name: str | None, seconds: float, until_found: bool = False) -> list[GroupStatus]:
    """Watch for so long; returns the latest. ``until_found``: or until there is a group."""
    until = time.monotonic() + seconds
    while True:
        statuses, remaining_s = watch.groups(name), until - time.monotonic()
        if remaining_s <= 0 or (until_found and statuses):
            return statuses
        time.sleep(min(remaining_s, 0.5))


def update(before: Update | None, now: GroupStatus) -> Update:
    """What to show of a status."""
    if before is None:
        return Update(now, GroupStats(now.reading))
    if now.at <= before.status.at:  # it is the previous one
        return before
    return Update(now, GroupStats(now.reading.since(before.status.reading)), now.at - before.status.at)


def as_data(shown: Update) -> dict[str, Any]:
    """For --json."""
    status, stats, seconds = shown
    lists: dict[str, Sequence[Any]] = {
        **{"pairs": stats, "methods": stats.methods, "queues": stats.queues},
        **{"weights": stats.weights, "members": status.reading.members},
    }
    return {
        **{"group": status.group, "generation": status.generation, "seconds": seconds},
        **{"away": status.away, "silent": list(status.silent)},
        **{key: [asdict(row) for row in rows] for key, rows in lists.items()},
    }


def tables(shown: Sequence[Update], width: int | None = None) -> str:
    """The tables of each group. ``width``: columns that are available; None: those of the terminal."""
    width = terminal_columns() if width is None else width
    return "\n\n".join(_of_group(*each, width) for each in shown) or "no group is visible in this cluster"


def _of_group(status: GroupStatus, stats: GroupStats, seconds: float, width: int) -> str:
    when = "per second" if seconds else "since it was formed"
    lines = [f"group {status.group}, {len(status.members)} members, {when}", stats.table(width, seconds, steady=True)]
    lines += [paragraph(f"away: {name} ", f"({cause})", width) for name, cause in status.away.items()]
    for row in GroupStats(status.reading).methods:
        lines += [f"failed so far: {row.peer}.{row.method}: {count} x {error}" for error, count in row.errors.items()]
    return "\n".join([*lines, *(f"no answer: {name}" for name in status.silent)])
