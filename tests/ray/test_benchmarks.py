"""Every benchmark of ``python -m benchmarks`` works, in its tiniest size; they share one Ray."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import _harness
from benchmarks.__main__ import ALL, NAMED, load

HOSTS = ("detection",)
"""They need several hosts with networks of their own."""
SCALE_PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
#: What the benchmark writes into the page.
_PLACE = re.compile(r"(<!-- [a-z ]+ -->).*?<!-- end -->", re.DOTALL)


@pytest.fixture(scope="module", autouse=True)
def _no_environment(cluster: None) -> Iterator[None]:
    _harness.environment, usual = {}, _harness.environment  # actors without start as forks, which takes a tenth
    yield
    _harness.environment = usual


@pytest.mark.parametrize("name", [*ALL, *sorted({*NAMED} - {*HOSTS, "scale"})])
def test_every_benchmark_prints_its_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        load(name)(lambda full, quick, tiny: tiny)
    except _harness.Skipped as reason:
        pytest.skip(str(reason))
    printed = capsys.readouterr().out
    assert "medians" in printed or "Held after the first calls" in printed
    assert "not measured" not in printed


def test_the_tables_of_the_page_about_scale_are_written_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "scale.md"
    page.write_text(before := SCALE_PAGE.read_text())
    load("scale")(lambda full, quick, tiny: tiny, markdown=str(page))
    assert "not measured" not in capsys.readouterr().out
    after = page.read_text()
    assert "| members | 4 |" in after and "| 20 members on 2 hosts |" in after
    assert _PLACE.sub(r"\1", after) == _PLACE.sub(r"\1", before)


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize("name", HOSTS)
def test_benchmarks_of_several_hosts_print_their_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    load(name)(lambda full, quick, tiny: tiny)
    assert "median (slowest)" in capsys.readouterr().out


def test_the_figure_of_the_pages_is_drawn_from_stored_results() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import figure
    from raytorchrpc.bench.results import read_run

    drawn = figure.draw(read_run(Path(figure.__file__).parent / "results" / "h200.json"))
    assert drawn.startswith("<svg") and "raytorchrpc 0.574 ms" in drawn, "with the description for who cannot see it"
