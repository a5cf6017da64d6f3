"""``raytorchrpc bench`` from its start to its files, on whatever machine the tests run on."""

from __future__ import annotations

import csv
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytorchrpc.bench.results import Run, read_run
from tests.ray.commands import Command


@pytest.fixture
def bench() -> Iterator[Command]:
    bench = Command("bench")
    yield bench
    bench.end()


def complete(run: Run) -> None:
    """Every row has a figure or a reason at every size, and never both."""
    for row in run.rows:
        for label in run.labels(row.device):
            cell = run.cell(row.row, row.device, label)
            assert cell is not None, (row.row, label)
            assert (cell.median is None) != (cell.reason is None), cell
            if cell.median is not None:
                assert cell.low is not None and cell.high is not None
                assert 0 < cell.low <= cell.median <= cell.high
                assert cell.samples >= 3


@pytest.mark.slow
def test_two_rows_two_sizes_and_every_output(bench: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outputs = ["--json", "r.json", "--csv", "r.csv", "--plot", "r.png", "--markdown", "r.md"]
    chosen = ["--rows", "auto,memcpy", "--sizes", "20KB,1.25MB", "--device", "cpu", "--budget", "200"]
    code, out, err = bench.run(*chosen, *outputs, "--against", "published", folder=tmp_path, timeout=200)
    assert code == 0, out + err

    run = read_run(tmp_path / "r.json")
    complete(run)
    assert {row.row for row in run.measured("cpu")} == {"auto", "memcpy"}
    assert [cell.via for cell in run.cells if cell.row == "auto"] == ["socket", "shm"]
    assert run.command == "raytorchrpc bench --rows auto,memcpy --sizes 20KB,1.25MB --device cpu --budget 200"
    assert "CPU tensors, one host" in out
    assert re.search(r"^auto +[\d.]+ ±\d+% +[\d.]+ ±\d+% ", out, re.MULTILINE), out

    assert len(list(csv.DictReader((tmp_path / "r.csv").open()))) == 4
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "r.md").read_text()
    assert "![Latency and bandwidth against size](r.png)" in text and run.command in text
    assert sorted(os.listdir(tmp_path)) == ["r.csv", "r.json", "r.md", "r.png"]
    assert bench.gone_within(40)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["starting actors", "KB: "])
def test_ctrl_c_leaves_no_process_and_no_file(bench: Command, moment: str, tmp_path: Path) -> None:
    sizes = ",".join(f"{n}KB" for n in range(1, 400))
    process = bench.start(
        "--rows", "auto,torchrpc-TCP", "--sizes", sizes, "--budget", "200", "--json", "r.json", folder=tmp_path
    )
    assert process.stderr is not None
    while moment not in (line := process.stderr.readline()):
        assert line and process.poll() is None, process.communicate()
    before = time.monotonic()
    bench.interrupt()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err and out == ""
    assert time.monotonic() - before < 50
    assert bench.gone_within(40)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_quick_has_figures_of_ray_and_of_the_limits_beside_ours(bench: Command, tmp_path: Path) -> None:
    # A busy machine would not get through in the time that it takes at most without --budget.
    code, out, err = bench.run("--quick", "--budget", "200", "--json", "quick.json", folder=tmp_path)
    assert code == 0, out + err
    run = read_run(tmp_path / "quick.json")
    complete(run)
    assert {"auto", "ray", "bare-socket", "memcpy"} <= {row.row for row in run.measured("cpu")}
    assert out.splitlines()[-1].startswith("Here a call with a tensor of 1.25 KB takes ")
    assert "waiting for" in err
    assert bench.gone_within(40)


@pytest.mark.slow
def test_two_patterns_have_figures_in_every_row(bench: Command, tmp_path: Path) -> None:
    chosen = ["--pattern", "quiet,all-to-all", "--sizes", "nothing,1.25KB", "--device", "cpu", "--budget", "200"]
    code, out, err = bench.run("--quick", *chosen, "--json", "r.json", folder=tmp_path, timeout=220)
    assert code == 0, out + err
    run = read_run(tmp_path / "r.json")
    for cell in run.cells:
        if cell.row in ("bare-nccl", "floor") or (cell.row, cell.pattern) == ("ray-graph", "all-to-all"):
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


@pytest.mark.slow
def test_between_two_nodes_of_a_cluster(bench: Command, tmp_path: Path) -> None:
    """Both nodes are of this machine, so what needs two hosts still says so; what is placed where is shown."""
    from ray.cluster_utils import Cluster
    from ray.experimental import internal_kv

    of_the_tests = internal_kv.internal_kv_get_gcs_client()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        other = cluster.add_node(num_cpus=1)
        hosts = [cluster.head_node.node_id, other.node_id]
        chosen = ["--rows", "auto,bare-torchrpc,ray", "--sizes", "20KB,1MB", "--device", "cpu", "--budget", "200"]
        arguments = ["--address", cluster.address, "--hosts", *hosts, *chosen, "--json", str(tmp_path / "r.json")]
        code, out, err = bench.run(*arguments, timeout=250)
        assert code == 0, out + err
        run = read_run(tmp_path / "r.json")
        complete(run)
        assert {row.row for row in run.measured("cpu")} == {"auto", "bare-torchrpc", "ray"}
        assert f"--hosts {hosts[0]} {hosts[1]}" in run.command
    finally:
        cluster.shutdown()
        if of_the_tests is not None:  # Ray keeps one for the process, and the end of a cluster removes it
            internal_kv._initialize_internal_kv(of_the_tests)
