"""Pages of ``docs/`` that make promises name the tests of each promise, or say that there is none; the tests exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytorchrpc.calls import guests
from raytorchrpc.group import supervisor
from raytorchrpc.patterns import handle
from raytorchrpc.patterns.queues import items, services
from raytorchrpc.patterns.weights import model_pull, published, source_pull
from raytorchrpc.process import tcp

ROOT = Path(__file__).parents[2]
PAGES = ("failure-model.md", "objectrefs.md", "queues.md", "security.md", "weights.md")
_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def promises(page: str) -> Iterator[tuple[str, str]]:
    """Each promise with its tests: rows of tables with a column "shown by", items of lists inside ``<details>``."""
    shows = False
    for line in text_of(page).splitlines():
        if not line.startswith("|"):
            shows = False
        elif line.endswith("| shown by |"):
            shows = True
        elif shows and not line.startswith("|---"):
            yield line, line.split("|")[-2].strip()
    for section in re.findall(r"^<details.*?^</details>$", text_of(page), re.MULTILINE | re.DOTALL):
        for item in re.findall(r"^- .*\n(?:  .*\n)*", section, re.MULTILINE):
            promise, _, tests = item.partition("\n  Tests: ")
            yield promise, tests.strip().rstrip(".")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_shows_its_promises(page: str) -> None:
    found = list(promises(page))
    assert len(found) > 15
    for promise, tests in found:
        assert tests == "none" or _NAMED.search(tests), f"neither a test nor 'none': {promise}"


@pytest.mark.parametrize("page", sorted(str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")))
def test_the_tests_that_a_page_names_exist(page: str) -> None:
    named = sorted(set(_NAMED.findall(text_of(page))))
    assert named or page not in PAGES
    for file, test in named:
        text = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).exists() else ""
        assert re.search(rf"^ *(async )?def {test}\(", text, re.MULTILINE), f"{page} names {file}::{test}"


def test_every_test_of_a_limit_is_in_the_table() -> None:
    file = "tests/ray/test_objectref_limits.py"
    tests = set(re.findall(r"^def (test_\w+)\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))
    assert tests == {test for where, test in _NAMED.findall(text_of("objectrefs.md")) if where == file}


@pytest.mark.parametrize(
    ("page", "number"),
    [
        ("queues.md", f"one message ({items.MESSAGE_BYTES >> 20} MiB, or one item)"),
        ("queues.md", f"up to a { {4: 'quarter'}[services.SHARED_PART] } of each producer's"),
        ("queues.md", f"cut off for more than about {tcp.SILENCE_S} s"),
        ("weights.md", f"at most {source_pull.MESSAGE_BYTES >> 20} MiB, or one tensor, in a message"),
        ("weights.md", f"raises `RpcTimeout` at most {handle.ANSWER_S} s after the timeout"),
        ("weights.md", f"{ {60.0: 'a minute'}[published.LINGER_S] } after the pull's timeout"),
        ("weights.md", f"a publisher has not answered within {model_pull.PATIENCE_S} s"),
        ("failure-model.md", f"it waits {supervisor.GAP_S} s for the hanging one"),
        ("queues.md", f"waiting operations after {guests.LEASE_S:g} s"),
        ("failure-model.md", f"hears nothing from the driver for {guests.LEASE_S:g} s"),
        ("internals.md", f"a request every {guests.LEASE_S / 3:g} s"),
        ("failure-model.md", f"After about {tcp.SILENCE_S} s of silence the TCP connections are given up"),
    ],
)
def test_the_numbers_on_a_page_are_those_of_the_code(page: str, number: str) -> None:
    assert number in " ".join(text_of(page).split())
