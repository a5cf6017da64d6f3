"""Weights published by one actor and pulled by others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests import insides
from tests.insides import in_actor
from tests.polling import wait_until
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn
from tests.ray.test_tensor_lanes import MIB, used
from tests.ray.weight_helpers import no_readers, was_pulled

#: Elements of float32: above and below what travels in a message.
LARGE, SMALL = MIB, 100


@pytest.fixture(scope="module")
def actors(peers: list[Any]) -> dict[str, Any]:
    return dict(zip(("learner", "a", "b"), peers, strict=True))


@pytest.fixture(scope="module", autouse=True)
def group(actors: dict[str, Any]) -> Iterator[rtr.Group]:
    with rtr.init_group(actors, config=rtr.GroupConfig(shm_bytes=64 * MIB)) as group:
        yield group


def filled(value: float, sizes: tuple[int, ...] = (SMALL, LARGE, 3)) -> dict[str, torch.Tensor]:
    made = {f"layer{number}": torch.full((size,), float(value)) for number, size in enumerate(sizes)}
    return {**made, "steps": torch.tensor(int(value))}


def publish(store: rtr.WeightStore, value: int) -> int:
    return store.publish(filled(value), value)


def holds(model: dict[str, torch.Tensor], value: float) -> bool:
    return all(bool((tensor == value).all()) for tensor in model.values())


def pull(store: rtr.WeightStore, value: float, **options: Any) -> int:
    """Into a model of this actor's, which lives on."""
    model = vars(insides.saved).setdefault("model", filled(-1.0))
    version = store.pull(model, **options)
    assert holds(model, value)
    return version


def store_in_learner(request: Any, **settings: Any) -> rtr.WeightStore:
    return rtr.WeightStore(request.node.name, home="learner", **settings)


def test_everybody_gets_the_newest_in_place(actors: dict[str, Any], request: Any) -> None:
    store = store_in_learner(request)
    for value in (1, 2):
        assert in_actor(actors["learner"], publish, store, value) == value
        pulls = [actors[name].run.remote(pull, store, value) for name in ("a", "b", "learner")]
        assert ray.get(pulls, timeout=60) == [value] * 3
    assert in_actor(actors["a"], store.version) == 2
    assert in_actor(actors["learner"], used) == 0, "nothing of the arena was used"


@pytest.mark.parametrize("sizes", [(SMALL, 7), (SMALL, LARGE, 3)], ids=["in the message", "where it was published"])
def test_nobody_reads_two_versions(actors: dict[str, Any], request: Any, sizes: tuple[int, ...]) -> None:
    store = rtr.WeightStore(f"torn {len(sizes)}", home="learner")

    def learn(versions: int) -> int:
        for value in range(1, versions + 1):
            store.publish(filled(float(value), sizes))
        return versions

    def follow(versions: int) -> int:
        model, seen, version = filled(-1.0, sizes), set(), 0
        while version < versions:
            version = store.pull(model)
            assert {int(tensor.min()) for tensor in model.values()} == {version}
            assert {int(tensor.max()) for tensor in model.values()} == {version}
            seen.add(version)
        return len(seen)

    readers = [actors[name].run.remote(follow, 100) for name in ("a", "b")]
    assert in_actor(actors["learner"], learn, 100) == 100
    assert all(count >= 1 for count in ray.get(readers, timeout=60))

    def at_rest() -> bool:
        weights = insides.at_home(store)
        return wait_until(lambda: weights.pool.readers == 0, 20)

    assert in_actor(actors["learner"], at_rest)


@pytest.mark.parametrize("sizes", [(SMALL, 7), (SMALL, LARGE, 3)], ids=["in the message", "by a lane"])
def test_nobody_reads_what_a_program_changes_after_its_loan(actors: dict[str, Any], sizes: tuple[int, ...]) -> None:
    store = rtr.WeightStore(f"lent {len(sizes)}", home="learner")

    def learn(versions: int) -> int:
        """Lend one model again and again; returns the most memory that the store had."""
        model, held = filled(0.0, sizes), 0
        for value in range(1, versions + 1):
            for tensor in model.values():
                tensor.fill_(value)
            with store.lend(model) as version:
                assert store.version() == version == value
                assert was_pulled(store, value)
                held = max(held, store.stats().held)
            for tensor in model.values():
                tensor.fill_(-value)
        return held

    def follow(versions: int) -> int:
        model, pulls, version = filled(-1.0, sizes), 0, 0
        while version < versions:
            version, pulls = store.pull(model), pulls + 1
            assert {int(value) for tensor in model.values() for value in (tensor.min(), tensor.max())} == {version}
        return pulls

    readers = [actors[name].run.remote(follow, 40) for name in ("a", "b")]
    assert in_actor(actors["learner"], learn, 40) == 0, "a loan takes no memory"
    assert in_actor(actors["learner"], lambda: store.publish(filled(41.0, sizes))) == 41  # for who missed the last loan
    assert all(pulls >= 1 for pulls in ray.get(readers, timeout=60))


def test_one_question_brings_what_lies_on_the_same_host(actors: dict[str, Any], request: Any) -> None:
    """A pull that asked, and then had parts sent, would take several times as long between two GPUs."""
    store = store_in_learner(request)
    in_actor(actors["learner"], publish, store, 1)

    def calls() -> int:
        return sum(row.calls for row in insides.counted_calls())

    def follow(convert: bool, strided: bool = False) -> int:
        half = {f"layer{n}": torch.zeros(size).bfloat16() for n, size in enumerate((SMALL, LARGE, 3))}
        half["steps"] = torch.tensor(0)
        model = half if convert else filled(-1.0)
        if strided:
            model = {name: torch.empty(*its.shape, 2, dtype=its.dtype)[..., 1] for name, its in model.items()}
        store.pull(model, convert=convert)  # opens it, and learns what it has
        before = calls()
        store.pull(model, convert=convert)
        made = calls() - before
        assert holds(model, 1)
        return made

    assert in_actor(actors["a"], follow, False) == 2, "a question, and word that it was read"
    assert in_actor(actors["a"], follow, False, True) == 2
    assert in_actor(actors["a"], follow, True) == 3, "two questions where dtypes are converted"


def test_models_of_every_shape_by_one_handle(actors: dict[str, Any], request: Any) -> None:
    """What a handle remembers of one pull is not taken for granted in the next."""
    store = store_in_learner(request)

    def learn(value: int, sizes: tuple[int, ...]) -> int:
        return store.publish(filled(value, sizes))

    def follow() -> None:
        plain, value = filled(-1.0, (SMALL, LARGE)), newest()
        assert store.pull(plain) and holds(plain, value)
        turned = {name: torch.empty(*tensor.shape, 2, dtype=tensor.dtype)[..., 1] for name, tensor in plain.items()}
        assert store.pull(turned) and holds(turned, value)
        half = {"layer0": torch.zeros(SMALL).half(), "layer1": torch.zeros(LARGE).bfloat16(), "steps": torch.tensor(0)}
        assert store.pull(half, convert=True) and holds(half, value)
        few = {"layer1": torch.zeros(LARGE), "other": torch.zeros(3)}
        assert store.pull(few, strict=False) and bool((few["layer1"] == value).all()) and not few["other"].any()
        assert store.pull({"other": few["other"]}, strict=False) and not few["other"].any()
        assert store.pull(plain) and holds(plain, value)
        with torch.inference_mode():
            frozen = filled(-1.0, (SMALL, LARGE))
        assert store.pull(frozen) and holds(frozen, value)

    def newest() -> float:
        return float(store.version())

    in_actor(actors["learner"], learn, 1, (SMALL, LARGE))
    in_actor(actors["a"], follow)
    in_actor(actors["learner"], learn, 2, (SMALL, LARGE, 5))
    in_actor(actors["learner"], learn, 3, (SMALL, LARGE))
    in_actor(actors["a"], follow)
    assert in_actor(actors["learner"], no_readers, store)


def test_inside_a_distributed_autograd_context(actors: dict[str, Any], request: Any) -> None:
    """Weights have no history: nothing of a pull belongs to the context."""
    store = store_in_learner(request)
    in_actor(actors["learner"], publish, store, 1)

    def follow() -> None:
        with torch.distributed.autograd.context() as context:
            model = filled(-1.0)
            assert store.pull(model) == 1 and holds(model, 1)
            half = {"layer1": torch.zeros(LARGE).bfloat16()}
            assert store.pull(half, convert=True, strict=False) == 1 and holds(half, 1)
            assert not torch.distributed.autograd.get_gradients(context)

    in_actor(actors["a"], follow)


def test_readers_that_die_and_a_home_that_does(spawn: Spawn, actors: dict[str, Any], group: rtr.Group) -> None:
    dying = {name: spawn(Peer) for name in ("learner2", "reader")}
    group.add(dying)
    store = rtr.WeightStore("weights", home="learner2")
    in_actor(dying["learner2"], publish, store, 1)

    def begin_to_read() -> None:
        view = store.view()
        threading.Timer(60, view.release).start()

    def readers() -> int:
        return int(insides.at_home(store).pool.readers)

    in_actor(dying["reader"], begin_to_read)
    assert wait_until(lambda: in_actor(dying["learner2"], readers) == 1, 20)
    ray.kill(dying["reader"])
    assert wait_until(lambda: in_actor(dying["learner2"], readers) == 0, 20)
    ray.kill(dying["learner2"])

    def follow() -> str:
        with pytest.raises(rtr.PeerLost) as lost:
            wait_until(lambda: not store.pull(filled(0.0)), 20)  # Ray says that it kills before it has
        return str(lost.value)

    assert "it is the home of weight store 'weights'" in in_actor(actors["a"], follow)
