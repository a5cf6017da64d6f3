"""Results as tables, for the terminal and in Markdown."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from raytorchrpc.bench.cases import DEVICES, Device, Figure
from raytorchrpc.bench.results import Result, published

LEGEND = (
    "x: a figure divided by the first contestant's. ~: the turns of a figure differ by more than half of it.\n"
    "Compare figures of one run only: times on a shared machine vary."
)


class Table(NamedTuple):
    """Cells of text; the first column names the line."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self, width: int = 10_000) -> str:
        """Lines of text; cells that do not fit into the width are broken."""
        from rich import box, console, table  # here: pages are written without it

        dashes = box.Box("    \n    \n -- \n" + 5 * "    \n", ascii=True)
        drawn = table.Table(box=dashes, show_edge=False, pad_edge=False, header_style="")
        for number, head in enumerate(self.heads):
            drawn.add_column(head, justify="right" if number else "left", overflow="fold", no_wrap=not number)
        for row in self.rows:
            drawn.add_row(*row)
        lines = io.StringIO()
        console.Console(file=lines, width=width, markup=False, highlight=False).print(drawn)
        return "\n".join([self.title, *map(str.rstrip, lines.getvalue().splitlines())])

    def markdown(self) -> str:
        """The lines without the title."""
        rule = ["---", *["---:"] * (len(self.heads) - 1)]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.heads, rule, *self.rows))


def show(value: float) -> str:
    """Three figures, and no exponent."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


class Panel(NamedTuple):
    """The figures of a case on a device; reasons are left out."""

    title: str
    labels: Sequence[str]
    """Its sizes, in ascending order."""
    lines: Mapping[str, Mapping[str, Figure]]
    """By contestant and label."""
    unit: str


def panels(result: Result) -> Iterator[Panel]:
    """One for each case and device with a figure."""
    for case, device in dict.fromkeys((one.case, one.device) for one in result.figures):
        every = [one for one in result.figures if (one.case, one.device) == (case, device)]
        figures = [one for one in every if one.median is not None]
        labels = [*dict.fromkeys(one.label for one in sorted(figures, key=lambda one: one.place))]
        lines = {name: {one.label: one for one in figures if one.contestant == name} for name in
                 dict.fromkeys(one.contestant for one in every)}  # fmt: skip
        if figures:
            lines = {name: line for name, line in lines.items() if line}
            yield Panel(f"{case}, {DEVICES[device]}", labels, lines, figures[0].unit)


def tables(result: Result) -> list[Table]:
    """One for each panel: contestants and sizes, the longer of both downwards."""
    made = []
    for title, labels, lines, unit in panels(result):
        name, first = next(iter(lines.items()))
        rows = [["", *labels], [name, *(_cell(first.get(label)) for label in labels)]]
        for other, line in [*lines.items()][1:]:
            rows.append([other, *(_cell(line.get(label), first.get(label)) for label in labels)])
        if any(one.via for one in first.values()):
            rows.append([f"lane of {name}", *((label in first and first[label].via) or "-" for label in labels)])
        if len(rows) - 1 <= len(labels):
            rows = [[*row] for row in zip(*rows, strict=True)]
        made.append(Table(f"{title} ({unit})" if unit else title, rows[0], rows[1:]))
    return made


def _cell(figure: Figure | None, first: Figure | None = None) -> str:
    if figure is None or figure.median is None:
        return "-"
    text = show(figure.median)
    if figure.low is not None and figure.high is not None and figure.high - figure.low > figure.median / 2:
        text += "~"
    if first is not None and first.median:
        ratio = figure.median / first.median
        text += f" x{ratio:.2g}" if ratio < 100 else f" x{ratio:,.0f}"
    return text


def gaps(result: Result) -> list[str]:
    """One line per reason: the contestants without a figure because of it, and where not all of theirs are missing."""
    taken: dict[tuple[Device, str], list[Figure]] = {}
    for figure in result.figures:
        taken.setdefault((figure.device, figure.contestant), []).append(figure)
    lines: dict[str, list[str]] = {}
    for (device, contestant), figures in taken.items():
        for reason in dict.fromkeys(figure.reason for figure in figures if figure.reason):
            holes = [figure for figure in figures if figure.reason == reason]
            labels, cases = (dict.fromkeys(getattr(one, field) for one in holes) for field in ("label", "case"))
            where = f" at {', '.join(labels)}" if len(labels) < len({one.label for one in figures}) else ""
            where += f" ({'; '.join(cases)})" if len(cases) < len({one.case for one in figures}) else ""
            lines.setdefault(f"{DEVICES[device]}: |{where}: {reason}", []).append(contestant)
    return [line.replace("|", ", ".join(contestants), 1) for line, contestants in lines.items()]


def document(results: Sequence[Result], pictures: Sequence[str | None] = ()) -> str:
    """Results in Markdown. ``pictures``: for each, the path of its picture as the document is to name it."""
    parts = ["# Benchmark results"]
    for number, result in enumerate(results):
        parts += section(result, pictures[number] if number < len(pictures) else None)
    return "\n\n".join(parts) + "\n"


def section(result: Result, picture: str | None = None) -> list[str]:
    """The parts of a page about a result; ``picture``: the path of its picture."""
    facts = [*result.machine, f"tree {result.tree}, {result.started[:10] or 'undated'}"]
    parts = [
        f"## {result.title or result.machine[0]}",
        f"{result.about}\n\n`{result.command}`: {'; '.join(facts)}.".strip(),
    ]
    parts += [f"![Each figure of each case]({picture})"] if picture else []
    for table in tables(result):
        parts += [f"**{table.title}**", table.markdown()]
    if any(name.endswith(", published") for name in (figure.contestant for figure in result.figures)):
        parts.append(published()[0])
    if missing := gaps(result):
        lines = "\n".join(f"- {line}" for line in missing)
        parts.append(f'<details markdown="1">\n<summary>Not measured, and why</summary>\n\n{lines}\n\n</details>')
    return parts
