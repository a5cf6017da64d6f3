"""Weights on GPUs: published by one actor, pulled by others on the same GPU, on another, and without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from raytorchrpc.patterns.weights.published import PublishedWeights
from raytorchrpc.patterns.weights.source_lease import Requests
from tests import insides
from tests.gpu.ends import ends
from tests.insides import in_actor
from tests.ray.weight_helpers import was_pulled

pytestmark = pytest.mark.gpu

#: Elements of float32: what travels with others, and what travels alone.
SIZES = (1000, 3_000_000, 7, 500_000)
_LATE = 50_000_000


@pytest.fixture(scope="module")
def actors() -> Iterator[dict[str, Any]]:
    # The reader without a GPU gets what lies on the learner's in its own memory.
    config = rtr.GroupConfig(device_maps={"host": {"learner": {"cpu": 0}}})
    with ends("learner", "same", host="host") as made, rtr.init_group(made, config=config):
        yield made


def learn(store: rtr.WeightStore, versions: int) -> int:
    """Weights that the GPU has not written yet when they are published, and that it changes right afterwards."""
    model = {f"layer{number}": torch.zeros(size, device="cuda") for number, size in enumerate(SIZES)}
    for value in range(1, versions + 1):
        torch.cuda._sleep(_LATE // 10)
        for tensor in model.values():
            tensor.fill_(value)
        store.publish(model)
        for tensor in model.values():
            tensor.fill_(-1)
    torch.cuda.synchronize()
    return versions


def follow(store: rtr.WeightStore, device: str, versions: int, dtype: torch.dtype = torch.float32) -> int:
    model = {f"layer{n}": torch.zeros(size, device=device, dtype=dtype) for n, size in enumerate(SIZES)}
    version = pulls = 0
    while version < versions:
        version = store.pull(model, convert=dtype is not torch.float32)
        found = {int(value) for tensor in model.values() for value in (tensor.min(), tensor.max())}
        assert found == {version}
        pulls += 1
    return pulls


def check(actors: dict[str, Any], reader: str, device: str, dtype: torch.dtype = torch.float32) -> None:
    store = rtr.WeightStore(f"{reader} {device} {dtype}", home="learner")
    follows = actors[reader].run.remote(follow, store, device, 30, dtype)
    assert in_actor(actors["learner"], learn, store, 30) == 30
    assert ray.get(follows, timeout=120) >= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_one_gpu(actors: dict[str, Any], dtype: torch.dtype) -> None:
    check(actors, "same", "cuda", dtype)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_two_gpus(actors: dict[str, Any], dtype: torch.dtype) -> None:
    check(actors, "other", "cuda", dtype)


def lend(store: rtr.WeightStore, versions: int) -> int:
    """As ``learn``, without a copy; returns the most memory that the store had."""
    model = {f"layer{number}": torch.zeros(size, device="cuda") for number, size in enumerate(SIZES)}
    held = 0
    for value in range(1, versions + 1):
        torch.cuda._sleep(_LATE // 10)
        for tensor in model.values():
            tensor.fill_(value)
        with store.lend(model):
            assert was_pulled(store, value)
            held = max(held, store.stats().held)
        for tensor in model.values():
            tensor.fill_(-1)
    torch.cuda.synchronize()
    return held


@pytest.mark.parametrize(
    ("reader", "device", "dtype"),
    [
        ("same", "cuda", torch.float32),
        ("same", "cuda", torch.bfloat16),
        pytest.param("other", "cuda", torch.float32, marks=pytest.mark.gpu(2)),
        ("host", "cpu", torch.float32),
    ],
)
def test_a_model_that_is_lent(actors: dict[str, Any], reader: str, device: str, dtype: torch.dtype) -> None:
    store = rtr.WeightStore(f"lent to {reader} {device} {dtype}", home="learner")
    follows = actors[reader].run.remote(follow, store, device, 30, dtype)
    held = in_actor(actors["learner"], lend, store, 30)
    assert dtype is not torch.float32 or held == 0
    in_actor(actors["learner"], learn_last, store, 31)
    assert ray.get(follows, timeout=120) >= 1


def hold(store: rtr.WeightStore, reader: Any, rounds: int) -> list[list[float]]:
    """Lend a model while the reader pulls its tensors one by one; what it has got of each, by round."""
    model = {f"layer{number}": torch.zeros(size, device="cuda") for number, size in enumerate(SIZES)}
    brought = []
    for value in range(rounds):
        for tensor in model.values():
            tensor.fill_(value)
        with store.lend(model):
            brought.append(ray.get(reader.run.remote(pull_parts, store)))
    return brought


def pull_parts(store: rtr.WeightStore) -> list[float]:
    """Each tensor by a pull of its own, which maps and reads no other."""
    brought = []
    for number, size in enumerate(SIZES):
        part = {f"layer{number}": torch.full((size,), -1.0, device="cuda")}
        store.pull(part, only=f"layer{number}", strict=False)
        brought += [float(tensor.min() + tensor.max()) / 2 for tensor in part.values()]
    return brought


def test_parts_of_a_model_that_is_lent(actors: dict[str, Any]) -> None:
    store = rtr.WeightStore("lent in parts", home="learner")
    brought = in_actor(actors["learner"], hold, store, actors["same"], 3)
    assert brought == [[float(value)] * len(SIZES) for value in range(3)]


def learn_last(store: rtr.WeightStore, version: int) -> None:
    """Publish, for readers that missed the last loan."""
    model = {f"layer{number}": torch.full((size,), float(version), device="cuda") for number, size in enumerate(SIZES)}
    assert store.publish(model) == version


def test_by_a_member_without_a_gpu(actors: dict[str, Any]) -> None:
    check(actors, "host", "cpu")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_in_the_learner_itself(actors: dict[str, Any], device: str) -> None:
    store = rtr.WeightStore(f"itself {device}", home="learner")
    assert in_actor(actors["learner"], learn, store, 3) == 3
    assert in_actor(actors["learner"], follow, store, device, 3) == 1


@pytest.mark.parametrize("reader", ["learner", "same"])
def test_an_iterator_with_a_stream_of_its_own(actors: dict[str, Any], reader: str) -> None:
    """It stays current while the iterator is suspended, and writes to one tensor again and again."""
    store = rtr.WeightStore(f"iterator {reader}", home="learner")

    def made(value: int) -> Iterator[tuple[str, torch.Tensor]]:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            buffer = torch.zeros(SIZES[1], device="cuda")
            for number in range(4):
                torch.cuda._sleep(_LATE // 10)
                yield f"layer{number}", buffer.fill_(value + number)

    def publish() -> list[int]:
        return [store.publish(made(value)) for value in (10, 20, 30)]

    def see() -> list[set[int]]:
        model = {f"layer{number}": torch.zeros(SIZES[1], device="cuda") for number in range(4)}
        store.pull(model)
        return [{int(tensor.min()), int(tensor.max())} for tensor in model.values()]

    assert in_actor(actors["learner"], publish) == [1, 2, 3]
    assert in_actor(actors[reader], see) == [{30}, {31}, {32}, {33}]


def test_only_what_has_changed(actors: dict[str, Any]) -> None:
    store = rtr.WeightStore("changed", home="learner", track=True)

    def change(element: float) -> int:
        model = {f"layer{number}": torch.ones(size, device="cuda") for number, size in enumerate(SIZES)}
        model["layer1"].data[5] = element
        return store.publish(model)

    def see(since: int | None) -> list[float]:
        model = {f"layer{number}": torch.zeros(size, device="cuda") for number, size in enumerate(SIZES)}
        store.pull(model, since=since)
        return [float(tensor.max()) for tensor in model.values()]

    assert in_actor(actors["learner"], change, 1.0) == 1
    assert in_actor(actors["same"], see, None) == [1.0, 1.0, 1.0, 1.0]
    assert in_actor(actors["learner"], change, 3.0) == 2
    assert in_actor(actors["same"], see, 1) == [0.0, 3.0, 0.0, 0.0]


@pytest.mark.parametrize("reader", ["same", "other"])
def test_only_the_elements_that_have_changed(actors: dict[str, Any], reader: str) -> None:
    """Into tensors that lie as published, and into a part of a transposed one. As from another host."""
    if reader not in actors:
        pytest.skip("needs two GPUs")
    store = rtr.WeightStore(f"elements {reader}", home="learner", keep=2, track=True)
    shape = (2000, 1500)

    def bits(version: int) -> torch.Tensor:
        made = torch.randint(-(1 << 15), 1 << 15, shape, generator=torch.Generator().manual_seed(1)).short()
        for step in range(2, version + 1):
            made[torch.rand(shape, generator=torch.Generator().manual_seed(step)) < 0.01] ^= step
        return made

    def publish() -> None:
        for version in (1, 2):
            store.publish({"w": bits(version).view(torch.bfloat16).cuda()}, version)

    def pull() -> list[bool]:
        whole = torch.zeros(shape, dtype=torch.int16, device="cuda")
        part = torch.zeros(1000, shape[0], dtype=torch.int16, device="cuda").t()
        models = [
            {"w": whole.view(torch.bfloat16)},
            {"w": rtr.Shard(part.view(torch.bfloat16), shape, (0, 500))},
        ]
        for model in models:
            store.pull(model, 1)
        changed = bits(1) != bits(2)
        targets = [(whole, bits(2), changed), (part, bits(2)[:, 500:], changed[:, 500:])]
        for target, _, at in targets:
            target[~at.cuda()] = 77  # shows what is brought
        for model in models:
            store.pull(model, 2, since=1)
        return [torch.equal(target.cpu(), now.where(at, 77)) for target, now, at in targets]

    def as_if_far() -> None:
        insides.saved.kept = Requests.is_readable, PublishedWeights._has_far_members
        Requests.is_readable = lambda *_: False  # type: ignore[method-assign]
        PublishedWeights._has_far_members = lambda _: True  # type: ignore[method-assign]

    def as_it_is() -> None:
        Requests.is_readable, PublishedWeights._has_far_members = insides.saved.kept  # type: ignore[method-assign]

    both = actors["learner"], actors[reader]
    for actor in both:
        in_actor(actor, as_if_far)
    try:
        in_actor(actors["learner"], publish)
        assert in_actor(actors[reader], pull) == [True, True]
    finally:
        for actor in both:
            in_actor(actor, as_it_is)
