"""The line through a row's medians: ``time = per_op + bytes / bandwidth``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


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
    sizes = np.array([size for size, _ in points], dtype=float)
    seconds = np.array([value for _, value in points], dtype=float)
    # |p + b x - t| / t = |p (1/t) + b (x/t) - 1|: a linear problem with every target 1.
    columns = np.stack([1 / seconds, sizes / seconds], axis=1)
    best = None
    for keep in ([0, 1], [1], [0]):
        part, *_ = np.linalg.lstsq(columns[:, keep], np.ones(len(points)), rcond=None)
        if (part < 0).any():
            continue
        both = np.zeros(2)
        both[keep] = part
        errors = np.abs(columns @ both - 1)
        if best is None or (errors**2).sum() < best[0]:
            best = ((errors**2).sum(), both, errors.max())
    if best is None:  # one part alone is never negative if every time is positive
        return None
    _, (per_op, per_byte), worst = best
    return Line(float(per_op), float(1 / per_byte) if per_byte > 0 else None, float(worst))
