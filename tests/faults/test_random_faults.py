"""Random faults over a group of six under load. ``python -m tests.faults --faults 500`` is the long form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import on_hosts
from tests.faults.__main__ import run_random, table
from tests.faults.faults import HOSTS_TABLE, OF_A_HOST, Kill, PowerOff, random_faults
from tests.faults.running import NAMES, NEAR
from tests.multihost.rig import Unavailable


def test_a_seed_gives_the_same_faults() -> None:
    drawn = random_faults(3, 200, NAMES, never_killed="c0")
    assert drawn == random_faults(3, 200, NAMES, never_killed="c0") != random_faults(4, 200, NAMES, never_killed="c0")
    faults = [fault for together in drawn for fault in together]
    assert len(faults) == 200
    assert not any(isinstance(fault, Kill) and fault.member == "c0" for fault in faults)
    assert len({type(fault) for fault in faults}) == 6


def test_faults_of_hosts_strike_one_host_at_a_time_and_never_the_drivers_power() -> None:
    drawn = random_faults(3, 300, NAMES, never_killed="c0", always_on=NEAR, table=HOSTS_TABLE)
    assert all(sum(isinstance(fault, OF_A_HOST) for fault in together) <= 1 for together in drawn)
    faults = [fault for together in drawn for fault in together]
    assert {type(fault) for fault in faults} >= set(OF_A_HOST)
    assert not any(isinstance(fault, PowerOff) and fault.member in NEAR for fault in faults)


def test_some_random_faults(cluster: None, tmp_path: Path) -> None:
    report = run_random(tmp_path, 5, 6)
    assert report.violations == [], table(report)
    assert sum(one.landed for one in report.struck) >= 5


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lanes", ["default", "torchrpc", "nng"])
def test_sixty_random_faults(cluster: None, tmp_path: Path, lanes: str) -> None:
    report = run_random(tmp_path, 6, 60, lanes)
    assert report.violations == [], table(report)


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.timeout(1200)
def test_random_faults_on_several_hosts(
    tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path_factory.mktemp("hosts")
    try:
        status = on_hosts.run(directory, 3, ["--faults=20", "--seed=22"])
    except Unavailable as unavailable:
        pytest.skip(str(unavailable))
    out = capfd.readouterr().out
    assert status == 0, out
    assert "violations 0" in out and "PowerOff" in out and "Cable" in out and "Partition" in out
