"""The table of findings in docs/reference/findings.md, for the tests that compare it with the code."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "findings.md").read_text(encoding="utf-8")
_TABLE = _PAGE.split("\n## ")[0]
_ROWS = re.findall(r"^\| `([\w-]+)` \| ([\w, ]+) \|", _TABLE, re.MULTILINE)
#: The levels of each finding, by id.
FINDINGS = {name: set(levels.split(", ")) for name, levels in _ROWS}
