"""One update of vLLM's model: its deadline, its phases, and what its failure leaves behind."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

import raytorchrpc as rtr
from raytorchrpc.integrations.vllm import UpdateStatus


class NoPlan(Exception):
    """The model's loaders do more with a tensor than to copy parts of it. Never leaves this package."""


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


class Progress:
    """One update: its deadline, the seconds of its phases, and whether it has written to the model."""

    def __init__(self, timeout: float) -> None:
        self._until = time.monotonic() + timeout
        self.seconds: dict[str, float] = defaultdict(float)
        self.has_written = False

    def left(self) -> float:
        """Seconds to the deadline."""
        return max(0.0, self._until - time.monotonic())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs within as part of a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began


@contextmanager
def bringing(update: Update, version: int, timeout: float) -> Iterator[Progress]:
    """Keep the update's status, and have an error say whether the model has tensors of two versions."""
    before, progress = update.status, Progress(timeout)
    update.status = replace(before, version=0, seconds=None)
    try:
        yield progress
    except Exception as error:
        if not progress.has_written and isinstance(error, (rtr.ConfigurationError, rtr.NotFound, rtr.Empty)):
            update.status = before  # the pull that raised it has written nothing
            raise
        raise rtr.RayTorchRpcError(
            f"the update of vLLM's model to version {version} failed midway, so it may have tensors of two versions: "
            f"update it again before it generates ({type(error).__name__}: {error})"
        ) from error
    update.status = replace(update.status, version=version, seconds=dict(progress.seconds))
