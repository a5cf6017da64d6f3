"""The judge finds each kind of violation in a made-up history. That it finds no others, each run of faults shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.judging import Life, judge, judge_memory, judge_rest
from tests.faults.records import Record, Recorder, read, stamp
from tests.faults.scenarios import Object

QUEUE, TOPIC = Object("queue", "q", "home"), Object("topic", "t", "home")
PLAIN, TRACKED = Object("weights", "w", "home", "same"), Object("weights", "k", "home", "same", True)
STORES = {of.name: of for of in (PLAIN, TRACKED)}
#: The first life of the home ended at 100, and the second one goes on.
LIVES = {("home", 1): Life(100.0, 99.5), ("home", 2): Life(None), ("user", 1): Life(None), ("dead", 1): Life(50.0)}


def record(
    op: str,
    of: Object = QUEUE,
    at: float = 10.0,
    verdict: str = "ok",
    *,
    held: int = 2,
    lasted: float = 0.1,
    allowed: float | None = 5.0,
    still: float = 0.0,
    member: str = "user",
    handle: str = "h",
    text: str = "",
    **data: Any,
) -> Record:
    return Record(
        member, 1, op, of.name, of.home, held, handle, at, at + lasted, allowed, still, verdict, text, data
    )  # fmt: skip


def put(numbers: Sequence[int], at: float = 10.0, of: Object = QUEUE, **more: Any) -> Record:
    return record("put", of, at, producer="p", ok=list(numbers), maybe=[], handle="p", **more)


def got(
    numbers: Sequence[int], at: float = 20.0, of: Object = QUEUE, life: int = 2, good: bool = True, **more: Any
) -> Record:
    items = [[of.name, life, "p", number, good] for number in numbers]
    return record(more.pop("op", "get"), of, at, items=items, limit=2, **more)


def pulled(
    version: int, at: float = 10.0, of: Object = PLAIN, life: int = 2, tensors: Any = None, **more: Any
) -> Record:
    usual = {name: [stamp(life, version, name, of.track)] * 2 for name in "abcde"}
    return record("pull", of, at, version=version, since=None, ends={**usual, **(tensors or {})}, **more)


def called(call: str = "1", op: str = "call", **more: Any) -> Record:
    data = {"kind": "check empty", "may_have_run": None, "life": 2} if op == "call" else {}
    return record(op, of=Object("calls", call, "home"), held=0, handle="", **{**data, **more})


def ran(call: str = "1") -> Record:
    return called(call, "ran")


NOT_SENT = called(verdict="PeerLost", may_have_run=False)
CLOSE, ENDED = record("close", at=30, handle=""), record("get", at=31, verdict="Closed")
SUBSCRIBED = record("subscribe", TOPIC, 5, policy="block", handle="s")
CLOSE_TOPIC, TOPIC_ENDED = record("close", TOPIC, 30, handle=""), record("next", TOPIC, 31, "end", handle="s", limit=1)

BAD: dict[str, tuple[str, list[Record]]] = {
    "two versions": ("MIXTURE", [pulled(4, tensors={"b": [stamp(2, 3, "b", False)] * 2})]),
    "two versions in a tensor": (
        "MIXTURE",
        [pulled(4, tensors={"b": [stamp(2, 3, "b", False), stamp(2, 4, "b", False)]})],
    ),
    "a change was not brought": ("MIXTURE", [pulled(4, of=TRACKED, tensors={"b": [stamp(2, 2, "b", True)] * 2})]),
    "two lives": ("MIXTURE", [pulled(4, tensors={"b": [stamp(1, 4, "b", False)] * 2})]),
    "the next life's weights": ("CROSSED", [pulled(4, held=1)]),
    "another version than it says": ("CORRUPT", [pulled(4)._replace(data={**pulled(5).data, "version": 4})]),
    "an older version": ("BACKWARDS", [pulled(4), pulled(3, 11)]),
    "nothing newer, of a store that is gone": ("STALE", [pulled(4, 110, life=1, held=1)]),
    "an item of the last life": ("CROSSED", [got([1], life=1)]),
    "an item of the next life": ("CROSSED", [got([1], held=1)]),
    "an item of another queue": ("CROSSED", [got([1], of=Object("queue", "r", "home"))._replace(object="q")]),
    "put into the next queue": ("STALE", [put([1], 110, held=1)]),
    "an old handle waits on": ("STALE", [record("get", at=110, verdict="Empty", held=1)]),
    "a call from the past": ("STALE", [called(life=1, at=110), ran()]),
    "a call that ran nowhere": ("NOWHERE", [called(), ran("2")]),
    "a call that ran twice": ("TWICE", [called(), ran(), ran()]),
    "a call that was sent again too often": ("TWICE", [called("1-again"), *[ran("1-again")] * 5]),
    "a call that ran although it had not": ("RAN", [NOT_SENT, ran()]),
    "too many versions": ("KEPT", [record("publish_shards", kept=7, held=0)]),
    "an error of shards that no fault explains": (
        "UNDOCUMENTED",
        [record("read_shards", verdict="ProtocolError", held=0)],
    ),
    "not found too early": ("TOO EARLY", [record("get", verdict="NotFound")]),
    "not found before it was killed": ("TOO EARLY", [record("get", at=99.3, verdict="NotFound", held=1)]),
    "an end that nobody made": ("SILENT END", [record("next", TOPIC, verdict="end", allowed=None)]),
    "an end before it was made": ("SILENT END", [record("next", verdict="end", at=29), CLOSE]),
    "closed by nobody": ("SILENT END", [record("get", verdict="Closed")]),
    "the wrong order": ("ORDER", [put([1, 2]), got([2]), got([1], 21)]),
    "twice by one": ("DOUBLED", [put([1]), got([1]), got([1], 21)]),
    "twice by two": ("DOUBLED", [put([1]), got([1]), got([1], 21, handle="other")]),
    "a lost item": ("LOST", [put([1, 2, 3]), got([1]), got([3], 21), CLOSE, ENDED]),
    "more than the dead one may have had": ("LOST", [put(range(9)), got([1], member="dead"), CLOSE, ENDED]),
    "what was cancelled long before a consumer died": (
        "LOST",
        [
            put(range(1, 4)),
            record("get", at=40, member="dead", handle="d", items=[], cancelled=True, limit=1),
            CLOSE,
            ENDED,
        ],
    ),
    "a gap": (
        "LOST",
        [SUBSCRIBED, put([1, 2, 3], of=TOPIC), got([1], of=TOPIC, handle="s"), got([3], 21, of=TOPIC, handle="s")],
    ),
    "the last ones": (
        "LOST",
        [SUBSCRIBED, put([1, 2], of=TOPIC), got([1], of=TOPIC, handle="s"), CLOSE_TOPIC, TOPIC_ENDED],
    ),
    "the first ones": ("LOST", [SUBSCRIBED, put([1, 2], of=TOPIC), got([2], of=TOPIC, handle="s")]),
    "all of them": ("LOST", [SUBSCRIBED, put([1, 2], of=TOPIC), CLOSE_TOPIC, TOPIC_ENDED]),
    "nobody takes it to its end": ("NOT DRAINED", [put([1]), got([1]), CLOSE]),
    "too long": ("LATE", [record("get", lasted=6.5)]),
    "too long besides standing still": ("LATE", [record("get", lasted=60, still=50)]),
    "an iteration is not told": ("LATE", [record("next", at=90, lasted=30, verdict="PeerLost", allowed=None, held=1)]),
    "another item than was put": ("CORRUPT", [got([1], good=False)]),
    "another answer than was due": ("UNDOCUMENTED", [called(verdict="other: Corrupt('1')"), ran()]),
    "an error of its own": ("UNDOCUMENTED", [record("get", verdict="other: KeyError('x')")]),
}


@pytest.mark.parametrize("history", BAD)
def test_each_violation_is_found(history: str) -> None:
    kind, records = BAD[history]
    found = judge(records, LIVES, STORES)
    assert any(text.startswith(f"{kind}: ") for text in found), found


def test_a_shortage_and_a_partition_excuse_what_they_explain_and_nothing_else() -> None:
    short = [record("get", verdict="other: MemoryError()"), record("put", at=11, verdict="other: KeyError('x')")]
    (found,) = judge(short, LIVES, STORES, starved=True)
    assert "KeyError" in found
    assert len(judge(short, LIVES, STORES)) == 2
    gone = [record("get", verdict="NotFound"), got([1], 11, life=1)]
    (found,) = judge(gone, LIVES, STORES, parted=True)
    assert found.startswith("CROSSED")


def test_what_a_handle_shows_again_is_counted() -> None:
    (found,) = judge([got([number], 20 + number, life=1) for number in range(1, 5)], LIVES, STORES)
    assert found.endswith("(and 3 more)")


def test_only_a_siege_makes_unknown_calls_strangers() -> None:
    assert judge([ran("2")], LIVES, STORES) == []
    (found,) = judge([called(), ran(), ran("1>"), ran("2")], LIVES, STORES, besieged=True)
    assert found.startswith("UNKNOWN: ")


def test_what_a_process_holds_at_rest() -> None:
    first = {"fds": 20, "threads": 9, "arena": 0, "under way": 0, "anonymous": 0, "far": 0, "restless": ""}
    first["names"] = []
    assert list(judge_rest(first, {**first, "fds": 26}, 0, 0)) == []
    assert list(judge_rest(first, {**first, "fds": 75, "far": 1}, 1, 0)) == []
    for what, value in (("fds", 27), ("threads", 34), ("arena", 1), ("under way", 1), ("anonymous", 26 << 20)):
        (found,) = judge_rest(first, {**first, what: value}, 0, 0)
        assert found.startswith(f"LEAK: {what} grew by")
    assert list(judge_rest(first, {**first, "anonymous": 26 << 20}, 0, 80 << 20)) == []
    (found,) = judge_rest(first, {**first, "restless": "a call"}, 0, 0)
    assert found == "RESTLESS: a call"


def test_memory_of_processes_that_go_on() -> None:
    most: dict[tuple[str, int], int] = {}
    for memory, leaks in ((100 << 20, 0), (150 << 20, 0), (170 << 20, 1)):
        assert len(list(judge_memory([record("publish_shards", memory=memory)], most))) == leaks


def test_what_a_killed_process_has_written_in_part_spoils_no_other_record(tmp_path: Path) -> None:
    killed, living = Recorder("a", tmp_path), Recorder("b", tmp_path)
    whole = killed.write("put", began=1.0, ended=2.0)
    torn = (tmp_path / "records").read_bytes()[:-9]
    with (tmp_path / "records").open("ab") as file:
        file.write(torn)
    found, end = read(tmp_path / "records", 0)
    assert found == [whole]
    assert read(tmp_path / "records", end) == ([], end)
    after = living.write("get", began=3.0, ended=4.0)
    assert read(tmp_path / "records", end)[0] == [after]
