"""What a process brings into a group: its endpoint, its actor's methods, and the lanes that it opens."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.exposed import exposed
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.errors import ConfigurationError, LaneUnavailable
from raytorchrpc.lanes import registry
from raytorchrpc.lanes.base import MessageLane, TensorLane
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.membership.messages import JoinSpec
from raytorchrpc.rdt.api import load_where_possible
from raytorchrpc.topology import probe
from raytorchrpc.topology.endpoint import Endpoint

logger = logging.getLogger(__name__)


def endpoint(name: str, wants_gpu: bool = False, lanes: Sequence[str] = ()) -> Endpoint:
    """Describe this process. ``lanes``: lanes of other distributions to look for; see ``Endpoint.lanes``."""
    node_ip = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    found = probe.probe(name=name, node_ip=node_ip, wants_gpu=wants_gpu)
    return found.changed({"lanes": registry.distributions(lanes)}) if lanes else found


def asked_for_gpu(instance: Any) -> bool:
    """Whether the actor asked Ray for a GPU. For a driver: whether it has initialised CUDA."""
    if instance is None:  # a driver sees every GPU, and joining a group must not initialise CUDA in it
        import torch

        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return bool(ray.get_runtime_context().get_accelerator_ids().get("GPU"))


def exposed_methods(instance: Any) -> dict[str, Any]:
    """The actor's methods that ``rtr.method`` exposes, by name, with their options."""
    cls = type(instance)
    found = {}
    for name in dir(cls) if instance is not None else ():
        function = inspect.getattr_static(cls, name, None)  # getattr would run the class's own descriptors
        note = exposed(function)
        if note is not None:
            # ray.method may have been applied after rtr.method: then its wrapper has the concurrency group.
            group = note.concurrency_group or ray_internals.concurrency_group_of(function)
            found[name] = note._replace(concurrency_group=group)
    return found


def open_lanes(spec: JoinSpec, local: LocalMember) -> dict[str, Any]:
    """Open the lanes of ``spec`` that this member has not open yet; returns the new ones' addresses, by name.

    Raises LaneUnavailable if a message lane cannot open. A tensor lane that cannot is left out with a warning.
    """
    setup = LaneSetup(
        member=spec.name,
        credentials=spec.credentials,
        config=spec.config,
        endpoint=partial(endpoint, spec.name),
        tcp_host=spec.tcp_host,
        by_tcp=frozenset(spec.by_tcp),
        interface=spec.agent.interface,
        devices=spec.agent.devices,
        device_maps=spec.device_maps,
    )
    opened = local.tensor_lanes.keys() | {lane.name for lane in local.lanes}
    names = dict.fromkeys([*(row.name for row in registry.LANES if row.always), *spec.lanes])
    missing = [registry.lane(name) for name in names if name not in opened]
    addresses = {}
    for row in sorted(missing, key=lambda row: not row.out_of_band):  # a message lane serves as soon as it is open
        lane = make_lane(row, setup)
        if isinstance(lane, MessageLane):
            local.lanes.append(lane)
            addresses[row.name] = lane.open(partial(local.incoming.serve, lane), local.workers.submit)
            continue
        try:
            addresses[row.name] = lane.open()
        except LaneUnavailable as error:
            logger.warning("%s: %s; %s carries its tensors instead", spec.name, error, registry.FABRIC)
            continue
        local.tensor_lanes[row.name] = lane
    return addresses


def preload() -> None:
    """Import what joining a group needs, while the process of an actor starts: a group waits for its slowest member."""
    for row in registry.LANES:
        if row.always or row.carries == ("cpu",):
            registry.resolve(row, row.make)
    load_where_possible()


def make_lane(row: registry.Lane, setup: LaneSetup) -> MessageLane | TensorLane:
    """Make a lane as its row says, not open yet. Raises ConfigurationError if its factory makes something else."""
    lane = registry.resolve(row, row.make)(setup)
    expected = TensorLane if row.out_of_band else MessageLane
    if not isinstance(lane, expected) or lane.name != row.name:
        raise ConfigurationError(f"{row.make} returned {lane!r}; expected a {expected.__name__} named {row.name!r}")
    return lane
