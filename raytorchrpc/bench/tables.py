"""Results as tables, for the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raytorchrpc.bench.cases import Device, Figure, show_size
from raytorchrpc.bench.results import Result, published
from raytorchrpc.text import table as text_table

DEVICES: Mapping[Device, str] = {"cpu": "CPU", "cuda": "CUDA"}
LEGEND = (
    "x: a figure divided by the first contestant's. ~: the turns of a figure differ by more than half of it.\n"
    "Compare figures of one run only: times on a shared machine vary."
)


class Table(NamedTuple):
    """Cells of text; the first column names the line."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self, width: int | None = None) -> str:
        """Lines of text. With ``width``, columns that do not fit follow below, each time behind the first."""
        widths = [max(map(len, column)) for column in zip(self.heads, *self.rows, strict=True)]
        blocks, used = [[0]], widths[0]
        for column, needed in enumerate(widths[1:], 1):
            used += 2 + needed
            if width is not None and used > width and len(blocks[-1]) > 1:
                blocks.append([0])
                used = widths[0] + 2 + needed
            blocks[-1].append(column)
        texts = []
        for columns in blocks:
            heads, *rows = ([row[column] for column in columns] for row in (self.heads, *self.rows))
            texts.append(text_table(heads, rows, width=sum(widths) + 2 * len(widths), right=len(columns) - 1))
        return f"{self.title}\n" + "\n\n".join(texts)

    def markdown(self) -> str:
        """The lines without the title."""
        rule = ["---", *["---:"] * (len(self.heads) - 1)]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.heads, rule, *self.rows))


def show(value: float) -> str:
    """Three figures, and no exponent."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def tables(result: Result) -> list[Table]:
    """One for each case and device with a figure: contestants and sizes, the longer of both downwards."""
    groups: dict[tuple[str, Device], dict[str, dict[str, Figure]]] = {}
    for figure in result.figures:
        of_case = groups.setdefault((figure.case, figure.device), {})
        of_case.setdefault(figure.contestant, {})[figure.label] = figure
    made = []
    for (case, device), lines in groups.items():
        first = next(iter(lines.values()))
        known = [figure for line in lines.values() for figure in line.values() if figure.median is not None]
        labels = [*dict.fromkeys(figure.label for figure in known)]
        if all(isinstance(figure.size, int) for figure in known):
            labels = [figure.label for figure in sorted({one.size: one for one in known}.values(), key=_bytes)]
        cells = {
            name: [_cell(line.get(label), None if line is first else first.get(label)) for label in labels]
            for name, line in lines.items()
            if any(figure.median is not None for figure in line.values())
        }
        if not cells:
            continue
        if via := {label: figure.via for label, figure in first.items() if figure.via}:
            cells[f"lane of {next(iter(lines))}"] = [via.get(label, "-") for label in labels]
        title = f"{case}, {DEVICES[device]}" + (f" ({known[0].unit})" if known[0].unit else "")
        if len(cells) > len(labels):
            rows = [[name, *texts] for name, texts in cells.items()]
            made.append(Table(title, ["", *labels], rows))
        else:
            rows = [[label, *texts] for label, *texts in zip(labels, *cells.values(), strict=True)]
            made.append(Table(title, ["", *cells], rows))
    return made


def _bytes(figure: Figure) -> int:
    return int(figure.size)


def _cell(figure: Figure | None, first: Figure | None) -> str:
    if figure is None or figure.median is None:
        return "-"
    text = show(figure.median)
    if figure.low is not None and figure.high is not None and figure.high - figure.low > figure.median / 2:
        text += "~"
    if first is not None and first.median:
        ratio = figure.median / first.median
        text += f" x{ratio:.2g}" if ratio < 100 else f" x{ratio:,.0f}"
    return text


def summary(result: Result) -> list[str]:
    """A sentence for each device: how much faster raytorchrpc is than Ray at the best and at the smallest size."""
    times: dict[Device, dict[str, dict[int, float]]] = {}
    for one in result.figures:
        if one.case == "tensors" and isinstance(one.size, int) and one.median:
            times.setdefault(one.device, {}).setdefault(one.contestant, {})[one.size] = one.median
    lines = []
    for device, of in times.items():
        ours, rays = of.get("raytorchrpc", {}), of.get("ray", {})
        if gains := {size: rays[size] / ours[size] for size in sorted(ours.keys() & rays.keys())}:
            best, smallest = max(gains, key=lambda size: gains[size]), min(gains)
            at = dict.fromkeys((best, smallest))
            said = " and ".join(f"{show(gains[size])} times as fast as ray at {show_size(size)}" for size in at)
            lines.append(f"{DEVICES[device]}: raytorchrpc is {said} (the best and the smallest size).")
    return lines


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


def section(result: Result, picture: str | None = None, level: str = "##") -> list[str]:
    facts = [*result.machine, f"tree {result.tree}, {result.started[:10] or 'undated'}"]
    parts = [
        f"{level} {result.title or result.machine[0]}",
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
