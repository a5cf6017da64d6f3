"""Every benchmark of ``python -m benchmarks`` works, in its tiniest size; they share one Ray and most actors."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import _harness
from benchmarks.__main__ import ALL, NAMED

HOSTS = {"detection"}  # it needs several, with networks of their own


@pytest.fixture(scope="module", autouse=True)
def _shared_actors(cluster: None) -> Iterator[None]:
    yield
    _harness.end_idle()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.multihost, pytest.mark.slow] if name in HOSTS else []) for name in (*ALL, *NAMED)]
)
def test_every_benchmark_prints_its_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        import_module(f"benchmarks.{name}").main(lambda full, quick, tiny: tiny)
    except _harness.Skipped as reason:
        pytest.skip(str(reason))
    printed = capsys.readouterr().out
    assert "(medians)" in printed or "| --- |" in printed or "Held after" in printed
    assert "not measured" not in printed


def test_the_figure_of_the_readme_is_drawn_from_stored_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import figure
    from raytorchrpc.bench.results import read_run

    figure.draw(read_run(Path(figure.__file__).parent / "results" / "h200.json"), tmp_path / "f.svg")
    assert (tmp_path / "f.svg").read_text().lstrip().startswith("<?xml")
