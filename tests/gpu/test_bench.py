"""``raytorchrpc bench`` where there are GPUs: placement, and the routes between two of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytorchrpc.bench.results import read_result
from tests.unit import command_line

LANES = ("raytorchrpc", "cuda-shared-tensor", "torchrpc-TCP")
PEERS = ("ray", "bare-torchrpc", "gpu-copy")


@pytest.mark.parametrize(
    ("pattern", "rows"),
    [
        pytest.param("", (*LANES, *PEERS, "ray-rdt-cuda-ipc"), marks=pytest.mark.gpu),
        pytest.param(
            "", ("raytorchrpc", "nccl-nvlink", "nccl-TCP", "bare-nccl", "ray-rdt-nccl"), marks=pytest.mark.gpu(2)
        ),
        pytest.param("quiet,busy-callee,all-to-all", ("raytorchrpc", "bare-torchrpc", "ray"), marks=pytest.mark.gpu),
        pytest.param("quiet", ("raytorchrpc", "bare-nccl"), marks=pytest.mark.gpu(2)),
    ],
)
def test_rows_between_gpus_have_figures(pattern: str, rows: tuple[str, ...], tmp_path: Path) -> None:
    chosen = ["--rows", ",".join(rows), "--sizes", "20KB,10MB", "--device", "cuda", "--budget", "200"]
    more = ["--pattern", pattern, "--quick"] if pattern else []
    ran = command_line.run("bench", *chosen, *more, "--json", str(tmp_path / "r.json"))
    assert ran.exit_code == 0, ran
    result = read_result(tmp_path / "r.json")
    assert not [(one.contestant, one.case, one.label, one.reason) for one in result.figures if one.reason]
    assert {one.contestant for one in result.figures if one.median and one.median > 0} == set(rows)
