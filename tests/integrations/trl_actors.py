"""TRL's trainers of a small Llama on a CPU; for the tests with the real TRL and vLLM, and for a benchmark."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate import PartialState
from datasets import Dataset
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_chat_template
from trl.experimental.async_distillation import (
    AsyncDistillationConfig,
    AsyncDistillationTrainer,
    async_distillation_trainer,
)
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

from tests.integrations.vllm_actors import Trainer, save_config


def save_model(folder: Path, **options: Any) -> str:
    """Write a Llama with random weights, and a tokenizer of words; returns the path."""
    PartialState(cpu=True)  # as every trainer begins, and TRL's client needs to log
    path = save_config(folder, **options)
    vocabulary = {f"w{number}": number for number in range(LlamaConfig.from_pretrained(path).vocab_size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2", unk_token="w0")
    tokenizer.chat_template = qwen3_chat_template  # one that TRL knows how to parse
    tokenizer.save_pretrained(folder)
    Trainer(path).model.save_pretrained(folder)
    return path


class _Attention:
    """In place of FlashAttention 3, which runs on GPUs alone and comes from a hub."""

    @staticmethod
    def flash_attn_varlen_func(
        query: Any, key: Any, value: Any, of_query: Any, of_key: Any, *_: Any, softmax_scale: float, **options: Any
    ) -> Any:
        """Each segment of the queries attends to its part of keys and values, whose last ones are its own."""
        parts = []
        for number in range(len(of_query) - 1):
            q = query[of_query[number] : of_query[number + 1]]
            k, v = (its[of_key[number] : of_key[number + 1]] for its in (key, value))
            mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
            heads = (its.transpose(0, 1)[None] for its in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=mask, scale=softmax_scale, enable_gqa=True
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)


def count_words(completions: list[Any], **_: Any) -> list[float]:
    """A reward: how many different words an answer has."""
    return [float(len(set(answer[-1]["content"].split()))) for answer in completions]


def prompts() -> Dataset:
    """Eight short ones."""
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"w{number + 3} w{number + 4}"}]} for number in range(8)]
    )


def make_trainer(path: str, url: str, folder: Path, transfer: Any, peft: Any = None, **options: Any) -> Any:
    """TRL's trainer, whose rollout workers ask the server at ``url``."""
    packing._flash_attn = _Attention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: 1e12  # asks for a GPU's properties
    torch.set_num_threads(1)
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "vllm_server_base_url": url,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 8,
        "token_budget": 128,
        "learning_rate": 0.05,
        "dtype": "float32",
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return AsyncGRPOTrainer(
        path,
        count_words,
        AsyncGRPOConfig(**{**given, **options}),
        prompts(),
        weight_transfer=transfer,
        peft_config=peft,
    )


def make_distillation_trainer(path: str, url: str, folder: Path, transfer: Any) -> Any:
    """TRL's trainer whose student generates with the server at ``url``, which scores for the teacher too."""
    async_distillation_trainer.get_peak_flops_per_device = lambda *_: 1e12
    torch.set_num_threads(1)
    args = AsyncDistillationConfig(
        output_dir=str(folder),
        vllm_server_base_url=url,
        teacher_server_urls={"teacher": url},
        model_init_kwargs={"attn_implementation": "sdpa"},  # the default is FlashAttention
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        max_completion_length=8,
        token_budget=128,
        learning_rate=0.05,
        dtype="float32",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return AsyncDistillationTrainer(path, args, prompts(), weight_transfer=transfer)


def make_stable_trainer(kind: str, path: str, url: str, folder: Path, peft: Any = None, **options: Any) -> Any:
    """TRL's trainer of this kind, such as GRPO, that generates with the server at ``url``."""
    torch.set_num_threads(1)
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 0.05,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return getattr(trl, f"{kind}Trainer")(
        path,
        count_words,
        getattr(trl, f"{kind}Config")(**{**given, **options}),
        prompts(),
        peft_config=peft,
    )


def greedy(trainer: Any, path: str) -> list[int]:
    """The most probable tokens of the trainer's model, computed without TRL's attention."""
    whole, model = Trainer.__new__(Trainer), trainer.model
    if isinstance(model, PeftModel):
        model = deepcopy(model).merge_and_unload()
    whole.model = LlamaForCausalLM(LlamaConfig.from_pretrained(path)).eval()
    whole.model.load_state_dict(model.state_dict())
    return whole.greedy()
