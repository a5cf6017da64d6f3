"""How versions of a store get into vLLM's model; the slowest way, as a checkpoint, works with every model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import Any, NamedTuple

import torch
from vllm.distributed.weight_transfer.base import layerwise_groups
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

import raytorchrpc as rtr
from raytorchrpc.integrations.engines import Progress, load_whole
from raytorchrpc.integrations.vllm import UpdateStatus


class Target(NamedTuple):
    """The model of one worker, and the store that it is updated from."""

    model: Any
    config: Any
    """vLLM's ModelConfig."""
    device: torch.device
    store: rtr.WeightStore


class Update(ABC):
    """Brings versions of one store into one model."""

    status: UpdateStatus

    @abstractmethod
    def bring(self, version: int, progress: Progress) -> None:
        """Bring a version into the model. Blocks; see ``WeightEngine.update_weights``."""


class CheckpointUpdate(Update):
    """Pulls whole tensors, and has the model's ``load_weights`` do the rest."""

    def __init__(self, target: Target, layout: Any, why: str) -> None:
        self._target, self._store, self._layout = target, copy(target.store), layout
        self.status = UpdateStatus("load_weights", why, {"load_weights": layout.nbytes})

    def bring(self, version: int, progress: Progress) -> None:
        """See ``Update``."""
        model, config, device, _ = self._target
        groups = layerwise_groups(list(self._layout))  # so that one layer at a time takes memory
        initialize_layerwise_reload(model)
        try:
            load_whole(model, self._store, self._layout, version, groups, device, progress)
        finally:
            with progress.phase("process"):
                finalize_layerwise_reload(model, config)
