"""Has an engine check its weights before each step: the one name of vLLM that this takes is not promised by it."""

from __future__ import annotations

from typing import Any

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
