"""Runs benchmarks one after the other: ``python -m benchmarks [--quick] [NAME ...]``."""

from __future__ import annotations

import argparse
from importlib import import_module

from benchmarks import scale, soak
from benchmarks._harness import machine

#: Modules of this package that run by default, each with a function ``main(quick)``.
ALL = (
    *("atari", "calls", "formation", "huge_pages", "objectrefs", "observability", "protection", "queues", "tensors"),
    *("sharded_weights", "tutorial", "weight_conversions", "weight_prefetch", "weight_readers", "weights"),
)
#: Benchmarks with options of their own, which run only when they are named.
NAMED = ("scale", "soak")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"any of {', '.join((*ALL, *NAMED))}; default: {', '.join(ALL)}")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and sizes")
    parser.add_argument(
        "--calls", type=int, help=f"soak: number of calls; default: {soak.CALLS}, with --quick {soak.QUICK_CALLS}"
    )
    sizes = ",".join(str(size) for size in scale.SIZES)
    parser.add_argument("--members", default=sizes, help="scale: members of each group, comma-separated")
    parser.add_argument("--markdown", help="scale: the document to write")
    parser.add_argument("--json", help="scale: file that stores the figures")
    parser.add_argument("--from-json", help="scale: stored figures, instead of measuring")
    parser.add_argument("--hosts-json", help="scale: figures of groups on several hosts")
    options = parser.parse_args()
    for name in options.names:
        if name not in ALL and name not in NAMED:
            parser.error(f"unknown benchmark {name!r}; known: {', '.join((*ALL, *NAMED))}")
    print(machine())
    for name in options.names or ALL:
        if name == "soak":
            soak.main(quick=options.quick, calls=options.calls)
        elif name == "scale":
            members = [int(size) for size in options.members.split(",")]
            members = members[:2] if options.quick else members
            scale.main(members, options.markdown, options.json, options.from_json, options.hosts_json)
        else:
            import_module(f"benchmarks.{name}").main(quick=options.quick)


if __name__ == "__main__":
    main()
