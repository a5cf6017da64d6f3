"""vLLM's plugin, which each process of vLLM loads, for ``weight_transfer_config={"backend": "raytorchrpc"}``.

It lies beside the package, because importing any module of ``raytorchrpc`` imports torch and Ray. This one imports
nothing, and tells vLLM only where the classes are: they are imported once somebody asks for the backend.
"""

from __future__ import annotations

from contextlib import suppress

BACKEND = "raytorchrpc"


def register() -> None:
    """Register the backend with vLLM. Idempotent; imports nothing that vLLM has not imported."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
    except ImportError:
        return  # an older vLLM, which has no engines for weights
    for factory, module, name in (
        (WeightTransferEngineFactory, "engine", "WeightEngine"),
        (WeightTransferTrainerFactory, "trainer", "TrainerEngine"),
    ):
        with suppress(ValueError):  # registered already: some processes of vLLM load their plugins again
            factory.register_engine(BACKEND, f"raytorchrpc.integrations.vllm.{module}", name)
