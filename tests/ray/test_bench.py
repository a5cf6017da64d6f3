"""``raytorchrpc bench`` from its start to its files, on whatever machine the tests run on."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytorchrpc.bench.patterns import known_patterns
from raytorchrpc.bench.results import Result, read_result
from tests.ray.commands import Command


@pytest.fixture
def bench() -> Iterator[Command]:
    bench = Command("bench")
    yield bench
    bench.end()


def complete(result: Result) -> None:
    """Every contestant has a figure or a reason at every size, and never both."""
    for one in result.figures:
        assert (one.median is None) != (one.reason is None), one
        if one.median is not None:
            assert one.low is not None and one.high is not None
            assert 0 < one.low <= one.median <= one.high and one.turns >= 2


def measured(result: Result) -> set[str]:
    return {one.contestant for one in result.figures if one.median is not None}


@pytest.mark.slow
def test_two_contestants_two_sizes_and_every_output(bench: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outputs = ["--json", "r.json", "--plot", "r.png", "--markdown", "r.md"]
    chosen = ["--rows", "raytorchrpc,memcpy", "--sizes", "20KB,1.25MB", "--device", "cpu", "--budget", "200"]
    code, out, err = bench.run(*chosen, *outputs, folder=tmp_path, timeout=200)
    assert code == 0, out + err

    result = read_result(tmp_path / "r.json")
    complete(result)
    assert measured(result) == {"raytorchrpc", "memcpy"}
    assert [one.via for one in result.figures if one.contestant == "raytorchrpc"] == ["socket", "shm"]
    assert result.command == " ".join(["raytorchrpc bench", *chosen, *outputs])
    assert re.search(r"^memcpy +[\d.]+~? x[\d.]+ +[\d.]+~? x[\d.]+$", out, re.MULTILINE), out

    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "r.md").read_text()
    assert "(r.png)" in text and result.command in text
    assert sorted(os.listdir(tmp_path)) == ["r.json", "r.md", "r.png"]
    assert bench.gone_within(40)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["starting actors", "tensors: size 3 of"])
def test_ctrl_c_leaves_no_process(bench: Command, moment: str, tmp_path: Path) -> None:
    sizes = ",".join(f"{n}KB" for n in range(1, 400))
    process = bench.start(
        "--rows", "raytorchrpc,torchrpc-TCP", "--sizes", sizes, "--budget", "200", "--json", "r.json", folder=tmp_path
    )
    assert process.stderr is not None
    while moment not in (line := process.stderr.readline()):
        assert line and process.poll() is None, process.communicate()
    before = time.monotonic()
    bench.interrupt()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert time.monotonic() - before < 50
    assert bench.gone_within(40)
    if moment == "starting actors":
        assert (out, os.listdir(tmp_path)) == ("", [])
    else:
        assert measured(read_result(tmp_path / "r.json")) == {"raytorchrpc", "torchrpc-TCP"}, "the figures so far"


@pytest.mark.slow
def test_every_pattern_has_figures_of_every_contestant(bench: Command, tmp_path: Path) -> None:
    chosen = ["--pattern", "all", "--sizes", "nothing,1.25KB", "--device", "cpu", "--budget", "200"]
    code, out, err = bench.run("--quick", *chosen, "--json", "r.json", folder=tmp_path, timeout=240)
    assert code == 0, out + err
    result = read_result(tmp_path / "r.json")
    complete(result)
    missing = {(one.contestant, one.reason) for one in result.figures if one.reason}
    assert missing <= {("bare-socket", "a socket has no calls beside each other")}
    assert {one.case.partition(",")[0] for one in result.figures} == {*known_patterns(True)}
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
        chosen = ["--rows", "raytorchrpc,bare-torchrpc,ray", "--sizes", "20KB,1MB", "--device", "cpu", "--budget=200"]
        arguments = ["--address", cluster.address, "--hosts", *hosts, *chosen, "--json", str(tmp_path / "r.json")]
        code, out, err = bench.run(*arguments, timeout=250)
        assert code == 0, out + err
        result = read_result(tmp_path / "r.json")
        complete(result)
        assert measured(result) == {"raytorchrpc", "bare-torchrpc", "ray"}
        assert f"--hosts {hosts[0]} {hosts[1]}" in result.command
    finally:
        cluster.shutdown()
        if of_the_tests is not None:  # Ray keeps one for the process, and the end of a cluster removes it
            internal_kv._initialize_internal_kv(of_the_tests)
