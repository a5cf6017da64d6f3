"""Shards: boxes of global tensors, as members hold them."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from raytorchrpc._compat import torch_internals
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.patterns.weights.module_state import ModuleState


class Box(NamedTuple):
    """Indices of a global tensor: ``shape`` elements from ``offset`` on, in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def intersection(self, other: Box) -> Box | None:
        """The indices in both; None if there are none."""
        begin = tuple(map(max, self.offset, other.offset))
        ends = map(min, self.end, other.end)
        shape = tuple(end - first for first, end in zip(begin, ends, strict=True))
        return Box(begin, shape) if all(extent > 0 for extent in shape) else None

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(begin + extent for begin, extent in zip(self.offset, self.shape, strict=True))

    def without(self, part: Box) -> list[Box]:
        """Boxes that have the other indices. ``part`` lies in this box."""
        left: list[Box] = []
        begin, end = list(self.offset), list(self.end)
        for dimension, (first, last) in enumerate(zip(part.offset, part.end, strict=True)):
            for low, high in ((begin[dimension], first), (last, end[dimension])):
                if low < high:
                    offset, shape = list(begin), [end[d] - begin[d] for d in range(len(begin))]
                    offset[dimension], shape[dimension] = low, high - low
                    left.append(Box(tuple(offset), tuple(shape)))
            begin[dimension], end[dimension] = first, last
        return left

    def __str__(self) -> str:
        ranges = zip(self.offset, self.end, strict=True)
        return "[" + ", ".join(f"{first}:{last}" for first, last in ranges) + "]"


class Shard(NamedTuple):
    """A box of a global tensor, for ``WeightStore.publish`` and ``pull``.

    For layouts that no DTensor describes: experts, stacked layers, views into a fused parameter.

    Attributes:
        tensor: the elements; dense, with any strides. A pull writes to its memory.
        global_shape: the shape of the global tensor, which has as many dimensions as ``tensor``.
        offset: the index of the first element in the global tensor.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Which indices of the global tensor it has."""
        return Box(self.offset, tuple(self.tensor.shape))

    @property
    def is_whole(self) -> bool:
        """Whether it has all of the global tensor."""
        return tuple(self.tensor.shape) == self.global_shape


#: A module, or its tensors by name: tensors, DTensors or Shards.
Model = torch.nn.Module | Mapping[str, Any]


def has_shards(model: Any) -> bool:
    """Whether some tensor of a model may be a Shard or a DTensor. Quick where no DTensor exists."""
    values: Iterable[Any] = model.values() if isinstance(model, Mapping) else ()
    if any(type(value) is Shard for value in values):
        return True
    if torch_internals.dtensor_type() is None:
        return False
    if isinstance(model, torch.nn.Module):
        values = (*model.parameters(), *model.buffers())
    return any(map(_is_dtensor, values))


def shards_of(model: Any, store: str) -> dict[str, Shard]:
    """A model's tensors by name, without autograd. Raises ConfigurationError.

    Leaves out DTensors that are numbers, without dimensions, if this process is not in their device mesh.
    """
    if isinstance(model, torch.nn.Module):
        model = ModuleState.of(model).saved
    if not isinstance(model, Mapping):
        raise ConfigurationError(f"weights must be a module or tensors by name, not a {type(model).__name__}")
    shards = ((str(name), _shard_of(str(name), value, store)) for name, value in model.items())
    return {name: shard for name, shard in shards if shard is not None}


_PLAIN = torch.Tensor, torch.nn.Parameter


def _shard_of(name: str, value: Any, store: str) -> Shard | None:
    if type(value) in _PLAIN or (isinstance(value, torch.Tensor) and not _is_dtensor(value)):
        dense = _dense(name, value, store)
        shape = tuple(dense.shape)
        return Shard(dense, shape, (0,) * len(shape))
    if isinstance(value, Shard):
        return _checked(name, value, store)
    if _is_dtensor(value):
        local, offset = _dense(name, local_tensor(value), store), _offset_of(name, value, store)
        if len(offset) < value.dim():  # it has nothing of the tensor
            offset = (0,) * value.dim()
        if local.dim() != value.dim():
            return None  # a shard without elements has a dimension
        return Shard(local, tuple(value.shape), offset)
    raise ConfigurationError(
        f"{name!r} of the weights for {store!r} is a {type(value).__name__}, not a tensor: leave it out, or give a "
        f"tensor, DTensor or Shard"
    )


def _dense(name: str, tensor: torch.Tensor, store: str) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        remedy = ": to_empty() gives a module memory" if tensor.is_meta else ""
        raise ConfigurationError(f"{name!r} of the weights for {store!r} is not a dense tensor with memory{remedy}")
    return tensor.detach()


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory holds its elements: a copy of a conjugated or negated view."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _checked(name: str, shard: Shard, store: str) -> Shard:
    given: Any = shard.tensor
    if not isinstance(given, torch.Tensor) or _is_dtensor(given):
        raise ConfigurationError(
            f"{name!r} of the weights for {store!r} is a Shard of a {type(given).__name__}, not of a tensor"
        )
    dense = _dense(name, given, store)
    shape = tuple(dense.shape)
    try:
        whole, offset = tuple(map(operator.index, shard.global_shape)), tuple(map(operator.index, shard.offset))
    except TypeError:
        raise ConfigurationError(
            f"{name!r} of the weights for {store!r} is a Shard with global_shape={shard.global_shape!r} and "
            f"offset={shard.offset!r}: each has to be a tuple with a whole number for each dimension"
        ) from None
    if not _lies_in(shape, offset, whole):
        raise ConfigurationError(
            f"{name!r} of the weights for {store!r} is a Shard of shape {shape} at {offset}, "
            f"which does not lie in a global tensor of shape {whole}"
        )
    return Shard(dense, whole, offset)


@functools.lru_cache(4096)  # the layers of a model are alike
def _lies_in(shape: tuple[int, ...], offset: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return len(shape) == len(whole) == len(offset) and all(
        0 <= begin <= begin + extent <= most for begin, extent, most in zip(offset, shape, whole, strict=True)
    )


def _is_dtensor(value: Any) -> bool:
    kind = torch_internals.dtensor_type()
    return kind is not None and isinstance(value, kind)


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """The memory that a tensor or a DTensor has in this process.

    It has no elements, and the DTensor's dimensions, if this process is not in the device mesh.
    """
    if type(value) in _PLAIN or not _is_dtensor(value):
        return value
    local = torch_internals.local_tensor(value)
    return local if local.dim() == value.dim() else local.reshape(0, *value.shape[1:])


def _offset_of(name: str, dtensor: Any, store: str) -> tuple[int, ...]:
    if any(placement.is_partial() for placement in dtensor.placements):
        raise ConfigurationError(
            f"{name!r} of the weights for {store!r} has partial sums ({dtensor.placements}): "
            f"redistribute() it to Shard or Replicate first"
        )
    return _offset(tuple(dtensor.shape), dtensor.device_mesh, tuple(dtensor.placements))


_offset = functools.lru_cache(4096)(torch_internals.offset_of_shard)
