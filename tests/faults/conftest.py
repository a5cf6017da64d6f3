"""Ray for the tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.ray_here import ray_here


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_here():
        yield
