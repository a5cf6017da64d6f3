"""Writes the output of a run: a checkpoint, a log of JSON lines and the reward curve."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

CHECKPOINT, LOG, CURVE = "checkpoint.pt", "log.jsonl", "reward.png"


def save(folder: Path, checkpoint: dict[str, Any]) -> None:
    """Replaces the checkpoint atomically."""
    partial = folder / f"{CHECKPOINT}.partial"
    with open(partial, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / CHECKPOINT)


def load(folder: Path) -> dict[str, Any]:
    """Returns the checkpoint of a folder. Raises ValueError, with one line, if there is no readable one."""
    path = folder / CHECKPOINT
    if not path.is_file():
        raise ValueError(f"there is no checkpoint to resume from: {path} does not exist")
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types of errors on foreign files
        raise ValueError(f"{path} is not a readable checkpoint ({type(error).__name__})") from error
    return checkpoint


class Log:
    """Writes one line per report. A resumed run drops the lines after its checkpoint."""

    def __init__(self, folder: Path, upto: int = 0) -> None:
        self.path = folder / LOG
        kept = self.path.read_text(encoding="utf-8").splitlines() if upto and self.path.is_file() else []
        self.rows: list[dict[str, Any]] = [row for row in map(_parse, kept) if row and row["iteration"] <= upto]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return None  # a run was killed while it wrote this line
    return row


def draw(folder: Path, rows: list[dict[str, Any]], title: str) -> None:
    """Plots the mean return of the last 100 episodes against the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    known = [row for row in rows if row["return"] is not None]
    axes.plot([row["steps"] for row in known], [row["return"] for row in known], marker=".")
    axes.set(xlabel="steps (of four frames)", ylabel="return, mean of the last 100 episodes", title=title)
    axes.grid(alpha=0.3)
    if not known:
        axes.text(0.5, 0.5, "no episode has ended yet", ha="center", transform=axes.transAxes)
    figure.savefig(folder / CURVE, dpi=120, format="png")
