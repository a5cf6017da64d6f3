"""The post-training example: the reward rises, and a generator that was killed rejoins with the newest version."""

from __future__ import annotations

import importlib.util

import pytest

from examples import rl_post_training


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,  # to import it takes a second of every test run
    reason="the example needs transformers: pip install '.[llm]'",
)
@pytest.mark.slow  # each of five processes imports transformers
@pytest.mark.usefixtures("cluster")
def test_the_reward_rises_though_a_generator_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    result = rl_post_training.main(["--quick"])
    lines = capsys.readouterr().out.splitlines()
    rewards = [step.reward for step in result.steps]
    assert len(rewards) == 12 and sum(rewards[-3:]) > 2 * sum(rewards[:3])
    assert [step.version for step in result.steps] == list(range(2, 14))
    survivor, restarted = result.versions
    # The survivor pulls once more in the new process group, so it may use one version twice.
    assert survivor == sorted(survivor) and set(restarted) <= set(survivor)
    assert len(set(restarted)) == len(restarted) and restarted[0] > survivor[0] == 1
    changes = [line.strip() for line in lines if line.startswith(" ")]
    assert changes == ["generator_1: lost", "generator_1: back"]
    assert lines[-1].startswith("checked: the reward rose from ")
    assert lines[-1].endswith(f"generator_1 rejoined with version {restarted[0]}")
