"""What is left of many calls: nothing. The same mix as ``python -m benchmarks soak``, in small."""

from __future__ import annotations

import pytest

from benchmarks import soak


@pytest.mark.slow
def test_five_thousand_calls_of_all_kinds_leave_nothing(cluster: None) -> None:
    _, complaints = soak.soak_calls(5_000, rounds=1)
    assert complaints == []
