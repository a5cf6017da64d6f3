"""Tests with the real packages run where ``make test-integrations`` has installed them, and are skipped elsewhere."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: Of packages that have another name there.
MODULES = {"transferqueue": "transfer_queue"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """tests/integrations/test_NAME.py and test_NAME_MORE.py need the package NAME; looking for it imports nothing."""
    for item in items:
        if item.path.parent != HERE:
            continue
        # Some start two engines, one after the other, and an engine has 200 s to start on a busy machine. A call that
        # hangs is named earlier: each has a deadline of its own.
        item.add_marker(pytest.mark.timeout(900))
        package = item.path.stem.split("_")[1]
        if find_spec(MODULES.get(package, package)) is None:
            item.add_marker(pytest.mark.skip(reason=f"needs {package}: make test-integrations ENGINES={package}"))
