"""``python -m raytorchrpc.doctor``: the same command for machines without typer and rich."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from raytorchrpc.doctor.command import DEFAULT_TIMEOUT_S, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="raytorchrpc doctor", description=__doc__)
    parser.add_argument("--cluster", action="store_true", help="examine every node of a Ray cluster")
    parser.add_argument("--address", help="the cluster's address; default: RAY_ADDRESS, or the one on this machine")
    parser.add_argument("--actors", help="examine these actors from inside: NAME or NAMESPACE/NAME, comma-separated")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print only the whole report, as JSON")
    parser.add_argument("--sysfs-root", type=Path, help="examine a tree with proc, sys and dev instead")
    parser.add_argument("--strict", action="store_true", help="count warnings as problems")
    parser.add_argument(
        "--timeout", type=float, dest="timeout_s", default=DEFAULT_TIMEOUT_S, help="seconds for nodes and actors"
    )
    options = vars(parser.parse_args())
    try:
        return run(**options)
    except BrokenPipeError:  # the reader has enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        return 1


if __name__ == "__main__":
    sys.exit(main())
