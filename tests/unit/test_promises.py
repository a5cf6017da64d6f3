"""``docs/promises.yml`` names the tests of each promise of the pages, or says that there is none; the tests exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytorchrpc.group import supervisor
from raytorchrpc.patterns import handle
from raytorchrpc.patterns.queues import items, services
from raytorchrpc.patterns.weights import published, source_pull
from raytorchrpc.process import tcp

ROOT = Path(__file__).parents[2]
PAGES = ("failure-model.md", "objectrefs.md", "queues.md", "security.md", "weights.md")
_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
#: By page and part: each promise with its tests, or "none".
PROMISES: dict[str, dict[str, list[dict[str, Any]]]] = yaml.safe_load(
    (ROOT / "docs" / "promises.yml").read_text(encoding="utf-8")
)


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def shown_by(page: str) -> Iterator[str]:
    for entries in PROMISES.get(page, {}).values():
        for entry in entries:
            yield from () if entry["tests"] == "none" else entry["tests"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_shows_its_promises(page: str) -> None:
    found = [entry for entries in PROMISES[page].values() for entry in entries]
    assert len(found) > 15
    for entry in found:
        assert set(entry) == {"promise", "tests"} and entry["promise"], entry
        assert entry["tests"], f"neither a test nor 'none': {entry['promise']}"


@pytest.mark.parametrize("page", sorted(str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")))
def test_the_tests_that_a_page_names_exist(page: str) -> None:
    named = [f"{file}::{test}" for file, test in _NAMED.findall(text_of(page))]
    for where in sorted({*named, *shown_by(page)}):
        file, _, test = where.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).exists() else ""
        called = rf"{test}\(" if test else "test_"  # a whole file, or one test
        assert re.search(rf"^ *(async )?def {called}", text, re.MULTILINE), f"{page} names {where}"


def test_promises_are_made_by_pages() -> None:
    assert all((ROOT / "docs" / page).is_file() for page in PROMISES)


def test_every_test_of_a_limit_is_in_the_table() -> None:
    file = "tests/ray/test_objectref_limits.py"
    tests = set(re.findall(r"^def (test_\w+)\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))
    assert tests == {test.partition("::")[2] for test in shown_by("objectrefs.md") if test.startswith(f"{file}::")}


@pytest.mark.parametrize(
    ("page", "number"),
    [
        ("queues.md", f"one message ({items.MESSAGE_BYTES >> 20} MiB, or one item)"),
        ("queues.md", f"up to a { {4: 'quarter'}[services.SHARED_PART] } of each producer's"),
        ("queues.md", f"cut off for more than about {tcp.SILENCE_S} s"),
        ("internals.md", f"at most {source_pull.MESSAGE_BYTES >> 20} MiB, or one tensor, in a message"),
        ("weights/semantics.md", f"raises `RpcTimeout` at most {handle.ANSWER_S} s after the timeout"),
        ("weights/semantics.md", f"{ {60.0: 'a minute'}[published.LINGER_S] } after the pull's timeout"),
        ("failure-model.md", f"it waits {supervisor.GAP_S} s for the hanging one"),
        ("failure-model.md", f"After about {tcp.SILENCE_S} s of silence the TCP connections are given up"),
    ],
)
def test_the_numbers_on_a_page_are_those_of_the_code(page: str, number: str) -> None:
    assert number in " ".join(text_of(page).split())
