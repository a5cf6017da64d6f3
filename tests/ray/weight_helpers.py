"""What tests of weights run in actors and readers, and one fixture of theirs."""

from __future__ import annotations

import pytest

import raytorchrpc as rtr
from tests import insides
from tests.polling import wait_until


@pytest.fixture(autouse=True)
def no_group_is_left() -> None:
    """Here one group serves the tests of a module."""


def came_from() -> dict[str, int]:
    """Bytes that came to this member, by peer."""
    found: dict[str, int] = {}
    for row in insides.counted_calls():
        found[row.peer] = found.get(row.peer, 0) + row.bytes_in
    return found


def no_readers(store: rtr.WeightStore) -> bool:
    """Whether soon nobody reads from a store of which this member is the home."""
    pool = insides.at_home(store).pool
    return wait_until(lambda: pool.readers == 0, 20)
