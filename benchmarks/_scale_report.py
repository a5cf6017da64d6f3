"""The law by which a figure grows with the members of a group, and the document that ``benchmarks scale`` writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raytorchrpc.bench.reports import grid
from raytorchrpc.bench.results import nonnegative_terms

#: What the document predicts for (members).
FAR = 1000
_MIB = 2**20


class Law(NamedTuple):
    """``a + b n + c n^2``."""

    a: float
    b: float
    c: float
    error: float
    """The largest deviation of a measured point from it, as a part of that point."""

    def at(self, n: float) -> float:
        return self.a + self.b * n + self.c * n * n

    def dominant(self, n: float) -> str:
        """Which term is the largest at ``n`` members."""
        parts = {"constant": self.a, "n": self.b * n, "n^2": self.c * n * n}
        return max(parts, key=lambda name: parts[name])


def law(points: Mapping[int, float]) -> Law:
    """The law without negative terms that fits best, by relative error: small groups count as much as large ones."""
    n = np.array(list(points), dtype=float)
    values = np.maximum(np.array(list(points.values()), dtype=float), 1e-12)
    terms, error = nonnegative_terms(np.stack([n**0, n, n * n], axis=1), values)
    return Law(*(term if term > 1e-9 else 0.0 for term in terms), error)  # type: ignore[call-arg, misc]


# --- the document --------------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """One row that is followed as the group grows."""

    label: str
    of: Callable[[Mapping[str, Any]], float]
    """Of the figures of one group."""
    unit: str
    scale: float = 1.0


def _seconds(*steps: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda group: sum(float(group["seconds"][step]) for step in steps)


def _gained(what: str, stage: str, since: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda group: float(group["weights"][stage][what] - group["weights"][since][what])


#: Ray answers for a restarted actor only after what the group has asked of it, so the second is nearly nothing.
BACK = ("ray_back", "rejoin")
TIMES = (
    Figure("form the group (`init_group`)", _seconds("form"), "s"),
    Figure("all-to-all calls, first time", _seconds("first_calls"), "s"),
    Figure("all-to-all calls, again", _seconds("calls"), "s"),
    Figure("kill every tenth member, until `on_change` has reported all", _seconds("lost"), "s"),
    Figure("until all are back (`wait_ready`), with Ray's restart", _seconds(*BACK), "s"),
    Figure("all-to-all calls, after the restart", _seconds("calls_after"), "s"),
    Figure("`shutdown`", _seconds("shutdown"), "s"),
)
BYTES = (
    Figure("sent to all members when the group forms", lambda group: group["sent"]["form"], "MB", 1e-6),
    Figure("sent to all members when one comes back", lambda group: group["sent"]["rejoin"], "MB", 1e-6),
)
GAINS = (
    Figure("memory added by joining, per member", _gained("private", "formed", "before"), "MiB", 1 / _MIB),
    Figure("memory added by calling two neighbours", _gained("private", "neighbours", "formed"), "MiB", 1 / _MIB),
    Figure("memory added by calling all members", _gained("private", "talked", "neighbours"), "MiB", 1 / _MIB),
    Figure("sockets of a member after joining", lambda group: group["weights"]["formed"]["sockets"], ""),
    Figure("sockets after calling two neighbours", lambda group: group["weights"]["neighbours"]["sockets"], ""),
    Figure("sockets after calling all members", lambda group: group["weights"]["talked"]["sockets"], ""),
)
STAGES = {
    "before": "not joined; torch and raytorchrpc imported",
    "formed": "joined, no calls yet",
    "neighbours": "each has called two neighbours",
    "talked": "each has called all members",
}


def document(found: Mapping[str, Any], hosts: Sequence[Mapping[str, Any]]) -> str:
    """The whole of ``docs/scale.md``."""
    groups = found["groups"]
    sizes = [group["members"] for group in groups]
    calls = sizes[-1] * (sizes[-1] - 1)
    left_out = "".join(f"\nNot measured: {reason}.\n" for reason in found["left_out"])
    return f"""# Scale

After reading this page you can estimate how long a group takes to form and recover, and what each member costs, for the
number of members that you have in mind.

- A member that calls few others costs nearly the same in a group of any size.
- Forming a group, and calls from every member to every other, grow with the square of the number of members.

<!-- Written by `python -m benchmarks scale --markdown docs/scale.md`; change the command, not this file. -->

Measured with `python -m benchmarks scale` on {found["machine"]}.
All members are Ray actors on one host (`num_cpus=0`, `max_restarts=-1`). They share its cores with Ray and the driver,
so look at how the times grow; a larger machine is faster.
{left_out}
## Time

{_by_size(TIMES, groups)}

All-to-all at {sizes[-1]} members is {calls:,} calls; each member sends all of its own at once. The first time
includes making the connections. Each time includes the Ray calls that ask the members to begin.
{_several_hosts(hosts)}
## Memory, sockets and threads of a member

Medians over the members. A plain Ray actor without torch takes {found["alone"]["private"] / _MIB:.0f} MiB of private
memory.

{_memory(groups)}

"Private" is memory that no other process shares. PSS adds the process's part of shared memory, such as libraries.

Joining connects a member to one neighbour, to verify that it listens, and to the supervisor. The first call between two
members makes any other connection. So where members call two neighbours, connections and memory do not depend on the
size of the group. They grow with it only where every member calls every other.

## Network traffic of the process that forms the group

{_by_size(BYTES, groups)}

## Extrapolation to {FAR:,} members

The law is `a + b n + c n^2` without negative terms, fitted to the groups above by relative error. "Off by" is the
largest deviation of a measured group. The prediction lies {FAR // sizes[-1]} times beyond the largest group measured,
and is for all members on this one host. It shows which term dominates; do not rely on the second digit.

{_laws((*TIMES, *BYTES, *GAINS), groups)}

{_memory_far(groups)}

{_planned(found["planned"])}
"""


def show(value: float) -> str:
    """Two significant digits, and no exponent."""
    if value == 0:
        return "0"
    digits = max(0, 1 - int(np.floor(np.log10(abs(value)))))
    return f"{value:,.{min(digits, 6)}f}"


def _by_size(figures: Sequence[Figure], groups: Sequence[Mapping[str, Any]]) -> str:
    head = [f"members ({figures[0].unit})", *(str(group["members"]) for group in groups)]
    rows = [[figure.label, *(show(figure.of(group) * figure.scale) for group in groups)] for figure in figures]
    return grid(head, rows)


def _memory(groups: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for group in groups:
        for stage, label in STAGES.items():
            one = group["weights"][stage]
            memory = (f"{one[what] / _MIB:.1f}" for what in ("private", "pss"))
            counts = (f"{one[what]:g}" for what in ("descriptors", "sockets", "threads"))
            rows.append([f"{group['members']}: {label}", *memory, *counts])
    return grid(["members", "private (MiB)", "PSS (MiB)", "descriptors", "of these sockets", "threads"], rows)


def _laws(figures: Sequence[Figure], groups: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for figure in figures:
        found = law({group["members"]: max(0.0, figure.of(group)) * figure.scale for group in groups})
        terms = ((found.a, ""), (found.b, " n"), (found.c, " n^2"))
        text = " + ".join(f"{value:.2g}{power}" for value, power in terms if value) or "0"
        far = f"{show(found.at(FAR))} {figure.unit}".strip()
        rows.append([figure.label, text, f"{found.error:.0%}", far, found.dominant(FAR)])
    return grid(["figure", "law", "off by", f"at {FAR:,}", "largest term there"], rows)


def _memory_far(groups: Sequence[Mapping[str, Any]]) -> str:
    last = groups[-1]["weights"]
    base = last["before"]["private"]
    joined, everybody = (
        base + law({group["members"]: max(0.0, gained(group)) for group in groups}).at(FAR)
        for gained in (_gained("private", "neighbours", "before"), _gained("private", "talked", "before"))
    )
    return (
        f"The private memory of {FAR:,} members that call two neighbours each would be {FAR * joined / 2**30:.0f} "
        f"GiB,\nof which Ray, torch and the imports take {FAR * base / 2**30:.0f} GiB. With calls between all members "
        f"it\nwould be {FAR * everybody / 2**30:.0f} GiB."
    )


def _several_hosts(hosts: Sequence[Mapping[str, Any]]) -> str:
    if not hosts:
        return ""
    head = ["hosts x members (s)", *(f"{run['hosts']} x {run['members'] // run['hosts']}" for run in hosts)]
    rows = [[figure.label, *(show(figure.of(run)) for run in hosts)] for figure in TIMES]
    return f"""
The same on several simulated hosts: each has its own network, pid, mount, ipc and uts namespaces on this machine, and a
bridge joins them (`tests/multihost`). Members on different hosts use TCP.

{grid(head, rows)}
"""


def _planned(planned: Mapping[str, float]) -> str:
    return f"""## {planned["members"]:,.0f} members on paper

The work of the process that forms a group can be measured without the members. For {planned["members"]:,.0f} members on
{planned["hosts"]:.0f} hosts:

- It decides all routes in {show(planned["plan_s"])} s.
- It builds and pickles the announcements, {show(planned["form_bytes"] / 1e6)} MB, in {show(planned["tables_s"])} s.
- When one member comes back, it decides all routes again in {show(planned["replan_s"])} s, and sends
  {show(planned["rejoin_bytes"] / 1e6)} MB in all."""
