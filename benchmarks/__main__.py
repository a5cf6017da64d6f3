"""Runs benchmarks one after the other: ``python -m benchmarks [--quick] [NAME ...]``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from importlib import import_module
from inspect import signature

from benchmarks import transfers
from benchmarks._harness import Skipped, local_ray, machine

#: Functions of ``benchmarks.transfers``.
_TRANSFERS = ("calls", "huge_pages", "observability", "tensors")
#: Benchmarks that run by default. The others are modules of this package, with a function ``main``.
ALL = (
    *("atari", *_TRANSFERS, "formation", "objectrefs", "protection", "queues"),
    *("sharded_weights", "switch_interval", "weight_conversions", "weight_prefetch", "weight_readers", "weights"),
)
#: Those that run only when they are named.
NAMED = ("crowds", "detection", "scale", "soak")
#: CPUs of Ray, if not 4: it starts as many processes at once. For Atari nominal: only one learner of DQN and its
#: collectors are active at any time.
CPUS = {"atari": 72, **dict.fromkeys(("crowds", "scale"), os.cpu_count() or 4)}


def load(name: str) -> Callable[..., None]:
    """The benchmark's function. It takes a ``Pick``, and options of the command by their names."""
    if name in _TRANSFERS:
        return getattr(transfers, name)
    return import_module(f"benchmarks.{name}").main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"any of {', '.join((*ALL, *NAMED))}; default: {', '.join(ALL)}")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and sizes")
    parser.add_argument("--tiny", action="store_true", help="the least that shows that a benchmark works")
    parser.add_argument("--against", help="observability: folder of another checkout to compare with")
    parser.add_argument("--calls", type=int, help="soak: number of calls")
    parser.add_argument("--members", help="crowds: members; scale: members of each group, comma-separated")
    parser.add_argument("--deadline", type=float, help="scale: seconds for the whole run")
    parser.add_argument("--out", help="crowds, scale: folder for the figures (JSON)")
    parser.add_argument("--tree", help="crowds, scale: what to call this tree, if not by its commit")
    parser.add_argument("--markdown", help="scale: the document to write")
    parser.add_argument("--from-json", help="scale: files of stored figures, comma-separated, instead of measuring")
    options = vars(parser.parse_args())
    names, quick, tiny = (options.pop(name) for name in ("names", "quick", "tiny"))
    for name in names:
        if name not in (*ALL, *NAMED):
            parser.error(f"unknown benchmark {name!r}; known: {', '.join((*ALL, *NAMED))}")
    print(machine())
    for name in names or ALL:
        try:
            run = load(name)
            own = {key: value for key, value in options.items() if key in signature(run).parameters}
            with local_ray(CPUS.get(name, 4)):
                run(lambda full, some, least: least if tiny else some if quick else full, **own)
        except Skipped as reason:
            print(f"\n{name}: skipped, {reason}")


if __name__ == "__main__":
    main()
