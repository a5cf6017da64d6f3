"""Results of runs as rows of JSON, and the published figures that come with the package."""

from __future__ import annotations

import csv
import functools
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from raytorchrpc.errors import ConfigurationError

Device = Literal["cpu", "cuda"]
Unit = Literal["ms", "calls/s", "% of a core"]
FloatArray = NDArray[np.float64]

#: Why there is no figure of what a run that Ctrl-C has ended had not measured.
INTERRUPTED = "the run was interrupted"


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
        return label_of(self.variant, self.bytes)


def label_of(variant: str, size: int) -> str:
    """The variant and the payload of a case."""
    return ", ".join(filter(None, (variant, show_size(size) if size else "nothing")))


class RowResult(BaseModel, frozen=True, extra="forbid"):
    """One row with tensors on one device."""

    row: str
    device: Device
    kind: str
    what: str
    published: tuple[str, str] | None = None
    """A key of ``published()``."""
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

    def labels(self, device: Device, pattern: str = "", *, measured: bool = False) -> list[str]:
        """The cases of a pattern, in the order of the run."""
        return list(dict.fromkeys(
            cell.label for cell in self.cells
            if cell.pattern == pattern and cell.device == device and (cell.median is not None or not measured)
        ))  # fmt: skip

    def points(self, row: RowResult) -> list[tuple[int, float]]:
        """(bytes, seconds) of the measured sizes, ascending."""
        return [
            (cell.bytes, cell.median / 1e3)
            for cell in self.cells
            if (cell.row, cell.device, cell.pattern) == (row.row, row.device, "") and cell.median is not None
        ]

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


# --- published figures -----------------------------------------------------------------------------------------------


@functools.cache
def published() -> tuple[str, Mapping[tuple[str, str], Mapping[int, float]]]:
    """The source of the figures; by (scope, transport), in their published order, milliseconds by bytes."""
    head, *lines = (files("raytorchrpc.bench") / "published_p2p.csv").read_text().splitlines()
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for line in csv.DictReader(lines):
        curves.setdefault((line["scope"], line["transport"]), {})[int(line["bytes"])] = float(line["ms"])
    return head.lstrip("# "), curves


def published_sizes() -> tuple[int, ...]:
    """All published sizes in bytes, ascending."""
    return tuple(sorted({size for curve in published()[1].values() for size in curve}))


# --- the line through a row's medians: time = per_op + bytes / bandwidth ----------------------------------------------


class Line(NamedTuple):
    """A fitted line, and the largest deviation of a point from it, relative to the point."""

    per_op_s: float
    bytes_per_s: float | None
    """None if more bytes did not take longer."""
    worst: float


def fit(points: Sequence[tuple[int, float]]) -> Line | None:
    """Fit by least squares of the relative error, so that microseconds count as much as seconds.

    Args:
        points: (bytes, seconds). Returns None for fewer than two sizes.

    Neither part is negative: if the best line has a negative part, the best line without that part is returned.
    """
    if len({size for size, _ in points}) < 2:
        return None
    sizes, seconds = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    (per_op, per_byte), worst = nonnegative_terms(np.stack([np.ones_like(sizes), sizes], axis=1), seconds)
    return Line(per_op, 1 / per_byte if per_byte > 0 else None, worst)


def nonnegative_terms(columns: FloatArray, values: FloatArray) -> tuple[list[float], float]:
    """The non-negative factors of the columns whose sum fits the values best, and the largest relative error.

    Fits by least squares of the relative error, with every subset of the columns. Values must be positive.
    """
    # |sum(f c) - v| / v = |sum(f c/v) - 1|: a linear problem with every target 1.
    scaled = columns / values[:, None]
    subsets = map(np.array, sorted(product((0, 1), repeat=columns.shape[1]), key=sum))
    solved = (kept * np.linalg.lstsq(scaled * kept, np.ones(len(values)), rcond=None)[0] for kept in subsets)
    found = [(factors, np.abs(scaled @ factors - 1)) for factors in solved if (factors >= 0).all()]
    # Of equal losses the first counts: more terms only if they fit better.
    factors, errors = min(found, key=lambda each: round(float((each[1] ** 2).sum()), 12))
    return factors.tolist(), float(errors.max())
