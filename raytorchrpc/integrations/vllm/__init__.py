"""Brings weights of a ``WeightStore`` into vLLM: ``LLM(..., weight_transfer_config={"backend": "raytorchrpc"})``.

``engine`` is the side of vLLM's workers, and ``trainer`` the one of the training process. vLLM loads both by the plugin
in ``raytorchrpc_vllm.py``. This module imports neither vLLM nor torch, so that any process can read a status.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: The tests ran with these releases of vLLM: from the first up to before the second.
TESTED = "0.32", "0.33"


@dataclass(frozen=True)
class UpdateStatus:
    """How a worker of vLLM updates its model, and how its last update went.

    Attributes:
        into: the slowest way that some of the model needs: ``"parameters"``, ``"layers"`` or ``"load_weights"``.
        why: why no faster one; empty if there is none.
        nbytes: what an update brings to this worker, by way.
        version: that all of the model has; 0 before the first update, and after one that failed midway.
        seconds: of the last update, by phase. ``pull`` is the time that the worker waited for tensors.
    """

    into: str
    why: str
    nbytes: dict[str, int]
    version: int = 0
    seconds: dict[str, float] | None = None

    def __str__(self) -> str:
        ways = " and ".join(f"{_TEXTS[way]} ({size / 1e6:,.1f} MB)" for way, size in self.nbytes.items())
        return f"{ways}: {self.why}" if self.why else ways


_TEXTS = {"parameters": "in its parameters", "layers": "layer by layer", "load_weights": "by load_weights"}


def update_status(worker: Any) -> UpdateStatus | None:
    """How a worker's last update went: ``llm.collective_rpc(update_status)`` returns this of every worker.

    None before ``init_weight_transfer_engine`` has found a version. vLLM sends functions to processes of its own only
    with ``VLLM_ALLOW_INSECURE_SERIALIZATION=1``.
    """
    status: UpdateStatus | None = worker.weight_transfer_engine.status()
    return status
