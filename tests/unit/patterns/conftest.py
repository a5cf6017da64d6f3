"""A group whose members live in this process, for each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import raytorchrpc as rtr
from tests.unit.members import Members


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a home that answers late, as on a busy machine: what it answers counts, such as Empty."""
    monkeypatch.setattr("raytorchrpc.patterns.handle.ANSWER_S", 20.0)
    monkeypatch.setattr("raytorchrpc.patterns.handle._ANSWER_NOW_S", 20.0)


@pytest.fixture
def members(request: Any) -> Iterator[Members]:
    """Parametrize indirectly with a GroupConfig for other settings."""
    made = Members(getattr(request, "param", rtr.GroupConfig(rpc_timeout_s=20.0)))
    try:
        yield made
    finally:
        made.close()
