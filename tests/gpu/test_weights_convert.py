"""Weights that a GPU converts to fp8 with scales: bit for bit as the CPU, and while new ones are published."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from raytorchrpc.patterns.weights import conversions
from raytorchrpc.patterns.weights.quantize_kernel import QUANTIZE
from tests.gpu.ends import ends
from tests.polling import wait_until

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
ROWS, COLUMNS = 2000, 1500


@pytest.fixture(scope="module")
def actors() -> Iterator[dict[str, Any]]:
    with ends("learner", "same") as made, rtr.init_group(made):
        yield made


def converted(weight: torch.Tensor, block: tuple[int, int]) -> list[torch.Tensor]:
    """Values, as integers, and scales, on the CPU."""
    fp8 = rtr.BlockFp8(block)
    names = conversions.made_together(fp8.values)
    specs = [conversions.converted(weight.dtype, tuple(weight.shape), name) for name in names]
    made = [torch.zeros(shape, dtype=dtype, device=weight.device) for dtype, shape in specs]
    conversions.convert(fp8.values, weight, made)
    values, scales = (tensor.cpu() for tensor in made)
    return [values.view(torch.uint8), scales]


def differences(compiled: bool) -> list[str]:
    """Which weights the GPU converts otherwise than the CPU: by torch, or by the kernel once it is compiled."""
    if compiled:
        assert wait_until(lambda: QUANTIZE.ready_on(torch.device("cuda", 0)) is not None, 30)
    found: list[str] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape, block in (((300, 260), (128, 128)), ((129, 7), (4, 8)), ((1024, 1024), (128, 128))):
            weight = (torch.randn(shape) * torch.logspace(-6, 4, shape[1])).to(dtype)
            weight[0, 0] = 0
            weight[2, 1], weight[3, 2] = float("inf"), float("nan")
            ours, theirs = converted(weight, block), converted(weight.cuda(), block)
            ours[0][ours[0] & 0x7F == 0x7F] = theirs[0][theirs[0] & 0x7F == 0x7F] = 0x7F  # NaN of either sign
            if not all(map(torch.equal, ours, theirs)):
                found.append(f"{dtype} {shape} {block}")
    return found


def learn(store: rtr.WeightStore, versions: int) -> int:
    weight = torch.zeros(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16)
    for value in range(1, versions + 1):
        torch.cuda._sleep(5_000_000)
        weight.fill_(value)
        store.publish({"w": weight})
        weight.fill_(-1)
    torch.cuda.synchronize()
    return versions


def follow(store: rtr.WeightStore, versions: int) -> int:
    scales = torch.zeros(-(-ROWS // 128), -(-COLUMNS // 128), device="cuda")
    model = {"w": torch.zeros(ROWS, COLUMNS, device="cuda", dtype=FP8), "w_scale_inv": scales}
    version = pulls = 0
    while version < versions:
        version = store.pull(model, convert=rtr.BlockFp8())
        values = model["w"].float()
        assert bool((values == 448).all()), "the largest of each block"
        assert torch.equal(scales, torch.full_like(scales, version) / torch.full_like(scales, 448)), version
        pulls += 1
    return pulls


def test_a_gpu_converts_as_the_cpu_does(actors: dict[str, Any]) -> None:
    for compiled in (False, True):
        assert ray.get(actors["learner"].run.remote(differences, compiled), timeout=120) == []


def test_versions_are_not_mixed_while_new_ones_are_published(actors: dict[str, Any]) -> None:
    store = rtr.WeightStore("fp8", home="learner")
    follows = [actor.run.remote(follow, store, 30) for actor in actors.values() if actor is not actors["learner"]]
    assert ray.get(actors["learner"].run.remote(learn, store, 30), timeout=120) == 30
    assert all(pulls >= 1 for pulls in ray.get(follows, timeout=120))
