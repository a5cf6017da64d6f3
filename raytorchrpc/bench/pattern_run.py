"""A run of ``--pattern`` on an initialised Ray: blocks of cases, in which all rows take turns, several times over."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import groupby

import ray

from raytorchrpc import __version__
from raytorchrpc.bench.options import show_size
from raytorchrpc.bench.pairs import Failed, Stuck
from raytorchrpc.bench.pattern_results import PatternCell, PatternRun, Turn, summarize
from raytorchrpc.bench.pattern_teams import Place, Team
from raytorchrpc.bench.patterns import Case, PatternOptions, Shape, obstacle, shape
from raytorchrpc.bench.rows import Device
from raytorchrpc.bench.schedule import OUT_OF_TIME, Report
from raytorchrpc.bench.site import USABLE, Host, describe_host

#: Reserved for ending the actors and Ray (seconds).
_SHUTDOWN_S = 6.0
#: Longest time of one measurement, and of connecting the actors of one row (seconds).
_TURN_S = 60.0


def measure_patterns(options: PatternOptions, command: str, report: Report, *, began: float) -> PatternRun:
    """Measure all cases of all rows. Always ends the actors it started.

    ``began``: the start of the budget by time.monotonic(), before Ray was started. Blocks until about
    ``options.budget_s`` after it at most.
    """
    started = datetime.now(timezone.utc)
    here = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == here)  # type: ignore[no-untyped-call]
    gpus = int(node["Resources"].get("GPU", 0))
    host = describe_host(node["NodeManagerAddress"])
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    place = Place(here, (visible or list(map(str, range(gpus))))[:gpus])
    runner = PatternRunner(options, place, host.free_bytes, report, began)
    try:
        runner.run()
    finally:
        runner.end()
    return PatternRun(
        version=__version__,
        started=started.isoformat(timespec="seconds"),
        command=command,
        machine=_machine(host, gpus, sorted(runner.gpu_names)),
        seconds=round(time.monotonic() - began, 1),
        window_s=options.window_s,
        cells=tuple(runner.cells),
    )


def _machine(host: Host, gpus: int, gpu_names: Sequence[str]) -> tuple[str, ...]:
    end = host.endpoint
    facts = [f"{host.cores} cores, {show_size(host.free_bytes)} of memory free, {host.processor}"]
    if gpu_names:
        facts.append(f"{gpus} x {', '.join(gpu_names)}, CUDA {end.cuda_version}")
    return (*facts, f"Python {end.python_version}, torch {end.torch_version}, Ray {ray.__version__}")


class PatternRunner:
    """Takes the measurements of one run. ``cells`` is complete after ``run``."""

    def __init__(self, options: PatternOptions, place: Place, free: int, report: Report, began: float) -> None:
        """``free``: bytes of host memory."""
        self._options, self._place, self._report = options, place, report
        self._memory = int(free * USABLE)
        self._deadline = began + options.budget_s - _SHUTDOWN_S
        self._teams: dict[tuple[str, Shape], Team] = {}
        self._left_to_do = len(options.cases()) * len(options.devices)
        self._to_do = max(1, self._left_to_do)
        self._actor_s = 0.0
        """How long an actor took to start."""
        self.cells: list[PatternCell] = []
        self.gpu_names: set[str] = set()

    def run(self) -> None:
        """Measure block by block. A block is a pattern's cases for which the rows need the same actors."""
        for device in self._options.devices:
            groups = groupby(self._options.cases(), lambda case: (case.pattern, case.members, case.concurrency))
            blocks = [list(block) for _, block in groups]
            for number, block in enumerate(blocks):
                later = self._needed([case for following in blocks[number + 1 :] for case in following], device)
                self._block(block, device, later)
                self._left_to_do -= len(block)
                self._end_unless(later)

    def end(self) -> None:
        """End all actors."""
        self._end_unless(set())

    def _needed(self, cases: Sequence[Case], device: Device) -> set[tuple[str, Shape]]:
        """The actors that measure these cases."""
        able = ((row, case) for row in self._options.rows for case in cases)
        return {(row, shape(row, case)) for row, case in able if not self._obstacle(row, case, device)}

    def _obstacle(self, row: str, case: Case, device: Device) -> str | None:
        return obstacle(row, case, device, len(self._place.gpus), self._memory)

    def _end_unless(self, needed: set[tuple[str, Shape]]) -> None:
        for key in [key for key in self._teams if key not in needed]:
            self._teams.pop(key).end("the run has ended")

    # --- one block -----------------------------------------------------------------------------------------------

    def _block(self, block: Sequence[Case], device: Device, later: set[tuple[str, Shape]]) -> None:
        reasons: dict[tuple[str, Case], str] = {}
        for row in self._options.rows:
            for case in block:
                if (reason := self._obstacle(row, case, device)) is not None:
                    reasons[row, case] = reason
        able = {row: [case for case in block if (row, case) not in reasons] for row in self._options.rows}
        turns: dict[tuple[str, Case], list[Turn]] = {(row, case): [] for row in self._options.rows for case in block}
        teams = self._open({row: cases for row, cases in able.items() if cases}, device)
        starting_s = self._actor_s * sum(actors.members for _, actors in later - self._teams.keys())
        stop_at = time.monotonic() + max(0.0, self._left() - starting_s) * len(block) / self._left_to_do
        took = 0.0
        for repeat in range(self._options.repeats):
            began = time.monotonic()
            if repeat and began + took > stop_at:
                break
            for row, team in teams.items():
                self._report(f"{device}, {block[0].pattern}: {row}", 1 - self._left_to_do / self._to_do)
                self._turns(team, able[row], turns, reasons)
            took = time.monotonic() - began
        for case in block:
            for row in self._options.rows:
                found, reason = turns[row, case], reasons.get((row, case))
                if not found and reason is None:
                    reason = (teams[row].failed if row in teams else None) or OUT_OF_TIME
                self.cells.append(summarize(row, device, case, () if reason else found, reason))

    def _open(self, wanted: dict[str, list[Case]], device: Device) -> dict[str, Team]:
        """The connected actors of each row; all start at once."""
        teams: dict[str, Team] = {}
        if self._left() <= 0:
            return teams
        fresh = []
        for row, cases in wanted.items():
            key = row, shape(row, cases[0])
            if key not in self._teams or self._teams[key].failed:
                self._teams[key] = Team(*key, self._place if device == "cuda" else self._place._replace(gpus=()))
                fresh.append(self._teams[key])
            teams[row] = self._teams[key]
        began, actors = time.monotonic(), sum(team.shape.members for team in fresh)
        for team in fresh:
            self._report(f"{device}: starting the actors of {team.row}", 1 - self._left_to_do / self._to_do)
            try:
                team.open(min(_TURN_S, self._left()))
                self.gpu_names |= team.gpu_names
            except Failed as failure:
                team.end(str(failure))
        if actors:
            self._actor_s = (time.monotonic() - began) / actors
        return teams

    def _turns(
        self,
        team: Team,
        cases: Sequence[Case],
        turns: dict[tuple[str, Case], list[Turn]],
        reasons: dict[tuple[str, Case], str],
    ) -> None:
        """Measure each case of one row once. A case that fails is not tried again."""
        due = [case for case in cases if (team.row, case) not in reasons]
        if team.failed or self._left() <= 0 or not due:
            return
        try:
            team.resume(self._timeout())
            for case in due:
                if self._left() <= 0:
                    break
                try:
                    turns[team.row, case].append(team.turn(case, self._options.window_s, self._timeout()))
                except Failed as failure:
                    reasons[team.row, case] = str(failure) if self._left() > 0 else OUT_OF_TIME
                    if isinstance(failure, Stuck):
                        raise
            team.pause(self._timeout())
        except Failed as failure:
            team.end(str(failure))

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _timeout(self) -> float:
        return min(_TURN_S, self._left() + 2.0)
