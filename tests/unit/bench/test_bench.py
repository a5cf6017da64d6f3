"""What the bench decides without a machine: options, what can run where, the line, tables, files."""

from __future__ import annotations

import csv
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest

from raytorchrpc.bench import cases as bench_cases
from raytorchrpc.bench.cases import PATTERN_ROWS, PATTERNS, ROWS, Case, Shape, case_obstacle, make_options, shape
from raytorchrpc.bench.reports import conclusion, document, not_measured, plain, tables, to_csv
from raytorchrpc.bench.results import (
    INTERRUPTED,
    Cell,
    Device,
    RowResult,
    Run,
    fit,
    published,
    read_run,
    show_size,
    write_file,
)
from raytorchrpc.bench.site import Host, MemoryLimits, Site, find_node, free_memory, needed, obstacle, size_obstacle
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.topology.endpoint import Endpoint, Gid, Hca, HcaPort
from tests.unit import command_line

GB = 10**9
BY_NAME = {row.name: row for row in ROWS}
PATTERN_ROW = {row.name: row for row in PATTERN_ROWS}
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


# --- options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("1250", 1250), ("1.25KB", 1250), ("20 kb", 20_000), ("2.5gb", 25 * 10**8), ("8MiB", 8 << 20), ("1B", 1)),
        *((text, None) for text in ("", "x", "-1", "0", "1.5.2MB", "1TB", "65GB", "MB", "0.0001KB")),
    ],
)
def test_sizes_are_read_and_what_is_none_is_refused_by_its_text(text: str, size: int | None) -> None:
    if size is not None:
        assert bench_cases.parse_size(text) == size
        return
    with pytest.raises(ConfigurationError, match=f"{text!r} is not a number of bytes"):
        bench_cases.parse_size(text)


def test_a_run_covers_everything_unless_told_otherwise() -> None:
    usual = make_options()
    assert (usual.rows, usual.devices) == (ROWS, ("cpu", "cuda"))
    sizes = [case.size for case in usual.cases]
    assert sizes == sorted({size for curve in published()[1].values() for size in curve})
    assert [bench_cases.parse_size(show_size(size)) for size in sizes] == sizes
    some = make_options(rows=["nccl-*,auto", "memcpy"], sizes=["1MB,1KB", "1000"], device="cpu")
    assert [row.name for row in some.rows] == ["auto", "nccl-nvlink", "nccl-TCP", "nccl-IB", "nccl-GDR", "memcpy"]
    assert ([case.size for case in some.cases], some.devices) == ([1000, 10**6], ("cpu",))


@pytest.mark.parametrize(("cores", "rows"), [(2, bench_cases.QUICK_FEW), (32, bench_cases.QUICK)])
def test_a_quick_run_starts_few_actors_where_there_are_few_cores(cores: int, rows: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(bench_cases.os, "cpu_count", lambda: cores)
    quick = make_options(quick=True)
    assert {row.name for row in quick.rows} == set(rows)
    assert quick.budget_s < 60


def test_patterns_rows_and_payloads_are_chosen_by_name() -> None:
    some = make_options(pattern=["paced,all-*"], rows=["auto,ray*"], sizes=["10MB,nothing", "1.25KB"], device="cpu")
    assert [row.name for row in some.rows] == ["auto", "ray", "ray-graph"]
    assert {(case.pattern, case.size) for case in some.cases} == {
        (pattern, size) for pattern in ("paced", "all-to-all") for size in (0, 1250, 10_000_000)
    }
    everything, quick = make_options(pattern=["all"]), make_options(pattern=["all"], quick=True)
    assert (everything.rows, everything.repeats, quick.repeats) == (PATTERN_ROWS, 5, 3)
    assert list(dict.fromkeys(case.pattern for case in everything.cases)) == list(PATTERNS)
    assert {case.size for case in everything.cases} == {0, 1250, 10_000_000}
    assert quick.budget_s < 90 and len(quick.cases) < len(everything.cases)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rows", "carrier-pigeon"], "no row 'carrier-pigeon'; rows: auto, "),
        (["--sizes", "1.25KB,huge"], "size 'huge' is not a number of bytes"),
        (["--device", "tpu"], "device 'tpu' is not one of cpu, cuda, all"),
        (["--device", "cpu", "--rows", "bare-nccl"], "none of the rows bare-nccl carries cpu tensors"),
        (["--budget", "1"], "the budget must be 10 to 86400 seconds, not 1"),
        (["--against", "hearsay"], "--against 'hearsay' is unknown; known: published"),
        (["--hosts", "here", "here"], "hosts must be two different Ray nodes"),
        (["--plot", "figures.svg"], "figures.svg does not end in .png"),
        (["--json", "/no/such/folder/x.json"], "cannot write /no/such/folder/x.json: no such directory"),
        (["--json", f"{__file__}/x.json"], "x.json: no such directory"),
        (["--csv", "same", "--json", "same"], "two outputs name the same file"),
        (["--from", "/no/such/result.json"], "cannot read /no/such/result.json"),
        (["--from", __file__], "is not a result of `raytorchrpc bench --json`"),
        (["--from", "x.json", "--quick"], "measures nothing"),
        (["--from", "x.json", "--pattern", "quiet"], "measures nothing"),
        (["--address", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
        (["--address", "nonsense"], "no Ray cluster at nonsense: "),
        (["--hosts", "a", "b"], "no Ray cluster answers at 127.0.0.1:1"),
        (["--pattern", "waltz"], "no pattern 'waltz'; patterns: quiet, paced, "),
        (["--pattern", "quiet", "--rows", "memcpy"], "no row 'memcpy'; rows: auto, bare-torchrpc, "),
        (["--pattern", "quiet", "--sizes", "huge"], "size 'huge' is not a number of bytes"),
        (["--pattern", "quiet", "--hosts", "a", "b"], "--pattern measures within one host"),
        (["--pattern", "quiet", "--against", "published"], "--against has figures of sizes, not of patterns"),
    ],
)
def test_bad_options_are_one_line_and_start_nothing(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    ran = command_line.run("bench", *arguments)
    assert ran.exit_code == 2, ran
    assert ran.stderr.startswith("raytorchrpc bench: ") and says in ran.stderr
    assert (ran.stderr.count("\n"), ran.stdout) == (1, "")
    assert not list(tmp_path.iterdir())


def test_a_plot_without_matplotlib_is_one_line(monkeypatch: Any) -> None:
    monkeypatch.setattr("raytorchrpc.bench.reports.find_spec", lambda name: None)
    ran = command_line.run("bench", "--plot", "x.png")
    assert ran.exit_code == 2
    assert ran.stderr == "raytorchrpc bench: --plot needs matplotlib: pip install '.[bench]' in a checkout\n"


def test_nodes_are_found_by_id_address_and_name() -> None:
    nodes = [
        {"NodeID": f"id{n}", "NodeManagerAddress": f"10.0.0.{n}", "NodeManagerHostname": f"host{n}", "NodeName": ""}
        for n in (1, 2)
    ]
    for name in ("id2", "10.0.0.2", "host2"):
        assert find_node(name, nodes) is nodes[1]
    with pytest.raises(ConfigurationError, match=r"no Ray node 'host3'; nodes: 10.0.0.1 \(host1\), 10.0.0.2 \(host2\)"):
        find_node("host3", nodes)
    twins = [{**node, "NodeManagerHostname": "twin"} for node in nodes]
    with pytest.raises(ConfigurationError, match=r"several Ray nodes match 'twin'.*id1, id2"):
        find_node("twin", twins)


# --- what can run where ------------------------------------------------------------------------------------------


def place(host: str = "one", **more: Any) -> Host:
    known: Any = {"pid": 1, "uid": 0, "namespaces": {}, "node_ip": "10.0.0.1", "torch_version": "2.13.0"}
    known |= {"hcas": more.pop("hcas", ()), "peer_memory": more.pop("peer_memory", False)}
    endpoint = Endpoint(hostname=host, boot_id=host, tensorpipe_transports=("shm", "ibv", "uv"), **known)
    usual = {"free_bytes": 32 * GB, "packages": frozenset({"pynng", "nixl"}), "nccl": True, "store_bytes": 8 * GB}
    return Host(endpoint=endpoint, node=host, **{**usual, **more})


def site(a: Host, b: Host | None = None) -> Site:
    """A machine, or two."""
    return Site(a, b or a)


def adapter(state: str = "ACTIVE") -> Hca:
    gid = Gid(index=0, value="fe80:0000:0000:0000:0000:0000:0000:0001", kind="IB/RoCE v1", interface=None, ipv4=None)
    return Hca(name="mlx5_0", ports=(HcaPort(number=1, state=state, link_layer="InfiniBand", gids=(gid,)),))


CUDA_ANYWHERE = {"auto", "torchrpc", "torchrpc-TCP", "nixl", "ray", "ray-zero-copy", "bare-torchrpc"}
CUDA_ANYWHERE |= {"ray-rdt-nixl", "ray-rdt-torchrpc"}
ANYWHERE = CUDA_ANYWHERE | {"nng-TCP", "ray-rdt-gloo", "socket", "bare-nng", "bare-socket", "bare-socket-x4", "memcpy"}
TWO_GPUS = {"nccl-TCP", "ray-rdt-nccl", "bare-nccl"}
RDMA_CUDA = CUDA_ANYWHERE | TWO_GPUS | {"torchrpc-IB", "nccl-IB", "nccl-GDR"}
ONE_HOST_GPU = {"cuda-shared-tensor", "ray-rdt-cuda-ipc", "gpu-copy"}
ADAPTER = {"gpus": 1, "hcas": (adapter(),)}
DIRECT = {**ADAPTER, "peer_memory": True}


@pytest.fixture
def newest_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows depend on Ray's version too, and here on nothing but the places."""
    monkeypatch.setattr("ray.__version__", "2.60.0")


@pytest.mark.usefixtures("newest_ray")
@pytest.mark.parametrize(
    ("where", "device", "rows"),
    [
        (site(place()), "cpu", ANYWHERE | {"shm", "nng-ipc"}),
        (site(place()), "cuda", set()),
        (site(place(gpus=1)), "cuda", CUDA_ANYWHERE | ONE_HOST_GPU),
        (site(place(gpus=2)), "cuda", CUDA_ANYWHERE | ONE_HOST_GPU | TWO_GPUS | {"nccl-nvlink"}),
        (site(place(), place("two")), "cpu", ANYWHERE),
        (site(place(**ADAPTER), place("two", **ADAPTER)), "cpu", ANYWHERE | {"torchrpc-IB"}),
        (site(place(**ADAPTER), place("two", **ADAPTER)), "cuda", RDMA_CUDA),
        (site(place(**DIRECT), place("two", **DIRECT)), "cuda", RDMA_CUDA | {"torchrpc-GDR"}),
    ],
)
def test_rows_run_where_they_can(where: Site, device: Device, rows: set[str]) -> None:
    assert {row.name for row in ROWS if device in row.devices and obstacle(row, device, where) is None} == rows


@pytest.mark.usefixtures("newest_ray")
@pytest.mark.parametrize(
    ("row", "device", "where", "says"),
    [
        ("auto", "cuda", site(place()), "Ray has no GPU"),
        ("torchrpc-IB", "cpu", site(place()), "needs two hosts"),
        ("nccl-nvlink", "cuda", site(place(gpus=1)), "needs two GPUs, and there is one"),
        ("nccl-IB", "cuda", site(place(gpus=2, hcas=(adapter("DOWN"),))), "no port of an RDMA adapter is active"),
        ("bare-nccl", "cuda", site(place(gpus=2, nccl=False)), "this torch build has no NCCL"),
        ("shm", "cpu", site(place(), place("two")), "needs both ends on one host"),
        ("torchrpc-IB", "cpu", site(place(), place("two")), "no RDMA adapter (HCA)"),
        ("auto", "cuda", site(place(gpus=1), place("two")), "Ray has no GPU on one of the nodes"),
        ("torchrpc-GDR", "cuda", site(place(**ADAPTER), place("two", **ADAPTER)), "load nvidia-peermem"),
        ("nng-TCP", "cpu", site(place(packages=frozenset())), "pynng is not installed: pip install pynng"),
        ("ray-rdt-nixl", "cpu", site(place(packages=frozenset())), "pip install '.[nixl]'"),
    ],
)
def test_a_row_that_cannot_run_says_why(row: str, device: Device, where: Site, says: str) -> None:
    assert says in (obstacle(BY_NAME[row], device, where) or "")


@pytest.mark.parametrize(
    ("row", "case", "device", "gpus", "says"),
    [
        ("auto", Case("quiet", size=1250), "cuda", 0, "Ray has no GPU"),
        ("bare-nccl", Case("quiet", size=1250), "cuda", 1, "needs two GPUs, and there is one"),
        ("bare-nccl", Case("quiet", size=1250), "cuda", 2, None),
        ("bare-nccl", Case("quiet"), "cuda", 2, "only for CUDA"),
        ("auto", Case("in-flight", unit="calls/s", size=10**7), "cpu", 0, "up to 1 MB"),
        ("ray-graph", Case("all-to-all", members=4), "cpu", 0, "driver alone"),
        ("bare-torchrpc", Case("in-flight", concurrency=4), "cpu", 0, "concurrency"),
        ("auto", Case("all-to-all", members=8, size=640_000_000), "cpu", 0, "of memory"),
        ("auto", Case("all-to-all", members=8, size=640_000_000), "cuda", 2, None),
        *((row, Case("quiet", size=1250), "cpu", 0, None) for row in ("auto", "bare-torchrpc", "ray", "ray-graph")),
        ("floor", Case("paced", size=1250, interval_s=0.002), "cpu", 0, None),
        ("floor", Case("quiet", size=1250), "cpu", 0, "only in the paced pattern"),
        ("floor", Case("paced", size=10**7, interval_s=0.002), "cpu", 0, "only in the paced pattern"),
    ],
)
def test_a_row_that_cannot_run_a_case_says_why(row: str, case: Case, device: Device, gpus: int, says: Any) -> None:
    found = case_obstacle(PATTERN_ROW[row], case, device, 16 * GB)
    found = found or obstacle(PATTERN_ROW[row], device, site(place(gpus=gpus)))
    assert found is None if says is None else says in (found or "")


def test_ray_actors_can_be_called_while_they_call() -> None:
    ray, auto = PATTERN_ROW["ray"], PATTERN_ROW["auto"]
    assert shape(ray, Case("all-to-all", members=4)) == Shape(4, 16, 16)
    assert shape(ray, Case("busy-callee", busy="Python")) == Shape(2, 1, 16)
    assert shape(ray, Case("quiet")) == shape(auto, Case("quiet")) == Shape(2, 1, 1)
    assert shape(auto, Case("all-to-all", members=4)) == Shape(4, 1, 1)
    assert shape(auto, Case("in-flight", concurrency=0)) == Shape(2, 1, 0)


def test_sizes_beyond_a_lane_or_the_memory_are_not_tried() -> None:
    room = MemoryLimits(host=10 * GB, gpu=10 * GB, store=GB)
    assert size_obstacle(BY_NAME["auto"], "cpu", 10**6, room) is None
    assert "carries at most" in (size_obstacle(BY_NAME["socket"], "cpu", 1 << 20, room) or "")
    assert "of memory, 10 GB is usable" in (size_obstacle(BY_NAME["auto"], "cpu", 5 * GB, room) or "")
    assert "of GPU memory" in (size_obstacle(BY_NAME["cuda-shared-tensor"], "cuda", 5 * GB, room) or "")
    assert "object store of 1 GB" in (size_obstacle(BY_NAME["ray"], "cpu", 6 * 10**8, room) or "")
    assert needed(BY_NAME["cuda-shared-tensor"], "cuda", 10)[0] == 0
    assert needed(BY_NAME["torchrpc-TCP"], "cuda", 10)[0] > 0


def test_free_memory_is_what_the_control_group_leaves(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert free_memory(tmp_path) == 8000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("3000000\n")
    (group / "memory.current").write_text("1000000\n")
    assert free_memory(tmp_path) == 2_000_000
    (group / "memory.max").write_text("max\n")
    assert free_memory(tmp_path) == 8000 * 1024


def test_rows_and_cases_are_sound() -> None:
    assert len(BY_NAME) == len(ROWS)
    assert {row.published for row in ROWS} - {None} == set(published()[1])  # every published transport has its row
    for row in ROWS:
        GroupConfig(**row.config)
        shared = [other for other in ROWS if other.actors == row.actors]
        assert len(shared) == 1 or not any(other.env or other.transport == "group" for other in shared)
    with pytest.raises(ConfigurationError):
        bench_cases.choose(["auto", "Auto"])
    for pattern in PATTERNS:
        labels = [case.label for case in bench_cases.cases(pattern, (0, 1250), quick=False)]
        assert len(set(labels)) == len(labels) > 0


# --- the line ---------------------------------------------------------------------------------------------------


SLOPE = [(size, 50e-6 + size / 8e9) for size in (1250, 20_000, 10**6, 10**8)]


@pytest.mark.parametrize(
    ("points", "per_op_s", "bytes_per_s", "off_by"),
    [
        (SLOPE, 50e-6, 8e9, 1e-6),
        ([*SLOPE, (10**9, 0.25)], 50e-6, 6e9, 0.3),  # small times weigh as much as large ones
        ([(1000, 2e-3), (10**6, 1e-3)], 1.2e-3, None, 0.1),  # no part is negative
        ([(10**6, 1e-3), (10**7, 2e-2)], 0, 8e8, 0.1),
    ],
)
def test_the_line_through_medians(points: Any, per_op_s: float, bytes_per_s: float | None, off_by: float) -> None:
    line = fit(points)
    assert line is not None and line.per_op_s == pytest.approx(per_op_s, rel=off_by)
    assert line.bytes_per_s == (bytes_per_s and pytest.approx(bytes_per_s, rel=off_by))
    assert fit(points[:1]) is None and fit([]) is None


# --- what came out ------------------------------------------------------------------------------------------------


def cell(row: str, device: Device, size: int, figure: float | str, **more: Any) -> Cell:
    """Figures, or the reason why there are none."""
    if isinstance(figure, str):
        return Cell(row=row, device=device, bytes=size, reason=figure, **more)
    figures = {"median": figure, "low": figure * 0.9, "high": figure * 1.1}
    return Cell(row=row, device=device, bytes=size, **figures, **more)


def run_of(rows: list[RowResult], cells: list[Cell]) -> Run:
    return Run(version="1", started="2026-01-01T00:00:00+00:00", command="raytorchrpc bench --quick", seconds=12.5,
               machine=("2 cores, somewhere", "RDMA adapters: none"), rows=tuple(rows), cells=tuple(cells))  # fmt: skip


def result(*devices: Device, rays: float | str = 5.0) -> Run:
    """A run of sizes."""
    kinds = {"auto": "raytorchrpc", "shm": "raytorchrpc", "ray": "for comparison", "same-gpu": "for comparison"}
    kinds |= {"memcpy": "limit", "nixl": "raytorchrpc"}
    times = {"auto": 1.0, "shm": 0.8, "ray": rays, "same-gpu": 0.1, "memcpy": 0.1, "nixl": "nixl is not installed"}
    rows, cells = [], []
    for device in devices or ("cpu",):
        for name, kind in kinds.items():
            curve = ("intranode", "shm") if name == "shm" else None
            known: Any = {"what": "x", "published": curve, "comparable": name != "same-gpu"}
            rows.append(RowResult(row=name, device=device, kind=kind, **known))
            for size in (1250, 40_000_000):
                figure: Any = "one takes about 9 s" if (name, size) == ("ray", 40_000_000) else times[name]
                cells.append(cell(name, device, size, figure, samples=9, via="shm"))
    return run_of(rows, cells)


def pattern_result() -> Run:
    """A run of a pattern."""
    cost = {"caller_switches": 1.25, "caller_cpu_ms": 0.08, "callee_switches": 2.0, "callee_cpu_ms": 0.07}
    large: dict[str, Any] = {"auto": 0.25, "bare-torchrpc": 0.5, "ray": 1.0, "ray-graph": "too long", "floor": 0.05}
    small = {"auto": 0.1, "bare-torchrpc": 0.2, "ray": "it broke", "ray-graph": "it broke", "floor": 0.05}
    return run_of([], [
        cell(row, "cpu", size, figure, pattern="quiet", repeats=5, **(cost if row == "auto" else {}))
        for size, figures in ((1250, large), (0, small)) for row, figure in figures.items()
    ])  # fmt: skip


def shown(run: Run, tmp_path: Path, *options: str, code: int = 0) -> str:
    """What the command prints of it, or says of its failure."""
    write_file(tmp_path / "run.json", run.model_dump_json(exclude_none=True))
    ran = command_line.run("bench", "--from", str(tmp_path / "run.json"), *options)
    assert ran.exit_code == code, ran
    return ran.stderr if code else ran.stdout


def test_a_run_that_ctrl_c_ended_is_shown_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, file = result(rays=INTERRUPTED), tmp_path / "r.json"
    monkeypatch.setattr("raytorchrpc.cli.bench._measure", lambda *_: run)
    ran = command_line.run("bench", "--json", str(file))
    assert ran.exit_code not in (0, 2) and "auto" in ran.stdout and INTERRUPTED in ran.stdout
    assert read_run(file) == run
    assert INTERRUPTED in shown(run, tmp_path), "shown again, it is a run like others"


@pytest.mark.parametrize("run", [result(), result("cpu", "cuda"), pattern_result()])
def test_a_result_is_written_and_read_again(run: Run, tmp_path: Path) -> None:
    write_file(tmp_path / "r.json", run.model_dump_json(exclude_none=True))
    assert read_run(tmp_path / "r.json") == run
    assert os.listdir(tmp_path) == ["r.json"]


def test_the_stored_results_are_read() -> None:
    sizes = read_run(RESULTS / "h200.json")
    assert tables(sizes)[0].rows[0][:2] == ("auto", "0.258 ±0%")
    patterns = read_run(RESULTS / "h200-patterns-cpu.json")
    assert [pattern for _, pattern in patterns.tables()][:2] == ["quiet", "paced"]
    assert tables(patterns)[0].rows[0][1].startswith("0.144 (")


def test_tables_show_figures_and_only_figures() -> None:
    found, choice = tables(result(), against_published=True)
    by_row = {row[0]: row[1:] for row in found.rows}
    assert by_row["auto"][:2] == ("1 ±10%", "1 ±10%")
    assert by_row["ray"][:2] == ("5 ±10%", "-")
    assert "nixl" not in by_row
    shm = published()[1]["intranode", "shm"]
    assert by_row["  published, intranode"][:2] == (f"{shm[1250]:.3g}", f"{shm[40_000_000]:.3g}")
    rule = plain(found).splitlines()[2]
    assert set(rule) == {"-", " "} and len(rule.split()) == len(found.heads)
    # Auto is compared to forced rows and to peers, but to no limit.
    assert choice.rows == (("1.25 KB", "shm", "shm", "1.25", "ray", "0.20"), ("40 MB", "shm", "shm", "1.25", "-", "-"))


def test_the_table_of_a_pattern_shows_medians_spread_and_ratios() -> None:
    found, cost = tables(pattern_result())
    ratios = ("auto / bare-torchrpc", "auto / ray", "x floor")
    assert found.heads == ("case", "auto", "bare-torchrpc", "ray", "floor", *ratios)
    assert found.rows[0][:4] == ("1.25 KB", "0.25 (0.225-0.275)", "0.5 (0.45-0.55)", "1 (0.9-1.1)")
    assert [row[-3:] for row in found.rows] == [("0.50", "0.25", "5.00"), ("0.50", "-", "2.00")]
    assert cost.rows[0][:3] == ("1.25 KB", "1.2 + 2.0", "80 + 70")
    assert "context switches" in plain(cost)


@pytest.mark.parametrize(
    ("rays", "says"),
    [(7.2, "a seventh of Ray's"), (1.9, "half of Ray's"), (14.4, "1/14 of Ray's"), (1.1, "about as long as Ray's"),
     (0.4, "2.5 times as long as Ray's")],
)  # fmt: skip
def test_a_run_ends_with_one_sentence(rays: float, says: str) -> None:
    assert conclusion(result(rays=rays)) == f"Here a call with a tensor of 1.25 KB takes {says}."
    assert conclusion(pattern_result()) == "Here a call with a tensor of 1.25 KB takes a quarter of Ray's."
    assert conclusion(result(rays="it broke")) is None


@pytest.mark.parametrize("width", [60, 80])
def test_tables_fit_a_terminal_and_lose_no_column(width: int) -> None:
    found = tables(run_of(list(result().rows), [cell("auto", "cpu", 10**n, 1.0) for n in range(3, 11)]))[0]
    lines = plain(found, width).splitlines()
    assert max(map(len, lines)) <= width < max(map(len, plain(found).splitlines()))
    columns = [re.split(r" {2,}", line) for line in lines if line.startswith("row ")]
    assert len(columns) > 1 and [head for heads in columns for head in heads[1:]] == list(found.heads[1:])


def test_every_hole_has_its_reason() -> None:
    assert not_measured(result()) == [
        "CPU tensors: ray at 40 MB: one takes about 9 s",
        "CPU tensors: nixl: nixl is not installed",
    ]
    assert not_measured(pattern_result()) == [
        "CPU tensors: ray-graph: quiet (1.25 KB): too long",
        "CPU tensors: ray, ray-graph: quiet (nothing): it broke",
    ]
    lines = list(csv.DictReader(io.StringIO(to_csv([result(), pattern_result()]))))
    assert len(lines) == 12 + 10
    hole = next(line for line in lines if (line["row"], line["bytes"]) == ("ray", "40000000"))
    assert (hole["median"], hole["reason"]) == ("", "one takes about 9 s")


def test_the_document_says_how_to_get_it_again_and_what_is_missing() -> None:
    text = document([result(), result("cuda")], ["a.png", None])
    for part in ("raytorchrpc bench --quick", "![Latency and bandwidth against size](a.png)", "| auto | 1 ±10% |"):
        assert part in text
    assert text.count("<summary>Not measured, and why</summary>") == 2
    assert "CUDA tensors: nixl: nixl is not installed" in text
    assert "| shm | 2 cores, one host, cpu | 0.8 |" in text[text.index("## Published figures") :]
    of_pattern = document([pattern_result()], ["p.png"])
    for part in ("| 1.25 KB | 0.25 (0.225-0.275) |", "](p.png)", "too long"):
        assert part in of_pattern


def test_results_can_be_shown_again(tmp_path: Path) -> None:
    text = shown(result("cpu", "cuda"), tmp_path, "--from", str(tmp_path / "run.json"), "--markdown",
                 str(tmp_path / "out.md"), "--csv", str(tmp_path / "out.csv"))  # fmt: skip
    assert text.count("what auto chose") == 4
    for name in ("line within", "auto / it"):  # explained once for each run
        assert name in text and text.count(f"\n{name}: ") == 2
    assert (tmp_path / "out.md").read_text().count("## 2 cores, one host") == 2
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 49
    assert "0.25 (0.225-0.275)" in shown(pattern_result(), tmp_path)
    nothing = "raytorchrpc bench: no row produced a figure; the reasons are above\n"
    assert shown(run_of([], []), tmp_path, code=1) == nothing


# --- pictures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [result(), pattern_result()])
def test_a_picture_names_the_library_the_machine_and_sizes_or_cases(run: Run) -> None:
    pytest.importorskip("matplotlib")
    from raytorchrpc.bench.reports import draw, figure_of

    assert draw(run, against_published=True).startswith(b"\x89PNG")
    figure = figure_of(run)
    figure.canvas.draw()
    assert figure.get_suptitle() == "raytorchrpc 1, 2026-01-01; 2 cores, somewhere\nRDMA adapters: none"
    axes, labels = figure.axes[0], [label.get_text() for label in figure.axes[0].get_xticklabels()]
    if not run.has_patterns:
        assert {"1 KB", "10 MB"} <= set(labels)
        return
    assert labels == ["1.25 KB", "nothing"]
    assert axes.get_position().width > 0.7 and len(figure.axes) == 1  # it fills the picture
    assert all(line.get_linestyle() == "None" for line in axes.lines if len(line.get_xdata()) > 1)  # joins no cases
    low, high = axes.get_ylim()
    ticks = [label.get_text() for at, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
             if low <= at <= high]  # fmt: skip
    assert {"0.1", "0.5", "1"} <= set(ticks) and not any("times" in tick for tick in ticks)
