"""The documentation as a site: what ``mkdocs.yml`` names is there, and what is there is named.

``make docs`` builds it and is strict about links; these need none of its tools.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import runpy
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
import yaml

import raytorchrpc as rtr
from raytorchrpc.calls.metrics import METRICS
from raytorchrpc.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.glob("**/*.md"))

#: Of a block of code, or of captured output.
COLUMNS = 86
HOOKS = runpy.run_path(str(DOCS / "hooks.py"))

_SHOWN = re.compile(r"^<!-- begin api raytorchrpc\.(?P<name>\w+)(?: \{.*\})? -->$", re.MULTILINE)


def named(entry: Any) -> Iterator[str]:
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from named(part)


(MAINTAINERS,) = (part for part in SITE["nav"] if "Maintainers" in part)
FOR_USERS = set(PAGES) - set(named(MAINTAINERS))


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_what_is_made_in_a_page_is_what_the_code_says(page: str) -> None:
    assert text_of(page) == HOOKS["whole"](DOCS / page), "run `python docs/hooks.py`"


@pytest.mark.parametrize("page", [ROOT / "README.md", *(DOCS / page for page in PAGES)], ids=lambda page: page.name)
def test_printed_lines_fit(page: Path) -> None:
    """Into the column of a page."""
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^( *)```.*\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    assert not [line for _, fence in fences for line in fence.splitlines() if len(line) > COLUMNS]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_holes_where_nobody_builds_it(page: str) -> None:
    """On a forge; the tests of promises stand in their own file, which the page names."""
    comments = set(re.findall(r"<!--.*?-->", text_of(page), re.DOTALL))
    assert {comment.split()[1] for comment in comments} <= {"begin", "end", "run", "Written", "promises"}
    assert not re.search(r"^::: ", text_of(page), re.MULTILINE)


def test_every_page_is_in_the_navigation() -> None:
    assert sorted(named(SITE["nav"])) == PAGES


def titles(entry: Any) -> Iterator[str]:
    """The entries of a part of the navigation, and of the parts in it."""
    for part in entry if isinstance(entry, list) else ():
        for title, below in part.items():
            yield title
            yield from titles(below)


def test_no_two_entries_of_the_navigation_have_one_title() -> None:
    found = sorted(titles(SITE["nav"]))
    assert found == sorted(set(found))


def test_the_page_on_settings_has_words_for_each() -> None:
    assert "begin api raytorchrpc.GroupConfig" in text_of("reference/settings.md")
    (defined,) = ast.parse(inspect.getsource(rtr.GroupConfig)).body
    assert isinstance(defined, ast.ClassDef)
    said = [
        field.target.id
        for field, text in itertools.pairwise(defined.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
    ]
    assert said == [field.name for field in fields(rtr.GroupConfig)]


def test_every_example_has_a_card_with_its_guide() -> None:
    page = text_of("examples.md")
    there = {path.stem for path in (ROOT / "examples").glob("[!._]*")} - {"README"}
    assert set(re.findall(r"^- \*\*(\w+)\*\*$", page, re.MULTILINE)) == there
    guides = re.findall(r" Guide: \[[^]]+\]\(([^)#]+)", page)
    assert len(guides) == len(there) and set(guides) <= set(PAGES)


def test_every_public_name_is_in_the_reference() -> None:
    shown = [name for page in PAGES if page.startswith("reference/") for name in _SHOWN.findall(text_of(page))]
    assert sorted(shown) == sorted(rtr.__all__)
    assert set(dir(rtr)) == {*rtr.__all__, "errors", "__version__"}, "what completion in an editor or a shell offers"
    assert all(hasattr(rtr, name) for name in dir(rtr))


def options(command: Any) -> Iterator[str]:
    """The options of a command and of those below it."""
    for each in getattr(command, "commands", {}).values():
        yield from options(each)
        yield from (option.opts[0] for option in each.params if option.param_type_name == "option")


def test_the_page_on_the_command_line_lists_every_command_and_option() -> None:
    page = text_of("reference/cli.md")
    assert all(f"## raytorchrpc {name}\n" in page for name in ("top", "examples copy", "manifest rayjob"))
    assert "| `--strict` | Count warnings as problems. |  |" in page
    assert "| `--gpus N` | GPUs per worker. | `0` |" in page
    assert sorted(re.findall(r"^\| `(--[\w-]+)", page, re.MULTILINE)) == sorted(options(typer.main.get_command(app)))


def test_the_page_on_monitoring_lists_every_series_with_its_labels() -> None:
    table = re.findall(r"^\| `ray_raytorchrpc_.*$", text_of("seeing.md"), re.MULTILINE)
    assert len(table) == len(METRICS)
    failures = "calls that failed, by type of error"
    assert f"| `ray_raytorchrpc_failures_total` | `lane`, `method`*, `error` | {failures} |" in table
    assert "| `ray_raytorchrpc_call_seconds_bucket_total`* | `lane`, `method`*, `le` |" in "\n".join(table)
    assert "| `ray_raytorchrpc_peers_away` | - | peers that the member cannot call |" in table


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_its_title(page: str) -> None:
    text = re.sub(r"^<!--.*?-->\s*", "", text_of(page), flags=re.DOTALL)
    assert text.startswith("# ")
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"^# ", outside, re.MULTILINE)) == 1, "one title, or the menu of the page is wrong"


@pytest.mark.parametrize(
    "words", ["deadlock", "debug", "notebook", "restart+actor", "hangs", "slow", "OOM", "NCCL+error", "memory"]
)
def test_a_search_for_a_symptom_leads_to_a_heading(words: str) -> None:
    """The search ranks headings first; it leaves out the pages for maintainers."""
    headings = [line for page in FOR_USERS for line in re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)]
    assert any(all(word.lower() in line.lower() for word in words.split("+")) for line in headings)


def test_readme_and_quickstart_show_one_program() -> None:
    pages = (text.read_text(encoding="utf-8") for text in (ROOT / "README.md", DOCS / "quickstart.md"))
    readme, quickstart = (re.findall(r"^```python\n.*?^```$", text, re.MULTILINE | re.DOTALL) for text in pages)
    assert readme == quickstart and len(readme) == 1


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "index.md"], ids=lambda page: page.name)
def test_figures_of_the_first_pages_are_those_of_the_measurements(page: Path) -> None:
    (sentence,) = re.findall(
        r"^40 MB on one host.*?(?=\n\n)", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    figures = re.findall(r"([\d.]+) ms", sentence)
    measured = re.findall(r"[\d.,]+", text_of("internals/measurements.md"))
    assert figures and set(figures) <= set(measured)


def words(page: str) -> int:
    """Split at white space; without comments and what is made of the code."""
    return len(re.sub(r"<!-- begin .*?<!-- end -->|<!--.*?-->", "", text_of(page), flags=re.DOTALL).split())


def test_pages_stay_short() -> None:
    assert sum(map(words, FOR_USERS)) <= 30_000
    assert sum(map(words, set(PAGES) - FOR_USERS)) <= 12_000


def test_nothing_is_fetched_by_who_reads_it() -> None:
    assert SITE["theme"]["font"] is False
    assert "extra_javascript" not in SITE
    # The offline plugin loads a script from elsewhere unless one with this name is given.
    assert [Path(script).stem for script in SITE["extra"]["polyfills"]] == ["iframe-worker"]
    for file in (*SITE["extra"]["polyfills"], *SITE["extra_css"]):
        assert (DOCS / file).is_file()
        assert "http" not in text_of(file)
    assert "analytics" not in SITE["extra"]
    for page in PAGES:
        # Material draws such diagrams with a script that it loads from elsewhere.
        assert "```mermaid" not in text_of(page), page


@pytest.mark.parametrize("picture", sorted((DOCS / "assets").glob("*.svg")), ids=lambda picture: str(picture.name))
def test_a_picture_has_words_for_it_and_the_colours_of_the_page(picture: Path) -> None:
    """On a light page and on a dark one, for who sees it and who does not, without anything from elsewhere."""
    root = ElementTree.parse(picture).getroot()
    tags = {each.tag.partition("}")[2]: each for each in root}
    assert all((tags[name].text or "").strip() for name in ("title", "desc"))
    text = picture.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:href|src)=["'](?!#)|url\((?!#)|@import""", text)
    if picture.name == "logo.svg":  # it stands on the bar above the page, which has one colour
        return
    assert root.get("role") == "img" and root.get("fill") == "currentColor"
    assert set(root.get("aria-labelledby", "").split()) == {tags["title"].get("id"), tags["desc"].get("id")}
    assert "prefers-color-scheme: dark" in text
    width, height = (float(number) for number in root.get("viewBox", "").split()[2:])
    for shape in root.iter("{http://www.w3.org/2000/svg}rect"):
        covers = float(shape.get("width", 0)) >= width and float(shape.get("height", 0)) >= height
        assert not covers or shape.get("fill") == "none", "a background that is there on every page"
    assert not re.search(r"#fff(fff)?\b", text), "white is invisible on a light page"
