"""What must be true of the records of members, and of what processes hold, whatever happened to their group.

Each violation's text begins with its kind:

- NOWHERE: a call was answered that ran nowhere. TWICE: one ran more often than it may. RAN: one ran, although its
  caller was told that it had not. UNKNOWN: one ran that no member made.
- MIXTURE: tensors of one pull are of two versions, or of two lives. CROSSED: a handle of one life of an object
  delivered what belongs to another life. CORRUPT: a value is not what was sent.
- STALE: a handle was answered after the life that it belongs to was over. TOO EARLY: NotFound while that life went on.
- SILENT END: a stream ended that nobody had closed.
- ORDER, DOUBLED, LOST: of a producer's items; what docs/queues.md allows to be lost is not counted. BACKWARDS: a pull
  brought an older version than the pull before it.
- LATE: an operation lasted longer than is promised. NOT DRAINED: nobody took a closed queue to its end.
- UNDOCUMENTED: an error that is none of the package's, or none that faults explain. KEPT: too many versions.
- RESTLESS, LEAK: a process holds what it did not hold before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any, NamedTuple

from tests.faults.records import Record, stamp, stamped
from tests.faults.scenarios import Object
from tests.faults.worker import RETRIES

#: After its deadline an operation may last so much longer (seconds), where cores are to spare, and whatever its process
#: stood still besides.
SLACK_S = 1.0
#: Answers of an object's home, as far as they are no items and no weights.
_ANSWERS = ("ok", "Empty", "Full", "Closed", "end")
#: What comes of memory that is short for a moment, where somebody is short of it.
_SHORTAGE = ("MemoryError", "can't start new thread", "Cannot allocate memory", "can't allocate memory")
#: An iteration that waits ends so soon after its home, at most (seconds).
_TOLD_S = 10.0
#: What comes for a cancelled request is back at its home so soon after the request's end, at most (seconds).
_BACK_S = 2.0
#: What faults explain, of operations with shards.
_OF_SHARDS = ("ok", "NotFound", "PeerLost", "RpcTimeout", "Empty", "NotAMember")
#: A publisher has at most so many: two that are kept, two ahead of the others, one on its way, and one in vain.
_MOST_KEPT = 6


class Life(NamedTuple):
    """Of one process of a member."""

    died: float | None
    """When it was certainly over; None: it was not."""
    killed: float | None = None
    """From when it may have been over, if that is known to be earlier."""


#: By member and number.
Lives = Mapping[tuple[str, int], Life]
#: Kind, where, and what.
Found = Iterator[tuple[str, Record, str]]


def judge(
    records: Sequence[Record],
    lives: Lives,
    stores: Mapping[str, Object],
    *,
    starved: bool = False,
    parted: bool = False,
    besieged: bool = False,
    slack_s: float = SLACK_S,
) -> list[str]:
    """Violations, the first of each kind that a handle shows. ``stores``: the objects that hold weights.

    ``starved``: somebody was short of memory; ``parted``: members that lived were lost to each other for a while;
    ``besieged``: strangers made calls, and all members lived; ``slack_s``: see SLACK_S.
    """
    records = sorted(records, key=lambda record: record.began)
    found = list(_of_each(records, lives, starved, parted, slack_s))
    found += _of_calls(records, besieged)
    found += _of_pulls(records, stores)
    streams = sorted({(r.object, r.home, r.held) for r in records if r.held and r.op in ("put", "get", "next")})
    for stream in streams:
        of_life = [record for record in records if (record.object, record.home, record.held) == stream]
        if any(record.op == "subscribe" for record in of_life):
            found += _of_topic(of_life)
        else:
            found += _of_queue(of_life, lives, parted)
    alike: dict[tuple[str, str, str, int], list[str]] = {}
    for kind, record, text in found:
        key = (kind, record.op, record.handle or record.object, record.life)
        alike.setdefault(key, []).append(f"{kind}: {_named(record)}: {text}")
    return [texts[0] + (f" (and {len(texts) - 1} more)" if len(texts) > 1 else "") for texts in alike.values()]


def _named(record: Record) -> str:
    who, where = f"{record.member}.{record.life}", f" (life {record.held}, handle {record.handle})"
    return f"{who} {record.op} {record.object!r} in {record.home}{where if record.held else ''}"


# --- each operation by itself ------------------------------------------------------------------------------------


def _of_each(records: Iterable[Record], lives: Lives, starved: bool, parted: bool, slack_s: float) -> Found:
    closed: dict[tuple[str, int], float] = {}
    for record in records:
        if record.op == "close":
            closed.setdefault((record.object, record.held), record.began)
    for record in records:
        lasted = record.ended - record.began
        text = f"{record.verdict} {record.text}"
        explained = record.verdict in _OF_SHARDS if "shards" in record.op else not record.verdict.startswith("other")
        if not explained and not (starved and any(word in text for word in _SHORTAGE)):
            yield "UNDOCUMENTED", record, text
        if record.allowed is not None and lasted - record.still > record.allowed + slack_s:
            yield "LATE", record, f"{lasted:.2f} s ({record.still:.2f} s of them still), not {record.allowed} s: {text}"
        if record.data.get("kept", 0) > _MOST_KEPT:
            yield "KEPT", record, f"{record.data['kept']} versions"
        if record.op == "call" and record.verdict == "ok" and (life := record.data.get("life")) is not None:
            died = lives.get((record.home, life), Life(None)).died
            if died is not None and died < record.began:
                yield "STALE", record, f"answered by life {life}, which was over"
        if not record.held:
            continue
        died = lives.get((record.home, record.held), Life(None)).died
        if record.op == "next" and died is not None and record.began < died < record.ended - _TOLD_S - record.still:
            yield "LATE", record, f"told {record.ended - died:.2f} s after its home had died: {text}"
        # An iteration may still have items of the last message.
        answered = record.verdict in _ANSWERS and not record.data.get("cancelled")
        if died is not None and died < record.began and answered and record.op != "next":
            yield "STALE", record, f"{text}, {record.began - died:.3f} s after that life"
        ended = record.verdict == "end" or (record.verdict == "Closed" and record.op != "close")
        if ended and closed.get((record.object, record.held), record.ended) >= record.ended:
            yield "SILENT END", record, f"{text}, and nobody had closed it"
        over = lives.get((record.home, record.held), Life(None)).killed or died
        if record.verdict == "NotFound" and not parted and (over is None or over > record.ended):
            yield "TOO EARLY", record, text
        for name, life, producer, number, good in record.data.get("items", ()):
            if (name, life) != (record.object, record.held):
                yield "CROSSED", record, f"item {number} of {producer} is of {name!r}, life {life}"
            if not good:
                yield "CORRUPT", record, f"item {number} of {producer}"


# --- calls -------------------------------------------------------------------------------------------------------


def runs_again(call: str) -> bool:
    """Whether it was made with ``retry=``."""
    return call.endswith("-again")


def _of_calls(records: Iterable[Record], besieged: bool) -> Found:
    calls = {record.object: record for record in records if record.op == "call"}
    runs = {record.object: record for record in records if record.op == "ran"}
    counts = Counter(record.object for record in records if record.op == "ran")
    for call, record in calls.items():
        if record.verdict == "ok" and call not in runs:
            yield "NOWHERE", record, "answered"
        told = record.verdict == "PeerLost" and record.data["may_have_run"] is False
        if told and record.data["kind"] != "relay" and call in runs:
            yield "RAN", record, f"although: {record.text}"
    for call, record in runs.items():
        if counts[call] > 1 + RETRIES * runs_again(call):
            yield "TWICE", record, f"{counts[call]} times"
        if besieged and call.rstrip(">") not in calls and "connects" not in call:
            yield "UNKNOWN", record, "a stranger's call ran"


# --- weights -----------------------------------------------------------------------------------------------------


def _of_pulls(records: Iterable[Record], stores: Mapping[str, Object]) -> Found:
    newest: dict[str, int] = {}
    for record in records:
        if record.op != "pull" or record.verdict != "ok":
            continue
        of = stores[record.object]
        version, ends = record.data["version"], record.data["ends"]
        lives = {stamped(value)[0] for values in ends.values() for value in values}
        shown = {name: [stamped(value) for value in values] for name, values in ends.items()}
        if lives != {record.held}:
            kind = "MIXTURE" if len(lives) > 1 else "CROSSED"
            yield kind, record, f"version {version} (since {record.data['since']}) has lives {lives}: {shown}"
        elif any(value != stamp(record.held, version, name, of.track) for name in ends for value in ends[name]):
            wrong = "MIXTURE" if of.track or len({v for vs in ends.values() for v in vs}) > 1 else "CORRUPT"
            yield wrong, record, f"version {version} (since {record.data['since']}) has (life, version) {shown}"
        if version < newest.get(record.handle, 0):
            yield "BACKWARDS", record, f"version {version} after {newest[record.handle]}"
        newest[record.handle] = version


# --- streams -----------------------------------------------------------------------------------------------------


def _items(records: Iterable[Record]) -> Iterator[tuple[str, int]]:
    """Producers and numbers, in the order in which they came."""
    for record in records:
        for _, _, producer, number, _ in record.data.get("items", ()):
            yield producer, number


def _put(records: Iterable[Record]) -> Iterator[tuple[str, int]]:
    """What is in for certain."""
    for record in records:
        if record.op == "put":
            yield from ((record.data["producer"], number) for number in record.data.get("ok", ()))


def _of_one_consumer(records: Sequence[Record], sure: Set[tuple[str, int]]) -> Found:
    """Nothing twice, and for each producer the order of what is ``sure`` to have been put when it was put.

    An item whose producer was told that it may be in or not may also come later.
    """
    last: dict[str, int] = {}
    came: set[tuple[str, int]] = set()
    for record in records:
        for producer, number in _items([record]):
            if (producer, number) in came:
                yield "DOUBLED", record, f"item {number} of {producer}"
            came.add((producer, number))
            if (producer, number) in sure:
                if number < last.get(producer, 0):
                    yield "ORDER", record, f"item {number} of {producer} came after {last[producer]}"
                last[producer] = max(number, last.get(producer, 0))


def _handles(records: Iterable[Record]) -> dict[str, list[Record]]:
    """What was taken by each."""
    taken: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.op in ("get", "next"):
            taken[record.handle].append(record)
    return taken


def _may_give_back(record: Record) -> bool:
    """Whether an item may have come for it too late, and gone back while later ones were on their way already."""
    return bool(record.data.get("cancelled")) or (record.op in ("get", "next") and record.verdict == "RpcTimeout")


def _of_queue(records: Sequence[Record], lives: Lives, parted: bool) -> Found:
    """Of one life."""
    first = records[0]
    consumers, put = _handles(records), set(_put(records))
    allowed = 0
    given_back = any(map(_may_give_back, records))
    for took in consumers.values():
        yield from (one for one in _of_one_consumer(took, put) if one[0] != "ORDER" or not given_back)
        limit = max(record.data.get("limit", 1) for record in took)
        # Told that something may be lost; or died with what was on its way, there or back, or noted nowhere yet.
        allowed += sum(record.verdict not in _ANSWERS for record in took) * limit
        died = lives.get((took[0].member, took[0].life), Life(None)).died
        if died is not None:
            back = sum(bool(record.data.get("cancelled")) and record.ended > died - _BACK_S for record in took)
            allowed += (2 + back) * limit
        # Likewise if a request was cancelled just when its answer could not arrive any more.
        allowed += limit if parted and given_back else 0
    came = [item for took in consumers.values() for item in _items(took)]
    doubled = {item for item in came if came.count(item) > 1} if len(came) != len(set(came)) else set()
    if doubled:
        yield "DOUBLED", first, f"{sorted(doubled)[:5]}"
    closed = [record for record in records if record.op == "close" and record.verdict == "ok"]
    if not closed:
        return
    if not any(record.verdict in ("end", "Closed") for took in consumers.values() for record in took):
        yield "NOT DRAINED", first, "nobody came to its end"
        return
    lost = sorted(put - set(came))
    if len(lost) > allowed:
        yield "LOST", first, f"{len(lost)} items, and {allowed} may be: {lost[:8]}"


def _of_topic(records: Sequence[Record]) -> Found:
    """Of one life."""
    begun = {item: record.began for record in records if record.op == "put" for item in _put([record])}
    taken = _handles(records)
    for subscribed in records:
        if subscribed.op != "subscribe" or subscribed.verdict != "ok":
            continue
        took = taken.get(subscribed.handle, [])
        found = _of_one_consumer(took, begun.keys())
        yield from (one for one in found if one[0] != "ORDER" or not any(map(_may_give_back, took)))
        if subscribed.data["policy"] == "block":
            due = {item for item, began in begun.items() if began > subscribed.ended}
            for record, text in _lost_in(took, due):
                yield "LOST", record, text


def _lost_in(took: Sequence[Record], due: Set[tuple[str, int]]) -> Iterator[tuple[Record, str]]:
    """Items of a subscription that holds up its publishers: each comes, unless an error says that some may not."""
    came = set(_items(took))
    for producer in sorted({by for by, _ in due}):
        mine = sorted(number for by, number in due if by == producer)
        at = [(-1, 0)]
        for place, record in enumerate(took):
            at += [(place, number) for by, number in _items([record]) if by == producer and (by, number) in due]
        if took and took[-1].verdict in ("end", "Closed"):
            at.append((len(took) - 1, mine[-1] + 1))
        for (place, before), (later, number) in pairwise(at):
            missed = [one for one in mine if before < one < number and (producer, one) not in came]
            told = any(record.verdict not in _ANSWERS for record in took[max(place, 0) : later + 1])
            if missed and not told:
                yield took[later], f"{len(missed)} of {producer} between {before} and {number}: {missed[:8]}"


# --- processes at rest -------------------------------------------------------------------------------------------

MIB = 1 << 20
#: Descriptors of the connections by torchrpc that a member made whose host has lost its power: nobody hangs up.
FDS_OF_A_SILENT_PEER = 19
#: Descriptors of the connections by torchrpc with a member on another host, more than with one on the same.
FDS_OF_A_FAR_PEER = 30
#: Descriptors that are open for a moment in the calm too.
FDS_SPARE = 6
ANONYMOUS = 24 * MIB
THREADS = 24
#: A process with shards may take this much more than it did in its first round (bytes).
_MORE_MEMORY = 64 * MIB


def judge_rest(first: Mapping[str, Any], now: Mapping[str, Any], silent: int, pooled: int) -> Iterator[str]:
    """What a process holds that it did not hold at first; so many members lost their host's power meanwhile.

    ``pooled``: bytes of its own memory that a lane may keep for later.
    """
    moved = now["far"] - first["far"]  # Ray starts a member again on any host
    if now["restless"]:
        yield f"RESTLESS: {now['restless']}"
    for what, allowed in (
        ("fds", FDS_OF_A_SILENT_PEER * silent + FDS_OF_A_FAR_PEER * moved + FDS_SPARE),
        ("threads", THREADS),
        ("arena", 0),
        ("under way", 0),
        ("anonymous", ANONYMOUS + pooled),
    ):
        grew = now[what] - first[what]
        if grew > allowed:
            detail = now["names"] if what == "threads" else ""
            yield f"LEAK: {what} grew by {grew} ({first[what]} -> {now[what]}) {detail}"


def judge_memory(records: Iterable[Record], most: dict[tuple[str, int], int]) -> Iterator[str]:
    """Of processes that are never at rest. ``most``: what each had in its first round; it is filled in."""
    now: dict[tuple[str, int], int] = defaultdict(int)
    for record in records:
        now[record.member, record.life] = max(now[record.member, record.life], record.data.get("memory", 0))
    for (member, life), memory in now.items():
        before = most.setdefault((member, life), memory)
        if memory > before + _MORE_MEMORY:
            yield f"LEAK: {member}.{life} has {memory // MIB} MiB, and had {before // MIB}"
