"""``python -m raytorchrpc.doctor``: the same command for machines without typer and rich."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from raytorchrpc.doctor.command import DEFAULT_TIMEOUT_S, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="raytorchrpc doctor", description=__doc__)
    parser.add_argument("--cluster", action="store_true", help="look on every node of a Ray cluster")
    parser.add_argument("--address", help="the cluster's address; RAY_ADDRESS, or the one on this machine")
    parser.add_argument("--actors", help="look inside these actors: NAME or NAMESPACE/NAME, with commas")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON, and nothing else")
    parser.add_argument("--sysfs-root", type=Path, help="look at a tree with proc, sys and dev instead")
    parser.add_argument("--strict", action="store_true", help="warnings count as problems")
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, help="seconds that nodes and actors have")
    options = parser.parse_args()
    return run(
        cluster=options.cluster,
        address=options.address,
        actors=options.actors,
        as_json=options.json,
        sysfs_root=options.sysfs_root,
        strict=options.strict,
        timeout_s=options.timeout,
    )


if __name__ == "__main__":
    sys.exit(main())
