"""Disaggregated prefill and decode: one actor reads the prompts, the other writes the
answers.

Prefill fills a transformer's key-value cache with all tokens of a prompt at once;
decode appends token by token. The two phases load a machine differently, so each has
its own actor. The decode actor requests the cache of a prompt and receives it into
memory that it allocated at its start. While it writes one answer, prefill reads the
next prompt.

    python examples/kv_cache.py  # six prompts, about ten seconds
    python examples/kv_cache.py --prompts 2 --tokens 8  # the short form

The program compares each answer with that of a single process without a cache. If one
differs, the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import ray
import torch
from torch import Tensor, nn

import raytorchrpc as rtr

LAYERS, HEADS, WIDTH, VOCABULARY, LONGEST = 3, 4, 128, 256, 512


class Block(nn.Module):
    """Causal attention and a small network, for the positions from ``start`` on."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        wider, narrower = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.network = nn.Sequential(wider, nn.GELU(), narrower)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        # Makes every answer depend on the whole prompt.
        nn.init.normal_(self.project.weight, std=0.2)

    def forward(self, x: Tensor, cache: Tensor, start: int) -> Tensor:
        end = start + len(x)
        projected = self.project(self.norms[0](x)).view(len(x), 3, HEADS, -1)
        query, *new = projected.permute(1, 2, 0, 3)
        cache[:, :, start:end] = torch.stack(new)
        keys, values = cache[:, :, :end]
        visible = torch.ones(len(x), end, dtype=torch.bool).tril(start)
        attention = nn.functional.scaled_dot_product_attention
        mixed = attention(query, keys, values, attn_mask=visible)
        x = x + self.out(mixed.transpose(0, 1).reshape(len(x), WIDTH))
        return x + self.network(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same in every process
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    @torch.inference_mode()
    def forward(self, tokens: list[int], cache: Tensor, start: int = 0) -> int:
        """Returns the most likely next token.

        ``cache`` holds the tokens before ``start`` and gains these.
        """
        positions = self.positions.weight[start : start + len(tokens)]
        x = self.tokens(torch.tensor(tokens)) + positions
        for block, part in zip(self.blocks, cache, strict=True):
            x = block(x, part, start)
        return int(self.head(x[-1]).argmax())


def make_cache(length: int) -> Tensor:
    return torch.empty(LAYERS, 2, HEADS, length, WIDTH // HEADS)


@ray.remote
class Prefill:
    def __init__(self) -> None:
        self.model = Transformer()

    @rtr.method
    def read(self, prompt: list[int]) -> tuple[int, Tensor]:
        """Returns the first token of the answer, and the cache of the prompt."""
        cache = make_cache(len(prompt))
        return self.model(prompt, cache), cache


@ray.remote
class Decode:
    def __init__(self) -> None:
        self.model = Transformer()
        # One is in use while the other is filled.
        self.slots = make_cache(LONGEST), make_cache(LONGEST)

    def answer(self, prefill: Any, prompts: Any, tokens: int) -> list[list[int]]:
        def request(number: int) -> Any:
            buffer = self.slots[number % 2][:, :, :, : len(prompts[number])]
            return rtr.rpc_async(prefill, into=[buffer]).read(prompts[number])

        answers, pending = [], request(0)
        for number, prompt in enumerate(prompts):
            token, _ = pending.wait()  # fills the buffer with the cache
            if number + 1 < len(prompts):
                pending = request(number + 1)
            answers.append([token])
            for start in range(len(prompt), len(prompt) + tokens - 1):
                token = self.model([token], self.slots[number % 2], start)
                answers[-1].append(token)
        return answers


def answer_without_cache(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """Returns the answer by processing the whole sequence again for each token."""
    known = list(prompt)
    for _ in range(tokens):
        known.append(model(known, make_cache(len(known))))
    return known[len(prompt) :]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Hand a KV cache to a decode actor.")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=24, help="tokens per answer")
    options = parser.parse_args(arguments)
    if options.prompts < 1 or not 1 <= options.tokens <= LONGEST // 2:
        parser.error(f"--prompts must be at least 1, --tokens 1 to {LONGEST // 2}")

    seed = torch.Generator().manual_seed(1)
    lengths = torch.randint(100, LONGEST // 2, (options.prompts,), generator=seed)
    sizes = [(length,) for length in lengths.tolist()]
    drawn = (torch.randint(VOCABULARY, size, generator=seed) for size in sizes)
    prompts = [tokens.tolist() for tokens in drawn]
    ray.init(ignore_reinit_error=True, include_dashboard=False, logging_level="error")
    prefill, decode = Prefill.remote(), Decode.remote()
    with rtr.init_group({"prefill": prefill, "decode": decode}) as group:
        answers = ray.get(decode.answer.remote(prefill, prompts, options.tokens))
        print(group.stats())  # calls use the socket lane, caches shared memory
    model = Transformer()
    for prompt, answer in zip(prompts, answers, strict=True):
        print(f"prompt of {len(prompt)} tokens: {answer[:5]}...")
        if answer_without_cache(model, prompt, options.tokens) != answer:
            sys.exit("kv_cache: this answer differs from that of a single process")
    print(f"checked: {len(prompts)} answers equal those of a single process")


if __name__ == "__main__":
    main()
