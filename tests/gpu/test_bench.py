"""``raytorchrpc bench`` where there are GPUs: placement, and the routes between two of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytorchrpc.bench.results import read_run
from raytorchrpc.cli.bench import run

LANES = ("auto", "cuda-shared-tensor", "torchrpc-TCP")
PEERS = ("ray", "bare-torchrpc", "gpu-copy")


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param((*LANES, *PEERS, "ray-rdt-cuda-ipc"), marks=pytest.mark.gpu),
        pytest.param(("auto", "nccl-nvlink", "nccl-TCP", "bare-nccl", "ray-rdt-nccl"), marks=pytest.mark.gpu(2)),
    ],
)
def test_rows_between_gpus_have_figures(rows: tuple[str, ...], tmp_path: Path) -> None:
    run(rows=rows, sizes=["20KB", "10MB"], device="cuda", budget_s=200, json=tmp_path / "r.json")
    result = read_run(tmp_path / "r.json")
    reasons = {(cell.row, cell.bytes): cell.reason for cell in result.cells if cell.reason}
    assert not reasons
    assert {row.row for row in result.measured("cuda")} == set(rows)
