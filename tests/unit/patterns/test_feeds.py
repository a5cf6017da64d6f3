"""What a pull feeds to others: pieces as they arrive, and memory that ends with the pull."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc.errors import LaneUnavailable, NotFound
from raytorchrpc.lanes.base import TensorCapabilities
from raytorchrpc.patterns.weights import chained_pull, pull_plan, source_pull
from raytorchrpc.patterns.weights.feeds import Feed, Feeds
from raytorchrpc.patterns.weights.plan import Transfer
from raytorchrpc.patterns.weights.pull_plan import Selection
from raytorchrpc.patterns.weights.shards import Region
from raytorchrpc.patterns.weights.snapshots import TensorSpec
from tests.polling import wait_until
from tests.threads import in_thread
from tests.unit import members as members_module
from tests.unit.callees import Deadlines, DeferredReply
from tests.unit.members import Members
from tests.unit.patterns.weight_values import values

LONG = 20.0
ELEMENTS = 2_000_000  # of a tensor: more than one piece between hosts, and one on a host
PIECES = 4


class Lane:
    """Exports what it can."""

    capabilities = TensorCapabilities(frozenset({"cpu"}))
    can = True

    def export(self, *_: Any) -> Any:
        if not self.can:
            raise LaneUnavailable("lane", "this memory cannot be exported")
        return SimpleNamespace(cancel=lambda: None)


@pytest.fixture
def feeds() -> Iterator[Feeds]:
    deadlines = Deadlines()
    route = SimpleNamespace(member=SimpleNamespace(name="reader"), beside={"cpu": "lane"}, devices_back={})
    peers = SimpleNamespace(route_back=lambda rank: route)
    local: Any = SimpleNamespace(
        tensor_lanes={"lane": Lane()},
        deadlines=deadlines,
        cleanup=SimpleNamespace(leave=lambda function: function()),
        peers=peers,
        me=SimpleNamespace(rank=0),
    )
    yield Feeds(local, "store 1", [9])
    deadlines.stop()


def lasting(feeds: Feeds, version: int = 1) -> Feed:
    specs = [TensorSpec(torch.float32, (PIECES, 3), torch.device("cpu"))]
    memory = feeds.pool.memory(specs)
    return Feed(feeds._local, version, specs, memory, feeds.pool, [[row] for row in memory.tensors[0]])


def of_model(feeds: Feeds, version: int = 1) -> Feed:
    return Feed(feeds._local, version, (), None, feeds.pool, [[row] for row in torch.zeros(PIECES, 3)])


def lease(feeds: Feeds, rank: int = 1, version: int = 1) -> Any:
    return feeds.serve_lease(rank, "same", version, LONG, LONG)


def test_who_is_fed_hears_that_no_more_comes(feeds: Feeds) -> None:
    feed = lasting(feeds)
    feeds.open("same", feed)
    number = lease(feeds)
    feed.add()
    second = feeds.serve_piece(1, number, 1, LONG)
    feeds.fail("same", 1, feed)
    assert isinstance(second.exception(0), NotFound)
    assert len(feeds.serve_piece(1, number, 0, LONG).outcome()) == 1, "what came is sound"
    with pytest.raises(NotFound):
        feeds.serve_piece(1, number, 1, LONG)
    assert lease(feeds, rank=2) == 0, "too late"
    waits = lease(feeds, version=2)
    feeds.fail("same", 2, None)
    assert waits.outcome() == 0, "a pull that does not even begin"


def test_waits_end(feeds: Feeds) -> None:
    assert feeds.serve_lease(1, "same", 1, LONG, 0.02).result(LONG) is None
    feed = lasting(feeds)
    feeds.open("same", feed)
    number = lease(feeds)
    assert isinstance(feeds.serve_piece(1, number, 0, 0.02).exception(LONG), NotFound)
    assert not feeds._waits and not feed._waits


def test_a_model_is_taken_back_once_it_is_read(feeds: Feeds) -> None:
    feed = of_model(feeds)
    feeds.pool.release(feeds.open("same", feed))
    number = lease(feeds)
    for _ in range(PIECES):
        feed.add()
    assert lease(feeds, rank=2) == 0, "too late: it would delay the pull"
    ending = threading.Thread(target=feeds.end, args=("same", feed, LONG))
    ending.start()
    assert wait_until(feed.ended.done, LONG) and ending.is_alive()
    assert feeds.serve_confirm(1, number, LONG) is True
    ending.join(LONG)
    assert not ending.is_alive()
    assert lease(feeds, rank=2) == 0, "a reader that comes later does not wait for it"
    assert isinstance(lease(feeds, rank=2, version=2), DeferredReply)


def test_a_reader_that_takes_too_long_is_told_so(feeds: Feeds) -> None:
    feed = of_model(feeds)
    feeds.pool.release(feeds.open("same", feed))
    number = lease(feeds)
    feed.add()
    feeds.end("same", feed, 0.01)
    with pytest.raises(NotFound):
        feeds.serve_piece(1, number, 0, LONG)
    assert feeds.serve_confirm(1, number, LONG) is False


def test_a_reader_that_is_done_hears_whether_its_feeder_was_sound(feeds: Feeds) -> None:
    for outcome in (True, False):
        feed = of_model(feeds)
        feeds.pool.release(feeds.open("same", feed))
        reply = feeds.serve_confirm(1, lease(feeds), LONG)
        assert isinstance(reply, DeferredReply) and not reply.done()
        if outcome:
            feeds.end("same", feed, LONG)
        else:
            feeds.fail("same", 1, feed)
        assert reply.outcome() is outcome


def test_memory_that_no_lane_exports_is_not_offered(feeds: Feeds) -> None:
    feeds.pool.release(feeds.open("same", of_model(feeds)))
    feeds._local.tensor_lanes["lane"].can = False  # type: ignore[attr-defined]
    assert lease(feeds) == 0


def transfer(region: Region) -> Transfer:
    return Transfer((0, None), region, 4 * region[0], 4 * math.prod(region[1]), "w", None)


@pytest.mark.parametrize("shape", [(10, 6), (1, 60), (60,), ()])
def test_slices_bring_the_same_as_the_whole(shape: tuple[int, ...]) -> None:
    source, target = torch.arange(60.0)[: torch.Size(shape).numel()].view(shape), torch.zeros(shape)
    sliced = Selection([transfer((0, tuple(target.shape), None))], [target]).in_slices(48)
    assert len(sliced.targets) == (1 if shape == () else 5)
    for piece, (first, extents, strides) in zip(sliced.targets, sliced.regions, strict=True):
        assert piece.nbytes <= 48 and strides is None
        piece.copy_(source.view(-1)[first : first + piece.numel()].view(extents))
    assert torch.equal(source, target)


def test_slices_of_strided_regions() -> None:
    source, target = torch.arange(60.0).view(10, 6), torch.zeros(10, 2)
    sliced = Selection([transfer((3, (10, 2), (6, 1)))], [target]).in_slices(24)
    for piece, (first, extents, strides) in zip(sliced.targets, sliced.regions, strict=True):
        assert strides is not None
        piece.copy_(source.as_strided(extents, strides, first))
    assert torch.equal(source[:, 3:5], target)


@pytest.fixture
def near_and_far(monkeypatch: pytest.MonkeyPatch) -> Iterator[Members]:
    """``a`` reads the home's memory, ``b`` is on another host. Members feed one another whatever the size, also on one
    host, from the CPU; there in pieces of their own size.
    """

    def member(name: str, rank: int, incarnation: int = 0) -> rtr.Member:
        return rtr.Member(rank, name, None, "far" if name == "b" else "near", 0, name, rank + 1, incarnation)

    monkeypatch.setattr(members_module, "_member", member)
    monkeypatch.setattr(source_pull, "_WORTH_RELAYING", 1)
    monkeypatch.setattr(source_pull.SourcePull, "_count_far_members", lambda self: 2)
    monkeypatch.setattr(pull_plan, "IN_TURN", {"cpu"})
    monkeypatch.setattr(pull_plan, "WORTH_A_TURN", 1)
    with Members(rtr.GroupConfig(rpc_timeout_s=LONG), by_socket=True, beside={"cpu": "shm"}) as made:
        yield made


def weights(value: float) -> dict[str, torch.Tensor]:
    return {f"layer{number}": torch.full((ELEMENTS,), value) for number in range(4)}


def test_readers_of_the_homes_host_feed_none_of_others(near_and_far: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """They bring the same, but in other pieces."""
    members, from_home = near_and_far, chained_pull.ChainedPull._from_home
    begins, goes_on = threading.Event(), threading.Event()

    def hold(self: Any, *args: Any) -> bool:
        if self._local.me.name == "a":
            begins.set()
            assert goes_on.wait(LONG)
        return from_home(self, *args)

    fed: list[int] = []
    monkeypatch.setattr(chained_pull.ChainedPull, "_from_home", hold)
    monkeypatch.setattr(chained_pull.ChainedPull, "_from_member", lambda self, source, *_, **__: fed.append(source))
    with members.acting("home"):
        home = rtr.WeightStore("w")
        home.publish(weights(1.0))
    with members.acting("a"):
        near, store = weights(0.0), rtr.WeightStore.find("w")
        for _ in range(2):  # the second one follows the plan of the first, and says what it pulls
            store.pull(near)
        (known,) = members.served("weight store", "w").relays._readers.values()
        known[99] = "another GPU"
    with members.acting("home"):
        home.publish(weights(2.0))
    with members.acting("a"):
        pulls = in_thread(store.pull, near)
        assert begins.wait(LONG)
    with members.acting("b"):
        far = weights(0.0)
        assert rtr.WeightStore.find("w").pull(far) == 2 and set(values(far)) == {2.0}
    goes_on.set()
    assert pulls() == 2 and set(values(near)) == {2.0}
    assert not fed
