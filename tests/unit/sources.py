"""Reads source code of the package and of tests."""

from __future__ import annotations

import ast


def parse(source: str) -> ast.Module:
    """As ``ast.parse``. In CPython 3.11 that fails by accident while a thread that formats a traceback parses as well:
    both count their depth in one place.
    """
    for _ in range(20):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)
