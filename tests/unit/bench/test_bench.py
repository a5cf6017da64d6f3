"""What the bench decides without a machine: options, what can run where, tables, files."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page
from raytorchrpc.bench import tables
from raytorchrpc.bench.cases import Device, Figure, show_size
from raytorchrpc.bench.contestants import CALLS, LINKS, choose
from raytorchrpc.bench.options import make_options, parse_size
from raytorchrpc.bench.patterns import Pattern, Turn, known_patterns
from raytorchrpc.bench.results import Result, published, read_result
from raytorchrpc.bench.site import Host, Site, find_node, free_memory
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.topology.endpoint import Endpoint, Gid, Hca, HcaPort
from tests.unit import command_line

GB = 10**9
BY_NAME = {one.name: one for one in LINKS}


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
        assert parse_size(text) == size
        return
    with pytest.raises(ConfigurationError, match=f"{text!r} is not a number of bytes"):
        parse_size(text)


def test_a_run_covers_everything_unless_told_otherwise() -> None:
    usual = make_options()
    assert usual.contestants == LINKS and {job.device for job in usual.jobs} == {"cpu", "cuda"}
    sizes = sorted({size for curve in published()[1].values() for size in curve})
    assert [*usual.jobs[0].turns] == [parse_size(show_size(size)) for size in sizes] == sizes
    some = make_options(rows=["nccl-*,raytorchrpc", "memcpy"], sizes=["1MB,1KB", "1000"], device="cpu")
    assert [one.name for one in some.contestants] == [
        "raytorchrpc",
        "nccl-nvlink",
        "nccl-TCP",
        "nccl-IB",
        "nccl-GDR",
        "memcpy",
    ]
    assert [(job.device, *job.turns) for job in some.jobs] == [("cpu", 1000, 10**6)]


def test_patterns_contestants_and_payloads_are_chosen_by_name() -> None:
    some = make_options(
        pattern=["paced,all-*"], rows=["raytorchrpc,ray*"], sizes=["10MB,nothing", "1.25KB"], device="cpu"
    )
    assert [one.name for one in some.contestants] == ["raytorchrpc", "ray"]
    assert {job.name.partition(",")[0] for job in some.jobs} == {"paced", "all-to-all"}
    assert {tuple(job.turns) for job in some.jobs} == {(0, 1250, 10_000_000)}
    everything, quick = make_options(pattern=["all"]), make_options(pattern=["all"], quick=True)
    assert (everything.contestants, everything.rounds, quick.rounds) == (CALLS, 5, 3)
    assert list(dict.fromkeys(job.name.partition(",")[0] for job in everything.jobs)) == list(known_patterns(False))
    assert quick.budget_s < 90 and len(quick.jobs) < len(everything.jobs)
    assert len({(job.device, job.name) for job in everything.jobs}) == len(everything.jobs)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rows", "carrier-pigeon"], "no row 'carrier-pigeon'; rows: raytorchrpc, "),
        (["--sizes", "1.25KB,huge"], "size 'huge' is not a number of bytes"),
        (["--device", "tpu"], "device 'tpu' is not one of cpu, cuda, all"),
        (["--device", "cpu", "--rows", "bare-nccl"], "none of the rows bare-nccl carries cpu tensors"),
        (["--against", "hearsay"], "--against 'hearsay' is unknown; known: published"),
        (["--hosts", "here", "here"], "hosts must be two different Ray nodes"),
        (["--plot", "figures.svg"], "figures.svg does not end in .png"),
        (
            ["--json", "/no/such/folder/x.json"],
            "cannot write /no/such/folder/x.json: it has to be a file",
        ),
        (["--markdown", "same", "--json", "same"], "two outputs name the same file"),
        (["--from", "/no/such/result.json"], "cannot read /no/such/result.json"),
        (["--from", __file__], "is not a result of `raytorchrpc bench --json`"),
        (["--from", "x.json", "--quick"], "measures nothing"),
        (["--address", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
        (["--address", "nonsense"], "no Ray cluster at nonsense: "),
        (["--pattern", "waltz"], "no pattern 'waltz'; patterns: quiet, paced, "),
        (["--pattern", "quiet", "--rows", "memcpy"], "no row 'memcpy'; rows: raytorchrpc, bare-torchrpc, "),
        (["--pattern", "quiet", "--against", "published"], "--against has figures of sizes, not of patterns"),
        (["--peers", "monarch", "--sizes", "1KB"], "--peers measures rows of its own"),
        (["--peers", "gloo"], "no row 'gloo'; rows: raytorchrpc, ray, monarch"),
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
    monkeypatch.setattr("raytorchrpc.bench.plots.find_spec", lambda name: None)
    ran = command_line.run("bench", "--plot", "x.png")
    assert ran.exit_code == 2
    assert ran.stderr == "raytorchrpc bench: --plot needs matplotlib: pip install '.[bench]' in a checkout\n"


def test_without_a_monarch_that_works_the_remedy_is_one_line(monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.executable", shutil.which("false") or "false")
    ran = command_line.run("bench", "--peers", "monarch")
    assert ran.exit_code == 2 and ran.stderr.count("\n") == 1
    assert re.search("Monarch cannot be imported beside torch .*pip install '.\\[peers\\]' in a checkout", ran.stderr)


def test_nodes_are_found_by_id_address_and_name() -> None:
    nodes = [
        {"NodeID": f"id{n}", "NodeManagerAddress": f"10.0.0.{n}", "NodeManagerHostname": f"host{n}", "NodeName": ""}
        for n in (1, 2)
    ]
    for name in ("id2", "10.0.0.2", "host2"):
        assert find_node(name, nodes) is nodes[1]
    with pytest.raises(ConfigurationError, match=r"no Ray node 'host3'; nodes: id1 \(10.0.0.1, host1\); id2 \("):
        find_node("host3", nodes)
    twins = [{**node, "NodeManagerHostname": "twin"} for node in nodes]
    with pytest.raises(ConfigurationError, match=r"several Ray nodes match 'twin'.*id1 .*id2 "):
        find_node("twin", twins)


# --- what can run where ------------------------------------------------------------------------------------------


def place(host: str = "one", **more: Any) -> Host:
    known: Any = {"pid": 1, "uid": 0, "namespaces": {}, "node_ip": "10.0.0.1", "torch_version": "2.13.0"}
    known |= {
        "hcas": more.pop("hcas", ()),
        "peer_memory": more.pop("peer_memory", False),
        "nixl": more.pop("nixl", True),
    }
    endpoint = Endpoint(hostname=host, boot_id=host, tensorpipe_transports=("shm", "ibv", "uv"), **known)
    usual = {"free_bytes": 32 * GB, "store_bytes": 8 * GB}
    return Host(endpoint=endpoint, node=host, **{**usual, **more})


def turn(device: Device, size: int = 1250) -> Turn:
    return Turn(Pattern(), device, size, 0.1)


def site(a: Host, b: Host | None = None) -> Site:
    """A machine, or two."""
    return Site(a, b or a)


def adapter(state: str = "ACTIVE") -> Hca:
    gid = Gid(index=0, value="fe80:0000:0000:0000:0000:0000:0000:0001", kind="IB/RoCE v1", interface=None, ipv4=None)
    return Hca(name="mlx5_0", ports=(HcaPort(number=1, state=state, link_layer="InfiniBand", gids=(gid,)),))


CUDA_ANYWHERE = {"raytorchrpc", "torchrpc", "torchrpc-TCP", "nixl", "ray", "ray-zero-copy", "bare-torchrpc"}
CUDA_ANYWHERE |= {"ray-rdt-nixl", "ray-rdt-torchrpc"}
ANYWHERE = CUDA_ANYWHERE | {"nng-TCP", "ray-rdt-gloo", "socket", "bare-socket", "memcpy"}
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
    assert {one.name for one in LINKS if device in one.devices and one.obstacle(turn(device), where) is None} == rows


@pytest.mark.usefixtures("newest_ray")
@pytest.mark.parametrize(
    ("row", "device", "where", "says"),
    [
        ("raytorchrpc", "cuda", site(place()), "Ray has no GPU"),
        ("torchrpc-IB", "cpu", site(place(**ADAPTER)), "every member is on one host"),
        ("nccl-nvlink", "cuda", site(place(gpus=1)), "needs two GPUs, and there is one"),
        ("nccl-IB", "cuda", site(place(gpus=2, hcas=(adapter("DOWN"),))), "no adapter has an active port"),
        ("shm", "cpu", site(place(), place("two")), "needs both ends on one host"),
        ("torchrpc-IB", "cpu", site(place(), place("two")), "no RDMA adapter"),
        ("raytorchrpc", "cuda", site(place(gpus=1), place("two")), "Ray has no GPU on one of the nodes"),
        ("torchrpc-GDR", "cuda", site(place(**ADAPTER), place("two", **ADAPTER)), "load nvidia-peermem"),
        ("ray-rdt-nixl", "cpu", site(place(nixl=False)), "pip install '.[nixl]'"),
    ],
)
def test_a_row_that_cannot_run_says_why(row: str, device: Device, where: Site, says: str) -> None:
    assert says in (BY_NAME[row].obstacle(turn(device), where) or "")


@pytest.mark.parametrize(
    ("name", "pattern", "device", "size", "says"),
    [
        ("bare-nccl", Pattern(), "cuda", 1250, None),
        ("bare-nccl", Pattern(), "cuda", 0, "only for CUDA tensors in a tight loop"),
        ("raytorchrpc", Pattern(in_flight=8, unit="calls/s"), "cpu", 10**7, "up to 1 MB"),
        ("bare-socket", Pattern(interval_s=0.002), "cpu", 0, None),
        ("bare-socket", Pattern(busy="Python"), "cpu", 0, "no calls beside each other"),
        *((name, Pattern(), "cpu", 1250, None) for name in ("raytorchrpc", "bare-torchrpc", "ray")),
    ],
)
def test_one_that_has_no_such_calls_says_why(name: str, pattern: Pattern, device: Device, size: int, says: Any) -> None:
    reason = choose([name], CALLS)[0].obstacle(Turn(pattern, device, size, 0.1), site(place(gpus=2)))
    assert reason is None if says is None else says in (reason or "")


def test_sizes_beyond_the_memory_are_not_tried() -> None:
    here = site(place(free_bytes=10 * GB, store_bytes=GB))
    assert BY_NAME["raytorchrpc"].obstacle(turn("cpu", 10**6), here) is None
    assert "of memory, 8 GB is usable" in (BY_NAME["raytorchrpc"].obstacle(turn("cpu", 5 * GB), here) or "")
    assert "object store of 1 GB" in (BY_NAME["ray"].obstacle(turn("cpu", 6 * 10**8), here) or "")


def test_free_memory_is_what_the_control_group_leaves(tmp_path: Path) -> None:
    without = free_memory(tmp_path)
    assert without > 0
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("3000\n")
    assert free_memory(tmp_path) == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path) > without / 2


# --- what came out ------------------------------------------------------------------------------------------------


def figure(contestant: str, size: int, value: float | str, **more: Any) -> Figure:
    """A figure, or the reason why there is none."""
    known: Any = {"case": "tensors", **more, "contestant": contestant, "size": size}
    if isinstance(value, str):
        return Figure(**known, reason=value)
    return Figure(**known, median=value, low=value * 0.9, high=value * 1.1, turns=5)


def result(*figures: Figure, **more: Any) -> Result:
    known: Any = {"version": "1", "tree": "abc", "started": "2026-01-01T00:00:00+00:00", "seconds": 12.5}
    known |= {"command": "raytorchrpc bench --quick", "machine": ("2 cores, somewhere", "RDMA adapters: none")}
    return Result(**{**known, **more}, figures=figures)


def links(rays: float | str = 5.0, device: Device = "cpu") -> Result:
    """A run of sizes."""
    times: dict[str, Any] = {"raytorchrpc": 1.0, "shm": 0.8, "ray": rays, "nixl": "nixl is not installed"}
    figures = [figure(name, size, "it was slow" if (name, size) == ("ray", 40_000_000) else value, device=device,
                    via="shm" if name == "raytorchrpc" else None)
             for size in (1250, 40_000_000) for name, value in times.items()]  # fmt: skip
    return result(*figures, published={"shm": ("intranode", "shm")})


def paced() -> Result:
    """A run of a pattern."""
    figures = {("raytorchrpc", 0): 0.1, ("ray", 0): "it broke", ("raytorchrpc", 1250): 0.25, ("ray", 1250): 1.0}
    return result(*(figure(name, size, value, case="paced") for (name, size), value in figures.items()))


def shown(run: Result, tmp_path: Path, *options: str, code: int = 0) -> str:
    """What the command prints of it, or says of its failure."""
    (tmp_path / "run.json").write_text(run.to_json())
    ran = command_line.run("bench", "--from", str(tmp_path / "run.json"), *options)
    assert ran.exit_code == code, ran
    return ran.stderr if code else ran.stdout


def test_a_run_that_ctrl_c_ended_is_shown_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, file = links().model_copy(update={"interrupted": True}), tmp_path / "r.json"
    monkeypatch.setattr("raytorchrpc.cli.bench._measure", lambda *_, **asked: run)
    ran = command_line.run("bench", "--json", str(file))
    assert ran.exit_code not in (0, 2) and "raytorchrpc" in ran.stdout
    assert read_result(file) == run


def test_the_longer_of_contestants_and_sizes_goes_down() -> None:
    (down,) = tables.tables(links())
    assert down.heads == ["", "1.25 KB", "40 MB"]
    assert down.rows == [["raytorchrpc", "1", "1"], ["shm", "0.8 x0.8", "0.8 x0.8"], ["ray", "5 x5", "-"],
                         ["lane of raytorchrpc", "shm", "shm"]]  # fmt: skip
    (across,) = tables.tables(
        result(*(figure(name, size, 2.0) for name in ("raytorchrpc", "ray") for size in (1, 2, 3)))
    )
    assert across.heads == ["", "raytorchrpc", "ray"] and across.rows[0] == ["1 B", "2", "2 x1"]
    assert across.markdown().splitlines()[:3] == [
        "|  | raytorchrpc | ray |",
        "| --- | ---: | ---: |",
        "| 1 B | 2 | 2 x1 |",
    ]


def test_published_figures_stand_beside_those_of_the_run(tmp_path: Path) -> None:
    text = shown(links(), tmp_path, "--against", "published")
    shm = published()[1]["intranode", "shm"]
    assert re.search(rf"^shm, published +{shm[1250]:.3g} x0.36 +{shm[40_000_000]:.3g} x48$", text, re.MULTILINE)
    assert published()[0] in text


def test_tables_fit_a_terminal_and_lose_no_column() -> None:
    width = 80
    figures = (figure(f"a contestant {n}", 10**size, 1.25) for n in range(12) for size in range(3, 11))
    (table,) = tables.tables(result(*figures))
    lines = table.text(width).splitlines()
    assert max(map(len, lines)) <= width < max(map(len, table.text().splitlines()))
    assert all(text in "".join(lines) for text in ("a contestant 11", "1 KB", "10 GB"))


def test_every_hole_has_its_reason() -> None:
    assert tables.gaps(links()) == ["CPU: ray at 40 MB: it was slow", "CPU: nixl: nixl is not installed"]
    two = result(figure("ray", 0, "slow", case="one"), figure("ray", 0, 1.0, case="two"))
    assert tables.gaps(two) == ["CPU: ray (one): slow"]
    both = result(figure("ray", 0, "no GPU", case="one"), figure("nixl", 0, "no GPU", case="one"))
    assert tables.gaps(both) == ["CPU: ray, nixl: no GPU"]


def test_the_document_says_how_to_get_it_again_and_what_is_missing(tmp_path: Path) -> None:
    file, out = tmp_path / "run.json", tmp_path / "out.md"
    assert "1.25 KB" in shown(links(), tmp_path, "--from", str(file), "--markdown", str(out))
    text = out.read_text()
    for part in (
        "`raytorchrpc bench --quick`: 2 cores",
        "tree abc, 2026-01-01",
        "| raytorchrpc | 1 | 1 |",
        "nixl is not",
    ):
        assert text.count(part) == 2
    nothing = "raytorchrpc bench: no contestant produced a figure; the reasons are above\n"
    assert shown(result(), tmp_path, code=1) == nothing


def test_the_page_of_measurements_is_what_the_stored_results_say() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run `python -m benchmarks.page`"


@pytest.mark.parametrize("run", [links(), paced()])
def test_a_picture_names_the_library_the_machine_and_sizes(run: Result) -> None:
    pytest.importorskip("matplotlib")
    from raytorchrpc.bench.plots import draw, picture

    assert draw(run).startswith(b"\x89PNG")
    drawn = picture(run)
    drawn.canvas.draw()
    assert drawn.get_suptitle() == "raytorchrpc abc, 2026-01-01; 2 cores, somewhere; RDMA adapters: none"
    labels = [label.get_text() for label in drawn.axes[0].get_xticklabels()]
    assert labels == (["1.25 KB", "40 MB"] if run.figures[0].case == "tensors" else ["nothing", "1.25 KB"])
    ticks = [label.get_text() for label in drawn.axes[0].get_yticklabels()]
    assert "1" in ticks and not any("times" in tick for tick in ticks)
