"""``docs/security.md``: each row says which tests show it, or that none does; and the tests exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> list[str]:
    lines = (line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith("|---"))
    return [line for line in lines if not line.endswith("| shown by |")]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split("|")[1].strip()[:40])
def test_a_row_says_what_shows_it(row: str) -> None:
    shown = row.split("|")[-2].strip()
    assert shown == "none" or _NAMED.findall(shown), f"neither a test nor 'none': {row}"


@pytest.mark.parametrize(("file", "test"), sorted(set(_NAMED.findall(PAGE))))
def test_a_test_that_is_named_exists(file: str, test: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"^ *def {test}\(", text, re.MULTILINE), f"{file} has no {test}"


def test_the_listeners_are_told_of() -> None:
    assert len(rows()) > 15
