"""What ``raytorchrpc top`` makes of two looks at a group."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from raytorchrpc.calls.counters import BUCKETS, CallCounters, PairStats
from raytorchrpc.calls.weight_counters import WeightStats
from raytorchrpc.cli.top import as_data, rates, run, tables
from raytorchrpc.group.status import GroupStatus, UnderWay, from_json


def look(counters: CallCounters, at: float, **more: object) -> GroupStatus:
    values: dict[str, object] = {"under_way": (), "away": {}, "silent": (), **more}
    return GroupStatus("g", "g1", at, ("a", "b"), tuple(counters.rows("a")), **values)  # type: ignore[arg-type]


def call(counters: CallCounters, count: int, seconds: float = 0.002, error: BaseException | None = None) -> None:
    for _ in range(count):
        counters.sent("b", "shm", 600_000)
        counters.finished("b", "shm", "shm", 400_000, seconds, error)


def test_rates_are_of_what_happened_between_two_looks() -> None:
    counters = CallCounters()
    call(counters, 100, seconds=7)
    before = look(counters, 50.0)
    call(counters, 18)
    call(counters, 2, error=ValueError())
    (rate,) = rates(before, look(counters, 52.0))
    assert (rate.caller, rate.peer, rate.lane) == ("a", "b", "shm")
    assert rate.calls_per_s == 10 and rate.mb_per_s == pytest.approx(10)
    assert rate.mean_ms == pytest.approx(2)
    assert (rate.failures, rate.failures_per_s) == (2, 1)


def test_the_first_look_and_a_quiet_pair_show_no_rate() -> None:
    counters = CallCounters()
    call(counters, 3)
    first = look(counters, 1.0)
    assert [rate.calls_per_s for rate in rates(None, first)] == [0]
    (quiet,) = rates(first, look(counters, 2.0))
    assert (quiet.calls_per_s, quiet.mean_ms) == (0, None)


def test_a_member_that_came_back_counts_anew() -> None:
    old, new = CallCounters(), CallCounters()
    call(old, 100)
    call(new, 4)
    (rate,) = rates(look(old, 1.0), look(new, 2.0))
    assert rate.calls_per_s == 4


def test_a_look_survives_its_way_as_json() -> None:
    counters = CallCounters()
    call(counters, 1, error=KeyError("x"))
    seen = look(counters, 1.5, under_way=(UnderWay("a", "b", 3, 9),), away={"c": "its process ended"}, silent=("d",))
    again = from_json(seen.to_json())
    assert again == seen
    assert isinstance(again.rows[0], PairStats) and len(again.rows[0].latency) == BUCKETS
    assert again.rows[0].errors == (("KeyError", 1),)
    with pytest.raises(ValueError, match="group"):
        from_json(b"{}")


def test_the_table_says_who_is_away_and_what_is_in_flight() -> None:
    counters = CallCounters()
    before = look(counters, 1.0)
    call(counters, 5)
    now = look(counters, 2.0, under_way=(UnderWay("a", "b", 31, 9),), away={"c": "it died"}, silent=("d",))
    found = rates(before, now)
    console = Console(file=StringIO(), width=120)
    console.print(tables([(now, found)]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for said in ("group g", "shm", "5.0", "2.000", "31", "away: c (it died)", "no answer: d"):
        assert said in text
    assert "metrics_period_s" in tables([])
    data = as_data(now, found)
    assert data["in_flight"] == [{"caller": "a", "peer": "b", "calls": 31, "bytes": 9}]
    assert data["pairs"][0]["calls_per_s"] == 5


def test_weights_show_the_versions_and_what_is_still_to_come() -> None:
    weights = (
        WeightStats("r0", "policy", "t0", pulled=6, arriving=7, brought=16_000_000, missing=4_500_000),
        WeightStats("r1", "policy", "t0", pulled=7, brought=20_500_000),
        WeightStats("t0", "policy", "t0", published=7, bytes_out=99, served=((6, 41_000_000), (7, 36_500_000))),
    )
    status = look(CallCounters(), 1.0, weights=weights)
    assert from_json(status.to_json()) == status
    assert as_data(status, [])["weights"][0]["missing"] == 4_500_000
    console = Console(file=StringIO(), width=80)
    console.print(tables([(status, [])]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line.split() for line in text.splitlines() if "policy" in line]
    shown = [[word for word in line if word != "\N{BOX DRAWINGS LIGHT VERTICAL}"] for line in lines]
    assert shown == [
        ["policy", "t0", "t0", "published", "7", "36.5"],
        ["policy", "t0", "r0", "pulls", "7", "16.0", "4.5", "0.0"],
        ["policy", "t0", "r1", "pulled", "7", "20.5", "0.0", "0.0"],
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"interval_s": 0.0}, "--interval"), ({"address": "local"}, "start a new cluster")],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], options: dict[str, object], said: str
) -> None:
    given = {"address": None, "group": None, "interval_s": 1.0, "once": True, "as_json": False, **options}
    assert run(**given) == 2  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("raytorchrpc top: ") and said in err and err.count("\n") == 1
