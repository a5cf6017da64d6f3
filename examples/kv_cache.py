"""Disaggregated prefill and decode: one actor reads the prompts, the other writes the
answers.

Prefill fills a transformer's key-value cache with all tokens of a prompt at once;
decode appends token by token. The two phases load a machine differently, so each has
its own actor, and a cache of blocks of 16 tokens. Prefill exposes its cache as a
region. Decode reads the blocks of a prompt out of it, into free blocks of its own,
while prefill reads the next prompt.

    python examples/kv_cache.py  # six prompts, about ten seconds
    python examples/kv_cache.py --prompts 2 --tokens 8  # the short form

The program compares each answer with that of a single process without blocks. If one
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
BLOCKS, TOKENS = 64, 16  # of a cache, and of a block


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

    def forward(self, x: Tensor, cache: Tensor, slots: Tensor, start: int) -> Tensor:
        end = start + len(x)
        projected = self.project(self.norms[0](x)).view(len(x), 3, HEADS, -1)
        query, *new = projected.permute(1, 2, 0, 3)
        cache[slots[start:end]] = torch.stack(new).permute(2, 0, 1, 3)
        keys, values = cache[slots[:end]].permute(1, 2, 0, 3)
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
    def forward(self, tokens: Any, cache: Cache, blocks: Any, start: int = 0) -> int:
        """Returns the most likely next token.

        The blocks hold the tokens before ``start`` and gain these.
        """
        firsts = torch.tensor(blocks)[:, None] * TOKENS
        slots = (firsts + torch.arange(TOKENS)).flatten()
        positions = self.positions.weight[start : start + len(tokens)]
        x = self.tokens(torch.tensor(tokens)) + positions
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x = block(x, layer.flatten(0, 1), slots, start)
        return int(self.head(x[-1]).argmax())


class Cache:
    """For each layer a tensor of blocks, and which of them are free."""

    def __init__(self) -> None:
        shape = BLOCKS, TOKENS, 2, HEADS, WIDTH // HEADS
        self.layers = [torch.zeros(shape) for _ in range(LAYERS)]
        self.free = list(range(BLOCKS))

    def take(self, tokens: int) -> list[int]:
        count = -(-tokens // TOKENS)
        taken, self.free = self.free[:count], self.free[count:]
        return taken


@ray.remote
class Prefill:
    def __init__(self) -> None:
        self.model, self.cache = Transformer(), Cache()
        self.leases: list[rtr.Lease] = []

    def expose(self) -> None:
        self.region = rtr.Region("cache", self.cache.layers)

    @rtr.method
    def read(self, prompt: list[int], reader: str) -> tuple[int, rtr.Lease]:
        """Returns the first token of the answer, and a lease on the blocks."""
        while len(self.cache.free) * TOKENS < len(prompt):
            lease = self.leases.pop(0)
            lease.wait()  # until decode has read these blocks, or is lost
            self.cache.free += lease.rows.tolist()
        blocks = self.cache.take(len(prompt))
        token = self.model(prompt, self.cache, blocks)
        self.leases.append(self.region.lease(blocks, timeout=60, reader=reader))
        return token, self.leases[-1]


@ray.remote
class Decode:
    def __init__(self) -> None:
        self.model, self.cache = Transformer(), Cache()

    def answer(self, prefill: Any, prompts: Any, tokens: int) -> list[list[int]]:
        me = rtr.current_member().name
        answers, pending = [], rtr.rpc_async(prefill).read(prompts[0], me)
        for number, prompt in enumerate(prompts):
            token, lease = pending.wait()
            blocks = self.cache.take(len(prompt) + tokens)
            there = blocks[: len(lease.rows)]
            into = self.cache.layers
            read = rtr.read(prefill, "cache", into=into, at=there, lease=lease)
            if number + 1 < len(prompts):
                pending = rtr.rpc_async(prefill).read(prompts[number + 1], me)
            answers.append([token])
            read.wait()
            for start in range(len(prompt), len(prompt) + tokens - 1):
                token = self.model([token], self.cache, blocks, start)
                answers[-1].append(token)
            self.cache.free += blocks
        return answers


def answer_without_cache(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """Returns the answer by processing the whole sequence again for each token."""
    known, blocks = list(prompt), list(range(BLOCKS))
    for _ in range(tokens):
        known.append(model(known, Cache(), blocks))
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
        ray.get(prefill.expose.remote())
        answers = ray.get(decode.answer.remote(prefill, prompts, options.tokens))
        print(group.stats())  # the blocks are in no message
    model = Transformer()
    for prompt, answer in zip(prompts, answers, strict=True):
        print(f"prompt of {len(prompt)} tokens: {answer[:5]}...")
        if answer_without_cache(model, prompt, options.tokens) != answer:
            sys.exit("kv_cache: this answer differs from that of a single process")
    print(f"checked: {len(prompts)} answers equal those of a single process")


if __name__ == "__main__":
    main()
