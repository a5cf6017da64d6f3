"""What tests of weights run in homes and readers."""

from __future__ import annotations

import raytorchrpc as rtr
from tests import insides
from tests.polling import wait_until


def came_from() -> dict[str, int]:
    """Bytes that came to this member, by peer."""
    found: dict[str, int] = {}
    for row in insides.counted_calls():
        found[row.peer] = found.get(row.peer, 0) + row.bytes_in
    return found


def was_pulled(store: rtr.WeightStore, version: int) -> bool:
    """Whether soon some member has pulled a version from this one."""
    return wait_until(lambda: version in dict(store.stats().served), 60)


def no_readers(store: rtr.WeightStore) -> bool:
    """Whether soon nobody reads from a store of which this member is the home."""
    pool = insides.at_home(store).pool
    return wait_until(lambda: pool.readers == 0, 20)
