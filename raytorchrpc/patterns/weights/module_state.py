"""The tensors of modules, found quicker than by torch: a model of 8B parameters has hundreds of modules."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


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
    kinds = set[Any]()
    has_code = _visit("", module, found, passing, kinds)
    return found, passing, not has_code and all(map(_saves_as_torch_does, kinds))


def _visit(
    prefix: str, part: Any, found: dict[str, torch.Tensor], passing: list[torch.Tensor], kinds: set[Any]
) -> bool:
    """Add what a module and its parts have. Returns whether one of these saves it by code of its own."""
    its = part.__dict__
    has_code = its.get("_state_dict_hooks", True) or its.get("_state_dict_pre_hooks", True)
    has_code = bool(has_code) or "state_dict" in its or "_save_to_state_dict" in its
    kinds.add(type(part))
    for name, tensor in part._parameters.items():
        if tensor is not None:
            found[prefix + name] = tensor
    if buffers := part._buffers:
        not_saved = part._non_persistent_buffers_set
        for name, tensor in buffers.items():
            if tensor is not None and name in not_saved:
                passing.append(tensor)
            elif tensor is not None:
                found[prefix + name] = tensor
    for name, its_part in part._modules.items():
        if its_part is not None:
            has_code |= _visit(f"{prefix}{name}.", its_part, found, passing, kinds)
    return has_code


def _saves_as_torch_does(kind: Any) -> bool:
    """Whether modules of a class save their parameters, buffers and parts without code of their own."""
    names = "state_dict", "_save_to_state_dict", "get_extra_state"
    as_torch = all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in names)
    return as_torch and not issubclass(kind, torch.jit.ScriptModule)
