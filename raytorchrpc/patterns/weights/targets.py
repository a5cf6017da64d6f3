"""The tensors of a model that pulls fill, one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from raytorchrpc.patterns.weights.shards import Shard, local_tensor


def values_of(model: Any) -> Any:
    """A model's values by name: the parameters of a module themselves, which stay the same between pulls."""
    return model.state_dict(keep_vars=True) if isinstance(model, torch.nn.Module) else model


#: A model whose buffers are exchanged has two.
_MEMORIES = 2
_Tensor = torch.Tensor
_OF_MEMORY = _Tensor.data_ptr, _Tensor.stride, _Tensor.get_device, _Tensor.is_neg, _Tensor.is_conj


class KnownMemory:
    """What was worked out for tensors, as long as they stay where they are. Keeps none of their memory."""

    def __init__(self) -> None:
        self._last: tuple[tuple[Any, dict[Hashable, Any]], ...] = ()

    def of(self, tensors: Sequence[torch.Tensor], use: Hashable = None) -> dict[Hashable, Any]:
        """What is known, to be added to. ``tensors``: of the dtypes and shapes of before, for the same ``use``."""
        memory = use, *[list(map(ask, tensors)) for ask in _OF_MEMORY]
        known = next((known for its, known in self._last if its == memory), None)
        if known is None:
            known = {}
            self._last = ((memory, known), *self._last[: _MEMORIES - 1])
        return known


class Targets(NamedTuple):
    """Where a pull writes."""

    tensors: dict[str, torch.Tensor]
    """By name: a model's tensors, or their local shards."""
    known: dict[Hashable, Any]
    """What pulls into these addresses have worked out; no memory."""


class KnownTargets:
    """A model's tensors, as the plan of a pull found them. Keeps none of their memory."""

    def __init__(self, values: Mapping[str, Any], asked: Any) -> None:
        """``asked``: the options of the pull."""
        tensors = list(map(_tensor_of, values.values()))
        self._asked, self._names, self._places = asked, list(values), list(map(_place_of, values.values()))
        self._kinds = _kinds(list(map(local_tensor, tensors)))
        self._tensors = list(map(weakref.ref, tensors))
        self._memory = KnownMemory()

    def found_in(self, values: Any, asked: Any) -> Targets | None:
        """The tensors' present memory; None unless a pull would bring the same into them."""
        if not isinstance(values, Mapping) or asked != self._asked:
            return None
        if list(values) != self._names or list(map(_place_of, values.values())) != self._places:
            return None
        tensors = list(map(_tensor_of, values.values()))
        if not all(map(is_, [known() for known in self._tensors], tensors)):
            return None
        local = list(map(local_tensor, tensors))
        if _kinds(local) != self._kinds:
            return None
        return Targets(dict(zip(map(str, self._names), local, strict=True)), self._memory.of(local))


def _kinds(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.dtype], list[torch.Size]]:
    return [tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors]


def _tensor_of(value: Any) -> Any:
    return value.tensor if type(value) is Shard else value


def _place_of(value: Any) -> Any:
    return value[1:] if type(value) is Shard else None
