"""What the benchmark of patterns decides without Ray: options, cases, turns, summaries, tables."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raytorchrpc.bench.pairs import Failed, Stuck
from raytorchrpc.bench.pattern_actors import Calls, Meter, Sample, Usage, Window, measure
from raytorchrpc.bench.pattern_results import PatternCell, PatternRun, Turn, read_pattern_run, summarize
from raytorchrpc.bench.pattern_run import PatternRunner
from raytorchrpc.bench.pattern_tables import costs, document, draw, figures, skipped, to_csv
from raytorchrpc.bench.pattern_teams import Place, summary
from raytorchrpc.bench.patterns import PATTERNS, ROWS, Case, PatternOptions, Shape, cases, make_options, obstacle, shape
from raytorchrpc.bench.tables import plain
from raytorchrpc.cli.app import app
from raytorchrpc.errors import ConfigurationError

MEMORY = 16 * 10**9


# --- options -----------------------------------------------------------------------------------------------------


def test_patterns_rows_and_payloads_are_chosen_by_name() -> None:
    some = make_options(["paced,all-*"], rows=["auto,ray*"], sizes=["10MB,nothing", "1.25KB"], device="cpu")
    assert some.patterns == ("paced", "all-to-all")
    assert some.rows == ("auto", "ray", "ray-graph")
    assert (some.sizes, some.devices) == ((0, 1250, 10_000_000), ("cpu",))
    everything = make_options(["all"])
    assert (everything.patterns, everything.rows) == (PATTERNS, tuple(ROWS))
    assert everything.sizes == (0, 1250, 10_000_000)
    quick = make_options(["all"], quick=True)
    assert quick.budget_s < 90 and len(quick.cases()) < len(everything.cases())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pattern", "waltz"], "no pattern 'waltz'; patterns: quiet, paced, "),
        (["--pattern", "quiet", "--rows", "memcpy"], "no row 'memcpy'; rows: auto, bare-torchrpc, "),
        (["--pattern", "quiet", "--sizes", "huge"], "size 'huge' is not a number of bytes"),
        (["--pattern", "quiet", "--device", "tpu"], "device 'tpu' is not one of cpu, cuda, all"),
        (["--pattern", "quiet", "--budget", "1"], "the budget must be 10 to 86400 seconds, not 1"),
        (["--pattern", "quiet", "--hosts", "a", "b"], "--pattern measures within one host"),
        (["--pattern", "quiet", "--against", "published"], "--against has figures of sizes, not of patterns"),
        (["--pattern", "quiet", "--from", "x.json"], "--from shows one existing result of --pattern"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], says: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, ["bench", *arguments])
    assert ran.exit_code == 2, ran.output
    assert ran.stderr.startswith("raytorchrpc bench: ")
    assert says in ran.stderr
    assert (ran.stderr.count("\n"), ran.stdout) == (1, "")


# --- cases -------------------------------------------------------------------------------------------------------


def test_every_case_has_its_own_line() -> None:
    for pattern in PATTERNS:
        labels = [(case.variant, case.size) for case in cases(pattern, (0, 1250), quick=False)]
        assert len(set(labels)) == len(labels) > 0


def test_a_row_that_cannot_run_a_case_says_why() -> None:
    quiet, fast = Case("quiet", size=1250), Case("in-flight", unit="calls/s", size=10**7)
    assert obstacle("auto", quiet, "cuda", 0, MEMORY) == "Ray has no GPU"
    assert obstacle("bare-nccl", quiet, "cuda", 1, MEMORY) == "needs two GPUs, and there is one"
    assert obstacle("bare-nccl", quiet, "cuda", 2, MEMORY) is None
    assert "only for CUDA" in (obstacle("bare-nccl", Case("quiet"), "cuda", 2, MEMORY) or "")
    assert "up to 1 MB" in (obstacle("auto", fast, "cpu", 0, MEMORY) or "")
    assert "driver alone" in (obstacle("ray-graph", Case("all-to-all", members=4), "cpu", 0, MEMORY) or "")
    assert "concurrency" in (obstacle("bare-torchrpc", Case("in-flight", concurrency=4), "cpu", 0, MEMORY) or "")
    large = Case("all-to-all", members=8, size=640_000_000)
    assert "of memory" in (obstacle("auto", large, "cpu", 0, MEMORY) or "")
    assert obstacle("auto", large, "cuda", 2, MEMORY) is None
    for row in ("auto", "bare-torchrpc", "ray", "ray-graph"):
        assert obstacle(row, quiet, "cpu", 0, MEMORY) is None


def test_ray_actors_can_be_called_while_they_call() -> None:
    assert shape("ray", Case("all-to-all", members=4)) == Shape(4, 16, 16)
    assert shape("ray", Case("busy-callee", busy="Python")) == Shape(2, 1, 16)
    assert shape("ray", Case("quiet")) == shape("auto", Case("quiet")) == Shape(2, 1, 1)
    assert shape("auto", Case("all-to-all", members=4)) == Shape(4, 1, 1)
    assert shape("auto", Case("in-flight", concurrency=0)) == Shape(2, 1, 0)


# --- measuring -----------------------------------------------------------------------------------------------------


class Peer:
    """Records the order of calls; a handle is the number of the call."""

    def __init__(self, log: list[str], name: str, took: float = 0.0) -> None:
        self.log, self.name, self.took, self.waiting, self.most = log, name, took, 0, 0

    def calls(self) -> Calls:
        return Calls(lambda: self.finish(self.send()), self.send, self.finish)

    def send(self) -> None:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        self.log.append(f"send {self.name}")

    def finish(self, _handle: Any) -> None:
        time.sleep(self.took)
        self.waiting -= 1
        self.log.append(f"finish {self.name}")


def taken(case: Case, peers: Sequence[Peer], seconds: float = 0.01) -> Sample:
    return measure(lambda *args: [peer.calls() for peer in peers], case, "cpu", Window(seconds), os.getpid())


def test_a_round_calls_all_peers_in_the_order_of_its_kind() -> None:
    log: list[str] = []
    peers = [Peer(log, "a"), Peer(log, "b")]
    sample = taken(Case("all-to-all"), peers)
    assert log[:4] == ["send a", "finish a", "send b", "finish b"]
    assert len(sample.seconds) >= 2 and all(each >= 0 for each in sample.seconds)
    log.clear()
    taken(Case("all-to-all", asynchronous=True), peers)
    assert log[:4] == ["send a", "send b", "finish a", "finish b"]


def test_so_many_calls_are_in_flight_and_none_is_left() -> None:
    peer = Peer([], "a")
    sample = taken(Case("in-flight", in_flight=8, unit="calls/s"), [peer])
    assert (peer.most, peer.waiting) == (8, 0)
    assert 0 < sum(sample.seconds) <= sample.elapsed_s


def test_pauses_and_slow_calls_are_not_in_the_time() -> None:
    sample = taken(Case("paced", interval_s=0.01), [Peer([], "a")], seconds=0.05)
    assert 2 <= len(sample.seconds) <= 6
    assert min(sample.seconds) < 0.01 < sample.elapsed_s
    log: list[str] = []
    sample = taken(Case("history", slow_calls=7), [Peer(log, "a")], seconds=0.0)
    assert log.count("send a") == 2 + 7 + 2 and len(sample.seconds) == 2  # the lead-in, the slow calls, the samples


def test_a_measurement_ends_with_its_window() -> None:
    peer = Peer([], "a", took=0.02)
    window = Window(60.0, end=time.monotonic() + 0.1, fewest=2)
    sample = measure(lambda *args: [peer.calls()], Case("quiet"), "cpu", window._replace(seconds=0.2), os.getpid())
    assert 2 <= len(sample.seconds) <= 5


def test_usage_grows_with_work_and_with_sleeps() -> None:
    meter = Meter(os.getpid())
    for _ in range(20):
        time.sleep(0.001)
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    spent = meter.used()
    assert spent.switches >= 20
    assert 0.05 <= spent.cpu_s < 5


# --- summaries -------------------------------------------------------------------------------------------------------


def test_costs_are_per_call_and_side() -> None:
    one = Sample([0.001, 0.003, 0.002], 0.5, Usage(30, 0.3), Usage(60, 0.15))
    turn = summary(Case("quiet"), [one])
    assert turn.value == pytest.approx(2.0)
    assert turn.switches == pytest.approx((10, 20)) and turn.cpu_ms == pytest.approx((100, 50))
    busy = summary(Case("busy-callee", busy="Python"), [one])
    assert (busy.switches[1], busy.cpu_ms[1]) == (None, None)  # its own work would count
    # Three calls per round, and every member is called as often as it calls.
    everyone = summary(Case("all-to-all", members=4), [one] * 4)
    assert everyone.value == pytest.approx(2.0)
    assert everyone.switches[0] == pytest.approx(30 / 3 / 3 / 2) and everyone.switches[1] is None


def test_rates_of_callers_add_up() -> None:
    one = Sample([0.1] * 10, 1.0, Usage(10, 0.1), Usage(60, 0.3))
    turn = summary(Case("fan-in", unit="calls/s", members=4), [one] * 3)
    assert turn.value == pytest.approx(30)
    assert turn.switches == pytest.approx((1, 2)) and turn.cpu_ms == pytest.approx((10, 10))
    assert turn.samples == []


def test_a_figure_is_the_median_of_the_repeats() -> None:
    turns = [Turn(value, [value] * 3, (1.0, None), (0.5, None)) for value in (3.0, 1.0, 2.0)]
    cell = summarize("auto", "cpu", Case("quiet", size=1250), turns)
    assert (cell.median, cell.low, cell.high, cell.repeats, cell.samples) == (2.0, 1.0, 3.0, 3, 9)
    assert cell.p95 is not None and 2.0 < cell.p95 <= 3.0
    assert (cell.caller_switches, cell.callee_switches, cell.caller_cpu_ms) == (1.0, None, 0.5)
    assert (cell.reason, cell.label) == (None, "1.25 KB")
    none = summarize("auto", "cpu", Case("quiet"), [], "it broke")
    assert (none.median, none.reason, none.label) == (None, "it broke", "nothing")


# --- turns -----------------------------------------------------------------------------------------------------------


class ScriptedTeam:
    """Stands for the actors of a row."""

    log: list[str]
    breaks: dict[str, Exception]

    def __init__(self, row: str, shape: Shape, place: Any) -> None:
        self.row, self.shape, self.failed, self.gpu_names = row, shape, None, {"GPU"}
        self.log.append(f"start {row}")

    def open(self, timeout_s: float) -> None:
        if isinstance(error := self.breaks.get(f"open {self.row}"), Failed):
            raise error

    def resume(self, timeout_s: float) -> None:
        self.log.append(f"resume {self.row}")

    def pause(self, timeout_s: float) -> None:
        self.log.append(f"pause {self.row}")

    def turn(self, case: Case, window_s: float, timeout_s: float) -> Turn:
        if error := self.breaks.get(f"{self.row} {case.size}"):
            raise error
        return Turn(1.0, [1.0, 1.0])

    def end(self, why: str) -> None:
        self.failed = self.failed or why
        self.log.append(f"end {self.row}")


def ran(monkeypatch: Any, breaks: dict[str, Exception] | None = None, *, budget_s: float = 60.0) -> Any:
    """A run of two rows over scripted actors: (cells by row, pattern and size; the log)."""
    team = type("Team", (ScriptedTeam,), {"log": [], "breaks": breaks or {}})
    monkeypatch.setattr("raytorchrpc.bench.pattern_run.Team", team)
    options = PatternOptions(("quiet", "history", "fan-in"), ("auto", "ray"), ("cpu",), (0, 1250), True, budget_s)
    runner = PatternRunner(options, Place("node", ()), MEMORY, lambda text, part: None, time.monotonic())
    runner.run()
    return {(cell.row, cell.pattern, cell.bytes): cell for cell in runner.cells}, team.log


def test_rows_take_turns_and_actors_end_when_no_case_needs_them(monkeypatch: Any) -> None:
    cells, log = ran(monkeypatch)
    assert all(cell.median == 1.0 and cell.repeats == 3 for cell in cells.values())
    assert log[:6] == ["start auto", "start ray", "resume auto", "pause auto", "resume ray", "pause ray"]
    assert [line for line in log if "start" in line] == ["start auto", "start ray"] * 2  # quiet and history share
    assert log.count("end auto") == log.count("end ray") == 2
    assert log.index("end auto") > log.index("resume auto")


def test_a_case_that_fails_leaves_the_others_alone(monkeypatch: Any) -> None:
    cells, log = ran(monkeypatch, {"ray 1250": Failed("it broke")})
    assert cells["ray", "quiet", 1250].reason == "it broke"
    assert cells["ray", "quiet", 0].repeats == cells["auto", "quiet", 1250].repeats == 3
    assert log.count("start ray") == 2


def test_a_row_that_is_stuck_ends_and_starts_anew_with_the_next_pattern(monkeypatch: Any) -> None:
    cells, log = ran(monkeypatch, {"ray 0": Stuck("no answer within 60 s")})
    assert cells["ray", "quiet", 0].reason == cells["ray", "quiet", 1250].reason == "no answer within 60 s"
    assert cells["auto", "quiet", 0].repeats == 3
    assert log.count("start ray") == 3 and log.count("resume ray") == 3  # quiet, history, fan-in


def test_actors_that_do_not_connect_are_a_reason(monkeypatch: Any) -> None:
    cells, _ = ran(monkeypatch, {"open auto": Failed("no route")})
    assert {cell.reason for (row, *_), cell in cells.items() if row == "auto"} == {"no route"}
    assert cells["ray", "fan-in", 0].repeats == 3


def test_without_time_every_case_says_so_and_nothing_starts(monkeypatch: Any) -> None:
    cells, log = ran(monkeypatch, budget_s=0.0)
    assert {cell.reason for cell in cells.values()} == {"the time budget is used up"}
    assert log == []


# --- tables ----------------------------------------------------------------------------------------------------------


def a_cell(row: str, value: float | None, size: int = 1250, **more: Any) -> PatternCell:
    spread = {} if value is None else {"low": value * 0.9, "high": value * 1.1, "repeats": 5, "samples": 50}
    return PatternCell(
        row=row, device="cpu", pattern="quiet", variant="", bytes=size, unit="ms", median=value, **spread, **more
    )


def a_run() -> PatternRun:
    cost = {"caller_switches": 1.25, "caller_cpu_ms": 0.08, "callee_switches": 2.0, "callee_cpu_ms": 0.07}
    found = (
        a_cell("auto", 0.25, **cost),
        a_cell("bare-torchrpc", 0.5),
        a_cell("ray", 1.0),
        a_cell("ray-graph", None, reason="it broke"),
        a_cell("auto", 0.1, 0),
        a_cell("bare-torchrpc", 0.2, 0),
        a_cell("ray", None, 0, reason="it took too long"),
        a_cell("ray-graph", None, 0, reason="it broke"),
    )
    return PatternRun(
        version="1", started="now", command="raytorchrpc bench --pattern quiet", machine=("2 cores",), seconds=9.0,
        window_s=0.3, cells=found,
    )  # fmt: skip


def test_the_table_shows_medians_spread_and_ratios() -> None:
    table = figures(a_run(), "cpu", "quiet")
    assert table.heads == ("case", "auto", "bare-torchrpc", "ray", "auto / bare-torchrpc", "auto / ray")
    assert table.rows[0] == ("1.25 KB", "0.25 (0.225-0.275)", "0.5 (0.45-0.55)", "1 (0.9-1.1)", "0.50", "0.25")
    assert table.rows[1] == ("nothing", "0.1 (0.09-0.11)", "0.2 (0.18-0.22)", "-", "0.50", "-")
    cost = costs(a_run(), "cpu", "quiet")
    assert cost is not None and cost.rows[0][:3] == ("1.25 KB", "1.2 + 2.0", "80 + 70")
    assert "context switches" in plain(cost)


def test_what_has_no_figure_is_listed_once_per_reason() -> None:
    assert skipped(a_run()) == [
        "CPU tensors: ray-graph: quiet: it broke",
        "CPU tensors: ray: quiet (nothing): it took too long",
    ]


def test_every_output_has_every_cell(tmp_path: Path) -> None:
    run = a_run()
    lines = list(csv.DictReader(io.StringIO(to_csv(run))))
    assert len(lines) == len(run.cells) == 8
    assert (lines[0]["median"], lines[3]["reason"]) == ("0.25", "it broke")
    text = document(run, "p.png")
    assert "| 1.25 KB | 0.25 (0.225-0.275) |" in text and "![" in text and "it took too long" in text
    path = tmp_path / "r.json"
    path.write_text(run.model_dump_json())
    assert read_pattern_run(path) == run
    shown = CliRunner().invoke(app, ["bench", "--from", str(path)])
    assert shown.exit_code == 0 and "0.25 (0.225-0.275)" in shown.stdout
    path.write_text('{"pattern": 1}')
    with pytest.raises(ConfigurationError, match="is not a result of `raytorchrpc bench --pattern`"):
        read_pattern_run(path)


def test_the_plot_is_a_picture() -> None:
    pytest.importorskip("matplotlib")
    assert draw(a_run()).startswith(b"\x89PNG")
