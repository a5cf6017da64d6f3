"""Values of models in which each tensor has one value only."""

from __future__ import annotations

from typing import Any

import torch


def values(model: torch.nn.Module | dict[str, Any]) -> list[float]:
    """One for each tensor; it has no other."""
    tensors = model.state_dict() if isinstance(model, torch.nn.Module) else model
    found = [torch.unique(tensor) for tensor in tensors.values()]
    assert all(len(value) == 1 for value in found)
    return [float(value) for value in found]
