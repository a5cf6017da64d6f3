"""Tables of plain text for terminals, logs and files."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

#: Columns where the output is no terminal, and the most that running text takes.
_NO_TERMINAL, _WIDEST_TEXT = 120, 100


def terminal_columns() -> int:
    """Columns of the terminal, or of COLUMNS in the environment; 120 where the output is neither."""
    return shutil.get_terminal_size((_NO_TERMINAL, 24)).columns


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, width: int, right: int = 0) -> str:
    """The rows in columns that are two spaces apart.

    A cell may hold several lines. If the table is wider than ``width``, the first two columns become one, with the cell
    of the second on a line below that of the first. If that is still too wide, this column is broken anywhere.

    Args:
        right: how many columns, counted from the last, are aligned right.
    """
    lines = _lines([heads, *rows], right)
    if max(map(len, lines)) > width:
        stacked = [[f"{row[0]}\n{textwrap.indent(row[1], '  ')}", *row[2:]] for row in (heads, *rows)]
        lines = _lines(stacked, right)
        if (over := max(map(len, lines)) - width) > 0:
            room = max(len(line) for row in stacked for line in row[0].split("\n")) - over
            lines = _lines([[_broken(row[0], max(room, 8)), *row[1:]] for row in stacked], right)
    return "\n".join(lines)


def _broken(cell: str, width: int) -> str:
    pieces = (line[start : start + width] for line in cell.split("\n") for start in range(0, len(line), width))
    return "\n".join(pieces)


def _lines(rows: Sequence[Sequence[str]], right: int) -> list[str]:
    cells = [[cell.split("\n") for cell in row] for row in rows]
    widths = [max(len(line) for row in cells for line in row[column]) for column in range(len(cells[0]))]
    found: list[str] = []
    for number, row in enumerate(cells):
        for line in range(max(map(len, row))):
            texts = [cell[line] if line < len(cell) else "" for cell in row]
            padded = [text.ljust(width) for text, width in zip(texts, widths, strict=True)]
            if right:
                padded[-right:] = [t.rjust(w) for t, w in zip(texts[-right:], widths[-right:], strict=True)]
            found.append("  ".join(padded).rstrip())
        if number == 0:
            found.append("  ".join("-" * width for width in widths))
    return found


def paragraph(head: str, text: str, width: int) -> str:
    """``text`` behind ``head``, in lines of at most ``width`` and at most 100 columns; all but the first indented."""
    indent = " " * 4
    width = min(max(width, len(head) + 20), _WIDEST_TEXT)
    return textwrap.fill(
        text, width, initial_indent=head, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def list_cell(items: str, width: int) -> str:
    """``a | b | c`` as a cell of several lines, broken behind a ``|`` only."""
    glued = items.replace(" |", "\xa0|")
    lines = textwrap.wrap(glued, max(width, 1), break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\xa0", " ")
