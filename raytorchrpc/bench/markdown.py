"""``--markdown``: a document about one or several runs, with every figure taken from their data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from raytorchrpc.bench.options import show_size
from raytorchrpc.bench.results import Run, published, published_sizes
from raytorchrpc.bench.tables import choice, figures, not_measured, show_ms

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
    parts = [_HEAD]
    for run, plot in zip(runs, plots, strict=True):
        facts = [*run.machine, f"raytorchrpc {run.version}, {run.started}, {run.seconds:.0f} s in all"]
        parts += [f"## {_name(run)}", "\n".join(f"- {fact}" for fact in facts)]
        parts.append(f"To reproduce:\n\n```console\n{run.command}\n```")
        if plot:
            parts.append(f"![Latency and bandwidth against size]({plot})")
        for device in run.devices():
            for table in (figures(run, device), choice(run, device)):
                if table is not None:
                    parts += [f"### {table.title}", grid(table.heads, table.rows)]
        about = {row.row: (row.row, row.kind, row.what) for row in run.rows if run.points(row)}
        parts += ["### The rows", grid(("row", "kind", "what it is"), about.values(), left=3)]
        if missing := not_measured(run):
            lines = "\n".join(f"- {line}" for line in missing)
            parts.append(f'<details markdown="1">\n<summary>Not measured, and why</summary>\n\n{lines}\n\n</details>')
    return "\n\n".join([*parts, *_published(runs)]) + "\n"


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
    rows = []
    for curve in curves:
        rows.append([f"**{curve.transport}**", f"published, {curve.scope}", *_cells(curve.ms, sizes)])
        for run in runs:
            for row in run.rows:
                points = {size: seconds * 1e3 for size, seconds in run.points(row)}
                if row.published == (curve.scope, curve.transport) and points:
                    rows.append([row.row, f"{_name(run)}, {row.device}", *_cells(points, sizes)])
    note = (
        f"{source} They come from other machines, and each row is forced to the transport in its name. The rows of the "
        "runs above with the same name follow it."
    )
    heads = ["transport", "where", *map(show_size, sizes)]
    return ["## Published figures", note, grid(heads, rows, left=2)]


def _cells(ms: Mapping[int, float], sizes: Sequence[int]) -> list[str]:
    return [show_ms(ms[size]) if size in ms else "" for size in sizes]
