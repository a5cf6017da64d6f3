"""Tensors whose storage was freed or shrunk, as FSDP and DeepSpeed free that of a parameter between its uses."""

from __future__ import annotations

from collections.abc import Callable

import torch


def freed(tensor: torch.Tensor, kept: int = 0) -> torch.Tensor:
    """The tensor, of whose storage ``kept`` bytes are left."""
    tensor.untyped_storage().resize_(kept)
    return tensor


#: Of two rows with three columns each. The address of the first one alone is null.
FREED: dict[str, Callable[[], torch.Tensor]] = {
    "whole": lambda: freed(torch.ones(2, 3)),
    "at an offset": lambda: freed(torch.ones(3, 3)[1:]),
    "shrunk": lambda: freed(torch.ones(3, 3)[:2], 23),
    "shrunk at an offset": lambda: freed(torch.ones(3, 3)[1:], 35),
    "strided": lambda: freed(torch.ones(4, 2)[1:].t(), 28),
    "parameter": lambda: freed(torch.nn.Parameter(torch.ones(2, 3))),
}
