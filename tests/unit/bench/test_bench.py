"""What the bench decides without a machine: options, what can run where, repeats, the line, tables."""

from __future__ import annotations

import csv
import io
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raytorchrpc.bench.fit import fit
from raytorchrpc.bench.markdown import document
from raytorchrpc.bench.options import Options, make_options, parse_size, show_size
from raytorchrpc.bench.pairs import Failed, Pair, Series, Stuck
from raytorchrpc.bench.results import (
    Cell,
    RowResult,
    Run,
    published,
    published_curve,
    published_sizes,
    read_run,
    write_file,
)
from raytorchrpc.bench.rows import QUICK, ROWS, Device, Row, choose
from raytorchrpc.bench.run import find_node
from raytorchrpc.bench.schedule import FEWEST, Sampler, lead_in
from raytorchrpc.bench.site import Host, MemoryLimits, Site, free_memory, needed, obstacle, size_obstacle
from raytorchrpc.bench.tables import choice, figures, not_measured, plain, to_csv
from raytorchrpc.cli.app import app
from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.topology.endpoint import Endpoint, Gid, Hca, HcaPort

GB = 10**9
BY_NAME = {row.name: row for row in ROWS}


# --- options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1250", 1250),
        ("1.25KB", 1250),
        ("20 kb", 20_000),
        ("2.5gb", 2_500_000_000),
        ("8MiB", 8 << 20),
        ("1B", 1),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1.5.2MB", "1TB", "65GB", "MB", "0.0001KB"])
def test_what_is_no_size_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a number of bytes") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


def test_published_sizes_are_shown_as_they_are_read() -> None:
    for size in published_sizes():
        assert parse_size(show_size(size)) == size


def test_a_run_covers_everything_unless_told_otherwise() -> None:
    usual = make_options()
    assert usual.rows == ROWS
    assert usual.devices == ("cpu", "cuda")
    assert usual.sizes == published_sizes()
    assert (usual.sizes[0], usual.sizes[-1], len(usual.sizes)) == (1250, 25 * 10**8, 8)
    quick = make_options(quick=True)
    assert {row.name for row in quick.rows} == set(QUICK)
    assert quick.budget_s < 60
    some = make_options(rows=["nccl-*,auto", "memcpy"], sizes=["1MB,1KB", "1000"], device="cpu")
    assert [row.name for row in some.rows] == ["auto", "nccl-nvlink", "nccl-TCP", "nccl-IB", "nccl-GDR", "memcpy"]
    assert (some.sizes, some.devices) == ((1000, 10**6), ("cpu",))


# --- the command refuses bad options in one line, and starts nothing ----------------------------------------------


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
        (["--csv", "same", "--json", "same"], "two outputs name the same file"),
        (["--from", "/no/such/result.json"], "cannot read /no/such/result.json"),
        (["--from", __file__], "is not a result of `raytorchrpc bench --json`"),
        (["--from", "x.json", "--quick"], "measures nothing"),
        (["--address", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], says: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, ["bench", *arguments])
    assert ran.exit_code == 2, ran.output
    assert ran.stderr.startswith("raytorchrpc bench: ")
    assert says in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert ran.stdout == ""
    assert not list(tmp_path.iterdir())


def test_hosts_without_a_cluster_is_one_line(monkeypatch: Any) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    ran = CliRunner().invoke(app, ["bench", "--hosts", "a", "b"])
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert "no Ray cluster answers at 127.0.0.1:1" in ran.stderr


def test_a_plot_without_matplotlib_is_one_line(monkeypatch: Any) -> None:
    monkeypatch.setattr("raytorchrpc.bench.plots.find_spec", lambda name: None)
    ran = CliRunner().invoke(app, ["bench", "--plot", "x.png"])
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
    endpoint = Endpoint(
        hostname=host,
        pid=1,
        boot_id=host,
        namespaces={},
        uid=0,
        node_ip="10.0.0.1",
        torch_version="2.13.0",
        tensorpipe_transports=("shm", "ibv", "uv"),
        hcas=more.pop("hcas", ()),
        peer_memory=more.pop("peer_memory", False),
    )
    usual = {"free_bytes": 32 * GB, "packages": frozenset({"pynng", "nixl"}), "nccl": True, "store_bytes": 8 * GB}
    return Host(endpoint=endpoint, **{**usual, **more})


def site(a: Host, b: Host | None = None) -> Site:
    """A machine, or two."""
    return Site(a, b or a)


def adapter(state: str = "ACTIVE") -> Hca:
    gid = Gid(index=0, value="fe80:0000:0000:0000:0000:0000:0000:0001", kind="IB/RoCE v1", interface=None, ipv4=None)
    return Hca(name="mlx5_0", ports=(HcaPort(number=1, state=state, link_layer="InfiniBand", gids=(gid,)),))


def runs(where: Site, device: Device) -> set[str]:
    return {row.name for row in ROWS if device in row.devices and obstacle(row, device, where) is None}


ANYWHERE = {"torchrpc", "torchrpc-TCP", "nng-TCP", "nixl", "ray", "ray-zero-copy", "ray-rdt-gloo", "ray-rdt-nixl"}
ANYWHERE |= {
    "ray-rdt-torchrpc",
    "auto",
    "socket",
    "bare-torchrpc",
    "bare-nng",
    "bare-socket",
    "bare-socket-x4",
    "memcpy",
}
CUDA_ANYWHERE = {"auto", "torchrpc", "torchrpc-TCP", "nixl", "ray", "ray-zero-copy", "bare-torchrpc"}
CUDA_ANYWHERE |= {"ray-rdt-nixl", "ray-rdt-torchrpc"}
TWO_GPUS = {"nccl-TCP", "ray-rdt-nccl", "bare-nccl"}
ONE_HOST_GPU = {"cuda-shared-tensor", "ray-rdt-cuda-ipc", "gpu-copy"}


def test_a_machine_without_gpus() -> None:
    here = site(place())
    assert runs(here, "cpu") == ANYWHERE | {"shm", "nng-ipc"}
    assert runs(here, "cuda") == set()
    assert obstacle(BY_NAME["auto"], "cuda", here) == "Ray has no GPU"
    assert obstacle(BY_NAME["torchrpc-IB"], "cpu", here) == "needs two hosts"


def test_one_gpu_can_be_shared_but_nccl_needs_two() -> None:
    here = site(place(gpus=1))
    assert runs(here, "cuda") == CUDA_ANYWHERE | ONE_HOST_GPU
    assert obstacle(BY_NAME["nccl-nvlink"], "cuda", here) == "needs two GPUs, and there is one"


def test_two_gpus_of_one_host() -> None:
    assert runs(site(place(gpus=2)), "cuda") == CUDA_ANYWHERE | ONE_HOST_GPU | TWO_GPUS | {"nccl-nvlink"}
    with_adapter = site(place(gpus=2, hcas=(adapter(),)))
    assert obstacle(BY_NAME["nccl-IB"], "cuda", with_adapter) is None
    down = site(place(gpus=2, hcas=(adapter("DOWN"),)))
    assert obstacle(BY_NAME["nccl-IB"], "cuda", down) == "no port of an RDMA adapter is active"
    no_nccl = site(place(gpus=2, nccl=False))
    assert obstacle(BY_NAME["bare-nccl"], "cuda", no_nccl) == "this torch build has no NCCL"


def test_two_hosts() -> None:
    bare = site(place(), place("two"))
    assert runs(bare, "cpu") == ANYWHERE
    assert obstacle(BY_NAME["shm"], "cpu", bare) == "needs both ends on one host"
    assert obstacle(BY_NAME["torchrpc-IB"], "cpu", bare) == "no RDMA adapter (HCA)"
    one_sided = site(place(gpus=1), place("two"))
    assert obstacle(BY_NAME["auto"], "cuda", one_sided) == "Ray has no GPU on one of the nodes"
    rdma = {"gpus": 1, "hcas": (adapter(),)}
    both = site(place(**rdma), place("two", **rdma))
    assert runs(both, "cpu") == ANYWHERE | {"torchrpc-IB"}
    assert runs(both, "cuda") == CUDA_ANYWHERE | TWO_GPUS | {"torchrpc-IB", "nccl-IB", "nccl-GDR"}
    assert "load nvidia-peermem" in (obstacle(BY_NAME["torchrpc-GDR"], "cuda", both) or "")
    rdma["peer_memory"] = True
    direct = site(place(**rdma), place("two", **rdma))
    assert runs(direct, "cuda") >= {"torchrpc-GDR", "nccl-GDR"}


def test_what_is_not_installed_is_named_with_the_remedy() -> None:
    here = site(place(packages=frozenset()))
    assert obstacle(BY_NAME["nng-TCP"], "cpu", here) == "pynng is not installed: pip install pynng"
    missing = "nixl is not installed: pip install '.[nixl]' in a checkout"
    assert obstacle(BY_NAME["ray-rdt-nixl"], "cpu", here) == missing


def test_the_lanes_and_settings_of_every_row_exist() -> None:
    for row in ROWS:
        GroupConfig(**row.config)


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


def test_rows_are_sound() -> None:
    assert len(BY_NAME) == len(ROWS)
    keys = {(curve.scope, curve.transport) for curve in published()[1]}
    assert {row.published for row in ROWS} - {None} == keys  # every published transport has its row
    for row in ROWS:
        shared = [other for other in ROWS if other.actors == row.actors]
        assert len(shared) == 1 or not any(other.env or other.transport == "group" for other in shared)
    with pytest.raises(ConfigurationError):
        choose(["auto", "Auto"])


# --- the line ---------------------------------------------------------------------------------------------------


def test_the_line_is_found_again() -> None:
    points = [(size, 50e-6 + size / 8e9) for size in (1250, 20_000, 10**6, 10**8, 10**9)]
    line = fit(points)
    assert line is not None and line.bytes_per_s is not None
    assert line.per_op_s == pytest.approx(50e-6, rel=1e-6)
    assert line.bytes_per_s == pytest.approx(8e9, rel=1e-6)
    assert line.worst < 1e-6


def test_small_times_weigh_as_much_as_large_ones() -> None:
    points = [(size, 50e-6 + size / 8e9) for size in (1250, 20_000, 10**6, 10**8)] + [(10**9, 0.25)]
    line = fit(points)
    assert line is not None
    assert line.per_op_s == pytest.approx(50e-6, rel=0.3)  # a fit of the seconds would put milliseconds here


def test_a_line_has_no_negative_part() -> None:
    falling = fit([(1000, 2e-3), (10**6, 1e-3)])
    assert falling is not None and falling.bytes_per_s is None and falling.per_op_s > 0
    steep = fit([(10**6, 1e-3), (10**7, 2e-2)])
    assert steep is not None and steep.per_op_s == 0 and steep.bytes_per_s is not None
    assert fit([(1000, 1e-3)]) is None
    assert fit([]) is None


# --- which samples when -------------------------------------------------------------------------------------------


class Scripted(Series):
    """A row that takes as long as it is told, without a clock that waits."""

    def __init__(self, row: Row, clock: list[float], log: list[str], per_op: float, per_byte: float = 0.0) -> None:
        super().__init__(row, "cpu", Pair(row.name, False, None, None, opened={row.name: None}))
        self.clock, self.log, self.per_op, self.per_byte = clock, log, per_op, per_byte
        self.carrier: str | None = None
        self.breaks_at: tuple[int, Failed] | None = None

    def send(self, size: int, count: int, timeout_s: float, *, check: bool = False) -> list[float]:
        if self.breaks_at and size >= self.breaks_at[0]:
            raise self.breaks_at[1]
        took = self.per_op + size * self.per_byte
        self.clock[0] += took * count
        self.took[size] = took
        self.log += [f"{self.row.name} {size}"] * count
        return [took] * count

    def check(self, size: int, timeout_s: float) -> str | None:
        self.send(size, 1, timeout_s, check=True)
        return self.carrier

    def drop(self, timeout_s: float) -> None:
        self.log.append(f"{self.row.name} drops")


def measured(monkeypatch: Any, make: Any, *, sizes: tuple[int, ...], budget: float, memory: int = 10**12) -> Any:
    """A run over scripted rows; returns (cells by row and size, the log, the rows)."""
    clock, log = [1000.0], []
    monkeypatch.setattr("raytorchrpc.bench.schedule.time.monotonic", lambda: clock[0])
    tracks = make(clock, log)
    options = Options(tuple(t.row for t in tracks), ("cpu",), sizes, budget)
    here = site(place())
    sampler = Sampler(
        options, tracks, here, MemoryLimits(memory, memory, memory), 1000 + budget, lambda text, part: None
    )
    sampler.run()
    return {(cell.row, cell.bytes): cell for cell in sampler.cells}, log, tracks


def a_row(name: str, **more: Any) -> Row:
    return replace(BY_NAME["memcpy"], name=name, pair="", **more)


def test_rows_take_turns_in_blocks(monkeypatch: Any) -> None:
    cells, log, _ = measured(
        monkeypatch,
        lambda clock, log: [Scripted(a_row("x"), clock, log, 1e-3), Scripted(a_row("y"), clock, log, 2e-3)],
        sizes=(1000, 10**6),
        budget=100,
    )
    assert cells["x", 1000].median_s == pytest.approx(1e-3)
    assert cells["y", 10**6].median_s == pytest.approx(2e-3)
    assert cells["x", 1000].samples == 100
    turns = [name for i, name in enumerate(log) if i == 0 or name != log[i - 1]]
    # Warming up, then ten turns each: nobody is measured in one go.
    assert turns.count("x 1000") == turns.count("y 1000") == 11


def test_a_slow_row_is_left_out_with_its_reason_and_the_others_are_not(monkeypatch: Any) -> None:
    cells, log, _ = measured(
        monkeypatch,
        lambda clock, log: [
            Scripted(a_row("slow"), clock, log, 0.0, per_byte=1e-7),  # 1 ms, 10 s
            Scripted(a_row("fast"), clock, log, 1e-3, per_byte=1e-10),
        ],
        sizes=(10_000, 10**6, 10**8, 10**9),
        budget=60,
    )
    assert cells["slow", 10_000].median_s == pytest.approx(1e-3)
    for size in (10**8, 10**9):
        assert cells["slow", size].median_s is None
        assert "time budget" in (cells["slow", size].reason or "")
        assert cells["fast", size].samples >= FEWEST
    assert "slow 100000000" not in log  # foreseen, not found out


def test_a_row_with_a_large_constant_cost_is_not_taken_for_a_slow_one(monkeypatch: Any) -> None:
    cells, _, _ = measured(
        monkeypatch,
        lambda clock, log: [Scripted(a_row("constant"), clock, log, 0.02)],
        sizes=(1000, 10**6, 10**8),
        budget=60,
    )
    assert all(cells["constant", size].samples >= FEWEST for size in (1000, 10**6, 10**8))


def test_a_large_first_size_tells_how_long_a_larger_one_takes(monkeypatch: Any) -> None:
    cells, _, _ = measured(
        monkeypatch,
        lambda clock, log: [Scripted(a_row("steady"), clock, log, 0.0, per_byte=1e-9)],
        sizes=(40_000_000, 640_000_000),
        budget=60,
    )
    assert cells["steady", 640_000_000].samples >= FEWEST


def test_the_last_row_may_use_the_time_that_is_left(monkeypatch: Any) -> None:
    def rows(clock: list[float], log: list[str]) -> list[Series]:
        return [Scripted(a_row("fast"), clock, log, 0.1), Scripted(a_row("slow"), clock, log, 3.0)]

    cells, _, _ = measured(monkeypatch, rows, sizes=(10**9,), budget=30, memory=6 * 10**9)
    assert cells["fast", 10**9].samples >= FEWEST
    assert cells["slow", 10**9].samples >= FEWEST


def test_a_size_that_turns_out_slow_ends_with_one_sample(monkeypatch: Any) -> None:
    def rows(clock: list[float], log: list[str]) -> list[Series]:
        return [Scripted(a_row("cliff"), clock, log, 0.0, per_byte=1e-7)]

    cells, log, _ = measured(monkeypatch, rows, sizes=(1000, 10**8), budget=60)
    assert cells["cliff", 10**8].median_s is None
    assert log.count("cliff 100000000") == 1


def test_the_budget_is_kept(monkeypatch: Any) -> None:
    clock_seen: list[list[float]] = []

    def rows(clock: list[float], log: list[str]) -> list[Series]:
        clock_seen.append(clock)
        return [Scripted(a_row(f"r{n}"), clock, log, 0.05 * (n + 1), per_byte=1e-9) for n in range(8)]

    sizes = (1000, 10**6, 10**7, 10**8, 10**9)
    cells, _, _ = measured(monkeypatch, rows, sizes=sizes, budget=30)
    assert clock_seen[0][0] - 1000 < 31.5  # at most one sample longer
    assert len(cells) == 40  # a figure or a reason for each
    assert all((cell.median_s is None) != (cell.reason is None) for cell in cells.values())
    assert sum(cell.median_s is not None for cell in cells.values()) > 8


def test_what_went_by_another_lane_is_no_figure(monkeypatch: Any) -> None:
    def rows(clock: list[float], log: list[str]) -> list[Series]:
        track = Scripted(a_row("nccl", carries=("nccl",)), clock, log, 1e-3)
        track.carrier = "torchrpc"
        return [track]

    cells, _, _ = measured(monkeypatch, rows, sizes=(1000,), budget=60)
    cell = cells["nccl", 1000]
    assert (cell.median_s, cell.via, cell.reason) == (None, "torchrpc", "uses torchrpc at this size")


@pytest.mark.parametrize("failure", [Failed("ValueError: no"), Stuck("no answer within 15 s")])
def test_a_row_that_fails_keeps_its_figures_and_says_why_from_there(monkeypatch: Any, failure: Failed) -> None:
    def rows(clock: list[float], log: list[str]) -> list[Series]:
        bad = Scripted(a_row("bad"), clock, log, 1e-3)
        bad.breaks_at = 10**6, failure
        return [bad, Scripted(a_row("good"), clock, log, 1e-3)]

    cells, _, tracks = measured(monkeypatch, rows, sizes=(1000, 10**6, 10**7), budget=60)
    assert cells["bad", 1000].median_s is not None
    assert cells["bad", 10**6].reason == cells["bad", 10**7].reason == str(failure)
    assert all(cells["good", size].median_s is not None for size in (1000, 10**6, 10**7))
    assert tracks[0].pair.failed is not None


def test_sizes_that_do_not_fit_together_are_measured_row_by_row(monkeypatch: Any) -> None:
    cells, log, tracks = measured(
        monkeypatch,
        lambda clock, log: [Scripted(a_row(name), clock, log, 1e-3, 1e-9) for name in ("x", "y")],
        sizes=(1000, 10**6, 10**9),
        budget=200,
        memory=9 * GB,  # 5 for one row, and at most half of it for all
    )
    large = [entry for entry in log if entry.endswith("000000000")]
    assert large == sorted(large)  # all of x, then all of y
    assert cells["x", 10**9].median_s == cells["y", 10**9].median_s == pytest.approx(1.001)
    assert tracks[0].pair.failed == "its turn has ended"  # its memory is free before y begins


# --- what came out ------------------------------------------------------------------------------------------------


def result(device: Device = "cpu") -> Run:
    rows = (
        RowResult(row="auto", device=device, kind="raytorchrpc", what="chosen"),
        RowResult(row="shm", device=device, kind="raytorchrpc", what="memory", published=("intranode", "shm")),
        RowResult(row="ray", device=device, kind="for comparison", what="Ray"),
        RowResult(row="same-gpu", device=device, kind="for comparison", what="less to do", comparable=False),
        RowResult(row="memcpy", device=device, kind="limit", what="copy"),
        RowResult(row="nixl", device=device, kind="raytorchrpc", what="NIXL", reason="nixl is not installed"),
    )
    times = {"auto": 1e-3, "shm": 8e-4, "ray": 5e-3, "same-gpu": 1e-4, "memcpy": 1e-4}
    cells = [
        Cell(row=name, device=device, bytes=size, median_s=t, low_s=t * 0.9, high_s=t * 1.1, samples=9, via="shm")
        for name, t in times.items()
        for size in (1250, 40_000_000)
        if (name, size) != ("ray", 40_000_000)
    ]
    cells.append(Cell(row="ray", device=device, bytes=40_000_000, reason="one takes about 9 s"))
    return Run(
        version="1",
        started="2026-01-01T00:00:00+00:00",
        command="raytorchrpc bench --quick",
        scope="one host",
        machine=("2 cores, somewhere", "RDMA adapters: none"),
        seconds=12.5,
        sizes=(1250, 40_000_000),
        rows=rows,
        cells=tuple(cells),
    )


def test_a_result_is_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_file(path, result().model_dump_json())
    assert read_run(path) == result()
    assert os.listdir(tmp_path) == ["r.json"]


def test_tables_show_figures_and_only_figures() -> None:
    table = figures(result(), "cpu", against_published=True)
    by_row = {row[0]: row[1:] for row in table.rows}
    assert by_row["auto"][:2] == ("1 ±10%", "1 ±10%")
    assert by_row["ray"][:2] == ("5 ±10%", "-")
    assert "nixl" not in by_row
    shm = published_curve(("intranode", "shm"))
    assert shm is not None
    assert by_row["  published, intranode"][:2] == (f"{shm[1250]:.3g}", f"{shm[40_000_000]:.3g}")
    assert len({len(row) for row in (table.heads, *table.rows)}) == 1
    rule = plain(table).splitlines()[2]
    assert set(rule) == {"-", " "} and len(rule.split()) == len(table.heads)


@pytest.mark.parametrize("width", [60, 80])
def test_tables_fit_a_terminal_and_lose_no_column(width: int) -> None:
    sizes = published_sizes()
    cells = [cell.model_copy(update={"bytes": size}) for cell in result().cells[:1] for size in sizes]
    table = figures(result().model_copy(update={"sizes": sizes, "cells": tuple(cells)}), "cpu")
    lines = plain(table, width).splitlines()
    assert max(map(len, lines)) <= width < max(map(len, plain(table).splitlines()))
    columns = [re.split(r" {2,}", line) for line in lines if line.startswith("row ")]
    assert len(columns) > 1 and [head for heads in columns for head in heads[1:]] == list(table.heads[1:])


def test_columns_whose_names_do_not_explain_themselves_are_explained_once(tmp_path: Path) -> None:
    both = result().model_copy(
        update={"rows": result().rows + result("cuda").rows, "cells": result().cells + result("cuda").cells}
    )
    write_file(tmp_path / "both.json", both.model_dump_json())
    ran = CliRunner().invoke(app, ["bench", "--from", str(tmp_path / "both.json")])
    assert ran.stdout.count("what auto chose") == 2
    for name in ("line within", "auto / it"):
        assert name in ran.stdout and ran.stdout.count(f"\n{name}: ") == 1


def test_auto_is_compared_to_forced_rows_and_peers_but_to_no_limit() -> None:
    table = choice(result(), "cpu")
    assert table is not None
    assert table.rows[0] == ("1.25 KB", "shm", "shm", "1.25", "ray", "0.20")
    assert table.rows[1] == ("40 MB", "shm", "shm", "1.25", "-", "-")


def test_every_hole_has_its_reason() -> None:
    assert not_measured(result()) == [
        "CPU tensors: nixl: nixl is not installed",
        "CPU tensors: ray at 40 MB: one takes about 9 s",
    ]
    lines = list(csv.DictReader(io.StringIO(to_csv([result()]))))
    assert len(lines) == 10
    hole = next(line for line in lines if (line["row"], line["bytes"]) == ("ray", "40000000"))
    assert (hole["median_s"], hole["reason"]) == ("", "one takes about 9 s")


def test_the_document_says_how_to_get_it_again_and_what_is_missing() -> None:
    text = document([result(), result("cuda")], ["a.png", None])
    for part in ("raytorchrpc bench --quick", "![Latency and bandwidth against size](a.png)", "| auto | 1 ±10% |"):
        assert part in text
    assert text.count("<summary>Not measured, and why</summary>") == 2
    assert "CUDA tensors: nixl: nixl is not installed" in text
    ours = f"| shm | 2 cores, one host, cpu | {0.8:.3g} |"
    assert ours in text[text.index("## Published figures") :]


def test_a_plot_is_a_picture() -> None:
    pytest.importorskip("matplotlib")
    from raytorchrpc.bench.plots import draw

    picture = draw(result(), against_published=True)
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_a_plot_names_the_library_and_the_machine() -> None:
    pytest.importorskip("matplotlib")
    from raytorchrpc.bench.plots import figure_of

    title = figure_of(result(), against_published=False).get_suptitle()
    assert title == "raytorchrpc 1, 2026-01-01; 2 cores, somewhere\nRDMA adapters: none"


def test_results_can_be_shown_again(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_file(tmp_path / f"{name}.json", result().model_dump_json())
    out = tmp_path / "out.md"
    sources = [word for name in ("a", "b") for word in ("--from", str(tmp_path / f"{name}.json"))]
    ran = CliRunner().invoke(app, ["bench", *sources, "--markdown", str(out), "--csv", str(tmp_path / "out.csv")])
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.count("what auto chose") == 2
    assert out.read_text().count("## 2 cores, one host") == 2
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 21


def test_no_figure_at_all_is_a_failure(tmp_path: Path) -> None:
    empty = result().model_copy(update={"cells": ()})
    write_file(tmp_path / "empty.json", empty.model_dump_json())
    ran = CliRunner().invoke(app, ["bench", "--from", str(tmp_path / "empty.json")])
    assert ran.exit_code == 1
    assert ran.stderr == "raytorchrpc bench: no row produced a figure; the reasons are above\n"


COLD_STARTS = [(1e-5, 10), (5e-4, 10), (2e-3, 2), (1e-2, 1), (0.02, 0), (3.0, 0)]


@pytest.mark.parametrize(("one_takes_s", "skipped"), COLD_STARTS)
def test_quick_samples_start_warm_and_slow_ones_are_not_wasted(one_takes_s: float, skipped: int) -> None:
    assert lead_in(one_takes_s) == skipped
