"""The post-training example over NCCL: on four GPUs, or with a trainer and a generator on each of two."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,  # to import it takes a second of every test run
    reason="the example needs transformers: pip install '.[llm]'",
)

ROOT = Path(__file__).parents[2]


@pytest.mark.gpu(2)
def test_the_reward_rises_on_gpus() -> None:
    gpus = "4" if torch.cuda.device_count() >= 4 else "2"
    command = [sys.executable, str(ROOT / "examples" / "rl_post_training.py"), "--quick", "--gpus", gpus]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    print(ran.stdout)
    assert ran.stdout.splitlines()[-1].startswith("checked: the reward rose from ")
