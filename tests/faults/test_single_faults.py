"""Each fault by itself, on every lane: nobody else is lost, every call ends by its deadline, the group is whole again.

The group of a lane lives through all of them, one after another.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.faults.faults import MB, MOMENTS, ArenaFull, Fault, FdLimit, Garbage, Kill, Silence, Stop
from tests.faults.running import LANES, Running, running
from tests.faults.scenarios import CALLS

LARGE = ("mid-transfer", "replying")
FAULTS: dict[str, tuple[Fault, ...]] = {
    **{f"SIGKILL {at}": (Kill("c1", at, 40 * MB if at in LARGE else 8),) for at in MOMENTS},
    **{f"SIGSTOP {at}": (Stop("c2", at, 40 * MB if at in LARGE else 8, 1.5),) for at in MOMENTS},
    "no room in shared memory": (ArenaFull("c3"),),
    "no descriptors left": (FdLimit("c4", 0),),
    "garbage": (Garbage("c5", 20, 1),),
    "silence": (Silence("c0", 60),),
    "several at once": (Kill("c1", "executing"), Kill("c5", "replying", 40 * MB), Stop("c3", "receiving")),
}


@pytest.fixture(scope="module")
def group(request: pytest.FixtureRequest, cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    lanes: str = request.param
    if lanes == "nixl" and importlib.util.find_spec("nixl") is None:
        pytest.skip("NIXL is not installed: pip install '.[nixl]' in a checkout")
    with running(CALLS, tmp_path_factory.mktemp(lanes), 1 + list(LANES).index(lanes), lanes) as run:
        yield run


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("group", LANES, indirect=True)
def test_a_fault_costs_nobody_else_anything(group: Running, fault: str) -> None:
    struck = group.round(FAULTS[fault])
    group.rest()
    found, group.report.violations = group.report.violations, []
    assert found == []
    assert any(one.landed for one in struck), "of several, one may strike the call at whose moment another would"
