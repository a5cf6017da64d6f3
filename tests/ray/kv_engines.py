"""Engines without a model: their cache has numbers of the prompt, and their scheduler is a loop. As actors."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from typing import Any

import torch

from raytorchrpc.integrations.kv_handover import Ledger, Settings, Worker, heads_of

BLOCKS, TOKENS, LAYERS, HEADS = 40, 4, 2, 2
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
LONG = 60.0


class Rank(Worker):
    """A worker, whose cache has this."""

    def __init__(self, rank: int, size: int, settings: Settings) -> None:
        self.heads = heads_of(rank, size, HEADS)
        self.layers = {f"layer {layer}": torch.zeros(BLOCKS, len(self.heads), TOKENS, 8) for layer in range(LAYERS)}
        super().__init__([self.layers], rank, size, HEADS, settings)

    def write(self, blocks: list[int], seed: int) -> None:
        for place, block in enumerate(blocks):
            for layer in self.layers.values():
                layer[block] = torch.tensor([value(seed, place, head) for head in self.heads])[:, None, None]

    def is_right(self, blocks: list[int], seed: int) -> bool:
        wanted = [[value(seed, place, head) for head in self.heads] for place in range(len(blocks))]
        expected = torch.tensor(wanted).view(len(blocks), len(self.heads), 1, 1).expand(-1, -1, TOKENS, 8)
        return all(torch.equal(layer[blocks], expected) for layer in self.layers.values())


def value(seed: int, place: int, head: int) -> float:
    return float(seed * 1000 + place * 10 + head)


class KVEngine:
    """``size`` ranks, all in this process."""

    def __init__(self, group: str, size: int = 1, hold_s: float = LONG, timeout: float = 20.0) -> None:
        settings = Settings(group, hold_s, timeout)
        self.ranks = [Rank(rank, size, settings) for rank in range(size)]
        self.ledger = Ledger("an engine", [TOKENS], HEADS)
        self.ledger.sources = [rank.source for rank in self.ranks]
        self.free = list(range(1, BLOCKS))
        self.changed = threading.Condition()
        self.blocks: dict[str, list[int]] = {}
        self.loading: dict[str, Future[bool]] = {}
        self.ended: dict[tuple[str, str], int] = {}
        self.failed = set[str]()
        threading.Thread(target=self.run_steps, daemon=True).start()

    def pid(self) -> int:
        return os.getpid()

    def run_steps(self) -> None:
        while True:
            with self.changed:
                step = self.ledger.next_step(is_idle=True)
            for rank in self.ranks:
                rank.begin(step)
            for rank in self.ranks:
                sent, received, failed = rank.results()
                self.failed |= failed
                self.report("sent", sent)
                self.report("received", received)
            with self.changed:
                if not self.blocks:
                    self.changed.wait(0.01)

    def report(self, way: str, requests: set[str]) -> None:
        """As vLLM does, act once all ranks have said so."""
        for request in requests:
            self.ended[way, request] = self.ended.get((way, request), 0) + 1
            if self.ended[way, request] == len(self.ranks):
                del self.ended[way, request]
                if way == "sent":
                    self.release(request)
                else:
                    done = self.loading.pop(request)
                    is_failed = request in self.failed
                    self.failed.discard(request)
                    done.set_result(not is_failed)

    def take(self, request: str, tokens: int) -> list[int]:
        count = -(-tokens // TOKENS)
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.free) >= count, LONG), f"{len(self.free)} blocks are free"
            taken, self.free = self.free[:count], self.free[count:]
            self.blocks[request] = taken
            return taken

    def release(self, request: str) -> None:
        with self.changed:
            self.free += self.blocks.pop(request)
            self.changed.notify_all()

    def prefill(self, request: str, seed: int, tokens: int, ends: str = "complete") -> dict[str, Any] | None:
        """Compute a prompt; what a proxy passes on."""
        blocks = self.take(request, tokens)
        for rank in self.ranks:
            rank.write(blocks, seed)
        with self.changed:
            parameters = self.ledger.finished(request, PREFILL, [blocks], tokens, is_complete=ends == "complete")
        if parameters is None:
            self.release(request)
        return parameters

    def decode(self, request: str, seed: int, tokens: int, parameters: Any, ends: str = "complete") -> str:
        """Whether the prompt was read or computed here, or read wrong."""
        with self.changed:
            self.ledger.arrive(request, parameters)
            if ends == "early":
                self.ledger.finished(request, parameters, [[]], 0, is_complete=False)
                return "aborted"
            count = self.ledger.matched(request, tokens, 0)
        blocks = self.take(request, tokens)
        done = Future[bool]()
        with self.changed:
            if ends == "cached":
                count = 0
            if count:
                self.loading[request] = done
            self.ledger.allocated(request, [blocks], count)
        is_read = bool(count) and done.result(LONG)
        read = blocks[: -(-(tokens - 1) // TOKENS)]
        outcome = "computed"
        if is_read:
            outcome = "read" if all(rank.is_right(read, seed) for rank in self.ranks) else "wrong"
        with self.changed:
            self.ledger.finished(request, parameters, [blocks], tokens, is_complete=True)
        for rank in self.ranks:
            rank.write(blocks, -seed)  # whoever reads on would see it
        self.release(request)
        return outcome

    def left(self) -> tuple[int, int]:
        """Blocks that are not free, and holds."""
        return BLOCKS - 1 - len(self.free), sum(len(rank.holds) for rank in self.ranks)
