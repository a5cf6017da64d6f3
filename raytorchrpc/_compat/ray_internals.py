"""Private names of Ray that this package uses.

No other module may use a name of Ray that starts with an underscore. When a release of Ray moves one, exactly one
function here breaks, and its test in ``tests/ray/test_compat.py`` says what it was for.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from raytorchrpc.errors import SerializationError

if TYPE_CHECKING:
    import asyncio


def _worker() -> Any:
    from ray._private import worker

    return worker.global_worker


def actor_instance() -> Any | None:
    """The actor object living in this process; None in a driver, a task, or outside Ray."""
    instances = getattr(_worker(), "actors", None)
    return instances.get(_worker().core_worker.get_actor_id()) if instances else None


def runs_tasks() -> bool:
    """Whether Ray started this process to run tasks or an actor; False in a driver or outside Ray."""
    from ray import WORKER_MODE

    return bool(_worker().mode == WORKER_MODE)


def cluster_above() -> str | None:
    """The address of the cluster of which this process is a worker, or was started by one: several may run on a host.
    None: it is not.
    """
    try:
        with open(f"/proc/{os.environ['RAY_RAYLET_PID']}/cmdline", "rb") as file:
            options = file.read().decode(errors="replace").split("\0")
    except (KeyError, OSError):
        return None
    option = "--gcs-address="
    return next((each.removeprefix(option) for each in options if each.startswith(option)), None)


def session_check() -> Callable[[], bool]:
    """Returns a function that says whether this process is still connected to Ray as it is now. A job id alone would
    repeat in the next cluster that a process starts.
    """
    import ray

    def session() -> tuple[str, ...]:
        if not ray.is_initialized():
            return ()
        context = ray.get_runtime_context()
        return context.get_job_id(), context.get_node_id(), context.get_actor_id() or ""

    now = session()
    return lambda: session() == now


def uses_ray_client() -> bool:
    """Whether this process has connected to a cluster as a Ray Client (``ray://``)."""
    from ray.util.client import ray as client

    return bool(_any(client).is_connected())


def actor_max_concurrency() -> int:
    """``max_concurrency`` of the actor in this process (1000 unless set, for an async actor); 1 without an actor."""
    return int(_worker().core_worker.current_actor_max_concurrency()) if actor_instance() is not None else 1


def blocked_actor() -> str | None:
    """Hex id of the actor in this process if the method on this thread keeps Ray from running another one."""
    if actor_max_concurrency() > 1 or threading.current_thread() is not threading.main_thread():
        return None
    import ray

    return ray.get_runtime_context().get_actor_id()


def actor_is_async() -> bool:
    """Whether this process holds an actor and Ray runs it on an event loop."""
    return actor_instance() is not None and bool(_worker().core_worker.current_actor_is_asyncio())


def actor_event_loop(concurrency_group: str | None) -> asyncio.AbstractEventLoop:
    """The event loop on which Ray runs the coroutines of this concurrency group (None: the default group)."""
    from ray._raylet import PythonFunctionDescriptor  # type: ignore[attr-defined]

    descriptor = PythonFunctionDescriptor("", "", "")
    loop: asyncio.AbstractEventLoop = _worker().core_worker.get_event_loop(descriptor, concurrency_group)[0]
    return loop


_wrapped_manager: Any = None


def wrap_actor_methods(wrap: Callable[[str, Any, Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have Ray run ``wrap(name, method, executor)`` instead of each method's executor in this process. Idempotent.

    For the methods of an actor whose class is loaded, and of one that is loaded later. An executor is called with the
    instance and the arguments. Ray knows coroutines by the attributes ``name`` and ``method`` of what it runs.
    """
    global _wrapped_manager
    manager = _worker().function_actor_manager
    if manager is _wrapped_manager:
        return
    make = manager._make_actor_method_executor

    def wrapped(executor: Any) -> Any:
        function: Any = wrap(executor.name, executor.method, executor)
        function.name, function.method = executor.name, executor.method
        return function

    manager._make_actor_method_executor = lambda name, method: wrapped(make(name, method))
    known = manager._function_execution_info
    for key, info in list(known.items()):
        if info and hasattr(info[0], "method"):  # (function, its name, ...); tasks have plain functions
            known[key] = type(info)(wrapped(info[0]), *info[1:])
    manager.execution_infos.clear()  # a copy, by task; Ray looks a missing one up again
    _wrapped_manager = manager


def untraced(method: Any) -> Any:
    """The attribute of a class without what Ray's tracing puts around the methods of every actor class."""
    while getattr(method, "__globals__", {}).get("__name__") == "ray.util.tracing.tracing_helper":
        method = method.__wrapped__
    return method


def concurrency_group_of(function: Any) -> str | None:
    """The group named by ``@ray.method(concurrency_group=...)`` on this method."""
    group: str | None = getattr(function, "__ray_concurrency_group__", None)
    return group


def call_actor(handle: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(instance, *args)`` in the actor's present process alone; returns the reference of its result.

    With the actor's own ``max_task_retries`` Ray might run it in the next process.
    """
    return handle.__ray_call__.options(max_task_retries=0).remote(function, *args)


def actor_id_of(handle: Any) -> str:
    """Hex id of an ``ActorHandle``; the same for every copy of the handle and across restarts."""
    return str(handle._actor_id.hex())


def actor_key(handle: Any) -> Any:
    """A hashable key, the same for every copy of the handle, and faster than its hex id; see ``key_of_actor``."""
    return handle._actor_id


def key_of_actor(actor_id: str) -> Any:
    """The ``actor_key`` of the actor with this hex id."""
    from ray import ActorID

    return ActorID.from_hex(actor_id)


def actor_class_name(handle: Any) -> str:
    """Name of the class the actor was made from."""
    return str(handle._ray_actor_creation_function_descriptor.class_name).rpartition(".")[2]


def dead_jobs() -> frozenset[str]:
    """Hex ids of the jobs whose drivers have ended."""
    from ray._private.state import state

    jobs = state.job_table()  # type: ignore[no-untyped-call]
    return frozenset(job["JobID"] for job in jobs if job["IsDead"])


def worker_lives(worker_id: str, node_id: str) -> bool:
    """Whether a worker process of Ray (hex id, as ``get_worker_id`` returns it) runs, as far as Ray reports. Takes a
    few milliseconds.
    """
    import ray
    from ray.core.generated import gcs_pb2

    record = _accessor().get_worker_info(_any(ray).WorkerID.from_hex(worker_id))
    if not record or not _any(gcs_pb2).WorkerTableData.FromString(record).is_alive:
        return False
    # A node that has died reports nothing about its workers.
    return any(node["NodeID"] == node_id and node["Alive"] for node in _any(ray).nodes())


def was_killed(error: BaseException | None) -> bool:
    """Whether an error of a call says that the actor was ended by ``ray.kill``, which only its text tells."""
    from ray.exceptions import ActorDiedError

    return isinstance(error, ActorDiedError) and "killed by `ray.kill`" in str(error)


class ActorState(NamedTuple):
    """What Ray knows of an actor."""

    state: str
    """ALIVE, RESTARTING, DEAD, PENDING_CREATION or DEPENDENCIES_UNREADY."""
    pid: int
    """Of its latest process."""
    node_id: str
    """The node of that process: pids may repeat on other nodes."""
    cause: str
    """Of its last death, if Ray reports one."""
    restarts: int = 0


def actor_state(actor_id: str) -> ActorState:
    """The actor's state in Ray's control store; takes about a millisecond. An unknown actor is DEAD."""
    from ray._private.state import actors

    actor = actors(actor_id)
    if not actor:
        return ActorState("DEAD", 0, "", "Ray no longer knows the actor")
    where, cause = actor["Address"]["NodeID"], _death_cause(actor.get("DeathCause"))
    return ActorState(actor["State"], int(actor["Pid"]), where, cause, int(actor["NumRestarts"]))


def _death_cause(cause: Any) -> str:
    died = getattr(cause, "actor_died_error_context", None)
    text = " ".join(str(getattr(died, "error_message", "") or "").split())
    return text.partition(" Some common causes")[0]


def required_resources(actor_id: str) -> dict[str, float]:
    """The resources that an actor asked for, until Ray has placed it; empty afterwards."""
    from ray import ActorID
    from ray.core.generated import gcs_pb2

    record = _accessor().get_actor_info(ActorID.from_hex(actor_id))
    return dict(_any(gcs_pb2).ActorTableData.FromString(record).required_resources) if record else {}


def _any(untyped: Any) -> Any:
    return untyped


def _accessor() -> Any:
    """Reads Ray's control store."""
    from ray._private import state as module

    state: Any = module.state
    if hasattr(state, "_connect_and_get_accessor"):
        return state._connect_and_get_accessor()
    state._check_connected()  # before Ray 2.52
    return state.global_state_accessor


def running_methods() -> dict[str, str]:
    """By actor: the method that Ray runs there, as far as Ray has reported it within the last seconds.

    Reads all task events that Ray keeps: not for hot paths.
    """
    from ray._private.state import state
    from ray.core.generated import common_pb2, gcs_pb2

    status, parsed = _any(common_pb2).TaskStatus, _any(gcs_pb2).TaskEvents.FromString
    read = getattr(state, "_get_all_task_events", None)  # Ray 2.57 has none
    events = map(parsed, _accessor().get_task_events()) if read is None else read()
    running: dict[str, str] = {}
    for event in events:
        times = event.state_updates.state_ts_ns
        ended = times.keys() & {status.FINISHED, status.FAILED}
        if event.task_info.actor_id and status.RUNNING in times and not ended:
            running[event.task_info.actor_id.hex()] = event.task_info.name.rpartition(".")[2]
    return running


def inherited_env_vars() -> dict[str, str]:
    """``env_vars`` that Ray passes to every actor started from this process: those of the job, or of this worker."""
    import ray

    if ray.is_initialized():
        return dict(ray.get_runtime_context().runtime_env.get("env_vars") or {})
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    # In the entrypoint of a submitted job, until ray.init() applies them.
    submitted = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}")).get("runtime_env") or {}
    return dict(submitted.get("env_vars") or {})


def ray_token() -> Literal["on", "off", "missing"] | None:
    """Ray's token authentication in this process; ``missing``: it is on and there is no token; None: this Ray has none.
    Creates no token.
    """
    from ray import _raylet

    compiled: Any = _raylet
    if not hasattr(compiled, "get_authentication_mode"):
        return None
    if compiled.get_authentication_mode() != compiled.AuthenticationMode.TOKEN:
        return "off"
    return "on" if compiled.AuthenticationTokenLoader.instance().has_token() else "missing"


def returns_by(method: Any, transport: str) -> Any:
    """The actor method, marked so that Ray uses this tensor transport for the tensors it returns."""
    import ray

    return ray.method(tensor_transport=transport)(method)


def register_transport(name: str, devices: Sequence[str], manager: type[Any], data_type: type[Any]) -> None:
    """Register a tensor transport in this process, unless it is registered. Ray passes it to actors created here."""
    from ray.experimental.rdt import util

    if name not in util.transport_manager_info:
        util.register_tensor_transport(name, list(devices), manager, data_type)


def reduce_for_transports(kind: type[Any], reduce: Callable[[Any], Any]) -> bool:
    """Where Ray takes the tensors out of an object for a transport, pickle objects of ``kind`` by ``reduce``.

    Everywhere else they are pickled as before. Returns False if Ray's pickler has a reducer for them already.
    """
    from ray import cloudpickle

    if kind in cloudpickle.CloudPickler.dispatch:
        return False

    def reducer(obj: Any) -> Any:
        context = _worker().get_serialization_context()
        taking_out = getattr(context._thread_local, "use_external_transport", False)
        return reduce(obj) if taking_out else obj.__reduce_ex__(5)

    cloudpickle.CloudPickler.dispatch[kind] = reducer
    return True


class _PickledOnce:
    """A function, pickled by value once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        from ray import cloudpickle

        self._function, self._pickled = function, cloudpickle.dumps(function)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._pickled,)


def pickle_function_once(kind: type[Any]) -> None:
    """Spare Ray the pickling of a function by value with every object that it takes tensors out of (0.3 to 1 ms).

    Call it once Ray has taken a tensor of ``kind`` out of some object. Objects stay as they are to their readers.
    """
    from ray import cloudpickle

    table: Any = cloudpickle.CloudPickler.dispatch
    reduce = table.get(kind)
    if reduce is None or reduce.__module__ == __name__:
        return
    pickled = functools.cache(_PickledOnce)

    def reducer(tensor: Any) -> Any:
        function, *rest = reduce(tensor)
        if function.__module__ == "ray._private.serialization":  # a program's own may be another one next time
            function = pickled(function)
        return function, *rest

    table[kind] = reducer


def may_receive(actor: Any) -> bool:
    """Whether Ray receives tensors for this actor while it runs tasks."""
    return bool(getattr(actor, "_ray_enable_tensor_transport", True))


def transfer_timeout_s() -> float:
    """Seconds after which Ray gives up a transfer of tensors (``RAY_rdt_fetch_fail_timeout_milliseconds``)."""
    from ray._private import ray_constants

    return float(ray_constants.RDT_FETCH_FAIL_TIMEOUT_SECONDS)


def wait_for_transport_metadata(ref: Any, timeout_s: float) -> bool:
    """Block until this process, the owner of an ObjectRef, has its tensor metadata; False after the timeout."""
    manager = _worker().rdt_manager
    if not manager.is_managed_object(ref.hex()):
        return True
    return manager.wait_for_tensor_transport_metadata(ref.hex(), timeout_s) is not None


@functools.cache
def cloudpickler() -> type[Any]:
    """Ray's pickler class, with its ``refusals`` for the codec.

    The stand-alone cloudpickle has its own table of classes pickled by value, so a class from the driver's ``__main__``
    would not be identical to the copy that came with the actor's code.
    """
    from ray import cloudpickle

    return type("CloudPickler", (cloudpickle.CloudPickler,), {"refusals": refusals()})


@functools.cache
def refusals() -> dict[type[Any], Callable[[Any], Any]]:
    """By type, functions that raise SerializationError: for references, which may travel in Ray's own calls only.

    A process that unpickles a reference elsewhere is unknown to the owner of the object, which is freed in its hands as
    soon as the sender drops the reference. Ray's pickler prevents that: the sender never drops it.
    """
    import ray

    def refuse(reference: Any) -> Any:
        raise SerializationError(
            f"Ray counts an {type(reference).__name__} only in its own calls, and would never free its object: pass "
            f"its value, ray.get(ref), or make the call by Ray, handle.method.remote(...), to a method with "
            f"@raytorchrpc.method(objectref=True) if its tensors are to bypass the object store"
        )

    return dict.fromkeys((ray.ObjectRef, ray.ObjectRefGenerator), refuse)


_NAMESPACE = b"raytorchrpc"


def store(key: str, value: bytes | None) -> None:
    """Set a key of the cluster's key-value store, which every process of the cluster can read; None deletes it."""
    from ray.experimental import internal_kv

    if value is None:
        internal_kv._internal_kv_del(key, namespace=_NAMESPACE)
    else:
        internal_kv._internal_kv_put(key, value, True, namespace=_NAMESPACE)


def stored(key: str) -> bytes | None:
    """The value of a key, or None."""
    from ray.experimental import internal_kv

    return internal_kv._internal_kv_get(key, namespace=_NAMESPACE)


def stored_keys(prefix: str) -> list[str]:
    """The keys with this prefix."""
    from ray.experimental import internal_kv

    return [key.decode() for key in internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE)]
