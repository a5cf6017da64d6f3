"""The tensor transport as Ray calls it, and how Ray pickles DTensors for it; ``transfer`` does the work."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    FetchRequest,
    TensorTransportManager,
    TensorTransportMetadata,
)

from raytorchrpc._compat import ray_internals, torch_internals
from raytorchrpc.calls.payload import Runs, runs_of
from raytorchrpc.errors import ConfigurationError, SerializationError
from raytorchrpc.rdt import transfer
from raytorchrpc.rdt.transfer import TRANSPORT, Pull, Source
from raytorchrpc.tensors.codec import with_attributes
from raytorchrpc.tensors.distributed_tensors import reduced
from raytorchrpc.tensors.dtypes import DTYPES

logger = logging.getLogger(__name__)

_DEVICES = ("cpu", "cuda")


def register() -> None:
    ray_internals.register_transport(TRANSPORT, _DEVICES, TorchRpcTransport, torch.Tensor)
    reduce_for_transports()


@dataclass
class ObjectMeta(TensorTransportMetadata):
    """The metadata that travels with an ObjectRef: dtypes, shapes and source of its tensors."""

    source: Source | None = None
    on_gpu: bool = False
    runs: Runs = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # A thousand equal tensors take no more room than one.
        return _meta, (self.runs, self.tensor_device, self.source, self.on_gpu)


def _meta(runs: Runs, device: str | None, source: Source | None, on_gpu: bool) -> ObjectMeta:
    register()  # the receiver of the ObjectRef may get the object
    kinds: list[Any] = []
    for name, shape, count in runs:
        kinds += [(torch.Size(shape), DTYPES[name])] * count
    return ObjectMeta(kinds, device, source, on_gpu, runs)


class _Fetch(FetchRequest):
    """A pull, as Ray holds it."""

    def __init__(self, object_id: str, pull: Pull | None) -> None:
        super().__init__(obj_id=object_id, tensors=[])
        self.pull = pull


class TorchRpcTransport(TensorTransportManager):
    """One per process, made by Ray."""

    def tensor_transport_backend(self) -> str:
        return TRANSPORT

    @staticmethod
    def is_one_sided() -> bool:
        reduce_for_transports()  # Ray asks this before it pickles what ray.put was given
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[torch.Tensor]) -> ObjectMeta:
        """In the source, on the thread that ran the method: keep the tensors."""
        check(rdt_object)
        if not rdt_object:
            return ObjectMeta([])
        ray_internals.pickle_function_once(torch.Tensor)
        if strange := {tensor.device.type for tensor in rdt_object} - set(_DEVICES):
            raise ConfigurationError(
                f"{TRANSPORT} carries tensors on {' and '.join(_DEVICES)}, not on {', '.join(sorted(strange))}: "
                f"move them before you return or put them"
            )
        context = ray.get_runtime_context()
        actor = context.get_actor_id()
        shown = f"the driver (pid {os.getpid()})" if actor is None else f"actor {actor}"
        source = transfer.here(context.get_node_id(), str(ray.util.get_node_ip_address()), shown)  # type: ignore[no-untyped-call]
        transfer.keep(obj_id, rdt_object)
        on_gpu = any(tensor.is_cuda for tensor in rdt_object)
        return _meta(runs_of(rdt_object), rdt_object[0].device.type, source, on_gpu)

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: Any = None) -> CommunicatorMetadata:
        """In the caller. Must not raise: Ray may call this on a thread that does not handle exceptions."""
        if dst_actor is not None and not ray_internals.may_receive(dst_actor):
            logger.warning(
                "%r was created without @ray.remote(enable_tensor_transport=True): its task may wait up to %g s for "
                "tensors that Ray lets it receive only after that task",
                dst_actor,
                ray_internals.transfer_timeout_s(),
            )
        return CommunicatorMetadata()

    def fetch_multiple_tensors(
        self, obj_id: str, tensor_transport_metadata: Any, communicator_metadata: Any, target_buffers: Any = None
    ) -> FetchRequest:
        """In the receiver: start the pull."""
        return _Fetch(obj_id, _pull(obj_id, tensor_transport_metadata, target_buffers))

    def wait_fetch_complete(self, fetch_request: Any, timeout: float = -1) -> list[torch.Tensor]:
        pull = fetch_request.pull
        return [] if pull is None else pull.wait(None if timeout < 0 else timeout)

    def recv_multiple_tensors(
        self, obj_id: str, tensor_transport_metadata: Any, communicator_metadata: Any, target_buffers: Any = None
    ) -> list[torch.Tensor]:
        pull = _pull(obj_id, tensor_transport_metadata, target_buffers, caller_waits=True)
        return [] if pull is None else pull.wait(None)

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        raise NotImplementedError("this transport is one-sided: the receiver pulls")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: Any) -> None:
        """In the source: the last ObjectRef is gone."""
        transfer.drop(obj_id)

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """In the receiver."""
        transfer.abort(obj_id)


def _pull(object_id: str, meta: ObjectMeta, targets: Any, *, caller_waits: bool = False) -> Pull | None:
    """None for an object without tensors."""
    if meta.source is None:
        return None
    return Pull(object_id, meta.source, meta.on_gpu, targets, caller_waits=caller_waits)


# --- DTensors --------------------------------------------------------------------------------------------------------
#
# Ray would pickle a DTensor by torch's own means: with the sender's device mesh, which is a wrong one elsewhere. So it
# takes out the local tensor alone, as direct calls do.

_covered: set[type[Any]] = set()


def reduce_for_transports() -> bool:
    """Have Ray's pickler reduce DTensors, and what asynchronous collectives return, as the codec does.

    Only types that the program has imported by now. Returns whether DTensors are among them for the first time.
    """
    dtensor = torch_internals.dtensor_type()
    new = {dtensor, torch_internals.async_collective_type()} - _covered - {None}
    for kind in new:
        assert kind is not None
        ray_internals.reduce_for_transports(kind, _reduce)
        _covered.add(kind)
    return dtensor in new


def _reduce(tensor: Any) -> Any:
    parts = reduced(tensor)
    assert parts is not None  # of one of the two types
    return with_attributes(*parts)


def check(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors that Ray took out of a DTensor before ``reduce_for_transports``. Raises SerializationError."""
    if not reduce_for_transports():
        return
    taken = set(map(id, tensors))  # once per process: a look at all objects takes tens of milliseconds
    kind = torch_internals.dtensor_type()
    for value in gc.get_objects():
        if type(value) is kind and id(torch_internals.local_tensor(value)) in taken:
            raise SerializationError(
                "this object has a DTensor, and Ray pickled it before raytorchrpc learned that this process uses "
                "them: call raytorchrpc.rdt.enable() after you import torch.distributed.tensor, or return the tensors "
                "by @raytorchrpc.method(objectref=True)"
            )
