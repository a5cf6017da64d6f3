"""The tensors of a model that pulls fill, one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from raytorchrpc.errors import ConfigurationError
from raytorchrpc.patterns.weights.module_state import ModuleState
from raytorchrpc.patterns.weights.shards import Shard, local_tensor


def values_of(model: Any) -> Any:
    """A model's values by name: the parameters of a module themselves, which stay the same between pulls."""
    return ModuleState.of(model).saved if isinstance(model, torch.nn.Module) else model


def check_lasting(store: str, model: Any, values: Mapping[str, Any]) -> None:
    """Raise ConfigurationError, which names it, for a tensor that a module's ``state_dict`` makes anew each time.

    What is written to it does not reach the module. ``values``: some of ``values_of(model)``.
    """
    if not isinstance(model, torch.nn.Module):
        return
    own = set(map(id, (*model.parameters(), *model.buffers())))
    made = [name for name, value in values.items() if id(value) not in own and value.numel()]
    again = model.state_dict(keep_vars=True) if made else {}
    for name in made:
        if name not in again or local_tensor(again[name]).data_ptr() != local_tensor(values[name]).data_ptr():
            raise ConfigurationError(
                f"{name!r} of the weights for {store!r} is a copy that state_dict() makes, and what is written to it "
                f"does not reach the model: pull a dict of the model's own tensors, such as dict(named_parameters())"
            )


#: A model whose buffers are exchanged has two.
_MEMORIES = 2
_Tensor = torch.Tensor
_OF_MEMORY = _Tensor.data_ptr, _Tensor.stride, _Tensor.get_device, _Tensor.is_neg, _Tensor.is_conj


class KnownMemory:
    """What was worked out for tensors, as long as they stay where they are. Keeps none of their memory."""

    def __init__(self) -> None:
        self._last: tuple[tuple[Any, dict[Hashable, Any]], ...] = ()

    def of(self, tensors: Sequence[torch.Tensor]) -> dict[Hashable, Any]:
        """What is known, to be added to. ``tensors``: of the dtypes and shapes of before."""
        memory, last = [list(map(ask, tensors)) for ask in _OF_MEMORY], self._last
        found: tuple[Any, dict[Hashable, Any]] = next((one for one in last if one[0] == memory), (memory, {}))
        if not last or last[0] is not found:
            self._last = (found, *[one for one in last if one is not found][: _MEMORIES - 1])
        return found[1]


class Targets(NamedTuple):
    """Where a pull writes."""

    tensors: dict[str, torch.Tensor]
    """By name: a model's tensors, or their local shards."""
    known: dict[Hashable, Any]
    """What pulls into these addresses have worked out; no memory."""


class SameTensors:
    """Tells whether a model has the same tensors, by name, as before. Keeps none of them."""

    def __init__(self, tensors: Mapping[Any, Any]) -> None:
        self._names, self._tensors = list(tensors), list(map(weakref.ref, tensors.values()))

    def are(self, tensors: Mapping[Any, Any]) -> bool:
        """Whether these are the same, though they may have other memory."""
        if list(tensors) != self._names:
            return False
        return all(map(is_, [known() for known in self._tensors], tensors.values()))

    @property
    def are_gone(self) -> bool:
        """Whether nobody has the first of them any longer."""
        return bool(self._tensors) and self._tensors[0]() is None


class KnownTargets:
    """A model's tensors, as the plan of a pull found them. Keeps none of their memory."""

    def __init__(self, values: Mapping[str, Any], asked: Any) -> None:
        """``asked``: the options of the pull."""
        tensors = _tensors_of(values)
        self._asked, self._places = asked, list(map(_place_of, values.values()))
        self._kinds = _kinds(list(map(local_tensor, tensors.values())))
        self._same, self._memory = SameTensors(tensors), KnownMemory()

    @property
    def are_gone(self) -> bool:
        """See ``SameTensors.are_gone``."""
        return self._same.are_gone

    def found_in(self, values: Any, asked: Any) -> Targets | None:
        """The tensors' present memory; None unless a pull would bring the same into them."""
        if not isinstance(values, Mapping) or asked != self._asked:
            return None
        tensors = _tensors_of(values)
        if not self._same.are(tensors) or list(map(_place_of, values.values())) != self._places:
            return None
        local = list(map(local_tensor, tensors.values()))
        if _kinds(local) != self._kinds:
            return None
        return Targets(dict(zip(map(str, tensors), local, strict=True)), self._memory.of(local))


def _kinds(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.dtype], list[torch.Size]]:
    return [tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors]


def _tensors_of(values: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: value.tensor if type(value) is Shard else value for name, value in values.items()}


def _place_of(value: Any) -> Any:
    return value[1:] if type(value) is Shard else None
