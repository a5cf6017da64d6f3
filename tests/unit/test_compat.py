"""One test for each private name of torch in ``_compat``: when a release moves it, this says what it was for.

The names of Ray have theirs in tests/ray/test_compat.py, but for those that need no cluster.
"""

from __future__ import annotations

import copyreg
import io
import json
import weakref
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import ray
import torch
import torch.distributed as dist
from torch.distributed import autograd as dist_autograd
from torch.distributed import distributed_c10d

from raytorchrpc._compat import ray_internals, torch_internals
from raytorchrpc.errors import SerializationError
from raytorchrpc.lanes.torchrpc.agent import RpcPickler
from raytorchrpc.tensors.codec import Codec
from tests.conformance.peers import Process, in_process
from tests.programs import run_program
from tests.releases import obstacle
from tests.unit.members import in_thread


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What two agents made by ``_compat`` did; see ``compat_agents``."""
    ran = run_program("-m", "tests.unit.compat_agents", timeout=110)
    assert ran.returncode == 0, f"no torchrpc agent can be started without a rendezvous any more:\n{ran.stderr}"
    result: dict[str, Any] = json.loads(ran.stdout)
    return result


NONE = torch_internals.NO_CONTEXT
#: By what a release of torch may change: the outcomes of steps of the agents, or a part of the text.
STEPS: dict[str, dict[str, Any]] = {
    # _distributed_c10d.HashStore, _distributed_rpc.TensorPipeAgent, rpc.api._init_rpc_states, and the options
    # _transports and _channels: without them members need init_rpc and a rendezvous server. The address lies in the
    # store under "addrs/<name>".
    "an agent starts alone and publishes its address": {"url": "uv://"},
    # _is_current_rpc_agent_set: without it, joining crashes a process that uses init_rpc.
    "a user's own agent is noticed": {"agent before": False, "agent after": True, "agent stopped": False},
    # rpc.api._ALL_WORKER_NAMES and _set_profiler_node_id: without them _all_gather returns its own entry alone, and
    # profiles do not tell which member an event comes from: by the agent's worker id.
    "collectives and profiles know the workers": {
        "names": ["a", "b"],
        "names without it": ["a"],
        "node ids": [11],
    },
    # _update_group_membership and WorkerInfo: without them no member meets another, nor does torch's own API find the
    # members by their rpc_name.
    "an agent can be told of a peer": {"call": 3, "call by name": 3},
    # rpc.api._to_worker_info and rpc.internal._pickler: without them rpc_sync(1, ...) does not know ranks, and classes
    # of the driver's __main__ cannot be sent. rpc.init_rpc, which is replaced, fails with a remedy.
    "torch's own API takes ranks and another pickler": {"adapted": [3, 3, 3, True, "no init_rpc here"]},
    # rpc.api._ALL_WORKER_NAMES, and _update_group_membership with is_join=False: without them members cannot leave, and
    # a restarted one has the address of before.
    "a peer that was removed is refused and its name can be had": {
        "removed": "could not find destination",
        "id of the next": 14,
        "exit code": 0,
    },
    # It forgets without a lock: did that change what an answer reads, the process would crash.
    "an agent answers while it is told of peers and to forget them": {"answers while peers come and go": 200},
    # Not a name but a text: the torchrpc lane knows a timeout by it; all other RuntimeErrors mean something else.
    "a deadline is told by its text": {"timeout": "RPC ran for more than set timeout"},
    # _distributed_rpc.PyRRef: without it the codec pickles RRefs instead of lifting them out.
    "an rref is known by its type": {"rref": True, "rref value": 3},
    # dist_autograd._init: without it no gradient crosses a member; a second id must not reach torch.
    "distributed autograd takes one id per process": {"autograd id before": None, "autograd id": [11, 11, 11]},
    # dist_autograd._get_max_id, whose upper bits are the id: without it a process that once used init_rpc cannot join a
    # group.
    "the id that distributed autograd took before can be read": {"autograd id as torch has it": 11},
    # _ZN5torch11distributed8autograd21DistAutogradContainer's static members in libtorch_cpu.so, which read, set and
    # clear the context: without them methods, which run on their own threads, are lost to the backward pass.
    "an autograd context can be entered on another thread": {
        "contexts": [NONE, True, NONE, True, NONE, True, [3.0, 3.0], NONE],
    },
}


@pytest.mark.parametrize("change", STEPS)
def test_agents_do_what_members_need_of_them(seen: dict[str, Any], change: str) -> None:
    for step, expected in STEPS[change].items():
        assert expected in seen[step] if isinstance(expected, str) else expected == seen[step], (step, seen[step])


def test_functions_that_need_an_agent_are_where_they_are_made_to_start_it() -> None:
    """rpc._get_current_rpc_agent, _set_rpc_timeout and _rref_context_get_debug_info, beside get_rpc_timeout: without
    them torch says "Current RPC agent is not set" where torchrpc starts when it is needed."""
    assert all(hasattr(torch.distributed.rpc, name) for name in torch_internals.NEEDS_AGENT)


def test_removing_a_peer_ends_no_process_that_repeats_a_message_about_an_rref_to_it(seen: dict[str, Any]) -> None:
    """torch repeats it a second later, on a thread whose exceptions end the process."""
    assert seen["rref to keep"] == 3 and seen["copied"] == "waits for the owner"


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    """Apart from the tests, as some change it for life. One for all: it imports DTensors, which takes seconds."""
    process = Process()
    yield process
    process.kill()


@in_process
def test_an_id_that_somebody_else_gave_distributed_autograd_stays_in_force() -> None:
    """dist_autograd._init refuses a second id with a RuntimeError, and _get_max_id tells the first."""
    dist_autograd._init(11)
    ids = torch_internals
    assert [ids.autograd_id(), ids.init_autograd(77), ids.init_autograd(78), ids.autograd_id()] == [11] * 4


def test_tensors_are_flattened_in_one_call() -> None:
    """torch._C._nn.flatten_dense_tensors: without it every tensor that is packed takes a view."""
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.ones(2), torch.tensor(7.0), torch.empty(0, 2)]
    assert torch_internals.flattened(tensors).tolist() == [0, 3, 1, 4, 2, 5, 1, 1, 7]


def test_many_tensors_are_copied_by_one_call() -> None:
    """torch._foreach_copy_: without it every tensor of a result that is received into buffers takes a kernel."""
    targets = [torch.zeros(2, 3).T, torch.zeros(4, dtype=torch.int64)]
    sources = [torch.arange(6.0).view(3, 2), torch.arange(4)]
    torch_internals.copy_all(targets, sources)
    assert [target.tolist() for target in targets] == [source.tolist() for source in sources]


def test_a_tensor_that_nobody_else_holds_is_told_from_one_that_is_shared() -> None:
    """torch._C._storage_Use_Count of the storage's _cdata: without it every result is copied, or, worse, none
    is and the next method changes what the caller gets."""
    tensor = torch.ones(4)
    assert torch_internals.is_sole_owner(tensor)
    view = tensor[1:]
    assert not torch_internals.is_sole_owner(tensor)
    assert not torch_internals.is_sole_owner(view)
    del view
    assert torch_internals.is_sole_owner(tensor)
    detached = tensor.detach()
    assert not torch_internals.is_sole_owner(detached)
    del tensor
    assert torch_internals.is_sole_owner(detached), "what the codec lifts out"
    storage = detached.untyped_storage()
    assert not torch_internals.is_sole_owner(detached), "the storage itself is in somebody's hands"
    del storage
    assert torch_internals.is_sole_owner(detached)
    from_array = torch.from_numpy(numpy.ones(4))
    assert not torch_internals.is_sole_owner(from_array), "the array could still change it"


def test_a_tensor_over_foreign_memory_can_be_resized_and_freed() -> None:
    """StorageImpl's fields resizable_, allocator_ and data_ptr_: without them tensors that arrive over shared memory
    refuse resize_(), out= and what FSDP does, unlike all others."""
    for change in (lambda tensor: tensor.resize_(20), lambda tensor: tensor.untyped_storage().resize_(0)):
        array = numpy.arange(10.0)
        lent, tensor = weakref.ref(array), torch.frombuffer(array, dtype=torch.float64)
        assert torch_internals.make_resizable(tensor) is tensor
        del array
        assert lent() is not None and not torch_internals.is_sole_owner(tensor), "it is not torch's yet"
        change(tensor)
        assert lent() is None, "who lent it learns that it is free"
        tensor.untyped_storage().resize_(160)
        assert torch_internals.is_sole_owner(tensor)
        assert tensor.numel() == 10 or tensor[:10].tolist() == [*range(10)]


@in_process
def test_a_distributed_tensor_has_its_local_tensor() -> None:
    """A DTensor's _local_tensor and _spec, its offset by torch.distributed.tensor._utils, and AsyncCollectiveTensor of
    torch.distributed._functional_collectives:
    without them such tensors cannot be sent, or are sent before their collective has finished."""
    import torch.distributed._functional_collectives as collectives
    from torch.distributed.tensor import DTensor, Replicate

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh, local = dist.init_device_mesh("cpu", (1,)), torch.ones(3)
    tensor = DTensor(local, DTensor.from_local(local, mesh, [Replicate()])._spec, requires_grad=False)
    assert torch_internals.dtensor_type() is DTensor
    assert torch_internals.local_tensor(tensor) is local
    assert torch_internals.has_default_shard_order(tensor)
    assert torch_internals.offset_of_shard((3,), mesh, (Replicate(),)) == (0,)
    pending = collectives.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    assert type(pending) is torch_internals.async_collective_type()
    assert type(torch_internals.waited(pending)) is torch.Tensor and pending.completed
    dist.destroy_process_group()


@in_process
def test_a_mesh_of_two_dimensions_has_shards_in_the_order_of_its_layout() -> None:
    """Without the order of _StridedShard, weights of FSDP over tensor parallelism would be mixed up."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def begins(rank: int, rows: int, *placements: Any) -> tuple[int, ...]:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            mesh = dist.init_device_mesh("cpu", (2, 2))
            assert torch_internals.has_uneven_strided_shards((rows, 6), mesh, placements) == (
                rows == 7 and isinstance(placements[0], _StridedShard)
            )
            return torch_internals.offset_of_shard((rows, 6), mesh, placements)
        finally:
            dist.destroy_process_group()

    assert [begins(rank, 7, Shard(0), Shard(1)) for rank in range(4)] == [(0, 0), (0, 3), (4, 0), (4, 3)]
    # Tensor parallelism divides the rows first, and FSDP divides each part.
    for rows in (8, 7) if obstacle("uneven strided shards") is None else (8,):
        fsdp = [begins(rank, rows, _StridedShard(0, split_factor=2), Shard(0)) for rank in range(4)]
        assert fsdp == [(0, 0), (4, 0), (2, 0), (6, 0)]


def test_backends_can_be_asked_for_by_name() -> None:
    """The options _transports and _channels again: they tell what this torch build has."""
    assert torch_internals.has_tensorpipe("transports", "uv")
    assert torch_internals.has_tensorpipe("channels", "basic")
    assert not torch_internals.has_tensorpipe("transports", "carrier_pigeon")
    assert not torch_internals.has_tensorpipe("channels", "carrier_pigeon")


@pytest.mark.parametrize(("state", "dead"), [("ALIVE", False), ("RESTARTING", False), ("DEAD", True), (None, True)])
def test_an_actor_that_ray_gave_up_is_known(monkeypatch: pytest.MonkeyPatch, state: str | None, dead: bool) -> None:
    """ray._private.state.actors, its State and the name DEAD, over what the GCS would send: without it
    the members of a group whose owner, an actor, died can never join another."""
    from ray._private import state as ray_state
    from ray.core.generated.gcs_pb2 import ActorTableData

    class Gcs:
        def get_actor_info(self, actor_id: Any) -> bytes | None:
            assert actor_id.hex() == "ab" * 16
            return None if state is None else ActorTableData(state=state).SerializeToString()

    monkeypatch.setattr(ray_state.state, "_connect_and_get_accessor", Gcs, raising=False)
    monkeypatch.setattr(ray_state.state, "global_state_accessor", Gcs(), raising=False)  # before Ray 2.52
    assert (ray_internals.actor_state("ab" * 16).state == "DEAD") is dead


def test_rays_pickler_takes_functions_by_value_and_lets_tensors_be_lifted() -> None:
    """ray.cloudpickle.CloudPickler with a reducer_override to build on: without it lambdas and classes of the
    driver's __main__ cannot be sent."""
    offset = 2
    codec = Codec(ray_internals.cloudpickler())
    encoded = codec.encode((lambda x: x + offset, torch.ones(3)))
    assert len(encoded.tensors) == 1
    function, tensor = codec.decode(*encoded)
    assert function(1) == 3 and tensor.sum() == 3


def test_rays_references_are_refused_by_every_pickler_of_messages() -> None:
    """ray.ObjectRef and ray.ObjectRefGenerator: Ray's own reducer would have the sender keep the object for ever."""
    ref, codec = ray.ObjectRef.nil(), Codec(ray_internals.cloudpickler())
    torchs = RpcPickler(io.BytesIO())
    torchs.dispatch_table = copyreg.dispatch_table.copy()
    for encode in (codec.encode, torchs.dump):
        with pytest.raises(
            SerializationError, match=r"an ObjectRef only in its own calls, .* ray\.get\(ref\).*\.remote"
        ):
            encode([{"deep": ref}])
    assert ray.ObjectRefGenerator in ray_internals.refusals()


@pytest.mark.gpu
def test_the_current_stream_has_the_name_that_cuda_knows() -> None:
    """By ``torch._C._cuda_getCurrentRawStream``."""
    other = torch.cuda.Stream()
    assert torch_internals.current_cuda_stream(0) == torch.cuda.current_stream(0).cuda_stream
    with torch.cuda.stream(other):
        assert torch_internals.current_cuda_stream(0) == other.cuda_stream


@in_process
def test_process_groups_can_be_ended_though_somebody_is_gone() -> None:
    """distributed_c10d._abort_process_group: without it the end of a process group waits for members that are lost."""
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.new_group()
        torch_internals.abort_process_groups()
        assert not dist.is_initialized()


def test_process_groups_can_be_numbered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """distributed_c10d._world: what counts the process groups of this process."""
    monkeypatch.setattr(distributed_c10d._world, "group_count", 3)
    torch_internals.number_process_groups_anew()
    assert distributed_c10d._world.group_count == 0


def test_the_modes_of_a_thread_can_be_read_and_set() -> None:
    """torch._C._InferenceMode, _len_torch_function_stack, _pop_torch_function_stack and _is_any_autocast_enabled,
    torch.cuda._initialized and _maybe_exchange_device: without them direct calls lack what ``__init__`` has set, or
    have what an earlier call has left.
    """

    def use() -> list[bool]:
        modes = torch_internals.ThreadModes(False, True, torch.device("meta"), (("cpu", True, torch.float16),), None)
        guard = modes.enter()
        seen = [torch_internals.ThreadModes.now() is not None, torch.is_inference_mode_enabled()]
        del guard
        torch.device("meta").__enter__()
        torch_internals.ThreadModes.leave()
        return [*seen, torch_internals.in_default_modes(), torch_internals.ThreadModes.now() is None]

    assert in_thread(use)() == [True] * 4
    assert callable(torch.cuda._maybe_exchange_device)


def test_operations_on_tensors_can_be_recorded() -> None:
    """torch.utils._python_dispatch.TorchDispatchMode: without it nothing says where a model's loaders put a tensor."""
    seen = []

    class Recorder(torch_internals.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensor = torch.zeros(2)
    with Recorder():
        tensor.copy_(torch.ones(2, device="cpu"))
    assert torch.ops.aten.copy_.default in seen and tensor.sum() == 2
