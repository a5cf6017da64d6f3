"""``print(group.stats())``."""

from __future__ import annotations

import pytest

from raytorchrpc.calls.counters import GroupStats, PairStats

LONG = "a-member-with-a-name-of-40-characters---"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["a", "evaluation_collector", LONG])
def test_columns_never_touch_and_fit_the_terminal(width: int, name: str) -> None:
    rows = [
        PairStats(name, f"{name}_1", "cuda_ipc", 123_456_789, 123_456, 10**13, 10**13, 1e7),
        PairStats(f"{name}_1", name, "socket"),
    ]
    text = GroupStats(rows, ["silent"]).table(width)
    head, _, *lines, missing = text.splitlines()
    assert max(map(len, text.splitlines())) <= width
    assert head.split()[-7:] == ["calls", "failed", "MB", "out", "MB", "in", "ms/call"]
    figures = ["cuda_ipc", "123456789", "123456", "10000000.000", "10000000.000", "81.000"]
    assert next(line.split()[-6:] for line in lines if "cuda_ipc" in line) == figures
    assert missing == "no answer from: silent (busy or gone)"


def test_names_that_do_not_fit_beside_each_other_stand_below_each_other() -> None:
    stats = GroupStats([PairStats("collector_of_host_17", "learner_of_host_17", "socket", 5, 0, 10**6, 0, 0.1)])
    assert stats.table(80).splitlines() == [
        "caller                lane    calls  failed  MB out  MB in  ms/call",
        "  peer",
        "--------------------  ------  -----  ------  ------  -----  -------",
        "collector_of_host_17  socket      5       0   1.000  0.000   20.000",
        "  learner_of_host_17",
    ]
    assert len(stats.table(120).splitlines()) == 3


def test_the_text_of_a_group_without_calls_has_only_the_heads() -> None:
    assert len(str(GroupStats()).splitlines()) == 2
