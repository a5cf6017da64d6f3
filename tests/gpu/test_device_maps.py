"""CUDA tensors between actors under Ray's own masking: each actor sees its GPU as cuda:0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from torch.distributed import autograd as dist_autograd

import raytorchrpc as rtr

pytestmark = pytest.mark.gpu


@ray.remote
class Holder:
    """Lives on the GPUs it was given."""

    def __init__(self) -> None:
        self.weight = torch.full((4, 4), 2.0, device="cuda" if torch.cuda.is_available() else "cpu")
        self.weight.requires_grad_()

    def uuid(self) -> str:
        return str(torch.cuda.get_device_properties(0).uuid)

    @rtr.method
    def where(self, tensor: torch.Tensor) -> tuple[str, float]:
        return str(tensor.device), float(tensor.sum())

    @rtr.method
    def double(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_cuda
        return tensor * 2

    @rtr.method
    def nested(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"cpu": batch["cpu"] + 1, "inner": [batch["inner"][0] + 1]}

    @rtr.method
    def state(self) -> torch.Tensor:
        """A tensor of the actor's own, asked for without sending one."""
        return self.weight.detach()

    @rtr.method
    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor @ self.weight

    @rtr.method
    def gradient(self, context: int) -> torch.Tensor:
        return dist_autograd.get_gradients(context)[self.weight].cpu()

    # Run through Ray, calling the others directly.

    def ask(self, peer: Any, method: str, *args: Any) -> Any:
        args = tuple(arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args)
        result = getattr(rtr.rpc_sync(peer), method)(*args)
        if isinstance(result, torch.Tensor):
            return str(result.device), result.cpu()
        return result

    def ask_cpu(self, peer: Any) -> str:
        return str(rtr.rpc_sync(peer).nested({"cpu": torch.ones(3), "inner": [torch.ones(3)]})["cpu"].device)

    def sees_gpu(self) -> bool:
        return torch.cuda.is_available()

    def ask_nested(self, peer: Any) -> tuple[str, str, float]:
        batch = {"cpu": torch.ones(3), "inner": [torch.ones(3, device="cuda")]}
        result = rtr.rpc_sync(peer).nested(batch)
        return str(result["cpu"].device), str(result["inner"][0].device), float(result["inner"][0].sum())

    def stress(self, peer: Any, rounds: int) -> int:
        """Sizes and values change at once, so that memory handed out too early would show."""
        wrong = 0
        futures = []
        for index in range(rounds):
            tensor = torch.full((1 + index * 977 % 300_000,), float(index), device="cuda")
            futures.append((index, len(tensor), rtr.rpc_async(peer).double(tensor)))
            if len(futures) > 8:
                number, length, future = futures.pop(0)
                result = future.wait()
                wrong += not (len(result) == length and bool((result == 2.0 * number).all()))
                del result
        return wrong

    def train(self, peer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of (x @ mine) @ its, of both weights."""
        x = torch.arange(16.0, device="cuda").reshape(4, 4)
        with dist_autograd.context() as context:
            y = rtr.rpc_sync(peer).forward(x @ self.weight)
            dist_autograd.backward(context, [y.sum()])
            return self.gradient(context), rtr.rpc_sync(peer).gradient(context)


@pytest.fixture(scope="module")
def gpu_ray() -> Iterator[int]:
    ray.init(include_dashboard=False, log_to_driver=False)
    yield int(ray.cluster_resources().get("GPU", 0))
    ray.shutdown()


@pytest.fixture(scope="module")
def pair(gpu_ray: int) -> Iterator[tuple[Any, Any]]:
    """Two actors on a GPU each."""
    if gpu_ray < 2:
        pytest.skip(f"needs two GPUs, Ray has {gpu_ray}")
    a, b = (Holder.options(num_gpus=1).remote() for _ in range(2))
    with rtr.init_group({"a": a, "b": b}):
        yield a, b
    ray.kill(a)
    ray.kill(b)


def test_an_argument_arrives_on_the_mapped_gpu_and_the_result_on_the_inverse_one(pair: tuple[Any, Any]) -> None:
    a, b = pair
    assert ray.get(a.uuid.remote()) != ray.get(b.uuid.remote())
    assert rtr.get_group().device_map("a", "b") == {0: 0}
    device, value = ray.get(a.ask.remote(b, "double", torch.arange(6.0)))
    assert device == "cuda:0"
    assert value.tolist() == [0, 2, 4, 6, 8, 10]
    assert ray.get(a.ask.remote(b, "where", torch.ones(5))) == ("cuda:0", 5.0)


def test_cpu_and_cuda_tensors_travel_in_one_call(pair: tuple[Any, Any]) -> None:
    a, b = pair
    assert ray.get(a.ask_nested.remote(b)) == ("cpu", "cuda:0", 6.0)


def test_a_cuda_result_of_a_call_without_tensors_arrives(pair: tuple[Any, Any]) -> None:
    a, b = pair
    for _ in range(2):  # the second call takes the short way
        device, value = ray.get(a.ask.remote(b, "state"))
        assert device == "cuda:0"
        assert value.sum() == 32


def test_large_tensors_keep_their_values(pair: tuple[Any, Any]) -> None:
    a, b = pair
    device, value = ray.get(a.ask.remote(b, "double", torch.ones(25_000_000)))
    assert device == "cuda:0" and float(value.mean()) == 2.0


def test_many_tensors_in_flight_keep_their_values(pair: tuple[Any, Any]) -> None:
    a, b = pair
    assert ray.get(a.stress.remote(b, 400)) == 0


def test_distributed_autograd_crosses_the_gpus(pair: tuple[Any, Any]) -> None:
    a, b = pair
    mine, its = ray.get(a.train.remote(b))
    first, second = (torch.full((4, 4), 2.0, requires_grad=True) for _ in range(2))
    x = torch.arange(16.0).reshape(4, 4)
    (x @ first @ second).sum().backward()
    assert torch.allclose(mine, first.grad) and torch.allclose(its, second.grad)


def test_a_tensor_for_an_actor_without_a_gpu_names_tensor_peer_and_map(gpu_ray: int) -> None:
    a, b = Holder.options(num_gpus=1 if gpu_ray < 3 else 0.5).remote(), None
    try:
        if gpu_ray >= 2:
            pytest.skip("the pair holds the GPUs; runs on a machine with one")
        b = Holder.options(num_gpus=0).remote()
        with rtr.init_group({"lone": a, "bare": b}) as group:
            assert group.device_map("lone", "bare") == {}
            with pytest.raises(rtr.RayTorchRpcError, match=r"cuda:0.*'bare'.*device map: empty"):
                ray.get(a.ask.remote(b, "where", torch.ones(2)))
            if ray.get(b.sees_gpu.remote()):  # Ray hides no GPU from an actor that asked for none
                with pytest.raises(rtr.RayTorchRpcError, match=r"cuda:0 has no mapping to member 'lone'"):
                    ray.get(a.ask.remote("bare", "state"))
            assert ray.get(a.ask_cpu.remote("bare")) == "cpu"
    finally:
        for actor in (a, b):
            if actor is not None:
                ray.kill(actor)


def test_two_actors_share_one_gpu(gpu_ray: int) -> None:
    if gpu_ray >= 2:
        pytest.skip("the pair holds the GPUs; runs on a machine with one")
    a, b = (Holder.options(num_gpus=0.5).remote() for _ in range(2))
    with rtr.init_group({"a": a, "b": b}):
        assert ray.get(a.uuid.remote()) == ray.get(b.uuid.remote())
        device, value = ray.get(a.ask.remote(b, "double", torch.arange(6.0)))
        assert device == "cuda:0" and value.tolist() == [0, 2, 4, 6, 8, 10]
        assert ray.get(a.stress.remote(b, 100)) == 0
    ray.kill(a)
    ray.kill(b)


def test_a_map_to_a_gpu_that_does_not_exist_is_refused_before_anything_starts(gpu_ray: int) -> None:
    if gpu_ray >= 2:
        pytest.skip("the pair holds the GPUs; runs on a machine with one")
    a, b = (Holder.options(num_gpus=0.5).remote() for _ in range(2))
    with pytest.raises(rtr.ConfigurationError, match="GPU 7"):
        rtr.init_group({"a": a, "b": b}, config=rtr.GroupConfig(device_maps={"a": "1_0_7"}))
    rtr.init_group({"a": a, "b": b}).shutdown()
    ray.kill(a)
    ray.kill(b)
