"""What reaches Ray's metrics of what a member counted; the metrics are a stand-in, tests/ray has Ray's own."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from typing import Any

import pytest

from raytorchrpc.calls.counters import BUCKETS, CallCounters
from raytorchrpc.calls.weight_counters import WeightCounters
from raytorchrpc.errors import PeerLost, RpcTimeout
from raytorchrpc.membership.ray_metrics import COUNTERS, GAUGES, Exporter, Reading

Key = tuple[str, frozenset[tuple[str, str]]]


class Meters(dict[str, Any]):
    """Adds up what is added, as a Prometheus would see it."""

    def __init__(self) -> None:
        super().__init__({name: functools.partial(self.add, name) for name in COUNTERS})
        self.update({name: functools.partial(self.set, name) for name in GAUGES})
        self.counters: Counter[Key] = Counter()
        self.gauges: dict[Key, float] = {}
        self.recorded = threading.Event()

    def add(self, name: str, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray refuses it"
        assert set(tags) == set(COUNTERS[name][1]), "Ray refuses what has not all its tags"
        self.counters[name, frozenset(tags.items())] += value  # type: ignore[assignment]
        self.recorded.set()

    def set(self, name: str, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(GAUGES[name][1])
        self.gauges[name, frozenset(tags.items())] = value

    def total(self, name: str, **tags: str) -> float:
        return sum(value for (known, its), value in self.counters.items() if known == name and tags.items() <= its)


@pytest.fixture
def counters() -> CallCounters:
    return CallCounters()


@pytest.fixture
def meters() -> Meters:
    return Meters()


def exporter(
    counters: CallCounters,
    meters: Meters,
    under_way: dict[str, tuple[int, int]] | None = None,
    weights: WeightCounters | None = None,
) -> Exporter:
    def read() -> Reading:
        return Reading(counters.rows("a"), under_way or {}, [] if weights is None else weights.rows("a"))

    return Exporter("g", "a", read, lambda: meters)


def call(counters: CallCounters, seconds: float, error: BaseException | None = None, lane: str = "socket") -> None:
    counters.sent("b", lane, 100)
    counters.finished("b", lane, lane, 10, seconds, error)


def test_each_difference_is_added_once(counters: CallCounters, meters: Meters) -> None:
    exporting = exporter(counters, meters)
    call(counters, 0.5)
    exporting.record()
    exporting.record()
    call(counters, 0.25, lane="shm")
    call(counters, 0.25)
    exporting.record()
    assert meters.total("raytorchrpc_calls", lane="socket", peer="b", member="a", group="g") == 2
    assert meters.total("raytorchrpc_calls", lane="shm") == 1
    assert meters.total("raytorchrpc_bytes", direction="out") == 300
    assert meters.total("raytorchrpc_bytes", direction="in") == 30
    assert meters.total("raytorchrpc_call_seconds_sum") == 1.0
    assert not meters.total("raytorchrpc_failures")


def test_failures_have_the_type_of_what_was_raised(counters: CallCounters, meters: Meters) -> None:
    exporting = exporter(counters, meters)
    call(counters, 0.1, PeerLost("b", "gone"))
    exporting.record()
    for _ in range(2):
        call(counters, 0.1, RpcTimeout("late"))
    call(counters, 0.1, KeyError("the method's own"))
    exporting.record()
    found = {error: meters.total("raytorchrpc_failures", error=error) for error in ("PeerLost", "RpcTimeout")}
    assert found == {"PeerLost": 1, "RpcTimeout": 2}
    assert meters.total("raytorchrpc_failures", error="KeyError") == 1
    assert sum(row.failures for row in counters.rows("a")) == 4


def test_the_buckets_are_cumulative_and_hold_every_call(counters: CallCounters, meters: Meters) -> None:
    for seconds in (0.0, 0.5e-6, 100e-6, 3e-3, 7000.0):
        call(counters, seconds)
    exporter(counters, meters).record()

    def at_most(bound: str) -> float:
        return meters.total("raytorchrpc_call_seconds_bucket", le=bound)

    assert [at_most(bound) for bound in ("1e-06", "6.4e-05", "0.000128", "0.004096")] == [2, 2, 3, 4]
    assert at_most("67.1089") == 4 and at_most("+Inf") == 5
    bounds = {dict(tags)["le"] for name, tags in meters.counters if name == "raytorchrpc_call_seconds_bucket"}
    assert len(bounds) == BUCKETS
    (row,) = counters.rows("a")
    assert row.finished == 5


def test_what_is_in_flight_is_nothing_once_the_member_has_left(counters: CallCounters, meters: Meters) -> None:
    under_way = {"b": (3, 400), "c": (0, 0)}
    exporting = exporter(counters, meters, under_way)

    def gauges() -> dict[tuple[str, str], float]:
        return {(name, dict(tags)["peer"]): value for (name, tags), value in meters.gauges.items()}

    exporting.record()
    assert gauges() == {("raytorchrpc_calls_in_flight", "b"): 3, ("raytorchrpc_bytes_in_flight", "b"): 400}
    exporting.record(last=True)
    assert set(gauges().values()) == {0}
    under_way["b"] = (2, 1)
    exporting.record()
    assert gauges()["raytorchrpc_calls_in_flight", "b"] == 2
    del under_way["b"]  # removed from the group
    exporting.record()
    assert set(gauges().values()) == {0}


def test_the_last_figures_are_recorded_at_the_end(counters: CallCounters, meters: Meters) -> None:
    stop = exporter(counters, meters).start(3600)
    call(counters, 0.1)
    stop()
    assert meters.total("raytorchrpc_calls") == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "raytorchrpc-a-metrics"]


def test_metrics_that_fail_are_told_once_and_tried_again(
    counters: CallCounters, meters: Meters, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []

    def make() -> Any:
        tries.append(1)
        if len(tries) < 4:
            raise RuntimeError("no agent here")
        return meters

    call(counters, 0.1)
    stop = Exporter("g", "a", lambda: Reading(counters.rows("a"), {}, []), make).start(0.01)
    assert meters.recorded.wait(10)
    stop()
    assert [record.getMessage() for record in caplog.records] == [
        "a cannot export its counters to Ray's metrics: no agent here"
    ]


def test_weights_have_their_version_and_the_bytes_of_it(counters: CallCounters, meters: Meters) -> None:
    weights = WeightCounters()
    exporting = exporter(counters, meters, weights=weights)

    def gauges() -> dict[str, float]:
        return {
            dict(tags)[tag]: value
            for (name, tags), value in meters.gauges.items()
            for tag in ({"role", "state"} & dict(tags).keys())
        }

    pull = weights.begin_pull(("policy", "t0"))
    pull.expect(3, 1000)
    pull.add(600)
    exporting.record()
    assert gauges() == {"pulled": 0, "arriving": 3, "published": 0, "brought": 600, "missing": 400, "served": 0}
    assert meters.total("raytorchrpc_weight_bytes", direction="in", store="policy", home="t0") == 600
    pull.add(400)
    weights.end_pull(pull, failed=False)
    weights.end_pull(weights.begin_pull(("policy", "t0")), failed=True)
    weights.published(("mine", "a"), 8, 50)
    weights.served(("policy", "t0"), 3, 1000, "b")  # to a member that this one relays to
    exporting.record()
    exporting.record()
    assert meters.total("raytorchrpc_weight_pulls", outcome="ok") == 1
    assert meters.total("raytorchrpc_weight_pulls", outcome="failed") == 1
    assert meters.total("raytorchrpc_weight_bytes", direction="in") == 1000
    assert meters.total("raytorchrpc_weight_bytes", direction="out") == 1000
    of_policy = {key: value for key, value in meters.gauges.items() if ("store", "policy") in key[1]}
    assert sorted(of_policy.values()) == [0, 0, 0, 3, 1000, 1000]
