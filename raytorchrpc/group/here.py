"""What a process that joins a group says of itself: where it runs, and what its host offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ray

from raytorchrpc._compat import ray_internals
from raytorchrpc.config import GroupConfig
from raytorchrpc.lanes import registry
from raytorchrpc.lanes.torchrpc.backends import address_on
from raytorchrpc.topology import probe as topology_probe
from raytorchrpc.topology.endpoint import Endpoint


class Place(NamedTuple):
    """The node on which a process runs, as Ray knows it."""

    node_id: str
    node_ip: str


_inherited: Place | None = None


def inherit(from_parent: Place) -> None:
    """This process runs where the one that started it does."""
    global _inherited
    _inherited = from_parent


def place() -> Place:
    """Where this process runs: as Ray says, or for a child without Ray as its parent said."""
    if _inherited is not None and not ray.is_initialized():
        return _inherited
    node_ip = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    return Place(ray.get_runtime_context().get_node_id() if ray.is_initialized() else "", node_ip)


def listening_address(here: Endpoint, config: GroupConfig) -> str:
    """The address on which this host listens for others."""
    return here.node_ip if config.interface is None else address_on(here, config.interface)


def endpoint(name: str, wants_gpu: bool = False, lanes: Sequence[str] = ()) -> Endpoint:
    """Describe this process. ``lanes``: lanes of other distributions to look for; see ``Endpoint.lanes``."""
    evidence = topology_probe.probe(name=name, node_ip=place().node_ip, wants_gpu=wants_gpu)
    return evidence.changed({"lanes": registry.distributions(lanes)}) if lanes else evidence


def asked_for_gpu(instance: Any) -> bool:
    """Whether Ray gave this process a GPU. If it is no actor that joins as itself, using CUDA already is enough."""
    if ray.is_initialized() and ray.get_runtime_context().get_accelerator_ids().get("GPU"):
        return True
    if instance is not None and ray_internals.actor_instance() is instance:
        return False
    # It may see every GPU, and joining a group must not initialise CUDA in it.
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
