"""The model and its data: an own module of the job, so that it has to reach every node as well."""

from __future__ import annotations

import torch
from torch import Tensor, nn

INPUTS, HIDDEN = 256, 2048
LEARNING_RATE = 0.05


def make_model() -> nn.Module:
    """The same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))


def batch(step: int, shard: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """Inputs and what the model is to say of them. Made up on the spot: a job has no data to bring along."""
    generator = torch.Generator().manual_seed(1_000 * step + shard)
    inputs = torch.randn(size, INPUTS, generator=generator)
    return inputs, inputs[:, :8].sum(1, keepdim=True) / 3


def loss_of(model: nn.Module, step: int, shard: int, device: torch.device | str = "cpu") -> Tensor:
    """Mean squared error on one shard of one step's batch."""
    inputs, wanted = (tensor.to(device) for tensor in batch(step, shard))
    return (model(inputs) - wanted).square().mean()
