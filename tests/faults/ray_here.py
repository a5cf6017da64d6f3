"""A Ray for the fault suite, in tests and outside of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# Read by Ray when it starts; nothing here may report anything to anybody.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray

from tests.ray.local_ray import local_ray


@contextmanager
def ray_here(among_hosts: bool = False) -> Iterator[None]:
    """One that runs already is used, and left as it is. ``among_hosts``: there is one over several hosts, this too."""
    if ray.is_initialized():
        yield
        return
    if among_hosts:
        ray.init("auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
        try:
            yield
        finally:
            ray.shutdown()
        return
    with local_ray():
        yield
