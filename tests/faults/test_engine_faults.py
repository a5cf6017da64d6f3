"""Trainers, engines and their workers are killed, and nobody makes anything anew; see ``engine_faults``."""

from __future__ import annotations

import pytest

from tests.faults.engine_faults import FORMS, run


def check(form: str, count: int, seed: int) -> None:
    report = run(form, count, seed)
    assert report.violations == [], report
    assert sum(report.kills.values()) == count and report.generated >= count


#: Fewer kills where an engine starts processes.
COUNTS = {"vllm in its actor": 6, "verl": 6, "sglang": 2}


@pytest.mark.parametrize(("form", "count"), [(form, COUNTS.get(form, 3)) for form in FORMS])
def test_weights_go_on_after_kills(cluster: None, form: str, count: int) -> None:
    check(form, count, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", FORMS)
def test_weights_go_on_after_many_kills(cluster: None, form: str) -> None:
    check(form, 200, 4)
