"""A group whose members live in this process, for each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import raytorchrpc as rtr
from tests.unit.members import Members


@pytest.fixture
def members(request: Any) -> Iterator[Members]:
    """Parametrize indirectly with a GroupConfig for other settings."""
    made = Members(getattr(request, "param", rtr.GroupConfig(rpc_timeout_s=20.0)))
    try:
        yield made
    finally:
        made.close()
