"""Results of runs as rows of JSON, and the published figures that come with the package."""

from __future__ import annotations

import csv
import functools
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ValidationError, model_validator

from raytorchrpc.bench.rows import OURS, Device
from raytorchrpc.errors import ConfigurationError

Unit = Literal["ms", "calls/s", "% of a core"]


class Cell(BaseModel, frozen=True, extra="forbid"):
    """One row in one case: figures, or the reason why there are none."""

    row: str
    device: Device
    pattern: str = ""
    """Empty for a size."""
    variant: str = ""
    bytes: int
    unit: Unit = "ms"
    median: float | None = None
    """In ``unit``: of all samples of a size; of the repeats of a pattern, each the median of its samples."""
    low: float | None = None
    """First quartile of a size; the lowest repeat of a pattern."""
    high: float | None = None
    """Third quartile of a size; the highest repeat of a pattern."""
    p95: float | None = None
    """95th percentile of all samples of a pattern; None for rates."""
    repeats: int = 0
    samples: int = 0
    caller_switches: float | None = None
    """Context switches per call in the caller; in all-to-all per call and side, of a member that is both."""
    caller_cpu_ms: float | None = None
    callee_switches: float | None = None
    callee_cpu_ms: float | None = None
    via: str | None = None
    """The lane that carried it, if the group's statistics show it."""
    reason: str | None = None

    @property
    def label(self) -> str:
        """The variant and the payload."""
        return ", ".join(filter(None, (self.variant, show_payload(self.bytes))))

    @property
    def points(self) -> tuple[int, float] | None:
        """(bytes, seconds), if it was measured."""
        return None if self.median is None else (self.bytes, self.median / 1e3)


class RowResult(BaseModel, frozen=True, extra="forbid"):
    """One row with tensors on one device."""

    row: str
    device: Device
    kind: str
    what: str
    published: tuple[str, str] | None = None
    reason: str | None = None
    """Why it has no figures at all."""
    comparable: bool = True
    """False for a row that works only in an easier case, such as two actors on one GPU."""


class Run(BaseModel, frozen=True, extra="forbid"):
    """One run of the command."""

    version: str
    started: str
    """ISO 8601, UTC."""
    command: str
    """The command that repeats the run."""
    scope: str = "one host"
    """``one host`` or ``two hosts``."""
    machine: tuple[str, ...]
    """The hardware and software, one fact per entry."""
    seconds: float
    rows: tuple[RowResult, ...] = ()
    cells: tuple[Cell, ...]

    @model_validator(mode="before")
    @classmethod
    def _read_old(cls, data: Any) -> Any:
        """Accept results from when sizes and patterns had formats of their own, and sizes were in seconds."""
        if not isinstance(data, dict) or not {"sizes", "window_s"} & data.keys():
            return data
        kept = {name: value for name, value in data.items() if name not in ("sizes", "window_s")}
        return kept | {"cells": [{_NEW.get(name, name): _new(name, value) for name, value in cell.items()}
                                 for cell in data.get("cells", ())]}  # fmt: skip

    @property
    def has_patterns(self) -> bool:
        """Whether it is a run with ``--pattern``."""
        return any(cell.pattern for cell in self.cells)

    def cell(self, row: str, device: Device, label: str, pattern: str = "") -> Cell | None:
        """The result for that row and case."""
        return self._cells.get((row, device, pattern, label))

    @functools.cached_property
    def _cells(self) -> dict[tuple[str, str, str, str], Cell]:
        return {(cell.row, cell.device, cell.pattern, cell.label): cell for cell in self.cells}

    def labels(self, device: Device | None = None, pattern: str = "", *, measured: bool = False) -> list[str]:
        """The cases of a pattern, in the order of the run."""
        return list(dict.fromkeys(
            cell.label for cell in self.cells
            if cell.pattern == pattern and device in (None, cell.device) and (cell.median is not None or not measured)
        ))  # fmt: skip

    def points(self, row: RowResult) -> list[tuple[int, float]]:
        """(bytes, seconds) of the measured sizes, ascending."""
        cells = (self.cell(row.row, row.device, label) for label in self.labels(row.device))
        return [cell.points for cell in cells if cell is not None and cell.points is not None]

    def measured(self, device: Device) -> list[RowResult]:
        """Rows with a figure for a size."""
        return [row for row in self.rows if row.device == device and self.points(row)]

    def tables(self) -> list[tuple[Device, str]]:
        """The devices and patterns with a figure, in the order of the run; of sizes CPU first."""
        found = dict.fromkeys((cell.device, cell.pattern) for cell in self.cells if cell.median is not None)
        return list(found) if self.has_patterns else sorted(found)

    def names(self, device: Device, pattern: str) -> list[str]:
        """The rows with a figure in that pattern, in their usual order."""
        found = (cell for cell in self.cells if (cell.device, cell.pattern) == (device, pattern))
        return list(dict.fromkeys(cell.row for cell in found if cell.median is not None))

    def fastest(self, device: Device, label: str, kind: str) -> Cell | None:
        """The fastest row of that kind at that size, ours aside."""
        rivals = [row for row in self.measured(device) if row.kind == kind and row.comparable and row.row != OURS]
        cells = [cell for row in rivals if (cell := self.cell(row.row, device, label)) and cell.median is not None]
        return min(cells, key=lambda cell: cell.median or 0.0, default=None)


_NEW = {"median_s": "median", "low_s": "low", "high_s": "high"}


def _new(name: str, value: Any) -> Any:
    return value * 1e3 if name in _NEW and value is not None else value


def read_run(path: Path) -> Run:
    """Read a run that ``--json`` wrote. Raises ConfigurationError."""
    try:
        return Run.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise ConfigurationError(f"{path} is not a result of `raytorchrpc bench --json`: {why}") from error


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically. Raises ConfigurationError."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error


def show_size(size: float) -> str:
    """Format bytes as the published tables do: ``1.25 KB``, ``640 MB``."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:g} B"


def show_payload(size: int) -> str:
    """``nothing``, or the size."""
    return show_size(size) if size else "nothing"


class Published(NamedTuple):
    """One curve: (scope, transport), and milliseconds by bytes."""

    scope: str
    transport: str
    ms: Mapping[int, float]


@functools.cache
def published() -> tuple[str, tuple[Published, ...]]:
    """The source of the figures, and the curves in their published order."""
    head, *lines = (files("raytorchrpc.bench") / "published_p2p.csv").read_text().splitlines()
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for line in csv.DictReader(lines):
        curves.setdefault((line["scope"], line["transport"]), {})[int(line["bytes"])] = float(line["ms"])
    return head.lstrip("# "), tuple(Published(scope, name, ms) for (scope, name), ms in curves.items())


def published_curve(key: tuple[str, str] | None) -> Mapping[int, float] | None:
    """Milliseconds by bytes for (scope, transport); None if there is no such curve."""
    return next((curve.ms for curve in published()[1] if (curve.scope, curve.transport) == key), None)


def published_sizes() -> tuple[int, ...]:
    """All published sizes in bytes, ascending."""
    return tuple(sorted({size for curve in published()[1] for size in curve.ms}))
