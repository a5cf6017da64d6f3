"""What vLLM's workers do by this package's means: its documentation does not promise the two names that this takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.v1.worker.worker_base import WorkerWrapperBase


def watch(engine: type[Any]) -> None:
    """Call ``before_step`` of a worker's weight engine, if it is such an ``engine``, before the worker computes a step.

    vLLM calls the wrapper for requests alone, not to warm up.
    """
    compute = WorkerWrapperBase.execute_model

    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(weights := getattr(self.worker, "weight_transfer_engine", None), engine):
            weights.before_step()
        return compute(self, *args, **kwargs)

    WorkerWrapperBase.execute_model = execute_model


def load_adapters(scheme: str, pulled: Callable[[str], AbstractContextManager[str]]) -> None:
    """Have workers load LoRA adapters whose path begins with ``scheme`` from the folder that ``pulled`` makes of it."""
    load = LRUCacheWorkerLoRAManager.add_adapter

    def add_adapter(self: Any, request: Any) -> Any:
        is_there = request.lora_int_id in self.list_adapters() and not request.load_inplace
        if is_there or not request.lora_path.startswith(scheme):
            return load(self, request)
        local = copy(request)
        with pulled(request.lora_path) as local.lora_path:
            return load(self, local)

    LRUCacheWorkerLoRAManager.add_adapter = add_adapter
