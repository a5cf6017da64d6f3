"""What ``mkdocs build`` does beside its plugins (``mkdocs.yml`` names this file), and the parts of pages that are made.

- Pages below "Maintainers" stay out of the search, so that users find what is written for them.
- Pictures go into the page itself: their colours then follow the reader's choice of a dark or a light page.
- ``promises.md`` lists what ``promises.yml`` says.
- What stands between ``<!-- begin KIND ... -->`` and ``<!-- end -->`` is made of the code, so that pages are whole
  where nobody builds them, as on a forge. ``python docs/hooks.py`` writes it anew; a test compares it with the code.
  In the site, the signatures and docstrings that mkdocstrings shows take the place of the kind ``api``.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

DOCS = Path(__file__).parent
_EXAMPLE = re.compile(
    r"^\| \[?`(?P<file>[\w./]+)`[^|]* \| (?P<shows>[^|]+) \| (?P<command>`[^|]+`) \| (?P<seconds>[^|]+) \| "
    r"\[(?P<guide>[^]]+)\]\(\.\./docs/(?P<page>[^)]+)\) \|$",
    re.MULTILINE,
)
_MADE = re.compile(
    r"(?P<begin><!-- begin (?P<kind>\w+)(?: (?P<argument>[\w./-]+))?(?: (?P<options>\{[^\n]*\}))? -->\n)"
    r".*?(?P<end>^<!-- end -->$)",
    re.MULTILINE | re.DOTALL,
)
_SECTION = re.compile(r"^(Args|Attributes|Examples?|Raises|Returns|Yields):\n", re.MULTILINE)
_PICTURE = re.compile(r'<img alt="[^"]*" src="(?:\.\./)*assets/(?P<name>[\w-]+\.svg)" ?/?>')


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    if any(section.title == "Maintainers" for section in page.ancestors):
        page.meta["search"] = {"exclude": True}
    markdown = _MADE.sub(in_the_site, markdown)
    return markdown.replace("<!-- promises -->", "\n".join(promises(config["repo_url"])))


def in_the_site(match: re.Match[str]) -> str:
    if match["kind"] != "api":
        return match[0]
    options = f"\n    options: {match['options']}" if match["options"] else ""
    return f"::: {match['argument']}{options}"


def on_page_content(html: str, **_: Any) -> str:
    return _PICTURE.sub(lambda match: (DOCS / "assets" / match["name"]).read_text(encoding="utf-8").strip(), html)


def promises(repository: str | None) -> Iterator[str]:
    """Every promise as an item of a list, with its tests below it; they are links if the repository is known."""
    for page, parts in yaml.safe_load((DOCS / "promises.yml").read_text(encoding="utf-8")).items():
        title = (DOCS / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        yield f"## [{title}]({page})\n"
        for part, entries in parts.items():
            yield f"**{part}**\n" if part else ""
            for entry in entries:
                yield f"- {entry['promise']}" + (" (no test)" if entry["tests"] == "none" else "")
                for test in () if entry["tests"] == "none" else entry["tests"]:
                    file, shown = test.partition("::")[0], f"`{test}`"
                    yield f"    - [{shown}]({repository}/blob/main/{file})" if repository else f"    - {shown}"
            yield ""


def whole(page: Path) -> str:
    """The text of a page with what is made in it, as the code is now."""

    def made(match: re.Match[str]) -> str:
        lines = _KINDS[match["kind"]](*filter(None, [match["argument"]]))
        return f"{match['begin']}{chr(10).join(lines).strip()}\n{match['end']}"

    return _MADE.sub(made, page.read_text(encoding="utf-8"))


def file(path: str) -> Iterator[str]:
    """A file of the repository, as a block of code."""
    text = (DOCS.parent / path).read_text(encoding="utf-8").strip()
    name = Path(path)
    yield f'```{ {".py": "python"}.get(name.suffix, name.suffix[1:]) } title="{name.name}"\n{text}\n```'


def examples() -> Iterator[str]:
    """A card for each example of their README."""
    table = (DOCS.parent / "examples" / "README.md").read_text(encoding="utf-8")
    for row in _EXAMPLE.finditer(table):
        took = f" takes {row['seconds']} s" if row["seconds"][0].isdigit() else ""
        yield f"- **{row['file'].removesuffix('.py').strip('/')}**\n"
        yield f"    {row['shows']}\n"
        yield f"    {row['command']}{took}. Guide: [{row['guide']}]({row['page']})\n"


def api(name: str) -> Iterator[str]:
    """A public name: its docstring, its fields, and the first paragraph of what its methods say."""
    module, _, last = name.rpartition(".")
    thing = getattr(import_module(module), last)
    yield f"## {last}\n"
    yield from _docstring(thing)
    if not inspect.isclass(thing):
        return
    yield from _table("field | default | meaning", _fields(thing))
    ours = [kind for kind in reversed(thing.__mro__) if kind.__module__.partition(".")[0] == "raytorchrpc"]
    members = {member: value for kind in ours for member, value in vars(kind).items() if member[0] != "_"}
    described = ((member, _cell(_text(value).partition("\n\n")[0])) for member, value in members.items())
    yield from _table("member | meaning", (row for row in described if row[1]))


def _docstring(thing: Any) -> Iterator[str]:
    """Its paragraphs, and its sections of names (``Args:``) as tables; examples are left out."""
    text, *sections = _SECTION.split(_text(thing))
    yield text.replace("``", "`").strip() + "\n"
    for title, entries in zip(sections[::2], sections[1::2], strict=True):
        if title in ("Args", "Attributes", "Raises"):
            rows = re.findall(r"^    ([\w, *]+): (.*(?:\n     .*)*)", entries, re.MULTILINE)
            yield from _table(f"{title.lower()} | meaning", ((row, _cell(meaning)) for row, meaning in rows))
        elif title == "Returns":
            yield f"Returns: {_cell(entries)}\n"


def _table(head: str, rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    lines = [f"| `{name}` | {' | '.join(cells)} |" for name, *cells in rows]
    if lines:
        yield f"| {head} |\n|{'---|' * (head.count('|') + 1)}"
        yield from lines
        yield ""


def _text(thing: Any) -> str:
    """Its docstring, if it is one that can be called or got."""
    described = callable(thing) or isinstance(thing, (classmethod, property, staticmethod, ModuleType))
    return inspect.cleandoc(getattr(thing, "__doc__", None) or "") if described else ""


def _fields(kind: type) -> Iterator[tuple[str, str, str]]:
    """Fields of a class that have a docstring."""
    (defined,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    body: list[ast.stmt] = getattr(defined, "body", [])
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            default = f"`{ast.unparse(field.value)}`" if field.value else ""
            if not (name := ast.unparse(field.target)).startswith("_"):
                yield name, default, _cell(str(text.value.value))


def _cell(text: str) -> str:
    """Text for the cell of a table: docstrings mark code twice."""
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def metrics() -> Iterator[str]:
    """A table of the series. A star marks those, and the labels, that only ``metrics_period_s`` turns on."""
    module = import_module("raytorchrpc.calls.metrics")
    yield "| series | labels beside `group` and `member` | shows |\n|---|---|---|"
    for name, metric in module.METRICS.items():
        _, detailed = module.TAGS[metric.rows]
        labels = [f"`{label}`{'*' * (label in detailed)}" for label in metric.labels]
        yield f"| `{module.series(name)}`{'*' * metric.detail} | {', '.join(labels) or '-'} | {metric.help} |"


def commands() -> Iterator[str]:
    """A part for each command of the command line."""
    import typer

    yield from _commands(typer.main.get_command(import_module("raytorchrpc.cli.app").app), "raytorchrpc")


def _commands(command: Any, name: str) -> Iterator[str]:
    """A heading, what it does and a table of options for each command below this one."""
    if below := getattr(command, "commands", None):
        for each in below:
            yield from _commands(below[each], f"{name} {each}")
        return
    yield f"## {name}\n\n{command.help}\n"
    if command.params:
        yield "| option | meaning | default |\n|---|---|---|"
    for option in command.params:
        names = [] if option.param_type_name == "argument" else option.opts
        value = [] if getattr(option, "is_flag", False) else [option.metavar or option.human_readable_name]
        has_default = option.default is not None and option.default is not False
        default = "required" if option.required else f"`{option.default}`" if has_default else ""
        yield f"| `{' '.join([*names, *value])}` | {option.help} | {default} |"
    yield ""


def features() -> Iterator[str]:
    """What older releases of Ray and torch lack."""
    module = import_module("raytorchrpc._compat.requirements")
    yield "| feature | needs | with an older release |\n|---|---|---|"
    for each in module.FEATURES.values():
        yield f"| {each.name} | {each.package} {each.since} | {each.otherwise} |"


def results(name: str) -> Iterator[str]:
    """The tables of the stored results of that name, on each machine."""
    from raytorchrpc.bench.results import read_result
    from raytorchrpc.bench.tables import tables

    for path in sorted((DOCS.parent / "benchmarks" / "results").glob(f"{name}-*.json")):
        result = read_result(path)
        for table in tables(result):
            yield f"**{result.machine[0]}** ({result.started[:10]})\n\n{table.markdown()}\n"


_KINDS: dict[str, Callable[..., Iterable[str]]] = {
    "api": api,
    "commands": commands,
    "examples": examples,
    "features": features,
    "file": file,
    "metrics": metrics,
    "results": results,
}


if __name__ == "__main__":
    sys.path.insert(0, str(DOCS.parent))
    for page in DOCS.glob("**/*.md"):
        page.write_text(whole(page), encoding="utf-8")
