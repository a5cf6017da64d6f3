"""The tutorial's program, typed from the page, runs after each step as the page says."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import ray

from tests import tutorial
from tests.programs import run_program
from tests.ray.heads import head

STEPS = tutorial.steps()


#: What the last step passes to ``ray.init``. Actors start as forks without it, which takes a tenth.
ENVIRONMENT = ", runtime_env=rtr.runtime_env()"


def type_step(number: int, folder: Path, leave_out: str = "") -> None:
    program = STEPS[number - 1].program
    assert leave_out in program
    (folder / "train.py").write_text(program.replace(leave_out, ""), encoding="utf-8")
    shutil.copy(tutorial.FILES / "pole.py", folder)


def run(folder: Path, *options: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(tutorial.ROOT), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    ran = run_program("train.py", *options, cwd=folder, env=env)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_the_program_goes_on_from_a_checkpoint_though_a_player_is_killed(tmp_path: Path) -> None:
    """The first run makes the checkpoint; the second goes on from it, with every option."""
    type_step(7, tmp_path, ENVIRONMENT)
    assert "\nupdate 10: the pole stays up for " in run(tmp_path, "--updates", "10", "--goal", "0")
    out = run(tmp_path, "--updates", "10", "--kill-at", "12", "--trace", "trace.json", "--goal", "20")
    assert out.startswith("10 updates are done\n") and "\nupdate 20: " in out
    assert re.search(r"^player_0: lost .*\n(?:.*\n)*player_0: back", out, re.MULTILINE)
    assert out.endswith("\n2 players on 1 node(s): the goal of 20 steps is reached\n")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("number", range(1, 7))
def test_a_step_learns(number: int, tmp_path: Path) -> None:
    type_step(number, tmp_path)
    (options,) = STEPS[number - 1].runs
    steps = [int(found) for found in re.findall(r"stays up for (\d+) steps", run(tmp_path, *options))]
    assert len(steps) in (6, 12) and steps[-1] > 2 * steps[0]


@pytest.mark.slow
def test_the_last_step_runs_as_a_submitted_job(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="jobs need ray[default]: pip install '.[jobs]' in a checkout")
    type_step(7, tmp_path)
    (submit,) = re.findall(r"^ray (job submit .*)$", tutorial.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    words = submit.replace("--working-dir .", f"--working-dir {tmp_path}").split()
    words = [str(tmp_path / "job.pt") if word == "/tmp/job.pt" else word for word in words]
    with head() as started:
        ran = started.run(
            str(Path(sys.executable).parent / "ray"), *words[:2], "--address", started.address, *words[2:]
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "the goal of 60 steps is reached" in ran.stdout and "succeeded" in ran.stdout
    assert (tmp_path / "job.pt").is_file()
