"""DTensors between members of a group that have a torch process group: in calls, results and ObjectRefs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import ray
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import raytorchrpc as rtr
from raytorchrpc.errors import SerializationError
from tests.ray.conftest import Spawn
from tests.releases import needs, obstacle

#: Elements of a shard, enough for shared memory.
MANY = 200_000


class Holder:
    @rtr.method
    def double(self, x: Any) -> Any:
        return x * 2

    @rtr.method(objectref=obstacle("objectrefs") is None)
    def make(self, how: Callable[[], Any]) -> Any:
        return how()

    def look(self, how: Callable[[Any], Any], value: Any) -> Any:
        return how(value)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


# --- what members run -----------------------------------------------------------------------------------------------

kept: list[DeviceMesh] = []


def enter() -> None:
    """Two meshes of two members: a and b, c and d."""
    kept.append(rtr.register_device_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tp"))))


def shard(size: int = 3) -> DTensor:
    """Of ones in the first member of its mesh, and of twos in the second."""
    mesh = kept[-1]["tp"]
    return DTensor.from_local(torch.full((size,), mesh.get_local_rank() + 1.0), mesh, [Shard(0)])


def shown(tensor: DTensor) -> tuple[str, list[int], int, float]:
    return type(tensor).__name__, tensor.device_mesh.mesh.tolist(), tensor.shape[0], tensor.to_local().mean().item()


def double_at(peer: str) -> Any:
    return shown(rtr.rpc_sync(peer).double(shard()))


def refused_at(peer: str) -> str:
    with pytest.raises(SerializationError) as refused:
        rtr.rpc_sync(peer).double(shard())
    return str(refused.value)


# --- the tests ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def holders(spawn_for_module: Spawn) -> Iterator[list[Any]]:
    made = [spawn_for_module(Holder) for _ in "abcd"]
    with rtr.init_group(dict(zip("abcd", made, strict=True)), include_driver=True) as group:
        group.process_group("gloo", members=list("abcd"))
        get([holder.run.remote(enter) for holder in made])
        yield made


def get(refs: Any) -> Any:
    return ray.get(refs, timeout=60)


def test_an_argument_and_a_result_arrive_on_a_mesh_of_the_receivers(holders: list[Any]) -> None:
    a, b, c, d = holders
    here = get([a.run.remote(double_at, "c"), b.run.remote(double_at, "d")])
    assert here == [("DTensor", [0, 1], 6, 2.0), ("DTensor", [0, 1], 6, 4.0)]
    there = get([c.run.remote(double_at, "a"), d.run.remote(double_at, "b")])
    assert there == [("DTensor", [2, 3], 6, 2.0), ("DTensor", [2, 3], 6, 4.0)]


def test_what_does_not_belong_to_the_receiver_is_refused(holders: list[Any]) -> None:
    text = get(holders[0].run.remote(refused_at, "b"))
    assert "another shard belongs" in text and "tensor.to_local()" in text
    with pytest.raises(SerializationError, match=r"\(registered: none\): .*register_device_mesh\(mesh\)"):
        rtr.rpc_sync("a").make(shard)  # the driver has no mesh
    assert rtr.rpc_sync("a").make(local).sum() == 3


def local() -> torch.Tensor:
    return shard().to_local()


@needs("objectrefs")
def test_objectrefs(holders: list[Any]) -> None:
    a, b, c, d = holders
    refs = [holder.make.remote(partial(shard, MANY)) for holder in (a, b)]
    found = get([c.look.remote(shown, refs[0]), d.look.remote(shown, refs[1])])
    assert found == [("DTensor", [2, 3], 2 * MANY, 1.0), ("DTensor", [2, 3], 2 * MANY, 2.0)]
    with pytest.raises(Exception, match="another shard belongs"):
        get(d.look.remote(shown, refs[0]))
    with pytest.raises(Exception, match=r"registered: none\)"):
        get(refs[0])
