"""Processes of the tests. Installs the lanes of ``examples/own_lanes`` for this run, before the suites ask the registry
for its lanes.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.peers import Process
from tests.distributions import install_own_lanes

_FOLDER = install_own_lanes(Path(tempfile.mkdtemp(prefix="own-lanes-")))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
sys.path.append(str(_FOLDER))  # other processes of a test get this one's path


@pytest.fixture
def spawn() -> Iterator[Callable[[], Process]]:
    """Starts processes, which end with the test."""
    spawned: list[Process] = []

    def start() -> Process:
        spawned.append(Process())
        return spawned[-1]

    yield start
    for process in spawned:
        process.kill()


@pytest.fixture
def process(spawn: Callable[[], Process]) -> Process:
    """A process that ends with the test."""
    return spawn()


@pytest.fixture
def form() -> Iterator[Callable[..., Any]]:
    """Makes pairs of members with a tensor lane, by ``make_pair`` of test_tensor_lanes; they end with the test."""
    from tests.conformance.test_tensor_lanes import make_pair  # only now: that module asks for the lanes

    formed: list[Any] = []

    def form_one(*args: Any) -> Any:
        formed.append(make_pair(*args))
        return formed[-1]

    yield form_one
    for pair in formed:
        pair.kill()
