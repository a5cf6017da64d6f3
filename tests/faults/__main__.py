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

from tests.faults.faults import HOSTS_TABLE, TABLE, Kill, random_faults
from tests.faults.hands import FromOutside, Hand
from tests.faults.pattern_running import run_patterns
from tests.faults.ray_here import ray_here
from tests.faults.report import Report
from tests.faults.running import LANES, NAMES, NEAR, running

#: Rounds between two looks at what the processes hold.
LOOK_EVERY = 5


def run_random(
    directory: Path,
    seed: int,
    count: int,
    lanes: str = "default",
    seconds: float = math.inf,
    loud: bool = False,
    hand: Hand | None = None,
) -> Report:
    """Ray runs already. Stops early where the group cannot go on, and after so many seconds.

    ``hand``: see ``running``.
    """
    with running(directory, seed, lanes, hand) as run:
        table = TABLE if hand is None else HOSTS_TABLE
        rounds = random_faults(seed, count, NAMES, never_killed=NAMES[0], always_on=NEAR, table=table)
        for number, faults in enumerate(rounds, 1):
            known = len(run.report.violations)
            try:
                run.round(faults)
                over = number == len(rounds) or run.report.seconds > seconds
                if over or number % LOOK_EVERY == 0:
                    run.rest()
            except RuntimeError as error:
                over = True
                run.report.violations.append(f"ENDED EARLY: {error}")
            if loud:
                done, took = len(run.report.struck), run.report.seconds
                print(f"{number:>4} {done:>4}/{count} {took:7.1f} s  {list(faults)}", flush=True)
                for one in run.report.struck[-len(faults) :]:
                    if max(one.detected or 0, one.caller_told or 0) > 0.3:
                        print(f"      slow: {one}", flush=True)
                for text in run.report.violations[known:]:
                    print(f"      !! {text}", flush=True)
            if over:
                break
        return run.report


def table(report: Report) -> str:
    """What came of each kind of fault, and of the calls."""
    kinds = sorted({(type(one.fault).__name__, getattr(one.fault, "at", "")) for one in report.struck})
    lines = [
        f"{'fault':<12}{'at':<14}{'count':>6}{'landed':>8}{'detect s':>10}{'caller s':>10}{'born s':>8}{'rejoin s':>10}"
        f"{'-born s':>9}"
    ]
    for kind, at in kinds:
        of = [s for s in report.struck if (type(s.fault).__name__, getattr(s.fault, "at", "")) == (kind, at)]

        def worst(values: list[float | None]) -> str:
            there = sorted(value for value in values if value is not None)
            return f"{there[-1]:.2f}" if there else "-"

        after = [one.rejoined - one.born for one in of if one.rejoined is not None and one.born is not None]
        lines.append(
            f"{kind:<12}{at:<14}{len(of):>6}{sum(one.landed for one in of):>8}"
            f"{worst([one.detected for one in of]):>10}{worst([one.caller_told for one in of]):>10}"
            f"{worst([one.born for one in of]):>8}{worst([one.rejoined for one in of]):>10}{worst([*after]):>9}"
        )
    for what in ("detected", "caller_told", "born", "rejoined"):
        found = sorted(v for one in report.struck if (v := getattr(one, what)) is not None)
        if found:
            middle, late = found[len(found) // 2], found[int(len(found) * 0.95)]
            lines.append(f"  {what}: median {middle:.3f} s, 95 % {late:.3f} s, worst {found[-1]:.3f} s")
    lines.append(
        f"  no call ended more than {max(0.0, report.latest):.3f} s after its deadline and its caller's standstill"
    )
    calls = sum(report.verdicts.values())
    lines.append(f"calls: {calls}: " + ", ".join(f"{kind} {count}" for kind, count in report.verdicts.most_common()))
    twice = sum("TWICE" in text for text in report.violations)
    lines.append(
        f"executed twice {twice}; with retry= executed again {report.repeated}; "
        f"hangs {sum('HANG' in text for text in report.violations)}; "
        f"survivors lost {sum('SURVIVOR' in text for text in report.violations)}; "
        f"leaks {sum('LEAK' in text for text in report.violations)}; violations {len(report.violations)}"
    )
    kills = sum(isinstance(one.fault, Kill) for one in report.struck)
    lines.append(f"{len(report.struck)} faults, {kills} of them kills, in {report.seconds:.0f} s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lanes", choices=list(LANES), default="default")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round after so much of it")
    parser.add_argument("--hosts", type=int, default=1, help="needs root, or user namespaces")
    parser.add_argument("--patterns", action="store_true", help="queues, topics and weights, and their homes")
    parser.add_argument("--long", action="store_true", help="of --patterns: members stand still for over a minute too")
    parser.add_argument("--within", type=Path, help=argparse.SUPPRESS)  # one of these hosts
    given = parser.parse_args()
    if given.hosts > 1:
        from tests.faults import on_hosts

        arguments = [f"--{name}={getattr(given, name)}" for name in ("faults", "seed", "lanes", "seconds")]
        arguments += ["--patterns"] * given.patterns + ["--long"] * given.long
        failures = on_hosts.PATIENT if given.patterns else on_hosts.FAILURES
        sys.exit(on_hosts.run(Path(tempfile.mkdtemp(prefix="faults-")), given.hosts, arguments, failures))
    directory = given.within or Path(tempfile.mkdtemp(prefix="faults-"))
    print(f"seed {given.seed}, lanes {given.lanes}, {time.strftime('%H:%M:%S')}; notes in {directory}", flush=True)
    hand = FromOutside(directory) if given.within else None
    with ray_here(among_hosts=hand is not None):
        arguments = (directory, given.seed, given.faults, given.lanes, given.seconds)
        if given.patterns:
            report = run_patterns(*arguments, loud=True, hand=hand, long=given.long)
        else:
            report = run_random(*arguments, loud=True, hand=hand)
    print(table(report))
    for text in report.violations:
        print(f"  {text}")
    sys.exit(bool(report.violations))


if __name__ == "__main__":
    main()
