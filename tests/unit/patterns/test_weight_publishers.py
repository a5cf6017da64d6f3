"""Stores with several publishers: which versions exist, what is kept of them, and what readers remember of them."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc.patterns.weights.publishers import Coordinator, Publisher
from tests.unit.callees import Deadlines, DeferredReply
from tests.unit.members import Members

LONG = 20.0
BOTH = ("a", "b")


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    deadlines = Deadlines()
    peers = SimpleNamespace(route=lambda rank: SimpleNamespace(member=SimpleNamespace(name=BOTH[rank])))
    local: Any = SimpleNamespace(deadlines=deadlines, peers=peers, me=SimpleNamespace(name="nobody"))
    local.outgoing = SimpleNamespace(call=lambda *_: None)
    local.services = SimpleNamespace(find=lambda *_: SimpleNamespace(retire_before=lambda _: None))
    made = Coordinator(local, "w", (1, False, BOTH))
    made.instance_id = 7
    yield made
    deadlines.stop()


def until() -> float:
    return time.monotonic() + LONG


FIRST, SECOND = Publisher(0, "a", 1), Publisher(1, "b", 2)


@pytest.mark.parametrize("notice", ["loss", "group", "publisher"])
def test_a_publisher_that_waits_for_one_that_restarts_goes_on(coordinator: Coordinator, notice: str) -> None:
    coordinator.staged(SECOND, 1, until())
    assert coordinator.staged(FIRST, 1, until()) == [1]
    for version in (2, 3):
        coordinator.staged(FIRST, version, until())
    waiting = coordinator.staged(FIRST, 4, until())
    assert isinstance(waiting, DeferredReply) and not waiting.done()
    if notice == "loss":
        coordinator.keep_only(1, None)
    elif notice == "group":
        coordinator.keep_only(1, "b again")
    else:
        coordinator.next_version(SECOND._replace(process="b again"), 0)
    assert waiting.outcome() == [1], "what was staged is void, and need not be kept"
    assert coordinator.next_version(FIRST, 4) == (5, [1])


def test_what_was_staged_while_a_publisher_was_lost_never_exists_after_its_restart(coordinator: Coordinator) -> None:
    for publisher in (SECOND, FIRST):
        coordinator.staged(publisher, 1, until())
    coordinator.keep_only(1, None)
    assert coordinator.staged(FIRST, 2, until()) == [1, 2]
    coordinator.keep_only(1, "b again")
    again = SECOND._replace(process="b again", instance=3)
    assert coordinator.next_version(again, 0) == (3, [1])
    assert coordinator.staged(again, 2, until()) == [1]
    with pytest.raises(rtr.NotFound):
        coordinator.look(2)


# --- with members --------------------------------------------------------------------------------------------


def store(members: Members, name: str, publishers: tuple[str, ...] = BOTH, **options: Any) -> rtr.WeightStore:
    with members.acting(name):
        return rtr.WeightStore("w", publishers=publishers, **options)


def half(number: int, value: float, rows: int = 8, extra: float | None = None) -> dict[str, Any]:
    """One publisher's rows; ``extra``: a tensor of its own, before them."""
    shard = rtr.Shard(torch.full((rows // 2, 4), value), (rows, 4), (number * rows // 2, 0))
    return ({} if extra is None else {f"extra{number}": torch.full((3,), extra)}) | {"matrix": shard}


def publish(members: Members, version: int | None, value: float, **options: Any) -> list[int]:
    found = []
    for number, name in enumerate(BOTH):
        with members.acting(name):
            found.append(rtr.WeightStore("w", publishers=BOTH, **options).publish(half(number, value), version))
    return found


def test_versions_in_vain_do_not_pile_up(members: Members) -> None:
    mine = store(members, "a")
    with members.acting("a"):
        for version in (1, 2):
            mine.publish(half(0, 1.0), version)
        for version in range(3, 9):
            with pytest.raises(rtr.RpcTimeout, match="but b not even version 1"):
                mine.publish(half(0, 1.0), version, timeout=0.01)
        assert len(members.shards("a")[0]._versions) <= 3
    with members.acting("b"):
        other = rtr.WeightStore("w", publishers=BOTH)
        assert [other.publish(half(1, 1.0)) for _ in range(2)] == [1, 2]
    assert publish(members, None, 3.0) != [3, 3], "that number is used"
    assert publish(members, 20, 3.0) == [20, 20]
    assert list(members.shards("a")[0]._versions) == [20]


def test_a_publisher_that_was_late_catches_up_without_waiting(members: Members) -> None:
    """It does not wait for versions for which the other waited in vain, which will never exist."""
    for number, name in enumerate(BOTH):
        with members.acting(name):
            mine = rtr.WeightStore("w", publishers=BOTH)
            for version in range(1, 7):
                if number or version < 3:
                    mine.publish(half(number, 1.0), timeout=0.01)
                else:
                    with pytest.raises(rtr.RpcTimeout):
                        mine.publish(half(number, 1.0), timeout=0.01)
    assert publish(members, None, 7.0) == [7, 7]
    with members.acting("home"):
        model = {"matrix": torch.zeros(8, 4)}
        assert pulled(members, store(members, "home"), model) == 7
    assert model["matrix"].unique().tolist() == [7.0]


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_publishers_that_are_late_are_named(members: Members, timeout: float) -> None:
    for number, newest in enumerate(("b 0, a 1", "a 1, b 1")):
        with members.acting(BOTH[number]):
            rtr.WeightStore("w", publishers=BOTH).publish(half(number, 1.0))
        with members.acting("home"), pytest.raises(rtr.Empty, match=f"in time; .*the newest of each is: {newest}"):
            rtr.WeightStore("w", publishers=BOTH).wait(number + 1, timeout)


def pulled(members: Members, mine: rtr.WeightStore, model: dict[str, Any], **options: Any) -> int:
    with members.acting("home"):
        return mine.pull(model, **options)


def test_a_plan_does_not_outlive_the_layout_of_a_publisher_that_restarted(members: Members) -> None:
    publish(members, 1, 1.0)
    mine, matrix = store(members, "home"), torch.zeros(8, 4)
    assert pulled(members, mine, {"matrix": matrix}, strict=False) == 1
    members.forget_shards("b")
    for number, name in ((1, "b"), (0, "a")):
        with members.acting(name):
            extra = 99.0 if name == "b" else None
            rtr.WeightStore("w", publishers=BOTH).publish(half(number, 5.0, extra=extra), 5)
    assert pulled(members, mine, {"matrix": matrix}, strict=False) == 5
    assert matrix.unique().tolist() == [5.0]


def test_since_counts_no_version_that_never_was(members: Members) -> None:
    """SECOND restarted publisher publishes a number again; its next version is compared with it."""
    for version in (1, 2):
        publish(members, version, float(version), track=True)
    mine, matrix = store(members, "home", track=True), torch.zeros(8, 4)
    assert pulled(members, mine, {"matrix": matrix}) == 2
    members.forget_shards("b")
    with members.acting("b"):
        rtr.WeightStore("w", publishers=BOTH, track=True).publish(half(1, 3.0), 2)
    publish(members, 3, 3.0, track=True)
    assert pulled(members, mine, {"matrix": matrix}, since=2) == 3
    assert matrix.unique().tolist() == [3.0]


@pytest.mark.parametrize("changes", [(), (0,), (1,), (0, 1)])
def test_since_brings_what_changed_at_any_publisher(members: Members, changes: tuple[int, ...]) -> None:
    publish(members, 1, 1.0, track=True)
    mine, matrix = store(members, "home", track=True), torch.zeros(8, 4)
    pulled(members, mine, {"matrix": matrix})
    for number, name in enumerate(BOTH):
        with members.acting(name):
            value = 2.0 if number in changes else 1.0
            rtr.WeightStore("w", publishers=BOTH, track=True).publish(half(number, value), 7)
    assert pulled(members, mine, {"matrix": matrix}, since=1) == 7
    assert [float(matrix[4 * number, 0]) for number in (0, 1)] == [2.0 if n in changes else 1.0 for n in (0, 1)]


def test_stores_of_one_name_with_other_homes_leave_each_other_alone(members: Members) -> None:
    for publishers, value in ((BOTH, 1.0), (("b", "home"), 2.0)):
        for number, name in enumerate(publishers):
            with members.acting(name):
                rtr.WeightStore("w", publishers=publishers).publish(half(number, value))
    for publishers, value in ((BOTH, 1.0), (("b", "home"), 2.0)):
        matrix = torch.zeros(8, 4)
        assert pulled(members, store(members, "home", publishers), {"matrix": matrix}) == 1
        assert matrix.unique().tolist() == [value]


def test_the_memory_of_shards_ends_with_the_process_of_the_first_publisher(members: Members) -> None:
    publish(members, 1, 1.0)
    publish(members, 2, 1.0)
    (mine,) = members.shards("b")
    memory = weakref.ref(next(iter(mine._versions.values())).memory)
    mine.keep_only(1, members.members["b"].peers.route("a").token)
    assert memory() is not None, "it was only away"
    mine.keep_only(1, "a again")
    gc.collect()
    assert memory() is None and not any(mine.pool._spare.values())


def test_a_pull_of_a_version_that_is_gone_for_good_does_not_wait(members: Members) -> None:
    publish(members, 1, 1.0)
    publish(members, 2, 1.0)
    mine, matrix = store(members, "home"), torch.zeros(8, 4)
    with pytest.raises(rtr.NotFound, match="version 1 "):
        pulled(members, mine, {"matrix": matrix}, version=1, timeout=20, through_restarts=True)
    members.members["a"].services._served.clear()  # as after a restart
    publish(members, 1, 3.0)
    assert pulled(members, mine, {"matrix": matrix}, timeout=20, through_restarts=True) == 1
    assert matrix.unique().tolist() == [3.0]
    assert pulled(members, mine, {"matrix": matrix}) == 1, "the handle refers to the new store"


@pytest.mark.parametrize("publishers", [None, BOTH])
def test_a_deleted_store_frees_its_memory_everywhere_and_its_name(members: Members, publishers: Any) -> None:
    names, home = publishers or ("a",), {"home": "a"} if publishers is None else {"publishers": publishers}

    def publish(value: float) -> None:
        for number, name in enumerate(names):
            with members.acting(name):
                shard = torch.full((2,), value)
                whole = shard if publishers is None else rtr.Shard(shard, (4,), (2 * number,))
                rtr.WeightStore("w", **home).publish({"w": whole})

    def objects() -> list[tuple[str, str]]:
        kinds = "weight"
        return [key for local in members.members.values() for key in local.services._served if kinds in key[0]]

    publish(1.0)
    model = {"w": torch.zeros(2 * len(names))}
    with members.acting("home"):
        store, other = rtr.WeightStore("w", **home), rtr.WeightStore("w", **home)
        assert store.pull(model) == 1 and other.version() == 1
        memory = [weakref.ref(members.served("weight store", "w", "a"))]
        reading = next(iter(members.shards("a")), None) or members.served("weight store", "w", "a")
        lease = reading.lease(0, 1, None, 0, LONG).lease
        with pytest.raises(rtr.ConfigurationError, match=r"is being read \(1 pulls or views\)"):
            store.delete()
        reading.pool.release(lease)
        del reading
        store.delete()
        for old in (store, other):
            with pytest.raises(rtr.NotFound, match="was deleted"):
                old.pull(model)
        assert objects() == []
        gc.collect()
        assert memory[0]() is None
    publish(2.0)
    with members.acting("home"):
        assert rtr.WeightStore("w", **home).pull(model) == 1 and model["w"].tolist() == [2.0] * len(model["w"])
