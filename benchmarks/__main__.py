"""Every benchmark, one after the other: ``python -m benchmarks [--quick] [NAME ...]``."""

from __future__ import annotations

import argparse

from benchmarks import calls, forming, huge_pages, tensors, tutorial
from benchmarks._harness import machine

ALL = {
    "calls": calls.main,
    "forming": forming.main,
    "huge_pages": huge_pages.main,
    "tensors": tensors.main,
    "tutorial": tutorial.main,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ALL)}; all if none is given")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and sizes")
    options = parser.parse_args()
    for name in options.names:
        if name not in ALL:
            parser.error(f"unknown benchmark {name!r}; known: {', '.join(ALL)}")
    print(machine())
    for name in options.names or ALL:
        ALL[name](quick=options.quick)


if __name__ == "__main__":
    main()
