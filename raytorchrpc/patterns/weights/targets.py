"""The tensors of a model that pulls fill, one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any

import torch

from raytorchrpc.patterns.weights.shards import Shard, local_tensor


def values_of(model: Any) -> Any:
    """A model's values by name: the parameters of a module themselves, which stay the same between pulls."""
    return model.state_dict(keep_vars=True) if isinstance(model, torch.nn.Module) else model


class KnownTargets:
    """A model's tensors, as the plan of a pull found them. Keeps none of their memory."""

    def __init__(self, values: Mapping[str, Any], asked: Any) -> None:
        """``asked``: the options of the pull."""
        tensors = list(map(_tensor_of, values.values()))
        self._asked, self._names, self._places = asked, list(values), list(map(_place_of, values.values()))
        self._kinds = _kinds(map(local_tensor, tensors))
        self._tensors = list(map(weakref.ref, tensors))

    def found_in(self, values: Any, asked: Any) -> dict[str, torch.Tensor] | None:
        """The tensors' present memory, by name, without autograd; None unless a pull would bring the same into them."""
        if not isinstance(values, Mapping) or asked != self._asked:
            return None
        if list(values) != self._names or list(map(_place_of, values.values())) != self._places:
            return None
        tensors = list(map(_tensor_of, values.values()))
        if not all(map(is_, [known() for known in self._tensors], tensors)):
            return None
        local = [local_tensor(tensor).detach() for tensor in tensors]
        return dict(zip(self._names, local, strict=True)) if _kinds(local) == self._kinds else None


def _kinds(tensors: Iterable[torch.Tensor]) -> list[Any]:
    return [(tensor.dtype, tensor.shape) for tensor in tensors]


def _tensor_of(value: Any) -> Any:
    return value.tensor if type(value) is Shard else value


def _place_of(value: Any) -> Any:
    return value[1:] if type(value) is Shard else None
