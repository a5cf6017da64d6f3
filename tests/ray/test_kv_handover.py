"""Engines without a model hand KV caches over, while they are killed and requests are aborted."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import ray

from tests.polling import wait_until
from tests.ray.conftest import Spawn
from tests.ray.kv_engines import BLOCKS, LONG, TOKENS, KVEngine

#: Requests at a time: all have room.
CLIENTS = 4


class Traffic:
    """Clients that have requests prefilled by one engine and decoded by another; a lost engine is asked again."""

    def __init__(self, prefills: list[Any], decodes: list[Any], aborts: bool = False) -> None:
        self.prefills, self.decodes, self.aborts = prefills, decodes, aborts
        self.outcomes, self.lock = Counter[str](), threading.Lock()
        self.stops = threading.Event()
        self.count = 0

    def request(self, seed: int) -> str:
        chance = random.Random(seed)
        tokens = chance.randint(2, (BLOCKS - 1) // CLIENTS * TOKENS)
        name, ends, how = f"r{seed}", "complete", "complete"
        if self.aborts:
            ends = chance.choice(["complete"] * 4 + ["aborted"])
            how = chance.choice(["complete"] * 4 + ["early", "cached"])
        while True:
            with suppress(ray.exceptions.RayActorError):
                parameters = ray.get(
                    chance.choice(self.prefills).prefill.remote(name, seed, tokens, ends), timeout=LONG
                )
                break
        while True:
            with suppress(ray.exceptions.RayActorError):
                call = chance.choice(self.decodes).decode.remote(name, seed, tokens, parameters, how)
                return str(ray.get(call, timeout=LONG))

    def client(self, most: int) -> None:
        while not self.stops.is_set():
            with self.lock:
                if self.count >= most:
                    return
                self.count += 1
                seed = self.count
            try:
                outcome = self.request(seed)
            except Exception as error:
                outcome = f"{type(error).__name__} {error}"[:300]
            with self.lock:
                self.outcomes[outcome] += 1

    def run(self, most: int = 1 << 60) -> list[threading.Thread]:
        threads = [threading.Thread(target=self.client, args=(most,), daemon=True) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        return threads


def engine(spawn: Spawn, *args: Any, **options: Any) -> Any:
    return spawn(KVEngine, *args, **{"max_concurrency": CLIENTS + 1, **options})


SIZES = [(2, 1), (1, 2), *(pytest.param(pair, marks=pytest.mark.slow) for pair in ((1, 1), (2, 2), (4, 1), (1, 4)))]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ranks_of_both_engines_may_differ(spawn: Spawn, sizes: tuple[int, int]) -> None:
    """Where there are more ranks than KV heads, several have the same one."""
    prefill, decode = (engine(spawn, f"sizes {sizes}", size) for size in sizes)
    for seed, tokens in enumerate((2, 5, 8, 9, 17, 40), 1):
        parameters = ray.get(prefill.prefill.remote(f"r{seed}", seed, tokens), timeout=LONG)
        assert ray.get(decode.decode.remote(f"r{seed}", seed, tokens, parameters), timeout=LONG) == "read"
    assert wait_until(lambda: ray.get([prefill.left.remote(), decode.left.remote()]) == [(0, 0), (0, 0)], LONG)


@pytest.mark.parametrize("requests", [200, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_blocks_are_free_again_at_both_ends(spawn: Spawn, requests: int) -> None:
    """Also those of requests that were aborted, before their prompt was read or instead, or found it in their cache."""
    prefill, decode = engine(spawn, "leaks"), engine(spawn, "leaks")
    traffic = Traffic([prefill], [decode], aborts=True)
    for thread in traffic.run(requests):
        thread.join(LONG * 60)
    assert sum(traffic.outcomes.values()) == requests
    assert traffic.outcomes.keys() == {"read", "computed", "aborted"}, traffic.outcomes
    assert traffic.outcomes["read"] > requests / 3
    assert wait_until(lambda: ray.get([prefill.left.remote(), decode.left.remote()]) == [(0, 0), (0, 0)], LONG)


@pytest.mark.parametrize("kills", [3, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_engines_that_are_killed(spawn: Spawn, kills: int) -> None:
    """Each request is answered, right; and engines that come back hand over again."""
    chance = random.Random(kills)
    prefills = [engine(spawn, "kills", 1, 10.0, max_restarts=-1) for _ in range(2)]
    decodes = [engine(spawn, "kills", 1, 10.0, max_restarts=-1) for _ in range(2)]
    traffic = Traffic(prefills, decodes)
    threads = traffic.run()
    for _ in range(kills):
        before = traffic.outcomes["read"]
        assert wait_until(lambda before=before: traffic.outcomes["read"] > before + 4, LONG), traffic.outcomes
        victim = chance.choice([*prefills, *decodes])
        with suppress(ray.exceptions.RayActorError, ProcessLookupError):
            os.kill(ray.get(victim.pid.remote(), timeout=LONG), signal.SIGKILL)
    before = traffic.outcomes["read"]
    assert wait_until(lambda: traffic.outcomes["read"] > before + 20, LONG), traffic.outcomes
    traffic.stops.set()
    for thread in threads:
        thread.join(LONG)
    assert traffic.outcomes.keys() <= {"read", "computed"}, traffic.outcomes
    alive = [*prefills, *decodes]
    assert wait_until(lambda: ray.get([each.left.remote() for each in alive]) == [(0, 0)] * 4, LONG)
    print(f"{kills} kills: {dict(traffic.outcomes)}")


@pytest.mark.slow
def test_a_group_whose_supervisor_dies_is_formed_again(spawn: Spawn) -> None:
    """All engines move to it by themselves; until then, prompts are computed."""
    prefill, decode = engine(spawn, "host"), engine(spawn, "host", 1, LONG, 1.0)
    seeds = itertools.count(1)

    def outcome(prefill: Any = prefill) -> str:
        seed = next(seeds)
        parameters = ray.get(prefill.prefill.remote(f"r{seed}", seed, 20), timeout=LONG)
        return str(ray.get(decode.decode.remote(f"r{seed}", seed, 20, parameters), timeout=LONG))

    assert outcome() == "read"
    ray.kill(ray.get_actor("host", namespace="raytorchrpc.kv"), no_restart=False)
    late = engine(spawn, "host")
    for each in (prefill, late):
        assert wait_until(lambda each=each: outcome(each) == "read", LONG)
