"""torch's own RPC between members, by ``member.rpc_name``; and distributed autograd through ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import ray
import torch
import torch.distributed.rpc as rpc
from torch.distributed import autograd as dist_autograd

import raytorchrpc as rtr
from tests.ray.call_actors import AsyncStage, Stage, make_layer
from tests.ray.conftest import Spawn

SEEDS = {"a": 0, "b": 1, "c": 2, "async": 3}


@dataclass
class Members:
    """Stages a, b and c, and an async one."""

    handles: dict[str, Any]
    names: dict[str, str]
    """torch's names."""

    def in_a(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run it in a's process."""
        return ray.get(self.handles["a"].run.remote(function, *args), timeout=60)


@pytest.fixture(scope="module")
def members(spawn_for_module: Spawn) -> Iterator[Members]:
    handles = {name: spawn_for_module(AsyncStage if name == "async" else Stage, seed) for name, seed in SEEDS.items()}
    with rtr.init_group(handles, config=rtr.GroupConfig(torchrpc_threads=2)) as group:
        yield Members(handles, {member.name: member.rpc_name for member in group.members})


# --- torch.distributed.rpc -------------------------------------------------------------------------------------


def fail() -> None:
    raise ValueError("on purpose")


def test_rpc_sync_and_async_by_rpc_name(members: Members) -> None:
    def check(name: str) -> None:
        one = torch.ones(2)
        assert rpc.rpc_sync(name, torch.add, args=(one, 1)).tolist() == [2, 2]
        assert rpc.rpc_async(name, torch.add, args=(one, 2)).wait().tolist() == [3, 3]
        assert rpc.get_worker_info(name).name == name
        assert rpc.get_worker_info().name == rtr.current_member().rpc_name
        with pytest.raises(ValueError, match="on purpose"):
            rpc.rpc_sync(name, fail)

    for member in ("a", "b", "async"):
        members.in_a(check, members.names[member])


def test_a_member_that_has_called_shutdown_says_so_and_works_in_the_next_group(spawn: Spawn) -> None:
    handles = {name: spawn(Stage, seed) for name, seed in (("left", 0), ("right", 1))}

    def shut_down() -> str:
        rpc.shutdown()  # as a program's last line: it has no effect
        assert rpc.rpc_sync(rpc.get_worker_info().name, abs, args=(-2,)) == 2
        assert rtr.remote("right").double(1).to_here() == 2
        rpc.shutdown.__wrapped__(graceful=False)  # by a reference from before the group
        with pytest.raises(rtr.LaneUnavailable) as raised:
            rtr.remote("right").double(1)
        assert rtr.rpc_sync("right").double(1) == 2, "other lanes go on"
        return str(raised.value)

    def call(name: str) -> Any:
        return rpc.rpc_sync(name, abs, args=(-2,)), rtr.rpc_sync("right").double(3)

    with rtr.init_group(handles, name="first") as group:
        text = ray.get(handles["left"].run.remote(shut_down), timeout=60)
        assert "torch.distributed.rpc.shutdown()" in text and "form the group again" in text
    with rtr.init_group(handles, name="second") as group:
        right = next(member.rpc_name for member in group.members if member.name == "right")
        assert ray.get(handles["left"].run.remote(call, right), timeout=60) == (2, 6)


# --- distributed autograd through our calls --------------------------------------------------------------------


def single(x: torch.Tensor, *stages: str) -> dict[str, dict[str, torch.Tensor]]:
    """The gradients of the same layers, one after the other, in this one process."""
    layers = {stage: make_layer(SEEDS[stage]) for stage in stages}
    for layer in layers.values():
        x = torch.tanh(layer(x))
    x.sum().backward()
    return {
        stage: {name: parameter.grad for name, parameter in layer.named_parameters()}  # type: ignore[misc]
        for stage, layer in layers.items()
    }


def gradients(context: int, *stages: str) -> dict[str, dict[str, torch.Tensor]]:
    """What the backward pass left at these members."""
    return {stage: rtr.rpc_sync(stage).gradients(context) for stage in stages}


def backward(forward: Callable[[torch.Tensor], torch.Tensor], *stages: str, seed: int = 7) -> Any:
    """The gradients at these members after a backward pass through ``forward``."""
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [forward(batch(seed)).sum()])
        return gradients(context, *stages)


def batch(seed: int = 7) -> torch.Tensor:
    # A generator of its own: threads draw at the same time, and torch's default one belongs to the process.
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("verb", ["rpc_sync", "rpc_async", "remote"])
@pytest.mark.parametrize("stage", ["a", "b"])
def test_one_stage_elsewhere(members: Members, stage: str, verb: str, needs_grad: bool) -> None:
    """The input of the first stage seldom requires grad; the parameters there do."""

    def check() -> Any:
        x = batch().requires_grad_(needs_grad)
        with dist_autograd.context() as context:
            result = getattr(rtr, verb)(stage).forward(x)
            y = result.wait() if verb == "rpc_async" else result.to_here() if verb == "remote" else result
            assert y.requires_grad
            dist_autograd.backward(context, [y.sum()])
            if needs_grad:
                assert x in dist_autograd.get_gradients(context)
            return gradients(context, stage)

    torch.testing.assert_close(members.in_a(check), single(batch(), stage))


#: Name -> how the result is made of the input, and the members that it passes, in order.
FORWARDS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[str, ...]]] = {
    "inside other objects": (lambda x: rtr.rpc_sync("b").forward_dict({"x": x, "text": "t"})["y"][0], ("b",)),
    "nested calls": (lambda x: rtr.rpc_sync("b").forward_through(x, "c"), ("b", "c")),
    "nested calls on a loop": (lambda x: rtr.rpc_sync("async").forward_through(x, "c"), ("async", "c")),
    "a pipeline of the caller's": (lambda x: rtr.rpc_sync("c").forward(rtr.rpc_sync("b").forward(x)), ("b", "c")),
}


@pytest.mark.parametrize("way", FORWARDS)
def test_gradients_come_back_whichever_way_tensors_went(members: Members, way: str) -> None:
    """The context follows onto the threads or the loop of a member in the middle, and from there to the next."""
    forward, stages = FORWARDS[way]
    torch.testing.assert_close(members.in_a(backward, forward, *stages), single(batch(), *stages))


@pytest.mark.parametrize("stages", [("b", "c"), ("async",)], ids=["threads", "coroutines"])
def test_contexts_of_several_callers_do_not_mix(members: Members, stages: tuple[str, ...]) -> None:
    """Nor those of coroutines that take turns on one loop."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        first = rtr.rpc_sync(stages[0])
        return first.forward_through(x, "c") if len(stages) > 1 else first.forward_with_another(x)

    def check() -> list[Any]:
        with ThreadPoolExecutor(2) as pool:  # the method waits for another one
            return [*pool.map(lambda seed: backward(forward, *stages, seed=seed), range(2))]

    for seed, found in enumerate(members.in_a(check)):
        torch.testing.assert_close(found, single(batch(seed), *stages))


def test_a_context_ends_with_its_call(members: Members) -> None:
    def check() -> None:
        with dist_autograd.context():
            assert rtr.rpc_sync("b").has_context()
            assert rtr.rpc_sync("a").has_context()
            rtr.rpc_sync("b").forward(batch())
        for target in "abc":
            assert not rtr.rpc_sync(target).has_context()
        y = rtr.rpc_sync("b").forward(batch())
        assert y.is_leaf

    members.in_a(check)
    assert not ray.get(members.handles["b"].run.remote(lambda: rtr.rpc_sync("c").has_context()))
