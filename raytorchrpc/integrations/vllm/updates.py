"""Chooses how versions of a store get into vLLM's model, and brings them as a checkpoint if there is no faster way."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import layerwise_groups
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

import raytorchrpc as rtr
from raytorchrpc.integrations.engines import NoPlan, Progress
from raytorchrpc.integrations.vllm import UpdateStatus
from raytorchrpc.integrations.vllm.progress import Target, Update, bringing

#: What ``into`` may be.
INTO = "auto", "parameters", "layers", "load_weights"


def update_of(target: Target, layout: Any, into: str, group_bytes: int) -> Update:
    """The fastest update that the model allows, or what ``into`` asks for. ``layout``: of the store.

    Raises ConfigurationError if that is impossible, or the published tensors are not those of the model.
    """
    why = "as asked"
    if into != "load_weights":
        try:
            from raytorchrpc.integrations.vllm import layers  # needs names of vLLM that it does not promise

            return layers.plan(target, layout, into, group_bytes)
        except ImportError as error:
            why = f"this release of vLLM lacks what a faster way needs ({error})"
        except NoPlan as error:
            why = str(error)
        if into != "auto":
            raise rtr.ConfigurationError(f"into={into!r} is impossible: {why}; into='auto' takes the fastest way")
    return CheckpointUpdate(target, layout, why)


class CheckpointUpdate:
    """Pulls whole tensors, and has the model's ``load_weights`` do the rest."""

    def __init__(self, target: Target, layout: Any, why: str) -> None:
        self._target, self._store = target, copy(target.store)
        self._specs = {name: (its.shape, its.dtype) for name, its in layout.items()}
        self.status = UpdateStatus("load_weights", why, {"load_weights": layout.nbytes})

    def bring(self, version: int, timeout: float) -> None:
        """See ``Update``."""
        with bringing(self, version, timeout) as progress:
            initialize_layerwise_reload(self._target.model)
            try:
                for names in layerwise_groups(list(self._specs)):  # so that one layer at a time takes memory
                    self._bring_some(names, version, progress)
            finally:
                with progress.phase("process"):
                    finalize_layerwise_reload(self._target.model, self._target.config)

    def _bring_some(self, names: list[str], version: int, progress: Progress) -> None:
        with progress.phase("pull"):
            specs = [(name, *self._specs[name]) for name in names]
            whole = {name: torch.empty(shape, dtype=dtype, device=self._target.device) for name, shape, dtype in specs}
            self._store.pull(whole, version, only=names, timeout=progress.left())
        progress.has_written = True
        with progress.phase("process"):
            self._target.model.load_weights(whole.items())
