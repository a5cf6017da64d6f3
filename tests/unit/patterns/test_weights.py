"""Snapshots of weights and who reads them; who pulls from whom between simulated hosts. Without members."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytorchrpc.errors import ConfigurationError, NotFound
from raytorchrpc.lanes.common.shared_memory import SharedAddress
from raytorchrpc.lanes.shm.memory import Borrower, Lender
from raytorchrpc.patterns.weights.drafts import Draft
from raytorchrpc.patterns.weights.published import PublishedWeights
from raytorchrpc.patterns.weights.relays import Advice, RelayPlan
from raytorchrpc.patterns.weights.snapshots import equal_bits
from tests.polling import wait_until
from tests.unit.callees import Deadlines
from tests.unit.members import spied

LONG = 20.0


def store(deadlines: Deadlines, keep: int = 1, track: bool = False) -> PublishedWeights:
    def route(rank: int) -> Any:
        return SimpleNamespace(member=readers[rank])

    local: Any = SimpleNamespace(
        tensor_lanes={},
        deadlines=deadlines,
        cleanup=SimpleNamespace(leave=lambda function: function()),
        peers=SimpleNamespace(route=route),
        me=SimpleNamespace(node_id="here"),
    )
    return PublishedWeights(local, "w", (keep, track))


def publish(weights: PublishedWeights, tensors: dict[str, torch.Tensor], version: int | None = None) -> int:
    draft = Draft("w", False)
    draft.take(tensors)
    return weights.publish(draft, version).version


def reader(pid: int, node: str = "here") -> Any:
    return SimpleNamespace(node_id=node, pid=pid)


#: By rank.
readers: dict[int, Any] = {}


def model(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((3, 4), value), "count": torch.tensor(int(value)), "none": torch.empty(0, 2)}


def read(weights: PublishedWeights, lease: int, *wanted: Any) -> list[torch.Tensor]:
    return weights.pool.leased(lease).tensors(wanted or [(0, None)])


def look(weights: PublishedWeights, version: int | None = None, since: int | None = None, layout: int = 0) -> Any:
    return weights.lease(1, version, since, layout, LONG)


def test_what_is_read_stays_as_it_is_and_memory_is_used_again(deadlines: Deadlines) -> None:
    weights, addresses = store(deadlines), set()
    assert publish(weights, model(1)) == 1
    first = look(weights)
    (held,) = read(weights, first.lease)
    for value in range(2, 8):
        publish(weights, model(value))
        current = look(weights)
        assert (current.version, bool((held == 1).all())) == (value, True)
        (tensor,) = read(weights, current.lease)
        assert bool((tensor == value).all())
        addresses.add(tensor.data_ptr())
        weights.pool.release(current.lease)
    assert len(addresses) == 1, "nobody reads it by then"
    weights.pool.release(first.lease)
    weights.pool.release(first.lease)
    assert weights.pool.readers == 0


@pytest.mark.parametrize(("keep", "track"), [(1, False), (3, False), (1, True)])
def test_a_store_at_rest_has_a_copy_for_each_version_that_it_keeps(
    deadlines: Deadlines, monkeypatch: Any, keep: int, track: bool
) -> None:
    monkeypatch.setattr("raytorchrpc.patterns.weights.snapshots._UNUSED_S", 0.01)
    weights = store(deadlines, keep, track)
    publish(weights, model(1))
    (one,) = weights.held.values()
    slow = look(weights)
    for value in range(2, 8):
        publish(weights, model(value))
    assert weights.held["cpu"] > one * keep, "the one that is being read, too"
    weights.pool.release(slow.lease)
    assert wait_until(lambda: weights.held["cpu"] == one * (keep + track), LONG), weights.held["cpu"] / one


def test_versions_ascend_and_the_newest_are_kept(deadlines: Deadlines) -> None:
    weights = store(deadlines, keep=2)
    assert look(weights) is None
    with pytest.raises(NotFound, match="the store has none now"):
        look(weights, version=3)
    publish(weights, model(5), 5)
    with pytest.raises(ConfigurationError, match=r"'w' is not newer than 5.*: give a higher number, or none"):
        publish(weights, model(5), 5)
    publish(weights, model(6))
    assert look(weights, version=5).version == 5
    publish(weights, model(9), 9)
    with pytest.raises(NotFound, match=r"version 5 of weight store 'w' is not there, or no longer \(there: 6, 9\)"):
        look(weights, version=5)
    assert look(weights, since=9).lease == 0, "it is there already"


def test_a_reader_that_is_gone_or_says_nothing_holds_nothing(deadlines: Deadlines, monkeypatch: Any) -> None:
    monkeypatch.setattr("raytorchrpc.patterns.weights.published.LINGER_S", 0.0)
    weights = store(deadlines)
    publish(weights, model(1))
    silent = weights.lease(1, None, None, 0, 0.02)
    weights.lease(2, None, None, 0, LONG)
    assert silent is not None and wait_until(lambda: weights.pool.readers == 1, LONG)
    with pytest.raises(NotFound, match="the lease of this pull has ended"):
        read(weights, silent.lease)
    with subprocess.Popen(["true"]) as process:
        process.wait()
    readers[2] = reader(process.pid)
    weights.lose(2)
    assert weights.pool.readers == 0


def test_a_reader_that_is_lost_and_lives_may_go_on_reading(deadlines: Deadlines, monkeypatch: Any) -> None:
    """Until it ends, if that can be seen here; until its time is over in any case."""
    monkeypatch.setattr("raytorchrpc.patterns.waits._CHECK_S", 0.01)
    weights = store(deadlines)
    publish(weights, model(1))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        readers.update({1: reader(process.pid), 2: reader(process.pid, "elsewhere")})
        near, far = weights.lease(1, None, None, 0, LONG), weights.lease(2, None, None, 0, LONG)
        assert near is not None and far is not None
        monkeypatch.setattr("raytorchrpc.patterns.weights.published.LINGER_S", 0.1)
        assert weights.lease(2, None, None, 0, 0.0) is not None  # its time is over soon
        for rank in (1, 2):
            weights.lose(rank)
        held = [read(weights, lease)[0] for lease in (near.lease, far.lease)]
        for value in range(2, 5):
            publish(weights, model(value))
        assert all(bool((tensor == 1).all()) for tensor in held)
    assert wait_until(lambda: weights.pool.leases_of(1) == set() and weights.pool.leases_of(2) == {far.lease}, LONG)
    assert bool((read(weights, far.lease)[0] == 1).all())


def test_changes_are_seen_however_they_were_made(deadlines: Deadlines) -> None:
    weights = store(deadlines, track=True)
    layer = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(layer[1].parameters(), lr=0.1)
    publish(weights, {name: tensor.detach() for name, tensor in layer.state_dict().items()})
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    publish(weights, {name: tensor.detach() for name, tensor in layer.state_dict().items()})
    layer[0].bias.data.numpy()[1] = -0.0 if layer[0].bias[1] == 0 else 0.0
    publish(weights, {name: tensor.detach() for name, tensor in layer.state_dict().items()})
    names = list(layer.state_dict())

    def changed(since: int) -> list[str]:
        found = look(weights, since=since)
        for name, tensor in zip(names, read(weights, found.lease, *((n, None) for n in range(4))), strict=True):
            assert torch.equal(tensor, layer.state_dict()[name])
        return [names[place] for place in found.changed]

    assert changed(2) == ["0.bias"]
    assert changed(1) == ["0.bias", "1.weight", "1.bias"]
    assert look(weights, since=None).changed is None
    publish(weights, {"other": torch.ones(2)})
    assert look(weights, since=3).changed == [0], "of another model everything is new"


def test_a_tensor_that_has_not_changed_is_not_copied_again(deadlines: Deadlines, monkeypatch: Any) -> None:
    """Once each of the two pieces of memory has it."""
    copies = spied(monkeypatch, "raytorchrpc.patterns.weights.published.copy_tensors")
    weights, given = store(deadlines, track=True), {name: torch.ones(3) for name in "abc"}
    for value in range(5):
        given["b"].fill_(value)
        publish(weights, given)
    assert [len(targets) for targets, *_ in copies] == [3, 3, 1, 1, 1]
    found = look(weights)
    assert [float(tensor[0]) for tensor in read(weights, found.lease, (0, None), (1, None))] == [1.0, 4.0]


def test_bits_are_compared() -> None:
    ones = [torch.tensor([0.0, 1.0]), torch.tensor([float("nan")]), torch.tensor([1, 2]), torch.ones(2, 2).T]
    others = [torch.tensor([-0.0, 1.0]), torch.tensor([float("nan")]), torch.tensor([1, 2]), torch.ones(2, 2)]
    assert equal_bits(ones, others) == [False, True, True, True]


# --- between hosts -------------------------------------------------------------------------------------------


def test_one_of_each_host_leads_and_leaders_feed_one_another() -> None:
    relays = RelayPlan()
    assert relays.ask("v1", "x", 1, 16) == Advice(None, leads=True)
    assert [relays.ask("v1", "x", rank, 16) for rank in (2, 3)] == [Advice(1, leads=False)] * 2
    assert relays.ask("v1", "y", 4, 16) == Advice(1, leads=True), "another host"
    assert relays.ask("v1", "z", 5, 16) == Advice(4, leads=True), "it feeds the next"
    assert relays.ask("v2", "x", 2, 16) == Advice(None, leads=True), "another version"


def test_many_leaders_of_few_pieces_stand_in_a_tree() -> None:
    relays = RelayPlan()
    feeders = {rank: relays.ask("v1", f"node {rank}", rank, 1).source for rank in range(100)}
    steps = dict.fromkeys([0], 0)
    for rank in range(1, 100):
        steps[rank] = steps[feeders[rank]] + 1
    assert max(steps.values()) == 6, "doubles with each step"
    assert max(list(feeders.values()).count(rank) for rank in range(100)) == 2


def test_when_a_leader_is_gone_the_next_that_asks_leads() -> None:
    relays = RelayPlan()
    relays.ask("v1", "x", 1, 16)
    relays.ask("v1", "y", 2, 16)
    relays.lose(1)
    assert relays.ask("v1", "x", 3, 16) == Advice(2, leads=True)
    relays.failed("v1", 1)
    assert relays.ask("v1", "x", 4, 16) == Advice(3, leads=False), "another leads by now"
    relays.failed("v1", 3)
    assert relays.ask("v1", "x", 4, 16).leads


def test_a_leader_that_asks_again_is_not_fed_by_those_that_it_feeds() -> None:
    relays = RelayPlan()
    for rank in (1, 2, 3):
        relays.ask("v1", f"node {rank}", rank, 16)
    assert relays.ask("v1", "node 1", 1, 16) == Advice(None, leads=True)


def test_one_reader_of_each_gpu_takes_its_turn() -> None:
    relays = RelayPlan()
    assert [relays.take_turn(1, "s", "gpu 1", rank) for rank in (1, 2, 1)] == [None] * 3, "no other GPU pulls"
    assert relays.take_turn(1, "s", "gpu 2", 3) == Advice(None, leads=True)
    assert relays.take_turn(1, "s", "gpu 1", 1) == Advice(3, leads=True)
    assert relays.take_turn(1, "s", "gpu 1", 2) is None, "another one feeds the next GPU"
    relays.lose(3)
    assert relays.take_turn(2, "s", "gpu 1", 2) is None, "no other GPU is left"


# --- memory that is lent ------------------------------------------------------------------------------------------


def test_a_reader_of_some_pieces_gets_nothing_of_the_others(deadlines: Deadlines, monkeypatch: Any) -> None:
    """But all of them if it does not know the layout, whose numbers mean other pieces."""
    weights = store(deadlines)
    publish(weights, model(1))
    pieces = [torch.ones(size, dtype=torch.uint8) for size in (3, 4, 5)]
    weights._local.payloads = SimpleNamespace(check_reply=lambda route, pieces: None)
    weights._local.peers.route_back = lambda rank: None
    monkeypatch.setattr("raytorchrpc.patterns.weights.snapshots.Snapshot.pieces", lambda *_: pieces)
    readers[1] = reader(1)
    lease, sent = weights.serve_lease(1, None, None, 0, LONG, "cuda", (1,), None)
    assert [len(piece) for piece in sent] == [3, 4, 5]
    lease, sent = weights.serve_lease(1, None, None, lease[2], LONG, "cuda", (1,), None)
    assert [len(piece) for piece in sent] == [0, 4, 0]


def test_lent_memory_is_found_and_ends_with_its_last_tensor() -> None:
    lender, borrower = Lender(), Borrower()
    piece = lender.make(1 << 16)
    other = lender.make(1 << 12)
    tensors = [piece[256:512].view(torch.float32), other[:8], torch.empty(0), piece[:4]]
    tensors[0].fill_(3)
    found = lender.places(tensors)
    assert found is not None
    addresses, places = found
    assert places[0] == (0, 256) and places[1] == (1, 0) and places[3] == (0, 0)
    mapped = borrower.bytes_at("peer", SharedAddress(*addresses[0]))
    assert torch.equal(torch.from_numpy(mapped)[256:512].view(torch.float32), tensors[0])
    assert lender.places([*tensors, torch.ones(3)]) is None
    assert lender.places([piece.view(256, 256).T]) is None, "not in one piece"
    del piece
    assert lender.places([tensors[0]]) is not None, "a tensor on it lives"
    tensors.clear()
    assert lender.places([other]) is not None and len(lender._pieces) == 1
    borrower.forget("peer")
    assert not borrower._mapped
    lender.close()


def test_memory_that_is_lent_no_more_is_freed_for_those_that_have_it_mapped() -> None:
    lender, borrower = Lender(), Borrower()
    pieces = [lender.make(1 << 16).fill_(number + 1) for number in range(40)]

    def mapped(piece: torch.Tensor) -> torch.Tensor:
        found = lender.places([piece])
        assert found is not None
        return torch.from_numpy(borrower.bytes_at("peer", SharedAddress(*found[0][0])))

    views = [mapped(piece) for piece in pieces]
    assert borrower.mapped("peer") == 40 << 16, "all of what is lent stays mapped"
    child = os.fork()
    if not child:
        pieces.clear()  # frees nothing: the parent has it
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [int(view[0]) for view in views] == list(range(1, 41))
    del pieces[1:]
    assert not any(bool(view.any()) for view in views[1:]), "the pages are gone"
    assert bool((mapped(pieces[0]) == 1).all())
    mapped(lender.make(1 << 12))  # whoever lends another piece may have dropped some
    assert len(borrower._mapped) == 2 and borrower.mapped("other") == 0
    lender.close()
