"""``--plot``: latency and bandwidth against size, both axes logarithmic. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from raytorchrpc.bench.results import Run, published_curve
from raytorchrpc.bench.tables import DEVICE_TEXT
from raytorchrpc.errors import ConfigurationError

_STYLES = {"raytorchrpc": "-", "for comparison": "--", "limit": ":"}


def check_available() -> None:
    """Raises ConfigurationError, with the remedy, if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ConfigurationError("--plot needs matplotlib: pip install '.[bench]' in a checkout")


def heading(version: str, started: str, machine: Sequence[str]) -> str:
    """What a picture says above its panels: the library, when it was measured, and the machine."""
    return "\n".join((f"raytorchrpc {version}, {started[:10]}; {'; '.join(machine[:1])}", "; ".join(machine[1:])))


def draw(run: Run, *, against_published: bool = False) -> bytes:
    """Draw a PNG with one row of two panels for each device that has figures."""
    return png(figure_of(run, against_published=against_published))


def png(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
    return out.getvalue()


def figure_of(run: Run, *, against_published: bool) -> Any:
    """The matplotlib figure that ``draw`` writes."""
    check_available()
    from matplotlib.figure import Figure  # not pyplot, which needs a window system and keeps global state

    devices = run.devices()
    figure = Figure(figsize=(15, 6.5 * max(1, len(devices))), layout="constrained")
    figure.suptitle(heading(run.version, run.started, run.machine), fontsize="medium")
    panels = figure.subplots(max(1, len(devices)), 2, squeeze=False)
    for (left, right), device in zip(panels, devices, strict=False):
        for number, row in enumerate(run.measured(device)):
            style = {"color": f"C{number % 10}", "marker": "os^Dv"[number // 10 % 5], "markersize": 4}
            style |= {"linestyle": _STYLES[row.kind], "linewidth": 2.5 if row.row == "auto" else 1.2}
            points = run.points(row)
            _curve(left, right, points, label=row.row, **style)
            curve = published_curve(row.published) if against_published else None
            if row.published and curve:
                style |= {"marker": "x", "linestyle": "-.", "linewidth": 0.8, "alpha": 0.6}
                published = [(size, ms / 1e3) for size, ms in curve.items()]
                _curve(left, right, published, label=f"{row.row}, published ({row.published[0]})", **style)
        for panel, what, unit in ((left, "time", "milliseconds"), (right, "bandwidth", "GB/s")):
            title = f"{DEVICE_TEXT[device]}, {run.scope}: {what}"
            panel.set(title=title, xlabel="bytes", ylabel=unit, xscale="log", yscale="log")
            panel.grid(True, which="major", alpha=0.3)
        right.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small")
    return figure


def _curve(left: Any, right: Any, points: list[tuple[int, float]], **style: object) -> None:
    sizes = [size for size, _ in points]
    left.plot(sizes, [seconds * 1e3 for _, seconds in points], **style)
    right.plot(sizes, [size / seconds / 1e9 for size, seconds in points], **style)
