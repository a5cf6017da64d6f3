"""What a run leaves in its folder: a checkpoint, a log of JSON lines, the reward curve."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

CHECKPOINT, LOG, CURVE = "checkpoint.pt", "log.jsonl", "reward.png"


def save(folder: Path, checkpoint: dict[str, Any]) -> None:
    """There is a whole checkpoint at any time: the old one, or the new one."""
    partial = folder / f"{CHECKPOINT}.partial"
    with open(partial, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / CHECKPOINT)


def load(folder: Path) -> dict[str, Any]:
    """The checkpoint of a folder. ValueError, in one line, if there is none that can be read."""
    path = folder / CHECKPOINT
    if not path.is_file():
        raise ValueError(f"there is no checkpoint to resume from: {path} does not exist")
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader fails in many ways on what it did not write
        raise ValueError(f"{path} is no checkpoint that can be read ({type(error).__name__})") from error
    return checkpoint


class Log:
    """One line for each report. A run that goes on drops what was reported after its checkpoint."""

    def __init__(self, folder: Path, upto: int = 0) -> None:
        self.path = folder / LOG
        kept = self.path.read_text(encoding="utf-8").splitlines() if upto and self.path.is_file() else []
        self.rows: list[dict[str, Any]] = [row for row in map(_row, kept) if row and row["iteration"] <= upto]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _row(line: str) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return None  # the last line of a run that was killed
    return row


def draw(folder: Path, rows: list[dict[str, Any]], title: str) -> None:
    """The mean return of the last 100 episodes against the steps."""
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
