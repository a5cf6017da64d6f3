"""The result of a run, as the only file that is kept of it, and the published figures that come with the package."""

from __future__ import annotations

import csv
import functools
import subprocess
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ValidationError

from raytorchrpc import __version__
from raytorchrpc.bench.cases import Figure
from raytorchrpc.errors import ConfigurationError

_ROOT = Path(__file__).parents[2]


class Result(BaseModel, frozen=True, extra="forbid"):
    """Figures, and all that is needed to take them again."""

    title: str = ""
    version: str = __version__
    tree: str
    """The commit that was measured."""
    started: str
    """ISO 8601, UTC."""
    command: str
    """The command that repeats the run."""
    machine: tuple[str, ...]
    """The hardware and software, one fact per entry."""
    seconds: float = 0.0
    interrupted: bool = False
    """Whether Ctrl-C has ended the run."""
    about: str = ""
    """What a reader of the figures has to know."""
    contestants: dict[str, str] = {}
    """What each is, by name."""
    published: dict[str, tuple[str, str]] = {}
    """(scope, transport) of the contestants that have published figures."""
    figures: tuple[Figure, ...]

    def to_json(self) -> str:
        """One figure on a line."""
        head = self.model_dump_json(indent=1, exclude={"figures"}, exclude_defaults=True)
        lines = ",\n  ".join(figure.model_dump_json(exclude_defaults=True) for figure in self.figures)
        return f'{head.removesuffix(chr(10) + "}")},\n "version": "{self.version}",\n "figures": [\n  {lines}\n ]\n}}\n'

    def beside_published(self) -> Result:
        """The same with the field's published figures, as contestants of their own."""
        figures = []
        for figure in self.figures:
            figures.append(figure)
            scope, transport = self.published.get(figure.contestant, ("", ""))
            ms = published()[1].get((scope, transport), {}).get(figure.size if isinstance(figure.size, int) else 0)
            if ms is not None:
                known = {"contestant": f"{figure.contestant}, published", "median": ms, "low": ms, "high": ms}
                figures.append(figure.model_copy(update={**known, "reason": None, "via": None}))
        return self.model_copy(update={"figures": tuple(figures)})


def tree() -> str:
    """The commit of the checkout that this package is in; of an installed package its version."""
    if (_ROOT / ".git").exists():
        asked = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty"]
        described = subprocess.run(asked, capture_output=True, text=True, check=False)
        if described.returncode == 0:
            return described.stdout.strip()
    return f"version {__version__}"


def read_result(path: Path) -> Result:
    """Read a result that ``--json`` wrote. Raises ConfigurationError."""
    try:
        return Result.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise ConfigurationError(f"{path} is not a result of `raytorchrpc bench --json`: {why}") from error


@functools.cache
def published() -> tuple[str, Mapping[tuple[str, str], Mapping[int, float]]]:
    """The source of the figures; by (scope, transport), in their published order, milliseconds by bytes."""
    head, *lines = (files("raytorchrpc.bench") / "published_p2p.csv").read_text().splitlines()
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for line in csv.DictReader(lines):
        curves.setdefault((line["scope"], line["transport"]), {})[int(line["bytes"])] = float(line["ms"])
    return head.lstrip("# "), curves


def published_sizes() -> tuple[int, ...]:
    """The sizes (bytes) of these figures, ascending."""
    return tuple(sorted({size for curve in published()[1].values() for size in curve}))
