"""``--markdown``: a document about one or several runs, with every figure taken from their data."""

from __future__ import annotations

from collections.abc import Sequence

from raytorchrpc.bench.options import show_size
from raytorchrpc.bench.published import published
from raytorchrpc.bench.results import Run
from raytorchrpc.bench.tables import Table, choice, figures, not_measured, show_ms

_HEAD = """\
# Benchmark results

<!-- Written by `raytorchrpc bench --markdown`; change the command, not this file. -->

Every transport between two actors, timed side by side.

- **A sample** is a call with one tensor argument that returns None: one way plus an acknowledgement. The
  acknowledgement leaves when all bytes of the tensor are at the receiver, which verifies the first tensor of each size.
- **Figures** are medians in milliseconds, ± half the interquartile range. `per op` and `bandwidth` are the line
  `time = per_op + bytes / bandwidth` through the medians of a row, fitted by least squares on the relative error. The
  last column is the largest deviation of a median from that line.
- **Rows** alternate in blocks of ten samples, so that drift of the machine affects all of them. A block of fast samples
  begins with one to ten that are not counted (about 5 ms), because the other rows have displaced the caches. Sizes that
  do not fit into memory for all rows at once are measured row by row.
- **`auto`** is raytorchrpc's own choice; its other rows are forced. Rows of Ray Direct Transport are timed by the
  driver, the only place where it can be requested, and cost two actor calls. All others are timed in the sending actor.
  The limits make no call."""


def document(runs: Sequence[Run], plots: Sequence[str | None]) -> str:
    """Markdown. ``plots``: for each run, the path of its picture as the document is to name it."""
    parts = [_HEAD]
    for run, plot in zip(runs, plots, strict=True):
        parts.append(f"## {_name(run)}")
        facts = [*run.machine, f"raytorchrpc {run.version}, {run.started}, {run.seconds:.0f} s in all"]
        parts.append("\n".join(f"- {fact}" for fact in facts))
        parts.append(f"To reproduce:\n\n```console\n{run.command}\n```")
        if plot:
            parts.append(f"![Latency and bandwidth against size]({plot})")
        for device in run.devices():
            parts.append(_table(figures(run, device)))
            if compared := choice(run, device):
                parts.append(_table(compared))
        parts.append(_rows(run))
        missing = not_measured(run)
        if missing:
            lines = "\n".join(f"- {line}" for line in missing)
            parts.append(f'<details markdown="1">\n<summary>Not measured, and why</summary>\n\n{lines}\n\n</details>')
    parts.append(_published(runs))
    return "\n\n".join(parts) + "\n"


def _name(run: Run) -> str:
    where = next((fact for fact in run.machine if " x " in fact), run.machine[0]).split(",")[0]
    return f"{where}, {run.scope}"


def _table(table: Table) -> str:
    lines = [f"### {table.title}", "", _line(table.heads), _line(["---", *["---:"] * (len(table.heads) - 1)])]
    return "\n".join([*lines, *map(_line, table.rows)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.strip() for cell in cells) + " |"


def _rows(run: Run) -> str:
    seen: dict[str, tuple[str, str]] = {row.row: (row.kind, row.what) for row in run.rows if run.points(row)}
    table = [_line(("row", "kind", "what it is")), _line(("---", "---", "---"))]
    return "\n".join(["### The rows", "", *table, *(_line((name, *about)) for name, about in seen.items())])


def _published(runs: Sequence[Run]) -> str:
    """The field's figures, each curve beside the rows of that name."""
    source, curves = published()
    sizes = sorted({size for curve in curves for size in curve.ms})
    lines = [
        "## Published figures",
        "",
        f"{source} They come from other machines, and each row is forced to the transport in its name. The rows of the "
        "runs above with the same name follow it.",
        "",
        _line(("transport", "where", *(show_size(size) for size in sizes))),
        _line(("---", "---", *["---:"] * len(sizes))),
    ]
    for curve in curves:
        cells = (show_ms(curve.ms[size]) if size in curve.ms else "" for size in sizes)
        lines.append(_line((f"**{curve.transport}**", f"published, {curve.scope}", *cells)))
        for run in runs:
            for row in run.rows:
                points = dict(run.points(row))
                if row.published == (curve.scope, curve.transport) and points:
                    cells = (show_ms(points[size] * 1e3) if size in points else "" for size in sizes)
                    lines.append(_line((row.row, f"{_name(run)}, {row.device}", *cells)))
    return "\n".join(lines)
