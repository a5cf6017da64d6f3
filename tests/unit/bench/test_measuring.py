"""How the bench measures, without Ray: the loops in an actor, the order of samples, limits, failures."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from raytorchrpc.bench.actors import Calls, Meter, Sample, Usage, Window, measure
from raytorchrpc.bench.cases import PATTERN_ROWS, ROWS, Case, Options, Row, Shape, choose
from raytorchrpc.bench.links import Failed, Stuck
from raytorchrpc.bench.results import INTERRUPTED
from raytorchrpc.bench.schedule import FEWEST, PatternsRunner, SizesRunner, lead_in, rounds, summarize
from raytorchrpc.bench.teams import Place, Turn, summary
from tests.unit.bench.test_bench import place, site

MEMCPY = next(row for row in ROWS if row.name == "memcpy")


# --- in an actor ---------------------------------------------------------------------------------------------------


class Peer:
    """Records the order of calls."""

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


def taken(case: Case, peers: Sequence[Peer], window: Window | None = None) -> Sample:
    return measure(lambda *args: [peer.calls() for peer in peers], case, [], window or Window(0.01), os.getpid())


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


def test_pauses_slow_calls_and_the_lead_in_are_not_in_the_time() -> None:
    sample = taken(Case("paced", interval_s=0.01), [Peer([], "a")], Window(0.05))
    assert 2 <= len(sample.seconds) <= 6
    assert min(sample.seconds) < 0.01 < sample.elapsed_s
    log: list[str] = []
    sample = taken(Case("history", slow_calls=7), [Peer(log, "a")], Window(0.0))
    assert log.count("send a") == 2 + 7 + 2 and len(sample.seconds) == 2  # the lead-in, the slow calls, the samples
    log.clear()
    assert len(taken(Case(), [Peer(log, "a")], Window(0.0, fewest=10, lead=4)).seconds) == 10
    assert log.count("send a") == 14


def test_a_measurement_ends_with_its_window() -> None:
    window = Window(0.8, end=time.monotonic() + 0.6)
    assert 1 <= len(taken(Case("quiet"), [Peer([], "a", took=0.02)], window).seconds) <= 25


def test_a_call_that_ends_when_its_callee_is_busy_no_longer_gives_no_figure() -> None:
    window = Window(0.1, end=time.monotonic() + 0.01, lead=0)
    with pytest.raises(Failed, match="no call ended while the callee was busy"):
        taken(Case("busy-callee", busy="Python"), [Peer([], "a", took=0.02)], window)


def test_usage_grows_with_work_and_with_sleeps() -> None:
    meter = Meter(os.getpid())
    sleeper = threading.Thread(target=lambda: [time.sleep(0.001) for _ in range(20)])
    sleeper.start()
    sleeper.join()
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    spent = meter.used()
    assert spent.switches >= 20
    assert 0.05 <= spent.cpu_s < 5


# --- figures ---------------------------------------------------------------------------------------------------------


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
    found = summarize([Turn(value, [value] * 3, (1.0, None), (0.5, None)) for value in (3.0, 1.0, 2.0)])
    assert [found[name] for name in ("median", "low", "high", "repeats", "samples")] == [2.0, 1.0, 3.0, 3, 9]
    assert 2.0 < found["p95"] <= 3.0
    assert (found["caller_switches"], found["callee_switches"], found["caller_cpu_ms"]) == (1.0, None, 0.5)


def test_quick_samples_start_warm_and_slow_ones_are_not_wasted() -> None:
    assert [lead_in(takes_s) for takes_s in (1e-5, 5e-4, 2e-3, 1e-2, 0.02, 3.0)] == [10, 10, 2, 1, 0, 0]


def test_all_alternate_until_each_has_its_count() -> None:
    assert list(rounds({"a": 5, "b": 2}, 2)) == [[("a", 2), ("b", 2)], [("a", 2)], [("a", 1)]]
    assert list(rounds({"a": 5, "b": 2}, {"a": 5, "b": 1})) == [[("a", 5), ("b", 1)], [("b", 1)]]
    assert list(rounds({"a": 0}, 2)) == []


# --- the order of measurements ---------------------------------------------------------------------------------------


class ScriptedTeam:
    """Stands for the actors of rows; each takes as long as the script says, by a clock that waits for nobody."""

    def __init__(self, world: World, row: Row, shape: Shape) -> None:
        self.world, self.name, self.shape = world, row.name, shape
        self.failed: str | None = None
        self.ready: tuple[Any, ...] = ()
        world.log.append(f"start {row.name}")

    def starts(self, timeout_s: float) -> bool:
        self.world.now += timeout_s
        return self.world.now - 1000.0 < self.world.up_after

    def _do(self, what: str, row: Row, case: Case | None = None) -> None:
        self.world.log.append(f"{what} {row.name}" + (f" {case.size}" if case else ""))
        for script in (f"{what} {row.name}", f"{row.name} {case.size}" if case else ""):
            if (error := self.world.breaks.get(script)) is not None:
                raise error

    def open(self, row: Row, timeout_s: float) -> None:
        self._do("open", row)

    def resume(self, row: Row, timeout_s: float) -> None:
        self._do("resume", row)

    def pause(self, row: Row, timeout_s: float) -> None:
        self._do("pause", row)

    def measure(self, row: Row, device: str, case: Case, window: Window, timeout_s: float) -> list[Sample]:
        per_op, per_byte = self.world.costs.get(row.name, (1e-3, 0.0))
        for _ in range(window.lead + window.fewest):
            self._do("send", row, case)
            self.world.now += per_op + case.size * per_byte
        return [Sample([per_op + case.size * per_byte] * window.fewest, 1.0, Usage(0, 0.0), Usage(0, 0.0))]

    def check(self, row: Row, device: str, case: Case, timeout_s: float) -> tuple[str | None, float]:
        (sample,) = self.measure(row, device, case, Window(0.0, fewest=1, lead=0), timeout_s)
        return self.world.carrier, sample.seconds[0]

    def turn(self, row: Row, device: str, case: Case, window_s: float, timeout_s: float) -> Turn:
        self._do("turn", row, case)
        self.world.now += window_s
        return Turn(1.0, [1.0, 1.0])

    def drop(self, timeout_s: float) -> None:
        self.world.log.append(f"drop {self.name}")

    def end(self, why: str, *, wait: bool = False) -> None:
        if self.failed is None or why == self.failed:
            self.world.log.append(f"end {self.name}")
        self.failed = self.failed or why


class World:
    """A run over scripted actors."""

    def __init__(self, **script: Any) -> None:
        self.costs: dict[str, tuple[float, float]] = script.pop("costs", {})
        self.breaks: dict[str, BaseException] = script.pop("breaks", {})
        self.carrier: str | None = script.pop("carrier", None)
        self.up_after: float = script.pop("up_after", 0.0)
        assert not script
        self.now, self.log, self.said = 1000.0, list[str](), list[str]()

    def run(self, kind: Any, options: Options, memory: int) -> dict[Any, Any]:
        """The cells by row, pattern and size."""
        here = site(place(free_bytes=int(memory / 0.8) + 1, store_bytes=memory))
        made: Any = lambda row, where, shape: ScriptedTeam(self, row, shape)  # noqa: E731
        said: Any = lambda text, part: self.said.append(text)  # noqa: E731
        runner = kind(options, here, Place(["node"]), said, made, lambda: self.now)
        runner.run()
        self.teams = {team.name: team for team in runner.teams}
        keys = [(cell.row, cell.pattern, cell.bytes) for cell in runner.cells]
        assert len(set(keys)) == len(keys)  # one figure or reason for each
        assert all((cell.median is None) != (cell.reason is None) for cell in runner.cells)
        return dict(zip(keys, runner.cells, strict=True))

    def sizes(self, *sizes: int, budget_s: float = 60.0, memory: int = 10**12, **rows: Any) -> dict[Any, Any]:
        """A run of sizes; the rows are those with costs."""
        chosen = tuple(replace(MEMCPY, **{"name": name, "pair": "", **rows}) for name in self.costs)
        options = Options(chosen, ("cpu",), tuple(Case(size=size) for size in sizes), budget_s)
        found = self.run(SizesRunner, options, memory)
        return {(row, size): cell for (row, _, size), cell in found.items()}

    def patterns(self, budget_s: float = 60.0) -> dict[Any, Any]:
        """A run of three patterns in two rows."""
        rows = choose(["auto", "ray"], PATTERN_ROWS)
        cases = tuple(Case(name, size=size, members=4 if name == "fan-in" else 2)
                      for name in ("quiet", "history", "fan-in") for size in (0, 1250))  # fmt: skip
        return self.run(PatternsRunner, Options(rows, ("cpu",), cases, budget_s, None, 3, 0.1), 16 * 10**9)


def test_starting_actors_is_not_in_the_budget_and_says_whom_it_waits_for() -> None:
    slow = World(costs={"x": (1e-3, 0.0), "y": (1e-3, 0.0)}, up_after=50.0)
    cells = slow.sizes(1000, budget_s=20)
    assert all(cell.samples == 30 for cell in cells.values())
    assert slow.said[0] == "starting actors: those of 0 of 2 rows are up; waiting for x, y"
    assert World(up_after=50.0).patterns(budget_s=20)["ray", "fan-in", 0].repeats == 3
    never = World(costs={"x": (1e-3, 0.0)}, up_after=1e9)
    assert never.sizes(1000)["x", 1000].reason == "Ray did not start its actors within 90 s"


def test_rows_take_turns_in_blocks() -> None:
    world = World(costs={"x": (1e-3, 0.0), "y": (2e-3, 0.0)})
    cells = world.sizes(1000, 10**6, budget_s=100)
    assert (cells["x", 1000].median, cells["y", 10**6].median) == pytest.approx((1.0, 2.0))
    assert cells["x", 1000].samples == 100
    log = [entry for entry in world.log if entry.startswith("send")]
    turns = [entry for i, entry in enumerate(log) if i == 0 or entry != log[i - 1]]
    # Warming up, then ten turns each: nobody is measured in one go.
    assert turns.count("send x 1000") == turns.count("send y 1000") == 11


def test_a_slow_row_is_left_out_with_its_reason_and_the_others_are_not() -> None:
    world = World(costs={"slow": (0.0, 1e-7), "fast": (1e-3, 1e-10), "constant": (0.02, 0.0)})  # slow: 1 ms, 10 s
    cells = world.sizes(10_000, 10**6, 10**8, 10**9)
    assert cells["slow", 10_000].median == pytest.approx(1.0)
    for size in (10**8, 10**9):
        assert "time budget" in (cells["slow", size].reason or "")
        assert cells["fast", size].samples >= FEWEST and cells["constant", size].samples >= FEWEST
    assert "send slow 100000000" not in world.log  # foreseen, not found out


def test_the_time_that_is_left_is_used() -> None:
    cells = World(costs={"steady": (0.0, 1e-9)}).sizes(40_000_000, 640_000_000)
    assert cells["steady", 640_000_000].samples >= FEWEST  # a large first size tells how long a larger one takes
    cells = World(costs={"fast": (0.1, 0.0), "slow": (3.0, 0.0)}).sizes(10**9, budget_s=30, memory=6 * 10**9)
    assert cells["fast", 10**9].samples >= FEWEST and cells["slow", 10**9].samples >= FEWEST


def test_a_size_that_turns_out_slow_ends_with_one_sample() -> None:
    world = World(costs={"cliff": (0.0, 1e-7)})
    assert world.sizes(1000, 10**8)["cliff", 10**8].median is None
    assert world.log.count("send cliff 100000000") == 1


def test_the_budget_is_kept() -> None:
    world = World(costs={f"r{n}": (0.05 * (n + 1), 1e-9) for n in range(8)})
    cells = world.sizes(1000, 10**6, 10**7, 10**8, 10**9, budget_s=30)
    assert world.now - 1000 < 31.5  # at most one sample longer
    assert len(cells) == 40 and sum(cell.median is not None for cell in cells.values()) > 8


def test_what_went_by_another_lane_is_no_figure() -> None:
    cell = World(costs={"nccl": (1e-3, 0.0)}, carrier="torchrpc").sizes(1000, carries=("nccl",))["nccl", 1000]
    assert (cell.median, cell.via, cell.reason) == (None, "torchrpc", "uses torchrpc at this size")


@pytest.mark.parametrize("failure", [Failed("ValueError: no"), Stuck("no answer within 15 s")])
def test_a_row_that_fails_keeps_its_figures_and_says_why_from_there(failure: Failed) -> None:
    world = World(costs={"bad": (1e-3, 0.0), "good": (1e-3, 0.0)}, breaks={"bad 1000000": failure})
    cells = world.sizes(1000, 10**6, 10**7)
    assert cells["bad", 1000].median is not None
    assert cells["bad", 10**6].reason == cells["bad", 10**7].reason == str(failure)
    assert all(cells["good", size].median is not None for size in (1000, 10**6, 10**7))
    assert world.teams["bad"].failed is not None


def test_sizes_that_do_not_fit_together_are_measured_row_by_row() -> None:
    world = World(costs={"x": (1e-3, 1e-9), "y": (1e-3, 1e-9)})
    cells = world.sizes(1000, 10**6, 10**9, budget_s=200, memory=9 * 10**9)  # 5 for one row, at most half for all
    large = [entry for entry in world.log if entry.endswith("000000000")]
    assert large == sorted(large)  # all of x, then all of y
    assert cells["x", 10**9].median == cells["y", 10**9].median == pytest.approx(1001)
    assert world.log.index("end x") < world.log.index("send y 1000000000")  # its memory is free before y begins


def test_patterns_take_turns_and_actors_end_when_no_case_needs_them() -> None:
    world = World()
    cells = world.patterns()
    assert all(cell.median == 1.0 and cell.repeats == 3 for cell in cells.values())
    turns = [entry.removeprefix("turn ") for entry in world.log if entry.startswith("turn")]
    assert turns[:6] == ["auto 0", "auto 1250", "ray 0", "ray 1250", "auto 0", "auto 1250"]
    assert [line for line in world.log if "start" in line] == ["start auto", "start ray"] * 2  # quiet, history share
    assert world.log.count("end auto") == world.log.count("end ray") == 2


def test_a_case_that_fails_leaves_the_others_alone() -> None:
    world = World(breaks={"ray 1250": Failed("it broke")})
    cells = world.patterns()
    assert cells["ray", "quiet", 1250].reason == "it broke"
    assert cells["ray", "quiet", 0].repeats == cells["auto", "quiet", 1250].repeats == 3
    assert world.log.count("start ray") == 2


def test_a_row_that_is_stuck_ends_and_starts_anew_with_the_next_pattern() -> None:
    world = World(breaks={"ray 0": Stuck("no answer within 60 s")})
    cells = world.patterns()
    assert cells["ray", "quiet", 0].reason == cells["ray", "quiet", 1250].reason == "no answer within 60 s"
    assert cells["auto", "quiet", 0].repeats == 3
    assert world.log.count("start ray") == world.log.count("turn ray 0") == 3  # quiet, history, fan-in


def test_actors_that_do_not_connect_are_a_reason() -> None:
    cells = World(breaks={"open auto": Failed("no route")}).patterns()
    assert {cell.reason for (row, *_), cell in cells.items() if row == "auto"} == {"no route"}
    assert cells["ray", "fan-in", 0].repeats == 3


def test_ctrl_c_leaves_the_figures_so_far() -> None:
    world = World(breaks={"ray 0": KeyboardInterrupt()})
    cells = world.patterns()
    assert cells["auto", "quiet", 0].repeats == cells["auto", "quiet", 1250].repeats == 1
    assert {cell.reason for cell in cells.values()} == {None, INTERRUPTED}
    assert {cell.reason for (row, *_), cell in cells.items() if row == "ray"} == {INTERRUPTED}
    with pytest.raises(KeyboardInterrupt):
        World(breaks={"auto 0": KeyboardInterrupt()}).patterns()


def test_without_time_every_case_says_so_and_nothing_starts() -> None:
    world = World()
    assert {cell.reason for cell in world.patterns(budget_s=0.0).values()} == {"the time budget is used up"}
    assert world.log == []


def test_a_row_whose_actors_were_killed_by_another_gets_new_ones() -> None:
    world = World(costs={"bad": (1e-3, 0.0), "good": (1e-3, 0.0)}, breaks={"bad 1000000": Stuck("no answer")})
    cells = world.sizes(1000, 10**6, 10**7, pair="both")
    assert "its actors were killed because bad with cpu tensors failed" in (cells["good", 10**6].reason or "")
    assert cells["good", 10**7].median is not None and cells["bad", 10**7].reason == "no answer"
