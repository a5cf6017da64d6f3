"""Sends and receives DTensors and the tensors of asynchronous collectives.

A DTensor travels as its local tensor and a description of where that belongs on its device mesh. The receiver puts the
local tensor on a mesh of its own, which it has registered. Neither side communicates with other processes of a mesh.

torch.distributed.tensor takes a second to import: it is imported here only for a DTensor that arrives.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from raytorchrpc._compat import torch_internals
from raytorchrpc.errors import ConfigurationError, SerializationError
from raytorchrpc.process.locks import Lock

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

#: A function that rebuilds a tensor, its arguments, and the tensor's attributes.
Reduced = tuple[Any, tuple[Any, ...], dict[str, Any]]

_OTHERWISE = (
    "or send tensor.to_local(), which is the shard alone, or tensor.full_tensor(), which all processes of the mesh "
    "call together, or move weights by a WeightStore"
)


class MeshPlace(NamedTuple):
    """One process's place on a device mesh. Picklable: it arrives as an ``_Arrival``."""

    device_type: str
    shape: tuple[int, ...]
    dim_names: tuple[str, ...] | None
    ranks: tuple[int, ...]
    coordinate: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrival, tuple(self)

    def __str__(self) -> str:
        names = "" if self.dim_names is None else f", mesh_dim_names={self.dim_names}"
        return f"({self.device_type!r}, {self.shape}{names})"


class _Arrival(NamedTuple):
    """This process's mesh for DTensors of one of the sender's meshes."""

    mesh: DeviceMesh
    own: MeshPlace
    sender: MeshPlace


# --- meshes -------------------------------------------------------------------------------------------------------


class _Registered(NamedTuple):
    mesh: weakref.ref[DeviceMesh]
    world: weakref.ref[Any]
    """torch's default process group at that time: the mesh ends with it."""


_lock = Lock()
_registered: list[_Registered] = []
"""The latest first: of equal meshes it is used."""
_places: dict[int, tuple[weakref.ref[DeviceMesh], MeshPlace | None]] = {}
"""By the id of the mesh: it takes torch 0.2 ms to list a mesh's ranks."""


def register_device_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Receive DTensors on this device mesh, in this process. Returns ``mesh``.

    A DTensor that arrives in a call, a result, a queue or an ObjectRef is put on the registered mesh whose device type,
    shape and dimension names are those of the sender's mesh. Slices of a registered mesh, such as ``mesh["tp"]``, count
    as registered. The two meshes may consist of different processes. Every process that receives a DTensor registers
    its mesh, also a caller that gets one as a result.

    Only a weak reference is kept: keep the mesh for as long as DTensors arrive. It is not used any more when torch's
    default process group has ended. Thread-safe. Does not communicate.

    Raises ConfigurationError if ``mesh`` is no device mesh, or torch.distributed is not initialised.

    Examples:
        >>> def prepare(self):  # in each member of a process group, before DTensors arrive
        ...     self.mesh = rtr.register_device_mesh(init_device_mesh("cpu", (2,)))
    """
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise ConfigurationError(f"register_device_mesh() takes a DeviceMesh, not a {type(mesh).__name__}")
    world = _world()
    if world is None:
        raise ConfigurationError("register_device_mesh(): torch.distributed is not initialised in this process")
    with _lock:
        others = [one for one in _registered if (other := one.mesh()) is not None and other is not mesh]
        _registered[:] = [_Registered(weakref.ref(mesh), weakref.ref(world)), *others]
    return mesh


def _world() -> Any | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _usable() -> list[DeviceMesh]:
    """The registered meshes of torch's present process group in which this process has a place."""
    world = _world()
    meshes = [one.mesh() for one in list(_registered) if world is not None and one.world() is world]
    return [mesh for mesh in meshes if mesh is not None and _place(mesh) is not None]


def _place(mesh: DeviceMesh) -> MeshPlace | None:
    """This process's place on the mesh; None if it has none."""
    known = _places.get(id(mesh))
    if known is not None and known[0]() is mesh:
        return known[1]
    key, place, coordinate = id(mesh), None, mesh.get_coordinate()
    if coordinate is not None:
        ranks = tuple(mesh.mesh.flatten().tolist())
        place = MeshPlace(mesh.device_type, tuple(mesh.shape), mesh.mesh_dim_names, ranks, tuple(coordinate))
    _places[key] = weakref.ref(mesh, lambda _: _places.pop(key, None)), place
    return place


def _views(mesh: DeviceMesh, names: tuple[str, ...] | None) -> Iterator[DeviceMesh]:
    """The mesh, or its slice with the dimensions of these names."""
    own = mesh.mesh_dim_names
    if own == names:
        yield mesh
    elif own is not None and names is not None and len(names) < len(own) and set(names) <= set(own):
        yield mesh[names]


def _arrival(*described: Any) -> _Arrival:
    """Find this process's mesh for DTensors of the sender's mesh. Raises SerializationError."""
    sender = MeshPlace(*described)
    arrivals: list[_Arrival] = []
    for registered in _usable():
        for mesh in _views(registered, sender.dim_names):
            place = _place(mesh)
            if place is not None and place[:3] == sender[:3] and all(mesh != other.mesh for other in arrivals):
                arrivals.append(_Arrival(mesh, place, sender))
    for preferred in ("coordinate", "ranks"):
        alike = [one for one in arrivals if getattr(one.own, preferred) == getattr(sender, preferred)]
        arrivals = alike or arrivals
    if len(arrivals) > 1:
        raise SerializationError(
            f"a DTensor of the device mesh {sender} arrived, and {len(arrivals)} registered meshes match: give them "
            f"different mesh_dim_names, {_OTHERWISE}"
        )
    if not arrivals:
        known = ", ".join(str(_place(mesh)) for mesh in _usable()) or "none"
        raise SerializationError(
            f"a DTensor of the device mesh {sender} arrived, and no such mesh is registered in this process "
            f"(registered: {known}): create it here with init_device_mesh{sender}, keep it, and call "
            f"raytorchrpc.register_device_mesh(mesh), {_OTHERWISE}"
        )
    return arrivals[0]


# --- tensors ------------------------------------------------------------------------------------------------------


def reduced(tensor: torch.Tensor, keep_graph: bool = False) -> Reduced | None:
    """Reduce a DTensor, or the result of an asynchronous collective, to a plain tensor and the rest; None for others.

    Blocks until an asynchronous collective has finished. Raises SerializationError for a DTensor that cannot be sent.
    """
    kind = type(tensor)
    if kind is torch_internals.async_collective_type():
        # Autograd records the clone; the wait it does not.
        waited = tensor.clone() if keep_graph and tensor.requires_grad else torch_internals.waited(tensor)
        return _as_it_is, (waited, tensor.requires_grad), vars(tensor)
    if kind is not torch_internals.dtensor_type():
        return None
    if keep_graph and tensor.requires_grad:
        raise SerializationError(
            "a DTensor that requires grad cannot be sent within a distributed autograd context: send tensor.to_local()"
        )
    distributed: DTensor = tensor  # type: ignore[assignment]
    place = _place(distributed.device_mesh)
    if place is None:
        raise SerializationError("this process is not part of the DTensor's device mesh, so it has no shard to send")
    if not torch_internals.has_default_shard_order(distributed):
        raise SerializationError(
            "the DTensor's dimensions are sharded in an order of their own, which cannot be sent: redistribute() it, "
            f"{_OTHERWISE}"
        )
    local = torch_internals.local_tensor(distributed)
    local = local.detach() if local.requires_grad else local
    layout = (distributed.placements, tuple(distributed.shape), distributed.stride())
    # An attribute makes it a Parameter.
    return _distributed, (place, *layout, local, tensor.requires_grad), vars(tensor)


def _as_it_is(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return tensor.requires_grad_() if requires_grad and not tensor.requires_grad else tensor


def _distributed(
    arrival: _Arrival,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    local: torch.Tensor,
    requires_grad: bool,
) -> torch.Tensor:
    """Put the local tensor on this process's mesh, without a copy. Raises SerializationError."""
    from torch.distributed.tensor import DTensor

    mesh, own, sender = arrival
    for dimension, placement in enumerate(placements):
        if not placement.is_replicate() and own.coordinate[dimension] != sender.coordinate[dimension]:
            raise SerializationError(
                f"a DTensor with placements {placements} arrived from coordinate {sender.coordinate} of the device "
                f"mesh {sender}, and this process is at {own.coordinate}, where another shard belongs: send it to the "
                f"process at the same coordinate, {_OTHERWISE}"
            )
    with torch.no_grad():
        tensor: torch.Tensor = DTensor.from_local(
            local.detach(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
    return tensor.requires_grad_() if requires_grad else tensor
