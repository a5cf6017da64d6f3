"""Measures what metrics and tracing cost an empty call, against the same call with all off.

``python -m benchmarks.observability --against FOLDER`` also compares this checkout with another one, with metrics and
tracing off in both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

import raytorchrpc as rtr
from benchmarks._harness import Row, local_ray, show

#: Consecutive calls of one pair.
BLOCK = 100
HERE = str(Path(__file__).resolve().parents[1])


class Callee:
    @rtr.method
    def null(self) -> None:
        return None


class Caller:
    def null(self, repeats: int) -> list[float]:
        call, seconds = rtr.rpc_sync("callee").null, []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return seconds

    def runs(self) -> str:
        return str(Path(rtr.__file__).parents[1])


class Pair:
    """Two actors in a group of their own."""

    def __init__(self, name: str, folder: str = HERE, **config: Any) -> None:
        """``folder``: the checkout that the actors import."""
        options: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": {"PYTHONPATH": folder}}}
        self.name, self.folder, self.config = name, folder, rtr.GroupConfig(**config)
        self.caller, self.callee = (ray.remote(cls).options(**options).remote() for cls in (Caller, Callee))

    def form(self) -> None:
        """Form the group; separate from ``__init__``, so that all actors start at once."""
        members = {"caller": self.caller, "callee": self.callee}
        self.group = rtr.init_group(members, name=self.name, config=self.config)
        runs = ray.get(self.caller.runs.remote())
        if Path(runs) != Path(self.folder):
            raise SystemExit(f"the members import {runs} instead of {self.folder}")
        self.calls(500)

    def calls(self, count: int) -> list[float]:
        seconds: list[float] = ray.get(self.caller.null.remote(count))
        return seconds


def main(quick: bool = False, against: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as elsewhere:
        before = os.getcwd()
        os.chdir(elsewhere)  # workers search the driver's folder before PYTHONPATH
        try:
            _measure(quick, against)
        finally:
            os.chdir(before)


def _measure(quick: bool, against: str | None) -> None:
    with local_ray():
        off = Pair("off", metrics_period_s=0)
        pairs = {"totals": Pair("totals"), "metrics_period_s=1": Pair("metrics", metrics_period_s=1.0)}
        if against is not None:
            pairs["other checkout"] = Pair("other", folder=against)
        for pair in (off, *pairs.values()):
            pair.form()
        took: dict[str, list[float]] = {name: [] for name in ("off", "traced", *pairs)}
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(15 if quick else 60):
                took["off"] += off.calls(BLOCK)
                for name, pair in pairs.items():
                    took[name] += pair.calls(BLOCK)
                with off.group.trace(Path(folder) / "trace.json"):
                    took["traced"] += off.calls(BLOCK)
        median = {name: statistics.median(seconds) * 1e6 for name, seconds in took.items()}
        rows = [
            Row("empty call, totals", median["totals"], median["off"], "us", "all off"),
            Row("empty call, metrics_period_s=1", median["metrics_period_s=1"], median["off"], "us", "all off"),
            Row("empty call, traced", median["traced"], median["off"], "us", "all off"),
        ]
        if against is not None:
            rows.append(Row("empty call, all off", median["off"], median["other checkout"], "us", against, 1.02))
        show("Cost of metrics and tracing for an empty call (medians)", rows)
        for pair in (off, *pairs.values()):
            pair.group.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer calls")
    parser.add_argument("--against", help="folder of another checkout to compare with")
    options = parser.parse_args()
    main(options.quick, options.against)
