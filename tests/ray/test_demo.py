"""``raytorchrpc demo`` as a user meets it: an exit code, an output, and no process left behind."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
import ray

from tests.ray.commands import Command


@pytest.fixture
def demo() -> Iterator[Command]:
    demo = Command("demo")
    yield demo
    demo.end()


def without_waits(err: str) -> str:
    """What was said, but for whom a busy machine made ``init_group`` wait."""
    return "".join(line for line in err.splitlines(keepends=True) if not line.startswith("group 'default', after "))


@pytest.mark.slow
def test_reaches_the_accuracy_and_shows_what_the_calls_cost(cluster: None, demo: Command) -> None:
    code, out, err = demo.run("--quick", "--address", ray.get_runtime_context().gcs_address)
    assert code == 0, out + err

    accuracies = [float(text) for text in re.findall(r"test accuracy ([\d.]+)%", out)]
    assert accuracies[-1] >= 95, out
    for heading in ("Routes", "Statistics", "Direct or through Ray"):
        assert heading in out
    medians = {route: float(ms) for route, ms in re.findall(r"(direct|object store)\W+([\d.]+)", out)}
    assert medians.keys() == {"direct", "object store"}, out
    assert all(value > 0 for value in medians.values())
    assert demo.gone_within(40)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["Starting", "Training"])
def test_ctrl_c_leaves_no_process_behind(demo: Command, moment: str) -> None:
    process = demo.start("--target", "1.0")
    assert process.stdout is not None
    while not process.stdout.readline().startswith(moment):
        assert process.poll() is None, process.communicate()
    time.sleep(1)  # into the middle of it
    demo.interrupt()
    start = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert without_waits(err) == ""
    assert time.monotonic() - start < 40
    assert demo.gone_within(40)
