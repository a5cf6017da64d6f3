"""Write docs/internals/measurements.md from the results in ``benchmarks/results``: ``python -m benchmarks.page``.

A test compares the page with what this writes.
"""

from __future__ import annotations

from pathlib import Path

from raytorchrpc.bench.results import read_result
from raytorchrpc.bench.tables import section

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "internals" / "measurements.md"
#: The results that the page shows, in its order, with the contestants or the cases of each; none: all.
SHOWN: dict[str, tuple[str, ...]] = {
    "links-h200": ("raytorchrpc", "torchrpc", "ray", "ray-zero-copy", "bare-nccl", "memcpy"),
    "links-two-hosts": ("raytorchrpc", "ray", "bare-socket"),
    "patterns-32-cores": ("patterns, ms", "patterns, % of a core"),
    "weights-sharded": ("2 x NVIDIA H100", "2 cores"),
    "engines-h200": ("vLLM, a Llama of 2.2 GB",),
    "engines-one-h200": (),
    "engines": (
        "vLLM, a Llama of 229 MB",
        "SGLang, 100 MB, two ranks",
        "torchrl, 100 MB, two collectors",
        "TRL, a Llama of 115 MB",
        "verl, 101 MB under FSDP2, two trainers, two rollouts",
    ),
    "objectrefs": (),
    "observability": (),
    "protection": (),
    "scale-32-cores": ("time",),
    "switch-interval": (),
}
#: Of results with many sizes, those that the page shows (bytes).
SIZES = (1_250, 40_000_000, 640_000_000)
_HEAD = """\
# Measurements

<!-- Written by `python -m benchmarks.page` from benchmarks/results; change those, not this file. -->

Every figure is the median of its turns; x is the figure divided by the first contestant's. `raytorchrpc bench` and
`python -m benchmarks` take figures again, and `--json` writes such results. `raytorchrpc bench --from FILE` shows all
sizes and contestants of one in `benchmarks/results`."""


def page() -> str:
    """The page as it has to be: a part for each result."""
    parts = [_HEAD]
    for name, shown in SHOWN.items():
        result = read_result(RESULTS / f"{name}.json")
        figures = [one for one in result.figures if not shown or one.contestant in shown or one.case in shown]
        if len({one.size for one in figures if isinstance(one.size, int)}) > len(SIZES):
            figures = [one for one in figures if one.size in SIZES]
        parts += section(result.model_copy(update={"figures": tuple(figures)}))
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
