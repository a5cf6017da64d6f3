"""The program that the tutorial's page has its reader type, step after step."""

from __future__ import annotations

import ast
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
    """A part of the program, with the lines that ``# ...`` stands for: those between its neighbours, as they were."""
    old = known.splitlines()
    chunks: list[list[str]] = [[]]
    for line in given.splitlines():
        if line.strip() == _AS_BEFORE:
            chunks.append([])
        else:
            chunks[-1].append(line)
    whole, at = list(chunks[0]), 0
    for above, below in pairwise(chunks):
        first = old.index(above[-1], at) + 1
        at = old.index(below[0], first)
        whole += old[first:at] + below
    return "\n".join(whole)


def _parts(code: str) -> dict[str, str]:
    """The docstring, the imports, each class and function, and the end, with the blank lines above them."""
    found: dict[str, str] = {}
    lines, above = code.splitlines(), 0
    for node in ast.parse(code).body:
        imports = isinstance(node, ast.Import | ast.ImportFrom)
        name = "imports" if imports else getattr(node, "name", type(node).__name__)
        text = "\n".join(lines[above : node.end_lineno])
        found[name] = f"{found[name]}\n{text}" if name in found else text
        above = node.end_lineno or 0
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
    ends = {name: merged.pop(name) for name in ("main", "If")}
    return {**merged, **added, **ends}


def _numbers(marked: str) -> list[int]:
    found = []
    for part in marked.split():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
