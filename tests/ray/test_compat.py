"""One test for each private name of Ray in ``_compat``: when a release moves it, this says what it was for.

The names of torch have theirs in tests/unit/test_compat.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import ray
import torch

import raytorchrpc as rtr
from raytorchrpc._compat import ray_internals
from raytorchrpc.tensors.codec import Codec
from tests.polling import wait_until
from tests.programs import Program
from tests.ray.actors import Latch, Peer
from tests.ray.conftest import Spawn
from tests.ray.plain import Plain
from tests.releases import needs, obstacle


def inside(handle: Any, function: Callable[[Any], Any]) -> Any:
    """``function(instance)`` in the actor's process."""
    return ray.get(handle.__ray_call__.remote(function), timeout=60)


def test_what_ray_runs_for_a_method_can_be_wrapped(spawn: Spawn) -> None:
    """FunctionActorManager._make_actor_method_executor, _function_execution_info and execution_infos: without them the
    undecorated methods of a sync actor run beside the others.
    """

    def wrap(instance: Any) -> None:
        def twice(name: str, method: Any, executor: Callable[..., Any]) -> Callable[..., Any]:
            return lambda instance, *args: (
                executor(instance, *args) * 2 if name == "double" else executor(instance, *args)
            )

        ray_internals._wrapped_manager = None  # an actor's process wraps them when it imports the package
        ray_internals.wrap_actor_methods(twice)

    actor = spawn(Plain)
    assert ray.get(actor.double.remote(21), timeout=60) == 42
    inside(actor, wrap)
    assert ray.get(actor.double.remote(21), timeout=60) == 84
    assert inside(actor, lambda instance: instance.double(21)) == 42


def test_the_actor_id_of_a_handle_is_the_one_ray_knows_the_actor_by(peers: list[Any]) -> None:
    """ActorHandle._actor_id: without it a handle is no call target, and duplicates in a list go unnoticed."""
    known = inside(peers[0], lambda instance: ray.get_runtime_context().get_actor_id())
    assert ray_internals.actor_id_of(peers[0]) == known
    assert ray_internals.actor_id_of(ray.get(ray.put([peers[0]]))[0]) == known, "another copy of the handle"


def test_the_class_name_of_a_handle(peers: list[Any]) -> None:
    """ActorHandle._ray_actor_creation_function_descriptor.class_name: without it members of a list have no names."""
    assert ray_internals.actor_class_name(peers[0]) == "Peer"


def test_a_value_is_kept_where_the_whole_cluster_reads_it(cluster: None) -> None:
    """ray.experimental.internal_kv._internal_kv_put, _internal_kv_get, _internal_kv_list and _internal_kv_del: without
    them ``raytorchrpc top`` sees detached groups alone, and a restarted actor is back only when it has nothing to do.
    """
    assert ray_internals.stored("tests/a") is None and ray_internals.stored_keys("tests/") == []
    for _ in range(2):
        ray_internals.store("tests/a", b"what")
        assert ray_internals.stored("tests/a") == b"what" and ray_internals.stored_keys("tests/") == ["tests/a"]
    assert ray_internals.stored_keys("others/") == []
    ray_internals.store("tests/a", None)
    ray_internals.store("tests/a", None)
    assert ray_internals.stored("tests/a") is None and ray_internals.stored_keys("tests/") == []


def test_whether_token_authentication_is_on_can_be_told(cluster: None) -> None:
    """ray._raylet.get_authentication_mode, AuthenticationMode and AuthenticationTokenLoader: without them the doctor
    cannot say why a process is refused. A local Ray turns authentication on unless the environment says otherwise."""
    known = "on" if os.environ.get("RAY_AUTH_MODE") == "token" else "off"
    assert ray_internals.ray_token() == (known if obstacle("token") is None else None)


def test_the_kind_of_an_actor_is_known(peers: list[Any], special: dict[str, Any]) -> None:
    """core_worker.current_actor_max_concurrency: without it a threaded actor serves one direct call at a time, or
    a sync one several. core_worker.current_actor_is_asyncio: without it methods of an async actor run beside its loop.
    """
    kinds = {"sync": peers[0], **special}
    found = {
        name: inside(kinds[name], lambda _: (ray_internals.actor_max_concurrency(), ray_internals.actor_is_async()))
        for name in ("sync", "threaded", "asynchronous")
    }
    assert found == {"sync": (1, False), "threaded": (4, False), "asynchronous": (1000, True)}


@needs("objectrefs")
def test_a_transport_is_known_to_ray_and_to_the_methods_that_return_by_it() -> None:
    """ray.experimental.rdt.util.transport_manager_info and register_tensor_transport, ray.method(tensor_transport=...):
    without them no ObjectRef takes the group's lanes."""
    from ray.experimental.rdt import util

    rtr.rdt.enable()
    rtr.rdt.enable()
    assert util.is_one_sided_transport(rtr.rdt.TRANSPORT)
    assert all(util.device_match_transport(device, rtr.rdt.TRANSPORT) for device in ("cpu", "cuda"))

    class Maker:
        @rtr.method(objectref=True)
        def make(self) -> None:
            pass

    assert ray.remote(Maker).__ray_metadata__.method_meta.method_name_to_tensor_transport == {"make": "TORCHRPC"}


@needs("objectrefs")
def test_when_ray_gives_up_a_transfer_is_known() -> None:
    """ray._private.ray_constants.RDT_FETCH_FAIL_TIMEOUT_SECONDS: without it Ray's error may come before ours."""
    assert ray_internals.transfer_timeout_s() == 60


@needs("objectrefs")
def test_an_owner_can_wait_until_it_knows_where_tensors_are(cluster: None) -> None:
    """worker.rdt_manager, its is_managed_object and wait_for_tensor_transport_metadata: without them a ref that was
    made just now cannot go inside a container."""
    rtr.rdt.enable()
    ref = ray.put(b"no tensors"), ray.put([torch.ones(1)], _tensor_transport=rtr.rdt.TRANSPORT)
    assert [ray_internals.wait_for_transport_metadata(one, 30) for one in ref] == [True, True]


class Reduced:
    def __init__(self, value: str) -> None:
        self.value = value


@needs("objectrefs")
def test_objects_can_be_reduced_where_ray_takes_tensors_out(cluster: None) -> None:
    """ray.cloudpickle.CloudPickler.dispatch, and use_external_transport in the serialization context's _thread_local:
    without them DTensors arrive with the sender's device mesh."""
    rtr.rdt.enable()
    assert ray_internals.reduce_for_transports(Reduced, lambda own: (Reduced, ("reduced",)))
    try:
        assert not ray_internals.reduce_for_transports(Reduced, lambda own: (Reduced, ("again",)))
        value = Reduced("as it is"), torch.ones(1)  # Ray needs a tensor
        assert ray.get(ray.put(value))[0].value == "as it is"
        assert ray.get(ray.put(value, _tensor_transport=rtr.rdt.TRANSPORT))[0].value == "reduced"
    finally:
        del ray.cloudpickle.CloudPickler.dispatch[Reduced]


@needs("objectrefs")
def test_ray_pickles_no_function_with_each_object(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """ray.cloudpickle.CloudPickler.dispatch, and Ray's serialize_rdt_objects, whose serializer returns a function of
    its own: without them each object takes up to a millisecond longer."""
    rtr.rdt.enable()
    value = {"a": torch.arange(3)}
    ray.put(value, _tensor_transport=rtr.rdt.TRANSPORT)
    by_value: list[object] = []
    reduce = ray.cloudpickle.CloudPickler._dynamic_function_reduce
    monkeypatch.setattr(
        *(ray.cloudpickle.CloudPickler, "_dynamic_function_reduce"),
        lambda pickler, function: by_value.append(function) or reduce(pickler, function),
    )
    for _ in range(2):
        assert ray.get(ray.put(value, _tensor_transport=rtr.rdt.TRANSPORT))["a"].tolist() == [0, 1, 2]
    assert len(by_value) <= 1
    assert ray.get(ray.put(value))["a"].tolist() == [0, 1, 2]


def test_a_class_that_ray_brought_by_value_is_the_same_to_our_codec(spawn: Spawn) -> None:
    """ray.cloudpickle.CloudPickler: another cloudpickle's copy of the class would be a stranger to isinstance."""

    class Config:
        def __init__(self, rate: float) -> None:
            self.rate = rate

    class Trainer:
        def accepts(self, payload: bytes) -> bool:
            return isinstance(Codec(ray_internals.cloudpickler()).decode(payload), Config)

    payload = Codec(ray_internals.cloudpickler()).encode(Config(0.1)).payload
    assert ray.get(spawn(Trainer).accepts.remote(payload))


DRIVER_THAT_DIES = """
import os, sys
import ray, raytorchrpc as rtr
address, namespace = sys.argv[1:]
ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
rtr.init_group({"a": ray.get_actor("left a"), "b": ray.get_actor("left b")}, name="of the dead driver")
print(ray.get_runtime_context().get_job_id(), flush=True)
sys.stdin.read()
os._exit(9)
"""


def test_a_driver_that_died_is_known_and_its_group_keeps_nobody(spawn: Spawn) -> None:
    """ray._private.state.state.job_table, its JobID and IsDead: without it the actors of a driver that died
    without ending its group can never join another."""
    left = [spawn(Peer, name=f"left {name}", lifetime="detached") for name in "ab"]
    context = ray.get_runtime_context()
    env = {**os.environ, "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token")}
    driver = Program("-c", DRIVER_THAT_DIES, context.gcs_address, context.namespace, env=env)
    try:
        job = driver.stdout.readline().strip()
        assert job, driver.communicate()[1]
        assert not {job, context.get_job_id()} & ray_internals.dead_jobs()
        with pytest.raises(rtr.BootstrapError, match="'x' is already in group 'of the dead driver'"):
            rtr.init_group({"x": left[0]}, name="of the dead driver")
    finally:
        driver.kill()
        driver.communicate()
    deadline = time.monotonic() + 60
    while job not in ray_internals.dead_jobs():
        assert time.monotonic() < deadline, "the dead driver is not reported"
    with rtr.init_group({"x": left[0], "y": left[1]}, name="of the dead driver"):
        assert ray.get(left[0].call.remote("y", "double", 21)) == 42


@needs("objectrefs")
def test_a_worker_that_ended_is_known_and_the_group_of_its_task_keeps_nobody(peers: list[Any]) -> None:
    """The worker table of GlobalStateAccessor, WorkerTableData.is_alive: without them the members of a group that a
    task has formed can never join another.
    """

    @ray.remote(num_cpus=0)
    def form(handles: list[Any]) -> tuple[str, str, int]:
        rtr.init_group(handles, name="of a task")
        context = ray.get_runtime_context()
        return context.get_worker_id(), context.get_node_id(), os.getpid()

    worker, node, pid = ray.get(form.remote(peers[:2]))
    assert ray_internals.worker_lives(worker, node)
    with pytest.raises(rtr.BootstrapError, match="'peer_0' is already in group 'of a task'"):
        rtr.init_group(peers[:2], name="of a task")  # its supervisor runs in that worker, though the task is over
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not ray_internals.worker_lives(worker, node), 60), "its end is not reported"
    with rtr.init_group(peers[:2], name="of a task"):
        assert ray.get(peers[0].call.remote(peers[1], "double", 21)) == 42
    assert not ray_internals.worker_lives("00" * 28, node)


def test_a_handle_says_whether_its_actor_may_receive_tensors(spawn: Spawn) -> None:
    """ActorHandle._ray_enable_tensor_transport: without it nothing warns of an actor that waits for what it blocks."""
    kinds = [ray.remote(max_restarts=0)(Peer), ray.remote(enable_tensor_transport=True)(Peer)]
    handles = [spawn(kind) for kind in kinds]
    assert all(hasattr(handle, "_ray_enable_tensor_transport") for handle in handles)
    assert [ray_internals.may_receive(handle) for handle in handles] == [False, True]


def test_what_an_actor_waits_for_and_runs(spawn: Spawn, latch: Callable[[], Latch]) -> None:
    """Task events and the actor's required resources (``state._get_all_task_events``, or those of
    ``_connect_and_get_accessor``, before which Ray has ``_check_connected``), for the notice of init_group."""
    unplaced, busy, gate = spawn(Peer, num_gpus=5), spawn(Peer), latch()
    running = busy.busy.remote(gate)
    held = gate.await_arrival()
    assert ray_internals.required_resources(ray_internals.actor_id_of(unplaced))["GPU"] == 5
    assert ray_internals.required_resources(ray_internals.actor_id_of(busy)) == {}
    actor_id = ray_internals.actor_id_of(busy)
    assert wait_until(lambda: ray_internals.running_methods().get(actor_id) == "busy", 20), "Ray reports once a second"
    gate.release(held)
    ray.get(running, timeout=60)
    assert wait_until(lambda: actor_id not in ray_internals.running_methods(), 20)


def test_the_cluster_of_a_process_that_a_worker_has_started(peers: list[Any]) -> None:
    """It is not in Ray, and the cluster that Ray would find may be another one of this host."""
    program = "from raytorchrpc._compat import ray_internals; print(ray_internals.cluster_above())"
    run = partial(subprocess.check_output, [sys.executable, "-c", program], text=True)
    found = ray.get(peers[0].run.remote(run)).strip()
    assert found == ray.get_runtime_context().gcs_address
    assert ray_internals.cluster_above() is None
