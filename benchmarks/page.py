"""Write docs/internals/measurements.md from the results in ``benchmarks/results``: ``python -m benchmarks.page``.

A test compares the page with what this writes.
"""

from __future__ import annotations

from pathlib import Path

from raytorchrpc.bench.results import read_result
from raytorchrpc.bench.tables import section

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "internals" / "measurements.md"
_HEAD = """\
# Measurements

<!-- Written by `python -m benchmarks.page` from benchmarks/results; change those, not this file. -->

Every figure is the median of its turns, of the tree that its part names; x is the figure divided by the first
contestant's. `raytorchrpc bench` and `python -m benchmarks` take them again, and `--json` writes such results."""


def page() -> str:
    """The page as it has to be: a part for each result, in the order of the files' names."""
    parts = [_HEAD]
    for file in sorted(RESULTS.glob("*.json")):
        parts += section(read_result(file))
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
