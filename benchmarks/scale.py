"""How a group grows: seconds, memory and bytes for more and more members on this host, and what follows for 1,000.

``python -m benchmarks scale [--members 8,16,32,64] [--markdown FILE] [--json FILE] [--hosts-json FILE]``. ``--json``
keeps the figures, and measures only what it does not have yet; ``--from-json`` measures nothing. ``--hosts-json`` names
a list of objects, each with "hosts", "members" (of all hosts together) and "seconds" as ``scale_steps.exercise``
returns them.
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
from benchmarks import _growth
from benchmarks._harness import machine, start_ray
from benchmarks.scale_steps import GROUP, PATIENCE_S, Member, exercise
from raytorchrpc.group.participants import current_owner
from raytorchrpc.group.roster import Roster
from raytorchrpc.lanes.common.acceptor import SocketAddress
from raytorchrpc.lanes.common.credentials import Instance
from raytorchrpc.lanes.torchrpc.agent import AgentIdentity, FabricPeer
from raytorchrpc.membership.join import Prepared, Probe
from raytorchrpc.topology import endpoint, probe

SIZES = (8, 16, 32, 64)
#: Members of the group that is only planned, and on how many hosts they are.
PLANNED = (1000, 16)
#: Actors that are started at once: more would only wait for each other's imports.
_AT_ONCE = 16
#: Of what the next group is expected to need this much has to be free.
_MARGIN = 1.1


def footprint(*_: Any) -> dict[str, int]:
    """Bytes of this process alone and with its part of what it shares (PSS); what it has open; its threads."""
    found = {"private": 0, "pss": 0}
    with open("/proc/self/smaps_rollup") as file:
        for line in file:
            field, _, rest = line.partition(":")
            if field.startswith("Private_"):
                found["private"] += int(rest.split()[0]) * 1024
            elif field == "Pss":
                found["pss"] = int(rest.split()[0]) * 1024
    sockets = 0
    descriptors = os.listdir("/proc/self/fd")
    for descriptor in descriptors:
        try:
            sockets += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
        except FileNotFoundError:  # the one that listed the directory
            continue
    return {
        **found,
        "descriptors": len(descriptors),
        "sockets": sockets,
        "threads": len(os.listdir("/proc/self/task")),
    }


class Weighed(Member):
    """Tells what it takes."""

    def weigh(self) -> dict[str, int]:
        return footprint()

    def call_neighbours(self) -> None:
        """Call the next member and the one before."""
        me, everybody = rtr.current_member(), rtr.get_group(GROUP).members
        for step in (1, -1):
            rtr.rpc_sync(everybody[(me.rank + step) % len(everybody)]).null()


def main(
    sizes: Sequence[int] = SIZES,
    markdown: str | None = None,
    keep: str | None = None,
    kept: str | None = None,
    hosts: str | None = None,
) -> None:
    """Measure, or read what was kept, and show it; write what is asked for."""
    found = json.loads(Path(kept).read_text()) if kept else measure(sizes, Path(keep) if keep else None)
    text = _growth.document(found, json.loads(Path(hosts).read_text()) if hosts else [])
    if markdown:
        Path(markdown).write_text(text)
    print(text)


def measure(sizes: Sequence[int], keep: Path | None = None) -> dict[str, Any]:
    """All figures, as JSON can keep them. What ``keep`` has already is not measured again, so that each group can have
    a quiet moment of its own.
    """
    found: dict[str, Any] = {"groups": []}
    if keep is not None and keep.exists():
        found = json.loads(keep.read_text())
    found |= {"machine": machine(), "left_out": []}
    start_ray()
    try:
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
    finally:
        ray.shutdown()
    return found


def _keep(path: Path | None, found: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


def free_memory() -> int:
    """Bytes that this machine, or the container, can still give."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("no MemAvailable in /proc/meminfo")


def _alone() -> dict[str, float]:
    """Of actors without torch."""

    class Plain:  # not by name from this module: that would import torch
        def weigh(self) -> dict[str, int]:
            with open("/proc/self/smaps_rollup") as file:
                fields = [line.split() for line in file]
            sizes = {field: int(rest[0]) * 1024 for field, *rest in fields[1:]}
            private = sum(size for field, size in sizes.items() if field.startswith("Private_"))
            return {"private": private, "pss": sizes["Pss:"]}

    actors = [ray.remote(num_cpus=0)(Plain).remote() for _ in range(4)]
    found = _medians(ray.get([actor.weigh.remote() for actor in actors], timeout=PATIENCE_S))
    _end(actors)
    return found


def _group(size: int) -> dict[str, Any]:
    cls = ray.remote(num_cpus=0, max_restarts=-1)(Weighed)
    actors: list[Any] = []
    while len(actors) < size:
        actors += (some := [cls.remote() for _ in range(min(_AT_ONCE, size - len(actors)))])
        ray.get([actor.pid.remote() for actor in some], timeout=PATIENCE_S)
    weights: dict[str, dict[str, float]] = {}
    sent: dict[str, int] = {}

    def weigh(stage: str) -> None:
        weights[stage] = _medians(ray.get([actor.weigh.remote() for actor in actors], timeout=PATIENCE_S))

    def between(stage: str, group: rtr.Group) -> None:
        weigh(stage)
        if stage == "formed":
            sent.update(_sent(group))
            ray.get([actor.call_neighbours.remote() for actor in actors], timeout=PATIENCE_S)
            weigh("neighbours")

    weigh("before")
    seconds = exercise(actors, between=between)
    _end(actors)
    return {"members": size, "seconds": seconds, "weights": weights, "sent": sent}


def _end(actors: Sequence[Any]) -> None:
    """Blocks until their processes are gone, so that the next group finds their memory free."""
    pids = ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in actors], timeout=PATIENCE_S)
    for actor in actors:
        ray.kill(actor, no_restart=True)
    deadline = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            raise TimeoutError("actors that were killed are still there")
        time.sleep(0.05)


def _medians(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    listed = list(rows)
    return {name: statistics.median(row[name] for row in listed) for name in listed[0]}


# --- what whoever forms the group sends ------------------------------------------------------------------------


def _sent(group: rtr.Group) -> dict[str, int]:
    supervisor = group._own("scale")
    return sizes_of(supervisor.roster, supervisor.prepared)


def sizes_of(roster: Roster, prepared: Mapping[str, Prepared]) -> dict[str, int]:
    """Bytes to all members together: as they form, and as one of them comes back."""
    info, first = roster.info(prepared), next(iter(roster.seats))
    tables = {name: roster.table(name, info, prepared, 60) for name in roster.seats}
    specs = {name: roster.spec(name) for name in roster.seats}
    told = [roster.arrival(name, info, prepared, 60, (first,)) for name in roster.seats if name != first]
    return {
        "form": sum(_size(spec) for spec in specs.values()) + sum(_size(table) for table in tables.values()),
        "rejoin": sum(_size(arrival) for arrival in told) + _size(specs[first]) + _size(tables[first]),
    }


def _size(value: Any) -> int:
    return len(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


def plan_alone(members: int, hosts: int) -> dict[str, float]:
    """What the process that forms a group does by itself, for members that only exist on paper: copies of this one."""
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
    for name, seat in roster.seats.items():
        listens = SocketAddress(
            "raytorchrpc-" + os.urandom(12).hex(), (probes[name].endpoint.node_ip, 40000), Instance(seat.rank, 0)
        )
        agent = AgentIdentity(roster.rpc_name(name), seat.worker_id)
        torchrpc = FabricPeer(agent.name, agent.worker_id, "tcp://10.0.0.1:1", {})
        addresses = {"socket": listens, "torchrpc": torchrpc, "shm": f"{seat.rank}:{os.urandom(8).hex()}"}
        prepared[name] = Prepared(agent, addresses, {})
    began = time.monotonic()
    sent = sizes_of(roster, prepared)
    took |= {"tables_s": time.monotonic() - began, "form_bytes": sent["form"], "rejoin_bytes": sent["rejoin"]}
    one = next(iter(probes))
    began = time.monotonic()
    roster.admit({one: None}, {one: probes[one]})
    return {**took, "replan_s": time.monotonic() - began}
