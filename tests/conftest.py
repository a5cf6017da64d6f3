"""What every test shares: the ``gpu`` marker skips, with its reason, where there are too few GPUs."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu"))]
    if not marked:
        return
    import torch  # only now: collecting tests that need no GPU stays quick

    visible = torch.cuda.device_count()
    for item, mark in marked:
        needed = mark.kwargs.get("count", mark.args[0] if mark.args else 1)
        if visible < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), {visible} visible"))
