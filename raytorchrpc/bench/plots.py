"""``--plot``: time and bandwidth against size, or the cases of each pattern. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from raytorchrpc.bench.results import Run, published_curve, show_size
from raytorchrpc.bench.rows import Device
from raytorchrpc.bench.tables import DEVICE_TEXT
from raytorchrpc.errors import ConfigurationError

_STYLES = {"raytorchrpc": "-", "for comparison": "--", "limit": ":"}


def check_available() -> None:
    """Raises ConfigurationError, with the remedy, if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ConfigurationError("--plot needs matplotlib: pip install '.[bench]' in a checkout")


def draw(run: Run, *, against_published: bool = False) -> bytes:
    """Draw a PNG."""
    out = io.BytesIO()
    figure = figure_of(run, against_published=against_published)
    figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
    return out.getvalue()


def figure_of(run: Run, *, against_published: bool = False) -> Any:
    """The matplotlib figure that ``draw`` writes: two panels for each device, or one for each device and pattern."""
    check_available()
    from matplotlib.figure import Figure  # not pyplot, which needs a window system and keeps global state

    shown = run.tables()
    columns = min(2, len(shown)) if run.has_patterns else 2
    lines = -(-len(shown) // columns) if run.has_patterns else max(1, len(shown))
    figure = Figure(figsize=(7.5 * columns, (4.5 if run.has_patterns else 6.5) * lines), layout="constrained")
    heading = f"raytorchrpc {run.version}, {run.started[:10]}; {'; '.join(run.machine[:1])}"
    figure.suptitle("\n".join((heading, "; ".join(run.machine[1:]))), fontsize="medium", wrap=True)
    panels = figure.subplots(lines, columns, squeeze=False)
    if not run.has_patterns:
        for (left, right), (device, _) in zip(panels, shown, strict=False):
            _draw_sizes(left, right, run, device, against_published)
        return figure
    for (device, pattern), panel in zip(shown, panels.flat, strict=False):
        _draw_cases(panel, run, device, pattern)
    for panel in panels.flat[len(shown) :]:
        panel.remove()
    return figure


def label_logarithmic(axis: Any, formatter: Any = "{x:g}", subs: Sequence[float] = (1, 2, 5)) -> None:
    """Plain numbers at a logarithmic axis, however little of a decade it shows."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=subs, numticks=30))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(formatter)


def _draw_cases(panel: Any, run: Run, device: Device, pattern: str) -> None:
    """A column for each case, and in it a mark for each row, with the range of its repeats."""
    names, labels = run.names(device, pattern), run.labels(device, pattern, measured=True)
    unit = "ms"
    for number, name in enumerate(names):
        found = [(at, run.cell(name, device, label, pattern)) for at, label in enumerate(labels)]
        cells = [(at, cell) for at, cell in found if cell is not None and cell.median is not None]
        places = [at + (number - (len(names) - 1) / 2) * 0.7 / len(names) for at, _ in cells]
        middles = [cell.median or 0.0 for _, cell in cells]
        below = [middle - (cell.low or middle) for middle, (_, cell) in zip(middles, cells, strict=True)]
        above = [(cell.high or middle) - middle for middle, (_, cell) in zip(middles, cells, strict=True)]
        style = {"color": f"C{number}", "marker": "os^Dv*"[number % 6], "linestyle": "none", "capsize": 3}
        panel.errorbar(places, middles, yerr=[below, above], label=name, **style)
        unit = cells[0][1].unit
    panel.set_xticks(range(len(labels)), [label.replace(", ", "\n") for label in labels], fontsize="small")
    panel.set(title=f"{pattern}, {DEVICE_TEXT[device]}", ylabel=unit, yscale="log", xlim=(-0.5, len(labels) - 0.5))
    label_logarithmic(panel.yaxis)
    panel.grid(True, axis="y", alpha=0.3)
    panel.legend(fontsize="small")


def _draw_sizes(left: Any, right: Any, run: Run, device: Device, against_published: bool) -> None:
    def curve(points: Sequence[tuple[int, float]], **style: Any) -> None:
        sizes = [size for size, _ in points]
        left.plot(sizes, [seconds * 1e3 for _, seconds in points], **style)
        right.plot(sizes, [size / seconds / 1e9 for size, seconds in points], **style)

    for number, row in enumerate(run.measured(device)):
        style = {"color": f"C{number % 10}", "marker": "os^Dv"[number // 10 % 5], "markersize": 4}
        style |= {"linestyle": _STYLES[row.kind], "linewidth": 2.5 if row.row == "auto" else 1.2}
        curve(run.points(row), label=row.row, **style)
        found = published_curve(row.published) if against_published else None
        if row.published and found:
            style |= {"marker": "x", "linestyle": "-.", "linewidth": 0.8, "alpha": 0.6}
            points = [(size, ms / 1e3) for size, ms in found.items()]
            curve(points, label=f"{row.row}, published ({row.published[0]})", **style)
    for panel, what, unit in ((left, "time", "milliseconds"), (right, "bandwidth", "GB/s")):
        title = f"{DEVICE_TEXT[device]}, {run.scope}: {what}"
        panel.set(title=title, xlabel="size of the tensor", ylabel=unit, xscale="log", yscale="log")
        label_logarithmic(panel.xaxis, lambda size, _: show_size(size), (1,))
        label_logarithmic(panel.yaxis)
        panel.grid(True, alpha=0.3)
    right.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small")
