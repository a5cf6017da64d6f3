"""ObjectRefs of CUDA tensors: the limits of Ray's that only GPUs can show. See ``docs/objectrefs.md``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests.ray.limit_actors import Maker

pytestmark = pytest.mark.gpu

PATIENCE_S = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=8)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def pair(cluster: None) -> Iterator[list[Any]]:
    """Two members; each has a GPU of its own where there are two."""
    share = 1 if ray.cluster_resources()["GPU"] > 1 else 0.4
    actors = [ray.remote(Maker).options(num_cpus=0, num_gpus=share).remote() for _ in range(2)]
    with rtr.init_group(actors):
        yield actors
    for actor in actors:
        ray.kill(actor)


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=PATIENCE_S)


def places(value: list[torch.Tensor]) -> list[tuple[str, float]]:
    return [(tensor.device.type, float(tensor.sum())) for tensor in value]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("numel", [300, 3_000_000])
def test_between_two_gpus(pair: list[Any], numel: int) -> None:
    a, b = pair
    uuids = {get(end.run.remote(lambda maker: str(torch.cuda.get_device_properties(0).uuid))) for end in pair}
    assert len(uuids) == 2
    ref = a.make.remote(lambda: [torch.ones(numel, device="cuda")])
    assert get(b.look.remote(ref, places)) == [("cuda", numel)]


def test_an_object_of_cpu_and_cuda_tensors(pair: list[Any]) -> None:
    a, b = pair

    def mixture() -> list[torch.Tensor]:
        return [torch.ones(1000), torch.full((1000,), 2.0, device="cuda"), torch.full((300_000,), 3.0)]

    expected = [("cpu", 1000), ("cuda", 2000), ("cpu", 900_000)]
    assert get(b.look.remote(a.make.remote(mixture), places)) == expected
    assert get(a.look.remote(b.make.remote(lambda: mixture()[::-1]), places)) == expected[::-1]


def test_cpu_and_cuda_by_one_method(pair: list[Any]) -> None:
    a, b = pair
    for device in ("cpu", "cuda", "cpu"):
        ref = a.make.remote(lambda device=device: [torch.ones(1000, device=device)])
        assert get(b.look.remote(ref, places)) == [(device, 1000)]


@pytest.mark.parametrize("numel", [1000, 3_000_000])
@pytest.mark.parametrize(("source", "target"), [("cuda", "cpu"), ("cpu", "cuda:0")])
def test_onto_another_device(pair: list[Any], source: str, target: str, numel: int) -> None:
    a, b = pair

    def fetch(_: Maker, refs: list[Any]) -> list[tuple[str, float]]:
        ray.experimental.set_target_device_for_ref(refs[0], target)
        return places(ray.get(refs[0], timeout=PATIENCE_S))

    ref = a.make.remote(lambda: [torch.ones(numel, device=source)])
    rtr.rdt.wait(ref, timeout=PATIENCE_S)
    assert get(b.run.remote(fetch, [ref])) == [(target.partition(":")[0], numel)]
