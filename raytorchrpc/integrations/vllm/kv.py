"""A KV connector of vLLM: the decode engine reads the blocks of a prompt out of the prefill engine's cache.

``kv_transfer_config={"kv_connector": "RayTorchRpcConnector", "kv_connector_module_path":
"raytorchrpc.integrations.vllm.kv", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

import raytorchrpc as rtr
from raytorchrpc.integrations.kv_handover import Ledger, Settings, Source, Step, Worker

logger = init_logger("vllm.raytorchrpc")

#: How a request ends whose prompt was computed.
_COMPLETE = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED


@dataclass
class Metadata(KVConnectorMetadata):
    """From the scheduler to its workers, for each step."""

    step: Step


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """From each worker to its scheduler, once."""

    source: Source


class RayTorchRpcConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM makes one in the scheduler, and one in each worker."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises ConfigurationError for what it does not do."""
        super().__init__(vllm_config, role, kv_cache_config)
        parallel, config, model = vllm_config.parallel_config, vllm_config.kv_transfer_config, vllm_config.model_config
        for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise rtr.ConfigurationError(f"RayTorchRpcConnector does not support {name}={getattr(parallel, name)}")
        self._settings = Settings.of(config.kv_connector_extra_config)
        self._heads = 1 if model.use_mla else model.get_total_num_kv_heads()
        self._groups = [group for group in kv_cache_config.kv_cache_groups if group.enable_kv_transfer]
        self._group_ids = kv_cache_config.transfer_group_ids
        self._ledger: Ledger | None = None
        self._worker: Worker | None = None
        if role is KVConnectorRole.SCHEDULER:
            sizes = [group.kv_cache_spec.block_size for group in self._groups]
            self._ledger = Ledger(config.engine_id, sizes, self._heads)
            if config.is_kv_consumer and config.kv_load_failure_policy != "recompute":
                logger.warning(
                    "a prompt whose prefill engine has died ends its request with an error: set "
                    '"kv_load_failure_policy": "recompute" in kv_transfer_config to have it computed again'
                )

    # --- the scheduler -----------------------------------------------------------------------------------------------

    @property
    def _scheduler(self) -> Ledger:
        assert self._ledger is not None
        return self._ledger

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """See the base class, also for the other methods."""
        if self._kv_transfer_config.is_kv_producer:
            self._scheduler.sources = [metadata[rank].source for rank in sorted(metadata)]

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        ids: tuple[int, ...] = self._group_ids
        return ids

    def on_new_request(self, request: Any) -> None:
        if self._kv_transfer_config.is_kv_consumer:
            self._scheduler.arrive(request.request_id, request.kv_transfer_params)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        count = self._scheduler.matched(request.request_id, request.num_prompt_tokens, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = self._of_groups(blocks.get_block_ids())
        self._scheduler.allocated(request.request_id, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        is_idle = scheduler_output.total_num_scheduled_tokens == 0
        return Metadata(self._scheduler.next_step(is_idle=is_idle))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        is_complete = request.status in _COMPLETE and any(block_ids)
        ids = self._of_groups(block_ids)
        parameters = self._scheduler.finished(
            request.request_id, request.kv_transfer_params, ids, tokens, is_complete=is_complete
        )
        return parameters is not None, parameters

    def _of_groups(self, block_ids: Any) -> list[list[int]]:
        return [list(block_ids[number]) for number in self._group_ids]

    # --- a worker ----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Join the group of the caches. Blocks."""
        self.shutdown()
        tensors = [_layers(group.layer_names, kv_caches, self._kv_cache_config.num_blocks) for group in self._groups]
        tp = get_tp_group()
        self._worker = Worker(tensors, tp.rank_in_group, tp.world_size, self._heads, self._settings)

    def get_handshake_metadata(self) -> Handshake | None:
        return None if self._worker is None else Handshake(self._worker.source)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin what the step asks for, beside its computation."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata.step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        return KVConnectorTransferResults(*self._worker.results())

    def counts(self) -> dict[str, int]:
        """Of a worker: prompts that it has read, that it could not read, and that it holds for others."""
        worker = self._worker
        return {} if worker is None else {"read": worker.read, "failed": worker.failed, "held": len(worker.holds)}

    def shutdown(self) -> None:
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.close()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: reads have begun when the step came."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is computed once all its layers are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are read where they are."""

    def wait_for_save(self) -> None:
        """Nothing."""


def _layers(names: list[str], caches: dict[str, Any], blocks: int) -> dict[str, torch.Tensor]:
    """The caches of a group's layers, with vLLM's blocks as their rows. Raises ConfigurationError."""
    layers, seen = dict[str, torch.Tensor](), set[Any]()
    for name in names:
        if (cache := caches.get(name)) is None:
            continue
        if not isinstance(cache, torch.Tensor) or cache.shape[0] % blocks:
            kind = f"of shape {tuple(cache.shape)}" if isinstance(cache, torch.Tensor) else f"a {type(cache).__name__}"
            raise rtr.ConfigurationError(
                f"the cache of {name} is {kind}, not a tensor of {blocks} blocks: RayTorchRpcConnector moves the "
                f"caches of attention layers, and no states of Mamba layers"
            )
        if cache.shape[0] != blocks:  # kernels may use smaller blocks
            cache = torch.unflatten(cache, 0, (blocks, -1))
        if (memory := (cache.data_ptr(), cache.shape, cache.stride())) not in seen:  # layers may share one
            seen.add(memory)
            layers[name] = cache
    return layers
