"""The pictures of terminals: what a terminal shows in the end, line by line, in the page's colours."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("rich", reason="the pictures are drawn with rich: pip install '.[cli]' in a checkout")

DOCS = Path(__file__).parents[2] / "docs"
CASTS: dict[str, Any] = runpy.run_path(str(DOCS / "casts.py"))


def lines_of(picture: str) -> list[list[str]]:
    root = ElementTree.fromstring(picture)
    return [[part.text or "" for part in line] for line in root.iter("{http://www.w3.org/2000/svg}text")]


def test_a_line_that_is_written_again_is_shown_once() -> None:
    written = "first\r\nprogress 10%\rprogress 20%\r\n\x1b[1A\x1b[2Kdone\r\n\x1b[?25hlast"
    assert CASTS["screen"](written) == ["first", "done", "last"]


def test_every_column_keeps_its_place_and_colours_follow_the_page() -> None:
    picture = CASTS["draw"]("top", "raytorchrpc top", "caller    calls\n\x1b[1;31ma < b\x1b[0m     1")
    assert lines_of(picture) == [["$ raytorchrpc top"], ["caller", "calls"], ["a < b", "1"]]
    root = ElementTree.fromstring(picture)
    at = [part.get("x") for part in root.iter("{http://www.w3.org/2000/svg}tspan")]
    assert at[2] == at[4], "a column that is not straight"
    assert 'style="fill: var(--rtr-strong, #b34700)" font-weight="600">a &lt; b<' in picture


def test_each_cast_is_there_and_on_a_page() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    for name in CASTS["SHOWN"]:
        assert len(lines_of((DOCS / "assets" / f"cast-{name}.svg").read_text(encoding="utf-8"))) > 5
        assert f"assets/cast-{name}.svg)" in pages
