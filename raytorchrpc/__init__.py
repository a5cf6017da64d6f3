"""Direct calls between Ray actors; tensors cross by the fastest available transport.

Ray stays in charge of scheduling, placement, restarts and jobs. ``init_group(actors)`` joins a set of actors
into a group whose members call each other without it. Importing this changes no environment and no logging;
in an actor that Ray has restarted it lets the actor's group take it back.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raytorchrpc import _loading, rdt
from raytorchrpc._compat import ray_internals
from raytorchrpc.calls.client.future import Future, gather, wait
from raytorchrpc.calls.client.stream import Stream
from raytorchrpc.calls.client.verbs import remote, rpc_async, rpc_sync
from raytorchrpc.calls.member import await_membership, current_member
from raytorchrpc.calls.peers import Member
from raytorchrpc.calls.scope import allow_calls
from raytorchrpc.config import GroupConfig
from raytorchrpc.decorator import method
from raytorchrpc.errors import (
    BootstrapError,
    CancelledError,
    Closed,
    ConfigurationError,
    Empty,
    Full,
    LaneUnavailable,
    NoSuchMethod,
    NotAMember,
    NotFound,
    PeerBusy,
    PeerLost,
    ProcessGroupLost,
    RayTorchRpcError,
    RemoteError,
    RpcTimeout,
    SerializationError,
    TransferFailed,
)
from raytorchrpc.group import restarted
from raytorchrpc.patterns.queues.handles import Queue, Subscription, Topic
from raytorchrpc.patterns.weights.conversions import BlockFp8
from raytorchrpc.patterns.weights.shards import Shard
from raytorchrpc.patterns.weights.store import WeightStore
from raytorchrpc.runtime_env import runtime_env
from raytorchrpc.tensors.distributed_tensors import register_device_mesh
from raytorchrpc.topology.device_map import DeviceMap

__version__ = "0.1.0"

__all__ = [
    "BlockFp8",
    "BootstrapError",
    "CancelledError",
    "Change",
    "Closed",
    "ConfigurationError",
    "DeviceMap",
    "Empty",
    "Full",
    "Future",
    "Group",
    "GroupConfig",
    "LaneUnavailable",
    "Member",
    "NoSuchMethod",
    "NotAMember",
    "NotFound",
    "PeerBusy",
    "PeerLost",
    "ProcessGroupInfo",
    "ProcessGroupLost",
    "Queue",
    "RayTorchRpcError",
    "RemoteError",
    "RpcTimeout",
    "SerializationError",
    "Shard",
    "Stream",
    "Subscription",
    "Topic",
    "TransferFailed",
    "WeightStore",
    "allow_calls",
    "await_membership",
    "current_member",
    "gather",
    "get_group",
    "init_group",
    "join",
    "method",
    "process_group",
    "process_group_info",
    "rdt",
    "register_device_mesh",
    "remote",
    "rpc_async",
    "rpc_sync",
    "runtime_env",
    "wait",
]


#: A driver needs these when it forms a group; they take as long to load as all the others.
_LOADED_WHEN_USED = {
    "Change": "raytorchrpc.group.changes",
    **dict.fromkeys(("Group", "get_group", "init_group", "join"), "raytorchrpc.group.group"),
    **dict.fromkeys(("ProcessGroupInfo", "process_group", "process_group_info"), "raytorchrpc.group.process_group"),
}

if TYPE_CHECKING:
    from raytorchrpc.group.changes import Change
    from raytorchrpc.group.group import Group, get_group, init_group, join
    from raytorchrpc.group.process_group import ProcessGroupInfo, process_group, process_group_info
else:

    def __getattr__(name: str) -> Any:
        if name not in _LOADED_WHEN_USED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_LOADED_WHEN_USED[name]), name)
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__", "errors"]


if ray_internals.runs_tasks():
    import gc

    from raytorchrpc.group.join import preload  # a group waits for its slowest member

    preload()
    # The modules leave Python's collector about to look at all of their objects, for 0.1 s, and it would do so while a
    # group forms. Now nobody waits.
    gc.collect()
_loading.finish()
restarted.begin()
