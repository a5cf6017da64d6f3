"""``raytorchrpc bench --pattern`` from its start to its files, on whatever machine the tests run on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raytorchrpc.bench.pattern_results import read_pattern_run
from tests.ray.commands import Command


@pytest.fixture
def bench() -> Iterator[Command]:
    bench = Command("bench")
    yield bench
    bench.end()


@pytest.mark.slow
def test_two_patterns_have_figures_in_every_row(bench: Command, tmp_path: Path) -> None:
    chosen = ["--pattern", "quiet,all-to-all", "--sizes", "nothing,1.25KB", "--device", "cpu", "--budget", "200"]
    code, out, err = bench.run("--quick", *chosen, "--json", "r.json", folder=tmp_path, timeout=220)
    assert code == 0, out + err
    run = read_pattern_run(tmp_path / "r.json")
    for cell in run.cells:
        if cell.row == "bare-nccl" or (cell.row, cell.pattern) == ("ray-graph", "all-to-all"):
            assert cell.median is None and cell.reason
            continue
        assert cell.reason is None, cell
        assert cell.median and cell.low and cell.high and 0 < cell.low <= cell.median <= cell.high
        assert cell.samples >= 2 * cell.repeats > 0
        assert cell.caller_cpu_ms and cell.caller_cpu_ms > 0
        assert cell.caller_switches is not None and cell.caller_switches >= 0
    assert {cell.variant for cell in run.cells} == {"", "4 members, sync", "4 members, async"}
    assert "auto / bare-torchrpc" in out and "context switches" in out
    assert bench.gone_within(40)
