"""Direct calls between Ray actors; tensors cross by the fastest road between the two processes.

Ray stays in charge of scheduling, placement, restarts and jobs. ``init_group(actors)`` joins a set of actors
into a group whose members call each other without it. Importing this changes no environment and no logging.
"""

from raytorchrpc import rdt
from raytorchrpc.calls import Future, method, remote, rpc_async, rpc_sync
from raytorchrpc.collectives import ProcessGroupInfo
from raytorchrpc.config import GroupConfig
from raytorchrpc.device_map import DeviceMap
from raytorchrpc.errors import (
    BootstrapError,
    ConfigurationError,
    LaneUnavailable,
    NotAMember,
    PeerBusy,
    PeerLost,
    ProcessGroupLost,
    RayTorchRpcError,
    RemoteError,
    RpcTimeout,
    SerializationError,
    TransferFailed,
)
from raytorchrpc.group import Group, get_group, init_group
from raytorchrpc.member import current_member
from raytorchrpc.peers import Member
from raytorchrpc.process_groups import process_group, process_group_info
from raytorchrpc.runtime_env import runtime_env

__version__ = "0.1.0.dev0"

__all__ = [
    "BootstrapError",
    "ConfigurationError",
    "DeviceMap",
    "Future",
    "Group",
    "GroupConfig",
    "LaneUnavailable",
    "Member",
    "NotAMember",
    "PeerBusy",
    "PeerLost",
    "ProcessGroupInfo",
    "ProcessGroupLost",
    "RayTorchRpcError",
    "RemoteError",
    "RpcTimeout",
    "SerializationError",
    "TransferFailed",
    "current_member",
    "get_group",
    "init_group",
    "method",
    "process_group",
    "process_group_info",
    "rdt",
    "remote",
    "rpc_async",
    "rpc_sync",
    "runtime_env",
]
