"""Results of runs, read and written as JSON, and the published figures that come with the package."""

from __future__ import annotations

import csv
import functools
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from raytorchrpc.bench.rows import Device
from raytorchrpc.errors import ConfigurationError


class Cell(BaseModel, frozen=True, extra="forbid"):
    """One row at one size: seconds, or the reason why there are none."""

    row: str
    device: Device
    bytes: int
    median_s: float | None = None
    low_s: float | None = None
    """First quartile."""
    high_s: float | None = None
    """Third quartile."""
    samples: int = 0
    via: str | None = None
    """The lane that carried it, if the group's statistics show it."""
    reason: str | None = None


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
    scope: str
    """``one host`` or ``two hosts``."""
    machine: tuple[str, ...]
    """The hardware and software, one fact per entry."""
    seconds: float
    sizes: tuple[int, ...]
    rows: tuple[RowResult, ...]
    cells: tuple[Cell, ...]

    def cell(self, row: RowResult, size: int) -> Cell | None:
        """The result for that row and size."""
        key = row.row, row.device, size
        return next((cell for cell in self.cells if (cell.row, cell.device, cell.bytes) == key), None)

    def points(self, row: RowResult) -> list[tuple[int, float]]:
        """(bytes, seconds) of the measured sizes, ascending."""
        cells = ((size, self.cell(row, size)) for size in self.sizes)
        return [(size, cell.median_s) for size, cell in cells if cell and cell.median_s is not None]

    def measured(self, device: Device) -> list[RowResult]:
        """Rows with at least one figure."""
        return [row for row in self.rows if row.device == device and self.points(row)]

    def devices(self) -> list[Device]:
        """The devices with a figure, CPU first."""
        return [device for device in ("cpu", "cuda") if self.measured(device)]

    def fastest(self, device: Device, size: int, *, kinds: Sequence[str], but: str = "") -> tuple[str, float] | None:
        """The fastest row of these kinds at that size, with its seconds."""
        rivals = [r for r in self.measured(device) if r.kind in kinds and r.comparable and r.row != but]
        cells = [cell for row in rivals if (cell := self.cell(row, size))]
        found = [(cell.row, cell.median_s) for cell in cells if cell.median_s is not None]
        return min(found, key=lambda pair: pair[1], default=None)


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
