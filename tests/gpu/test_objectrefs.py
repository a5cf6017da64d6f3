"""ObjectRefs of CUDA tensors by the group's lanes, and by the door.

``a`` and ``b`` are on one GPU, ``c`` is on another where there is one, ``h`` has none. By themselves:
``python -m pytest tests/gpu/test_objectrefs.py``.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests.releases import skip_module_without

skip_module_without("objectrefs")

pytestmark = pytest.mark.gpu

LARGE, SMALL = 3_000_000, 1000
BUSY = 200_000_000
"""Cycles of a GPU: about a tenth of a second."""


@ray.remote
class Maker:
    """Makes CUDA tensors where it has a GPU, and says what it got."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    @rtr.method(objectref=True)
    def make(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self, *args)

    def look(self, value: Any) -> Any:
        return look(value)

    def get(self, refs: list[Any]) -> Any:
        return [look(value) for value in ray.get(refs)]

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self, *args)

    def held(self) -> int:
        gc.collect()
        return rtr.rdt.held()


def look(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.device.type, float(value.detach().double().sum())
    return [look(item) for item in (value.values() if isinstance(value, dict) else value)]


def full(self: Any, numel: int, value: float) -> torch.Tensor:
    return torch.full((numel,), value, device="cuda")


def late(self: Any, numel: int, value: float) -> torch.Tensor:
    """Only queued when it returns."""
    tensor = torch.zeros(numel, device="cuda")
    torch.cuda._sleep(BUSY)
    return tensor.add_(value)


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=60)


def ready(ref: Any) -> Any:
    rtr.rdt.wait(ref, timeout=60)
    return ref


@pytest.fixture(scope="module")
def actors() -> Iterator[dict[str, Any]]:
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=8)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    made = {name: Maker.options(num_gpus=0.3, num_cpus=0).remote() for name in "ab"}
    made["h"] = Maker.options(num_cpus=0).remote()
    if gpus > 1:
        made["c"] = Maker.options(num_gpus=1, num_cpus=0).remote()
    yield made
    ray.shutdown()


@pytest.fixture(scope="module")
def members(actors: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with rtr.init_group(actors):
        yield actors


@pytest.fixture(autouse=True)
def nothing_is_kept(actors: dict[str, Any]) -> Iterator[None]:
    yield
    gc.collect()
    deadline = time.monotonic() + 20
    while any(get(actor.held.remote()) for actor in actors.values()):
        assert time.monotonic() < deadline, "a source keeps what nobody has a ref to"


TO = ["b", pytest.param("c", marks=pytest.mark.gpu(2))]


@pytest.mark.parametrize("to", TO)
@pytest.mark.parametrize("numel", [1, SMALL, LARGE, 40 * LARGE])
def test_they_arrive_on_the_receivers_gpu(members: dict[str, Any], to: str, numel: int) -> None:
    for value in (1.0, 2.0):
        assert get(members[to].look.remote(members["a"].make.remote(full, numel, value))) == ("cuda", value * numel)


@pytest.mark.parametrize("to", TO)
def test_what_is_still_being_computed(members: dict[str, Any], to: str) -> None:
    for value in (1.0, 2.0, 3.0):
        ref = members["a"].make.remote(late, LARGE, value)
        assert get(members[to].look.remote(ref)) == ("cuda", value * LARGE)


@pytest.mark.parametrize("to", TO)
def test_many_small_ones_and_both_kinds_in_one_object(members: dict[str, Any], to: str) -> None:
    many = members["a"].make.remote(lambda self: [torch.full((64,), float(i), device="cuda") for i in range(1000)])
    seen = get(members[to].look.remote(many))
    assert seen == [("cuda", 64.0 * index) for index in range(1000)]
    mixed = members["a"].make.remote(
        lambda self: {"gpu": full(self, LARGE, 2.0), "cpu": torch.ones(LARGE), "small": torch.ones(3)}
    )
    assert get(members[to].look.remote(mixed)) == [("cuda", 2.0 * LARGE), ("cpu", 1.0 * LARGE), ("cpu", 3.0)]


def into(self: Any, refs: list[Any], device: str) -> tuple[bool, Any]:
    buffers = [torch.zeros(LARGE, device=device), torch.zeros(5, device=device)]
    ray.experimental.set_target_for_ref(refs[0], buffers)
    received = ray.get(refs[0])
    return all(one is other for one, other in zip(received, buffers, strict=True)), look(buffers)


def onto(self: Any, refs: list[Any], device: str) -> Any:
    ray.experimental.set_target_device_for_ref(refs[0], device)
    return look(ray.get(refs[0]))


@pytest.mark.parametrize("to", ["b", "h", pytest.param("c", marks=pytest.mark.gpu(2))])
@pytest.mark.parametrize("source", ["a", "h"])
def test_targets_on_either_device(members: dict[str, Any], source: str, to: str) -> None:
    if source == to:
        pytest.skip("Ray gives an actor what it made itself as it is")
    device = "cpu" if source == "h" else "cuda"
    ref = members[source].make.remote(
        lambda self, device: [torch.ones(LARGE, device=device), torch.ones(5, device=device)], device
    )
    ready(ref)
    for target in ["cpu"] if to == "h" else ["cpu", "cuda"]:
        expected = [(target, float(LARGE)), (target, 5.0)]
        assert get(members[to].run.remote(into, [ref], target)) == (True, expected)
        assert get(members[to].run.remote(onto, [ref], target)) == expected


def test_a_receiver_without_a_gpu_is_told_what_to_do(members: dict[str, Any]) -> None:
    ref = ready(members["a"].make.remote(full, LARGE, 1.0))
    with pytest.raises(rtr.TransferFailed, match=r"no mapping to member 'h'.*set_target_device_for_ref\(ref, 'cpu'\)"):
        get(members["h"].look.remote(ref))
    # Another object: of one that failed there and was then borrowed there, Ray's own count never ended.
    ref = ready(members["a"].make.remote(full, LARGE, 1.0))
    assert get(members["h"].run.remote(onto, [ref], "cpu")) == ("cpu", LARGE)
    assert get(members["b"].look.remote(ref)) == ("cuda", LARGE)


def test_outsiders_get_them_on_their_gpu_if_ray_gave_them_one(members: dict[str, Any]) -> None:
    ref = ready(members["a"].make.remote(full, LARGE, 4.0))
    for gpus, device in ((0.3, "cuda"), (0, "cpu")):
        outsider = Maker.options(num_gpus=gpus, num_cpus=0).remote()
        assert get(outsider.get.remote([ref])) == [(device, 4.0 * LARGE)]
        assert get(outsider.run.remote(onto, [ref], "cpu")) == ("cpu", 4.0 * LARGE)
        ray.kill(outsider)
    assert look(get(ref)) == ("cuda" if torch.cuda.is_initialized() else "cpu", 4.0 * LARGE)
