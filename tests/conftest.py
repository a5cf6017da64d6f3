"""What every test shares: its environment, one Ray, the order of the files, and skips where there are too few GPUs."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator

import pytest

# Whatever Ray runs on this machine besides: tests, and the programs that they start, have one of their own.
os.environ.setdefault("RAY_ADDRESS", "local")
# Nothing that a test starts may report anything to anybody.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# By default Ray gives its workers a low priority: beside a busy process they would get next to no CPU time.
os.environ.setdefault("RAY_worker_niceness", "0")
# The tests start hundreds of processes that import the package. Each would compile it anew without cached bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("raytorchrpc")
    group.addoption("--kills", type=int, default=200, help="of each adapter, in tests/faults/test_engine_faults.py")
    group.addoption("--seed", type=int, default=4, help="of these kills")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests and modules are collected, and stay: looking for garbage among them is in vain."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A Ray on this machine for all tests of this process."""
    from tests.ray.local_ray import local_ray  # only now: most tests need no Ray

    with local_ray():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files that need a Ray take longest, so they come first: the last files of a parallel run are short ones. Those of
    # tests/gpu come before: each starts a Ray of its own, which a process can do only before the one for all tests.
    with_ray = {item.path for item in items if "cluster" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: (item.path.parent.name != "gpu", item.path not in with_ray))
    marked = [(item, marks) for item in items if (marks := list(item.iter_markers("gpu")))]
    if not marked:
        return
    import torch  # only now: collecting tests that need no GPU stays quick

    visible = torch.cuda.device_count()
    for item, marks in marked:
        # A parameter may need more than the test's own mark says.
        needed = max(mark.kwargs.get("count", mark.args[0] if mark.args else 1) for mark in marks)
        if visible < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), {visible} visible"))
