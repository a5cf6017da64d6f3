"""The tensors of a model that a pull fills, as the pull before found them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from operator import is_
from typing import Any, NamedTuple

import torch

from raytorchrpc.lanes.base import Part
from raytorchrpc.patterns.weights.match import KnownLayout, Selection, writable_device_type
from raytorchrpc.patterns.weights.shards import Shard, local_tensor


def values_of(model: Any) -> Any:
    """A model's values by name: the parameters of a module themselves, which stay the same between pulls."""
    return model.state_dict(keep_vars=True) if isinstance(model, torch.nn.Module) else model


class Filled(NamedTuple):
    """What comes from one source."""

    selection: Selection
    parts: list[list[Part]]
    device_type: str | None
    """See ``LayoutMatch.device_type``."""

    @staticmethod
    def of(selection: Selection, layout: KnownLayout) -> Filled:
        device_type = writable_device_type(selection.targets) if selection.targets else None
        return Filled(selection, selection.parts(layout), device_type)


class KnownTargets:
    """What pulls bring into one model, as long as it has the same tensors in the same memory.

    Ends with the first of the tensors that dies, because what it holds keeps their memory.
    """

    def __init__(self, values: Mapping[str, Any], asked: Any, filled: list[Filled]) -> None:
        """``asked``: the options of the pull. ``filled``: by source."""
        tensors = list(map(_tensor_of, values.values()))
        self.filled: list[Filled] | None = filled
        self._asked, self._names, self._places = asked, list(values), list(map(_place_of, values.values()))
        self._pointers = list(map(_pointer_of, tensors))
        self._tensors = [weakref.ref(tensor, self._end) for tensor in tensors]

    def _end(self, _: object) -> None:
        self.filled = None

    def are(self, values: Any, asked: Any) -> bool:
        """Whether a pull with these options would bring the same to the same places."""
        if self.filled is None or not isinstance(values, Mapping) or asked != self._asked:
            return False
        if list(values) != self._names or list(map(_place_of, values.values())) != self._places:
            return False
        tensors = list(map(_tensor_of, values.values()))
        same = all(map(is_, [known() for known in self._tensors], tensors))
        return same and list(map(_pointer_of, tensors)) == self._pointers


def _tensor_of(value: Any) -> Any:
    return value.tensor if type(value) is Shard else value


def _place_of(value: Any) -> Any:
    return value[1:] if type(value) is Shard else None


def _pointer_of(tensor: Any) -> int:
    return local_tensor(tensor).data_ptr() if isinstance(tensor, torch.Tensor) else 0
