"""Results as pictures, by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from raytorchrpc.bench.cases import Figure, show_size
from raytorchrpc.bench.results import Result
from raytorchrpc.bench.tables import DEVICES
from raytorchrpc.errors import ConfigurationError


def check_plots() -> None:
    """Raises ConfigurationError, with the remedy, if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ConfigurationError("--plot needs matplotlib: pip install '.[bench]' in a checkout")


def draw(result: Result) -> bytes:
    out = io.BytesIO()
    picture(result).savefig(out, format="png", dpi=110, metadata={"Software": None})
    return out.getvalue()


def picture(result: Result) -> Any:
    """The matplotlib figure that ``draw`` writes: a panel for each case and device, with a line for each contestant."""
    from matplotlib.figure import Figure as Picture  # not pyplot, which needs a window system and keeps global state

    shown: dict[tuple[str, Any], dict[str, list[Figure]]] = {}
    for figure in result.figures:
        if figure.median is not None:
            shown.setdefault((figure.case, figure.device), {}).setdefault(figure.contestant, []).append(figure)
    columns = min(2, len(shown)) or 1
    lines = -(-len(shown) // columns) or 1
    made = Picture(figsize=(8 * columns, 5.5 * lines), layout="constrained")
    heading = f"raytorchrpc {result.tree}, {result.started[:10]}; {'; '.join(result.machine)}"
    made.suptitle(heading, fontsize="medium", wrap=True)
    panels = made.subplots(lines, columns, squeeze=False)
    for ((case, device), contestants), panel in zip(shown.items(), panels.flat, strict=False):
        figures = [figure for some in contestants.values() for figure in some]
        by_bytes = all(isinstance(figure.size, int) and figure.size for figure in figures)
        places = {figure.label: float(figure.size) if by_bytes else number for number, figure in
                  enumerate({figure.label: figure for figure in figures}.values())}  # fmt: skip
        for number, (name, some) in enumerate(contestants.items()):
            middles = [figure.median or 0.0 for figure in some]
            below = [middle - (figure.low or middle) for middle, figure in zip(middles, some, strict=True)]
            above = [(figure.high or middle) - middle for middle, figure in zip(middles, some, strict=True)]
            style = {"color": f"C{number % 10}", "marker": "os^Dv"[number // 10 % 5], "capsize": 2, "markersize": 4}
            style |= {"linestyle": "-" if by_bytes else "none", "linewidth": 2.5 if number == 0 else 1.2}
            shift = 0.0 if by_bytes else 0.6 * (number / len(contestants) - 0.5)
            panel.errorbar(
                [places[one.label] + shift for one in some], middles, yerr=[below, above], label=name, **style
            )
        panel.set(title=f"{case}, {DEVICES[device]}", ylabel=figures[0].unit, yscale="log")
        label_logarithmic(panel.yaxis)
        if by_bytes:
            panel.set(xlabel="size of the tensor", xscale="log")
            label_logarithmic(panel.xaxis, lambda size, _: show_size(size), (1,))
        else:
            panel.set_xticks([*places.values()], [*places], fontsize="small")
        panel.grid(True, alpha=0.3)
        panel.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small")
    for panel in panels.flat[len(shown) :]:
        panel.remove()
    return made


def label_logarithmic(
    axis: Any, formatter: str | Callable[[float, Any], str] = "{x:g}", subs: Sequence[float] = (1, 2, 5)
) -> None:
    """Plain numbers at a logarithmic axis, however little of a decade it shows."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=subs, numticks=30))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(formatter)
