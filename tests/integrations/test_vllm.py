"""vLLM generates with the weights that a trainer publishes; both are real, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray

import raytorchrpc as rtr
from tests.integrations.vllm_actors import Engine, Trainer, save_config


@contextmanager
def group_of(path: str, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A trainer that has published its weights, and an engine that knows the store."""
    trainer = ray.remote(Trainer).options(num_cpus=0).remote(path)
    engine = ray.remote(Engine).options(num_cpus=0).remote(path, **options)
    try:
        ray.get(engine.start_s.remote(), timeout=200)
        with rtr.init_group({"trainer": trainer, "engine": engine}):
            ray.get(trainer.open.remote())
            ray.get(trainer.step.remote())
            yield trainer, engine
    finally:
        ray.kill(engine)
        ray.kill(trainer)


def agree(trainer: Any, engine: Any) -> bool:
    """Whether both generate the same tokens."""
    ours, its = ray.get([trainer.greedy.remote(), engine.greedy.remote()])
    return bool(ours == its)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Writes the configuration of a small model; returns its path."""
    return lambda **options: save_config(tmp_path_factory.mktemp("llama"), **options)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_way_gives_the_published_model(llama: Callable[..., str], tied: bool) -> None:
    """On a CPU, vLLM packs linear layers, so they are brought layer by layer; tied embeddings are packed twice."""
    with group_of(llama(tie_word_embeddings=tied)) as (trainer, engine):
        assert not agree(trainer, engine), "the random weights of both are the same"
        for into, expected in (("auto", "layers"), ("layers", "layers"), ("load_weights", "load_weights")):
            ray.get(engine.connect.remote(into=into))
            for _ in range(2):
                version = ray.get(trainer.step.remote())
                ray.get(engine.update.remote(version))
                assert agree(trainer, engine), into
            (status,) = ray.get(engine.status.remote())
            assert (status.into, status.version) == (expected, version)
            assert status.why
