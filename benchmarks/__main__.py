"""Every benchmark, one after the other: ``python -m benchmarks [--quick] [NAME ...]``."""

from __future__ import annotations

import argparse

from benchmarks import calls, forming, huge_pages, soak, tensors, tutorial
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
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ALL)}, soak; all but soak if none is given")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and sizes")
    parser.add_argument(
        "--calls", type=int, help=f"of the soak; {soak.CALLS} unless given, {soak.QUICK_CALLS} if quick"
    )
    options = parser.parse_args()
    for name in options.names:
        if name not in ALL and name != "soak":
            parser.error(f"unknown benchmark {name!r}; known: {', '.join(ALL)}, soak")
    print(machine())
    for name in options.names or ALL:
        if name == "soak":
            soak.main(quick=options.quick, calls=options.calls)
        else:
            ALL[name](quick=options.quick)


if __name__ == "__main__":
    main()
