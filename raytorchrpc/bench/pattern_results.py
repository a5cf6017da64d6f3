"""The results of ``--pattern``, as data; read and written as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from raytorchrpc.bench.patterns import ROWS, Case, Unit, show_payload
from raytorchrpc.bench.rows import Device
from raytorchrpc.errors import ConfigurationError


class PatternCell(BaseModel, frozen=True, extra="forbid"):
    """One row in one case: figures, or the reason why there are none."""

    row: str
    device: Device
    pattern: str
    variant: str
    bytes: int
    unit: Unit
    median: float | None = None
    """Median of the repeats, each of which is the median of its samples, in ``unit``."""
    low: float | None = None
    """The lowest repeat."""
    high: float | None = None
    """The highest repeat."""
    p95: float | None = None
    """95th percentile of all samples; None for rates."""
    repeats: int = 0
    samples: int = 0
    caller_switches: float | None = None
    """Context switches per call in the caller; in all-to-all per call and side, of a member that is both."""
    caller_cpu_ms: float | None = None
    callee_switches: float | None = None
    callee_cpu_ms: float | None = None
    reason: str | None = None

    @property
    def label(self) -> str:
        """The variant and the payload."""
        return ", ".join(filter(None, (self.variant, show_payload(self.bytes))))


class PatternRun(BaseModel, frozen=True, extra="forbid"):
    """One run of the command with ``--pattern``."""

    version: str
    started: str
    """ISO 8601, UTC."""
    command: str
    """The command that repeats the run."""
    machine: tuple[str, ...]
    seconds: float
    window_s: float
    """Seconds of one measurement."""
    cells: tuple[PatternCell, ...]

    def tables(self) -> list[tuple[Device, str]]:
        """The devices and patterns with a figure, in the order of the run."""
        return list(dict.fromkeys((cell.device, cell.pattern) for cell in self.cells if cell.median is not None))

    def lines(self, device: Device, pattern: str) -> list[dict[str, PatternCell]]:
        """For each case with a figure, its cells by row."""
        found: dict[str, dict[str, PatternCell]] = {}
        for cell in self.cells:
            if (cell.device, cell.pattern) == (device, pattern):
                found.setdefault(cell.label, {})[cell.row] = cell
        return [line for line in found.values() if any(cell.median is not None for cell in line.values())]

    def rows(self, device: Device, pattern: str) -> list[str]:
        """The rows with a figure there, in their usual order."""
        has = {row for line in self.lines(device, pattern) for row, cell in line.items() if cell.median is not None}
        return [row for row in ROWS if row in has]


class Turn(NamedTuple):
    """What one repeat of one case gave."""

    value: float
    """In the unit of the case."""
    samples: list[float]
    """Milliseconds of each call or round; empty for rates."""
    switches: tuple[float | None, float | None] = (None, None)
    """Per call, of the caller and of the callee."""
    cpu_ms: tuple[float | None, float | None] = (None, None)


def summarize(row: str, device: Device, case: Case, turns: Sequence[Turn], reason: str | None = None) -> PatternCell:
    """The cell of a row in a case; without turns it has only the reason."""
    cell = PatternCell(
        row=row, device=device, pattern=case.pattern, variant=case.variant, bytes=case.size, unit=case.unit
    )
    if not turns:
        return cell.model_copy(update={"reason": reason or "unknown"})
    values, samples = [turn.value for turn in turns], [sample for turn in turns for sample in turn.samples]
    figures = {
        "median": median(values),
        "low": min(values),
        "high": max(values),
        "p95": quantiles(samples, n=20, method="inclusive")[-1] if len(samples) > 1 else None,
        "repeats": len(turns),
        "samples": len(samples),
    }
    for side, name in enumerate(("caller", "callee")):
        figures[f"{name}_switches"] = _median([turn.switches[side] for turn in turns])
        figures[f"{name}_cpu_ms"] = _median([turn.cpu_ms[side] for turn in turns])
    return cell.model_copy(update=figures)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def read_pattern_run(path: Path) -> PatternRun:
    """Read a run that ``--pattern ... --json`` wrote. Raises ConfigurationError."""
    try:
        return PatternRun.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise ConfigurationError(f"{path} is not a result of `raytorchrpc bench --pattern`: {problem}") from error
