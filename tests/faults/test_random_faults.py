"""Random faults over a group of six under load. ``python -m tests.faults --faults 500`` is the long form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.__main__ import run_random, table
from tests.faults.faults import Kill, random_faults
from tests.faults.running import NAMES


def test_a_seed_gives_the_same_faults() -> None:
    drawn = random_faults(3, 200, NAMES, never_killed="c0")
    assert drawn == random_faults(3, 200, NAMES, never_killed="c0") != random_faults(4, 200, NAMES, never_killed="c0")
    faults = [fault for together in drawn for fault in together]
    assert len(faults) == 200
    assert not any(isinstance(fault, Kill) and fault.member == "c0" for fault in faults)
    assert len({type(fault) for fault in faults}) == 6


@pytest.mark.timeout(240)
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
