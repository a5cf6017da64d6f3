"""Private names of torch that this package uses.

No other module may use a name of torch that starts with an underscore. When a release of torch moves one, exactly one
function here breaks, and its test in ``tests/unit/test_compat.py`` says what it was for.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch._C._distributed_c10d import HashStore, Store
from torch._C._distributed_rpc import (
    PyRRef,
    TensorPipeAgent,
    WorkerInfo,
    _is_current_rpc_agent_set,
    _set_profiler_node_id,
)
from torch.distributed import distributed_c10d
from torch.distributed.rpc import api as rpc_api
from torch.distributed.rpc import internal as rpc_internal
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DeviceDict = Mapping[int, int]
#: The C++ base class of ``rpc.RRef``.
RREF_TYPE: type[Any] = PyRRef
#: The base class of what sees each operation on tensors, in ``__torch_dispatch__``.
DispatchMode: Any = TorchDispatchMode


def current_cuda_stream(device: int) -> int:
    """The handle of this thread's current stream on that device; ten times faster than through a Stream object."""
    return torch._C._cuda_getCurrentRawStream(device)


def in_default_modes() -> bool:
    """Whether this thread is in torch's own default modes; see ThreadModes. Hot path."""
    return (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not torch._C._len_torch_function_stack()
        and not torch._C._is_any_autocast_enabled()
        and not (torch.cuda._initialized and torch.cuda.current_device())
    )


_left = threading.local()
"""``guard``: turns off an inference mode that user code has left on this thread."""
_AUTOCAST = {"cpu": torch.bfloat16, "cuda": torch.float16}


class ThreadModes(NamedTuple):
    """Modes of torch that belong to a thread, where they are not torch's own defaults."""

    grad: bool
    inference: bool
    device: torch.device | None
    """The default device."""
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    """By device type: whether it is enabled, and its dtype."""
    gpu: int | None
    """The current GPU, if this process uses any."""

    @classmethod
    def now(cls) -> ThreadModes | None:
        """Those of this thread; None for torch's own defaults."""
        autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST)
        if in_default_modes() and all(dtype is _AUTOCAST[kind] for kind, _, dtype in autocast):
            return None
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_device() if torch._C._len_torch_function_stack() else None,
            autocast,
            torch.cuda.current_device() if torch.cuda._initialized else None,
        )

    def enter(self) -> Any:
        """Put this thread, which is in torch's defaults, into these modes. Drop what it returns before ``leave``."""
        guard = torch._C._InferenceMode(True) if self.inference else None
        torch.set_grad_enabled(self.grad)
        if self.device is not None:
            torch.set_default_device(self.device)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        if self.gpu:
            torch.cuda.set_device(self.gpu)
        return guard

    @staticmethod
    def leave() -> None:
        """Put this thread into torch's own defaults, whatever modes user code has left."""
        if torch.is_inference_mode_enabled():
            _left.guard = None  # its end restores what it turned off
            _left.guard = torch._C._InferenceMode(False)
        torch.set_grad_enabled(True)
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        torch.set_default_device(None)
        for kind, dtype in _AUTOCAST.items():
            torch.set_autocast_enabled(kind, False)
            torch.set_autocast_dtype(kind, dtype)
        torch.clear_autocast_cache()
        if torch.cuda._initialized and torch.cuda.current_device():
            torch.cuda._maybe_exchange_device(0)  # set_device would make a context on a GPU that nothing may use


def has_tensorpipe(kind: Literal["transports", "channels"], name: str) -> bool:
    """Whether this torch build has that TensorPipe transport or channel. Starts nothing.

    Builds an options object, in which torch looks the names up.
    """
    options: dict[str, Any] = {"_transports": [name]} if kind == "transports" else {"_channels": [name]}
    try:
        rpc.TensorPipeRpcBackendOptions(**options)
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
    """Start this process's torchrpc agent with a store of its own.

    ``init_rpc`` would exchange addresses through a shared store; here the driver does. Returns the agent, its store,
    which ``add_peer`` writes to, and the URL it listens on.
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
    agent = TensorPipeAgent(store, name, worker_id, None, options, {}, _gpus(devices))
    rpc_api._init_rpc_states(agent)  # type: ignore[no-untyped-call]
    _set_profiler_node_id(worker_id)
    url: bytes = store.get("addrs/" + name)
    return agent, store, url.decode()


def _gpus(devices: Iterable[int]) -> list[torch.device]:
    return [torch.device("cuda", index) for index in devices]


def _devices(mapping: DeviceDict) -> dict[Any, Any]:
    return dict(zip(_gpus(mapping.keys()), _gpus(mapping.values()), strict=True))


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
    """Let the agent call ``name``; ``inverse_map`` (local GPU -> the peer's) is for results."""
    store.set("addrs/" + name, url)
    maps = {name: _devices(inverse_map)} if inverse_map else {}
    agent._update_group_membership(WorkerInfo(name, worker_id), _gpus(devices), maps, True)
    rpc_api._ALL_WORKER_NAMES.add(name)  # torch's collectives among workers go by it


def remove_peer(name: str) -> None:
    """Have torch's own API refuse calls to a peer. The agent itself keeps it.

    torch repeats a message about RRefs that a dead peer did not take, for 14 s, and looks the peer up again each time:
    one that the agent had forgotten would end the process.
    """
    rpc_api._ALL_WORKER_NAMES.discard(name)


def forget_name(
    agent: TensorPipeAgent, name: str, *, devices: Sequence[int], inverse_maps: Mapping[str, DeviceDict]
) -> None:
    """Let another process have the name of a removed peer. The agent keeps what it has under the peer's id, its pipe
    included, so no other process may have the id later.

    ``devices``, ``inverse_maps`` (none of them empty): those of the present peers; the agent drops the rest. It takes
    no lock for that and copies the maps with every answer, so dropping a map meanwhile crashes the process: peers
    without GPUs have no map.
    """
    maps = {peer: _devices(inverse_map) for peer, inverse_map in inverse_maps.items()}
    agent._update_group_membership(WorkerInfo(name, _NO_ID), _gpus(devices), maps, False)


#: A worker id that no process has.
_NO_ID = -1
_find_worker: Callable[[int], str | None] = lambda number: None  # noqa: E731
logger = logging.getLogger(__name__)

_init_rpc, _shutdown, _to_worker_info = rpc.init_rpc, rpc.shutdown, rpc_api._to_worker_info
_init_rref = PyRRef.__init__
#: Functions of torch's API that raise without an agent, but those that ask ``_is_current_rpc_agent_set`` before.
NEEDS_AGENT = ("get_rpc_timeout", "_set_rpc_timeout", "_get_current_rpc_agent", "_rref_context_get_debug_info")


def adapt_rpc(pickler: type[Any], refusal: str, start: Callable[[], None]) -> None:
    """Have torch's own API pickle with ``pickler``, take ranks for workers, and raise ``refusal`` from ``init_rpc``.

    It calls ``start`` before it uses an agent, if none runs; and where it makes an RRef.

    For the rest of the process, because its agent stays as long. A leftover ``rpc.shutdown`` has no effect.
    """

    @functools.wraps(_init_rpc)
    def init_rpc(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(refusal)

    @functools.wraps(_shutdown)
    def shutdown(*args: Any, **kwargs: Any) -> None:
        logger.warning(
            "torch.distributed.rpc.shutdown() has no effect in a member: the end of the group does what is needed"
        )

    def to_worker_info(to: Any) -> WorkerInfo:
        if isinstance(to, int):
            name = _find_worker(to)
            to = to if name is None else name
        info: WorkerInfo = _to_worker_info(to)  # type: ignore[no-untyped-call]
        if info.name not in rpc_api._ALL_WORKER_NAMES:
            raise RuntimeError(f"could not find destination {info.name}: it has left the group")
        return info

    def is_set() -> bool:
        start()
        return agent_is_set()

    @functools.wraps(_init_rref)
    def init_rref(self: Any, *args: Any, **kwargs: Any) -> None:
        is_set()
        _init_rref(self, *args, **kwargs)

    def with_agent(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            is_set()
            return function(*args, **kwargs)

        return call

    for module in (rpc, rpc_api):
        for name in NEEDS_AGENT:
            if not hasattr(getattr(module, name, None), "__wrapped__") and hasattr(module, name):
                setattr(module, name, with_agent(getattr(module, name)))
    rpc_api._is_current_rpc_agent_set = rpc._is_current_rpc_agent_set = is_set  # type: ignore[attr-defined]
    PyRRef.__init__ = init_rref  # type: ignore[method-assign]
    rpc_internal._pickler = pickler
    rpc_api._to_worker_info = to_worker_info
    rpc.init_rpc, rpc.shutdown = init_rpc, shutdown


def find_workers_by(find: Callable[[int], str | None]) -> None:
    """Have torch's own API look up an integer with ``find``: the name of a worker, or None for a worker id."""
    global _find_worker
    _find_worker = find


def wait_for_rrefs_inside(around: Callable[[], AbstractContextManager[None]]) -> None:
    """Have ``RRef.to_here`` wait inside ``around()``. Idempotent."""
    rref: Any = torch._C._distributed_rpc.PyRRef
    if hasattr(rref.to_here, "__wrapped__"):
        return
    fetch = rref.to_here

    @functools.wraps(fetch)
    def to_here(self: Any, *args: Any, **kwargs: Any) -> Any:
        with around():
            return fetch(self, *args, **kwargs)

    rref.to_here = to_here


def stop_agent() -> None:
    """Stop the agent without waiting: a graceful shutdown waits for all peers, dead ones included."""
    _shutdown(graceful=False)


def agent_is_set() -> bool:
    """Whether this process runs a torchrpc agent, this package's or the user's."""
    return _is_current_rpc_agent_set()


def invoke_async(
    worker: WorkerInfo, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
) -> torch.futures.Future[Any]:
    """``rpc.rpc_async`` with a WorkerInfo, which saves the lookup of a name."""
    return rpc.rpc_async(worker, function, args=args, timeout=timeout_s)  # type: ignore[no-any-return]


def is_sole_owner(tensor: torch.Tensor) -> bool:
    """Whether only this tensor holds its memory, which torch allocated: no other tensor in Python or C++, no array."""
    return _is_of_torch(tensor.untyped_storage()) and _holders(tensor) == _holders_of_a_new_one()


def make_resizable(tensor: torch.Tensor) -> torch.Tensor:
    """Let the storage of a CPU tensor over foreign memory be resized or freed, like one that torch allocated.

    torch then allocates the new memory, copies what fits and drops the old, so whoever lent it learns that it is free.
    Returns the tensor.
    """
    if _STORAGE is not None:
        address = tensor.untyped_storage()._cdata
        ctypes.c_uint64.from_address(address + _STORAGE.allocator).value = _STORAGE.allocator_of_torch
        ctypes.c_bool.from_address(address + _STORAGE.is_resizable).value = True
    return tensor


def _is_of_torch(storage: torch.UntypedStorage) -> bool:
    if not storage.resizable():
        return False
    if _STORAGE is None or storage.device.type != "cpu":
        return True
    return ctypes.c_uint64.from_address(storage._cdata + _STORAGE.deleter).value == _STORAGE.deleter_of_torch


class _StorageFields(NamedTuple):
    """Where torch's C++ storage keeps what Python cannot set: offsets in bytes, and what an ordinary one has there."""

    is_resizable: int
    allocator: int
    deleter: int
    allocator_of_torch: int
    deleter_of_torch: int


#: How much of a storage is compared; its class is larger in every supported release (bytes).
_COMPARED = 88
#: A size that stands nowhere else in a storage, and what all pointers exceed.
_ODD_BYTES, _POINTER = 4093, 1 << 20


def _storage_fields() -> _StorageFields | None:
    """Find the fields by comparing storages. None if this release of torch has another layout."""
    owned = [torch.empty(_ODD_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2)]
    foreign = [torch.frombuffer(bytearray(_ODD_BYTES), dtype=torch.uint8) for _ in range(2)]
    contents = [_contents_of(tensor) for tensor in (*owned, *foreign)]
    words = list(zip(*(struct.unpack(f"<{_COMPARED // 8}Q", each) for each in contents), strict=True))
    # The allocator and the deleter are those of torch, or others; foreign memory has no allocator.
    alike = {place: (a, c) for place, (a, b, c, d) in enumerate(words) if a == b != c == d}
    allocators = [place for place, (own, other) in alike.items() if own > _POINTER and not other]
    deleters = [place for place, (own, other) in alike.items() if own > _POINTER and other > _POINTER]
    sizes = [place for place, each in enumerate(words) if set(each) == {_ODD_BYTES}]
    if not (len(allocators) == len(sizes) == 1 and deleters and deleters[0] < sizes[0] < allocators[0]):
        return None
    (allocator,), deleter, begin = allocators, deleters[0], 8 * (sizes[0] + 1)
    flags = [place for place in range(begin, 8 * allocator) if [each[place] for each in contents] == [1, 1, 0, 0]]
    if len(flags) != 1:
        return None
    return _StorageFields(flags[0], 8 * allocator, 8 * deleter, words[allocator][0], words[deleter][0])


def _contents_of(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.untyped_storage()._cdata, _COMPARED)


#: Found on import, when no mode of the user's changes what torch allocates.
_STORAGE = _storage_fields()


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    """References to the Python object of a tensor's storage, and uses of the storage, this function's included."""
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)


@functools.cache
def _holders_of_a_new_one() -> tuple[int, int]:
    return _holders(torch.empty(1, device="cpu"))


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """``copy_`` for each pair, on a GPU in one kernel for many."""
    torch._foreach_copy_(targets, sources)


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors of one dtype, each in the order of its elements."""
    flat: torch.Tensor = torch._C._nn.flatten_dense_tensors(list(tensors))
    return flat


def dtensor_type() -> type[Any] | None:
    """``DTensor``, if this process has imported it: that takes a second, and there are none before."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def local_tensor(tensor: Any) -> torch.Tensor:
    """The tensor object in a DTensor itself; ``to_local`` may return a view of it."""
    local: torch.Tensor = tensor._local_tensor
    return local


def offset_of_shard(shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]) -> tuple[int, ...]:
    """Where the local tensor of a DTensor begins in the global tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(map(int, compute_local_shape_and_global_offset(shape, mesh, placements)[1]))


def has_uneven_strided_shards(shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]) -> bool:
    """Whether FSDP and tensor parallelism together divide a dimension into shards of different sizes."""
    from torch.distributed.tensor.placement_types import _StridedShard

    strided = {each.dim for each in placements if isinstance(each, _StridedShard)}
    parts = {
        dim: math.prod(mesh.size(i) for i, each in enumerate(placements) if getattr(each, "dim", None) == dim)
        for dim in strided
    }
    return any(shape[dim] % count for dim, count in parts.items())


def has_default_shard_order(tensor: DTensor) -> bool:
    """Whether each dimension is sharded over its mesh dimensions in their order, as ``from_local`` assumes."""
    orders = getattr(tensor._spec, "shard_order", None) or ()
    return all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in orders)


def async_collective_type() -> type[Any] | None:
    """The type of the tensors that functional collectives return, if this process has imported them."""
    return getattr(sys.modules.get("torch.distributed._functional_collectives"), "AsyncCollectiveTensor", None)


def waited(tensor: Any) -> torch.Tensor:
    """The plain tensor of such a type, once its collective has finished."""
    finished: torch.Tensor = tensor.trigger_wait()
    return finished.detach() if finished.requires_grad else finished


def abort_process_groups() -> None:
    """End torch.distributed's default process group and all its subgroups, without waiting for other members.

    ``destroy_process_group`` would wait for collectives that a lost member keeps from ending.
    """
    distributed_c10d._abort_process_group()


def number_process_groups_anew() -> None:
    """The keys of a process group begin with its number in this process, which an attempt that failed here used up."""
    distributed_c10d._world.group_count = 0


_autograd_id: int | None = None


def init_autograd(worker_id: int) -> int:
    """Set distributed autograd's id, which a process can set once. Returns the one in effect."""
    global _autograd_id
    if _autograd_id is None:
        try:
            dist_autograd._init(worker_id)  # type: ignore[attr-defined]
            _autograd_id = worker_id
        except RuntimeError:  # init_rpc has set it; the upper bits of its context ids hold it
            _autograd_id = dist_autograd._get_max_id() >> 48  # type: ignore[attr-defined]
    return _autograd_id


def autograd_id() -> int | None:
    """Distributed autograd's id in this process, or None before the first group or ``init_rpc``."""
    if _autograd_id is not None:
        return _autograd_id
    try:
        return dist_autograd._get_max_id() >> 48  # type: ignore[attr-defined]
    except RuntimeError:
        return None


@functools.cache
def _autograd_symbols() -> tuple[Callable[[], int], Callable[[int], None], Callable[[], None]]:
    """Functions that read, set and clear the thread's current context: static members of DistAutogradContainer.

    Python can open a context but cannot enter an existing one, and methods run on a member's own threads, not on the
    torchrpc thread that received the call.
    """
    library = ctypes.PyDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))

    def symbol(name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(library, "_ZN5torch11distributed8autograd21DistAutogradContainer" + name)
        function.restype, function.argtypes = result, arguments
        return function

    current = symbol("16currentContextIdEv", ctypes.c_int64)
    return current, symbol("19setCurrentContextIdEl", None, ctypes.c_int64), symbol("19clearCurrentContextEv", None)


NO_CONTEXT = -1


def current_autograd_context() -> int:
    """The distributed autograd context this thread is in, or ``NO_CONTEXT``. About 0.3 us; 4 after a pause."""
    return _autograd_symbols()[0]()


def autograd_context_reader() -> Callable[[], int]:
    """Return a function that does the same in less time."""
    return _autograd_symbols()[0]


@contextmanager
def autograd_context(context_id: int) -> Iterator[None]:
    """Run in an existing distributed autograd context, then restore this thread's own."""
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
