"""The steps of the tutorial: one program that grows a little at a time."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

FILES = Path(__file__).parents[2] / "examples" / "tutorial"
#: New lines that a step may have; blank ones do not count.
NEW_LINES = 40


def step(number: int) -> list[str]:
    return (FILES / f"step{number}.py").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("number", range(1, 9))
def test_a_step_adds_few_lines(number: int) -> None:
    before = step(number - 1) if number > 1 else []
    changes = difflib.unified_diff(before, step(number), n=0, lineterm="")
    new = [line for line in changes if line.startswith("+") and line[1:].strip() and not line.startswith("+++")]
    assert 0 < len(new) <= NEW_LINES
