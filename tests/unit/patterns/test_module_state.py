"""The tensors of modules are those of ``state_dict``."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from raytorchrpc.patterns.weights.model_tensors import ModuleState


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_buffer("no_buffer", None)
        self.register_parameter("no_parameter", None)
        self.last = nn.Parameter(torch.zeros(1))


class Renames(nn.Linear):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {f"base.{name}": tensor for name, tensor in super().state_dict(*args, **options).items()}


class SavesMore(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}more"] = self.weight * 2


class Extra(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(3)


def _shared() -> nn.Module:
    part = nn.Linear(2, 2)
    return nn.ModuleDict({"one": part, "other": part, "none": nn.Sequential()})


def _patched() -> nn.Module:
    module = nn.Linear(2, 2)
    module.state_dict = types.MethodType(lambda self, **_: {"adapter": self.weight}, module)  # type: ignore[method-assign]
    return module


def _saves_another() -> nn.Module:
    module = nn.Linear(2, 2)
    module._save_to_state_dict = lambda state, prefix, _: state.update({f"{prefix}q": module.weight})  # type: ignore[method-assign]
    return nn.Sequential(module)


def _without_a_buffer() -> nn.Module:
    module = Buffers()
    del module._buffers["passing"]  # which leaves its name among those that are not persistent
    return module


def _hooked(register: Callable[[nn.Module], object]) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    register(module[1])
    return module


def _drop_bias(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    del state[f"{prefix}bias"]


def _replace(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """As FSDP does, which gathers parameters for its steps."""
    if not hasattr(module, "replaced"):
        module.weight, module.replaced = nn.Parameter(torch.ones(2, 2)), True


MODULES: dict[str, Callable[[], nn.Module]] = {
    "a linear layer": lambda: nn.Linear(2, 2),
    "a transformer": lambda: nn.TransformerDecoderLayer(8, 2, 8),
    "running averages": lambda: nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.ReLU()),
    "buffers": lambda: nn.Sequential(Buffers(), Buffers()),
    "a part that occurs twice": _shared,
    "lists": lambda: nn.ModuleList(
        [nn.ParameterList([torch.zeros(1), torch.zeros(2)]), nn.ParameterDict({"p": torch.zeros(1)})]
    ),
    "a parametrization": lambda: weight_norm(nn.Linear(2, 2)),
    "nothing": nn.Sequential,
    "compiled": lambda: torch.compile(nn.Linear(2, 2)),  # type: ignore[dict-item]
    "a script": lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2))),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(2)),
    "names of its own": lambda: nn.Sequential(Renames(2, 2)),
    "tensors of its own": lambda: nn.Sequential(SavesMore(2, 2), nn.Linear(2, 2)),
    "extra state": lambda: nn.Sequential(Extra(2, 2)),
    "a method of the instance": _patched,
    "a method of the instance that saves": _saves_another,
    "a buffer that was removed": _without_a_buffer,
    "a hook": lambda: _hooked(lambda part: part._register_state_dict_hook(_drop_bias)),
    "a hook before": lambda: _hooked(lambda part: part.register_state_dict_pre_hook(_replace)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", MODULES)
def test_the_tensors_are_those_of_state_dict_in_its_order(kind: str) -> None:
    module = MODULES[kind]()
    state = ModuleState.of(module)
    expected = module.state_dict(keep_vars=True)
    assert list(state.saved) == list(expected)
    made = {name for name in expected if not any(tensor is expected[name] for tensor in _registered(module))}
    assert state.made == made and (made or kind not in ("tensors of its own", "extra state"))
    assert all(state.saved[name] is expected[name] for name in expected if name not in made)


def _registered(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def test_changes_of_a_module_are_seen() -> None:
    module = nn.Sequential(nn.Linear(2, 2), Buffers())
    assert list(ModuleState.of(module).saved) == ["0.weight", "0.bias", "1.last", "1.kept", "1.inner.weight"]
    module[0].bias = None
    module[1].register_buffer("kept", torch.zeros(2), persistent=False)
    state = ModuleState.of(module)
    assert list(state.saved) == ["0.weight", "1.last", "1.inner.weight"]
    module[0]._register_state_dict_hook(lambda module, state, prefix, metadata: state.pop("1.last", None) and None)
    module[1] = nn.Linear(1, 1)
    assert list(ModuleState.of(module).saved) == ["0.weight", "1.weight", "1.bias"]


def test_a_class_that_is_changed_later_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(nn.Linear):
        pass

    module = nn.Sequential(Plain(2, 2))
    assert list(ModuleState.of(module).saved) == ["0.weight", "0.bias"]
    monkeypatch.setattr(Plain, "_save_to_state_dict", SavesMore._save_to_state_dict)
    assert list(ModuleState.of(module).saved) == ["0.more"]


def test_a_module_within_itself_is_refused_as_by_torch() -> None:
    module = nn.Sequential(nn.Sequential())
    module[0].append(module)
    with pytest.raises(RecursionError):
        ModuleState.of(module)
