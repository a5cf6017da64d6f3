"""Random faults over a group under load. ``python -m tests.faults --faults 500`` is the long form.

``--patterns`` and ``--shards`` are those of queues, topics and weights; ``judging`` says what must hold.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import on_hosts
from tests.faults.faults import MB, Kill, Shortage, Stop
from tests.faults.records import read
from tests.faults.running import run_faults, running
from tests.faults.scenarios import PATTERNS
from tests.multihost.rig import Unavailable


def test_homes_that_die_and_members_short_of_memory(cluster: None, tmp_path: Path) -> None:
    with running(PATTERNS, tmp_path, 7) as run:
        run.round([Kill("c1"), Kill("c2"), Shortage("c3", 0.5, 24 * MB), Shortage("c0", 0.5)])
    assert run.report.violations == [], run.report
    assert all(one.landed for one in run.report.struck)
    notes, _ = read(tmp_path / "records", 0)
    assert {"put", "get", "next", "pull", "publish", "call"} <= {note.op for note in notes if note.verdict == "ok"}
    assert {note.life for note in notes if note.member in ("c1", "c2")} == {1, 2}
    assert any(note.verdict == "NotFound" for note in notes), "no handle outlived its object"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "count", "lanes"),
    [
        *(("calls", 60, lanes) for lanes in ("default", "torchrpc", "nng")),
        *(("patterns", 30, lanes) for lanes in ("default", "tcp", "torchrpc")),
    ],
)
def test_many_random_faults(cluster: None, name: str, count: int, lanes: str) -> None:
    report = run_faults(name, count, 6, lanes)
    assert report.violations == [], report


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_members_that_stand_still_for_longer_than_a_lease(cluster: None) -> None:
    report = run_faults("long patterns", 12, 9)
    assert report.violations == [], report
    assert any(isinstance(one.fault, Stop) and one.fault.seconds > 60 for one in report.struck)


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("arguments", "failures", "struck"),
    [
        (["--faults=20", "--seed=22"], on_hosts.FAILURES, ("PowerOff", "Cable", "Partition")),
        (["--patterns", "--faults=12", "--seed=26"], on_hosts.PATIENT, ("Partition",)),
    ],
    ids=["calls", "patterns"],
)
def test_random_faults_on_several_hosts(
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    failures: int,
    struck: tuple[str, ...],
) -> None:
    directory = tmp_path_factory.mktemp("hosts")
    try:
        status = on_hosts.run(directory, 3, arguments, failures)
    except Unavailable as unavailable:
        pytest.skip(str(unavailable))
    out = capfd.readouterr().out
    assert status == 0, out
    assert "violations 0" in out and all(kind in out for kind in struck)
