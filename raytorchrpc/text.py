"""Settings as text, explained in one line where they are invalid; and tables of plain text."""

from __future__ import annotations

import difflib
import html
import json
import re
import reprlib
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}
_UNITS["TI"] = 1 << 40
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", re.IGNORECASE)

#: Columns where the output is no terminal, and the most that running text takes.
_NO_TERMINAL, _WIDEST_TEXT = 120, 100


# --- settings -------------------------------------------------------------------------------------------------------


def size_in_bytes(text: str) -> int | None:
    """Bytes of ``1250``, ``1.25KB``, ``2.5 GB`` (powers of 1000) or ``8MiB`` (of 1024); None for any other text."""
    match = _SIZE.fullmatch(text)
    return None if match is None else round(float(match[1]) * _UNITS[(match[2] or "").upper()])


def read_bytes(value: Any) -> Any:
    """Validator for a number of bytes that may be given as text with a unit.

    pydantic's ``ByteSize`` ignores what follows the number and its unit: it takes ``1.5.2MB`` for one byte.
    """
    if not isinstance(value, str):
        return value
    size = size_in_bytes(value)
    if size is None:
        raise ValueError("must be a number of bytes, or text with a unit, such as '512MiB' or '4GB'")
    return size


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like this one; None if none is."""
    names = list(known)
    similar = difflib.get_close_matches(name, names, 1, 0.5) or [each for each in names if name and name in each]
    return similar[0] if similar else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean ...?)``; empty if no known name is like it."""
    similar = nearest(name, known)
    return f" (did you mean {similar!r}?)" if similar else ""


def explain(error: ValidationError, known: Iterable[str], given: Mapping[str, str] | None = None) -> str:
    """Every problem with the settings of a model, in one line.

    Args:
        known: the model's fields.
        given: by field, the text and the name by which the user gave it, if not as an argument of that name.
    """
    return "; ".join(_problem(item, list(known), given or {}) for item in error.errors())


def _problem(item: Any, known: list[str], given: Mapping[str, str]) -> str:
    kind, (field, *inside) = item["type"], [*map(str, item["loc"]), ""][: max(1, len(item["loc"]))]
    if kind == "extra_forbidden":
        return f"no setting is named {field!r}{did_you_mean(field, known) or '; known: ' + ', '.join(known)}"
    if kind == "missing":
        return f"{field} is required"
    value = reprlib.repr(item["input"])
    subject = f"{field}{''.join(f'[{step}]' for step in inside)}={value}"
    if inside[-1:] == ["[key]"]:
        subject = f"the key {value} in {field}"
    if field in given:
        subject = given[field] + (f": item {value}" if inside else "")
    if kind in ("tuple_type", "list_type"):
        return f"{subject} must be a list{_as_list(field, item['input'])}"
    if kind == "value_error":
        text = str(item["ctx"]["error"])
        if text.startswith("must "):
            return f"{subject} {text}"
        return f"{given.get(field, field)}: {text}" if field else text
    says = re.sub(r"^(Input|String) should ", "must ", item["msg"])
    return f"{subject} {says}"


def _as_list(field: str, value: Any) -> str:
    """The list that the user seems to mean."""
    if not isinstance(value, (str, int)):
        return ""
    parts = [part.strip() for part in str(value).split(",") if part.strip()]
    return f": write {field}={json.dumps([int(part) if part.lstrip('-').isdigit() else part for part in parts])}"


# --- tables ---------------------------------------------------------------------------------------------------------


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
    lines: list[str] = []
    for number, row in enumerate(cells):
        for line in range(max(map(len, row))):
            texts = [cell[line] if line < len(cell) else "" for cell in row]
            padded = [text.ljust(width) for text, width in zip(texts, widths, strict=True)]
            if right:
                padded[-right:] = [t.rjust(w) for t, w in zip(texts[-right:], widths[-right:], strict=True)]
            lines.append("  ".join(padded).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return lines


class Shown:
    """Base of what a prompt and a notebook show as its text, as ``print`` does."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def paragraph(head: str, text: str, width: int | None = None, indent: int = 4) -> str:
    """``text`` behind ``head``, in lines of at most ``width`` and at most 100 columns.

    Args:
        width: columns that are available; None: those of the terminal.
        indent: spaces before all lines but the first.
    """
    width = min(max(terminal_columns() if width is None else width, len(head) + 20), _WIDEST_TEXT)
    return textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * indent, break_on_hyphens=False)


def list_cell(items: str, width: int) -> str:
    """``a | b | c`` as a cell of several lines, broken behind a ``|`` only."""
    glued = items.replace(" |", "\xa0|")
    lines = textwrap.wrap(glued, max(width, 1), break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\xa0", " ")
