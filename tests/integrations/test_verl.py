"""Weights of trainers in the rollout workers of verl's own manager, brought by raytorchrpc."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
import torch
from ray.exceptions import RayActorError, RayError

import raytorchrpc as rtr

pytest.importorskip("verl", exc_type=ImportError)

from tests.integrations import verl_actors
from tests.integrations.verl_actors import (
    Replica,
    Trainers,
    config_of,
    manager_of,
    start_replicas,
    start_trainers,
)

# verl's own environment has another package of the name tests, which Ray's workers would look into.
ray.cloudpickle.register_pickle_by_value(verl_actors)
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("cluster")]
#: No call lasts longer, unless it says so.
get = partial(ray.get, timeout=120)


class Job(NamedTuple):
    """Two trainers of verl, two replicas, and its manager."""

    config: Any
    trainers: Trainers
    replicas: list[Replica]
    manager: Any

    def step(self) -> dict[str, torch.Tensor]:
        """A step of training; returns the model."""
        return ray.get([trainer.step.remote() for trainer in self.trainers.actors], timeout=60)[0]

    def own(self, replicas: list[Replica] | None = None) -> list[dict[str, torch.Tensor]]:
        chosen = self.replicas if replicas is None else replicas
        return ray.get([replica.workers[0].own.remote() for replica in chosen], timeout=60)


def make_job(folder: Path, **options: Any) -> Job:
    config = config_of(**options)
    trainers = start_trainers(config, str(folder / "trainers"))
    replicas = start_replicas(config, str(folder / "replicas"))
    return Job(config, trainers, replicas, manager_of(config, trainers, replicas))


def end_job(job: Job) -> None:
    for actor in [*job.trainers.actors, *(replica.workers[0] for replica in job.replicas)]:
        ray.kill(actor)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Parts of 1 MB, of a model of 0.8 MB in layers of 0.26 MB."""
    made = make_job(tmp_path)
    yield made
    end_job(made)


def assert_equal(found: list[dict[str, torch.Tensor]], wanted: dict[str, torch.Tensor]) -> None:
    for its in found:
        assert its.keys() == wanted.keys()
        assert all(torch.equal(its[name], wanted[name]) for name in wanted)


def test_rollouts_have_the_model_after_each_update(job: Job) -> None:
    for step in range(3):
        wanted = job.step()
        metrics = job.manager.update_weights(global_steps=step)
        assert_equal(job.own(), wanted)
        assert metrics["raytorchrpc/publish_s"] > 0


def test_the_model_comes_in_parts_of_which_each_trainer_publishes_a_share(tmp_path: Path) -> None:
    config = config_of(megabytes=1)
    trainers = start_trainers(config, str(tmp_path / "trainers"), layers=3, width=600)  # a layer is larger than a part
    replicas = start_replicas(config, str(tmp_path / "replicas"))
    made = Job(config, trainers, replicas, manager_of(config, trainers, replicas))
    try:
        wanted = made.step()
        whole = sum(tensor.nbytes for tensor in wanted.values())
        metrics = made.manager.update_weights(global_steps=1)
        assert_equal(made.own(), wanted)
        assert 0 < metrics["raytorchrpc/publish_bytes"] < 0.7 * whole
    finally:
        end_job(made)


def test_a_rollout_that_dies_in_an_update_leaves_the_next_ones_to_the_others(job: Job, tmp_path: Path) -> None:
    job.step()
    job.manager.update_weights(global_steps=1)
    dying, living = job.replicas
    get(dying.workers[0].die_in_next_update.remote())
    with pytest.raises(RayActorError):
        job.manager.update_weights(global_steps=2)
    job.manager.remove_replicas([dying])
    wanted = job.step()
    job.manager.update_weights(global_steps=3)
    assert_equal(job.own([living]), wanted)
    added = start_replicas(job.config, str(tmp_path / "added"), count=1)
    job.manager.add_replicas(added)
    wanted = job.step()
    job.manager.update_weights(global_steps=4)
    assert_equal(job.own([living, *added]), wanted)
    ray.kill(added[0].workers[0])


def test_an_update_whose_trainer_fails_leaves_the_next_one_to_work(job: Job) -> None:
    job.step()
    get([trainer.misbehave.remote(fails_after=3) for trainer in job.trainers.actors])
    with pytest.raises(RayError, match="out of memory, for instance"):
        job.manager.update_weights(global_steps=1)
    get([trainer.misbehave.remote() for trainer in job.trainers.actors])
    wanted = job.step()
    job.manager.update_weights(global_steps=2)
    assert_equal(job.own(), wanted)


def test_trainers_with_different_tensors_are_refused_and_the_remedy_works(job: Job, tmp_path: Path) -> None:
    job.step()
    get(job.trainers.actors[1].misbehave.remote(left_out="1.weight"))
    with pytest.raises(rtr.ConfigurationError, match="share=False"):
        job.manager.update_weights(global_steps=1)
    (tmp_path / "again").mkdir()
    again = make_job(tmp_path / "again", share=False)
    try:
        get(again.trainers.actors[1].misbehave.remote(left_out="1.weight"))
        wanted = again.step()
        again.manager.update_weights(global_steps=1)
        assert_equal(again.own(), wanted)
    finally:
        end_job(again)
