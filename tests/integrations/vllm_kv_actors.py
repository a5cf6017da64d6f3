"""Engines of the real vLLM that hand KV caches over, as actors; for test_vllm_kv.py and benchmarks."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.integrations.vllm_actors import VARIABLES, Trainer, save_config

CONNECTOR: dict[str, Any] = {
    "kv_connector": "RayTorchRpcConnector",
    "kv_connector_module_path": "raytorchrpc.integrations.vllm.kv",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "block_size": 32,
}


class KVEngine:
    """vLLM's AsyncLLM, whose engine runs in a child process, as in a replica of Ray Serve."""

    def __init__(self, path: str, kv: dict[str, Any] | None = CONNECTOR, **options: Any) -> None:
        os.environ.update(VARIABLES)
        self._path, self._options = path, {**OPTIONS, "kv_transfer_config": kv, **options}

    async def start(self) -> int:
        """Returns the pid of the process with the engine."""
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(self._path, **self._options))
        return int(self.llm.engine_core.resources.engine_manager.processes[0].pid)

    async def generate(
        self, prompt: Sequence[int], count: int, parameters: Any = None, name: str | None = None
    ) -> tuple[list[int], dict[str, Any] | None, float]:
        """Greedy tokens, the parameters that the engine returns, and seconds to the first token."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0,
            max_tokens=count,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": dict(parameters)} if parameters else None,
        )
        given, answer = {"prompt_token_ids": list(prompt)}, SimpleNamespace(outputs=[], kv_transfer_params=None)
        began, first, tokens = time.perf_counter(), 0.0, list[int]()
        async for answer in self.llm.generate(given, sampling, request_id=name or os.urandom(8).hex()):
            first = first or time.perf_counter() - began
            tokens = list(answer.outputs[0].token_ids)
        return tokens, answer.kv_transfer_params, first

    async def abort(self, name: str) -> None:
        await self.llm.abort(name)

    async def counts(self) -> dict[str, int]:
        """Of the first worker; with its pid."""
        return dict((await self.llm.collective_rpc(_counts))[0])

    async def is_empty(self) -> bool:
        """Whether all blocks are free; forgets those that are cached."""
        return bool(await self.llm.reset_prefix_cache())


class ActorEngine:
    """vLLM's LLM, whose scheduler and worker run in this actor."""

    def __init__(self, path: str, **options: Any) -> None:
        os.environ.update({**VARIABLES, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
        self._path, self._options = path, {**OPTIONS, "kv_transfer_config": CONNECTOR, **options}

    def start(self) -> None:
        from vllm import LLM

        self.llm = LLM(self._path, **self._options)

    def generate(self, prompt: Sequence[int], count: int, parameters: Any = None) -> tuple[list[int], Any, float]:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": dict(parameters)} if parameters else None
        sampling = SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True, extra_args=extra)
        (answer,) = self.llm.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)
        return list(answer.outputs[0].token_ids), answer.kv_transfer_params, 0.0

    def counts(self) -> dict[str, int]:
        return dict(self.llm.collective_rpc(_counts)[0])

    def is_empty(self) -> bool:
        return bool(self.llm.reset_prefix_cache())


def _counts(worker: Any) -> dict[str, int]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    return {**connector.counts(), "groups": len(connector._groups), "pid": os.getpid()}


def save_model(folder: Path, **options: Any) -> str:
    """A model whose tokens depend on all of its prompt."""
    path = save_config(folder, **options)
    Trainer(path).model.save_pretrained(path)
    return path


def save_hybrid_model(folder: Path) -> str:
    """A model with layers of a window of two blocks, and layers that see the whole prompt."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=320,
        max_position_embeddings=512,
        dtype="float32",
    )
    torch.manual_seed(1)
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    model.save_pretrained(folder)
    return str(folder)


#: What a proxy adds to a request for the prefill engine.
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
