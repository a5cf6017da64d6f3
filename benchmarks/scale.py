"""How the cost of a group grows: seconds, memory and bytes by members on this host, extrapolated to 1,000.

``python -m benchmarks scale [--members 8,16,32,64] [--markdown FILE] [--json FILE] [--hosts-json FILE]``. ``--json``
stores the figures and measures only missing ones; ``--from-json`` measures nothing. ``--hosts-json`` names a list of
objects, each with "hosts", "members" (on all hosts together) and "seconds" as ``scale_steps.exercise`` returns them.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

import raytorchrpc as rtr
from benchmarks import _scale_report
from benchmarks._harness import local_ray, machine
from benchmarks._process import footprint
from benchmarks.scale_steps import GROUP, TIMEOUT_S, Member, exercise
from raytorchrpc.bench.site import free_memory
from raytorchrpc.group.formation import current_owner
from raytorchrpc.group.roster import Roster
from raytorchrpc.lanes.common.acceptor import SocketAddress
from raytorchrpc.lanes.common.credentials import Instance
from raytorchrpc.lanes.torchrpc.agent import AgentIdentity, FabricPeer
from raytorchrpc.membership.join import Prepared, Probe
from raytorchrpc.topology import endpoint, probe

SIZES = (8, 16, 32, 64)
#: Members and hosts of the group that is only planned.
PLANNED = (1000, 16)
#: Actors that are started at once; more would only wait for each other's imports.
_AT_ONCE = 16
#: Free memory that the next group requires, relative to its estimated use.
_MARGIN = 1.1


class Weighed(Member):
    """A member that measures itself."""

    def weigh(self) -> dict[str, int]:
        return footprint()

    def call_neighbours(self) -> None:
        """Call the next member and the one before."""
        me, members = rtr.current_member(), rtr.get_group(GROUP).members
        for step in (1, -1):
            rtr.rpc_sync(members[(me.rank + step) % len(members)]).null()


def main(
    sizes: Sequence[int] = SIZES,
    markdown: str | None = None,
    keep: str | None = None,
    kept: str | None = None,
    hosts: str | None = None,
) -> None:
    """Measure, or read stored figures; print the document and write the requested files."""
    found = json.loads(Path(kept).read_text()) if kept else measure(sizes, Path(keep) if keep else None)
    text = _scale_report.document(found, json.loads(Path(hosts).read_text()) if hosts else [])
    if markdown:
        Path(markdown).write_text(text)
    print(text)


def measure(sizes: Sequence[int], keep: Path | None = None) -> dict[str, Any]:
    """All figures, as JSON. Those that ``keep`` already has are not measured again, so that each group can have its own
    run.
    """
    found: dict[str, Any] = {"groups": []}
    if keep is not None and keep.exists():
        found = json.loads(keep.read_text())
    found |= {"machine": machine(), "left_out": []}
    with local_ray():
        steps: list[tuple[str, Callable[[], Any]]] = [("alone", _alone), ("planned", lambda: plan_alone(*PLANNED))]
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
                found["left_out"].append(
                    f"{size} members: they would need {need / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
                )
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
            return footprint()

    actors = [ray.remote(num_cpus=0)(Plain).remote() for _ in range(4)]
    found = _medians(ray.get([actor.weigh.remote() for actor in actors], timeout=TIMEOUT_S))
    _end(actors)
    return found


def _group(size: int) -> dict[str, Any]:
    cls = ray.remote(num_cpus=0, max_restarts=-1)(Weighed)
    actors: list[Any] = []
    while len(actors) < size:
        actors += (some := [cls.remote() for _ in range(min(_AT_ONCE, size - len(actors)))])
        ray.get([actor.pid.remote() for actor in some], timeout=TIMEOUT_S)
    weights: dict[str, dict[str, float]] = {}
    sent: dict[str, int] = {}

    def weigh(stage: str) -> None:
        weights[stage] = _medians(ray.get([actor.weigh.remote() for actor in actors], timeout=TIMEOUT_S))

    def between(stage: str, group: rtr.Group) -> None:
        weigh(stage)
        if stage == "formed":
            sent.update(_sent(group))
            ray.get([actor.call_neighbours.remote() for actor in actors], timeout=TIMEOUT_S)
            weigh("neighbours")

    weigh("before")
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


def _medians(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    listed = list(rows)
    return {name: statistics.median(row[name] for row in listed) for name in listed[0]}


# --- bytes sent by the process that forms the group --------------------------------------------------------------


def _sent(group: rtr.Group) -> dict[str, int]:
    supervisor = group._own("scale")
    return sizes_of(supervisor.roster, supervisor._state.prepared)


def sizes_of(roster: Roster, prepared: Mapping[str, Prepared]) -> dict[str, int]:
    """Bytes sent to all members together: to form the group, and when one member rejoins."""
    info, first = roster.info(prepared), next(iter(roster.records))
    tables = {name: roster.table(name, info, prepared) for name in roster.records}
    specs = {name: roster.spec(name) for name in roster.records}
    told = [roster.arrival(name, info, prepared, (first,)) for name in roster.records if name != first]
    return {
        "form": sum(_size(spec) for spec in specs.values()) + sum(_size(table) for table in tables.values()),
        "rejoin": sum(_size(arrival) for arrival in told) + _size(specs[first]) + _size(tables[first]),
    }


def _size(value: Any) -> int:
    return len(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


def plan_alone(members: int, hosts: int) -> dict[str, float]:
    """Time and bytes of the process that forms a group, for simulated members: copies of this one."""
    me = probe.probe(name="member", node_ip="10.0.0.1", wants_gpu=False)
    probes, prepared = {}, {}
    for rank in range(members):
        name, host = f"member_{rank}", rank % hosts
        address = f"10.0.{host}.1"
        far = endpoint.Interface(name="eth0", up=True, addresses=(address,))
        there = me.model_copy(
            update={"name": name, "pid": rank, "boot_id": f"host-{host}", "node_ip": address, "interfaces": (far,)}
        )
        probes[name] = Probe(there, f"{host:056x}", rank, None, None, None, None, None)
    roster = Roster("planned", rtr.GroupConfig(), current_owner(), me)
    began = time.monotonic()
    roster = roster.admit(dict.fromkeys(probes), probes)
    took = {"members": members, "hosts": hosts, "plan_s": time.monotonic() - began}
    for name, record in roster.records.items():
        member = record.member
        listens = SocketAddress(
            "raytorchrpc-" + os.urandom(12).hex(),
            (probes[name].endpoint.node_ip, 40000),
            Instance(member.rank, 0),
        )
        agent = AgentIdentity(member.rpc_name, member.worker_id)
        torchrpc = FabricPeer(agent.name, agent.worker_id, "tcp://10.0.0.1:1", {})
        addresses = {"socket": listens, "torchrpc": torchrpc, "shm": f"{member.rank}:{os.urandom(8).hex()}"}
        prepared[name] = Prepared(agent, addresses, {})
    began = time.monotonic()
    sent = sizes_of(roster, prepared)
    took |= {"tables_s": time.monotonic() - began, "form_bytes": sent["form"], "rejoin_bytes": sent["rejoin"]}
    one = next(iter(probes))
    began = time.monotonic()
    roster.admit({one: None}, {one: probes[one]})
    return {**took, "replan_s": time.monotonic() - began}
