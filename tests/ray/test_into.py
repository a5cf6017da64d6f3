"""Results received into tensors that the caller has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import ray
import torch
from torch.distributed import autograd as dist_autograd

import raytorchrpc as rtr
from tests import insides
from tests.insides import in_actor
from tests.polling import wait_until
from tests.ray.actors import AsyncPeer, Latch
from tests.ray.conftest import Spawn
from tests.ray.test_tensor_lanes import MIB, TensorStore, all_given_back, used

#: Elements of float32: beside the message, and in it.
LARGE, SMALL = 2 * MIB, 100


class Source(TensorStore):
    """Has tensors to give."""

    @rtr.method
    def filled(self, value: float, *sizes: int) -> list[torch.Tensor]:
        return [torch.full((size,), value + number) for number, size in enumerate(sizes)]

    @rtr.method
    def turned(self) -> dict[str, Any]:
        matrix = torch.arange(6.0 * MIB).view(2 * MIB, 3)
        return {"turned": matrix.T, "array": numpy.arange(50_000), "row": matrix[1]}

    @rtr.method
    def fails(self) -> None:
        raise KeyError("nothing here")

    @rtr.method
    def late(self, latch: Latch) -> torch.Tensor:
        latch.pass_through()
        return torch.ones(LARGE)

    @rtr.method
    def bits(self, size: int) -> list[torch.Tensor]:
        return [torch.full((3,), number) for number in range(size)]


@pytest.fixture(scope="module")
def sources(spawn_for_module: Spawn) -> list[Any]:
    return [spawn_for_module(Source), spawn_for_module(Source), spawn_for_module(AsyncPeer)]


@pytest.fixture(scope="module", autouse=True)
def group(sources: list[Any]) -> Iterator[rtr.Group]:
    config = rtr.GroupConfig(shm_bytes=128 * MIB)
    with rtr.init_group(dict(zip(["a", "b", "asynchronous"], sources, strict=True)), config=config) as group:
        yield group


def holds(buffer: torch.Tensor, value: float) -> bool:
    return bool((buffer == value).all())


def given_back(sources: list[Any]) -> bool:
    """That the source's arena is empty: at once, with nothing dropped."""
    return in_actor(sources[1], used) == 0


@pytest.mark.parametrize("target", ["b", "a"])
@pytest.mark.parametrize("sizes", [(SMALL,), (LARGE,), (SMALL, LARGE, 0, 2 * LARGE, 1), (3,) * 1000], ids=len)
def test_sync_and_async(sources: list[Any], target: str, sizes: tuple[int, ...]) -> None:
    def get() -> None:
        buffers = [torch.zeros(size) for size in sizes]
        result = rtr.rpc_sync(target, into=buffers).filled(5.0, *sizes)
        assert all(tensor is buffer for tensor, buffer in zip(result, buffers, strict=True))
        assert all(holds(buffer, 5.0 + number) for number, buffer in enumerate(buffers))
        future = rtr.rpc_async(target, into=buffers).filled(9.0, *sizes)
        rtr.wait([future], timeout=20)
        assert all(holds(buffer, 5.0 + number) for number, buffer in enumerate(buffers)), "nobody has taken it yet"
        result = future.wait()
        assert all(tensor is buffer for tensor, buffer in zip(result, buffers, strict=True))
        assert all(holds(buffer, 9.0 + number) for number, buffer in enumerate(buffers))
        insides.saved.kept = (buffers, result, future)

    in_actor(sources[0], get)
    assert given_back(sources), "while the buffers, the result and the future live on"


def test_from_a_coroutine(sources: list[Any]) -> None:
    def start() -> asyncio.Task[bool]:
        async def get() -> bool:
            buffers = [torch.zeros(LARGE), torch.zeros(SMALL)]
            result = await rtr.rpc_async("b", into=tuple(buffers)).filled(5.0, LARGE, SMALL)
            return result[0] is buffers[0] and holds(buffers[0], 5) and holds(buffers[1], 6)

        insides.saved.task = asyncio.get_running_loop().create_task(get())
        return None  # type: ignore[return-value]

    def finished() -> Any:
        task = insides.saved.task
        return task.result() if task.done() else None

    ray.get(sources[2].run.remote(start), timeout=60)
    assert wait_until(lambda: ray.get(sources[2].run.remote(finished), timeout=60) is not None, 30)
    assert ray.get(sources[2].run.remote(finished), timeout=60) is True


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_any_strides_and_buffers_that_require_grad(sources: list[Any], size: int) -> None:
    def get() -> None:
        wide = torch.zeros(size, 3)
        parameter = torch.nn.Parameter(torch.zeros(size))
        rtr.rpc_sync("b", into=[wide[:, 1], parameter]).filled(3.0, size, size)
        assert wide.sum(0).tolist() == [0.0, 3.0 * size, 0.0]
        assert holds(parameter.detach(), 4.0)
        assert parameter.is_leaf and parameter.requires_grad and parameter.grad is None

    in_actor(sources[0], get)
    assert given_back(sources)


def test_turned_tensors_and_arrays_beside_them(sources: list[Any]) -> None:
    def get() -> None:
        turned, row = torch.zeros(3, 2 * MIB), torch.zeros(3)
        for keep in (False, True):
            result = rtr.rpc_sync("b", into=[turned, row], keep=keep).turned()
            assert result["turned"] is turned and result["row"] is row
            assert torch.equal(turned, torch.arange(6.0 * MIB).view(2 * MIB, 3).T)
            assert row.tolist() == [3.0, 4.0, 5.0]
            assert (result["array"] == numpy.arange(50_000)).all()
            row.zero_()
            turned.zero_()

    in_actor(sources[0], get)


def test_what_does_not_match_changes_nothing_and_holds_nothing(sources: list[Any]) -> None:
    def get() -> None:
        buffers = [torch.zeros(LARGE), torch.zeros(LARGE, dtype=torch.int32), torch.zeros(3, 2)]
        failed = []
        for into, sizes, said in (
            (buffers[:1], (LARGE, LARGE), "has 2 tensors, and into= 1"),
            (buffers, (LARGE,), "has 1 tensors, and into= 3"),
            (buffers[:2], (LARGE, LARGE), "tensor 1 of it is float32 (2097152,), and buffer 1 of into= is int32"),
            ([buffers[0], buffers[2]], (LARGE, 6), "float32 (6,), and buffer 1 of into= is float32 (3, 2)"),
        ):
            future = rtr.rpc_async("b", into=into).filled(1.0, *sizes)
            with pytest.raises(rtr.ConfigurationError) as raised:
                future.wait()
            assert said in str(raised.value) and "b.filled" in str(raised.value)
            failed.append((future, raised.value))
        assert not any(buffer.any() for buffer in buffers)
        insides.saved.kept = (failed, buffers)

    in_actor(sources[0], get)
    assert given_back(sources), "while the errors live on"


def test_what_is_refused_is_not_sent(sources: list[Any]) -> None:
    def get() -> None:
        with pytest.raises(rtr.ConfigurationError, match=r"list or a tuple of tensors, not a Tensor"):
            rtr.rpc_sync("b", into=torch.zeros(3)).keep(1)
        with pytest.raises(rtr.ConfigurationError, match="buffer 0 of into= is expanded"):
            rtr.rpc_async("b", into=[torch.zeros(1).expand(3)]).keep(1)
        with dist_autograd.context(), pytest.raises(rtr.ConfigurationError, match="distributed autograd context"):
            rtr.rpc_sync("b", into=[torch.zeros(3)]).keep(1)
        assert rtr.rpc_sync("b", into=[]).keep("first") == 1

    in_actor(sources[0], get)


def test_an_error_of_the_method_and_a_deadline_leave_the_buffers(sources: list[Any], latch: Any) -> None:
    held = latch()

    def get() -> None:
        buffer = torch.zeros(LARGE)
        with pytest.raises(KeyError, match="nothing here"):
            rtr.rpc_sync("b", into=[buffer]).fails()
        future = rtr.rpc_async("b", into=[buffer], timeout=0.2).late(held)
        with pytest.raises(rtr.RpcTimeout):
            future.wait()
        held.open_for_all()
        assert rtr.rpc_sync("b").total(torch.ones(2)) == 2.0, "its answer is on its way, or has come"
        assert not buffer.any()

    in_actor(sources[0], get)
    assert all_given_back(sources[:2])


def test_the_same_buffers_in_a_loop(sources: list[Any]) -> None:
    def get() -> int:
        buffers = [torch.zeros(LARGE), torch.zeros(SMALL)]
        for value in range(60):
            ahead = rtr.rpc_async("b").filled(-1.0, LARGE, SMALL)
            rtr.rpc_sync("b", into=buffers).filled(float(value), LARGE, SMALL)
            assert holds(ahead.wait()[0], -1.0)
            assert holds(buffers[0], value) and holds(buffers[1], value + 1)
        return sum(tensor.numel() for tensor in rtr.rpc_sync("b", into=[torch.zeros(3).long()] * 500).bits(500))

    assert in_actor(sources[0], get) == 1500
    assert given_back(sources)


def test_a_result_too_large_for_the_arena_comes_by_torchrpc(sources: list[Any]) -> None:
    def get() -> None:
        buffer = torch.zeros(40 * MIB)
        for value in (1.0, 2.0):
            (result,) = rtr.rpc_sync("b", into=[buffer]).filled(value, 40 * MIB)
            assert result is buffer and holds(buffer, value)

    in_actor(sources[0], get)
