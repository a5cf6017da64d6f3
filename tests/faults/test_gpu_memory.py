"""A receiver whose GPU has no memory left: that call fails, with the reason, and nothing else does.

Both actors are on one GPU. What stands for the rest of its memory is a limit of torch's own allocator in the receiver.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from tests import insides
from tests.faults.running import ray_here
from tests.polling import wait_until

pytestmark = pytest.mark.gpu

MIB = 1 << 20
LARGE, SMALL = 256 * MIB // 4, 3_000_000
"""Elements of float32."""


@ray.remote(num_gpus=0.5, num_cpus=0)
class OnGpu:
    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    @rtr.method
    def total(self, tensor: torch.Tensor) -> float:
        return float(tensor.sum())

    @rtr.method
    def ones(self, size: int) -> torch.Tensor:
        return torch.ones(size, device="cuda")


def limit(mib: int | None) -> None:
    """In the actor: how much its torch may allocate; None: all of it."""
    gc.collect()
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if mib is None else mib * MIB / whole)


def total_at(peer: str, size: int) -> float:
    return float(rtr.rpc_sync(peer, timeout=20).total(torch.ones(size, device="cuda")))


def sum_of_ones(peer: str, size: int) -> float:
    return float(rtr.rpc_sync(peer, timeout=20).ones(size).sum())


def nothing_out() -> bool:
    """Whether this sender has back what it had lent, and its memory with it."""
    lane = insides.tensor_lane("cuda_ipc")

    def back() -> bool:
        gc.collect()
        lane.reap()
        return not lane.outstanding and torch.cuda.memory_allocated() == 0

    return wait_until(back, 10)


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any]]:
    with ray_here():
        a, b = OnGpu.remote(), OnGpu.remote()
        ray.get([one.run.remote(limit, None) for one in (a, b)], timeout=60)
        with rtr.init_group({"a": a, "b": b}):
            yield a, b
        for one in (a, b):
            ray.kill(one)


@pytest.mark.parametrize("ask", [total_at, sum_of_ones], ids=["argument", "result"])
def test_no_memory_on_the_receivers_gpu(pair: tuple[Any, Any], ask: Callable[[str, int], float]) -> None:
    a, b = pair
    # Who receives: the callee of an argument, the caller of a result.
    receiver, sender = (b, a) if ask is total_at else (a, b)

    def called(size: int) -> float:
        return float(ray.get(a.run.remote(ask, "b", size), timeout=60))

    assert called(SMALL) == SMALL
    ray.get(receiver.run.remote(limit, 100), timeout=60)
    with pytest.raises(rtr.RayTorchRpcError, match="out of memory"):
        called(LARGE)
    assert called(SMALL) == SMALL, "what fits arrives meanwhile"
    assert ray.get(sender.run.remote(nothing_out), timeout=60)
    ray.get(receiver.run.remote(limit, None), timeout=60)
    assert called(LARGE) == LARGE
    assert ray.get(sender.run.remote(nothing_out), timeout=60)
