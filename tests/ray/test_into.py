"""Results received into tensors that the caller has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from tests import insides
from tests.insides import in_actor
from tests.ray.actors import AsyncPeer
from tests.ray.conftest import Spawn
from tests.ray.test_tensor_lanes import MIB, TensorStore, used

#: Elements of float32: beside the message, and in it.
LARGE, SMALL = 2 * MIB, 100


class Source(TensorStore):
    """Has tensors to give."""

    @rtr.method
    def filled(self, value: float, *sizes: int) -> list[torch.Tensor]:
        return [torch.full((size,), value + number) for number, size in enumerate(sizes)]


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
