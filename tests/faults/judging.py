"""What must be true of calls, and of processes, whatever happened to the group."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.faults.worker import RETRIES

#: After its deadline a call may last so much longer (seconds), and whatever its process stood still besides.
SLACK_S = 1.0
MIB = 1 << 20
#: Descriptors of the connections by torchrpc that a member made whose host has lost its power: nobody hangs up.
FDS_OF_A_SILENT_PEER = 19
#: Descriptors of the connections by torchrpc with a member on another host, more than with one on the same.
FDS_OF_A_FAR_PEER = 30
#: Descriptors that are open for a moment in the calm too.
FDS_SPARE = 6
ANONYMOUS = 24 * MIB
THREADS = 24


class Rest(NamedTuple):
    """What a process held when it was first looked at, and how many members had lost their host's power by then."""

    left: dict[str, Any]
    silent: int


def judge_calls(
    outcomes: Sequence[Sequence[Any]], lags: Mapping[str, Sequence[Sequence[float]]], lines: Sequence[str]
) -> tuple[list[str], Counter[str], int, float]:
    """From what callers saw and callees noted: violations, verdicts, calls with retry= that ran again, and the most
    that one lasted beyond its deadline (seconds).
    """
    violations: list[str] = []
    latest = -math.inf
    runs = Counter(line.split()[0] for line in lines)
    verdicts: Counter[str] = Counter()
    for caller, call, kind, target, began, ended, timeout, verdict, may_have_run, text in outcomes:
        where = f"{caller} -> {target} {kind} {call}"
        verdicts[verdict if not verdict.startswith("other") else "other"] += 1
        if verdict.startswith("other"):
            violations.append(f"{where}: {verdict}")
        still = stood_still(lags.get(caller, ()), began, ended)
        latest = max(latest, ended - began - timeout - still)
        if ended - began > timeout + SLACK_S + still:
            violations.append(f"{where}: LATE: {ended - began:.2f} s, its deadline {timeout} s ({verdict}: {text})")
        if verdict == "ok" and not runs[call]:
            violations.append(f"{where}: answered, and ran nowhere")
        if verdict == "PeerLost" and may_have_run is False and kind != "relay" and runs[call]:
            violations.append(f"{where}: RAN, although: {text}")
    repeated = 0
    for call, count in runs.items():
        if call.endswith("-again"):
            repeated += count > 1
            if count > 1 + RETRIES:
                violations.append(f"{call} ran {count} times")
        elif count > 1:
            violations.append(f"{call}: EXECUTED TWICE ({count} times)")
    return violations, verdicts, repeated, latest


def stood_still(lags: Sequence[Sequence[float]], began: float, ended: float) -> float:
    """For how long, between these, a process with these lags did nothing at all (seconds)."""
    return sum(max(0.0, min(ended, up) - max(began, since)) for since, up in lags)


def judge_rest(first: Rest, now: Mapping[str, Any], silent: int, pooled: int) -> list[str]:
    """What a process holds that it did not hold at first; so many members lost their host's power meanwhile.

    ``pooled``: bytes of its own memory that a lane may keep for later.
    """
    before, found = first.left, []
    moved = now["far"] - before["far"]  # Ray starts a member again on any host
    if now["restless"]:
        found.append(f"RESTLESS: {now['restless']}")
    for what, allowed in (
        ("fds", FDS_OF_A_SILENT_PEER * silent + FDS_OF_A_FAR_PEER * moved + FDS_SPARE),
        ("threads", THREADS),
        ("arena", 0),
        ("under way", 0),
        ("anonymous", ANONYMOUS + pooled),
    ):
        grew = now[what] - before[what]
        if grew > allowed:
            detail = {"fds": now["open"], "threads": now["names"]}.get(what, "")
            was = before["open"] if what == "fds" else ""
            found.append(f"LEAK: {what} grew by {grew} ({before[what]} -> {now[what]}) {was} {detail}")
    return found
