"""Measures what metrics and tracing cost an empty call, against the same call with all off.

``--against FOLDER`` also compares this checkout with another one, with metrics and tracing off in both.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks._harness import Pick, engine, ratios, show
from raytorchrpc.bench.cases import Case, Row

OPTIONS = ("against",)
HERE = str(Path(__file__).resolve().parents[1])


def main(pick: Pick, against: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as elsewhere:
        before = os.getcwd()
        if against is not None:
            if not Path(against, "raytorchrpc").is_dir():
                raise SystemExit(f"{against} is no checkout: it has no folder raytorchrpc")
            against = str(Path(against).resolve())
            os.chdir(elsewhere)  # workers search the driver's folder before PYTHONPATH
        try:
            _measure(pick, against, Path(elsewhere))
        finally:
            os.chdir(before)


def _measure(pick: Pick, against: str | None, folder: Path) -> None:
    def traced(group: Any) -> AbstractContextManager[Any]:
        return group.trace(folder / "trace.json")

    def row(name: str, checkout: str = HERE, **more: Any) -> Row:
        env = {} if against is None else {"PYTHONPATH": checkout}
        return Row(name, "lane", "group", name, env=env, **more)

    rows = [
        row("off"),
        row("metrics", config={"metrics_period_s": 1.0}),
        row("traced", pair="off", own_turn=True, around=traced),
    ]
    rows += [row("other", against)] if against is not None else []
    run = engine(rows, [Case("quiet")], repeats=pick(60, 15, 1), window_s=pick(0.1, 0.1, 0.01))
    lines = [*ratios(run, "metrics", {"off": "all off"}),
             *ratios(run, "traced", {"off": "all off"})]  # fmt: skip
    if against is not None:
        lines += ratios(run, "off", {"other": against}, {("quiet, nothing", "other"): 1.02})
    show("Cost of metrics_period_s=1, and of tracing, for an empty call (medians)", lines)
