"""Where vLLM's own loaders put the tensors of a checkpoint: recorded on meta tensors, so that nothing moves."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from raytorchrpc import Shard
from raytorchrpc.integrations.engines import NoPlan
from raytorchrpc.integrations.recording import Copy, View, check_filled, memory_of, record
from raytorchrpc.integrations.vllm import internals


class Part(NamedTuple):
    """A box of one tensor of the checkpoint, and where it goes in a layer."""

    copied: Copy
    parameter: str

    def shard(self, parameter: torch.Tensor) -> Shard:
        """The part of a parameter's memory, as a pull fills it."""
        return Shard(self.copied.to.of(parameter.data), self.copied.global_shape, self.copied.offset)


class Layer(NamedTuple):
    """One module, and what its own parameters and buffers are made of."""

    module: torch.nn.Module
    name: str
    parts: Sequence[Part]
    zeros: Sequence[tuple[str, View]]
    """What the loaders fill with zeros, as rows that pad a vocabulary: name of the parameter, and where."""
    kept: Sequence[str]
    """Its tensors that the loaders leave as they are."""
    nbytes: int
    processed: str | None
    """What vLLM makes of it after loading; None: it leaves it as it was loaded."""


class Placement(NamedTuple):
    """Where everything goes."""

    layers: Sequence[Layer]
    """In the order of the model; without those that the checkpoint has nothing for."""
    sharing: Sequence[torch.nn.Module]
    """Modules that share memory with these, and have to be processed again after them."""
    attention: Sequence[torch.nn.Module]
    """Modules that vLLM processes after all others."""


def place(model: torch.nn.Module, layout: Any) -> Placement:
    """Run the model's loaders on meta tensors. The model stays as it is.

    Raises NoPlan, and ConfigurationError if the model has no place for a tensor, or lacks some.
    """
    names = {module: name for name, module in model.named_modules()}
    with internals.as_loaded(model):
        there = {module: internals.tensors_of(module) for module in names}
        in_use = {module: internals.tensors_in_use(module) for module in names}
        recorded = record("vLLM", model, layout)
    owners = {memory_of(its): (module, name) for module, tensors in there.items() for name, its in tensors.items()}
    parts, filled = defaultdict[Any, list[Part]](list), defaultdict[Any, list[tuple[str, View]]](list)
    for to, copied in recorded.copies:
        module, name = _owner(owners, to, copied.source)
        parts[module].append(Part(copied, name))
    for to, view in recorded.zeros:
        if (owner := owners.get(memory_of(to))) is not None:
            filled[owner[0]].append((owner[1], view))
    layers = []
    for module, its in parts.items():
        if internals.is_attention(module):
            raise NoPlan(f"{its[0].copied.source!r} is a scale of {names[module]}, which vLLM loads with the attention")
        size = sum(math.prod(part.copied.to.shape) * there[module][part.parameter].itemsize for part in its)
        processed = internals.why_processed(module) or _changed(there[module], in_use[module])
        written = {part.parameter for part in its}.union(name for name, _ in filled[module])
        kept = [name for name in there[module] if name not in written]
        if any(not _is_like(there[module][name], in_use[module].get(name)) for name in kept):
            raise NoPlan(f"vLLM makes {kept} of {names[module]!r} of other tensors")
        layers.append(Layer(module, names[module], its, filled[module], kept, size, processed))
    check_filled("vLLM", model, layout, _lacking(layers, there, in_use, names))
    order = {module: number for number, module in enumerate(names)}
    layers.sort(key=lambda layer: order[layer.module])
    planned = {memory_of(its) for layer in layers for its in in_use[layer.module].values() if its.numel()}
    sharing = [
        module
        for module in names
        if module not in parts
        and any(memory_of(its) in planned for its in in_use[module].values())
        and internals.why_processed(module)
    ]
    return Placement(layers, sharing, [module for module in names if internals.is_attention(module)])


def _owner(owners: Mapping[StorageWeakRef, Any], to: torch.Tensor, source: str) -> tuple[torch.nn.Module, str]:
    owner = owners.get(memory_of(to))
    if owner is None:
        raise NoPlan(f"a loader copies {source!r} to a tensor of its own")
    return owner  # type: ignore[no-any-return]


def _is_like(loaded: torch.Tensor, in_use: torch.Tensor | None) -> bool:
    """Whether a tensor that the kernels read has the layout of the one that the loaders fill."""
    same = (loaded.shape, loaded.dtype, loaded.stride())
    return in_use is not None and (in_use.shape, in_use.dtype, in_use.stride()) == same


def _changed(loaded: Mapping[str, torch.Tensor], in_use: Mapping[str, torch.Tensor]) -> str | None:
    """What differs between the tensors that the loaders fill, and those that the kernels read."""
    for name, its in loaded.items():
        if not _is_like(its, in_use.get(name)):
            return f"vLLM changes the layout of {name!r} after loading"
    return None


def _lacking(
    layers: Sequence[Layer],
    there: Mapping[torch.nn.Module, internals.Tensors],
    in_use: Mapping[torch.nn.Module, internals.Tensors],
    names: Mapping[torch.nn.Module, str],
) -> list[str]:
    """The parameters that nothing fills, or not all of them."""
    filled: dict[tuple[torch.nn.Module, str], int] = defaultdict(int)
    for layer in layers:
        views = [(part.parameter, part.copied.to) for part in layer.parts] + [*layer.zeros]
        for name, view in views:
            filled[layer.module, name] += math.prod(view.shape)
    shared = {memory_of(in_use[module][name]) for module, name in filled if name in in_use[module]}
    lacking = []
    for module, tensors in there.items():
        for name, its in tensors.items():
            if not isinstance(its, torch.nn.Parameter) or internals.is_attention(module):
                continue
            kernel = in_use[module].get(name)
            is_shared = kernel is not None and kernel.numel() > 0 and memory_of(kernel) in shared
            if filled[module, name] < its.numel() and not (is_shared and not filled[module, name]):
                lacking.append(f"{names[module]}.{name}")
    return lacking
