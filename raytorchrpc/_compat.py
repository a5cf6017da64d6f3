"""Every private torch or Ray name the package leans on, in one place.

Nothing else may import a name that starts with an underscore from either. When a release moves one, exactly
one function here breaks, and its test in ``tests/ray/test_compat.py`` or ``tests/unit/test_compat.py`` says
what it was for.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch._C._distributed_c10d import HashStore, Store
from torch._C._distributed_rpc import PyRRef, TensorPipeAgent, WorkerInfo, _is_current_rpc_agent_set
from torch.distributed import distributed_c10d
from torch.distributed.rpc import api as rpc_api

DeviceDict = Mapping[int, int]

#: torch's RRef as C++ hands it out; ``rpc.RRef`` derives from it.
RREF_TYPE: type[Any] = PyRRef


def current_cuda_stream(device: int) -> int:
    """What CUDA calls this thread's current stream on that device; ten times quicker than by a Stream object."""
    return torch._C._cuda_getCurrentRawStream(device)


# --- torch: an agent without a rendezvous server ---------------------------------------------------------


def has_tensorpipe(kind: Literal["transports", "channels"], name: str) -> bool:
    """Whether this torch build has that TensorPipe transport or channel. Starts nothing.

    Asked by building an options object: torch looks the names up in its registries there.
    """
    try:
        if kind == "transports":
            rpc.TensorPipeRpcBackendOptions(_transports=[name])
        else:
            rpc.TensorPipeRpcBackendOptions(_channels=[name])
    except RuntimeError:
        return False
    return True


def start_agent(
    name: str,
    worker_id: int,
    *,
    threads: int,
    timeout_s: float,
    transports: Sequence[str],
    channels: Sequence[str],
    device_maps: Mapping[str, DeviceDict],
    devices: Sequence[int],
) -> tuple[TensorPipeAgent, Store, str]:
    """Start this process's torchrpc agent alone, over a store of its own.

    ``init_rpc`` would meet the others through a shared store; here the driver carries the addresses.
    Returns the agent, its store (which ``add_peer`` writes into) and the URL it listens on.
    """
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=threads,
        rpc_timeout=timeout_s,
        _transports=list(transports),
        _channels=list(channels),
        device_maps={peer: _devices(mapping) for peer, mapping in device_maps.items()},
        devices=list(devices),
    )
    if devices:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    store = HashStore()
    agent = TensorPipeAgent(
        store, name, worker_id, None, options, {}, [torch.device("cuda", index) for index in devices]
    )
    rpc_api._init_rpc_states(agent)  # type: ignore[no-untyped-call]
    url: bytes = store.get("addrs/" + name)
    return agent, store, url.decode()


def _devices(mapping: DeviceDict) -> dict[Any, Any]:
    return {torch.device("cuda", mine): torch.device("cuda", its) for mine, its in mapping.items()}


def add_peer(
    agent: TensorPipeAgent,
    store: Store,
    name: str,
    worker_id: int,
    url: str,
    *,
    devices: Sequence[int],
    inverse_map: DeviceDict,
) -> None:
    """Let the agent call ``name``; ``inverse_map`` (my gpu -> the peer's) carries results back to it."""
    store.set("addrs/" + name, url)
    agent._update_group_membership(
        WorkerInfo(name, worker_id),
        [torch.device("cuda", index) for index in devices],
        {name: _devices(inverse_map)} if inverse_map else {},
        True,
    )


def remove_peer(
    agent: TensorPipeAgent, name: str, worker_id: int, *, devices: Sequence[int], inverse_maps: Mapping[str, DeviceDict]
) -> None:
    """Forget a peer. Its broken pipe stays cached under its id, so the id must never come back.

    ``devices``, ``inverse_maps`` (none of them empty): what the agent keeps for those who stay; it drops the rest. It
    takes no lock for that, and copies the maps with every answer that it sends: a map which is dropped meanwhile ends
    the process, so there is none for a peer without GPUs.
    """
    agent._update_group_membership(
        WorkerInfo(name, worker_id),
        [torch.device("cuda", index) for index in devices],
        {peer: _devices(inverse_map) for peer, inverse_map in inverse_maps.items()},
        False,
    )


def stop_agent() -> None:
    """End the agent without asking the peers: a graceful end waits for all of them, dead ones included."""
    rpc.shutdown(graceful=False)


def agent_is_set() -> bool:
    """Whether this process runs a torchrpc agent, ours or the user's own."""
    return _is_current_rpc_agent_set()


def invoke_async(
    worker: WorkerInfo, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
) -> torch.futures.Future[Any]:
    """``rpc.rpc_async`` with a ready WorkerInfo (a name would be looked up on every call)."""
    return rpc.rpc_async(worker, function, args=args, timeout=timeout_s)  # type: ignore[no-any-return]


def is_sole_owner(tensor: torch.Tensor) -> bool:
    """Whether nobody but this tensor holds its memory: no other tensor in Python or C++, no array it came from."""
    return bool(tensor.untyped_storage().resizable()) and _holders(tensor) == _holders_of_a_new_one()


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    """References to the Python object of a tensor's storage, and uses of the storage, this function's included."""
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)


@functools.cache
def _holders_of_a_new_one() -> tuple[int, int]:
    return _holders(torch.empty(1))


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """``copy_`` for each pair, on a GPU in one kernel for many."""
    torch._foreach_copy_(targets, sources)


# --- torch: distributed autograd ---------------------------------------------------------------------------

_autograd_id: int | None = None


def abort_process_groups() -> None:
    """End torch.distributed's default process group and all its subgroups, without waiting for anybody else.

    ``destroy_process_group`` would wait for collectives that a lost member keeps from ending.
    """
    distributed_c10d._abort_process_group()


def init_autograd(worker_id: int) -> int:
    """Give distributed autograd its id. It takes one per process life; returns the one in force."""
    global _autograd_id
    if _autograd_id is None:
        try:
            dist_autograd._init(worker_id)  # type: ignore[attr-defined]
            _autograd_id = worker_id
        except RuntimeError:  # init_rpc was here before; the upper bits of its ids tell what it took
            _autograd_id = dist_autograd._get_max_id() >> 48  # type: ignore[attr-defined]
    return _autograd_id


def autograd_id() -> int | None:
    """The id distributed autograd carries in this process, or None before the first group."""
    return _autograd_id


@functools.cache
def _autograd_symbols() -> tuple[Callable[[], int], Callable[[int], None], Callable[[], None]]:
    """The thread's current context as C++ keeps it: read, set, clear.

    Python can open a context but not enter an existing one, and methods run on a member's own threads, not
    on the torchrpc thread that received the call. These are the static members of DistAutogradContainer.
    """
    library = ctypes.PyDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    prefix = "_ZN5torch11distributed8autograd21DistAutogradContainer"
    current = getattr(library, prefix + "16currentContextIdEv")
    current.restype, current.argtypes = ctypes.c_int64, []
    enter = getattr(library, prefix + "19setCurrentContextIdEl")
    enter.restype, enter.argtypes = None, [ctypes.c_int64]
    leave = getattr(library, prefix + "19clearCurrentContextEv")
    leave.restype, leave.argtypes = None, []
    return current, enter, leave


NO_CONTEXT = -1


def current_autograd_context() -> int:
    """The distributed autograd context this thread is in, or ``NO_CONTEXT``. About 0.3 us."""
    return _autograd_symbols()[0]()


@contextmanager
def autograd_context(context_id: int) -> Iterator[None]:
    """Run in an existing distributed autograd context, then put back the one this thread was in."""
    current, enter, leave = _autograd_symbols()
    before = current()
    if context_id == before:
        yield
        return
    leave()
    if context_id != NO_CONTEXT:
        enter(context_id)
    try:
        yield
    finally:
        leave()
        if before != NO_CONTEXT:
            enter(before)


# --- Ray: what a worker knows about the actor it runs --------------------------------------------------------


def _worker() -> Any:
    from ray._private import worker

    return worker.global_worker


def actor_instance() -> Any | None:
    """The actor object living in this process; None in a driver, a task, or outside Ray."""
    worker = _worker()
    instances = getattr(worker, "actors", None)
    if not instances:
        return None
    return instances.get(worker.core_worker.get_actor_id())


def actor_max_concurrency() -> int:
    """``max_concurrency`` of the actor in this process (1000 unless set, for an async actor)."""
    return int(_worker().core_worker.current_actor_max_concurrency())


def actor_is_async() -> bool:
    """Whether Ray runs this process's actor on an event loop."""
    return bool(_worker().core_worker.current_actor_is_asyncio())


def actor_event_loop(concurrency_group: str | None) -> asyncio.AbstractEventLoop:
    """The loop Ray runs the coroutines of this concurrency group on (None: the default group)."""
    from ray._raylet import PythonFunctionDescriptor  # type: ignore[attr-defined]

    descriptor = PythonFunctionDescriptor("", "", "")
    loop: asyncio.AbstractEventLoop = _worker().core_worker.get_event_loop(descriptor, concurrency_group)[0]
    return loop


def concurrency_group_of(function: Any) -> str | None:
    """The group named by ``@ray.method(concurrency_group=...)`` on this method."""
    group: str | None = getattr(function, "__ray_concurrency_group__", None)
    return group


def actor_id_of(handle: Any) -> str:
    """Hex id of an ``ActorHandle``; the same for every copy of the handle and across restarts."""
    return str(handle._actor_id.hex())


def actor_key(handle: Any) -> Any:
    """Something hashable, the same for every copy of the handle, and quicker than its hex id; see ``key_of_actor``."""
    return handle._actor_id


def key_of_actor(actor_id: str) -> Any:
    """The ``actor_key`` of the actor with this hex id."""
    from ray import ActorID

    return ActorID.from_hex(actor_id)


def actor_class_name(handle: Any) -> str:
    """Name of the class the actor was made from."""
    return str(handle._ray_actor_creation_function_descriptor.class_name).rpartition(".")[2]


def dead_jobs() -> frozenset[str]:
    """Hex ids of the drivers that are gone."""
    from ray._private.state import state

    return frozenset(
        job["JobID"]
        for job in state.job_table()  # type: ignore[no-untyped-call]
        if job["IsDead"]
    )


def actor_is_dead(actor_id: str) -> bool:
    """Whether Ray has given this actor up for good."""
    from ray._private.state import actors

    return bool(actors(actor_id).get("State") == "DEAD")


class ActorState(NamedTuple):
    """What Ray knows of an actor."""

    state: str
    """ALIVE, RESTARTING, DEAD, PENDING_CREATION or DEPENDENCIES_UNREADY."""
    pid: int
    """Of its last process."""
    node_id: str
    """Where that was: hosts with pid namespaces of their own can have equal pids."""
    cause: str
    """Of its last death, if Ray tells one."""
    restarts: int = 0


def actor_state(actor_id: str) -> ActorState:
    """Asks Ray's control store, about a millisecond. An actor that it has forgotten is DEAD."""
    from ray._private.state import actors

    found = actors(actor_id)
    if not found:
        return ActorState("DEAD", 0, "", "Ray knows no such actor any more")
    where, cause = found["Address"]["NodeID"], _death_cause(found.get("DeathCause"))
    return ActorState(found["State"], int(found["Pid"]), where, cause, int(found["NumRestarts"]))


def _death_cause(cause: Any) -> str:
    died = getattr(cause, "actor_died_error_context", None)
    text = " ".join(str(getattr(died, "error_message", "") or "").split())
    return text.partition(" Some common causes")[0]


def inherited_env_vars() -> dict[str, str]:
    """``env_vars`` that Ray gives every actor started from here, asked or not: those of the job, or of this worker."""
    import ray

    if ray.is_initialized():
        return dict(ray.get_runtime_context().runtime_env.get("env_vars") or {})
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    # A submitted job's entrypoint has them there until ray.init() takes them up.
    submitted = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}")).get("runtime_env") or {}
    return dict(submitted.get("env_vars") or {})


def ray_token() -> Literal["on", "off", "missing"]:
    """Ray's token authentication in this process; ``missing``: it is on, and no token is found. Reads, makes none."""
    from ray import _raylet

    compiled: Any = _raylet
    if compiled.get_authentication_mode() != compiled.AuthenticationMode.TOKEN:
        return "off"
    return "on" if compiled.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True) else "missing"


def returns_by(method: Any, transport: str) -> Any:
    """The actor method, marked so that Ray keeps the tensors that it returns for this tensor transport."""
    import ray

    return ray.method(tensor_transport=transport)(method)


def register_transport(name: str, devices: Sequence[str], manager: type[Any], data_type: type[Any]) -> None:
    """Make a tensor transport known to Ray in this process, if it is not: Ray also brings it to actors made here."""
    from ray.experimental.rdt import util

    if name not in util.transport_manager_info:
        util.register_tensor_transport(name, list(devices), manager, data_type)


def may_receive(actor: Any) -> bool:
    """Whether Ray receives tensors for this actor beside its tasks, and not behind them."""
    return bool(getattr(actor, "_ray_enable_tensor_transport", True))


def transfer_timeout_s() -> float:
    """When Ray gives up a transfer of tensors (``RAY_rdt_fetch_fail_timeout_milliseconds``)."""
    from ray._private import ray_constants

    return float(ray_constants.RDT_FETCH_FAIL_TIMEOUT_SECONDS)


def wait_for_transport_metadata(ref: Any, timeout_s: float) -> bool:
    """Block until the owner of an ObjectRef, which is this process, knows where its tensors are; False: not in time."""
    manager = _worker().rdt_manager
    if not manager.is_managed_object(ref.hex()):
        return True
    return manager.wait_for_tensor_transport_metadata(ref.hex(), timeout_s) is not None


def cloudpickler() -> type[Any]:
    """Ray's own pickler class.

    The stand-alone cloudpickle keeps its own table of by-value classes, so a class from the driver's
    ``__main__`` would arrive as a stranger to the copy that came with the actor's code.
    """
    from ray import cloudpickle

    pickler: type[Any] = cloudpickle.CloudPickler
    return pickler


_NAMESPACE = b"raytorchrpc"


def store(key: str, value: bytes | None) -> None:
    """Keep a value in the cluster's key-value store, where every process of the cluster can read it; None: drop it."""
    from ray.experimental import internal_kv

    if value is None:
        internal_kv._internal_kv_del(key, namespace=_NAMESPACE)
    else:
        internal_kv._internal_kv_put(key, value, True, namespace=_NAMESPACE)


def stored(key: str) -> bytes | None:
    """The value that is kept there, if there is one."""
    from ray.experimental import internal_kv

    return internal_kv._internal_kv_get(key, namespace=_NAMESPACE)


def stored_keys(prefix: str) -> list[str]:
    """Where values are kept, of those keys that begin so."""
    from ray.experimental import internal_kv

    return [key.decode() for key in internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE)]


# --- NIXL: which of its packages ---------------------------------------------------------------------------

NIXL_MISSING = "NIXL is not installed for this torch build: pip install 'raytorchrpc[nixl]'"


def nixl_package() -> str | None:
    """The package with NIXL's library for the CUDA release of this torch build, any if that has none; None if it is
    not installed. Imports nothing.
    """
    cuda = torch.version.cuda
    names = [f"nixl_cu{cuda.partition('.')[0]}"] if cuda else ["nixl_cu13", "nixl_cu12"]
    return next((name for name in names if importlib.util.find_spec(name)), None)
