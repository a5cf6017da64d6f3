"""The tutorial: one program that grows a little at a time, and stands complete among the examples."""

from __future__ import annotations

import pytest

from tests import tutorial

STEPS = tutorial.steps()
#: New lines that a step may have.
NEW_LINES = 45


def test_the_last_step_is_the_example() -> None:
    assert len(STEPS) == 7
    assert STEPS[-1].program == (tutorial.FILES / "train.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", range(1, 8))
def test_a_step_adds_few_lines_and_marks_them(number: int) -> None:
    step = STEPS[number - 1]
    compile(step.program, f"step {number}", "exec")
    assert 0 < len(step.new) <= NEW_LINES
    assert step.marked == (step.new if number > 1 else [])
