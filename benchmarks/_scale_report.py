"""The law by which a figure grows with the members of a group, and the document that ``benchmarks scale`` writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

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
    """The law with no negative term that fits best, by relative error: small groups count as much as large ones."""
    n = np.array(list(points), dtype=float)
    y = np.array(list(points.values()), dtype=float)
    weight = 1 / np.maximum(np.abs(y), 1e-12)
    best: tuple[float, np.ndarray] | None = None
    for count in range(1, min(3, len(points)) + 1):
        for powers in combinations(range(3), count):
            columns = np.stack([n**power for power in powers], axis=1) * weight[:, None]
            solved, *_ = np.linalg.lstsq(columns, y * weight, rcond=None)
            if (solved < 0).any():
                continue
            terms = np.zeros(3)
            terms[list(powers)] = solved
            loss = float((((terms[0] + terms[1] * n + terms[2] * n * n - y) * weight) ** 2).sum())
            if best is None or loss < best[0] - 1e-12:
                best = loss, terms
    if best is None:
        raise ValueError(f"no law without a negative term fits {dict(points)}")
    a, b, c = (float(term) for term in best[1])
    found = Law(a, b, c, 0.0)
    error = max(abs(found.at(size) - value) / max(abs(value), 1e-12) for size, value in points.items())
    return found._replace(error=error)


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
    Figure("form: `init_group` of living actors", _seconds("form"), "s"),
    Figure("everybody calls everybody, first time", _seconds("first_calls"), "s"),
    Figure("everybody calls everybody, again", _seconds("calls"), "s"),
    Figure("every tenth member killed, until `on_change` has told of all", _seconds("lost"), "s"),
    Figure("until all are back (`wait_ready`), Ray's restart of their processes included", _seconds(*BACK), "s"),
    Figure("everybody calls everybody, after that", _seconds("calls_after"), "s"),
    Figure("`shutdown`", _seconds("shutdown"), "s"),
)
BYTES = (
    Figure("sent to all members to form", lambda group: group["sent"]["form"], "MB", 1e-6),
    Figure("sent to all members when one comes back", lambda group: group["sent"]["rejoin"], "MB", 1e-6),
)
GAINS = (
    Figure("joining adds, per member", _gained("private", "formed", "before"), "MiB", 1 / _MIB),
    Figure("calling two neighbours adds", _gained("private", "neighbours", "formed"), "MiB", 1 / _MIB),
    Figure("calling everybody adds to that", _gained("private", "talked", "neighbours"), "MiB", 1 / _MIB),
    Figure("sockets after joining, per member", lambda group: group["weights"]["formed"]["sockets"], ""),
    Figure("sockets once two neighbours talk", lambda group: group["weights"]["neighbours"]["sockets"], ""),
    Figure("sockets once everybody talks", lambda group: group["weights"]["talked"]["sockets"], ""),
)
STAGES = {
    "before": "before joining: Ray's own, torch and raytorchrpc imported",
    "formed": "joined, nobody has called anybody",
    "neighbours": "each has called two neighbours",
    "talked": "each has called everybody",
}


def document(found: Mapping[str, Any], hosts: Sequence[Mapping[str, Any]]) -> str:
    """The whole of ``docs/scale.md``."""
    groups = found["groups"]
    sizes = [group["members"] for group in groups]
    left_out = "".join(f"\nNot measured: {reason}.\n" for reason in found["left_out"])
    return f"""# Scale

`python -m benchmarks scale --markdown docs/scale.md` measured this and wrote it: {found["machine"]}. Members are Ray
actors with `num_cpus=0` and `max_restarts=-1` on one host, so all of them, Ray and the driver share its cores; the
times say how the work grows, and on a larger machine they are shorter.
{left_out}
## Seconds

{_by_size(TIMES, groups)}

"Everybody calls everybody" is {_pairs(sizes[-1])} calls at {sizes[-1]} members, each member sending all of its own at
once. The first time makes the connections. Both contain Ray's own calls that ask the members to begin.
{_several_hosts(hosts)}
## What a member costs

Medians over the members. A plain actor of Ray's without torch takes {found["alone"]["private"] / _MIB:.0f} MiB of
its own.

{_memory(groups)}

Private is what nobody else shares; PSS adds its part of what is shared, such as the libraries. Joining connects a
member to one neighbour, by which it has shown that it listens, and to whoever looks after the group. All other
connections are made by the first call between two members: where members talk to two neighbours, connections and
memory stay what they are however large the group is, and only where everybody talks to everybody they grow with it.

## Bytes that the process which forms the group sends

{_by_size(BYTES, groups)}

## The law, and {FAR:,} members

`a + b n + c n^2` with no negative term, fitted by relative error to the groups above. "Off by" is the largest deviation
of a measured group from it. A prediction {FAR // sizes[-1]} times as far out as anything measured says what dominates,
and not the second digit; and it is for all members on this one host.

{_laws((*TIMES, *BYTES, *GAINS), groups)}

{_memory_far(groups)}

{_planned(found["planned"])}
"""


def _pairs(n: int) -> str:
    return f"{n * (n - 1):,}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(value: float) -> str:
    """Two significant digits, and no exponent."""
    if value == 0:
        return "0"
    digits = max(0, 1 - int(np.floor(np.log10(abs(value)))))
    return f"{value:,.{min(digits, 6)}f}"


def _by_size(figures: Sequence[Figure], groups: Sequence[Mapping[str, Any]]) -> str:
    head = [f"members ({figures[0].unit})", *(str(group["members"]) for group in groups)]
    rows = [[figure.label, *(show(figure.of(group) * figure.scale) for group in groups)] for figure in figures]
    return _table(head, rows)


def _memory(groups: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for group in groups:
        for stage, label in STAGES.items():
            one = group["weights"][stage]
            rows.append(
                [
                    f"{group['members']}: {label}",
                    f"{one['private'] / _MIB:.1f}",
                    f"{one['pss'] / _MIB:.1f}",
                    *(f"{one[what]:g}" for what in ("descriptors", "sockets", "threads")),
                ]
            )
    return _table(["members", "private (MiB)", "PSS (MiB)", "descriptors", "of these sockets", "threads"], rows)


def _laws(figures: Sequence[Figure], groups: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for figure in figures:
        found = law({group["members"]: max(0.0, figure.of(group)) * figure.scale for group in groups})
        terms = ((found.a, ""), (found.b, " n"), (found.c, " n^2"))
        text = " + ".join(f"{value:.2g}{power}" for value, power in terms if value) or "0"
        far = f"{show(found.at(FAR))} {figure.unit}".strip()
        rows.append([figure.label, text, f"{found.error:.0%}", far, found.dominant(FAR)])
    return _table(["figure", "law", "off by", f"at {FAR:,}", "largest term there"], rows)


def _memory_far(groups: Sequence[Mapping[str, Any]]) -> str:
    last = groups[-1]["weights"]
    base = last["before"]["private"]
    joined, everybody = (
        base + law({group["members"]: max(0.0, gained(group)) for group in groups}).at(FAR)
        for gained in (_gained("private", "neighbours", "before"), _gained("private", "talked", "before"))
    )
    return (
        f"In memory of their own, {FAR:,} members that talk to two neighbours each would take "
        f"{FAR * joined / 2**30:.0f} GiB, of which Ray, torch and the imports are {FAR * base / 2**30:.0f} GiB; "
        f"if everybody had called everybody, {FAR * everybody / 2**30:.0f} GiB."
    )


def _several_hosts(hosts: Sequence[Mapping[str, Any]]) -> str:
    if not hosts:
        return ""
    head = ["hosts x members (s)", *(f"{run['hosts']} x {run['members'] // run['hosts']}" for run in hosts)]
    rows = [[figure.label, *(show(figure.of(run)) for run in hosts)] for figure in TIMES]
    return f"""
The same on several hosts: network, pid, mount, ipc and uts namespaces of their own on this machine, joined by a bridge
(`tests/multihost`), so that members of different hosts talk by TCP.

{_table(head, rows)}
"""


def _planned(planned: Mapping[str, float]) -> str:
    return f"""## {planned["members"]:,.0f} members on paper

What the process that forms a group does by itself can be measured without the members: for
{planned["members"]:,.0f} of them on {planned["hosts"]:.0f} hosts it decides all routes in {show(planned["plan_s"])} s,
makes and pickles what all are told in {show(planned["tables_s"])} s ({show(planned["form_bytes"] / 1e6)} MB to form),
and when one comes back it decides again in {show(planned["replan_s"])} s and sends
{show(planned["rejoin_bytes"] / 1e6)} MB in all."""
