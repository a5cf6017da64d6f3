"""The program that the tutorial's page has its reader type, step after step."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
FILES = ROOT / "examples" / "tutorial"

_STEP = re.compile(r"^## Step \d: .*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(
    r'^```python title="train.py"(?: hl_lines="(?P<marked>[\d -]+)")?\n(?P<code>.*?)^```$', re.MULTILINE | re.DOTALL
)
_AS_BEFORE = "# ..."
_COMMAND = re.compile(r"^python train.py(.*)$", re.MULTILINE)


class Step(NamedTuple):
    program: str
    """The whole file after this step."""
    new: list[int]
    """Lines of the block that the program did not have yet, blank ones left out; the first line is 1."""
    marked: list[int]
    """Lines that the page marks as new; none where all of a block are."""
    runs: list[list[str]]
    """Arguments of the commands that run it."""


def steps() -> list[Step]:
    found: list[Step] = []
    known: dict[str, str] = {}
    runs: list[list[str]] = [[]]
    for section in _STEP.findall(PAGE.read_text(encoding="utf-8")):
        (block,) = _BLOCK.finditer(section)
        runs = [options.split() for options in _COMMAND.findall(section)] or runs
        block_lines, given = block["code"].splitlines(), _parts(block["code"])
        matcher = SequenceMatcher(None, "\n".join(known.get(name, "") for name in given).splitlines(), block_lines)
        changed = [line for tag, *_, low, high in matcher.get_opcodes() if tag != "equal" for line in range(low, high)]
        new = [line + 1 for line in changed if block_lines[line].strip() not in ("", _AS_BEFORE)]
        known = _merged(known, given)
        found.append(Step("\n".join(known.values()) + "\n", new, _numbers(block["marked"] or ""), runs))
    return found


def _whole(known: str, given: str) -> str:
    """A part of the program, with what ``# ...`` stands for: in the body of a class, the methods that are not given;
    in a function, the lines between its neighbours, as they were.
    """
    old, new = known.splitlines(), given.splitlines()
    if f"    {_AS_BEFORE}" in new and any(line.startswith("class ") for line in new):
        before, after = _methods(known), _methods(given)
        methods = {**before, **{name: _whole(before.get(name, ""), text) for name, text in after.items()}}
        return "\n".join([*new[: new.index(f"    {_AS_BEFORE}")], "\n\n".join(methods.values())])
    chunks: list[list[str]] = [[]]
    for line in new:
        if line.strip() == _AS_BEFORE:
            chunks.append([])
        else:
            chunks[-1].append(line)
    whole, at = list(chunks[0]), 0
    for above, below in pairwise(chunks):
        first = old.index(above[-1], at) + 1
        at = old.index(below[0], first) if below else len(old)
        whole += old[first:at] + below
    return "\n".join(whole)


def _methods(text: str) -> dict[str, str]:
    found = {}
    for method in re.findall(r"^    (?:@.*\n    )?def .*\n(?:(?: {8}.*)?\n)*", f"{text}\n", re.MULTILINE):
        name = re.search(r"def (\w+)", method)
        assert name is not None
        found[name[1]] = method.rstrip("\n")
    return found


def _parts(code: str) -> dict[str, str]:
    """The docstring, the imports, each class and function, and the end, with the blank lines above them.

    What stands below ``# ...`` may be indented further than Python allows.
    """
    found: dict[str, str] = {}
    for text in re.findall(r"\n*(?:@.*\n)*\S.*(?:\n+[ #].*)*", code):
        first = re.sub(r"^(@.*\n)+", "", text.strip("\n"))
        named = re.match(r"(?:class|def) (\w+)", first)
        name = named[1] if named else "imports" if re.match("import|from", first) else first.split()[0]
        found[name] = f"{found[name]}{text}" if name in found else text.removeprefix("\n")
    return found


def _merged(known: dict[str, str], given: dict[str, str]) -> dict[str, str]:
    """What has a known name takes its place; what is new goes above ``main``."""
    if not known:
        return given
    blank = {"imports": "\n"}
    replaced = {
        name: blank.get(name, "\n\n") + _whole(known.get(name, "").strip("\n"), text.strip("\n"))
        for name, text in given.items()
    }
    added = {name: text for name, text in replaced.items() if name not in known}
    merged = {name: replaced.get(name, text) for name, text in known.items()}
    ends = {name: merged.pop(name) for name in ("main", "if")}
    return {**merged, **added, **ends}


def _numbers(marked: str) -> list[int]:
    found = []
    for part in marked.split():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
