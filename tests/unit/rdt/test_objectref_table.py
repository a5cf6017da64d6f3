"""The table of Ray's limits in ``docs/objectrefs.md``: each row names a test, and each test of a limit has a row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> list[str]:
    page = (ROOT / "docs" / "objectrefs.md").read_text(encoding="utf-8")
    table = page.partition("| Ray says | holds? | shown by |")[2]
    lines = (line for line in table.splitlines() if line.startswith("|"))
    return [line for line in lines if not line.startswith("|---")]


def in_file(file: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split("|")[1].strip()[:40] or "(continued)")
def test_a_row_names_a_test_that_exists(row: str) -> None:
    named = _NAMED.findall(row.split("|")[-2])
    assert named, f"no test is named in: {row}"
    for file, test in named:
        assert test in in_file(file), f"{file} has no {test}"


@pytest.mark.parametrize("file", ["tests/ray/test_objectref_limits.py", "tests/gpu/test_objectrefs_on_gpus.py"])
def test_every_test_of_a_limit_is_in_the_table(file: str) -> None:
    named = {test for row in rows() for where, test in _NAMED.findall(row) if where == file}
    assert in_file(file) == named
