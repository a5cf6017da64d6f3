"""vLLM's engines read each other's KV caches; both are real, on a CPU."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.integrations.vllm_kv_actors import (
    CONNECTOR,
    PREFILL,
    ActorEngine,
    KVEngine,
    save_hybrid_model,
    save_model,
)
from tests.polling import wait_until

#: No call lasts longer, unless it says so.
get = partial(ray.get, timeout=120)
BLOCK, COUNT = 32, 12
#: A prompt is prefilled in chunks, and not all requests have room at a time.
SMALL = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 30}


@contextmanager
def engines(path: str, *options: dict[str, Any]) -> Iterator[list[Any]]:
    made = [start(path, **each) for each in options]
    try:
        get([engine.start.remote() for engine in made], timeout=400)
        yield made
    finally:
        for engine in made:
            ray.kill(engine)


def start(path: str, kind: Any = KVEngine, **options: Any) -> Any:
    remote = ray.remote(kind).options(num_cpus=0, **({"max_concurrency": 100} if kind is KVEngine else {}))
    return remote.remote(path, **options)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def pair(cluster: None, path: str) -> Iterator[list[Any]]:
    """A prefill engine and a decode engine."""
    roles = ({**CONNECTOR, "kv_role": f"kv_{role}"} for role in ("producer", "consumer"))
    with engines(path, *({"kv": role, **SMALL} for role in roles)) as made:
        yield made


def prompt(seed: int, length: int) -> list[int]:
    return [random.Random(seed * 1000 + place).randrange(1, 300) for place in range(length)]


def handed_over(prefill: Any, decode: Any, tokens: list[int], count: int = COUNT) -> list[int]:
    """The tokens of two engines, as a proxy gets them."""
    _, parameters, _ = get(prefill.generate.remote(tokens, 1, PREFILL))
    assert parameters is not None
    return list(get(decode.generate.remote(tokens, count, parameters))[0])


def alone(engine: Any, tokens: list[int], count: int = COUNT) -> list[int]:
    return list(get(engine.generate.remote(tokens, count))[0])


def counts(engine: Any) -> dict[str, int]:
    return dict(get(engine.counts.remote()))


def test_tokens_are_those_of_one_engine(pair: list[Any]) -> None:
    """Also with prompts that end with a block, or have only one, or are prefilled in chunks."""
    prefill, decode = pair
    lengths, before = [2, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 3 * BLOCK - 1, 200], counts(decode)
    answers = []
    for seed, length in enumerate(lengths):
        answers.append(handed_over(prefill, decode, prompt(seed, length)))
        assert answers[-1] == alone(prefill, prompt(seed, length))
    assert len({tuple(answer) for answer in answers}) == len(answers), "they depend on the prompt"
    again = counts(decode)
    assert (again["read"] - before["read"], again["failed"] - before["failed"]) == (len(lengths), 0)
    assert all(wait_until(lambda engine=engine: get(engine.is_empty.remote()), 30) for engine in pair)


def test_a_prompt_that_decode_has_is_not_read(pair: list[Any]) -> None:
    prefill, decode = pair
    tokens = prompt(50, 2 * BLOCK + 1)
    first = handed_over(prefill, decode, tokens)
    before = counts(decode)["read"]
    assert handed_over(prefill, decode, tokens) == first
    assert counts(decode)["read"] == before
    assert wait_until(lambda: counts(prefill)["held"] == 0, 30), "prefill may free it at once"
    longer = [*tokens[:-1], *prompt(51, 70)]
    assert handed_over(prefill, decode, longer) == alone(prefill, longer), "its beginning is cached"


@pytest.mark.parametrize("requests", [60, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_blocks_of_aborted_and_preempted_requests_are_free_again(pair: list[Any], requests: int) -> None:
    """Neither engine has room for all requests at a time: they wait for each other's reads."""
    prefill, decode = pair
    before = counts(decode)

    def one(number: int) -> bool:
        chance, name = random.Random(number), f"{requests}-{number}"
        tokens = prompt(100 + number, chance.randint(2, 180))
        if chance.random() < 0.2:
            call = prefill.generate.remote(tokens, 1, PREFILL, name)
            get(prefill.abort.remote(name))
            parameters = get(call)[1]
        else:
            parameters = get(prefill.generate.remote(tokens, 1, PREFILL, name))[1]
            assert parameters is not None
        call = decode.generate.remote(tokens, 40, parameters, name)
        if is_aborted := chance.random() < 0.3:
            time.sleep(chance.random() * 0.1)
            get(decode.abort.remote(name))
        return get(call)[0] == alone(prefill, tokens, 40) or is_aborted

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(requests)))
    after = counts(decode)
    assert after["failed"] == before["failed"]
    assert after["read"] - before["read"] > requests / 3
    assert all(wait_until(lambda engine=engine: get(engine.is_empty.remote()), 30) for engine in pair)
    assert counts(prefill)["held"] == 0


def test_engines_in_their_actors(cluster: None, path: str) -> None:
    """They compute, and free blocks, only while somebody calls them."""
    with engines(path, {"kind": ActorEngine}, {"kind": ActorEngine}) as (prefill, decode):
        for seed, length in enumerate((BLOCK, 100)):
            tokens = prompt(20 + seed, length)
            assert handed_over(prefill, decode, tokens) == alone(prefill, tokens)
        assert (counts(decode)["read"], counts(decode)["failed"]) == (2, 0)
        assert counts(prefill)["held"] == 0
        assert get([prefill.is_empty.remote(), decode.is_empty.remote()]) == [True, True]


def kill(engine: Any) -> None:
    """Kill the worker of an engine, and its actor."""
    with suppress(ProcessLookupError):
        os.kill(counts(engine)["pid"], signal.SIGKILL)
    ray.kill(engine)


def test_a_prefill_engine_that_dies_and_one_that_comes_back(cluster: None, path: str) -> None:
    tokens = prompt(7, 100)
    with engines(path, {}, {}) as made:
        prefill, decode = made
        expected = alone(decode, tokens)
        _, old, _ = get(prefill.generate.remote(tokens, 1, PREFILL))
        assert get(decode.is_empty.remote())
        kill(prefill)
        assert get(decode.generate.remote(tokens, COUNT, old))[0] == expected
        assert (counts(decode)["read"], counts(decode)["failed"]) == (0, 1)
        made[0] = prefill = start(path)
        get(prefill.start.remote(), timeout=400)
        for seed in (8, 9):
            assert handed_over(prefill, decode, prompt(seed, 100)) == alone(prefill, prompt(seed, 100))
        assert counts(decode)["read"] == 2
        assert get(decode.is_empty.remote())
        assert get(decode.generate.remote(tokens, COUNT, old))[0] == expected, "blocks of the old life are refused"
        assert (counts(decode)["read"], counts(decode)["failed"]) == (2, 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [int(os.environ.get("KV_KILLS", "4"))])
def test_random_kills_of_either_engine(cluster: None, path: str, kills: int) -> None:
    """Requests run all the time. A client asks again when an engine is lost; no answer is wrong or missing."""
    chance, prompts = random.Random(kills), [prompt(500 + seed, 20 + 7 * seed) for seed in range(20)]
    stops, answers, events = threading.Event(), Counter[str](), Counter[str]()

    def note(engine: Any) -> int:
        """Count what an engine has done; returns its pid."""
        seen = counts(engine)
        events.update({"prompts read": seen["read"], "computed again": seen["failed"]})
        return seen["pid"]

    with engines(path, {}, {}) as made:
        expected = [alone(made[0], tokens) for tokens in prompts]

        def ask(place: int, *args: Any) -> Any:
            while True:
                try:
                    return get(made[place].generate.remote(*args))
                except ray.exceptions.GetTimeoutError:
                    raise
                except Exception:  # what vLLM raises then is of its own, and imports it here
                    events["asked again"] += 1
                    time.sleep(0.2)

        def client(seed: int) -> None:
            own = random.Random(seed)
            while not stops.is_set():
                number = own.randrange(len(prompts))
                parameters = ask(0, prompts[number], 1, PREFILL)[1]
                right = ask(1, prompts[number], COUNT, parameters)[0] == expected[number]
                answers["right" if right else "wrong"] += 1

        with ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(client, seed) for seed in range(4)]
            try:
                for _ in range(kills):
                    before = answers["right"]
                    assert wait_until(lambda before=before: answers["right"] > before + 20, 120)
                    place = chance.randrange(2)
                    os.kill(note(made[place]), signal.SIGKILL)
                    again = start(path)
                    get(again.start.remote(), timeout=400)
                    made[place], lost = again, made[place]
                    ray.kill(lost)
                    print(f"{answers.total()} answers: {dict(answers)}; {dict(events)}", flush=True)
                get(made[1].is_empty.remote())
                before, read = answers["right"], counts(made[1])["read"]
                assert wait_until(lambda: answers["right"] > before + 40, 120), answers
                assert counts(made[1])["read"] > read, "the last ones read each other again"
            finally:
                stops.set()
            for each in clients:
                each.result(120)
            for engine in made:
                note(engine)
    print(f"{kills} kills of real engines: {dict(answers)}; {dict(events)}")
    assert set(answers) == {"right"}, answers


@pytest.mark.slow
def test_engines_of_other_tensor_parallel_sizes(cluster: None, path: str) -> None:
    """The model has two KV heads."""
    with engines(path, {"tensor_parallel_size": 2}, {}) as (two, one):
        for prefill, decode in ((two, one), (one, two)):
            for seed in (1, 2):
                tokens = prompt(seed, 100)
                assert handed_over(prefill, decode, tokens) == alone(prefill, tokens)
                assert get([prefill.is_empty.remote(), decode.is_empty.remote()])
            assert (counts(decode)["read"], counts(decode)["failed"]) == (2, 0)


@pytest.mark.slow
def test_layers_with_a_window(cluster: None, tmp_path: Path) -> None:
    """Of a long prompt, blocks that have left the window are nowhere, and the others are of two groups of layers."""
    with engines(save_hybrid_model(tmp_path), {"max_num_batched_tokens": 64}, {}) as (prefill, decode):
        answers = []
        for seed, length in enumerate((20, 2 * BLOCK, 3 * BLOCK + 1, 200)):
            tokens = prompt(30 + seed, length)
            answers.append(handed_over(prefill, decode, tokens))
            assert answers[-1] == alone(prefill, tokens)
        assert len({tuple(answer) for answer in answers}) == len(answers), "they depend on the prompt"
        assert (counts(decode)["read"], counts(decode)["failed"]) == (4, 0)
        assert counts(decode)["groups"] == 2, "through the hybrid memory allocator"
        assert all(wait_until(lambda engine=engine: get(engine.is_empty.remote()), 30) for engine in (prefill, decode))


def test_names_that_vllm_does_not_promise() -> None:
    """vLLM calls the interface of connectors experimental: this is all that the package overrides or reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.distributed.kv_transfer.kv_connector.v1 import base
        from vllm.v1.request import RequestStatus

        from raytorchrpc.integrations.vllm.kv import RayTorchRpcConnector
    assert {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"} <= set(RequestStatus.__members__)
    assert base.supports_hma(RayTorchRpcConnector)
    assert not RayTorchRpcConnector.__abstractmethods__
    own = {name for name, its in vars(RayTorchRpcConnector).items() if callable(its) and not name.startswith("_")}
    assert own - {"counts"} <= {*dir(base.KVConnectorBase_V1), *dir(base.SupportsHMA)}
    results = base.KVConnectorTransferResults({"sent"}, {"received"}, {"failed"})
    sets = results.finished_sending, results.finished_recving, results.failed_recving
    assert sets == ({"sent"}, {"received"}, {"failed"})
