"""Runs benchmarks one after the other: ``python -m benchmarks [--quick] [NAME ...]``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib import import_module
from inspect import signature
from pathlib import Path

from benchmarks._harness import Pick, Unavailable, local_ray, machine
from raytorchrpc.bench.cases import Figure
from raytorchrpc.bench.results import Result, tree
from raytorchrpc.bench.tables import LEGEND, gaps, tables

#: The benchmarks that run by default, by name: the module with a function of that name.
ALL = {
    **dict.fromkeys(("huge_pages", "objectrefs", "observability"), "transfers"),
    **dict.fromkeys(("weights", "sharded_weights"), "weights"),
    **{name: name for name in ("atari", "protection", "queues", "regions", "switch_interval")},
}
#: Those that run only when they are named.
NAMED = {name: name for name in ("call_steps", "scale", "soak", "transferqueue")}
#: CPUs of Ray, if not 4: it starts as many processes at once. For Atari nominal: only one learner of DQN and its
#: collectors are active at any time.
CPUS = {"atari": 72, "scale": os.cpu_count() or 4}


def load(name: str) -> Callable[..., list[Figure]]:
    """The benchmark's function. It takes a ``Pick``, and options of the command by their names."""
    function: Callable[..., list[Figure]] = getattr(import_module(f"benchmarks.{ {**ALL, **NAMED}[name] }"), name)
    return function


def main() -> None:
    known = [*ALL, *NAMED]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(known)}; default: all but the last {len(NAMED)}")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and sizes")
    parser.add_argument("--tiny", action="store_true", help="the least that shows that a benchmark works")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="write a result for each benchmark into it")
    parser.add_argument("--calls", type=int, help="soak: number of calls")
    parser.add_argument("--members", help="scale: members of each group, comma-separated")
    parser.add_argument("--deadline", type=float, help="scale: seconds for the whole run")
    options = vars(parser.parse_args())
    names, quick, tiny, folder = (options.pop(name) for name in ("names", "quick", "tiny", "json"))
    for name in names:
        if name not in known:
            parser.error(f"unknown benchmark {name!r}; known: {', '.join(known)}")
    print(machine())
    for name in names or ALL:
        run(name, lambda full, some, least: least if tiny else some if quick else full, options, folder)
    print(f"\n{LEGEND}")


def run(name: str, pick: Pick, options: dict[str, object], folder: Path | None) -> None:
    """Run one benchmark; prints its tables, and keeps its result."""
    started, began = datetime.now(timezone.utc), time.monotonic()
    try:
        function = load(name)
        own = {key: value for key, value in options.items() if key in signature(function).parameters}
        with local_ray(CPUS.get(name, 4)):
            figures = function(pick, **own)
    except Unavailable as reason:
        print(f"\n{name}: cannot run here: {reason}")
        return
    flags = [word for word in sys.argv[1:] if word in ("--quick", "--tiny")]
    result = Result(
        title=name,
        tree=tree(),
        started=started.isoformat(timespec="seconds"),
        command=" ".join(["python -m benchmarks", name, *flags]),
        machine=(machine(),),
        seconds=round(time.monotonic() - began, 1),
        figures=tuple(figures),
    )
    for table in tables(result):
        print(f"\n{table.text()}")
    for line in gaps(result):
        print(f"  not measured: {line}")
    sys.stdout.flush()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(result.to_json())


if __name__ == "__main__":
    main()
