"""What a process brings into a group: what it has and is, its actor's methods, and the lanes that it opens."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import ray

from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.exposed import exposed
from raytorchrpc.calls.member import LocalMember
from raytorchrpc.errors import LaneUnavailable
from raytorchrpc.lanes.base import MessageLane, TensorLane
from raytorchrpc.lanes.cuda_ipc.lane import CudaIpcLane
from raytorchrpc.lanes.loopback.lane import LoopbackLane
from raytorchrpc.lanes.nccl.lane import NcclLane
from raytorchrpc.lanes.nixl.lane import NixlLane
from raytorchrpc.lanes.shm.lane import ShmLane
from raytorchrpc.lanes.socket.lane import SocketLane
from raytorchrpc.lanes.torchrpc.agent import Fabric
from raytorchrpc.lanes.torchrpc.lane import TorchRpcLane
from raytorchrpc.membership.messages import JoinSpec
from raytorchrpc.process.memory import default_capacity
from raytorchrpc.topology import nccl_env, probe
from raytorchrpc.topology.endpoint import Endpoint

logger = logging.getLogger(__name__)


def endpoint(name: str, wants_gpu: bool = False) -> Endpoint:
    """What this process is and has."""
    return probe.probe(name=name, node_ip=_node_ip(), wants_gpu=wants_gpu)


def asked_for_gpu(instance: Any) -> bool:
    """Whether the process means to use a GPU."""
    if instance is None:  # a driver sees every GPU; use those it already uses, and wake none
        import torch

        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return bool(ray.get_runtime_context().get_accelerator_ids().get("GPU"))


def _node_ip() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def message_lanes(instance: Any, spec: JoinSpec, fabric: Fabric) -> list[MessageLane]:
    """Those that every member has, and nng where it needs it. Not open yet."""
    maps = {peer: dict(mapping) for peer, mapping in spec.device_maps.items()}
    one_at_a_time = (
        instance is not None and ray_internals.actor_max_concurrency() == 1 and not ray_internals.actor_is_async()
    )
    by_tcp = frozenset(spec.by_tcp)
    socket_lane = SocketLane(
        spec.name,
        spec.credentials,
        tcp_host=spec.tcp_host,
        by_tcp=by_tcp,
        one_at_a_time=one_at_a_time,
    )
    lanes = [LoopbackLane(), socket_lane, TorchRpcLane(spec.name, fabric, spec.agent.devices, maps)]
    if spec.nng:
        lanes.append(nng_lane(spec))
    return lanes


def nng_lane(spec: JoinSpec) -> MessageLane:
    """Not open yet."""
    from raytorchrpc.lanes.nng.lane import NngLane  # most groups do without it, and without its library

    return NngLane(spec.name, spec.credentials, tcp_host=spec.tcp_host, by_tcp=frozenset(spec.by_tcp))


def exposed_methods(instance: Any) -> dict[str, Any]:
    """By name, what ``calls.method`` noted of an actor's methods."""
    cls = type(instance)
    found = {}
    for name in dir(cls) if instance is not None else ():
        function = inspect.getattr_static(cls, name, None)  # a descriptor of the class may do anything
        note = exposed(function)
        if note is not None:
            # ray.method may have been applied after ours: then the group's name is on the wrapper.
            group = note.concurrency_group or ray_internals.concurrency_group_of(function)
            found[name] = note._replace(concurrency_group=group)
    return found


def open_tensor_lanes(spec: JoinSpec, local: LocalMember) -> dict[str, Any]:
    """Open those of ``spec.beside`` that this member has not open yet; returns their addresses."""
    addresses = {}
    for lane in _tensor_lanes(spec, [name for name in spec.beside if name not in local.tensor_lanes]):
        try:
            addresses[lane.name] = lane.open()
        except LaneUnavailable as error:
            logger.warning("%s: %s; tensors go by torchrpc", spec.name, error)
            continue
        local.tensor_lanes[lane.name] = lane
    return addresses


def _tensor_lanes(spec: JoinSpec, names: Sequence[str]) -> list[TensorLane]:
    lanes: list[TensorLane] = []
    for name in names:
        if name == "shm":
            lanes.append(ShmLane(spec.config.shm_bytes or default_capacity(), spec.config.copy_threads))
        elif name == "cuda_ipc":
            lanes.append(CudaIpcLane(spec.agent.devices))
        elif name == "nccl":
            # Also where all share a host: NCCL reads them once, and the next group may span hosts.
            made = nccl_env.apply(endpoint(spec.name), interface=spec.config.interface)
            logger.debug("%s: set for NCCL: %s", spec.name, made)
            lanes.append(
                NcclLane(
                    spec.name,
                    spec.credentials,
                    spec.agent.devices,
                    tcp_host=spec.tcp_host,
                    by_tcp=frozenset(spec.by_tcp),
                    timeout_s=spec.config.rpc_timeout_s,
                )
            )
        elif name == "nixl":
            capacity = spec.config.shm_bytes or default_capacity()
            settings = _ucx_settings(spec)
            lanes.append(NixlLane(capacity, spec.agent.devices, spec.config.rpc_timeout_s, settings))
    return lanes


def _ucx_settings(spec: JoinSpec) -> dict[str, str]:
    """UCX reads for anybody who reaches its TCP ports, so it opens them only where the lane was asked for by name."""
    if "nixl" not in (spec.config.lanes or ()):
        return {"TLS": "^tcp"}
    here = endpoint(spec.name)
    rdma = any(port.state == "ACTIVE" for hca in here.hcas for port in hca.ports)
    return {} if rdma or not spec.agent.interface else {"NET_DEVICES": spec.agent.interface}
