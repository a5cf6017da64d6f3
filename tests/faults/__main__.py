"""``python -m tests.faults --faults 500 --seed 1``: random faults over a running group of six; prints what came of it.

``--hosts 4``: the group is on so many hosts made for it on this machine, and cables are pulled, the network is parted
and hosts lose their power too. Exits with 1 where anything was not as it must be.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path

from tests.faults import on_hosts
from tests.faults.hands import FromOutside
from tests.faults.running import LANES, ray_here, run_faults


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lanes", choices=list(LANES), default="default")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round after so much of it")
    parser.add_argument("--hosts", type=int, default=1, help="needs root, or user namespaces")
    parser.add_argument("--patterns", action="store_true", help="queues, topics and weights, and their homes")
    parser.add_argument("--long", action="store_true", help="of --patterns: members stand still for over a minute too")
    parser.add_argument("--shards", action="store_true", help="publishers and readers of shards, on one host")
    parser.add_argument("--within", type=Path, help=argparse.SUPPRESS)  # one of these hosts
    given = parser.parse_args()
    name = "shards" if given.shards else "long patterns" if given.long else "patterns" if given.patterns else "calls"
    if given.hosts > 1:
        arguments = [f"--{name}={getattr(given, name)}" for name in ("faults", "seed", "lanes", "seconds")]
        arguments += ["--patterns"] * given.patterns + ["--long"] * given.long
        failures = on_hosts.PATIENT if given.patterns else on_hosts.FAILURES
        sys.exit(on_hosts.run(Path(tempfile.mkdtemp(prefix="faults-")), given.hosts, arguments, failures))
    directory = given.within or Path(tempfile.mkdtemp(prefix="faults-"))
    print(f"seed {given.seed}, lanes {given.lanes}, {time.strftime('%H:%M:%S')}; notes in {directory}", flush=True)
    hand = FromOutside(directory) if given.within else None
    with ray_here(among_hosts=hand is not None):
        report = run_faults(
            name, given.faults, given.seed, given.lanes, given.seconds, directory=directory, hand=hand, loud=True
        )
    print(report)
    sys.exit(bool(report.violations))


if __name__ == "__main__":
    main()
