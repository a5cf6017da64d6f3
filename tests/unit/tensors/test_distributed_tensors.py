"""DTensors and the tensors of asynchronous collectives, through the codec, without Ray and without a wire.

torch's fake backend stands in for the other processes of a world: collectives among them would not do anything, and
none takes place.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import raytorchrpc as rtr
from raytorchrpc.calls.receive_into import Buffers
from raytorchrpc.errors import ConfigurationError, SerializationError
from raytorchrpc.tensors.codec import Codec, Encoded
from tests.programs import run_program

World = Callable[[int, int], None]


@pytest.fixture
def world() -> Iterator[World]:
    """``world(rank, size)``: makes this process that rank of a new world."""

    def enter(rank: int, size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    yield enter
    if dist.is_initialized():
        dist.destroy_process_group()


def sharded(mesh: DeviceMesh, *placements: Any) -> DTensor:
    """Rows 0 to 2 of a tensor with 6 rows, if ``mesh`` has two processes."""
    return DTensor.from_local(torch.arange(12.0).view(3, 4), mesh, placements or (Shard(0),))


def arrived(encoded: Encoded) -> Any:
    """What is decoded, from copies of the tensors."""
    return Codec().decode(encoded.payload, [tensor.clone() for tensor in encoded.tensors])


def test_the_local_shard_alone_travels_and_arrives_on_the_registered_mesh(world: World) -> None:
    world(0, 2)
    mesh = rtr.register_device_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    tensor = sharded(mesh)
    encoded = Codec().encode({"weight": tensor})
    assert [lifted.data_ptr() for lifted in encoded.tensors] == [tensor.to_local().data_ptr()]
    found = arrived(encoded)["weight"]
    assert type(found) is DTensor and found.device_mesh is mesh
    assert (found.shape, found.stride(), found.placements) == (torch.Size([6, 4]), (4, 1), (Shard(0),))
    assert torch.equal(found.to_local(), tensor.to_local())
    assert not found.requires_grad


def test_gradients_parameters_and_attributes(world: World) -> None:
    world(0, 2)
    mesh = rtr.register_device_mesh(init_device_mesh("cpu", (2,)))
    leaf = sharded(mesh).requires_grad_()
    made = leaf * 2
    parameter = torch.nn.Parameter(sharded(mesh))
    frozen = torch.nn.Parameter(sharded(mesh), requires_grad=False)
    parameter.note = "of the user"  # type: ignore[attr-defined]
    found = arrived(Codec().encode([leaf, made, parameter, frozen]))
    assert [tensor.requires_grad for tensor in found] == [True, True, True, False]
    assert all(tensor.is_leaf and type(tensor) is DTensor for tensor in found)
    assert [isinstance(tensor, torch.nn.Parameter) for tensor in found] == [False, False, True, True]
    assert found[2].note == "of the user"
    with pytest.raises(SerializationError, match=r"send tensor\.to_local\(\)"):
        Codec().encode(made, keep_graph=True)
    assert not arrived(Codec().encode(sharded(mesh), keep_graph=True)).requires_grad


def test_many_in_a_state_dict_share_one_description_and_keep_their_identity(world: World) -> None:
    world(0, 2)
    mesh = rtr.register_device_mesh(init_device_mesh("cpu", (2,)))
    state: dict[str, Any] = {f"layer{number}": sharded(mesh) for number in range(100)}
    state["tied"] = state["layer0"]
    state["plain"] = torch.ones(3)
    encoded = Codec().encode({"model": state})
    assert len(encoded.tensors) == 101
    assert len(encoded.payload) < 100 * 120
    found = arrived(encoded)["model"]
    assert found["tied"] is found["layer0"]
    assert all(torch.equal(found[name].to_local(), state[name].to_local()) for name in state if name != "plain")


def test_partial_replicated_strided_and_empty_ones(world: World) -> None:
    world(1, 2)
    mesh = rtr.register_device_mesh(init_device_mesh("cpu", (2,)))
    turned = DTensor.from_local(torch.arange(12.0).view(3, 4).t(), mesh, [Shard(1)])
    empty = DTensor.from_local(torch.empty(0, 4), mesh, [Shard(0)], shape=torch.Size([1, 4]), stride=(4, 1))
    scalar = DTensor.from_local(torch.tensor(3.0), mesh, [Replicate()])
    tensors = [
        sharded(mesh, Partial()),
        sharded(mesh, Partial("max")),
        sharded(mesh, Replicate()),
        turned,
        empty,
        scalar,
    ]
    for tensor, found in zip(tensors, arrived(Codec().encode(tensors)), strict=True):
        assert (found.placements, found.shape, found.stride()) == (tensor.placements, tensor.shape, tensor.stride())
        assert torch.equal(found.to_local(), tensor.to_local())


# --- which mesh ---------------------------------------------------------------------------------------------------


def test_a_mesh_of_other_processes_matches_at_the_same_coordinate(world: World) -> None:
    world(1, 2)  # the second of two trainers
    trainers = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    encoded = Codec().encode(sharded(trainers))
    world(3, 4)  # the second of a pair in another world
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tp"))
    own = rtr.register_device_mesh(pairs["tp"])
    found = arrived(encoded)
    assert found.device_mesh is own and own.mesh.tolist() == [2, 3]


def test_a_slice_of_the_registered_mesh(world: World) -> None:
    world(2, 4)
    whole = rtr.register_device_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tp")))
    found = arrived(Codec().encode([sharded(whole["tp"]), sharded(whole, Replicate(), Shard(1))]))
    assert found[0].device_mesh == whole["tp"] and found[1].device_mesh is whole


def test_a_shard_is_refused_where_another_belongs(world: World) -> None:
    world(0, 2)
    mesh = init_device_mesh("cpu", (2,))
    shard, replica = Codec().encode(sharded(mesh)), Codec().encode(sharded(mesh, Replicate()))
    world(1, 2)
    mesh = rtr.register_device_mesh(init_device_mesh("cpu", (2,)))
    with pytest.raises(SerializationError, match=r"from coordinate \(0,\).* is at \(1,\), where another shard belongs"):
        arrived(shard)
    assert arrived(replica).device_mesh is mesh


def test_no_such_mesh(world: World) -> None:
    world(0, 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    encoded = Codec().encode(sharded(mesh))
    remedy = r"\(registered: none\): .* init_device_mesh\('cpu', \(2,\), mesh_dim_names=\('tp',\)\), keep it, and call "
    with pytest.raises(SerializationError, match=remedy + r"raytorchrpc\.register_device_mesh\(mesh\)"):
        arrived(encoded)
    other = rtr.register_device_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    with pytest.raises(SerializationError, match=r"registered: \('cpu', \(2,\), mesh_dim_names=\('dp',\)\)"):
        arrived(encoded)
    del other
    rtr.register_device_mesh(mesh)
    assert arrived(encoded).device_mesh is mesh
    world(0, 2)
    with pytest.raises(SerializationError, match="registered: none"):  # its process groups have ended
        arrived(encoded)
    dist.destroy_process_group()
    with pytest.raises(SerializationError, match="registered: none"):
        arrived(encoded)


def test_a_mesh_of_others_alone_is_not_used(world: World) -> None:
    world(0, 2)
    others = rtr.register_device_mesh(DeviceMesh("cpu", [[1]], mesh_dim_names=("role", "tp")))
    own = DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
    encoded = Codec().encode(DTensor.from_local(torch.ones(3), own, [Shard(0)]))
    with pytest.raises(SerializationError, match="registered: none"):
        arrived(encoded)
    rtr.register_device_mesh(own)
    assert arrived(encoded).device_mesh is own is not others


def test_of_several_meshes_the_one_with_the_senders_coordinate_then_with_its_ranks(world: World) -> None:
    world(2, 4)
    first = rtr.register_device_mesh(DeviceMesh("cpu", [2, 3]))
    last = rtr.register_device_mesh(DeviceMesh("cpu", [0, 2]))
    assert arrived(Codec().encode(sharded(first))).device_mesh is first
    assert arrived(Codec().encode(sharded(last))).device_mesh is last
    other = rtr.register_device_mesh(DeviceMesh("cpu", [1, 2]))
    assert arrived(Codec().encode(sharded(last))).device_mesh is last
    encoded = Codec().encode(sharded(DeviceMesh("cpu", [3, 2])))
    with pytest.raises(SerializationError, match="2 registered meshes match: give them different mesh_dim_names"):
        arrived(encoded)
    del other
    gc.collect()
    assert arrived(encoded).device_mesh is last
    again = rtr.register_device_mesh(DeviceMesh("cpu", [0, 2]))  # equal to another: either will do
    assert arrived(encoded).device_mesh is again


def test_what_cannot_be_registered_or_sent(world: World) -> None:
    with pytest.raises(ConfigurationError, match="takes a DeviceMesh, not a str"):
        rtr.register_device_mesh("cpu")  # type: ignore[arg-type]
    world(0, 2)
    mesh, elsewhere = init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [1])
    with pytest.raises(SerializationError, match="not part of the DTensor's device mesh"):
        Codec().encode(DTensor.from_local(torch.ones(3), elsewhere, [Shard(0)]))
    dist.destroy_process_group()
    with pytest.raises(ConfigurationError, match=r"torch\.distributed is not initialised"):
        rtr.register_device_mesh(mesh)


# --- buffers, collectives, and programs without DTensors ----------------------------------------------------------


def test_into_takes_the_local_tensor(world: World) -> None:
    world(0, 2)
    mesh = rtr.register_device_mesh(init_device_mesh("cpu", (2,)))
    tensor, target = sharded(mesh), torch.nn.Parameter(sharded(mesh, Shard(0)) * 0)
    with pytest.raises(ConfigurationError, match=r"buffer 0 of into= is a DTensor, .* give its to_local\(\)"):
        Buffers([target])
    body = Codec().encode([tensor, torch.ones(2)])
    buffers = [target.to_local(), torch.empty(2)]
    _, (found, plain) = Buffers(buffers).receive(Codec(), body, [], "the call", False)
    assert torch.equal(target.to_local(), tensor.to_local())
    assert found.to_local().data_ptr() == buffers[0].data_ptr() and plain is buffers[1]


def test_what_an_asynchronous_collective_returns_is_waited_for() -> None:
    import torch.distributed._functional_collectives as collectives

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = collectives.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
        assert type(tensor) is collectives.AsyncCollectiveTensor
        found = arrived(Codec().encode([tensor, tensor]))
        assert tensor.completed
        assert type(found[0]) is torch.Tensor and found[0] is found[1] and torch.equal(found[0], torch.ones(3))
        mesh = rtr.register_device_mesh(init_device_mesh("cpu", (1,)))
        pending = collectives.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
        distributed = DTensor.from_local(torch.ones(3), mesh, [Partial()])
        distributed._local_tensor = pending  # as redistribute(async_op=True) makes them among several processes
        assert type(arrived(Codec().encode(distributed)).to_local()) is torch.Tensor
        assert pending.completed
    finally:
        dist.destroy_process_group()


def test_a_program_without_dtensors_does_not_import_them() -> None:
    program = (
        "import sys, torch, raytorchrpc as rtr; from raytorchrpc.tensors.codec import Codec\n"
        "class Own(torch.Tensor): pass\n"
        "codec = Codec(); codec.decode(*codec.encode([torch.ones(3).as_subclass(Own), torch.ones(2).to_sparse()]))\n"
        "rtr.rdt.enable_where_possible()\n"
        "print([name for name in sys.modules if name.startswith('torch.distributed.tensor')])"
    )
    done = run_program("-c", program)
    assert done.stdout.strip() == "[]", done.stderr
