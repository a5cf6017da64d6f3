"""How the cost of a group grows: seconds, memory and bytes by members on this host, extrapolated to 1,000.

``python -m benchmarks scale [--members 8,16,32,64] [--markdown FILE] [--json FILE] [--hosts-json FILE]`` prints tables;
``--markdown`` puts them into a page, each between ``<!-- its name -->`` and ``<!-- end -->``. ``--json`` stores the
figures and measures only missing ones; ``--from-json`` measures nothing. ``--hosts-json`` names a list of objects, each
with "hosts", "members" (on all hosts together) and "seconds" as ``exercise`` returns them: it works with actors on one
host and on several (``tests/multihost``).
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import queue
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import ray
from ray.exceptions import RayActorError

import raytorchrpc as rtr
from benchmarks._harness import Pick, machine
from benchmarks._resources import footprint
from raytorchrpc.bench.reports import grid
from raytorchrpc.bench.results import nonnegative_terms
from raytorchrpc.bench.site import free_memory
from raytorchrpc.calls.peers import PeerTable
from raytorchrpc.calls.rejoin import Owner
from raytorchrpc.calls.server.services import Services
from raytorchrpc.group.roster import Roster
from raytorchrpc.group.supervisor import Change
from raytorchrpc.lanes.common.connections import SocketAddress
from raytorchrpc.lanes.common.handshake import Instance
from raytorchrpc.lanes.torchrpc.agent import AgentIdentity, FabricPeer
from raytorchrpc.membership.messages import Listening, Prepared, Probe, packed, unpacked
from raytorchrpc.membership.settings import settings_of
from raytorchrpc.topology import endpoint, probe

T = TypeVar("T")

SIZES = (8, 16, 32, 64)
#: Members and hosts of the group that is only planned.
PLANNED = (1000, 16)
#: What the tables predict for (members).
FAR = 1000
#: Actors that are started at once; more would only wait for each other's imports.
_AT_ONCE = 16
#: Free memory that the next group requires, relative to its estimated use.
_MARGIN = 1.1
#: Timeout of each step (seconds).
TIMEOUT_S = 120.0
#: The group's name.
GROUP = "scale"


# --- the timed life of a group -----------------------------------------------------------------------------------


class Member:
    """A member of the group; Ray restarts it (``max_restarts``)."""

    @rtr.method(concurrent=True)
    def null(self) -> None:
        """A call without arguments or result."""

    def weigh(self) -> dict[str, int]:
        return footprint()

    def call_neighbours(self) -> None:
        """Call the next member and the one before."""
        me, members = rtr.current_member(), rtr.get_group(GROUP).members
        for step in (1, -1):
            rtr.rpc_sync(members[(me.rank + step) % len(members)]).null()

    def call_all(self) -> int:
        """Call every other member once, concurrently; returns the number of calls."""
        me = rtr.current_member()
        calls = [rtr.rpc_async(peer).null() for peer in rtr.get_group(GROUP).members if peer.rank != me.rank]
        for call in calls:
            call.wait()
        return len(calls)

    def await_everybody(self) -> None:
        rtr.get_group(GROUP).wait_ready(TIMEOUT_S)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def exercise(
    actors: Sequence[Any],
    between: Callable[[str, rtr.Group], object] = lambda stage, group: None,
) -> dict[str, float]:
    """Run all steps with live ``Member`` actors (with ``max_restarts``); returns the seconds of each.

    form: ``init_group``. first_calls: every member calls every other, which also opens all connections. calls: again,
    over open connections. lost: from the kill of every tenth member to the last ``on_change`` about it. ray_back: until
    Ray has restarted the last of them. rejoin: from there to ``wait_ready``. calls_after: every member calls every
    other again. shutdown: ``Group.shutdown``. ``between`` is called with "formed" before the first call and with
    "talked" after the calls; its time is not counted. Raises what a step raises, after shutting the group down.
    """
    took: dict[str, float] = {}
    news: queue.SimpleQueue[tuple[float, Change]] = queue.SimpleQueue()
    _all(actors, "weigh")  # wait until they have started
    began = time.monotonic()
    group = rtr.init_group(actors, name=GROUP, timeout=TIMEOUT_S)
    took["form"] = time.monotonic() - began
    try:
        group.on_change(lambda change: news.put((time.monotonic(), change)))
        between("formed", group)
        took["first_calls"] = _call_all_pairs(actors)
        took["calls"] = _call_all_pairs(actors)
        between("talked", group)
        doomed = list(actors[::10])
        names = {group.members[rank].name for rank in range(0, len(actors), 10)}
        before = {member.name: member.incarnation for member in group.members}
        began = time.monotonic()
        for actor in doomed:
            actor.die.remote()
        took["lost"] = _await(news, "lost", names) - began
        for actor in doomed:
            _await_restart(actor)
        alive = time.monotonic()
        took["ray_back"] = alive - began
        group.wait_ready(TIMEOUT_S)
        took["rejoin"] = time.monotonic() - alive
        for member in group.members:
            if member.incarnation != before[member.name] + (member.name in names):
                raise AssertionError(f"{member} has the wrong incarnation after its restart")
        _all(actors, "await_everybody")
        took["calls_after"] = _call_all_pairs(actors)
    finally:
        began = time.monotonic()
        group.shutdown(TIMEOUT_S)
        took["shutdown"] = time.monotonic() - began
    return took


def _await(news: queue.SimpleQueue[tuple[float, Change]], kind: str, names: set[str]) -> float:
    """The time when the last of these changes was reported."""
    left, until = set(names), time.monotonic() + TIMEOUT_S
    while True:
        when, change = news.get(timeout=max(0.0, until - time.monotonic()))
        if change.kind == kind:
            left.difference_update(change.members)
        if not left:
            return when


def _await_restart(actor: Any) -> None:
    """Wait until Ray has restarted the actor; until then calls may fail or block."""
    until = time.monotonic() + TIMEOUT_S
    while True:
        try:
            _all([actor], "weigh")
            return
        except RayActorError:
            if time.monotonic() > until:
                raise
            threading.Event().wait(0.02)  # Ray has no event to wait for


def _call_all_pairs(actors: Sequence[Any]) -> float:
    """Seconds until every member has called every other, including Ray's own calls."""
    began = time.monotonic()
    for count in _all(actors, "call_all"):
        if count != len(actors) - 1:
            raise AssertionError(f"{count} calls of {len(actors) - 1}")
    return time.monotonic() - began


def _all(actors: Iterable[Any], method: str) -> list[Any]:
    return list(ray.get([getattr(actor, method).remote() for actor in actors], timeout=TIMEOUT_S))


# --- figures of groups -------------------------------------------------------------------------------------------


def main(
    pick: Pick,
    members: str | None = None,
    markdown: str | None = None,
    json: str | None = None,
    from_json: str | None = None,
    hosts_json: str | None = None,
) -> None:
    """Measure, or read stored figures; print the tables and write the requested files."""
    sizes = [int(size) for size in members.split(",")] if members else pick(SIZES, SIZES[:2], (3,))
    keep = Path(json) if json else None
    found = _read(from_json) if from_json else measure(sizes, keep, pick(PLANNED, PLANNED, (20, 2)))
    shown = tables(found, _read(hosts_json) if hosts_json else [])
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


def _read(path: str | Path) -> Any:
    return json.loads(Path(path).read_text())


def measure(sizes: Sequence[int], keep: Path | None, planned: tuple[int, int]) -> dict[str, Any]:
    """All figures, as JSON. Those that ``keep`` already has are not measured again, so that each group can have its own
    run.
    """
    found: dict[str, Any] = _read(keep) if keep is not None and keep.exists() else {"groups": []}
    found |= {"machine": machine(), "left_out": []}
    steps: list[tuple[str, Callable[[], Any]]] = [("alone", _alone), ("planned", lambda: plan_alone(*planned))]
    for name, step in steps:
        if name not in found:
            found[name] = step()
            _keep(keep, found)
    for size in sizes:
        if any(group["members"] == size for group in found["groups"]):
            continue
        free = free_memory()
        need = size * max((group["weights"]["talked"]["pss"] for group in found["groups"]), default=0)
        if need * _MARGIN > free:
            short = f"{size} members: they would need {need / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
            found["left_out"].append(short)
            break
        found["groups"] = sorted([*found["groups"], _group(size)], key=lambda group: group["members"])
        _keep(keep, found)
    return found


def _keep(path: Path | None, found: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


def _alone() -> dict[str, float]:
    """Memory of actors without torch."""

    class Plain:  # defined here, because importing this module would import torch
        def weigh(self) -> dict[str, int]:
            with open("/proc/self/smaps_rollup") as file:
                return {"private": sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_"))}

    actors = [ray.remote(num_cpus=0)(Plain).remote() for _ in range(4)]
    found = _medians(_all(actors, "weigh"))
    _end(actors)
    return found


def _group(size: int) -> dict[str, Any]:
    cls = ray.remote(num_cpus=0, max_restarts=-1)(Member)
    actors: list[Any] = []
    while len(actors) < size:
        actors += (some := [cls.remote() for _ in range(min(_AT_ONCE, size - len(actors)))])
        _all(some, "weigh")
    weights: dict[str, dict[str, float]] = {}
    sent: dict[str, int] = {}

    def between(stage: str, group: rtr.Group) -> None:
        weights[stage] = _medians(_all(actors, "weigh"))
        if stage == "formed":
            supervisor = group._own("scale")
            sent.update(sizes_of(supervisor.roster, supervisor._state.prepared))
            _all(actors, "call_neighbours")
            weights["neighbours"] = _medians(_all(actors, "weigh"))

    weights["before"] = _medians(_all(actors, "weigh"))
    seconds = exercise(actors, between=between)
    _end(actors)
    return {"members": size, "seconds": seconds, "weights": weights, "sent": sent}


def _end(actors: Sequence[Any]) -> None:
    """Kill actors and wait until their processes have exited, which frees their memory."""
    pids = ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in actors], timeout=TIMEOUT_S)
    for actor in actors:
        ray.kill(actor, no_restart=True)
    deadline = time.monotonic() + TIMEOUT_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            raise TimeoutError("killed actors have not exited")
        time.sleep(0.05)


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


# --- bytes sent by the process that forms the group --------------------------------------------------------------


def sizes_of(roster: Roster, prepared: Mapping[str, Prepared]) -> dict[str, int]:
    """Bytes sent to all members together: to form the group, and when one member rejoins. What all members of a node
    share (``shared``) is sent to each node once.
    """
    info, first = roster.info(prepared), next(iter(roster.records))
    listening = Listening(roster.name, roster.generation, prepared, TIMEOUT_S)
    shared = sum(len(packed(message)) for message in (roster.description, listening))
    specs = {name: _size(roster.spec(name)) for name in roster.records}
    told = [_size(roster.arrival(name, info, prepared, (first,))) for name in roster.records if name != first]
    nodes = len({record.member.node_id for record in roster.records.values()})
    return {
        "form": sum(specs.values()) + nodes * shared,
        "shared": shared,
        "rejoin": sum(told) + specs[first] + shared,
    }


def _size(value: Any) -> int:
    return len(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


def plan_alone(members: int, hosts: int) -> dict[str, float]:
    """Time and bytes of the process that forms a group, for simulated members: copies of this one."""
    return simulate(probe.probe(name="member", node_ip="10.0.0.1", wants_gpu=False), members, hosts)


def simulate(me: endpoint.Endpoint, members: int, hosts: int) -> dict[str, float]:
    """The same for copies of ``me``; seconds are those of this thread on a core.

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
        probes[name] = Probe(there, f"{host:056x}", rank, None, None, None, None, None)
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
    description, listening = packed(roster.description), packed(Listening("", "", prepared, TIMEOUT_S))

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


# --- tables ------------------------------------------------------------------------------------------------------

_MIB = 2**20
Group = Mapping[str, Any]
#: By row, the steps of ``exercise`` whose seconds it shows.
TIMES = {
    "form the group (`init_group`)": ("form",),
    "all-to-all calls, first time": ("first_calls",),
    "all-to-all calls, again": ("calls",),
    "kill every tenth member, until `on_change` has reported all": ("lost",),
    # Ray answers for a restarted actor only after what the group has asked of it, so the second is nearly nothing.
    "until all are back (`wait_ready`), with Ray's restart": ("ray_back", "rejoin"),
    "all-to-all calls, after the restart": ("calls_after",),
    "`shutdown`": ("shutdown",),
}
STAGES = {
    "before": "not joined; torch and raytorchrpc imported",
    "formed": "joined, no calls yet",
    "neighbours": "each has called two neighbours",
    "talked": "each has called all members",
}


Figures = dict[tuple[str, str], float]
"""By row and unit."""


def times(group: Group) -> Figures:
    """The seconds of the steps."""
    return {(label, "s"): sum(group["seconds"][step] for step in steps) for label, steps in TIMES.items()}


def traffic(group: Group) -> Figures:
    """What is sent to all members."""
    when = {"form": "the group forms", "rejoin": "one comes back"}
    return {(f"sent to all members when {text}", "MB"): group["sent"][key] / 1e6 for key, text in when.items()}


def gains(group: Group) -> Figures:
    """What each step adds to a member."""
    texts = {"formed": "joining", "neighbours": "calling two neighbours", "talked": "calling all members"}
    held, before = group["weights"], dict(zip(texts, STAGES, strict=False))
    memory = {stage: max(0.0, held[stage]["private"] - held[before[stage]]["private"]) / _MIB for stage in texts}
    return {
        **{(f"memory added by {texts[stage]}, per member", "MiB"): added for stage, added in memory.items()},
        **{(f"sockets of a member after {text}", ""): held[stage]["sockets"] for stage, text in texts.items()},
    }


def tables(found: Mapping[str, Any], hosts: Sequence[Group]) -> dict[str, str]:
    """Markdown, by the name of its place in ``docs/scale.md``."""
    planned = found["planned"]
    by_size = {f"{group['members']}": group for group in found["groups"]}
    by_hosts = {f"{run['hosts']} x {run['members'] // run['hosts']}": run for run in hosts}
    on_paper = {
        "planning": f"{show(planned['plan_s'])} s",
        "making and packing all messages of forming, and of a return": f"{show(planned['tables_s'])} s",
        "sent when the group forms": f"{show(planned['form_bytes'] / 1e6)} MB",
        "planning again when one member comes back": f"{show(planned['replan_s'])} s",
        "sent when one member comes back": f"{show(planned['rejoin_bytes'] / 1e6)} MB",
    }
    left_out = "".join(f"\nNot measured: {reason}." for reason in found["left_out"])
    return {
        "machine": f"Measured with `python -m benchmarks scale` on {found['machine']}.{left_out}",
        "time": _table("members (s)", by_size, times),
        **({"hosts": _table("hosts x members (s)", by_hosts, times)} if hosts else {}),
        "memory": _memory(found),
        "traffic": _table("members (MB)", by_size, traffic),
        "laws": _laws(found["groups"]),
        "on paper": grid([f"{planned['members']:,} members on {planned['hosts']} hosts", ""], on_paper.items()),
    }


def show(value: float) -> str:
    """Two significant digits, and no exponent."""
    if value == 0:
        return "0"
    digits = max(0, 1 - int(np.floor(np.log10(abs(value)))))
    return f"{value:,.{min(digits, 6)}f}"


def _table(head: str, groups: Mapping[str, Group], figures: Callable[[Group], Figures]) -> str:
    columns = [figures(group) for group in groups.values()]
    return grid([head, *groups], [[row[0], *(show(column[row]) for column in columns)] for row in columns[0]])


def _memory(found: Mapping[str, Any]) -> str:
    rows = [["a plain Ray actor without torch", f"{found['alone']['private'] / _MIB:.1f}", *[""] * 4]]
    for group in found["groups"]:
        for stage, label in STAGES.items():
            one = group["weights"][stage]
            memory = (f"{one[what] / _MIB:.1f}" for what in ("private", "pss"))
            counts = (f"{one[what]:g}" for what in ("descriptors", "sockets", "threads"))
            rows.append([f"{group['members']}: {label}", *memory, *counts])
    return grid(["members", "private (MiB)", "PSS (MiB)", "descriptors", "of these sockets", "threads"], rows)


def _laws(groups: Sequence[Group]) -> str:
    rows = []
    points = [(group["members"], {**times(group), **traffic(group), **gains(group)}) for group in groups]
    for label, unit in points[0][1]:
        found = law({members: figures[label, unit] for members, figures in points})
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
