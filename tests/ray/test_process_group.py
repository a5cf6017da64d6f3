"""Process groups: collectives and DDP among members, and what becomes of them when members come and go."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import raytorchrpc as rtr
from raytorchrpc.errors import BootstrapError, ConfigurationError, NotAMember, ProcessGroupLost
from tests.ray.actors import Peer
from tests.ray.conftest import Spawn

STEPS, BATCH, WIDTH = 6, 12, 5


def at_all(actors: Any, function: Any, *args: Any) -> list[Any]:
    return ray.get([actor.run.remote(function, *args) for actor in actors], timeout=60)


# --- what members run -----------------------------------------------------------------------------------------------


def own_rank() -> int:
    return rtr.process_group().rank()


def reduced(root: int) -> tuple[float, float, float]:
    """The sum of all ranks plus one, by the default group and by name; and what ``root`` broadcast."""
    group = rtr.process_group()
    one, two = (torch.full((1000,), float(group.rank() + 1)) for _ in range(2))
    dist.all_reduce(one)
    dist.all_reduce(two, group=group)
    sent = torch.full((3,), float(group.rank()))
    dist.broadcast(sent, src=root)
    return one.mean().item(), two.mean().item(), sent.mean().item()


def model() -> torch.nn.Module:
    torch.manual_seed(7)
    layers = torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    return torch.nn.Sequential(*layers).double()


def losses(shards: int, rank: int, distributed: bool) -> list[float]:
    """Of some steps on fixed batches, of which this process sees its shard; averaged over all."""
    trained: Any = model()
    if distributed:
        trained = DistributedDataParallel(trained)
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.double).chunk(shards)[rank]
        loss = (trained(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        trained.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter -= 0.1 * parameter.grad
        whole = loss.detach().clone()
        if distributed:
            dist.all_reduce(whole)
        found.append(whole.item() / shards)
    return found


def losses_of_ddp() -> list[float]:
    group = rtr.process_group()
    return losses(group.size(), group.rank(), True)


def how_a_collective_ends() -> tuple[str, float]:
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1 << 20))
    except Exception as error:
        return type(error).__name__, time.monotonic() - began
    return "", time.monotonic() - began


def why_none() -> str:
    with pytest.raises(ProcessGroupLost) as lost:
        rtr.process_group()
    return str(lost.value)


def what_is_left() -> tuple[bool, list[str], list[str]]:
    variables = [name for name in os.environ if name.startswith(("GLOO_", "TORCH_NCCL_"))]
    threads = [thread.name for thread in threading.enumerate() if thread.name.endswith("-process-group")]
    return dist.is_initialized(), variables, threads


def begin_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def use_view() -> str:
    with pytest.raises(NotAMember) as refused:
        rtr.get_group().process_group("gloo")
    return str(refused.value)


# --- the tests ------------------------------------------------------------------------------------------------------


def test_collectives_among_all_members(peers: list[Any]) -> None:
    with rtr.init_group(dict(zip("abc", peers, strict=True))) as group:
        assert "call Group.process_group()" in at_all(peers, why_none)[0]
        info = group.process_group("gloo")
        assert (info.backend, info.world_size, dict(info.ranks)) == ("gloo", 3, {"a": 0, "b": 1, "c": 2})
        assert at_all(peers, own_rank) == [0, 1, 2]
        assert at_all(peers, rtr.process_group_info) == [info] * 3
        assert at_all(peers, reduced, 2) == [(6.0, 6.0, 2.0)] * 3
        assert "raytorchrpc.process_group()" in at_all(peers, use_view)[0]
        again = group.process_group("gloo")
        assert again.number == 2
        assert at_all(peers, reduced, 0) == [(6.0, 6.0, 0.0)] * 3
    assert at_all(peers, what_is_left) == [(False, [], [])] * 3


def test_the_losses_of_a_data_parallel_model_are_those_of_one_process(peers: list[Any]) -> None:
    with rtr.init_group(peers[:2]) as group:
        group.process_group("gloo")
        first, second = at_all(peers[:2], losses_of_ddp)
    alone = losses(1, 0, False)
    assert alone[-1] < alone[0] / 2
    assert first == second == pytest.approx(alone, rel=1e-9)


def test_a_driver_takes_part(peers: list[Any]) -> None:
    with rtr.init_group({"a": peers[0], "b": peers[1]}, include_driver=True) as group:
        info = group.process_group("gloo")
        assert info.ranks["driver"] == 2
        others = [peer.run.remote(reduced, 1) for peer in peers[:2]]
        assert [reduced(1), *ray.get(others, timeout=60)] == [(6.0, 6.0, 1.0)] * 3
    assert what_is_left() == (False, [], [])


def test_some_members_make_one_without_the_others(peers: list[Any]) -> None:
    a, b, c = peers
    with rtr.init_group({"a": a, "b": b, "c": c}, include_driver=True) as group:
        info = group.process_group("gloo", members=["c", a])
        assert (info.number, dict(info.ranks)) == (1, {"a": 0, "c": 1})
        assert at_all((a, c), reduced, 0) == [(3.0, 3.0, 0.0)] * 2
        for reason in (*at_all([b], why_none), why_none()):
            assert "number 1 is among others: a, c" in reason
        for wrong in ([], ["a", a], "a", a):
            with pytest.raises(ConfigurationError, match=r"process_group\(members=...\) takes"):
                group.process_group("gloo", members=wrong)
        with pytest.raises(NotAMember, match="'x' is not in group"):
            group.process_group("gloo", members=["x"])
        assert at_all((a, c), reduced, 1) == [(3.0, 3.0, 1.0)] * 2, "what was refused has changed something"

        assert group.process_group("gloo").world_size == 4  # all of them again
        assert dict(group.process_group("gloo", members=[1, 2]).ranks) == {"b": 0, "c": 1}
        assert "number 3 is among others: b, c" in at_all([a], why_none)[0]
        group.remove([a])  # not one of them: theirs goes on
        assert at_all((b, c), reduced, 1) == [(3.0, 3.0, 1.0)] * 2
    assert what_is_left() == (False, [], [])


def test_a_member_that_is_killed_and_comes_back_and_one_that_leaves(spawn: Spawn) -> None:
    a, b, c = (spawn(Peer, max_restarts=-1) for _ in range(3))
    with rtr.init_group({"a": a, "b": b, "c": c}) as group:
        news: queue.Queue[Any] = queue.Queue()
        group.on_change(news.put)
        group.process_group("gloo", collective_timeout_s=4)
        assert at_all((a, b, c), reduced, 0) == [(6.0, 6.0, 0.0)] * 3
        under_way = [actor.run.remote(how_a_collective_ends) for actor in (a, c)]
        assert not ray.wait(under_way, timeout=0.5)[0], "it ended without b"
        pid = ray.get(b.run.remote(os.getpid), timeout=60)
        os.kill(pid, signal.SIGKILL)
        for kind, seconds in ray.get(under_way, timeout=60):
            assert kind in ("RuntimeError", "ValueError") and seconds < 10  # the second if it began too late
        while news.get(timeout=60)[:2] != ("back", ("b",)):
            pass
        for reason in at_all((a, c), why_none):
            assert "'b' was lost" in reason and "call Group.process_group() again" in reason
        assert "call Group.process_group()" in at_all([b], why_none)[0]
        group.process_group("gloo")
        assert at_all((a, b, c), reduced, 1) == [(6.0, 6.0, 1.0)] * 3

        group.remove(["a"])
        assert "'a' was lost (it was removed" in at_all((b, c), why_none)[0]
        assert at_all([a], what_is_left) == [(False, [], [])]
        group.add({"d": a})
        info = group.process_group("gloo")
        assert [member.rank for member in group.members] == [1, 2, 3]
        assert dict(info.ranks) == {"b": 0, "c": 1, "d": 2}
        assert at_all((b, c, a), own_rank) == [0, 1, 2]
        assert at_all((b, c, a), reduced, 2) == [(6.0, 6.0, 2.0)] * 3


def test_a_member_waits_for_the_next_one(peers: list[Any]) -> None:
    with rtr.init_group(peers[:2]) as group:
        waiting = peers[0].run.remote(waits)
        assert not ray.wait([waiting], timeout=0.2)[0]
        group.process_group("gloo")
        assert ray.get(waiting, timeout=60) == 0


def waits() -> int:
    return rtr.process_group(timeout_s=30).rank()


def test_bad_input_is_refused_at_once_and_leaves_nothing(peers: list[Any], spawn: Spawn) -> None:
    with rtr.init_group({"a": peers[0], "b": peers[1]}) as group:
        for backend in ("mpi", "NCCL", None):
            with pytest.raises(ConfigurationError, match=r"'gloo' or 'nccl', not"):
                group.process_group(backend)
        with pytest.raises(
            ConfigurationError, match=r"'nccl' needs a GPU in every member; none in a, b.*backend='gloo'"
        ):
            group.process_group("nccl")
        for seconds in (0, -1, float("nan"), "5"):
            with pytest.raises(ConfigurationError, match="timeout_s must be above 0"):
                group.process_group("gloo", collective_timeout_s=seconds)
        at_all(peers[1:2], begin_alone)
        try:
            with pytest.raises(ConfigurationError, match=r"initialised in 'b' already.*destroy_process_group"):
                group.process_group("gloo")
            assert at_all(peers[:1], what_is_left) == [(False, [], [])]
        finally:
            at_all(peers[1:2], dist.destroy_process_group)
        group.process_group("gloo")
        assert at_all(peers[:2], own_rank) == [0, 1]
    with pytest.raises(BootstrapError, match="shut down"):
        group.process_group("gloo")
