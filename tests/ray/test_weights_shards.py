"""Weights that several actors publish in shards, and that others pull in other shards."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests.polling import wait_until
from tests.ray.actors import Latch, Peer
from tests.ray.conftest import Spawn, pid_of

#: The global tensors, by name. Some are larger than what travels in a message.
SHAPES = {"matrix": (640, 768), "odd": (7, 5, 3), "vector": (11,), "scalar": (), "q": (8, 6), "k": (4, 6), "v": (4, 6)}
PUBLISHERS = ("t0", "t1")


@pytest.fixture(scope="module")
def actors(spawn_for_module: Spawn) -> dict[str, Any]:
    return {name: spawn_for_module(Peer, max_restarts=-1) for name in (*PUBLISHERS, "g0", "g1")}


@pytest.fixture(scope="module", autouse=True)
def group(actors: dict[str, Any]) -> Iterator[rtr.Group]:
    with rtr.init_group(actors) as group:
        yield group


_names = itertools.count()


@pytest.fixture
def store() -> rtr.WeightStore:
    return rtr.WeightStore(f"policy{next(_names)}", publishers=PUBLISHERS)


def whole(name: str, version: int) -> torch.Tensor:
    """Every element carries its place and its version."""
    shape = SHAPES[name]
    size = torch.Size(shape).numel()
    return (torch.arange(size, dtype=torch.float64) * 1000 + version).view(shape)


def shard(name: str, dimension: int, number: int, of: int, version: int | None = None) -> Any:
    """Part ``number`` of ``of`` along a dimension, uneven if need be; empty (-1) without a version."""
    shape = SHAPES[name]
    if not shape:
        return whole(name, version) if version is not None else torch.full((), -1.0, dtype=torch.float64)
    dimension = min(dimension, len(shape) - 1)
    step = -(-shape[dimension] // of)
    first, last = min(number * step, shape[dimension]), min((number + 1) * step, shape[dimension])
    offset = tuple(first if each == dimension else 0 for each in range(len(shape)))
    if version is not None:
        tensor = whole(name, version).narrow(dimension, first, last - first).clone()
    else:
        extents = tuple(last - first if each == dimension else extent for each, extent in enumerate(shape))
        tensor = torch.full(extents, -1.0, dtype=torch.float64)
    return rtr.Shard(tensor, shape, offset)


def publish(store: rtr.WeightStore, number: int, version: int, dimension: int = 0) -> int:
    return store.publish({name: shard(name, dimension, number, 2, version) for name in SHAPES}, version)


def pulled(store: rtr.WeightStore, dimension: int, number: int, of: int, **options: Any) -> tuple[int, list[str]]:
    """Pull a part of everything; returns the version, and the names of what is not as published."""
    model = {name: shard(name, dimension, number, of) for name in SHAPES}
    version = store.pull(model, **options)
    right = {name: shard(name, dimension, number, of, version) for name in SHAPES}
    return version, [name for name in SHAPES if not _same(model[name], right[name])]


def _same(one: Any, other: Any) -> bool:
    return torch.equal(*(value.tensor if isinstance(value, rtr.Shard) else value for value in (one, other)))


def publish_all(actors: dict[str, Any], store: rtr.WeightStore, version: int, dimension: int = 0) -> None:
    runs = [actors[name].run.remote(publish, store, at, version, dimension) for at, name in enumerate(PUBLISHERS)]
    assert ray.get(runs, timeout=60) == [version, version]


@pytest.mark.parametrize(("published", "dimension", "of"), [(0, 0, 1), (0, 1, 2), (1, 0, 3), (1, 2, 2), (0, 0, 2)])
def test_any_shards_from_any_shards(
    actors: dict[str, Any], store: rtr.WeightStore, published: int, dimension: int, of: int
) -> None:
    for version in (1, 2):  # the second pull follows the plan of the first
        publish_all(actors, store, version, published)
        for number in range(of):
            reader = actors[("g0", "g1")[number % 2]]
            assert ray.get(reader.run.remote(pulled, store, dimension, number, of), timeout=60) == (version, [])
    assert ray.get(actors["t1"].run.remote(pulled, store, dimension, 0, of), timeout=60) == (2, [])


def test_a_version_is_there_once_all_have_published_it(actors: dict[str, Any], store: rtr.WeightStore) -> None:
    publish_all(actors, store, 1)
    assert ray.get(actors["t1"].run.remote(publish, store, 1, 2), timeout=60) == 2
    assert ray.get(actors["g0"].run.remote(pulled, store, 1, 0, 2), timeout=60) == (1, [])
    waiting = actors["g1"].run.remote(lambda store: store.wait(2, timeout=30), store)
    assert ray.get(actors["t0"].run.remote(publish, store, 0, 2), timeout=60) == 2
    assert ray.get(waiting, timeout=60) == 2
    assert ray.get(actors["g0"].run.remote(pulled, store, 1, 0, 2), timeout=60) == (2, [])


#: Bytes of each publisher's shard, and how many versions it publishes.
PIECE, VERSIONS = 4 << 20, 60


def publish_often(store: rtr.WeightStore, number: int) -> None:
    rows = torch.zeros(PIECE // 4096, 1024)
    for version in range(1, VERSIONS + 1):
        store.publish({"w": rtr.Shard(rows.fill_(version), (2 * len(rows), 1024), (number * len(rows), 0))})


def pull_often(store: rtr.WeightStore) -> None:
    model, version = {"w": torch.zeros(2 * PIECE // 4096, 1024)}, 0
    while version < VERSIONS:
        version = store.pull(model, since=version)
        assert bool((model["w"] == version).all())


def lent_memory() -> float:
    """Bytes of pieces that this process lends or has mapped; what several processes have is divided among them."""
    with open("/proc/self/smaps") as file:
        found = re.findall(r"memfd:raytorchrpc.*\nSize: +(\d+) kB(?:\n.*)*?\nPss: +(\d+) kB", file.read())
    return float(sum(int(pss) for size, pss in found if int(size) == PIECE >> 10) << 10)


def test_a_busy_store_has_memory_for_two_versions_when_it_rests(actors: dict[str, Any], store: rtr.WeightStore) -> None:
    runs = [actors[name].run.remote(publish_often, store, at) for at, name in enumerate(PUBLISHERS)]
    ray.get([*runs, *(actors[name].run.remote(pull_often, store) for name in ("g0", "g1"))], timeout=60)

    def total() -> float:
        return float(sum(ray.get([actor.run.remote(lent_memory) for actor in actors.values()], timeout=60)))

    assert wait_until(lambda: total() <= 2 * 2 * PIECE, 20), f"{total() / PIECE} pieces"
    found: dict[str, Any] = {}

    def have_heard() -> bool:
        """What a reader tells the publishers at the end of a pull may arrive after the pull has returned."""
        found.update(zip(actors, ray.get([actor.run.remote(store.stats) for actor in actors.values()]), strict=True))
        publishers = [found[name] for name in PUBLISHERS]
        read = {(name, reader): size for reader in ("g0", "g1") for name, size in found[reader].sources}
        told = {(name, reader): size for name in PUBLISHERS for reader, size in found[name].readers}
        return told == read and all(its.versions == (VERSIONS,) for its in publishers)

    assert wait_until(have_heard, 20), found
    for name in PUBLISHERS:
        assert found[name].held <= 2 * PIECE and not found[name].mapped
    for reader in ("g0", "g1"):
        its = found[reader]
        assert dict(its.sources).keys() == set(PUBLISHERS) and not its.held and its.mapped >= 2 * PIECE
        assert sum(size for _, size in its.sources) == its.bytes_in


def remember(store: rtr.WeightStore) -> str:
    """Pull twice, so that the next pull can bring tensors at once; keep the store and the model here."""
    model = {name: shard(name, 1, 0, 2) for name in SHAPES}
    assert [store.pull(model) for _ in range(2)] == [1, 1]
    _kept[store.name] = store, model
    return store.name


_kept: dict[str, Any] = {}


def lost_in_vain(name: str) -> str:
    """Why a version that one publisher has lost cannot be pulled, which changes nothing."""
    store, model = _kept.pop(name)
    for value in model.values():
        (value.tensor if isinstance(value, rtr.Shard) else value).fill_(-1.0)
    with pytest.raises(rtr.errors.RayTorchRpcError) as raised:
        store.pull(model, version=1)
    assert all(_same(model[each], shard(each, 1, 0, 2)) for each in SHAPES), "something was written"
    return type(raised.value).__name__


def kill(actor: Any) -> int:
    pid: int = ray.get(actor.run.remote(os.getpid), timeout=60)
    os.kill(pid, signal.SIGKILL)
    return pid


def await_restart(actor: Any, pid: int, group: rtr.Group) -> None:
    """``pid``: of the process that was killed."""
    assert wait_until(lambda: pid_of(actor) not in (None, pid), 60)
    assert wait_until(lambda: pid not in {member.pid for member in group.members}, 60)
    group.wait_ready(60)


def follow(store: rtr.WeightStore, latch: Latch) -> list[Any]:
    """Pull again when a publisher is lost, and then twice with one handle."""
    model = {name: shard(name, 1, 0, 2) for name in SHAPES}
    assert store.pull(model) == 1
    latch.pass_through()
    with pytest.raises((rtr.PeerLost, rtr.NotFound)):
        wait_until(lambda: not store.pull(model), 20)
    versions = [store.pull(model, timeout=60, through_restarts=True), store.pull(model)]
    assert all(_same(model[name], shard(name, 1, 0, 2, versions[-1])) for name in SHAPES)
    return versions


@pytest.mark.parametrize(("lost", "version"), [("t0", 5), ("t1", 2)])
def test_a_follower_waits_through_the_restart_of_a_publisher(
    actors: dict[str, Any], group: rtr.Group, store: rtr.WeightStore, lost: str, version: int, tmp_path: Path
) -> None:
    """With the first publisher its store ends, and a new one begins."""
    publish_all(actors, store, 1)
    latch = Latch.make(tmp_path / "latch")
    following = actors["g0"].run.remote(follow, store, latch)
    held = latch.await_arrival()
    pid = kill(actors[lost])
    latch.release(held)
    await_restart(actors[lost], pid, group)
    publish_all(actors, rtr.WeightStore(store.name, publishers=PUBLISHERS), version)
    assert ray.get(following, timeout=60) == [version, version]


def test_a_restarted_publisher_leaves_no_mixed_version(
    actors: dict[str, Any], group: rtr.Group, store: rtr.WeightStore
) -> None:
    """What others had staged with a process that is gone never becomes a version."""
    publish_all(actors, store, 1)
    model = ray.get(actors["g1"].run.remote(remember, store), timeout=60)
    assert ray.get(actors["t0"].run.remote(publish, store, 0, 2), timeout=60) == 2
    await_restart(actors["t1"], kill(actors["t1"]), group)
    assert ray.get(actors["g1"].run.remote(lost_in_vain, model), timeout=60) == "NotFound"
    runs = [
        actors[name].run.remote(lambda s, at: s.publish({n: shard(n, 0, at, 2, 3) for n in SHAPES}), store, at)
        for at, name in enumerate(PUBLISHERS)
    ]
    assert ray.get(runs, timeout=60) == [3, 3]
    assert ray.get(actors["g0"].run.remote(pulled, store, 1, 1, 2), timeout=60) == (3, [])
