"""Deadlines for each test that asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.callees import Deadlines


@pytest.fixture
def deadlines() -> Iterator[Deadlines]:
    made = Deadlines()
    yield made
    made.stop()
