"""What reaches Ray's metrics of what a member counted; the metrics are a stand-in, tests/ray has Ray's own."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import raytorchrpc as rtr
from raytorchrpc.calls.counters import BUCKETS, CallCounters, WeightCounters
from raytorchrpc.calls.metrics import METRICS, MemberStats, QueueStats, Reading
from raytorchrpc.calls.spans import Tracer
from raytorchrpc.errors import PeerLost, RpcTimeout
from raytorchrpc.group.status import Exporter, reading
from tests.unit.members import Members

Key = tuple[str, frozenset[tuple[str, str]]]


class Meters(dict[str, Any]):
    """Adds up what is added, as a Prometheus would see it."""

    def __init__(self) -> None:
        super().__init__(
            {name: functools.partial(getattr(self, metric.kind), name) for name, metric in METRICS.items()}
        )
        self.counters: Counter[Key] = Counter()
        self.gauges: dict[Key, float] = {}
        self.recorded = threading.Event()

    def counter(self, name: str, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray refuses it"
        self.check(name, tags)
        self.counters[name, frozenset(tags.items())] += value  # type: ignore[assignment]
        self.recorded.set()

    def gauge(self, name: str, value: float, tags: dict[str, str]) -> None:
        self.check(name, tags)
        self.gauges[name, frozenset(tags.items())] = value

    def check(self, name: str, tags: dict[str, str]) -> None:
        assert set(tags) == {"group", "member", *METRICS[name].labels}, "Ray refuses what has not all its tags"
        assert "".join(tags.values()).isascii(), "Ray refuses it"

    def total(self, name: str, **tags: str) -> float:
        return sum(value for (known, its), value in self.counters.items() if known == name and tags.items() <= its)

    def shown(self, name: str, label: str) -> dict[str, float]:
        return {dict(tags)[label]: value for (known, tags), value in self.gauges.items() if known == name}


class Source:
    """What a member has counted, and its exporter."""

    def __init__(self) -> None:
        self.counters, self.weights, self.meters = CallCounters(), WeightCounters(), Meters()
        self.queues: list[QueueStats] = []
        self.member = MemberStats("a")

    def read(self) -> Reading:
        return Reading(self.counters.rows("a"), self.queues, self.weights.rows("a"), [self.member])

    def exporter(self, fine: bool = True) -> Exporter:
        return Exporter("g", "a", self.read, fine, lambda: self.meters)

    def call(self, seconds: float, error: BaseException | None = None, lane: str = "socket", peer: str = "b") -> None:
        sent = self.counters.sent(peer, lane, "step", 100)
        self.counters.finished(sent, lane, 10, seconds, error)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def members() -> Iterator[Members]:
    with Members(rtr.GroupConfig()) as made:
        yield made


def test_each_difference_is_added_once(source: Source) -> None:
    exporting, meters = source.exporter(), source.meters
    source.call(0.5)
    exporting.record()
    exporting.record()
    source.call(0.25, lane="shm")
    source.call(0.25, PeerLost("b", "gone"))
    for _ in range(2):
        source.call(0.0, RpcTimeout("late"))
    exporting.record()
    assert meters.total("calls", lane="socket", method="step", member="a", group="g") == 4
    assert meters.total("calls", lane="shm") == 1
    assert (meters.total("bytes", direction="out"), meters.total("bytes", direction="in")) == (500, 50)
    assert meters.total("call_seconds_sum") == 1.0
    errors = {error: meters.total("failures", error=error) for error in ("PeerLost", "RpcTimeout")}
    assert errors == {"PeerLost": 1, "RpcTimeout": 2} and meters.total("failures") == 3


def test_names_that_are_not_ascii_are_exported_too(source: Source) -> None:
    source.call(0.5, lane="größer")
    source.exporter().record()
    assert source.meters.total("calls", lane="gr\\xf6\\xdfer") == 1


def test_the_buckets_are_cumulative_and_hold_every_call(source: Source) -> None:
    for seconds in (0.0, 0.5e-6, 100e-6, 3e-3, 7000.0):
        source.call(seconds)
    source.exporter().record()

    def at_most(bound: str) -> float:
        return source.meters.total("call_seconds_bucket", le=bound)

    assert [at_most(bound) for bound in ("1e-06", "6.4e-05", "0.000128", "0.004096")] == [2, 2, 3, 4]
    assert at_most("67.1089") == 4 and at_most("+Inf") == 5
    bounds = {dict(tags)["le"] for name, tags in source.meters.counters if name == "call_seconds_bucket"}
    assert len(bounds) == BUCKETS


def test_gauges_are_0_for_what_has_gone_and_once_the_member_has_left(source: Source) -> None:
    source.member = MemberStats("a", in_flight={"b": 2, "c": 1}, bytes_in_flight=400)
    source.queues = [QueueStats("a", "queue", "batches", "", items=5, oldest_s=2.0, putting=("b", "b"))]
    exporting, meters = source.exporter(), source.meters
    exporting.record()
    assert meters.shown("calls_in_flight", "member") == {"a": 3}
    assert meters.shown("queue_waiting", "operation") == {"put": 2, "get": 0}
    assert meters.shown("queue_items", "name") == {"batches": 5}
    source.queues = []
    exporting.record()
    assert meters.shown("queue_items", "name") == meters.shown("queue_oldest_seconds", "name") == {"batches": 0}
    assert meters.shown("bytes_in_flight", "member") == {"a": 400}
    exporting.record(last=True)
    assert set(meters.gauges.values()) == {0}


def test_totals_have_as_many_series_whatever_the_number_of_peers_methods_and_subscribers() -> None:
    def series(size: int, fine: bool) -> int:
        source = Source()
        for number in range(size):
            source.call(0.1, KeyError(), peer=f"peer{number}")
            source.counters.sent(f"peer{number}", "socket", f"method{number}", 1)
            source.queues.append(QueueStats("a", "topic", "news", f"peer{number}", items=number, oldest_s=number))
        source.member = MemberStats("a", in_flight={f"peer{number}": 1 for number in range(size)})
        source.exporter(fine).record()
        if not fine:
            assert source.meters.shown("queue_items", "name") == {"news": sum(range(size))}
            assert source.meters.shown("queue_oldest_seconds", "name") == {"news": size - 1}, "not the sum"
            assert not source.meters.total("call_seconds_bucket")
        return len(source.meters.counters) + len(source.meters.gauges)

    assert series(2, fine=False) == series(50, fine=False)
    assert (series(50, fine=True) - series(2, fine=True)) / 48 < 10, "a few for each method, and each subscriber"


def test_a_member_exports_by_itself_and_once_more_when_it_leaves(members: Members, source: Source) -> None:
    local = members.members["a"]
    late, before = Source(), {*threading.enumerate()}
    late.exporter().start(local, 3600)
    assert {*threading.enumerate()} <= before, "it needs no thread of its own"
    late.call(0.1)
    source.exporter().start(local, 0.01)
    source.call(0.1)
    assert source.meters.recorded.wait(10)
    members.close()
    assert late.meters.total("calls") == 1


def test_metrics_that_fail_are_told_once_and_tried_again(
    members: Members, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []

    def make() -> Any:
        tries.append(1)
        if len(tries) < 4:
            raise RuntimeError("no agent here")
        return source.meters

    source.call(0.1)
    Exporter("g", "a", source.read, True, make).start(members.members["a"], 0.01)
    assert source.meters.recorded.wait(10)
    assert [record.getMessage() for record in caplog.records] == [
        "a cannot export its counters to Ray's metrics: no agent here"
    ]


def test_weights_have_their_version_and_the_bytes_of_it(source: Source) -> None:
    exporting, meters, weights = source.exporter(), source.meters, source.weights
    pull = weights.begin_pull(("policy", "t0"))
    pull.expect(3, 1000)
    pull.add(600)
    exporting.record()
    assert meters.shown("weight_version", "role") == {"pulled": 0, "arriving": 3, "published": 0}
    assert meters.shown("weight_version_bytes", "state") == {"brought": 600, "missing": 400, "served": 0}
    pull.add(400)
    weights.end_pull(pull, failed=False)
    weights.end_pull(weights.begin_pull(("policy", "t0")), failed=True)
    weights.served(("policy", "t0"), 3, 1000, "b")  # to a member that this one relays to
    exporting.record()
    exporting.record()
    assert meters.total("weight_pulls", outcome="ok") == meters.total("weight_pulls", outcome="failed") == 1
    assert meters.total("weight_bytes", direction="in") == meters.total("weight_bytes", direction="out") == 1000
    assert meters.shown("weight_version", "role") == {"pulled": 3, "arriving": 0, "published": 0}


def test_a_member_reads_its_queues_topics_and_calls_by_name(members: Members) -> None:
    with members.acting("home"):
        rtr.Topic("news")
        rtr.Queue("batches", maxsize=2).put_many([1, 2])
    tracer = Tracer(1, 100)
    members.members["a"].trace(tracer)
    with members.acting("b"):
        subscription = rtr.Topic("news", home="home").subscribe("drop_oldest", maxsize=1)
    with members.acting("a"):
        mine, news = rtr.Queue("batches", home="home", maxsize=2), rtr.Topic("news", home="home")
        mine.get()
        news.publish_many([1, 2, 3])
        mine.put(3)
        with pytest.raises(rtr.Full):
            mine.put(4, timeout=0)
    home = reading(members.members["home"])
    news_row, of_b, batches = home.queues
    assert (batches.kind, batches.name, batches.items, batches.put, batches.taken) == ("queue", "batches", 2, 3, 1)
    assert batches.oldest_s > 0 and batches.bytes > 0
    assert (news_row.name, news_row.subscriber, news_row.put, news_row.items) == ("news", "", 3, 0)
    assert (of_b.subscriber, of_b.items, of_b.dropped, of_b.taken) == ("b", 1, 2, 0)
    with members.acting("b"):
        subscription.get()
        subscription.cancel()
        topic_again = rtr.Topic("news", home="home").subscribe()
        assert topic_again
    of_b = reading(members.members["home"]).queues[1]
    assert (of_b.taken, of_b.dropped) == (1, 2), "what an earlier subscription counted is not lost"
    methods = {row.method for row in reading(members.members["a"]).calls}
    assert {"queue batches.take", "queue batches.put", "topic news.put"} <= methods
    assert {row.peer for row in reading(members.members["a"], peers=False).calls} == {""}
    assert {"home.queue batches.put", "home.topic news.put"} <= {event.name for event in tracer.taken()[0]}
