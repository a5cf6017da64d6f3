"""Write docs/internals/measurements.md from the results in ``benchmarks/results``: ``python -m benchmarks.page``.

A test compares the page with what this writes.
"""

from __future__ import annotations

from pathlib import Path

from raytorchrpc.bench.results import read_result
from raytorchrpc.bench.tables import section

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "internals" / "measurements.md"
#: Of results with many sizes, those that the page shows (bytes).
SHOWN = (1_250, 1_250_000, 40_000_000, 640_000_000)
_HEAD = """\
# Measurements

<!-- Written by `python -m benchmarks.page` from benchmarks/results; change those, not this file. -->

Every figure is the median of its turns, of the tree that its part names; x is the figure divided by the first
contestant's. `raytorchrpc bench` and `python -m benchmarks` take figures again, and `--json` writes such results;
`raytorchrpc bench --from FILE` shows one with all its sizes."""


def page() -> str:
    """The page as it has to be: a part for each result, in the order of the files' names."""
    parts = [_HEAD]
    for file in sorted(RESULTS.glob("*.json")):
        result = read_result(file)
        if len({one.size for one in result.figures if isinstance(one.size, int)}) > len(SHOWN):
            some = tuple(one for one in result.figures if one.size in SHOWN)
            result = result.model_copy(update={"figures": some})
        parts += section(result)
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
