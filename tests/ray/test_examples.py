"""The examples run as a user would run them: as scripts, in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def pipeline_autograd(*options: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "examples" / "pipeline_autograd.py"), "--json", *options]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    figures: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return figures


def test_pipeline_gradients_equal_those_of_one_process() -> None:
    figures = pipeline_autograd("--rounds", "1", "--repeats", "1")
    assert figures["gradients_match"]


@pytest.mark.gpu(2)
def test_pipeline_between_two_gpus_is_four_times_faster_than_staged() -> None:
    figures = pipeline_autograd("--rounds", "10", "--repeats", "5")
    assert figures["gpu"] and figures["gradients_match"]
    assert figures["device_map"] == {"0": 0}
    assert figures["ratio"] >= 4, figures
