"""What ``mkdocs build`` does beside its plugins: ``mkdocs.yml`` names this file.

- Pages below "Maintainers" stay out of the search, so that users find what is written for them.
- Pictures go into the page itself: their colours then follow the reader's choice of a dark or a light page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
_PICTURE = re.compile(r'<img alt="[^"]*" src="(?:\.\./)*assets/(?P<name>[\w-]+\.svg)" ?/?>')


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if any(section.title == "Maintainers" for section in page.ancestors):
        page.meta["search"] = {"exclude": True}
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    return _PICTURE.sub(lambda match: (DOCS / "assets" / match["name"]).read_text(encoding="utf-8").strip(), html)
