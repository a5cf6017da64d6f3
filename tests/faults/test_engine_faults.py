"""Trainers, engines and their workers are killed, and nobody makes anything anew; see ``engine_faults``."""

from __future__ import annotations

import pytest
import ray

from tests.faults.engine_fakes import Trainer, VerlManager, VerlWorker
from tests.faults.engine_faults import FORMS, actor, get, run


def check(form: str, count: int, seed: int, loud: bool = False) -> None:
    report = run(form, count, seed, loud)
    assert report.violations == [], report
    assert sum(report.kills.values()) == count and report.generated >= count


#: Fewer kills where an engine starts processes.
COUNTS = {"vllm in its actor": 6, "vllm with a loan": 4, "verl": 6, "torchrl": 4, "sglang": 2}
#: Left to the slow ones: they differ from others by what these have.
LONG = "vllm with a loan in a child", "vllm as a server", "trl with a loan"


@pytest.mark.parametrize(("form", "count"), [(form, COUNTS.get(form, 3)) for form in FORMS if form not in LONG])
def test_weights_go_on_after_kills(cluster: None, form: str, count: int) -> None:
    check(form, count, 3)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("form", FORMS)
def test_weights_go_on_after_many_kills(cluster: None, form: str, pytestconfig: pytest.Config) -> None:
    """``--kills 200 --seed 4``; with ``-s`` it prints each."""
    check(form, pytestconfig.getoption("kills"), pytestconfig.getoption("seed"), loud=True)


def test_trainers_and_rollouts_of_verl_are_added_to_a_group_of_the_program(cluster: None) -> None:
    other, *workers = actor(Trainer), *(actor(VerlWorker, name, group="mine") for name in ("trainer", "rollout"))
    manager = actor(VerlManager, workers[:1], workers[1])
    get(manager.form.remote("mine", other))
    assert get(manager.update.remote()) == get(workers[1].generate.remote())[0]
    assert get(manager.members.remote("mine")) == ["other", "trainer_0", "rollout_0"]
    for each in (manager, other, *workers):
        ray.kill(each)
