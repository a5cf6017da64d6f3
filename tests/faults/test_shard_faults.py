"""Publishers and readers of shards that are killed and suspended, by themselves and at random moments.

``python -m tests.faults --shards --faults 500`` is the long form.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.faults.faults import Fault, Kill, Stop, random_faults
from tests.faults.report import GoingOn, survivals
from tests.faults.running import Running, running
from tests.faults.scenarios import COPIES, LAST, PUBLISHERS, READERS, SCENARIOS
from tests.insides import kept_out
from tests.polling import stands_still

SHARDS = SCENARIOS["shards"]
#: A publisher that dies is not back before this (seconds).
_AWAY_S = 2.5


@pytest.fixture(scope="module")
def run(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Each test leaves all processes at work."""
    with running(SHARDS, tmp_path_factory.mktemp("shards"), 11) as run:
        yield run


def strike(run: Running, *faults: Fault) -> list[GoingOn]:
    """How survivors went on."""
    struck = run.round(faults)
    found, run.report.violations = run.report.violations, []
    assert found == [], run.report
    assert any(note.verdict == "ok" and note.member == "r1" for note in run.records)
    return survivals(struck, run.records)


def returned(run: Running, member: str) -> float:
    """When the last process of a member was in the group."""
    return max(note.began for note in run.records if (note.member, note.op) == (member, "member"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", PUBLISHERS[:2])
def test_survivors_of_a_publisher_that_dies_go_on(run: Running, victim: str) -> None:
    """Readers have an answer at once, and also what other publishers have, unless the store has ended."""
    remote = run.remotes[victim]
    with kept_out(lambda: remote.died is not None and time.monotonic() > remote.died + _AWAY_S):
        rows = strike(run, Kill(victim))
    died = run.report.struck[-1].at
    assert died is not None
    away = returned(run, victim) - died
    assert [row for row in rows if row.answered > away - 0.05] == [], "survivors go on before it is back"
    readers = [row for row in rows if row.member in READERS]
    assert {row.how for row in readers} >= {LAST, COPIES}
    copies = [row for row in readers if row.how == COPIES]
    assert copies and (victim == PUBLISHERS[0] or [row for row in copies if row.done > away - 0.05] == [])


@pytest.mark.timeout(120)
def test_a_restarted_publisher_returns_while_a_reader_is_suspended(run: Running) -> None:
    reader = run.remotes["r0"].pid
    with kept_out(lambda: stands_still(reader)):
        strike(run, Kill("p1"), Stop("r0", seconds=10.0, absent="p1"))
    suspended = run.report.struck[-1].at
    assert suspended is not None and suspended < returned(run, "p1") < suspended + 10.0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_some_random_faults(run: Running) -> None:
    for faults in random_faults(11, 3, SHARDS.names, SHARDS.faults.here, at_once=SHARDS.at_once):
        strike(run, *faults)
