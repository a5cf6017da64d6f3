"""Queues, topics and weights while faults strike their homes and users; ``pattern_judging`` says what must hold.

``python -m tests.faults --patterns --faults 100`` is the long form.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import on_hosts
from tests.faults.__main__ import table
from tests.faults.faults import MB, Kill, ShortOfMemory, ShortOfThreads, Stop
from tests.faults.pattern_plan import Plan, random_plan
from tests.faults.pattern_records import read
from tests.faults.pattern_running import PatternRunning, run_patterns
from tests.faults.running import running
from tests.multihost.rig import Unavailable


def test_a_seed_gives_the_same_plan() -> None:
    names = PatternRunning.names
    plan = random_plan(3, 1, names, names)
    assert plan == random_plan(3, 1, names, names) == Plan.of([*plan])
    assert plan != random_plan(4, 1, names, names)
    later = random_plan(3, 2, names, names)
    assert later != plan and later.objects[:2] == plan.objects[:2], "the stores stay"


def test_homes_that_die_and_members_short_of_memory(cluster: None, tmp_path: Path) -> None:
    with running(tmp_path, 7, kind=PatternRunning) as run:
        run.round([Kill("c1"), Kill("c2"), ShortOfMemory("c3", 0.5, 24 * MB), ShortOfThreads("c0", 0.5)])
    assert run.report.violations == [], table(run.report)
    assert all(one.landed for one in run.report.struck)
    notes = read(tmp_path / "log-7.records")
    assert {"put", "get", "next", "pull", "publish", "call"} <= {note.op for note in notes if note.verdict == "ok"}
    assert {note.life for note in notes if note.member in ("c1", "c2")} == {1, 2}
    assert any(note.verdict == "NotFound" for note in notes), "no handle outlived its object"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lanes", ["default", "tcp", "torchrpc"])
def test_thirty_random_faults(cluster: None, tmp_path: Path, lanes: str) -> None:
    report = run_patterns(tmp_path, 8, 30, lanes)
    assert report.violations == [], table(report)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_members_that_stand_still_for_longer_than_a_lease(cluster: None, tmp_path: Path) -> None:
    report = run_patterns(tmp_path, 9, 12, long=True)
    assert report.violations == [], table(report)
    assert any(isinstance(one.fault, Stop) and one.fault.seconds > 60 for one in report.struck)


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.timeout(1200)
def test_hosts_that_are_parted(tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path_factory.mktemp("hosts")
    try:
        status = on_hosts.run(directory, 3, ["--patterns", "--faults=12", "--seed=23"], on_hosts.PATIENT)
    except Unavailable as unavailable:
        pytest.skip(str(unavailable))
    out = capfd.readouterr().out
    assert status == 0, out
    assert "violations 0" in out and "Partition" in out
