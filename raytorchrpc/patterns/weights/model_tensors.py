"""The tensors of a model: found by name, checked, and known again."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from raytorchrpc._compat import requirements, torch_internals
from raytorchrpc.calls.receive_into import obstacle_of
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.patterns.weights.shards import Shard
from raytorchrpc.tensors.dtypes import FREED, dense_obstacle, is_freed, storage_bytes


class ModuleState(NamedTuple):
    """The tensors of a module, at one moment."""

    saved: dict[str, torch.Tensor]  # what ``state_dict(keep_vars=True)`` returns
    made: frozenset[str]  # names of what is saved, and is neither a parameter nor a buffer

    @staticmethod
    def of(module: torch.nn.Module) -> ModuleState:
        saved, passing, is_plain = _walk(module)
        if is_plain:
            return ModuleState(saved, frozenset())
        saved = dict(module.state_dict(keep_vars=True))
        registered, passing, _ = _walk(module)  # again: a hook of FSDP replaces parameters
        ids = set(map(id, (*registered.values(), *passing)))
        return ModuleState(saved, frozenset(name for name, tensor in saved.items() if id(tensor) not in ids))


def _walk(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], bool]:
    """Parameters and buffers by name, those that are not persistent, and whether ``state_dict`` would give the same."""
    saved: dict[str, torch.Tensor] = {}
    passing: list[torch.Tensor] = []
    kinds = set[Any]()
    has_code = _visit("", module, saved, passing, kinds)
    return saved, passing, not has_code and all(map(_saves_as_torch_does, kinds))


def _visit(
    prefix: str, part: Any, saved: dict[str, torch.Tensor], passing: list[torch.Tensor], kinds: set[Any]
) -> bool:
    """Add what a module and its parts have. Returns whether one of these saves it by code of its own."""
    attributes = part.__dict__
    has_code = attributes.get("_state_dict_hooks", True) or attributes.get("_state_dict_pre_hooks", True)
    has_code = bool(has_code) or "state_dict" in attributes or "_save_to_state_dict" in attributes
    kinds.add(type(part))
    for name, tensor in part._parameters.items():
        if tensor is not None:
            saved[prefix + name] = tensor
    if buffers := part._buffers:
        not_saved = part._non_persistent_buffers_set
        for name, tensor in buffers.items():
            if tensor is not None and name in not_saved:
                passing.append(tensor)
            elif tensor is not None:
                saved[prefix + name] = tensor
    for name, inner in part._modules.items():
        if inner is not None:
            has_code |= _visit(f"{prefix}{name}.", inner, saved, passing, kinds)
    return has_code


def _saves_as_torch_does(kind: Any) -> bool:
    """Whether modules of a class save their parameters, buffers and parts without code of their own."""
    names = "state_dict", "_save_to_state_dict", "get_extra_state"
    as_torch = all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in names)
    return as_torch and not issubclass(kind, torch.jit.ScriptModule)


def _check_lasting(store: str, model: Any, state: ModuleState, names: Collection[str]) -> None:
    """Raise ConfigurationError, which names it, for a tensor that ``state_dict`` makes anew: writes are lost in it."""
    made = [name for name in names if name in state.made and state.saved[name].numel()]
    again = model.state_dict(keep_vars=True) if made else {}
    for name in made:
        if name not in again or local_tensor(again[name]).data_ptr() != local_tensor(state.saved[name]).data_ptr():
            raise ConfigurationError(
                f"{name!r} of the weights for {store!r} is a copy that state_dict() makes, and what is written to it "
                f"does not reach the model: pull into state = model.state_dict(), then model.load_state_dict(state)"
            )


#: Where a tensor lies, and how its memory is seen.
_OF_MEMORY = (
    torch.Tensor.data_ptr,
    torch.Tensor.stride,
    torch.Tensor.get_device,
    torch.Tensor.is_neg,
    torch.Tensor.is_conj,
)


class Targets(NamedTuple):
    """Where a pull writes."""

    tensors: dict[str, torch.Tensor]  # by name: a model's tensors, or their local shards
    form: Any = None
    """Equal for models into which a pull brings the same, if the same of their tensors are tied."""
    memory: Any = None
    """Of one form, equal for the same memory. Keeps none of it."""

    @staticmethod
    def of(values: Any) -> Targets | None:
        """Of a model's values by name; None for what ``shards_of`` refuses."""
        if not isinstance(values, Mapping):
            return None
        tensors = [value.tensor if type(value) is Shard else value for value in values.values()]
        try:
            local = [tensor if type(tensor) in _PLAIN else local_tensor(tensor) for tensor in tensors]
            kinds = list(map(type, tensors)), [tensor.dtype for tensor in local], [tensor.shape for tensor in local]
            places = [value[1:] if type(value) is Shard else _place_of(value) for value in values.values()]
            form = list(values), places, *kinds
            memory = [list(storage_bytes(local)), *[list(map(ask, local)) for ask in _OF_MEMORY]]
        except (AttributeError, TypeError, RuntimeError):  # no tensor, or none with memory
            return None
        return Targets(dict(zip(map(str, values), local, strict=True)), form, memory)


def _place_of(value: Any) -> Any:
    """The place of a DTensor's shard."""
    if type(value) in _PLAIN or not _is_dtensor(value):
        return None
    return value.shape, value.device_mesh, value.placements


#: A module, or its tensors by name: tensors, DTensors or Shards.
Model = torch.nn.Module | Mapping[str, Any]


class ModelTensors:
    """A model's tensors, as they are when each attribute is first used."""

    def __init__(self, model: Model, store: str) -> None:
        """``store``: the name of the weights, for errors."""
        self._model, self.store = model, store

    @functools.cached_property
    def _state(self) -> ModuleState | None:
        return ModuleState.of(self._model) if isinstance(self._model, torch.nn.Module) else None

    @functools.cached_property
    def values(self) -> Any:
        """By name, if this is a model."""
        return self._model if self._state is None else self._state.saved

    @functools.cached_property
    def targets(self) -> Targets | None:
        """Where a pull writes; None for what ``shards`` refuses."""
        return Targets.of(self.values)

    @functools.cached_property
    def shards(self) -> dict[str, Shard]:
        """See ``shards_of``. Raises ConfigurationError."""
        return shards_of(self.values, self.store)

    @property
    def device_type(self) -> str | None:
        """Of one of the tensors: others are probably on the same type of device."""
        tensors = {} if self.targets is None else self.targets.tensors
        return next((tensor.device.type for tensor in tensors.values()), None)

    @property
    def makes_tensors(self) -> bool:
        """Whether ``state_dict`` makes some of them, perhaps in memory that others had before."""
        return self._state is not None and bool(self._state.made)

    def check(self, names: Collection[str]) -> None:
        """Raise ConfigurationError for one of these tensors that cannot be written, or to no effect."""
        if self.targets is None:  # some tensor has no memory of its own
            check_writable(self.store, {name: self.shards[name].tensor for name in names})
        else:
            check_writable(self.store, {name: t for name, t in self.targets.tensors.items() if name in names})
        if self._state is not None:
            _check_lasting(self.store, self._model, self._state, names)


def shards_of(model: Any, store: str) -> dict[str, Shard]:
    """A model's tensors by name, without autograd. Raises ConfigurationError.

    Leaves out DTensors without dimensions if this process is not in their device mesh.
    """
    if isinstance(model, torch.nn.Module):
        model = ModuleState.of(model).saved
    if not isinstance(model, Mapping):
        raise ConfigurationError(f"weights must be a module or tensors by name, not a {type(model).__name__}")
    shards = ((str(name), shard_of(str(name), value, store)) for name, value in model.items())
    return {name: shard for name, shard in shards if shard is not None}


_PLAIN = torch.Tensor, torch.nn.Parameter


def shard_of(name: str, value: Any, store: str) -> Shard | None:
    """One tensor of a model; see ``shards_of``. None: this process has nothing of it."""
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
        f"{name!r} of the weights for {store!r} is a {type(value).__name__}, not a tensor: leave it out, as "
        f"{{name: tensor for name, tensor in model.state_dict().items() if torch.is_tensor(tensor)}} does, or give a "
        f"tensor, DTensor or Shard"
    )


def _dense(name: str, tensor: torch.Tensor, store: str) -> torch.Tensor:
    if (obstacle := dense_obstacle(tensor)) is not None:
        raise ConfigurationError(f"{name!r} of the weights for {store!r} {obstacle}")
    return tensor.detach() if tensor.requires_grad else tensor


def resolved(name: str, tensor: torch.Tensor, store: str) -> torch.Tensor:
    """A tensor whose memory holds its elements: a copy of a conjugated or negated view.

    Raises ConfigurationError for one whose storage was freed.
    """
    if is_freed(tensor):
        raise ConfigurationError(f"{name!r} of the weights for {store!r} {FREED}")
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _checked(name: str, shard: Shard, store: str) -> Shard:
    given: Any = shard.tensor
    if type(given) not in _PLAIN and (not isinstance(given, torch.Tensor) or _is_dtensor(given)):
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
    """The memory that a tensor or a DTensor has in this process: without elements if it is not in the device mesh."""
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


@functools.lru_cache(4096)
def _offset(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> tuple[int, ...]:
    if torch_internals.has_uneven_strided_shards(shape, mesh, placements):
        requirements.require("uneven strided shards", torch.__version__)
    return torch_internals.offset_of_shard(shape, mesh, placements)


def check_writable(store: str, targets: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigurationError, which names it, for a tensor that nothing can be received into."""
    for name, tensor in targets.items():
        if (obstacle := obstacle_of(tensor)) is not None:
            raise ConfigurationError(f"{name!r} of the weights for {store!r} {obstacle}")


T = TypeVar("T")


def shadowed(tensors: Mapping[str, torch.Tensor], names: Collection[str]) -> frozenset[str]:
    """Return those of the names whose memory a later one of them has, too.

    ``load_state_dict`` writes one name after the other, so what it writes to these does not last.
    """
    last: dict[Any, str] = {}
    ties = ties_of({name: tensor for name, tensor in tensors.items() if name in names})
    for first, name in ties:
        last[first] = name
    return frozenset(name for first, name in ties if last[first] != name) | last.keys()


def ties_of(tensors: Mapping[T, torch.Tensor]) -> list[tuple[T, T]]:
    """Return each further name of a tensor with its first one. Empty tensors are not compared."""
    addresses = list(map(torch.Tensor.data_ptr, tensors.values()))
    if len(set(addresses)) == len(addresses):
        return []
    known: dict[object, T] = {}
    ties: list[tuple[T, T]] = []
    for (name, tensor), address in zip(tensors.items(), addresses, strict=True):
        if address and tensor.numel() and not is_freed(tensor):
            memory = address, tensor.get_device(), tensor.dtype, tensor.shape, tensor.stride()
            if (first := known.setdefault(memory, name)) != name:
                ties.append((first, name))
    return ties
