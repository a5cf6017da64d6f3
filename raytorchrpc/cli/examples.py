"""``raytorchrpc examples``: lists the examples that come with the package, and copies one."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import raytorchrpc
from raytorchrpc.errors import ConfigurationError

_ROW = re.compile(
    r"^\| \[?`(?P<name>\w+)(?P<suffix>\.py|/)`[^|]* \| (?P<shows>[^|]+) \| `(?P<command>[^`|]+)` \|", re.MULTILINE
)


class Example(NamedTuple):
    """One row of the table in the README of the examples."""

    name: str
    file: str
    shows: str
    command: str
    """Runs it in the folder that holds it."""


def folder() -> Path:
    """The examples: in the installed package, or beside it in a checkout."""
    package = Path(raytorchrpc.__file__).parent
    for place in (package / "_examples", package.parent / "examples"):
        if (place / "README.md").is_file():
            return place
    raise FileNotFoundError(f"there are no examples in {package}, nor beside it; install raytorchrpc again")


def listed() -> list[Example]:
    """All examples, in the README's order."""
    rows = _ROW.finditer((folder() / "README.md").read_text(encoding="utf-8"))
    return [Example(row["name"], row["name"] + row["suffix"].strip("/"), row["shows"], row["command"]) for row in rows]


def copy(name: str, into: Path) -> Example:
    """Copies an example into a folder, which is made if need be. Raises ConfigurationError rather than overwrite."""
    known = {example.name: example for example in listed()}
    if name not in known:
        raise ConfigurationError(f"there is no example {name!r}; there are {', '.join(known)}")
    file = known[name].file
    if (into / file).exists():
        raise ConfigurationError(f"{into / file} exists; name another folder: raytorchrpc examples copy {name} FOLDER")
    if into.exists() and not into.is_dir():
        raise ConfigurationError(f"{into} is not a folder; name another one: raytorchrpc examples copy {name} FOLDER")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into, prefix=f".{name}-") as scratch:  # the example is there whole, or not
        source, part = folder() / file, Path(scratch, file)
        if source.is_dir():
            shutil.copytree(source, part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, part)
        part.rename(into / file)
    return known[name]
