"""Deltas of weights: what is found, bit for bit, and what a reader makes of it. Between members of one process."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc.errors import PeerLost
from raytorchrpc.patterns.weights.deltas import find_deltas
from raytorchrpc.tensors.dtypes import as_copyable
from tests.unit.members import DELTAS, PIECES, TENSORS, Members

ROWS, COLUMNS = 300, 257  # odd, so that words of 8 bytes leave a rest
DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.bool, torch.float64, torch.float8_e4m3fn, torch.complex64]


@pytest.fixture
def members(members: Members) -> Members:
    """``home`` is on one host, ``a`` and ``b`` on another."""
    for local in members.members.values():
        for route in local.peers.routes:
            node = "one" if route.member.name == "home" else "two"
            local.peers.add_peer(dataclasses.replace(route, member=dataclasses.replace(route.member, node_id=node)))
    return members


def noise(dtype: torch.dtype, rows: int = ROWS, seed: int = 0) -> torch.Tensor:
    """Any bits, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (rows, COLUMNS), generator=generator).bool()
    raw = torch.randint(0, 256, (rows, COLUMNS * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def changed(tensor: torch.Tensor, share: float = 0.01, seed: int = 1) -> torch.Tensor:
    """A copy with a share of other elements, the first and the last among them."""
    made = tensor.clone()
    generator = torch.Generator().manual_seed(seed)
    at = torch.rand(made.numel(), generator=generator) < share
    at[0] = at[-1] = True
    bits = as_copyable(made).view(-1)
    bits[at] = 1 - bits[at] if tensor.dtype is torch.bool else ~bits[at]
    return made


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(as_copyable(one), as_copyable(other))


def counted(members: Members, reader: str = "a") -> Counter[str]:
    """How often the reader sends each request, from now on."""
    seen: Counter[str] = Counter()

    def hold(method: str) -> bool:
        seen[method] += 1
        return False

    members.lanes[reader].holds = hold
    return seen


def publish(members: Members, model: dict[str, Any], **options: Any) -> int:
    with members.acting("home"):
        return rtr.WeightStore("w", track=True, **options).publish(model)


# --- what is found -----------------------------------------------------------------------------------------------


def first_pull(members: Members, tensor: torch.Tensor) -> tuple[rtr.WeightStore, dict[str, torch.Tensor]]:
    """Publish a tensor; returns a reader's handle and model, which has it."""
    publish(members, {"w": tensor})
    model = {"w": torch.zeros_like(tensor)}
    with members.acting("a"):
        handle = rtr.WeightStore("w", home="home", track=True)
        handle.pull(model)
    return handle, model


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exactly_the_changed_elements_are_found(dtype: torch.dtype) -> None:
    before = noise(dtype, 8 * ROWS)
    after = changed(before)
    found = find_deltas(7, [3], [after], [before])
    assert found.base == 7 and list(found.by_place) == [3]
    delta, (now, then) = found.by_place[3], (as_copyable(each).view(-1) for each in (after, before))
    assert delta.at.dtype is torch.int32
    assert torch.equal(delta.at.long(), (now != then).nonzero().view(-1))
    assert torch.equal(delta.bits, now[delta.at])


@pytest.mark.parametrize(("share", "has_delta"), [(0.11, True), (0.14, False), (1.0, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_tensor_of_which_much_has_changed_has_no_delta(dtype: torch.dtype, share: float, has_delta: bool) -> None:
    before = noise(dtype)
    assert bool(find_deltas(1, [0], [changed(before, share)], [before]).by_place) is has_delta


# --- pulls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_arrives_is_equal_bit_for_bit(members: Members, dtype: torch.dtype) -> None:
    """Into targets that lie as published, transposed, or in a larger tensor."""
    first = {name: noise(dtype, 8 * ROWS, seed) for seed, name in enumerate(("plain", "turned", "inner"))}
    publish(members, first)
    with members.acting("a"):
        shape = (8 * ROWS, COLUMNS)
        outer = noise(dtype, 8 * ROWS + 2, 9).repeat(1, 2)
        untouched = outer.clone()
        model = {
            "plain": torch.zeros(shape, dtype=dtype),
            "turned": torch.zeros(shape[::-1], dtype=dtype).t(),
            "inner": outer[1:-1, 3 : 3 + COLUMNS],
        }
        handle = rtr.WeightStore("w", home="home", track=True)
        assert handle.pull(model) == 1
    second = {name: changed(tensor, seed=seed) for seed, (name, tensor) in enumerate(first.items(), 20)}
    publish(members, second)
    sent = counted(members)
    with members.acting("a"):
        assert handle.pull(model, since=1) == 2
    assert all(same(model[name], second[name]) for name in second)
    assert (sent[DELTAS], sent[TENSORS], sent[PIECES]) == (1, 0, 0)
    untouched[1:-1, 3 : 3 + COLUMNS] = second["inner"]
    assert same(outer, untouched)


def test_only_what_differs_little_comes_as_a_delta(members: Members) -> None:
    """Tensors of which much has changed come whole, unless they are tiny, and so do those that are converted."""

    def published(version: int) -> dict[str, torch.Tensor]:
        def step(tensor: torch.Tensor, share: float) -> torch.Tensor:
            return changed(tensor, share) if version == 2 else tensor

        floats = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)
        after = floats.clone()
        after[7] += 1.0
        return {
            "little": step(noise(torch.float32, seed=1), 0.01),
            "much": step(noise(torch.float32, seed=2), 0.5),
            "tiny": step(noise(torch.float32, rows=2, seed=3), 0.5),
            "count": torch.tensor(version),
            "same": noise(torch.float32, seed=4),
            "converted": after if version == 2 else floats,
        }

    publish(members, published(1))
    model = {name: torch.zeros_like(tensor) for name, tensor in published(1).items()}
    model["converted"] = model["converted"].double()
    with members.acting("a"):
        handle = rtr.WeightStore("w", home="home", track=True)
        handle.pull(model, convert=True)
    publish(members, published(2))
    for name in ("little", "same"):
        model[name].view(-1)[1:-1:2] = 0.0  # shows what is brought
    sent, marks = counted(members), model["little"].clone()
    with members.acting("a"):
        assert handle.pull(model, since=1, convert=True) == 2
    now = published(2)
    assert (sent[DELTAS], sent[TENSORS]) == (1, 1)
    assert (
        all(same(model[name], now[name]) for name in ("much", "tiny", "count"))
        and not model["same"].view(-1)[1:-1:2].any()
    )
    assert torch.equal(model["converted"], now["converted"].double())
    moved = as_copyable(now["little"]) != as_copyable(published(1)["little"])
    assert same(model["little"][moved], now["little"][moved]) and same(model["little"][~moved], marks[~moved])


@pytest.mark.parametrize("publishers", [("home",), ("home", "b")])
def test_one_percent_of_the_elements_takes_few_of_the_bytes(members: Members, publishers: tuple[str, ...]) -> None:
    def publish_rows(tensor: torch.Tensor) -> None:
        for number, name in enumerate(publishers):
            with members.acting(name):
                rows = tensor.chunk(len(publishers))[number]
                shard = rtr.Shard(rows, tuple(tensor.shape), (number * len(rows), 0))
                rtr.WeightStore("s", publishers=publishers, track=True).publish({"w": shard})

    tensor, came = noise(torch.bfloat16, 4 * ROWS), list[int]()
    model = {"w": torch.zeros_like(tensor)}
    with members.acting("a"):
        handle = rtr.WeightStore("s", publishers=publishers, track=True)
    for version in (1, 2, 3):
        publish_rows(tensor)
        with members.acting("a"):
            assert handle.pull(model, since=version - 1) == version and same(model["w"], tensor)
            came.append(handle.stats().brought)
        tensor = changed(tensor, seed=version)
    assert came[0] == tensor.nbytes and max(came[1:]) < 0.15 * tensor.nbytes


@pytest.mark.parametrize("versions", [1, 2, 3])
def test_a_reader_that_is_further_behind_gets_whole_tensors(members: Members, versions: int) -> None:
    tensor = noise(torch.bfloat16)
    handle, model = first_pull(members, tensor)
    for step in range(versions):
        tensor = changed(tensor, seed=step)
        publish(members, {"w": tensor})
    sent = counted(members)
    with members.acting("a"):
        assert handle.pull(model, since=1) == 1 + versions
    assert same(model["w"], tensor) and sent[DELTAS] == (versions == 1)


def test_shards_get_their_part_of_what_has_changed(members: Members) -> None:
    """Two publishers have rows; readers want columns, rows that both have, or all, also in a fused tensor."""
    half, cut = 4 * ROWS, 100
    boxes = {
        "columns": (slice(None), slice(cut, None)),
        "rows": (slice(half - 50, half + 70), slice(None)),
        "all": (slice(None), slice(None)),
    }

    def publish_rows(tensor: torch.Tensor) -> None:
        for number, name in enumerate(("home", "b")):
            with members.acting(name):
                rows = tensor[number * half : (number + 1) * half]
                shard = rtr.Shard(rows, tuple(tensor.shape), (number * half, 0))
                rtr.WeightStore("s", publishers=("home", "b"), track=True).publish({"w": shard})

    tensor = noise(torch.bfloat16, 2 * half)
    publish_rows(tensor)
    handles, models = {}, {}
    with members.acting("a"):
        for name, box in boxes.items():
            handles[name] = rtr.WeightStore("s", publishers=("home", "b"), track=True)
            offset = tuple(each.start or 0 for each in box)
            models[name] = rtr.Shard(torch.zeros_like(tensor[box]), tuple(tensor.shape), offset)
            handles[name].pull({"w": models[name]})
    for version in (2, 3):
        tensor = changed(tensor, seed=version)
        publish_rows(tensor)
        with members.acting("a"):
            for name, box in boxes.items():
                sent = counted(members)
                assert handles[name].pull({"w": models[name]}, since=version - 1) == version
                assert same(models[name].tensor, tensor[box]), name
                # The last publisher is on the reader's host, and sends deltas all the same: nothing is read in place.
                assert (sent[DELTAS], sent[TENSORS]) == (2, 0), name


def test_parts_of_a_fused_parameter_come_as_deltas(members: Members) -> None:
    parts = {"q": noise(torch.float32, seed=1), "k": noise(torch.float32, 2 * ROWS, seed=2)}
    fused = torch.zeros(3 * ROWS, COLUMNS)
    publish(members, parts)
    with members.acting("a"):
        handle = rtr.WeightStore("w", home="home", track=True)
        handle.pull({"qk": fused}, mapping={"qk": ["q", "k"]})
    parts = {name: changed(tensor) for name, tensor in parts.items()}
    publish(members, parts)
    sent = counted(members)
    with members.acting("a"):
        handle.pull({"qk": fused}, since=1, mapping={"qk": ["q", "k"]})
    assert same(fused, torch.cat([parts["q"], parts["k"]])) and (sent[DELTAS], sent[TENSORS]) == (1, 0)


def test_messages_of_deltas_are_bounded(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {f"{number}": noise(torch.bfloat16, seed=number) for number in range(5)}
    publish(members, first)
    model = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
    with members.acting("a"):
        handle = rtr.WeightStore("w", home="home", track=True)
        handle.pull(model)
    second = {name: changed(tensor) for name, tensor in first.items()}
    publish(members, second)
    monkeypatch.setattr("raytorchrpc.patterns.weights.source_pull.MESSAGE_BYTES", 12_000)  # two deltas of about 4.6 KB
    sent = counted(members)
    with members.acting("a"):
        handle.pull(model, since=1)
    assert all(same(model[name], second[name]) for name in second) and sent[DELTAS] == 3


def test_after_a_delta_that_failed_everything_comes_whole(members: Members) -> None:
    tensor = noise(torch.bfloat16)
    handle, model = first_pull(members, tensor)
    publish(members, {"w": changed(tensor)})

    def fail(method: str) -> bool:
        if method == DELTAS:
            raise PeerLost("home", "the test broke the connection", may_have_run=False)
        return False

    members.lanes["a"].holds = fail
    with members.acting("a"), pytest.raises(PeerLost):
        handle.pull(model, since=1)
    assert same(model["w"], tensor)
    sent = counted(members)
    with members.acting("a"):
        assert handle.pull(model, since=1) == 2
    assert same(model["w"], changed(tensor)) and not sent[DELTAS]


def test_a_delta_ends_with_its_version(members: Members) -> None:
    tensor = noise(torch.bfloat16)
    kept = []
    for step in range(3):
        publish(members, {"w": changed(tensor, seed=step)})
        versions = members.served("weight store", "w")._versions
        snapshot = next(iter(versions.values()))
        kept.append(snapshot.deltas and weakref.ref(snapshot.deltas.by_place[0].bits))
        del snapshot, versions
    gc.collect()
    assert kept[0] is None and kept[1]() is None and kept[2]() is not None


def test_where_all_members_read_in_place_nothing_is_searched(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """They copy from where the weights were published; see ``_deltas``."""
    allocate = "raytorchrpc.patterns.weights.published.PublishedWeights._allocate_shared"
    monkeypatch.setattr(allocate, lambda self, size: torch.empty(size, dtype=torch.uint8))
    local = members.members["home"]
    for route in local.peers.routes:
        local.peers.add_peer(dataclasses.replace(route, member=dataclasses.replace(route.member, node_id="node")))
    tensor = noise(torch.bfloat16)
    for step in range(2):
        publish(members, {"w": changed(tensor, seed=step)})
    assert members.served("weight store", "w")._versions[2].deltas is None


def test_a_prefetch_into_a_twin_of_the_version_before_brings_a_delta(members: Members) -> None:
    tensor = noise(torch.bfloat16)
    model = {"w": torch.zeros_like(tensor)}
    sent: Counter[str] = Counter()
    for version in (1, 2, 3):
        publish(members, {"w": tensor})
        with members.acting("a"):
            if version == 1:
                handle = rtr.WeightStore("w", home="home", track=True)
            sent = counted(members)
            assert handle.prefetch(model, since=version - 1).swap() == version
        assert same(model["w"], tensor)
        assert sent[DELTAS] == (version > 1)
        tensor = changed(tensor, seed=version)
