"""``raytorchrpc bench --pattern`` with CUDA tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytorchrpc.bench.pattern_results import read_pattern_run
from raytorchrpc.cli.bench_patterns import run


@pytest.mark.parametrize(
    ("pattern", "rows"),
    [
        pytest.param("quiet,busy-callee,all-to-all", ("auto", "bare-torchrpc", "ray"), marks=pytest.mark.gpu),
        pytest.param("quiet", ("auto", "bare-nccl"), marks=pytest.mark.gpu(2)),
    ],
)
def test_rows_have_figures_with_cuda_tensors(pattern: str, rows: tuple[str, ...], tmp_path: Path) -> None:
    sizes = ["1.25KB", "10MB"]
    run(pattern=[pattern], rows=rows, sizes=sizes, device="cuda", quick=True, budget_s=200, json=tmp_path / "r.json")
    result = read_pattern_run(tmp_path / "r.json")
    assert not [(cell.row, cell.label, cell.reason) for cell in result.cells if cell.reason]
    assert all(cell.median and cell.median > 0 for cell in result.cells)
