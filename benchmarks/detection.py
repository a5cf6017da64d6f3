"""How soon a group knows that a member is gone, and has it back: ``python -m benchmarks.detection [--runs N]``.

Hosts are network namespaces of this machine (see ``tests/multihost/rig``), with a Ray of their own over them. The
member that is lost is one of three; the driver and another member are on the first host. Each figure is the median over
the runs, and the slowest, in seconds after the fault:

- call: a call that was under way to the member has ended.
- told: ``Group.on_change`` has said "lost".
- Ray: Ray has the actor alive again (its constructor has returned).
- back: ``Group.on_change`` has said "back", and everybody can call it. rejoin is back - Ray.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

from tests.multihost.conftest import cluster
from tests.multihost.rig import Host
from tests.multihost.session import Driver, driver

#: The deadline of the call that is under way when a cable is pulled (seconds).
DEADLINE_S = 5.0
Figures = dict[str, float]


def process_dies(hosts: tuple[Host, ...], asked: Driver) -> Figures:
    """SIGKILL to the member's process."""
    return _lost(hosts, asked, lambda host, pid: host.kill(pid))


def power_fails(hosts: tuple[Host, ...], asked: Driver) -> Figures:
    """Every process of the member's host ends at once. Ray restarts the actor on another host."""
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
    """The member's host is cut off without a word; the call has a deadline. Only for its end: nobody is lost."""
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
    """By case, what each run took. Raises Unavailable where hosts cannot be built."""
    found: dict[str, list[Figures]] = {}
    for count, cases in (
        (1, {"process killed, one host": process_dies}),
        (2, {"process killed, two hosts": process_dies, f"cable pulled, deadline {DEADLINE_S:g} s": cable_pulled}),
    ):
        with cluster(count, failures=100, cpus=1) as hosts, driver(hosts[0], "serve", module="wandering") as asked:
            for title, case in cases.items():
                for _ in range(runs):
                    found.setdefault(title, []).append(case(hosts, asked))
                    asked.ask("end")
    for _ in range(runs):  # hosts without power stay so
        with cluster(3, failures=3, cpus=1) as hosts, driver(hosts[0], "serve", module="wandering") as asked:
            found.setdefault("host without power, three hosts", []).append(power_fails(hosts, asked))
    return found


def main(runs: int = 5) -> None:
    names = ("call", "told", "Ray", "back", "rejoin")
    print(f"{'seconds after the fault: median (slowest)':<42}" + "".join(f"{name:>16}" for name in names))
    for title, figures in measure(runs).items():
        cells = []
        for name in names:
            values = [each[name] for each in figures if name in each]
            cells.append(f"{statistics.median(values):.3f} ({max(values):.3f})" if values else "-")
        print(f"{title:<42}" + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    main(parser.parse_args().runs)
