"""DTensors in Ray's ObjectRefs: Ray takes out the local tensor alone, as in direct calls.

Ray would pickle a DTensor by torch's own means: with the sender's device mesh, which is a wrong one elsewhere.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

from raytorchrpc._compat import ray_internals, torch_internals
from raytorchrpc.errors import SerializationError
from raytorchrpc.tensors.codec import with_attributes
from raytorchrpc.tensors.distributed_tensors import reduced

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
