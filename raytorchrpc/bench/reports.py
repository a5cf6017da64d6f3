"""Results for people: tables for the terminal, CSV, Markdown, pictures (``--plot``, which needs matplotlib)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from raytorchrpc.bench.cases import FLOOR, OURS, PATTERN_ROWS
from raytorchrpc.bench.results import Cell, Device, RowResult, Run, fit, published, published_sizes, show_size
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.text import paragraph
from raytorchrpc.text import table as text_table

DEVICE_TEXT: Mapping[Device, str] = {"cpu": "CPU tensors", "cuda": "CUDA tensors"}
_LINE_NOTE = (
    "per op, bandwidth: the line `time = per op + size / bandwidth` through the medians of the row.",
    "line within: the largest deviation of a median from that line.",
)
_CHOICE_NOTE = (
    "auto / it: the time of auto divided by that of the row to the left; below 1, auto is faster. Forced rows are "
    "raytorchrpc with one lane; peers are the rows for comparison, such as Ray's own transports.",
)
_WHAT = {
    "ms": "milliseconds per call",
    "calls/s": "calls per second",
    "% of a core": "CPU time of one member, % of a core",
}
#: The columns of patterns that compare ours, by the row that it is compared with.
_RATIOS = {"bare-torchrpc": f"{OURS} / bare-torchrpc", "ray": f"{OURS} / ray", FLOOR: f"x {FLOOR}"}
_PARTS = ("", "", "half", "a third", "a quarter", "a fifth", "a sixth", "a seventh", "an eighth", "a ninth", "a tenth")


class Table(NamedTuple):
    """Cells of text; the first column names the row."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    """What column names mean, one line each; to be shown once for all tables."""


def show_ms(value: float) -> str:
    """Milliseconds, to three figures."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def tables(run: Run, *, against_published: bool = False) -> list[Table]:
    """All tables of a run."""
    found: list[Table | None] = []
    for device, pattern in run.tables():
        if pattern:
            found += [_pattern(run, device, pattern), _costs(run, device, pattern)]
        else:
            found += [_sizes(run, device, against_published), _choice(run, device)]
    return [table for table in found if table is not None]


def _sizes(run: Run, device: Device, against_published: bool) -> Table:
    """Milliseconds by size with half the interquartile range, and each row's fitted line."""
    labels = run.labels(device)
    sizes = {cell.label: cell.bytes for cell in run.cells}
    rows: list[tuple[str, ...]] = []
    for row in run.measured(device):
        line = fit(run.points(row))
        fitted = ("", "", "")
        if line is not None:
            speed = f"{line.bytes_per_s / 1e9:.3g} GB/s" if line.bytes_per_s else "-"
            fitted = (f"{show_ms(line.per_op_s * 1e3)} ms", speed, f"{line.worst:.0%}")
        rows.append((row.row, *(_size(run.cell(row.row, device, label)) for label in labels), *fitted))
        scope, curve = _published_curve(row) if against_published else ("", {})
        if curve:
            cells = [show_ms(curve[sizes[label]]) if sizes[label] in curve else "" for label in labels]
            rows.append((f"  published, {scope}", *cells, "", "", ""))
    title = f"{DEVICE_TEXT[device]}, {run.scope}: milliseconds one way plus acknowledgement, median ± half the IQR"
    return Table(title, ("row", *labels, "per op", "bandwidth", "line within"), tuple(rows), _LINE_NOTE)


def _published_curve(row: RowResult) -> tuple[str, Mapping[int, float]]:
    """The scope of the published figures of that row, and milliseconds by bytes; empty if there are none."""
    return (row.published[0], published()[1].get(row.published, {})) if row.published else ("", {})


def _size(cell: Cell | None) -> str:
    if cell is None or cell.median is None:
        return "-"
    half = (cell.high - cell.low) / 2 if cell.high is not None and cell.low is not None else 0.0
    return f"{show_ms(cell.median)} ±{half / cell.median:.0%}"


def _choice(run: Run, device: Device) -> Table | None:
    """``auto`` against the fastest lane and peer at each size; None if it was not measured."""
    rows = []
    for label in run.labels(device):
        ours = run.cell(OURS, device, label)
        rivals = [_fastest(run, device, label, kind) for kind in ("raytorchrpc", "for comparison")]
        if ours is not None and ours.median is not None and any(rivals):
            against = [text for cell in rivals for text in (cell.row if cell else "-", _ratio(ours, cell))]
            rows.append((label, ours.via or "?", *against))
    heads = ("size", "auto uses", "fastest forced row", "auto / it", "fastest peer", "auto / it")
    return Table(f"{DEVICE_TEXT[device]}: what auto chose", heads, tuple(rows), _CHOICE_NOTE) if rows else None


def _fastest(run: Run, device: Device, label: str, kind: str) -> Cell | None:
    """The fastest row of that kind at that size, ours aside."""
    rivals = (row for row in run.measured(device) if row.kind == kind and row.comparable and row.row != OURS)
    cells = (run.cell(row.row, device, label) for row in rivals)
    return min((cell for cell in cells if cell and cell.median), key=lambda cell: cell.median or 0.0, default=None)


def _pattern(run: Run, device: Device, pattern: str) -> Table:
    """The medians of each row with the range of the repeats, and ours relative to the peers."""
    rows, labels = run.names(device, pattern), run.labels(device, pattern, measured=True)
    rivals = [row for row in _RATIOS if row in rows and OURS in rows]
    lines, unit = [], "ms"
    for label in labels:
        cells = {row: run.cell(row, device, label, pattern) for row in rows}
        unit = next(cell.unit for cell in cells.values() if cell is not None)
        ratios = (_ratio(cells.get(OURS), cells[row]) for row in rivals)
        lines.append((label, *map(_range, cells.values()), *ratios))
    what = "milliseconds per round of calls to all peers" if pattern == "all-to-all" else _WHAT[unit]
    title = f"{pattern}, {DEVICE_TEXT[device]}: {what}, median (range of the repeats)"
    notes = tuple(f"{_RATIOS[row]}: the figure of {OURS} divided by that of {row}." for row in rivals)
    return Table(title, ("case", *rows, *(_RATIOS[row] for row in rivals)), tuple(lines), notes)


def _range(cell: Cell | None) -> str:
    if cell is None or cell.median is None or cell.low is None or cell.high is None:
        return "-"
    figures = cell.median, cell.low, cell.high
    middle, low, high = (f"{value:,.0f}" if cell.unit == "calls/s" else show_ms(value) for value in figures)
    return f"{middle} ({low}-{high})" if cell.repeats > 1 else middle


def _ratio(ours: Cell | None, peer: Cell | None) -> str:
    if ours is None or ours.median is None or peer is None or not peer.median:
        return "-"
    return f"{ours.median / peer.median:.2f}"


def _costs(run: Run, device: Device, pattern: str) -> Table | None:
    """Context switches and CPU time of the caller and the callee; None for a pattern without calls."""
    rows, lines = run.names(device, pattern), []
    for label in run.labels(device, pattern, measured=True):
        cells = (run.cell(row, device, label, pattern) for row in rows)
        lines.append((label, *(text for cell in cells for text in _cost(cell))))
    if all(text == "-" for line in lines for text in line[1:]):
        return None
    sides = "per call and side" if pattern == "all-to-all" else "per call, caller + callee"
    heads = ("case", *(head for row in rows for head in (f"{row} switches", f"{row} CPU µs")))
    return Table(f"{pattern}, {DEVICE_TEXT[device]}: context switches and CPU time {sides}", heads, tuple(lines))


def _cost(cell: Cell | None) -> tuple[str, str]:
    if cell is None or cell.caller_switches is None or cell.caller_cpu_ms is None:
        return "-", "-"
    switches, cpu = [f"{cell.caller_switches:.1f}"], [f"{cell.caller_cpu_ms * 1e3:.0f}"]
    if cell.callee_switches is not None and cell.callee_cpu_ms is not None:
        switches.append(f"{cell.callee_switches:.1f}")
        cpu.append(f"{cell.callee_cpu_ms * 1e3:.0f}")
    return " + ".join(switches), " + ".join(cpu)


def not_measured(run: Run) -> list[str]:
    """One line per device and reason: the rows and cases without a figure because of it."""
    gaps: dict[tuple[Device, str, str], dict[str, list[str]]] = {}
    totals: dict[tuple[Device, str, str], int] = {}
    for cell in run.cells:
        totals[cell.device, cell.row, cell.pattern] = totals.get((cell.device, cell.row, cell.pattern), 0) + 1
        if cell.median is None:
            where = gaps.setdefault((cell.device, cell.row, cell.reason or "unknown"), {})
            where.setdefault(cell.pattern, []).append(cell.label)
    lines: dict[tuple[Device, str, str], list[str]] = {}
    for (device, row, reason), patterns in gaps.items():
        names = []
        for pattern, labels in patterns.items():
            whole = len(labels) == totals[device, row, pattern]
            some = f"{pattern} ({'; '.join(labels)})" if pattern else f" at {', '.join(labels)}"
            names.append(pattern if whole else some)
        lines.setdefault((device, ", ".join(names), reason), []).append(row)
    return [
        f"{DEVICE_TEXT[device]}: {', '.join(rows)}{where if where.startswith(' ') else where and f': {where}'}: {why}"
        for (device, where, why), rows in lines.items()
    ]


def conclusion(run: Run) -> str | None:
    """One sentence: the smallest call with a tensor by ours and by Ray; None if the two were not measured."""
    pattern = "quiet" if run.has_patterns else ""
    for cell in sorted(run.cells, key=lambda cell: cell.bytes):
        rays = run.cell("ray", cell.device, cell.label, pattern)
        if (cell.row, cell.pattern) == (OURS, pattern) and cell.bytes and cell.median and rays and rays.median:
            tensor = "CUDA tensor" if cell.device == "cuda" else "tensor"
            return f"Here a call with a {tensor} of {show_size(cell.bytes)} takes {_part(rays.median / cell.median)}."
    return None


def _part(times: float) -> str:
    """How long ours takes if Ray takes ``times`` as long."""
    if 2 / 3 < times < 1.5:
        return "about as long as Ray's"
    if times < 1:
        return f"{1 / times:.2g} times as long as Ray's"
    return f"{_PARTS[round(times)] if round(times) < len(_PARTS) else f'1/{times:.0f}'} of Ray's"


def to_csv(runs: Sequence[Run]) -> str:
    """One line per cell, with the reason if there is no figure."""
    out = io.StringIO()
    writer = csv.DictWriter(out, ["started", "scope", *Cell.model_fields], lineterminator="\n")
    writer.writeheader()
    for run in runs:
        for cell in run.cells:
            writer.writerow({"started": run.started, "scope": run.scope, **cell.model_dump()})
    return out.getvalue()


def plain(found: Table, width: int | None = None) -> str:
    """The table as lines of text. With ``width``, columns that do not fit follow below, each time behind the first."""
    widths = [max(map(len, column)) for column in zip(found.heads, *found.rows, strict=True)]
    blocks, used = [[0]], widths[0]
    for column, its_width in enumerate(widths[1:], 1):
        used += 2 + its_width
        if width is not None and used > width and len(blocks[-1]) > 1:
            blocks.append([0])
            used = widths[0] + 2 + its_width
        blocks[-1].append(column)
    title = found.title if width is None else paragraph("", found.title, width)
    texts = []
    for columns in blocks:
        heads, *rows = ([row[column] for column in columns] for row in (found.heads, *found.rows))
        texts.append(text_table(heads, rows, width=sum(widths) + 2 * len(widths), right=len(columns) - 1))
    return f"{title}\n" + "\n\n".join(texts)


# --- Markdown --------------------------------------------------------------------------------------------------------

_HEAD = """\
# Benchmark results

<!-- Written by `raytorchrpc bench --markdown`; change the command, not this file. -->

Every transport between two actors, timed side by side.

- **A sample** is a call with one tensor argument that returns None: one way plus an acknowledgement. The
  acknowledgement leaves when all bytes of the tensor are at the receiver, which verifies the first tensor of each size.
- **Figures** are medians in milliseconds, ± half the interquartile range. `per op` and `bandwidth` are the line
  `time = per_op + bytes / bandwidth` through the medians of a row, fitted by least squares on the relative error. The
  last column, `line within`, is the largest deviation of a median from that line.
- **Rows** alternate in blocks of ten samples, so that drift of the machine affects all of them. A block of fast samples
  begins with one to ten that are not counted (about 5 ms), because the other rows have displaced the caches. Sizes that
  do not fit into memory for all rows at once are measured row by row.
- **`auto`** is raytorchrpc's own choice; its other rows are forced. Rows of Ray Direct Transport are timed by the
  driver, the only place where it can be requested, and cost two actor calls. All others are timed in the sending actor.
  The limits make no call.
- **`auto / it`** is the time of `auto` divided by that of the row to the left: below 1, `auto` is faster. Forced rows
  are raytorchrpc with one lane; peers are the rows for comparison, such as Ray's own transports."""


def document(runs: Sequence[Run], plots: Sequence[str | None]) -> str:
    """Markdown. ``plots``: for each run, the path of its picture as the document is to name it."""
    patterns = any(run.has_patterns for run in runs)
    parts = ["# Patterns" if patterns else _HEAD]
    for run, plot in zip(runs, plots, strict=True):
        facts = [*run.machine, f"raytorchrpc {run.version}, {run.started}, {run.seconds:.0f} s in all"]
        parts += [f"## {_name(run)}", "\n".join(f"- {fact}" for fact in facts)]
        parts.append(f"To reproduce:\n\n```console\n{run.command}\n```")
        if plot:
            parts.append(
                f"![{'Each case of each pattern' if patterns else 'Latency and bandwidth against size'}]({plot})"
            )
        for table in tables(run):
            parts += [f"### {table.title}", grid(table.heads, table.rows)]
        measured = {cell.row for cell in run.cells if cell.median is not None}
        about = {row.row: (row.row, row.kind, row.what) for row in run.rows if row.row in measured}
        about = about or {row.name: (row.name, row.kind, row.what) for row in PATTERN_ROWS}
        parts += ["### The rows", grid(("row", "kind", "what it is"), about.values(), left=3)]
        if missing := not_measured(run):
            lines = "\n".join(f"- {line}" for line in missing)
            parts.append(f'<details markdown="1">\n<summary>Not measured, and why</summary>\n\n{lines}\n\n</details>')
    return "\n\n".join([*parts, *([] if patterns else _published(runs))]) + "\n"


def _name(run: Run) -> str:
    where = next((fact for fact in run.machine if " x " in fact), run.machine[0]).split(",")[0]
    return f"{where}, {run.scope}"


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table whose first ``left`` columns are aligned left."""
    rule = ["---"] * left + ["---:"] * (len(heads) - left)
    return "\n".join("| " + " | ".join(map(str.strip, cells)) + " |" for cells in (heads, rule, *rows))


def _published(runs: Sequence[Run]) -> list[str]:
    """The field's figures, each curve beside the rows of that name."""
    source, curves = published()
    sizes = published_sizes()

    def cells(ms: Mapping[int, float]) -> list[str]:
        return [show_ms(ms[size]) if size in ms else "" for size in sizes]

    rows = []
    for (scope, transport), curve in curves.items():
        rows.append([f"**{transport}**", f"published, {scope}", *cells(curve)])
        for run in runs:
            for row in (row for row in run.rows if row.published == (scope, transport)):
                if points := {size: seconds * 1e3 for size, seconds in run.points(row)}:
                    rows.append([row.row, f"{_name(run)}, {row.device}", *cells(points)])
    note = (
        f"{source} They come from other machines, and each row is forced to the transport in its name. The rows of the "
        "runs above with the same name follow it."
    )
    heads = ["transport", "where", *map(show_size, sizes)]
    return ["## Published figures", note, grid(heads, rows, left=2)]


# --- pictures --------------------------------------------------------------------------------------------------------

_STYLES = {"raytorchrpc": "-", "for comparison": "--", "limit": ":"}


def check_plots() -> None:
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
    check_plots()
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
        scope, found = _published_curve(row) if against_published else ("", {})
        if found:
            style |= {"marker": "x", "linestyle": "-.", "linewidth": 0.8, "alpha": 0.6}
            curve([(size, ms / 1e3) for size, ms in found.items()], label=f"{row.row}, published ({scope})", **style)
    for panel, what, unit in ((left, "time", "milliseconds"), (right, "bandwidth", "GB/s")):
        title = f"{DEVICE_TEXT[device]}, {run.scope}: {what}"
        panel.set(title=title, xlabel="size of the tensor", ylabel=unit, xscale="log", yscale="log")
        label_logarithmic(panel.xaxis, lambda size, _: show_size(size), (1,))
        label_logarithmic(panel.yaxis)
        panel.grid(True, alpha=0.3)
    right.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small")
