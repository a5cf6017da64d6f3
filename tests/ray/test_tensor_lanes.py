"""Tensors beside the messages, as users see them: large CPU tensors and arrays between actors of one host."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

import raytorchrpc as rtr
from tests import insides
from tests.insides import in_actor
from tests.polling import wait_until
from tests.ray.actors import Latch
from tests.ray.call_actors import LARGE, Store
from tests.ray.conftest import Spawn

MIB = 1 << 20


@pytest.fixture(scope="module")
def stores(spawn_for_module: Spawn) -> list[Any]:
    return [spawn_for_module(TensorStore) for _ in range(3)]


@pytest.fixture(scope="module")
def group(stores: list[Any]) -> Iterator[rtr.Group]:
    with rtr.init_group(dict(zip("abc", stores, strict=True)), config=rtr.GroupConfig(shm_bytes=256 * MIB)) as group:
        yield group


class TensorStore(Store):
    """Does with tensors what it is told."""

    @rtr.method
    def echo(self, value: Any) -> Any:
        return value

    @rtr.method
    def checksum(self, value: Any) -> int:
        return checksum(value)

    @rtr.method
    def ones(self, count: int, latch: Latch | None = None) -> torch.Tensor:
        if latch is not None:
            latch.pass_through()
        return torch.ones(count)


def checksum(value: Any) -> int:
    raw = value.numpy() if isinstance(value, torch.Tensor) else value
    return int(raw.view(numpy.uint8).sum(dtype=numpy.int64))


def used() -> int:
    """Bytes of this process's arena that somebody still holds."""
    lane = insides.tensor_lane("shm")
    return int(lane.in_use())


def comes_to_nothing() -> bool:
    """Whether this process's arena empties: a peer drops its last reference a moment after its answer."""
    gc.collect()
    return wait_until(lambda: used() == 0, 20)


def all_given_back(actors: list[Any]) -> bool:
    """Nothing is kept by any: each looks for itself, while no other runs a method."""
    for actor in actors:
        in_actor(actor, gc.collect)
    return all(in_actor(actor, comes_to_nothing) for actor in actors)


def bytes_by_lane(group: rtr.Group, caller: str, peer: str) -> dict[str, tuple[int, int]]:
    """(out, in) by lane."""
    return {
        row.lane: (row.bytes_out, row.bytes_in) for row in group.stats() if (row.caller, row.peer) == (caller, peer)
    }


# --- which way ---------------------------------------------------------------------------------------------------


def test_large_tensors_and_arrays_go_by_shm_both_ways(stores: list[Any], group: rtr.Group) -> None:
    def exchange() -> None:
        tensor, array = torch.arange(3_000_000.0), numpy.arange(1_000_000.0)
        sent = {
            "tensor": tensor,
            "array": array,
            "text": "x",
            "small": torch.ones(3),
            "turned": array.reshape(1000, -1).T,
        }
        back = rtr.rpc_sync("b").echo(sent)
        assert torch.equal(back["tensor"], tensor)
        assert (back["array"] == array).all()
        assert (back["turned"] == sent["turned"]).all()
        assert torch.equal(back["small"], torch.ones(3))
        back["tensor"].zero_()
        back["array"][:] = 0
        assert float(tensor.sum()) and float(array.sum()), "what came back is private"

    assert group.routes().route("a", "b").lanes("cpu")[0].lane == "shm" and "shm" in group.explain("a", "b")
    before = bytes_by_lane(group, "a", "b")
    in_actor(stores[0], exchange)
    after = bytes_by_lane(group, "a", "b")
    assert after["shm"][0] - before.get("shm", (0, 0))[0] > 28_000_000
    assert after.get("torchrpc") == before.get("torchrpc")
    assert sum(row[1] for row in after.values()) - sum(row[1] for row in before.values()) > 28_000_000
    assert all_given_back(stores)


def test_futures_may_be_dropped_under_any_lock(stores: list[Any], group: rtr.Group, latch: Callable[[], Latch]) -> None:
    """Python collects garbage in the middle of anything, and what it drops takes no lock of a lane's."""
    gate = latch()

    def drop() -> str:
        lane = insides.tensor_lane("shm")
        arrived = rtr.rpc_async("c").ones(LARGE)
        assert wait_until(arrived.done, 20)
        waiting = rtr.rpc_async("b").ones(LARGE, gate)
        held = gate.await_arrival()
        connection = waiting._call.pending.connection  # type: ignore[union-attr]
        lock = threading.Lock()

        def under_the_locks() -> None:
            nonlocal arrived, waiting
            with connection._state, connection._selector._lock, lane._lock:  # type: ignore[attr-defined]
                del arrived, waiting
            lock.release()

        lock.acquire()
        threading.Thread(target=under_the_locks, daemon=True).start()
        over = lock.acquire(timeout=10)
        gate.release(held)
        return "over" if over else "it waits for a lock that its own thread holds"

    assert in_actor(stores[0], drop) == "over"
    assert all_given_back(stores)


# --- nothing is kept -----------------------------------------------------------------------------------------------
