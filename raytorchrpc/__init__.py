"""Direct calls between Ray actors; tensors cross by the fastest available transport.

Ray stays in charge of scheduling, placement, restarts and jobs. ``init_group(actors)`` joins a set of actors
into a group whose members call each other without it. Importing this changes no environment and no logging, and
loads torch with the first name that is used; in a worker process of Ray at once, where it also lets the group of a
restarted actor take that back.
"""

import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from raytorchrpc.runtime_env import runtime_env
from raytorchrpc.text import did_you_mean

if TYPE_CHECKING:
    from raytorchrpc import rdt
    from raytorchrpc.calls.client.future import Future, gather, wait
    from raytorchrpc.calls.client.stream import Stream
    from raytorchrpc.calls.client.verbs import remote, rpc_async, rpc_sync
    from raytorchrpc.calls.member import await_membership, current_member
    from raytorchrpc.calls.peers import Member
    from raytorchrpc.calls.scope import allow_calls
    from raytorchrpc.config import GroupConfig
    from raytorchrpc.decorator import method
    from raytorchrpc.group.changes import Change
    from raytorchrpc.group.group import Group, get_group, init_group, join
    from raytorchrpc.group.process_group import ProcessGroupInfo, process_group, process_group_info
    from raytorchrpc.patterns.queues.handles import Queue, Subscription, Topic
    from raytorchrpc.patterns.regions.reading import Read, read
    from raytorchrpc.patterns.regions.region import Lease, Region
    from raytorchrpc.patterns.weights.conversions import BlockFp8
    from raytorchrpc.patterns.weights.shards import Shard
    from raytorchrpc.patterns.weights.store import WeightStore
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
    "Lease",
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
    "Read",
    "Region",
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
    "read",
    "register_device_mesh",
    "remote",
    "rpc_async",
    "rpc_sync",
    "runtime_env",
    "wait",
]

#: The names of these modules are loaded when they are used: all of the first part together, which every process needs;
#: one by one those that only a driver needs, when it forms a group. They take as long.
_EVERYWHERE = {
    "calls.client.future": ("Future", "gather", "wait"),
    "calls.client.stream": ("Stream",),
    "calls.client.verbs": ("remote", "rpc_async", "rpc_sync"),
    "calls.member": ("await_membership", "current_member"),
    "calls.peers": ("Member",),
    "calls.scope": ("allow_calls",),
    "config": ("GroupConfig",),
    "decorator": ("method",),
    "patterns.queues.handles": ("Queue", "Subscription", "Topic"),
    "patterns.regions.reading": ("Read", "read"),
    "patterns.regions.region": ("Lease", "Region"),
    "patterns.weights.conversions": ("BlockFp8",),
    "patterns.weights.shards": ("Shard",),
    "patterns.weights.store": ("WeightStore",),
    "rdt": ("rdt",),
    "tensors.distributed_tensors": ("register_device_mesh",),
    "topology.device_map": ("DeviceMap",),
}
_IN_DRIVERS = {
    "group.changes": ("Change",),
    "group.group": ("Group", "get_group", "init_group", "join"),
    "group.process_group": ("ProcessGroupInfo", "process_group", "process_group_info"),
}
_MODULE_OF = {name: module for module, names in {**_EVERYWHERE, **_IN_DRIVERS}.items() for name in names}
_lock = threading.RLock()
_begins = _has_begun = False


def _begin() -> None:
    """Load what every member and driver needs; in a restarted actor, let its group reach it. Does nothing again."""
    global _begins, _has_begun
    if _has_begun:
        return
    with _lock:  # other threads wait until all is loaded
        if _begins or _has_begun:  # a module that this thread loads uses a name
            return
        _begins = True
        try:
            _load()
            _has_begun = True
        finally:
            _begins = False


def _load() -> None:
    from raytorchrpc import _loading  # before torch is loaded

    for module in _EVERYWHERE:
        import_module(f"raytorchrpc.{module}")
    from raytorchrpc._compat import ray_internals
    from raytorchrpc.group import restarted

    if ray_internals.runs_tasks():
        import gc

        from raytorchrpc.group.join import preload  # a group waits for its slowest member

        preload()
        # The modules leave Python's collector about to look at all of their objects, for 0.1 s, and it would do so
        # while a group forms. Now nobody waits.
        gc.collect()
    _loading.finish()
    restarted.begin()


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{did_you_mean(name, __all__)}")
        _begin()
        module = import_module(f"raytorchrpc.{_MODULE_OF[name]}")
        value = globals()[name] = module if name == "rdt" else getattr(module, name)
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__", "errors"]


if "ray" in sys.modules:
    from raytorchrpc._compat.ray_internals import runs_tasks

    if runs_tasks():
        _begin()
