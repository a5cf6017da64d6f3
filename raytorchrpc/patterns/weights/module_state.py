"""The tensors of modules, found quicker than by torch: a model of 8B parameters has hundreds of modules."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

#: Methods that an instance can have of its own. torch asks the class for ``get_extra_state``.
_OWN = frozenset({"state_dict", "_save_to_state_dict"})


class ModuleState(NamedTuple):
    """The tensors of a module, at one moment."""

    saved: dict[str, torch.Tensor]
    """What ``state_dict(keep_vars=True)`` returns."""
    passing: list[torch.Tensor]
    """Parameters and buffers that are not saved."""
    made: frozenset[str]
    """Names of what is saved, and is neither a parameter nor a buffer."""

    @staticmethod
    def of(module: torch.nn.Module) -> ModuleState:
        saved, passing, is_plain = _walk(module)
        if is_plain:
            return ModuleState(saved, passing, frozenset())
        saved = dict(module.state_dict(keep_vars=True))
        registered, passing, _ = _walk(module)  # again: a hook of FSDP replaces parameters
        ids = set(map(id, (*registered.values(), *passing)))
        made = frozenset(name for name, tensor in saved.items() if id(tensor) not in ids)
        ids = set(map(id, saved.values()))
        return ModuleState(saved, [its for its in (*registered.values(), *passing) if id(its) not in ids], made)


def _walk(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], bool]:
    """Parameters and buffers by name, those that are not persistent, and whether ``state_dict`` would give the same."""
    found: dict[str, torch.Tensor] = {}
    passing: list[torch.Tensor] = []
    has_code, kinds, waiting = False, set(), list[tuple[str, Any]]([("", module)])
    while waiting:
        prefix, part = waiting.pop()
        its = part.__dict__
        kinds.add(type(part))
        if its.get("_state_dict_hooks", True) or its.get("_state_dict_pre_hooks", True) or not _OWN.isdisjoint(its):
            has_code = True
        for name, tensor in part._parameters.items():
            if tensor is not None:
                found[prefix + name] = tensor
        if buffers := part._buffers:
            its_passing = part._non_persistent_buffers_set
            passing += [tensor for name in its_passing if (tensor := buffers[name]) is not None]
            saved = ((name, tensor) for name, tensor in buffers.items() if name not in its_passing)
            found.update({prefix + name: tensor for name, tensor in saved if tensor is not None})
        if parts := part._modules:
            named = reversed(list(parts.items()))
            waiting += [(f"{prefix}{name}.", its_part) for name, its_part in named if its_part is not None]
    return found, passing, not has_code and all(map(_saves_as_torch_does, kinds))  # type: ignore[arg-type]


@functools.lru_cache(4096)
def _saves_as_torch_does(kind: Any) -> bool:
    """Whether modules of a class save their parameters, buffers and parts without code of their own."""
    names = "state_dict", "_save_to_state_dict", "get_extra_state"
    as_torch = all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in names)
    return as_torch and not issubclass(kind, torch.jit.ScriptModule)
