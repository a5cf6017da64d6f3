"""Publishers and readers of shards that are killed and stopped at random moments. ``shard_running`` judges."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.faults.hands import Here
from tests.faults.shard_running import running, summary

#: Of the long form.
FAULTS = int(os.environ.get("SHARD_FAULTS", "500"))


def strike(directory: Path, faults: int, seed: int) -> None:
    draw, hand = random.Random(seed), Here()
    with running(directory) as run:
        for _ in range(faults):
            run.strike(hand, draw)
    print(summary(run))
    assert run.judge() + run.late(1.5) == [], summary(run)
    assert any(note["verdict"] == "ok" and note["name"] == "r1" for note in run.notes)


@pytest.mark.timeout(120)
def test_some_random_faults(cluster: None, tmp_path: Path) -> None:
    strike(tmp_path, 3, 11)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_hundred_random_faults(cluster: None, tmp_path: Path) -> None:
    strike(tmp_path, FAULTS, 12)
