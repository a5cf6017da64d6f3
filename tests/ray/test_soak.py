"""What is left of many calls: nothing. The same mix as ``python -m benchmarks soak``, in small."""

from __future__ import annotations

import pytest

from benchmarks import soak


def come_to_nothing(calls: int, rounds: int) -> None:
    verdict = soak.soak(calls, rounds=rounds)
    assert verdict.calls >= 0.95 * calls
    assert (verdict.wrong, verdict.first_wrong) == (0, ())
    assert verdict.restless == ()
    assert verdict.grown == [], soak.table(verdict)


@pytest.mark.slow
def test_five_thousand_calls_of_all_kinds_leave_nothing(cluster: None) -> None:
    come_to_nothing(5_000, rounds=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_thousand_calls_of_all_kinds_leave_nothing(cluster: None) -> None:
    come_to_nothing(50_000, rounds=3)
