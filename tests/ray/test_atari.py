"""The Atari example, run as a user would run it: it trains, reports, stops, and goes on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ale_py", reason="the Atari example needs ALE: pip install '.[atari]' in a checkout")
pytest.importorskip("gymnasium", reason="the Atari example needs gymnasium: pip install '.[atari]' in a checkout")

from examples.atari_dqn.network import Network
from examples.atari_dqn.player import Player
from examples.atari_dqn.replay import Rows
from examples.atari_dqn.train import main

ROOT = Path(__file__).parents[2]
#: Quick enough for a test: few steps before the first iteration, a network of nearly no arithmetic.
SHORT = ["--net", "tiny", "--warmup", "128", "--chunk", "32", "--capacity", "2000", "--sync", "5", "--report", "10"]


def command(out: Path, *options: str) -> list[str]:
    program = [sys.executable, "-m", "tests.ray.local_ray", "-m", "examples.atari_dqn"]
    return [*program, "--out", str(out), *SHORT, *options]


def train(out: Path, *options: str) -> str:
    ran = subprocess.run(command(out, *options), cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Error" not in ran.stderr, ran.stderr
    return ran.stdout


def log_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def iteration_of(out: Path) -> int:
    return int(torch.load(out / "checkpoint.pt", weights_only=True)["learner"]["iteration"])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "torchrpc", "nng", "ray"])
def test_it_trains(transport: str, tmp_path: Path) -> None:
    """In a Ray of its own."""
    printed = train(tmp_path, "--iterations", "30", "--transport", transport, "--collectors", "2")
    assert printed.splitlines()[-1] == f"DONE at iteration 30: {tmp_path}"
    log = log_of(tmp_path)
    assert [row["iteration"] for row in log] == [10, 20, 30]
    assert all(row["transport"] == transport and row["loss"] >= 0 and row["seconds"] > 0 for row in log)
    assert log[-1]["steps"] >= 128 + 30 * 4
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert iteration_of(tmp_path) == 30
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pt", "log.jsonl", "reward.png"]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "ray"])
def test_a_run_is_resumed_by_any_transport_and_where_collectors_remember(transport: str, tmp_path: Path) -> None:
    train(tmp_path, "--iterations", "20", "--replay", "collectors", "--transport", "nng")
    before = log_of(tmp_path)
    with open(tmp_path / "log.jsonl", "a") as file:  # as if killed in the middle of a later report
        file.write(json.dumps({**before[-1], "iteration": 25}) + '\n{"iteration": 3')
    printed = train(tmp_path, "--iterations", "40", "--resume", "--transport", transport)
    assert "iteration 30" in printed and "iteration 10 " not in printed
    after = log_of(tmp_path)
    assert after[:2] == before and [row["iteration"] for row in after] == [10, 20, 30, 40]
    assert after[2]["steps"] >= before[-1]["steps"] + 128
    assert iteration_of(tmp_path) == 40


@pytest.mark.slow
def test_the_same_seed_plays_the_same_game() -> None:
    def first(seed: int) -> Rows:
        torch.manual_seed(seed)
        player = Player("Pong", seed)
        policy = Network("tiny", player.actions)
        played = [player.play(policy, 20, epsilon)[0] for epsilon in (1.0, 0.3)]
        player.close()
        return Rows(*map(torch.cat, zip(*played, strict=True)))

    one, same, other = first(3), first(3), first(4)
    assert all(torch.equal(*columns) for columns in zip(one, same, strict=True))
    assert not torch.equal(one.actions, other.actions)
    assert one.ages.tolist() == list(range(40)) and len({frame.sum().item() for frame in one.frames}) > 5


@pytest.mark.slow
def test_an_episode_ends_with_a_frame_that_leads_nowhere() -> None:
    player = Player("Pong", 0)
    policy = Network("tiny", player.actions)
    seen, returns = player.play(policy, 1_100, 1.0)
    player.close()
    (begin,) = (seen.ages[1:] == 0).nonzero()[:1, 0].tolist()  # the row before the next episode's first
    assert returns[0] == seen.rewards[:begin].sum() == -21 or returns[0] > -21
    assert seen.ends.nonzero()[:1].item() == begin - 1
    assert seen.actions[begin] == 0 and seen.rewards[begin] == 0 and not seen.ends[begin]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--game", "Chess"], r"atari_dqn: game 'Chess' is unknown to ALE: .*\n"),
        (["--resume"], r"atari_dqn: there is no checkpoint to resume from: .*/checkpoint\.pt does not exist\n"),
    ],
)
def test_what_cannot_work_is_one_line(options: list[str], message: str, tmp_path: Path, capfd: Any) -> None:
    assert main(["--out", str(tmp_path), *options]) == 1
    assert re.fullmatch(message, capfd.readouterr().err)


def test_a_resumed_run_is_the_same_run(tmp_path: Path, capfd: Any) -> None:
    def refused(*options: str) -> str:
        assert main(["--out", str(tmp_path), "--resume", "--net", "tiny", *options]) == 1
        return str(capfd.readouterr().err)

    (tmp_path / "checkpoint.pt").write_bytes(b"something else")
    assert "is not a readable checkpoint" in refused()
    torch.save({"game": "Pong", "net": "tiny", "seed": 0, "learner": {"iteration": 7}}, tmp_path / "checkpoint.pt")
    assert "--seed was 0 in the run to resume" in refused("--seed", "1")
    assert "has 7 iterations already" in refused("--iterations", "7")
