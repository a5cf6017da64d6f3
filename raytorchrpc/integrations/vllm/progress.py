"""One update of vLLM's model: what it updates, and its status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

import raytorchrpc as rtr
from raytorchrpc.integrations.engines import Progress, updating
from raytorchrpc.integrations.vllm import UpdateStatus


class Target(NamedTuple):
    """The model of one worker, and the store that it is updated from."""

    model: Any
    config: Any
    """vLLM's ModelConfig."""
    device: torch.device
    store: rtr.WeightStore


class Update(Protocol):
    """Brings versions of one store into one model."""

    status: UpdateStatus

    def bring(self, version: int, timeout: float) -> None:
        """Bring a version into the model. Blocks; see ``WeightEngine.update_weights``."""


@contextmanager
def bringing(update: Update, version: int, timeout: float) -> Iterator[Progress]:
    """Keep the update's status, and have an error say whether the model has tensors of two versions."""
    before = update.status
    update.status = replace(before, version=0, seconds=None)
    with updating("vLLM", version, timeout) as progress:
        try:
            yield progress
        except (rtr.ConfigurationError, rtr.NotFound, rtr.Empty):
            if not progress.has_written:
                update.status = before
            raise
    update.status = replace(update.status, version=version, seconds=dict(progress.seconds))
