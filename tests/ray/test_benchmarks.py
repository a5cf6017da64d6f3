"""Every benchmark of ``python -m benchmarks`` works, in its tiniest size; they share one Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import _harness, page
from benchmarks.__main__ import ALL, NAMED, load
from raytorchrpc.bench.results import read_result


@pytest.fixture(scope="module", autouse=True)
def _no_environment(cluster: None) -> Iterator[None]:
    _harness.environment, usual = {}, _harness.environment  # actors without start as forks, which takes a tenth
    yield
    _harness.environment = usual


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "protection" else pytest.mark.slow) for name in (*ALL, *NAMED)]
)
def test_every_benchmark_has_figures(name: str) -> None:
    try:
        figures = load(name)(lambda full, quick, tiny: tiny)
    except _harness.Unavailable as reason:
        pytest.skip(str(reason))
    measured = {(figure.case, figure.contestant) for figure in figures if figure.median is not None}
    assert measured, figures
    without = {(one.case, one.contestant): one.reason for one in figures if (one.case, one.contestant) not in measured}
    needs = ("is not installed", "only large tensors are compared with calls")
    assert all(any(need in (reason or "") for need in needs) for reason in without.values()), without


def test_the_figure_of_the_pages_is_drawn_from_stored_results() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import figure

    drawn = figure.draw(read_result(page.RESULTS / "links-h200.json"))
    assert drawn.startswith("<svg") and "raytorchrpc 0.574 ms" in drawn, "with the description for who cannot see it"
