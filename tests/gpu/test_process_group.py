"""Process groups over NCCL: a data-parallel model on two GPUs trains as one process does, and a lost member ends it."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import raytorchrpc as rtr
from tests.ray.actors import Peer
from tests.ray.test_process_group import at_all, why_none

pytestmark = pytest.mark.gpu(2)

STEPS, BATCH, WIDTH = 20, 64, 128


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_gpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture
def pair(cluster: None) -> Iterator[list[Any]]:
    made = [ray.remote(Peer).options(num_gpus=1, num_cpus=0, max_restarts=-1).remote() for _ in range(2)]
    yield made
    for actor in made:
        ray.kill(actor)


def losses(shards: int, rank: int, how: str) -> list[float]:
    torch.manual_seed(7)
    layers = torch.nn.Linear(WIDTH, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)
    trained: Any = torch.nn.Sequential(*layers).double().cuda()
    if how == "ddp":
        trained = DistributedDataParallel(trained)
    elif how == "fsdp":
        from torch.distributed.fsdp import fully_shard  # takes a second, also where tests are only collected

        fully_shard(trained, mesh=init_device_mesh("cuda", (shards,)))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01, momentum=0.9)
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.double)
        inputs = batch.chunk(shards)[rank].cuda()
        loss = (trained(inputs) - inputs.mean(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        whole = loss.detach().clone()
        if how != "alone":
            dist.all_reduce(whole)
        found.append(whole.item() / shards)
    return found


def losses_here(how: str) -> list[float]:
    group = rtr.process_group()
    return losses(group.size(), group.rank(), how)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_losses_on_two_gpus_are_those_of_one_process(pair: list[Any], how: str) -> None:
    with rtr.init_group(pair) as group:
        info = group.process_group("nccl")
        assert (info.backend, info.world_size) == ("nccl", 2)
        first, second = at_all(pair, losses_here, how)
    alone = ray.get(pair[0].run.remote(losses, 1, 0, "alone"), timeout=120)
    print(f"\n{how}: step, one process, two GPUs, difference")
    for step in (0, STEPS // 2, STEPS - 1):
        print(f"{step:4d}  {alone[step]:.12f}  {first[step]:.12f}  {abs(first[step] - alone[step]):.1e}")
    assert alone[-1] < alone[0]
    assert first == second == pytest.approx(alone, rel=1e-9)


def reduced() -> float:
    tensor = torch.full((1 << 20,), float(dist.get_rank() + 1), device="cuda")
    dist.all_reduce(tensor)
    return tensor.mean().item()


def never_met() -> float:
    """A collective whose other half never comes: how long until this GPU is free again."""
    tensor = torch.ones(1 << 20, device="cuda")
    began = time.monotonic()
    try:
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
    except (RuntimeError, ValueError):
        return time.monotonic() - began
    return time.monotonic() - began


def test_a_member_that_is_killed_ends_it_and_the_next_one_works(pair: list[Any]) -> None:
    with rtr.init_group(dict(zip("ab", pair, strict=True))) as group:
        news: queue.Queue[Any] = queue.Queue()
        group.on_change(news.put)
        group.process_group("nccl", collective_timeout=60)
        assert at_all(pair, reduced) == [3.0, 3.0]
        under_way = pair[0].run.remote(never_met)
        assert not ray.wait([under_way], timeout=1)[0]
        os.kill(ray.get(pair[1].run.remote(os.getpid), timeout=60), signal.SIGKILL)
        seconds = ray.get(under_way, timeout=50)
        print(f"\na collective without its other half ended after {seconds:.2f} s")
        assert "'b' was lost" in ray.get(pair[0].run.remote(why_none), timeout=60)
        while news.get(timeout=60)[:2] != ("back", ("b",)):
            pass
        group.process_group("nccl")
        assert at_all(pair, reduced) == [3.0, 3.0]


def test_two_members_on_one_gpu_are_refused(cluster: None) -> None:
    halves = [ray.remote(Peer).options(num_gpus=0.5, num_cpus=0).remote() for _ in range(2)]
    with rtr.init_group(halves) as group:
        with pytest.raises(rtr.ConfigurationError, match=r"on one GPU.*num_gpus=1, or use backend='gloo'"):
            group.process_group("nccl")
        assert group.process_group("gloo").world_size == 2
    for actor in halves:
        ray.kill(actor)
