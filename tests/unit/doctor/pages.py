"""The findings that docs/reference/findings.md lists, which docs/hooks.py takes from the code."""

from __future__ import annotations

import runpy
from pathlib import Path

_LISTED = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "hooks.py"))["findings"]()
#: The levels of each finding, by id.
FINDINGS: dict[str, set[str]] = {name: finding.levels for name, finding in _LISTED.items()}
#: What the page says about each.
TEXTS: dict[str, list[str]] = {name: [*finding.seen, *finding.meaning] for name, finding in _LISTED.items()}
