"""The field's published figures, which come with the package so that tables can show them."""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from importlib.resources import files
from typing import NamedTuple

_FILE = "published_p2p.csv"


class Published(NamedTuple):
    """One curve: (scope, transport), and milliseconds by bytes."""

    scope: str
    transport: str
    ms: Mapping[int, float]


@functools.cache
def published() -> tuple[str, tuple[Published, ...]]:
    """The source of the figures, and the curves in their published order."""
    text = (files("raytorchrpc.bench") / _FILE).read_text()
    head, *lines = text.splitlines()
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
