"""The results of a run, as data; read and written as JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from raytorchrpc.bench.fit import Line, fit
from raytorchrpc.bench.rows import Device
from raytorchrpc.errors import ConfigurationError


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Cell(_Data):
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


class RowResult(_Data):
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


class Run(_Data):
    """One run of the command."""

    version: str
    started: str
    """ISO 8601, UTC."""
    command: str
    """The command that repeats the run."""
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

    def line(self, row: RowResult) -> Line | None:
        """The line through the points."""
        return fit(self.points(row))

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
        return min(found, key=lambda pair: pair[1]) if found else None


def read_run(path: Path) -> Run:
    """Read a run that ``--json`` wrote. Raises ConfigurationError."""
    try:
        return Run.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise ConfigurationError(
            f"{path} is not a result of `raytorchrpc bench --json`: {error.errors()[0]['msg']}"
        ) from error


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically. Raises ConfigurationError."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
