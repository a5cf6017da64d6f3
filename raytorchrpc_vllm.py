"""vLLM's plugin, which each process of vLLM loads, for ``weight_transfer_config={"backend": "raytorchrpc"}``.

It lies beside the package, because importing any module of ``raytorchrpc`` imports torch and Ray. This one imports
nothing, and tells vLLM only where the classes are: they are imported once somebody asks for the backend.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

BACKEND = "raytorchrpc"


def register() -> None:
    """Register the backend with vLLM, and how its server has adapters by name. Idempotent.

    Imports nothing that vLLM's server has not imported.
    """
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
    with suppress(ImportError):
        from vllm.lora.request import LoRARequest
        from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

        class Resolver(LoRAResolver):
            """Has an adapter by the name of ``integrations.adapters.name_of``, also in a server that was restarted."""

            async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
                return LoRARequest(lora_name, 1, lora_name) if lora_name.startswith(f"{BACKEND}://") else None

        if BACKEND not in LoRAResolverRegistry.get_supported_resolvers():
            LoRAResolverRegistry.register_resolver(BACKEND, Resolver())
