"""What ``raytorchrpc top`` makes of two looks at a group."""

from __future__ import annotations

import re

import pytest

from raytorchrpc.calls.counters import CallCounters, PairStats, WeightStats
from raytorchrpc.calls.metrics import MemberStats, QueueStats, Reading
from raytorchrpc.cli.top import Update, as_data, tables, update
from raytorchrpc.group.status import GroupStatus, as_json
from tests.unit import command_line


def look(at: float, *calls: PairStats, **more: object) -> GroupStatus:
    values: dict[str, object] = {"away": {}, "silent": (), **more}
    rows = {name: values.pop(name, []) for name in ("queues", "weights", "members")}
    return GroupStatus("g", "g1", at, ("a", "b"), reading=Reading([*calls], **rows), **values)  # type: ignore[arg-type]


def counted(count: int, seconds: float = 0.002, errors: int = 0) -> PairStats:
    counters = CallCounters()
    for number in range(count):
        sent = counters.sent("b", "shm", "step", 600_000)
        counters.finished(sent, "shm", 400_000, seconds, ValueError() if number < errors else None)
    (row,) = counters.rows("a")
    return row


def between(before: GroupStatus, now: GroupStatus) -> Update:
    return update(update(None, before), now)


def line(text: str, start: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(start)).split()


def test_counts_are_of_what_happened_between_two_looks() -> None:
    shown = between(look(50.0, counted(100)), look(52.0, counted(120, errors=2)))
    (pair,) = shown.stats
    assert (pair.caller, pair.peer, pair.lane, pair.calls, pair.bytes_out) == ("a", "b", "shm", 20, 12_000_000)
    assert pair.mean_ms == pytest.approx(2) and pair.errors == {"ValueError": 2}
    text = tables([shown], 120)
    assert line(text, "a ") == ["a", "b", "shm", "10.0", "1.00", "6.00", "4.00", "2.00", "0"]
    assert line(text, "b ") == ["b", "step", "10.0", "1.00", "6.00", "4.00", "2.00"]
    assert "failed so far: b.step: 2 x ValueError" in text


def test_a_quiet_pair_has_no_mean_and_a_member_that_came_back_counts_anew() -> None:
    quiet = between(look(1.0, counted(3)), look(2.0, counted(3)))
    assert line(tables([quiet], 120), "a ")[3:] == ["0.00", "0.00", "0.00", "0.00", "-", "0"]
    assert between(look(1.0, counted(100)), look(2.0, counted(4))).stats[0].calls == 4


def test_rows_keep_their_places_and_a_table_says_what_it_counts() -> None:
    rows = [PairStats(name, "b", "shm", "", calls) for name, calls in (("a", 1), ("c", 9))]
    early = update(None, look(1.0))
    first, swapped = look(2.0, *rows), look(3.0, PairStats("a", "b", "shm", "", 90), rows[1])
    for shown, when in (
        (update(None, first), "since it was formed"),
        (update(update(early, first), swapped), "per second"),
    ):
        text = tables([shown], 120)
        assert text.startswith(f"group g, 2 members, {when}\n")
        assert text.index("\na ") < text.index("\nc ")


def test_a_status_survives_its_way_as_json() -> None:
    queue = QueueStats("a", "queue", "q", "", 3, getting=("b",))
    members = [MemberStats("a", 1, 2, {"b": 3}, 9)]
    away, silent = {"c": "its process ended"}, ("d",)
    seen = look(1.5, counted(2, errors=1), queues=[queue], members=members, away=away, silent=silent)
    assert as_json().validate_json(as_json().dump_json(seen)) == seen
    with pytest.raises(ValueError, match="group"):
        as_json().validate_json(b"{}")


def test_the_table_says_who_is_away_and_what_is_in_flight() -> None:
    members = [MemberStats("a", in_flight={"b": 31})]
    now = look(2.0, counted(5), members=members, away={"c": "it died"}, silent=("d",))
    text = tables([between(look(1.0), now)], 120)
    for said in ("group g, 2 members", "away: c (it died)", "no answer: d"):
        assert said in text
    assert line(text, "a ")[-1] == "31"
    assert "no group" in tables([])
    data = as_data(update(None, now))
    assert data["pairs"][0]["in_flight"] == 31 and data["pairs"][0]["calls"] == data["methods"][0]["calls"] == 5


@pytest.mark.parametrize("name", ["collector_1", "a-member-with-a-name-of-forty-two-characters"])
def test_large_figures_and_names_fit_80_columns_and_never_touch(name: str) -> None:
    row = PairStats(name, "learner_0", "cuda_ipc", "", 123457, 12_345_600_000, 12_345_600_000, errors={"E": 99})
    text = tables([Update(look(2.0), update(None, look(1.0, row)).stats, 1.0)], 80)
    pairs = text.partition("\n\n")[0]
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"cuda_ipc +123,457 +99.0 +12,346 +12,346 +- +0$", pairs, re.MULTILINE), text
    assert name in "".join(line.partition(" ")[0] for line in pairs.splitlines())


def test_queues_show_rates_age_and_who_waits() -> None:
    def queue(put: int, taken: int) -> QueueStats:
        waits = ("c0", "c0", "c1", "c2", "c3")
        return QueueStats("a", "queue", "batches", "", 7, 3_000_000, 1.5, put, taken, 0, ("p",), waits)

    topic = QueueStats("a", "topic", "news", "b", items=2, dropped=4)
    shown = between(look(1.0, queues=[queue(10, 5)]), look(3.0, queues=[queue(30, 9), topic]))
    text = tables([shown], 120)
    *queue_lines, topic_line = (" ".join(line.split()) for line in text.splitlines()[-5:])
    assert queue_lines == ["queue batches a put: p 7 3.00 1.50 10.0 2.00 0.00", "get: c0 x2", "get: c1", "2 more"]
    assert topic_line.startswith("topic news > b a 2 ")
    assert as_data(shown)["queues"][0]["taken"] == 4


def test_weights_show_versions_the_lag_and_what_is_still_to_come() -> None:
    reading = Reading.of_all(
        Reading(weights=[row])
        for row in (
            WeightStats(
                "r0", "policy", "t0", pulled=6, arriving=7, brought=16_000_000, missing=4_500_000, mapped=20_000_000
            ),
            WeightStats("r1", "policy", "t0", pulled=7, brought=20_500_000),
            WeightStats("r2", "policy", "t0"),
            WeightStats("t0", "policy", "t0", published=8, bytes_out=99, served=((6, 41_000_000), (8, 36_500_000))),
        )
    )
    assert [row.lag for row in reading.weights] == [2, 1, 0, 0]
    status = look(1.0, weights=reading.weights)
    assert as_data(update(None, status))["weights"][0]["missing"] == 4_500_000
    text = tables([update(None, status)], 120)
    assert [line.split() for line in text.splitlines() if "policy" in line][:2] == [
        ["policy", "t0", "r0", "0", "6", "2", "7", "16.0", "4.50", "0.00", "0.00", "20.0"],
        ["policy", "t0", "r1", "0", "7", "1", "0", "20.5", "0.00", "0.00", "0.00", "0.00"],
    ]


def test_weights_are_two_tables_where_one_does_not_fit() -> None:
    row = WeightStats("collector_1", "policy", "learner_0", pulled=6, arriving=7, brought=16_000_000, held=32 * 10**8)
    text = tables([update(None, look(1.0, weights=[row]))], 80)
    assert max(map(len, text.splitlines())) <= 80
    versions, memory = (" ".join(part.split()) for part in text.split("\n\n")[-2:])
    assert "policy learner_0 collector_1 0 6 0 7 16.0 0.00" in versions
    assert "policy learner_0 collector_1 0.00 3,200 0.00" in memory


@pytest.mark.parametrize(
    ("options", "said"), [(["--interval", "0"], "--interval"), (["--address", "local"], "start a new cluster")]
)
def test_what_cannot_be_is_one_line_and_exit_code_2(options: list[str], said: str) -> None:
    ran = command_line.run("top", "--once", *options)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert ran.stderr.startswith("raytorchrpc top: ") and said in ran.stderr and ran.stderr.count("\n") == 1
