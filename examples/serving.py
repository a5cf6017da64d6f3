"""Disaggregated serving: Ray Serve in front, prefill and decode in actors of their own, and a replica that is killed.

Prefill fills the key-value cache with all tokens of a prompt at once; decode writes the answer token by token. The
replica of Ray Serve that answers HTTP joins their group. It calls a decode actor, which gets the cache from a prefill
actor, directly and into its own memory, and streams its tokens. When a replica is lost, another pair goes on.

    python serving.py                                  # 24 requests, 8 at a time, one decode replica killed
    python serving.py --at-once 4 --kill prefill_0
    python serving.py --layers 24 --width 2048 --heads 16 --device cuda --gpus 1 --requests 200 --at-once 64

Needs the extra "serve". If an answer differs from that of a single process, the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import logging
import socket
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ray
import torch
from torch import Tensor, nn

import raytorchrpc as rtr

try:
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
except ImportError as error:
    sys.exit(f"serving: Ray Serve needs {error.name}: pip install '.[serve]' in a checkout")

VOCABULARY = 256


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    longest: int  # tokens of a prompt and its answer together
    device: str


class Transformer(nn.Module):
    """The same weights in every process, made here: nothing is loaded."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.set_num_threads(1)  # the actors share the machine
        torch.manual_seed(0)
        self.size, width = size, size.width
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(size.longest, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attend": nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width)),
                    "mix": nn.Linear(width, width),
                    "think": nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU()),
                    "conclude": nn.Linear(2 * width, width),
                }
            )
            for _ in range(size.layers)
        )
        self.head = nn.Linear(width, VOCABULARY)
        for layer in self.layers:
            nn.init.normal_(layer["attend"][1].weight, std=0.2)  # every answer depends on the whole prompt
        self.to(size.device)

    def make_cache(self, length: int) -> Tensor:
        """Keys and values of every layer: shape (layers, 2, heads, length, width of a head)."""
        size = self.size
        return torch.empty(size.layers, 2, size.heads, length, size.width // size.heads, device=size.device)

    @torch.inference_mode()
    def forward(self, tokens: list[int], cache: Tensor, start: int = 0) -> int:
        """Returns the most likely next token. ``cache`` holds the tokens before ``start``, and gains these."""
        count, end = len(tokens), start + len(tokens)
        x = self.tokens(torch.tensor(tokens, device=cache.device)) + self.positions.weight[start:end]
        visible = torch.ones(count, end, dtype=torch.bool, device=cache.device).tril(start)
        for layer, part in zip(self.layers, cache, strict=True):
            query, keys, values = layer["attend"](x).view(count, 3, self.size.heads, -1).permute(1, 2, 0, 3)
            part[:, :, start:end] = torch.stack([keys, values])
            mixed = nn.functional.scaled_dot_product_attention(query, *part[:, :, :end], attn_mask=visible)
            x = x + layer["mix"](mixed.transpose(0, 1).reshape(count, -1))
            x = x + layer["conclude"](layer["think"](x))
        return int(self.head(x[-1]).argmax())

    def answer(self, prompt: list[int], count: int) -> list[int]:
        """The answer of a single process."""
        cache, known = self.make_cache(len(prompt) + count), list(prompt)
        for start in (0, *range(len(prompt), len(prompt) + count - 1)):
            known.append(self(known[start:], cache, start))
        return known[len(prompt) :]


@ray.remote(max_restarts=-1)
class Prefill:
    def __init__(self, size: Size) -> None:
        self.model = Transformer(size)

    @rtr.method
    def read(self, tokens: list[int]) -> tuple[int, Tensor]:
        """Returns the next token, and the cache of all that came before it."""
        cache = self.model.make_cache(len(tokens))
        return self.model(tokens, cache), cache


@ray.remote(max_restarts=-1)
class Decode:
    def __init__(self, size: Size) -> None:
        self.model = Transformer(size)

    @rtr.method
    async def answer(self, prefill: str, tokens: list[int], count: int) -> AsyncIterator[int]:
        """Yields the next tokens. Other answers go on meanwhile: between two tokens, and while prefill reads."""
        cache = self.model.make_cache(len(tokens) + count)
        here = cache[:, :, :, : len(tokens)]  # the cache arrives in this memory
        token, _ = await rtr.rpc_async(prefill, into=[here]).read(tokens)
        yield token
        for start in range(len(tokens), len(tokens) + count - 1):
            token = self.model([token], cache, start)
            yield token


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
class Front:
    """Answers HTTP. A member of the group, so the tokens reach it directly."""

    async def __init__(self, group: str, prefills: list[str], decodes: list[str]) -> None:
        shifted = [decodes[shift:] + decodes[:shift] for shift in range(len(decodes))]
        self.pairs = [pair for each in shifted for pair in zip(prefills, each, strict=True)]  # neighbours share nobody
        self.turn = self.takeovers = 0
        await asyncio.to_thread(rtr.join, group, "front")

    async def __call__(self, request: Request) -> StreamingResponse:
        given = await request.json()
        return StreamingResponse(self.stream(given["prompt"], given["tokens"]), media_type="text/plain")

    async def stream(self, prompt: list[int], count: int) -> AsyncIterator[str]:
        known, turn = list(prompt), self.turn
        self.turn += 1
        for attempt in range(len(self.pairs)):
            prefill, decode = self.pairs[(turn + attempt) % len(self.pairs)]
            missing = len(prompt) + count - len(known)
            try:
                async for token in await rtr.rpc_async(decode).answer(prefill, known, missing):
                    known.append(token)
                    yield f"{token}\n"
                return
            except rtr.PeerLost:  # of the decode replica, or of the prefill replica that this one called
                self.takeovers += 1
                if len(known) == len(prompt) + count:  # lost after the last token
                    return
        raise RuntimeError("no pair of replicas answers")  # the stream breaks off

    def count_takeovers(self) -> int:
        return self.takeovers


class Client:
    """Sends requests over HTTP, and reads the tokens as they come."""

    def __init__(self, port: int) -> None:
        self.port, self.started, self.first_s = port, threading.Semaphore(0), list[float]()

    def request(self, prompt: list[int], count: int) -> list[int]:
        connection, answer = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60), list[int]()
        connection.request("POST", "/", json.dumps({"prompt": prompt, "tokens": count}))
        begun = time.perf_counter()
        for line in connection.getresponse():
            answer.append(int(line))
            if len(answer) == 1:
                self.first_s.append(time.perf_counter() - begun)
                self.started.release()
        if len(answer) < count:
            raise ConnectionError(f"an answer broke off after {len(answer)} tokens")
        return answer


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve a small transformer by separate prefill and decode actors.")
    for name, default in {"layers": 3, "width": 128, "heads": 4, "prompt": 200, "tokens": 24}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=8, help="requests in flight")
    parser.add_argument("--replicas", type=int, default=2, help="of prefill, and as many of decode")
    parser.add_argument("--kill", default="decode_0", help="the replica that is killed under load; 'none'")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each replica")
    parser.add_argument("--port", type=int, default=0, help="of Ray Serve; 0: a free one")
    given = parser.parse_args()
    if min(given.requests, given.at_once, given.tokens) < 1 or given.replicas < 2:
        parser.error("--requests, --at-once and --tokens must be at least 1, and --replicas at least 2")
    return given


def main() -> None:
    given = options()
    size = Size(given.layers, given.width, given.heads, given.prompt + given.tokens, given.device)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(VOCABULARY, (given.requests, given.prompt), generator=generator).tolist()
    ray.init(include_dashboard=False, logging_level="error")
    logging.getLogger("ray.serve").setLevel("ERROR")
    kinds: dict[str, Any] = {"prefill": Prefill, "decode": Decode}
    start = {kind: kinds[kind].options(num_cpus=0, num_gpus=given.gpus).remote for kind in kinds}
    names = {kind: [f"{kind}_{number}" for number in range(given.replicas)] for kind in kinds}
    actors = {name: start[kind](size) for kind in kinds for name in names[kind]}
    if given.kill not in (*actors, "none"):
        sys.exit(f"serving: --kill {given.kill}: there are {', '.join(actors)}, and none")
    with socket.create_server(("127.0.0.1", given.port)) as server:
        port = server.getsockname()[1]  # is free: Ray Serve takes no 0
    config = rtr.GroupConfig(joinable_by="cluster")  # the replica of Ray Serve joins by itself
    with rtr.init_group(actors, name="serving", config=config) as group:
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
        front = serve.run(Front.bind("serving", names["prefill"], names["decode"]))
        client, begun = Client(port), time.perf_counter()
        with ThreadPoolExecutor(given.at_once) as pool:
            answers = [pool.submit(client.request, prompt, given.tokens) for prompt in prompts]
            for _ in range(min(given.at_once, given.requests) // 2 + 1):
                client.started.acquire(timeout=60)
            if given.kill != "none":  # now that some answers have begun
                ray.kill(actors[given.kill], no_restart=False)
            received = [answer.result() for answer in answers]
        took, takeovers = time.perf_counter() - begun, front.count_takeovers.remote().result()
        group.wait_ready(60)
        caches = sum(row.bytes_in for row in group.stats() if row.caller.startswith("decode"))
        serve.shutdown()
    model, first_s = Transformer(size), statistics.median(client.first_s)
    if received != [model.answer(prompt, given.tokens) for prompt in prompts]:
        sys.exit("serving: an answer differs from that of a single process")
    if given.kill != "none" and not takeovers:
        sys.exit(f"serving: {given.kill} was killed, but no other replica took over")
    print(f"{given.requests * given.tokens / took:.0f} tokens/s, the first after {1e3 * first_s:.0f} ms (median)")
    print(f"{caches / 1e6:.1f} MB of caches handed over; {takeovers} times another replica took over")
    print(f"checked: {len(received)} answers of {given.tokens} tokens equal those of a single process")


if __name__ == "__main__":
    main()
