"""``print(group.stats())``."""

from __future__ import annotations

import pickle

import pytest

from raytorchrpc.calls.counters import BUCKETS, CallCounters, PairStats, counted_name
from raytorchrpc.calls.metrics import GroupStats, Reading
from tests.threads import in_threads
from tests.unit.switching import switching_often

LONG = "a-member-with-a-name-of-40-characters---"


def row(caller: str, peer: str, lane: str, calls: int, size: int, seconds: float, method: str = "step") -> PairStats:
    latency = [calls, *[0] * (BUCKETS - 1)]
    return PairStats(caller, peer, lane, method, calls, size, size, seconds, {"KeyError": calls // 10}, latency)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["a", "evaluation_collector", LONG])
def test_columns_never_touch_and_fit_the_terminal(width: int, name: str) -> None:
    rows = [row(name, f"{name}_1", "cuda_ipc", 123_456_789, 10**13, 1e7), PairStats(f"{name}_1", name, "socket", "x")]
    stats = GroupStats(Reading(rows), ["silent"])
    text = stats.table(width)
    assert max(map(len, text.splitlines())) <= width
    figures = ["cuda_ipc", "123456789", "12345678", "10,000,000", "10,000,000", "81.0", "0"]
    assert next(line.split()[-7:] for line in text.splitlines() if "cuda_ipc" in line) == figures
    assert str(stats).splitlines()[-1] == "no answer from: silent (away or stopped)"
    assert repr(stats) == str(stats) and stats._repr_html_().startswith("<pre>caller"), "a prompt and a notebook"


def test_rows_add_up_methods_and_methods_add_up_callers() -> None:
    rows = [row("a", "c", "shm", 10, 5, 1.0), row("a", "c", "shm", 20, 1, 1.0, "put"), row("b", "c", "shm", 1, 1, 3.0)]
    stats = GroupStats(Reading(rows))
    counts = [(each.caller, each.calls, each.failures, each.finished) for each in stats]
    assert counts == [("a", 30, 3, 30), ("b", 1, 0, 1)]
    assert [(each.peer, each.method, each.calls, each.seconds) for each in stats.methods] == [
        ("c", "step", 11, 4.0),
        ("c", "put", 20, 1.0),
    ]
    again = pickle.loads(pickle.dumps(stats))
    assert again == stats and again.methods == stats.methods


def test_a_service_is_counted_under_the_name_of_its_object() -> None:
    assert counted_name("update", ("queue", "x")) == "update"
    assert counted_name("raytorchrpc.put", ("queue", "batches", 7)) == "queue batches.put"
    assert counted_name("raytorchrpc.weights.lease", ("weight store", "policy", 1)) == "weight store policy.lease"
    assert counted_name("raytorchrpc.next", (3, 1)) == counted_name("raytorchrpc.next", ()) == "(next)"


def test_calls_of_many_threads_are_all_counted_by_the_first_lane_and_what_came_by_the_other() -> None:
    counters, count = CallCounters(), 20_000

    def work(number: int) -> None:
        for _ in range(count):
            sent = counters.sent("b", "socket", "step", 3)
            if number % 2:  # the outcome of the others is not taken
                counters.finished(sent, "shm", 2, 1.0, KeyError())

    with switching_often():
        in_threads(work, 4)
    row, other = counters.rows("a")
    assert (row.lane, row.calls, row.bytes_out, row.finished) == ("socket", 4 * count, 12 * count, 2 * count)
    assert (row.errors, row.bytes_in, row.seconds) == ({"KeyError": 2 * count}, 0, 2 * count)
    assert (other.lane, other.calls, other.bytes_in) == ("shm", 0, 4 * count)
