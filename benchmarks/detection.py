"""How fast a group detects a lost member and restores it.

Hosts are network namespaces of this machine (see ``tests/multihost/rig``) with their own Ray cluster. One of three
members is lost; the driver and another member are on the first host. Each figure is the median and the maximum of all
runs, in seconds after the fault:

- call: a call in flight to the member has ended.
- told: ``Group.on_change`` has reported "lost".
- Ray: Ray has restarted the actor (its constructor has returned).
- back: ``Group.on_change`` has reported "back", and all members can call it. rejoin is back - Ray.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks._harness import Pick
from raytorchrpc.bench.reports import Table, plain
from tests.multihost.conftest import cluster
from tests.multihost.rig import Host
from tests.multihost.session import Driver, driver

#: Deadline of the call in flight when the cable is pulled (seconds).
DEADLINE_S = 5.0
Figures = dict[str, float]


def process_dies(hosts: tuple[Host, ...], asked: Driver) -> Figures:
    """SIGKILL to the member's process."""
    return _lost(hosts, asked, lambda host, pid: host.kill(pid))


def power_fails(hosts: tuple[Host, ...], asked: Driver) -> Figures:
    """All processes of the member's host end at once; Ray restarts the actor on another host."""
    return _lost(hosts, asked, lambda host, _: host.power_off())


def _lost(hosts: tuple[Host, ...], asked: Driver, fault: Callable[[Host, int], float]) -> Figures:
    away = "away" if len(hosts) > 1 else hosts[0].name
    asked.ask("form", {"a": hosts[0].name, "b": away, "c": hosts[0].name})
    asked.ask("endure", "a", "b")
    where, _, _, pid, _ = asked.ask("ask", "a", "b", "about")
    began = fault(next(host for host in hosts if host.name == where), pid)
    _, ended = asked.ask("ended", "a", "b")
    told = asked.await_news("lost")[3]
    back = asked.await_news("back")[3]
    born = asked.ask("ask", "a", "b", "about")[4]
    figures = {"call": ended, "told": told, "Ray": born, "back": back}
    return {name: when - began for name, when in figures.items()} | {"rejoin": back - born}


def cable_pulled(hosts: tuple[Host, ...], asked: Driver) -> Figures:
    """The member's host loses its network. Measures only the end of the call, at its deadline: no member is lost."""
    asked.ask("form", {"a": hosts[0].name, "b": hosts[1].name, "c": hosts[0].name})
    asked.ask("endure", "a", "b", DEADLINE_S)
    began = hosts[1].pull_cable()
    try:
        _, ended = asked.ask("ended", "a", "b")
    finally:
        hosts[1].plug_in()
    asked.ask("wait_ready", 60)
    return {"call": ended - began}


def measure(runs: int) -> dict[str, list[Figures]]:
    """The figures of all runs, by case. Raises Unavailable if hosts cannot be created."""
    found: dict[str, list[Figures]] = {}
    for count, cases in (
        (1, {"process killed, one host": process_dies}),
        (2, {"process killed, two hosts": process_dies, f"cable pulled, deadline {DEADLINE_S:g} s": cable_pulled}),
    ):
        with cluster(count, failures=100, cpus=1) as hosts, driver(hosts[0]) as asked:
            for title, case in cases.items():
                for _ in range(runs):
                    found.setdefault(title, []).append(case(hosts, asked))
                    asked.ask("end")
    for _ in range(runs):  # hosts that are powered off stay off
        with cluster(3, failures=3, cpus=1) as hosts, driver(hosts[0]) as asked:
            found.setdefault("host without power, three hosts", []).append(power_fails(hosts, asked))
    return found


def main(pick: Pick) -> None:
    names = ("call", "told", "Ray", "back", "rejoin")
    rows = []
    for case, figures in measure(pick(5, 2, 1)).items():
        columns = [[each[name] for each in figures if name in each] for name in names]
        cells = (f"{statistics.median(values):.3f} ({max(values):.3f})" if values else "-" for values in columns)
        rows.append((case, *cells))
    print(plain(Table("Seconds after the fault: median (slowest)", ("", *names), tuple(rows))))
