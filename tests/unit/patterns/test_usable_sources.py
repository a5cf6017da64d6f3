"""Publishers that are lost or restarted: pulls go on with others that have the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from tests.polling import wait_until
from tests.unit.members import LEASE, Members, in_thread

LONG = 20.0
BOTH = ("a", "b")


def publish(members: Members, value: float) -> None:
    """Each publisher has half of ``matrix``, and all of ``copy``."""
    for number, name in enumerate(BOTH):
        with members.acting(name):
            shard = rtr.Shard(torch.full((4, 4), value), (8, 4), (4 * number, 0))
            rtr.WeightStore("w", publishers=BOTH).publish({"matrix": shard, "copy": torch.full((5,), value)})


class Reader:
    """``home``, which pulls by one handle."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self.model = {"matrix": torch.zeros(8, 4), "copy": torch.zeros(5)}
        with members.acting("home"):
            self._store = rtr.WeightStore("w", publishers=BOTH)

    def pull(self, only: str | None = None, **options: Any) -> tuple[int, float]:
        """Returns the version, and how long it took."""
        began = time.monotonic()
        with self._members.acting("home"):
            version = self._store.pull(self.model, only=only, **options)
        assert all(self.model[name].unique().tolist() == [version] for name in ([only] if only else self.model))
        return version, time.monotonic() - began


def hold_lease(members: Members, number: int) -> Callable[[], int]:
    """Hold the reader's request for a lease of this number, from 0; returns how many there were."""
    asked: list[str] = []

    def holds(method: str) -> bool:
        if method == LEASE:
            asked.append(method)
        return method == LEASE and len(asked) == number + 1

    members.lanes["home"].holds = holds
    return lambda: len(asked)


def leases(members: Members, name: str) -> int:
    reader = members.members["home"].me.rank
    return sum(len(its.pool.leases_of(reader)) for its in members.shards(name))


def test_what_one_publisher_alone_has_waits_for_it(members: Members) -> None:
    publish(members, 1.0)
    reader = Reader(members)
    reader.pull()
    publish(members, 2.0)
    asked = hold_lease(members, 1)
    pulled = in_thread(lambda: reader.pull(timeout=LONG))
    assert not wait_until(lambda: asked() > 2, 0.5), "it is asked once"
    members.lanes["home"].release()
    assert pulled()[0] == 2
    assert wait_until(lambda: not any(leases(members, name) for name in BOTH), 10), "all leases end"


def test_a_publisher_that_stays_silent_costs_the_timeout_and_no_more(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytorchrpc.patterns.handle.ANSWER_S", 0.5)
    monkeypatch.setattr("raytorchrpc.patterns.handle._ANSWER_NOW_S", 0.5)
    publish(members, 1.0)
    reader, began = Reader(members), time.monotonic()
    members.lanes["home"].holds = lambda method: method == LEASE
    with pytest.raises(rtr.RpcTimeout):
        reader.pull(timeout=0.6)
    assert time.monotonic() - began < LONG / 2
    members.lanes["home"].release()
    assert wait_until(lambda: not any(leases(members, name) for name in BOTH), 10), "all leases end"
    assert reader.pull()[0] == 1


@pytest.mark.parametrize("given", [None, 1])
def test_what_others_have_does_not_wait_for_a_restarted_publisher_to_publish(
    members: Members, given: int | None
) -> None:
    publish(members, 1.0)
    reader = Reader(members)
    for name in BOTH[1:]:
        members.forget_shards(name)
    for _ in range(2):
        version, took = reader.pull("copy", version=given)
        assert version == 1 and took < LONG / 4
    with pytest.raises(rtr.NotFound):  # nobody else has its rows
        reader.pull(version=1)
    with pytest.raises((rtr.NotFound, rtr.Empty)):
        reader.pull(timeout=0.3)


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("given", [None, 1])
def test_a_version_that_every_publisher_has_lost_is_not_pulled(
    members: Members, given: int | None, is_planned: bool
) -> None:
    publish(members, 1.0)
    reader = Reader(members)
    if is_planned:
        reader.pull("copy")
    for name in BOTH:
        members.forget_shards(name)
    reader.model["copy"].fill_(-1.0)
    with pytest.raises((rtr.NotFound, rtr.Empty)):
        reader.pull("copy", version=given, timeout=0.3)
    assert reader.model["copy"].tolist() == [-1.0] * 5


def test_a_publisher_that_is_known_to_be_lost_is_not_asked(members: Members) -> None:
    publish(members, 1.0)
    reader = Reader(members)
    members.part("b")
    asked = hold_lease(members, -1)
    for pulls in (1, 2):
        assert reader.pull("copy")[0] == 1
        assert asked() == pulls
    with pytest.raises(rtr.PeerLost, match="parted"):
        reader.pull()
