"""Weights of torchrl's own RayCollector, brought to its collectors by raytorchrpc."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr

with warnings.catch_warnings():  # of torchrl, tensordict and gymnasium there are many
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    pytest.importorskip("gymnasium")
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import MultiSyncCollector
    from torchrl.collectors.distributed import RayCollector
    from torchrl.envs import GymEnv
    from torchrl.weight_update import WeightSyncScheme

    from raytorchrpc.integrations.torchrl import RayTorchRpcWeightSyncScheme

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("cluster")]
#: No call lasts longer, unless it says so.
get = partial(ray.get, timeout=120)


class Net(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot((self.layers(observation) * self.scale).argmax(-1), 2)


class Policy(TensorDictModule):
    """A policy for CartPole, with a buffer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__(Net(width), in_keys=["observation"], out_keys=["action"])
        self.steps = torch.zeros(1)


class Counting(Policy):
    """A policy with state that is neither a parameter nor a buffer."""

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.steps = state["steps"]


@pytest.fixture
def collect() -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(scheme: Any, policy: Any = None, **options: Any) -> Any:
        resources = {"num_cpus": 0, "num_gpus": 0, "memory": 0, **options.pop("restarts", {})}
        options = {"num_collectors": 2, **options}
        collector = RayCollector(
            [lambda: GymEnv("CartPole-v1")] * options["num_collectors"],
            policy,
            frames_per_batch=20,
            total_frames=100_000,
            remote_configs=resources,
            weight_sync_schemes={"policy": scheme},
            **options,
        )
        made.append(collector)
        return collector

    yield make
    for collector in made:
        collector.shutdown()


def values(policy: torch.nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in (*policy.parameters(), *policy.buffers())] + [policy.steps.clone()]


def of_collectors(collector: Any) -> list[list[torch.Tensor]]:
    asked = [actor.__ray_call__.remote(lambda its: values(its.policy)) for actor in collector.remote_collectors]
    return ray.get(asked, timeout=60)


def change(policy: torch.nn.Module) -> list[torch.Tensor]:
    """Change every weight; returns them."""
    with torch.no_grad():
        for value in (*policy.parameters(), *policy.buffers()):
            value.add_(torch.rand_like(value))
    policy.steps += isinstance(policy, Counting)
    return values(policy)


def is_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def assert_equal(found: list[list[torch.Tensor]], wanted: list[torch.Tensor]) -> None:
    for its in found:
        assert is_equal(its, wanted)


def test_collectors_have_the_weights_after_each_update(collect: Callable[..., Any]) -> None:
    policy = Counting()
    collector = collect(WeightSyncScheme.from_backend("raytorchrpc"), policy, sync=True)
    batches = iter(collector)
    for _ in range(3):
        wanted = change(policy)
        collector.update_policy_weights_(policy)
        assert_equal(of_collectors(collector), wanted)
        assert next(batches).numel() == 20
    assert [member.name for member in rtr.get_group("torchrl").members] == ["collector_0", "collector_1", "driver"]


def test_one_collector_gets_weights_while_it_collects(collect: Callable[..., Any]) -> None:
    policy = Policy()
    collector = collect(WeightSyncScheme.from_backend("raytorchrpc"), policy, sync=False, update_after_each_batch=True)
    collector.update_policy_weights_(policy)
    before, after, batches = values(policy), change(policy), iter(collector)
    next(batches)  # the weights go to the collector that made this batch, when the next one is asked for
    next(batches)
    found = of_collectors(collector)
    assert any(is_equal(its, after) for its in found)
    assert all((is_equal(its, before) or is_equal(its, after)) for its in found)


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_policies_that_the_collectors_make_get_weights_that_are_given(
    collect: Callable[..., Any], strategy: str
) -> None:
    scheme = WeightSyncScheme.from_backend("raytorchrpc", strategy=strategy)
    collector = collect(scheme, policy_factory=Policy, sync=True)
    policy = Policy()
    wanted = change(policy)
    weights = TensorDict.from_module(policy).data if strategy == "tensordict" else policy.state_dict()
    collector.update_policy_weights_(weights)
    assert_equal(of_collectors(collector), wanted)


def test_processes_of_a_collector_get_the_weights(collect: Callable[..., Any]) -> None:
    policy = Policy()
    collector = collect(
        WeightSyncScheme.from_backend("raytorchrpc"),
        policy_factory=Policy,
        collector_class=MultiSyncCollector,
        num_workers_per_collector=2,
        num_collectors=1,
        sync=True,
    )
    with torch.no_grad():
        for value in policy.parameters():
            value.zero_()
        policy.module.layers[2].bias[1] = 1.0  # every action is the second one
    collector.update_policy_weights_(policy)
    assert next(iter(collector))["action"][..., 1].all()


def test_collectors_of_one_process_share_a_group(collect: Callable[..., Any]) -> None:
    policies = [Policy(), Policy(32)]
    collectors = [collect(RayTorchRpcWeightSyncScheme(), policy, num_collectors=1, sync=True) for policy in policies]
    for collector, policy in zip(collectors, policies, strict=True):
        wanted = change(policy)
        collector.update_policy_weights_(policy)
        assert_equal(of_collectors(collector), wanted)
    held = sum(row.held for row in rtr.get_group("torchrl").stats().weights)
    collectors[0].shutdown()
    assert [member.name for member in rtr.get_group("torchrl").members] == ["driver", "collector_1"]
    left = sum(row.held for row in rtr.get_group("torchrl").stats().weights)
    assert 0 < left <= held / 2, "a scheme that was shut down keeps no weights"
    wanted = change(policies[1])
    collectors[1].update_policy_weights_(policies[1])
    assert_equal(of_collectors(collectors[1]), wanted)
    collectors[1].shutdown()
    with pytest.raises(rtr.NotAMember):
        rtr.get_group("torchrl")


def test_collectors_join_a_group_of_the_program(collect: Callable[..., Any]) -> None:
    class Idle:
        pass

    other, policy = ray.remote(num_cpus=0)(Idle).remote(), Policy()
    with rtr.init_group({"other": other}, name="mine", include_driver=True) as group:
        collector = collect(RayTorchRpcWeightSyncScheme(group="mine"), policy, num_collectors=1, sync=True)
        wanted = change(policy)
        collector.update_policy_weights_(policy)
        assert_equal(of_collectors(collector), wanted)
        collector.shutdown()
        group.wait_ready()
        assert [member.name for member in group.members] == ["other", "driver"]


def test_a_collector_that_dies_is_named_and_the_others_go_on(collect: Callable[..., Any]) -> None:
    policy = Policy()
    collector = collect(WeightSyncScheme.from_backend("raytorchrpc"), policy, sync=True)
    collector.update_policy_weights_(policy)
    dying, living = collector.remote_collectors
    pid = get(dying.__ray_call__.remote(lambda _: os.getpid()))
    wanted = change(policy)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(rtr.PeerLost, match="collector_0"):
        collector.update_policy_weights_(policy)
    assert_equal([get(living.__ray_call__.remote(lambda its: values(its.policy)))], wanted)
    wanted = change(policy)
    collector.update_policy_weights_(policy, worker_ids=[1])
    assert_equal([get(living.__ray_call__.remote(lambda its: values(its.policy)))], wanted)


def test_a_collector_that_ray_restarts_has_the_weights_after_the_next_update(collect: Callable[..., Any]) -> None:
    policy = Policy()
    scheme = WeightSyncScheme.from_backend("raytorchrpc")
    collector = collect(scheme, policy, sync=True, restarts={"max_restarts": -1, "max_task_retries": -1})
    collector.update_policy_weights_(policy)
    dying = collector.remote_collectors[0]
    pid = get(dying.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    assert get(dying.__ray_call__.remote(lambda _: os.getpid())) != pid
    wanted = change(policy)
    collector.update_policy_weights_(policy)
    assert_equal(of_collectors(collector), wanted)


def test_weights_of_another_model_are_refused_by_name(collect: Callable[..., Any]) -> None:
    policy, other = Policy(), Policy(32)
    collector = collect(WeightSyncScheme.from_backend("raytorchrpc"), policy, sync=True)
    wanted = change(policy)
    collector.update_policy_weights_(policy)
    with pytest.raises(rtr.ConfigurationError, match=r"layers\.0\.weight"):
        collector.update_policy_weights_(other)
    assert_equal(of_collectors(collector), wanted)
    collector.update_policy_weights_(policy)


def test_collectors_that_are_no_actors_are_refused() -> None:
    with pytest.raises(rtr.ConfigurationError, match="RayCollector"):
        MultiSyncCollector(
            [lambda: GymEnv("CartPole-v1")],
            Policy(),
            frames_per_batch=20,
            total_frames=20,
            weight_sync_schemes={"policy": WeightSyncScheme.from_backend("raytorchrpc")},
        )
