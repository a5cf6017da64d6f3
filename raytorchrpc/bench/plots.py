"""Results as pictures, by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raytorchrpc.bench.results import Result
from raytorchrpc.bench.tables import panels
from raytorchrpc.errors import ConfigurationError


def check_plots(file: Path) -> None:
    """Raises ConfigurationError, with the remedy, if matplotlib is missing, or for another kind of file."""
    if file.suffix != ".png":
        raise ConfigurationError(f"--plot writes PNG; {file} does not end in .png")
    if find_spec("matplotlib") is None:
        raise ConfigurationError("--plot needs matplotlib: pip install '.[bench]' in a checkout")


def draw(result: Result) -> bytes:
    out = io.BytesIO()
    picture(result).savefig(out, format="png", dpi=110, metadata={"Software": None})
    return out.getvalue()


def picture(result: Result) -> Any:
    """The matplotlib figure that ``draw`` writes: a panel for each case and device, with a line for each contestant."""
    import numpy
    from matplotlib.figure import Figure as Picture  # not pyplot, which needs a window system and keeps global state

    shown = [*panels(result)]
    made = Picture(figsize=(12, 5.5 * max(1, len(shown))), layout="constrained")
    heading = f"raytorchrpc {result.tree}, {result.started[:10]}; {'; '.join(result.machine)}"
    made.suptitle(heading, fontsize="medium", wrap=True)
    drawn = made.subplots(max(1, len(shown)), squeeze=False)
    for (title, labels, lines, unit), (panel,) in zip(shown, drawn, strict=False):
        for number, (name, line) in enumerate(lines.items()):
            low, middle, high = numpy.array([(one.low, one.median, one.high) for one in line.values()], float).T
            panel.errorbar(
                [labels.index(label) for label in line],
                middle,
                yerr=[middle - low, high - middle],
                label=name,
                marker="os^Dv"[number // 10 % 5],
                linewidth=2.5 if number == 0 else 1.2,
                capsize=2,
            )
        panel.set(title=title, ylabel=unit, yscale="log")
        panel.set_xticks(range(len(labels)), labels, fontsize="small")
        label_logarithmic(panel.yaxis)
        panel.grid(True, alpha=0.3)
        panel.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small")
    return made


def label_logarithmic(
    axis: Any, formatter: str | Callable[[float, Any], str] = "{x:g}", subs: Sequence[float] = (1, 2, 5)
) -> None:
    """Plain numbers at a logarithmic axis, however little of a decade it shows."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=subs, numticks=30))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(formatter)
