"""Publishers and readers of shards that are killed and stopped at random moments. ``shard_running`` judges."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import pytest

from tests.faults.hands import Here
from tests.faults.shard_roles import COPIES, LAST, PUBLISHERS, READERS
from tests.faults.shard_running import Run, running, summary
from tests.faults.shard_timing import restarts, survivals

#: Of the long form.
FAULTS, SEED = int(os.environ.get("SHARD_FAULTS", "500")), int(os.environ.get("SHARD_SEED", "12"))
#: A survivor goes on within this after a fault (seconds). On an idle machine it takes a tenth of that.
GOES_ON_S = 1.0
#: A restarted process is a member again within this, once its ``__init__`` runs; it takes 0.2 s, and 0.5 s more while
#: another member is suspended (seconds).
REJOINS_S = 1.8


@pytest.fixture(scope="module")
def run(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Each test leaves all processes at work."""
    with running(tmp_path_factory.mktemp("shards")) as run:
        yield run


def strike(run: Run, faults: int, seed: int) -> None:
    draw, hand = random.Random(seed), Here()
    for _ in range(faults):
        run.strike(hand, draw)
    print(summary(run))
    assert run.judge() + run.late(1.5) == [], summary(run)
    assert any(note["verdict"] == "ok" and note["name"] == "r1" for note in run.notes)


@pytest.mark.timeout(120)
def test_survivors_of_a_publisher_that_dies_go_on(run: Run) -> None:
    """Readers have an answer at once, and also what other publishers have, unless the store has ended."""
    for victim in PUBLISHERS:
        run.kill(Here(), victim, run.pid(victim), (victim,))
        run.await_progress(run.faults[-1].at)
    rows = survivals(run.faults[-len(PUBLISHERS) :], run.notes)
    back = {one.fault: one.started + one.member for one in restarts(run.faults, run.notes)}
    waited = [row for row in rows if row.kind == "publish" and row.answered > back[row.fault] - 0.05]
    assert waited == [], "publishers that waited for the one that died go on before it is back"
    readers = [row for row in rows if row.name in READERS]
    assert {row.kind for row in readers} >= {LAST, COPIES}
    assert [row for row in readers if row.answered > GOES_ON_S] == []
    copies = [row for row in readers if row.kind == COPIES and row.fault.victim != PUBLISHERS[0]]
    assert copies and [row for row in copies if row.done > GOES_ON_S] == []


@pytest.mark.timeout(120)
def test_a_suspended_publisher_holds_nobody_up_who_finds_the_same_elsewhere(run: Run) -> None:
    for victim in PUBLISHERS[1:]:
        run.stop(Here(), victim, run.pid(victim), 2.5, (victim,))
        run.await_progress(run.faults[-1].at + 2.5)
    rows = [row for row in survivals(run.faults[-2:], run.notes) if row.kind == COPIES]
    assert len(rows) == 2 * len(READERS)
    assert [row for row in rows if row.done > 2 * GOES_ON_S] == []


@pytest.mark.timeout(120)
def test_a_restarted_publisher_returns_while_a_reader_is_suspended(run: Run) -> None:
    hand, victims, lost = Here(), ("p1", "r0"), threading.Event()
    publisher, reader = map(run.pid, victims)
    run.group.on_change(lambda change: lost.set() if change.kind == "lost" else None)
    run.kill(hand, "p1", publisher, victims)
    assert lost.wait(10)
    with run.stopped(hand, "r0", reader, victims):
        started = run.await_note("p1", "started", run.faults[-2].at)
        member = run.await_note("p1", "member", run.faults[-2].at)
    assert member - started < REJOINS_S
    run.await_progress(member)


@pytest.mark.timeout(120)
def test_some_random_faults(run: Run) -> None:
    strike(run, 3, 11)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_hundred_random_faults(run: Run) -> None:
    strike(run, FAULTS, SEED)
