"""The line through a row's medians: ``time = per_op + bytes / bandwidth``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


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
    scaled, terms = columns / values[:, None], columns.shape[1]
    best: tuple[float, list[float], float] | None = None
    for count in range(1, min(terms, len(values)) + 1):
        for kept in map(list, combinations(range(terms), count)):
            solved, *_ = np.linalg.lstsq(scaled[:, kept], np.ones(len(values)), rcond=None)
            if (solved < 0).any():
                continue
            factors = np.zeros(terms)
            factors[kept] = solved
            errors = np.abs(scaled @ factors - 1)
            loss = float((errors**2).sum())
            if best is None or loss < best[0] - 1e-12:  # more terms only if they fit better
                best = loss, factors.tolist(), float(errors.max())
    assert best is not None, "one positive column alone always fits"
    return best[1], best[2]
