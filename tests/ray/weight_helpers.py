"""What tests of weights run in actors and readers, and one fixture of theirs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ray

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


def pid_of(actor: Any) -> int | None:
    """The process of an actor; None while it restarts."""
    try:
        return int(ray.get(actor.run.remote(os.getpid), timeout=60))
    except ray.exceptions.RayActorError:
        return None
