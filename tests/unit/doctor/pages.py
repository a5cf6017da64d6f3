"""The table of findings in docs/doctor.md, for the tests that compare it with the code."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text(encoding="utf-8")
_TABLE = _PAGE.split("## Findings")[1].split("\n## ")[0]
_ROWS = re.findall(r"^\| `([\w-]+)` \| ([\w, ]+) \|", _TABLE, re.MULTILINE)
#: The levels of each finding, by id.
FINDINGS = {name: set(levels.split(", ")) for name, levels in _ROWS}
