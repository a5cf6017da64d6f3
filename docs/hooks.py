"""What ``mkdocs build`` does beside its plugins: ``mkdocs.yml`` names this file.

- Pages below "Maintainers" stay out of the search, so that users find what is written for them.
- Pictures go into the page itself: their colours then follow the reader's choice of a dark or a light page.
- ``promises.md`` lists what ``promises.yml`` says, ``reference/cli.md`` the commands and their options, and
  ``seeing.md`` the metrics.
- ``<!-- file PATH -->`` becomes that file of the repository, as a block of code, and ``<!-- examples -->`` a card for
  each example of their README.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import typer
import yaml

DOCS = Path(__file__).parent
_EXAMPLE = re.compile(
    r"^\| \[?`(?P<file>[\w./]+)`[^|]* \| (?P<shows>[^|]+) \| (?P<command>`[^|]+`) \| (?P<seconds>[^|]+) \| "
    r"\[(?P<guide>[^]]+)\]\(\.\./docs/(?P<page>[^)]+)\) \|$",
    re.MULTILINE,
)
_FILE = re.compile(r"<!-- file (?P<path>[\w./-]+) -->")
_PICTURE = re.compile(r'<img alt="[^"]*" src="(?:\.\./)*assets/(?P<name>[\w-]+\.svg)" ?/?>')


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    if any(section.title == "Maintainers" for section in page.ancestors):
        page.meta["search"] = {"exclude": True}
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", "\n".join(commands(application(), "raytorchrpc")))
    if "<!-- metrics -->" in markdown:
        markdown = markdown.replace("<!-- metrics -->", "\n".join(metrics()))
    markdown = _FILE.sub(lambda match: block(DOCS.parent / match["path"]), markdown)
    markdown = markdown.replace("<!-- examples -->", "\n".join(cards()))
    return markdown.replace("<!-- promises -->", "\n".join(promises(config["repo_url"])))


def block(file: Path) -> str:
    kind = {".py": "python"}.get(file.suffix, file.suffix[1:])
    return f'```{kind} title="{file.name}"\n{file.read_text(encoding="utf-8").strip()}\n```'


def cards() -> Iterator[str]:
    table = (DOCS.parent / "examples" / "README.md").read_text(encoding="utf-8")
    for row in _EXAMPLE.finditer(table):
        took = f" takes {row['seconds']} s" if row["seconds"][0].isdigit() else ""
        yield f"- **{row['file'].removesuffix('.py').strip('/')}**\n"
        yield f"    {row['shows']}\n"
        yield f"    {row['command']}{took}. Guide: [{row['guide']}]({row['page']})\n"


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


@contextmanager
def light_package() -> Iterator[None]:
    """Modules of the package that need neither torch nor Ray can be imported, as its own module is not."""
    package: Any = ModuleType("raytorchrpc")
    package.__version__, package.__path__ = "", [str(DOCS.parent / "raytorchrpc")]
    with patch.dict(sys.modules, {"raytorchrpc": package}):
        yield


def metrics() -> Iterator[str]:
    """A table of the series. A star marks those, and the labels, that only ``metrics_period_s`` turns on."""
    with light_package():
        module = import_module("raytorchrpc.calls.metrics")
    yield "| series | labels beside `group` and `member` | shows |\n|---|---|---|"
    for name, metric in module.METRICS.items():
        _, detailed = module.TAGS[metric.rows]
        labels = [f"`{label}`{'*' * (label in detailed)}" for label in metric.labels]
        yield f"| `{module.series(name)}`{'*' * metric.detail} | {', '.join(labels) or '-'} | {metric.help} |"


def application() -> Any:
    """The command line as a tree of commands."""
    with light_package():
        return typer.main.get_command(runpy.run_path(str(DOCS.parent / "raytorchrpc" / "cli" / "app.py"))["app"])


def commands(command: Any, name: str) -> Iterator[str]:
    """A heading, what it does and a table of options for each command below this one."""
    if below := getattr(command, "commands", None):
        for each in below:
            yield from commands(below[each], f"{name} {each}")
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
