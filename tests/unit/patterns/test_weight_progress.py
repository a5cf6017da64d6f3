"""What members count of the weights that they pull, publish and serve, and what a trace has of it."""

from __future__ import annotations

import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc import Member
from raytorchrpc.calls.counters import WeightStats
from raytorchrpc.calls.spans import Event, Tracer
from raytorchrpc.errors import PeerLost
from tests.polling import wait_until
from tests.unit import members as members_module
from tests.unit.members import TENSORS, Members

#: Bytes of each tensor, and of a model.
SIZE = 400
MODEL = 5 * SIZE


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """``members`` asked for after this are on two hosts: the home is on one of its own."""

    def member(name: str, rank: int, incarnation: int = 0) -> Member:
        return Member(rank, name, None, "far" if name == "home" else "near", 0, name, rank + 1, incarnation)

    monkeypatch.setattr("raytorchrpc.patterns.weights.source_pull._WORTH_RELAYING", 1)
    monkeypatch.setattr(members_module, "_member", member)


def model(value: float) -> dict[str, torch.Tensor]:
    return {f"layer{number}": torch.full((SIZE // 4,), value) for number in range(5)}


def publish(members: Members, value: float) -> None:
    with members.acting("home"):
        rtr.WeightStore("w", keep=2).publish(model(value))


def stats(members: Members, name: str, home: str = "home") -> WeightStats:
    (row,) = members.members[name].weights.rows(name)
    assert (row.member, row.store, row.home) == (name, "w", home)
    return row


def test_readers_and_the_publisher_count_bytes_by_version(members: Members) -> None:
    for value in (1.0, 2.0):
        publish(members, value)
        for reader in ("a", "b"):
            with members.acting(reader):
                rtr.WeightStore.find("w").pull(model(0.0))
    with members.acting("a"):
        store = rtr.WeightStore.find("w")
        assert store.pull(model(2.0), since=2) == 2  # brings nothing
        assert store.pull({"layer0": model(0.0)["layer0"]}, version=1, only="layer0") == 1
    assert wait_until(lambda: stats(members, "home").bytes_out == 4 * MODEL + SIZE, 20)  # they report without waiting
    reader, home = stats(members, "a"), stats(members, "home")
    assert (reader.pulled, reader.arriving, reader.brought, reader.missing) == (1, 0, SIZE, 0)
    assert (reader.pulls, reader.failures, reader.bytes_in) == (4, 0, 2 * MODEL + SIZE)
    assert (home.published, home.published_bytes) == (2, MODEL)
    assert home.served == ((1, 2 * MODEL + SIZE), (2, 2 * MODEL)) and home.served_of_newest == 2 * MODEL
    assert stats(members, "b").brought == MODEL


def test_a_pull_under_way_shows_what_is_still_to_come(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that fails then: what it has brought counts, and the version does not."""
    monkeypatch.setattr("raytorchrpc.patterns.weights.source_pull.MESSAGE_BYTES", SIZE)
    publish(members, 1.0)
    seen: list[tuple[int, int, int]] = []

    def look(method: str) -> bool:
        if method == TENSORS:
            now = stats(members, "a")
            seen.append((now.arriving, now.brought, now.missing))
            if len(seen) == 8:
                raise PeerLost("home", "the test broke the connection", may_have_run=False)
        return False

    members.lanes["a"].holds = look
    with members.acting("a"):
        store = rtr.WeightStore.find("w")
        store.pull(model(0.0))
        assert seen == [(1, brought, MODEL - brought) for brought in range(0, MODEL, SIZE)]
        publish(members, 2.0)
        with members.acting("a"), pytest.raises(PeerLost):
            store.pull(model(0.0))
    assert seen[5:] == [(2, 0, MODEL), (2, SIZE, MODEL - SIZE), (2, 2 * SIZE, MODEL - 2 * SIZE)]
    now = stats(members, "a")
    assert (now.pulled, now.arriving, now.brought, now.missing) == (1, 0, MODEL, 0)
    assert (now.pulls, now.failures, now.bytes_in) == (1, 1, MODEL + 2 * SIZE)
    assert wait_until(lambda: stats(members, "home").served == ((1, MODEL), (2, 2 * SIZE)), 20)


def test_each_publisher_counts_its_shards_and_a_reader_all_of_them(members: Members) -> None:
    def store() -> rtr.WeightStore:
        return rtr.WeightStore("w", publishers=("a", "b"))

    for number, name in enumerate(("a", "b")):
        with members.acting(name):
            store().publish({"w": rtr.Shard(torch.full((3,), 1.0), (6,), (3 * number,))})
    with members.acting("home"):
        handle, whole = store(), torch.zeros(6)
        for _ in range(2):  # the second one follows the plan of the first
            handle.pull({"w": whole})
        handle.pull({"w": rtr.Shard(torch.zeros(2), (6,), (3,))})
    reader = stats(members, "home", "a")
    assert (reader.pulled, reader.brought, reader.bytes_in) == (1, 8, 2 * 24 + 8)
    served = [((1, 24),), ((1, 32),)]
    assert wait_until(lambda: [stats(members, name, "a").served for name in ("a", "b")] == served, 20)


def test_a_member_that_feeds_others_counts_what_they_bring(two_hosts: None, members: Members) -> None:
    """The home, on another host, sends everything once."""
    publish(members, 1.0)
    for reader in ("a", "b"):
        with members.acting(reader):
            mine = model(0.0)
            rtr.WeightStore("w", home="home", keep=2).pull(mine)
            assert all(tensor.eq(1).all() for tensor in mine.values())
        now = stats(members, reader)
        assert (now.pulled, now.brought, now.missing, now.bytes_in) == (1, MODEL, 0, MODEL)
    assert wait_until(lambda: all(stats(members, name).served == ((1, MODEL),) for name in ("a", "home")), 20)


def test_a_prefetch_counts_as_a_pull(members: Members) -> None:
    publish(members, 1.0)
    with members.acting("a"):
        handle = rtr.WeightStore.find("w").prefetch(model(0.0))
        assert handle.wait(20) == 1
    assert (stats(members, "a").pulled, stats(members, "a").brought) == (1, MODEL)


def test_a_trace_has_pulls_and_publishing_as_spans(members: Members) -> None:
    tracers = {name: Tracer(rank, 100) for rank, name in enumerate(("home", "a"))}
    for name, tracer in tracers.items():
        members.members[name].trace(tracer)
    publish(members, 1.0)
    with members.acting("a"):
        store = rtr.WeightStore.find("w")
        store.pull(model(0.0))
        with pytest.raises(rtr.NotFound):
            store.pull(model(0.0), version=7)

    def spans(name: str, kind: str) -> list[Event]:
        return [event for event in tracers[name].taken()[0] if event.kind == kind]

    (published,), (pulled, failed) = spans("home", "publish"), spans("a", "pull")
    about = {"version": 1, "bytes": MODEL, "home": "home"}
    assert (published.name, published.about) == ("publish w", about)
    assert (pulled.name, pulled.about) == ("pull w", about)
    assert failed.about == {"version": 0, "bytes": 0, "home": "home", "error": "NotFound"}
    requests = [event for event in spans("a", "call") if event.begin <= pulled.end]
    inside = [event for event in requests if event.begin >= pulled.begin and event.thread == pulled.thread]
    assert inside and all(event.end <= pulled.end for event in inside)
