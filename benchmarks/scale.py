"""How the cost of a group grows: seconds, memory and bytes by members on this host, and on paper for more.

``python -m benchmarks scale [--members 64,128,256] [--deadline SECONDS] [--out FOLDER] [--tree NAME]`` measures groups
of real actors, prints tables, and keeps the figures in ``FOLDER/scale.json`` after each step. It begins no group for
which the memory or the time does not suffice, and says so. ``--from-json FILE,FILE`` shows stored figures of several
machines, also of ``crowds``, and measures nothing. ``--markdown FILE`` puts the tables into a page, each between
``<!-- its name -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

import raytorchrpc as rtr
from benchmarks import _group_life as life
from benchmarks._harness import Pick, machine
from benchmarks._resources import footprint
from raytorchrpc.bench.reports import grid
from raytorchrpc.bench.results import nonnegative_terms
from raytorchrpc.bench.site import free_memory
from raytorchrpc.calls.peers import Absence, PeerTable
from raytorchrpc.calls.rejoin import Owner
from raytorchrpc.calls.server.services import Services
from raytorchrpc.group.roster import Roster
from raytorchrpc.lanes.common.connections import SocketAddress
from raytorchrpc.lanes.common.handshake import Instance
from raytorchrpc.lanes.torchrpc.agent import AgentIdentity, FabricPeer
from raytorchrpc.membership.join import settings_of
from raytorchrpc.membership.messages import Listening, Prepared, Probe, packed, unpacked
from raytorchrpc.membership.view import JOINING, View
from raytorchrpc.topology import endpoint, probe

T = TypeVar("T")

SIZES = (8, 16, 32, 64)
#: Members and hosts of the group that is only planned.
PLANNED = (1000, 16)
#: What the tables predict for (members).
FAR = 1000
#: Free memory that the next group requires, relative to its estimated use.
_MARGIN = 1.1
#: Left for the tables and the end of Ray (seconds).
_RESERVE_S = 15.0
#: At which parts of the time that forming takes it is interrupted.
_INTERRUPTED_AT = (0.05, 0.25, 0.45, 0.65, 0.85)


# --- figures of groups -----------------------------------------------------------------------------------------------


def main(
    pick: Pick,
    members: str | None = None,
    deadline: float | None = None,
    out: str | None = None,
    tree: str | None = None,
    markdown: str | None = None,
    from_json: str | None = None,
) -> None:
    """Measure, or read stored figures; print the tables and write the requested files."""
    sizes = [int(size) for size in members.split(",")] if members else pick(SIZES, SIZES[:2], (4,))
    if from_json:
        runs = [json.loads(Path(path).read_text()) for path in from_json.split(",")]
    else:
        run = Measurement(Path(out) if out else None, time.monotonic() + (deadline or 3600.0), pick(5, 2, 1))
        runs = [run.found]
        run.measure(sizes, pick(PLANNED, PLANNED, (20, 2)), tree)
    shown = tables(runs)
    print("\n\n".join(shown.values()))
    if markdown:
        page = Path(markdown)
        places = "\n".join(f"<!-- {name} -->\n<!-- end -->\n" for name in shown)
        text = page.read_text() if page.exists() else places
        page.write_text(_PLACE.sub(lambda place: _filled(place, shown), text))


_PLACE = re.compile(r"(<!-- (?!end)([a-z ]+) -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)


def _filled(place: re.Match[str], shown: Mapping[str, str]) -> str:
    """The place of a table in a page, with the new table if there is one."""
    return f"{place[1]}\n{shown[place[2]]}\n\n" if place[2] in shown else place[0]


def _commit() -> str:
    """The commit of this tree, if git knows it."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"version {rtr.__version__}"


def described(tree: str | None) -> dict[str, Any]:
    """Where and of what the figures of a run are; it has none yet."""
    return {"machine": machine(), "cores": os.cpu_count(), "tree": tree or _commit(), "groups": [], "left_out": []}


class OutOfTime(Exception):
    """The time that was given to the whole run does not suffice for the next step."""


class Measurement:
    """The figures of one run, as JSON; kept in a file after each step, so that a run that is cut short leaves them."""

    def __init__(self, folder: Path | None, until: float, repeats: int) -> None:
        """``until``: begin no step that would end later (``time.monotonic``)."""
        self.found: dict[str, Any] = {}
        self._file = folder and folder / "scale.json"
        self._until, self._repeats = until, repeats
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def measure(self, sizes: Sequence[int], planned: tuple[int, int], tree: str | None) -> None:
        self.found |= described(tree)
        me = probe.probe(name="member", node_ip="10.0.0.1", wants_gpu=False)
        self.found["planned"] = simulate(me, *planned)
        for size in sizes:
            group: dict[str, Any] = {"members": size, "seconds": {}, "weights": {}, "forming": {}, "kills": []}
            self.found["groups"] = sorted([*self.found["groups"], group], key=lambda each: each["members"])
            try:
                with self._actors(size, group) as actors:
                    self._group(actors, group)
            except (OutOfTime, MemoryError) as reason:
                self._leave_out(f"{size} members: {reason}")
            except Exception as error:  # the next size may work, and what was measured counts
                self._leave_out(
                    f"{size} members, after {' and '.join([*group['seconds']][-1:]) or 'nothing'}: {error!r:.200}"
                )
            if not group["seconds"]:
                self.found["groups"].remove(group)
            self._keep()

    def _leave_out(self, reason: str) -> None:
        self.found["left_out"].append(reason)
        print(f"  not measured: {reason}", flush=True)

    def _keep(self) -> None:
        if self._file:
            self._file.write_text(json.dumps(self.found, indent=1) + "\n")

    def _left(self) -> float:
        return self._until - _RESERVE_S - time.monotonic()

    @contextmanager
    def _actors(self, size: int, group: dict[str, Any]) -> Iterator[list[Any]]:
        """So many fresh actors. Raises OutOfTime, or MemoryError, if so many do not fit."""
        known = [each["seconds"]["start"] / each["members"] for each in self.found["groups"] if each["seconds"]]
        # Part of the figures is worth it: what the time does not suffice for is left out.
        if known and (needs := 1.5 * known[-1] * size) > self._left():
            raise OutOfTime(f"they need about {needs:.0f} s, and {self._left():.0f} s are left")
        began, few, actors = time.monotonic(), min(size, os.cpu_count() or 1), list[Any]()
        try:
            free = free_memory()
            actors += life.start(few, self._left())
            each = statistics.median(row["pss"] for row in life.of_all(actors, "weigh"))
            if (needs := each * size * _MARGIN) > free:
                raise MemoryError(f"they would need {needs / _GIB:.1f} GiB, and {free / _GIB:.1f} are free")
            actors += life.start(size - few, self._left())
            group["seconds"]["start"] = time.monotonic() - began
            yield actors
        finally:
            life.end(actors)

    def _group(self, actors: list[Any], group: dict[str, Any]) -> None:
        """All steps with these fresh actors; each is kept when it is done."""
        seconds, size = group["seconds"], len(actors)

        def step(name: str, took: float) -> None:
            seconds[name] = took
            self._keep()
            print(f"  {size} members: {name} {show(took)} s", flush=True)
            if self._left() < 0:
                raise OutOfTime(f"the time was up after {name!r}")

        def weigh(stage: str) -> None:
            group["weights"][stage] = life.medians(life.of_all(actors, "weigh"))
            group["forming"][stage] = footprint()

        window_s = min(5.0, self._repeats * 1.0)
        step("start", seconds["start"])
        weigh("before")
        noop = [life.seconds_of(lambda: life.of_all(actors, "membership")) for _ in range(3)]
        step("ray_call", statistics.median(noop))
        group["cpu_before"] = life.cpu_at_rest(window_s)
        took: dict[str, float] = {}
        with life.formed(actors, took) as formed:
            step("form", took["form"])
            weigh("formed")
            supervisor = formed._own("scale")
            group["sent"] = sizes_of(supervisor.roster, supervisor._core.listening())
            life.of_all(actors, "call_neighbours")
            weigh("neighbours")
            # Long after forming, whose last work, the supervisor's connections, is done later.
            group["cpu_formed"] = life.cpu_at_rest(window_s)
            group["pair"] = life.first_calls(actors, 4 * self._repeats)
            step("first_calls", life.call_all_pairs(actors))
            step("calls", life.call_all_pairs(actors))
            weigh("talked")
            self._kill(actors, formed, group, (self._repeats + 1) // 2)
        step("shutdown", took["shutdown"])
        again = []
        for _ in range(3):
            with life.formed(actors, took):
                again.append(took["form"])
        step("form_again", statistics.median(again))
        stopped = [life.interrupt_forming(actors, part * seconds["form_again"]) for part in _INTERRUPTED_AT]
        group["interrupted"] = [each for each in stopped if each]
        step("interrupted", max((each["left"] for each in group["interrupted"]), default=0.0))
        with life.formed(actors, took) as formed:
            self._kill(actors, formed, group, self._repeats // 2)
        step("ray_restart", life.kill_some(actors, None)["ray"])

    def _kill(self, actors: list[Any], formed: rtr.Group, group: dict[str, Any], repeats: int) -> None:
        """Kill every tenth member so often. In the first group, all have called each other, and do so again."""
        size, talk = len(actors), "shutdown" not in group["seconds"]
        for _ in range(repeats):
            killed = {"talk": talk, **life.kill_some(actors, formed, first=len(group["kills"]))}
            if talk:
                killed["calls_after"] = life.call_all_pairs(actors)
            group["kills"].append(killed)
            self._keep()
            print(
                f"  {size} members: killed, {', '.join(f'{key} {value:.3g}' for key, value in killed.items())}",
                flush=True,
            )
            if self._left() < 0:
                raise OutOfTime(f"the time was up after kill {len(group['kills'])}")


# --- bytes sent by the process that forms the group --------------------------------------------------------------


def sizes_of(roster: Roster, prepared: Mapping[str, Prepared]) -> dict[str, int]:
    """Bytes sent to all members together: to form the group, and when one member rejoins. What all members of a node
    share (``shared``) is sent to each node once.
    """
    first, view = next(iter(roster.records)), View(roster.peers(prepared))
    listening = Listening(roster.name, roster.generation, prepared, life.TIMEOUT_S)
    shared = sum(len(packed(message)) for message in (roster.description, listening))
    specs = {name: _size(roster.spec(name)) for name in roster.records}
    told = 0
    for change in (
        lambda: view.mark({0: Absence("its process ended", for_good=False)}),
        lambda: view.admit(roster.peers(prepared, [first]), JOINING),
        lambda: view.mark({0: None}),
    ):
        change()
        told += (len(roster.records) - 1) * _size(view.since(view.version - 1))
    nodes = len({record.member.node_id for record in roster.records.values()})
    return {
        "form": sum(specs.values()) + nodes * shared,
        "shared": shared,
        "rejoin": told + specs[first] + shared,
    }


def _size(value: Any) -> int:
    return len(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


def simulate(me: endpoint.Endpoint, members: int, hosts: int) -> dict[str, float]:
    """Time and bytes of the process that forms a group of copies of ``me``; seconds are those of this thread on a core.

    plan_s: the forming process decides everything. tables_s: it makes and packs what it sends. join_s: one member
    unpacks it and derives its settings. replan_s: one member comes back.
    """
    probes, prepared = {}, {}
    for rank in range(members):
        name, host = f"member_{rank}", rank % hosts
        address = f"10.{host >> 8}.{host & 255}.1"
        far = endpoint.Interface(name="eth0", up=True, addresses=(address,))
        copied = {"name": name, "pid": rank, "boot_id": f"host-{host}", "node_ip": address, "interfaces": (far,)}
        there = pickle.loads(pickle.dumps(me.changed(copied)))  # as a member sends it: nothing is shared
        probes[name] = Probe(there, f"{host:056x}", rank, None, None, None, None, None, "")
    alone = Roster("planned", rtr.GroupConfig(), Owner("job", None), me)
    took: dict[str, float] = {"members": members, "hosts": hosts}
    took["plan_s"], roster = _timed(lambda: alone.admit(dict.fromkeys(probes), probes))
    for name, record in roster.records.items():
        member, its = record.member, (probes[name].endpoint.node_ip, 40000)
        listens = SocketAddress("raytorchrpc-" + os.urandom(12).hex(), its, Instance(member.rank, 0))
        agent = AgentIdentity(member.rpc_name, member.worker_id)
        torchrpc = FabricPeer(agent.name, agent.worker_id, f"uv://{its[0]}:{30000 + member.rank % 30000}", {})
        addresses = {"socket": listens, "torchrpc": torchrpc, "shm": f"{member.rank}:{os.urandom(8).hex()}"}
        prepared[name] = Prepared(agent=agent, addresses=addresses, retries={}, pid=record.probe.pid)
    took["tables_s"], sent = _timed(lambda: sizes_of(roster, prepared))
    one = next(iter(probes))
    description, listening = packed(roster.description), packed(Listening("", "", prepared, life.TIMEOUT_S))

    def join() -> PeerTable:
        info = unpacked(description)
        settings_of(roster.spec(one), info)
        peers = PeerTable("planned", Services())
        peers.add_peers(info.with_agents(unpacked(listening).peers).members, lambda member: None)  # type: ignore[arg-type, return-value]
        return peers

    took["join_s"], _ = _timed(join)
    took["replan_s"], _ = _timed(lambda: roster.admit({one: None}, {one: probes[one]}))
    return {**took, **{f"{name}_bytes": size for name, size in sent.items()}}


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    gc.collect()
    gc.disable()  # its time depends on all that this process holds
    try:
        began = time.thread_time()
        done = work()
        return time.thread_time() - began, done
    finally:
        gc.enable()


def slope(points: Mapping[int, float]) -> float:
    """Of the line through these points, both axes logarithmic: 1 where a figure is proportional to n."""
    return float(np.polyfit(np.log(list(points)), np.log(list(points.values())), 1)[0])


# --- tables ----------------------------------------------------------------------------------------------------------

_MIB, _GIB = 2**20, 2**30
Group = Mapping[str, Any]
STAGES = {
    "before": "not joined; torch and raytorchrpc imported",
    "formed": "joined, no calls yet",
    "neighbours": "each has called two neighbours",
    "talked": "each has called all members",
}


Figures = dict[tuple[str, str], float]
"""By row and unit."""


def times(group: Group) -> Figures:
    """The seconds of the steps that were measured."""
    kills, took = group["kills"], group["seconds"]

    def worst(
        key: Callable[[Mapping[str, float]], float], among: Sequence[Mapping[str, float]] = kills
    ) -> float | None:
        return max(map(key, among), default=None)

    rows = {
        "Ray starts the actors": took.get("start"),
        "Ray calls each actor once": took.get("ray_call"),
        "form the group (`init_group`), fresh actors": took.get("form"),
        "the same actors again": took.get("form_again"),
        "all-to-all calls, first time": took.get("first_calls"),
        "all-to-all calls, again": took.get("calls"),
        "kill every tenth member, until `on_change` has reported all": worst(lambda kill: kill["lost"]),
        "until Ray has restarted all of them": worst(lambda kill: kill["ray"]),
        "from then until all are back (`wait_ready`)": worst(lambda kill: kill["ready"] - kill["ray"]),
        "until all are back, together": worst(lambda kill: kill["ready"]),
        "Ray's restart of as many without a group": took.get("ray_restart"),
        "`shutdown`": took.get("shutdown"),
        "Ctrl-C while it forms, until no member is in it": took.get("interrupted"),
    }
    return {(label, "s"): value for label, value in rows.items() if value is not None}


def pairs(group: Group) -> Figures:
    """Milliseconds of calls between two members."""
    texts = {"first": "the first call", "first_worst": "the slowest first call", "again": "the next call"}
    return {(text, "ms"): group["pair"][key] * 1e3 for key, text in texts.items()} if "pair" in group else {}


def forming(group: Group) -> Figures:
    """What the process that forms the group has, and its CPU time at rest."""
    whole = {
        (f"{what}, {text}", unit): group["forming"][stage][key] / scale
        for what, key, unit, scale in (
            ("private memory", "private", "MiB", _MIB),
            ("descriptors", "descriptors", "", 1),
            ("threads", "threads", "", 1),
        )
        for stage, text in (("before", "no group"), ("formed", "formed"), ("talked", "after all-to-all calls"))
        if stage in group["forming"]
    }
    rest = {"cpu_before": "no group", "cpu_formed": "formed"}
    cpu = {(f"CPU at rest, {text}", "% of a core"): group[key] for key, text in rest.items() if key in group}
    return {**whole, **cpu}


def traffic(group: Group) -> Figures:
    """What is sent to all members."""
    when = {"form": "the group forms", "rejoin": "one comes back"}
    sent = group.get("sent", {})
    return {(f"sent to all members when {text}", "MB"): sent[key] / 1e6 for key, text in when.items() if key in sent}


def gains(group: Group) -> Figures:
    """What each step adds to a member."""
    texts = {"formed": "joining", "neighbours": "calling two neighbours", "talked": "calling all members"}
    held, before = group["weights"], dict(zip(texts, STAGES, strict=False))
    found: Figures = {}
    for stage, text in texts.items():
        if stage in held:
            added = max(0.0, held[stage]["private"] - held[before[stage]]["private"]) / _MIB
            found[f"memory added by {text}, per member", "MiB"] = added
            found[f"sockets of a member after {text}", ""] = held[stage]["sockets"]
    return found


def tables(runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Markdown, by the name of its place in ``docs/scale.md``. ``runs``: one per machine."""
    shown = {
        "machine": _described(runs) if any(run["groups"] for run in runs) else "",
        "memory": _of_each(runs, _memory),
        "traffic": _of_each(runs[:1], lambda run: _table(run, traffic)),
        "laws": _of_each(runs[:1], lambda run: _laws(run["groups"])),
        "on paper": "".join(_on_paper(run["planned"]) for run in runs[-1:] if "planned" in run),
        "pairs": _of_each(runs, lambda run: _table(run, pairs)),
        "forming": _of_each(runs, lambda run: _table(run, forming)),
        "time": _of_each(runs, lambda run: _table(run, times)),
        "crowds": "\n\n".join(_crowd(run) for run in runs if "crowd" in run),
    }
    return {name: text for name, text in shown.items() if text}


def _on_paper(planned: Mapping[str, Any]) -> str:
    rows = {
        "planning": f"{show(planned['plan_s'])} s",
        "making and packing all messages of forming, and of a return": f"{show(planned['tables_s'])} s",
        "sent when the group forms": f"{show(planned['form_bytes'] / 1e6)} MB",
        "planning again when one member comes back": f"{show(planned['replan_s'])} s",
        "sent when one member comes back": f"{show(planned['rejoin_bytes'] / 1e6)} MB",
    }
    return grid([f"{planned['members']:,} members on {planned['hosts']} hosts", ""], rows.items())


def _described(runs: Sequence[Mapping[str, Any]]) -> str:
    left_out: dict[str, list[str]] = {}
    for run in runs:
        left_out.setdefault(f"- {run['machine']}; raytorchrpc {run['tree']}", []).extend(run["left_out"])
    return "\n".join("\n  Not measured: ".join([where, *reasons]) for where, reasons in left_out.items())


def _of_each(runs: Sequence[Mapping[str, Any]], table: Callable[[Mapping[str, Any]], str]) -> str:
    """The table of each machine that has figures, below its number of cores."""
    return "\n\n".join(f"On {run['cores']} cores:\n\n{table(run)}" for run in runs if run["groups"])


def show(value: float) -> str:
    """Two significant digits, and no exponent."""
    if value == 0:
        return "0"
    digits = max(0, 1 - int(np.floor(np.log10(abs(value)))))
    return f"{value:,.{min(digits, 6)}f}"


def _table(run: Mapping[str, Any], figures: Callable[[Group], Figures]) -> str:
    columns = {f"{group['members']}": figures(group) for group in run["groups"]}
    rows = dict.fromkeys(row for column in columns.values() for row in column)
    cells = ([" ".join(filter(None, (label, f"({unit})" if unit else ""))),
              *(show(column[label, unit]) if (label, unit) in column else "" for column in columns.values())]
             for label, unit in rows)  # fmt: skip
    return grid(["members", *columns], list(cells))


def _memory(run: Mapping[str, Any]) -> str:
    rows = []
    for group in run["groups"]:
        for stage, label in STAGES.items():
            if one := group["weights"].get(stage):
                memory = (f"{one[what] / _MIB:.1f}" for what in ("private", "pss"))
                counts = (f"{one[what]:g}" for what in ("descriptors", "sockets", "threads"))
                rows.append([f"{group['members']}: {label}", *memory, *counts])
    return grid(["members", "private (MiB)", "PSS (MiB)", "descriptors", "of these sockets", "threads"], rows)


def _crowd(run: Mapping[str, Any]) -> str:
    """Of ``benchmarks crowds``."""
    members, lines = run["crowd"]["members"], run["crowd"]["lines"]
    rows = [
        [
            line["what"],
            f"{show(line['ours'])} {line['unit']}",
            f"{show(line['peer'])} {line['unit']}",
            line["peer_name"],
        ]
        for line in lines
    ]
    return f"On {run['cores']} cores, {members} members:\n\n{grid(['', 'takes', 'beside', 'which is'], rows)}"


def _laws(groups: Sequence[Group]) -> str:
    rows = []
    points = {group["members"]: {**times(group), **traffic(group), **gains(group)} for group in groups}
    labels = dict.fromkeys(label for figures in points.values() for label in figures)
    for label, unit in labels:
        measured = {members: figures[label, unit] for members, figures in points.items() if (label, unit) in figures}
        if len(measured) < 2:  # nothing says how it grows
            continue
        found = law(measured)
        terms = ((found.a, ""), (found.b, " n"), (found.c, " n^2"))
        text = " + ".join(f"{value:.2g}{power}" for value, power in terms if value) or "0"
        far = f"{show(found.at(FAR))} {unit}".strip()
        rows.append([label, text, f"{found.error:.0%}", far, found.dominant(FAR)])
    return grid(["figure", "law", "off by", f"at {FAR:,}", "largest term there"], rows)


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
