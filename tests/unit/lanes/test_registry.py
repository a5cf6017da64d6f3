"""The table of lanes, and lanes that other distributions bring."""

from __future__ import annotations

import ast
import logging
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

from raytorchrpc.config import GroupConfig
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.lanes import registry
from raytorchrpc.lanes.base import MessageLane, TensorLane
from raytorchrpc.lanes.common.handshake import Credentials
from raytorchrpc.lanes.registry import LANES
from raytorchrpc.lanes.setup import LaneSetup
from raytorchrpc.routing.planner import plan
from raytorchrpc.topology.endpoint import Endpoint
from tests.distributions import MEMFD, OWN_LANES, UNIX_STREAM, install_own_lanes, write
from tests.unit import clusters
from tests.unit.sources import parse

PACKAGE = Path(registry.__file__).parents[1]
OWN = "own-lanes 0.1"
BOTH = {MEMFD: OWN, UNIX_STREAM: OWN}
ASKED = (UNIX_STREAM, MEMFD, "socket", "shm", "torchrpc")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of this process's path, to write distributions to."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def own_lanes(site: Path) -> Path:
    return install_own_lanes(site)


def neighbours(*lanes: dict[str, str]) -> dict[str, Endpoint]:
    """Two members of one host with these lanes of other distributions."""
    found = clusters.one_host(2)
    return {name: e.changed({"lanes": has}) for (name, e), has in zip(found.items(), lanes, strict=True)}


# --- the rows of this package ------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", LANES, ids=lambda row: row.name)
def test_a_row_says_what_its_lane_is(row: registry.Lane) -> None:
    made: Any = typing.get_type_hints(registry.resolve(row, row.make))["return"]
    assert made.name == row.name
    assert issubclass(made, TensorLane if row.out_of_band else MessageLane)
    assert not row.rrefs or made.capabilities.rrefs
    assert not row.carries or callable(registry.resolve(row, row.rule))


def test_the_configuration_knows_the_lanes_of_the_table() -> None:
    for name in registry.names():
        assert GroupConfig(lanes=(name,)).lanes == (name,)
    with pytest.raises(ConfigurationError, match="unknown lane"):
        GroupConfig(lanes=(registry.LOOPBACK,))


def test_nothing_but_the_table_and_a_lane_itself_asks_for_a_lane_by_name() -> None:
    names = {row.name for row in LANES}
    of_torch = {"group/process_group.py"}  # "nccl" is a backend of torch.distributed there
    for package in ("routing", "calls", "group", "patterns", "tensors", "rdt"):
        for file in (PACKAGE / package).rglob("*.py"):
            for node in ast.walk(parse(file.read_text())):
                if isinstance(node, ast.Compare) and str(file.relative_to(PACKAGE)) not in of_torch:
                    compared = {side.value for side in ast.walk(node) if isinstance(side, ast.Constant)}
                    assert not compared & names, f"{file.name}:{node.lineno}"


# --- lanes of other distributions ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_lanes")
def test_a_lane_of_another_distribution_is_known_by_its_name() -> None:
    assert {MEMFD, UNIX_STREAM} <= set(registry.names())
    assert GroupConfig(lanes=(MEMFD, "socket", "torchrpc")).lanes == (MEMFD, "socket", "torchrpc")
    assert registry.distributions((MEMFD, "socket", "none such")) == {MEMFD: OWN}
    assert registry.lane(MEMFD).out_of_band


def test_it_is_unknown_where_the_distribution_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The conformance suites install it in the processes that run them.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not Path(entry, "own_lanes").exists()])
    with pytest.raises(ConfigurationError, match=f"unknown lane '{MEMFD}'; known lanes: socket, shm"):
        GroupConfig(lanes=(MEMFD,))


def test_a_new_lane_needs_no_word_about_it_in_this_package() -> None:
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        assert (
            "own_lanes" not in text.replace("known_lanes", "") and UNIX_STREAM not in text and f'"{MEMFD}"' not in text
        ), file


@pytest.mark.usefixtures("own_lanes")
def test_it_is_preferred_where_it_is_asked_for_and_unused_elsewhere() -> None:
    asked = plan(neighbours(BOTH, BOTH), GroupConfig(lanes=ASKED))
    route = asked.route("worker_0", "worker_1")
    assert [choice.lane for choice in route.lanes("calls")] == [UNIX_STREAM, "socket", "torchrpc"]
    assert [choice.lane for choice in route.lanes("cpu")] == [MEMFD, "shm", "torchrpc"]
    assert {MEMFD, UNIX_STREAM} <= set(asked.lanes_of("worker_0"))
    assert "CPU tensors: memfd (memfds): same host" in asked.explain("worker_0", "worker_1")
    for config in (GroupConfig(), GroupConfig(lanes=(f"-{MEMFD}",))):
        route = plan(neighbours(BOTH, BOTH), config).route("worker_0", "worker_1")
        assert (route.message_lane, route.lanes("cpu")[0].lane) == ("socket", "shm")
        assert MEMFD not in {no.lane for no in route.rejected}


@pytest.mark.usefixtures("own_lanes")
@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (BOTH, {}, f"{OWN} is not installed in worker_1"),
        ({}, {}, f"{OWN} is not installed in worker_0 and worker_1"),
        (BOTH, {MEMFD: "own-lanes 0.2"}, f"different versions: worker_0 has {OWN}, worker_1 has own-lanes 0.2"),
    ],
)
def test_members_that_do_not_both_have_it_use_another(a: dict[str, str], b: dict[str, str], reason: str) -> None:
    route = plan(neighbours(a, b), GroupConfig(lanes=ASKED)).route("worker_0", "worker_1")
    assert (route.message_lane, route.lanes("cpu")[0].lane) == ("socket", "shm")
    assert reason in [no.reason for no in route.rejected if no.lane == MEMFD]


@pytest.mark.usefixtures("own_lanes")
def test_a_tensor_lane_needs_a_lane_for_calls_that_carries_its_descriptors() -> None:
    route = plan(neighbours(BOTH, BOTH), GroupConfig(lanes=(MEMFD, "torchrpc"))).route("worker_0", "worker_1")
    assert route.lanes("cpu")[0].lane == "torchrpc"
    (rejected,) = (no for no in route.rejected if no.lane == MEMFD)
    assert rejected.reason == "calls go by torchrpc, which carries no tensor descriptors"


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (PACKAGE.parent / "docs" / "howto" / "write-a-lane.md").read_text()
    for file in ("own_lanes/rows.py", "own_lanes/memfd.py", "pyproject.toml"):
        assert (OWN_LANES / file).is_file() and f"<!-- begin file examples/own_lanes/{file} -->" in page, file


# --- broken distributions ------------------------------------------------------------------------------------------

ROW = "from raytorchrpc.lanes.registry import Lane\n"
LANE = (
    ROW + "LANE = Lane({name!r}, {carries!r}, 'rows:rule', 'rows:make'{more})\ndef rule(pair, traffic): return 'no'\n"
)


def row_text(name: str = "odd", carries: tuple[str, ...] = ("cpu",), more: str = "") -> str:
    return LANE.format(name=name, carries=carries, more=more)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import no_such_module", "cannot be loaded: ModuleNotFoundError"),
        ("1 / 0", "cannot be loaded: ZeroDivisionError"),
        ("", "cannot be loaded: AttributeError"),
        ("LANE = 'odd'", "is of type str"),
        (row_text(name="other"), "has the name 'other' in its row"),
        (row_text(carries=()), r"has carries=\(\)"),
        (row_text(carries=("letters",)), "has carries=.*letters"),
        (row_text(more=", always=True"), "only raytorchrpc's own lanes may set"),
        (ROW + "LANE = Lane('odd', ('cpu',), 'rows:no_rule', 'rows:make')", "'rows:no_rule' cannot be imported"),
    ],
)
def test_a_broken_lane_is_an_error_of_the_groups_that_ask_for_it_alone(
    site: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    monkeypatch.delitem(sys.modules, "rows", raising=False)
    write(site, "odd-lane", {"odd": "rows:LANE"}, rows=text)
    config = GroupConfig(lanes=("odd", "socket", "torchrpc"))  # known by the metadata alone
    with pytest.raises(ConfigurationError, match=f"odd-lane 0.1.*{why}"):
        plan(neighbours({"odd": "odd-lane 0.1"}, {"odd": "odd-lane 0.1"}), config)
    assert plan(neighbours({}, {}), GroupConfig()).route("worker_0", "worker_1").message_lane == "socket"


def test_two_distributions_with_one_lane_are_an_error_that_names_both(site: Path) -> None:
    write(site, "first", {"odd": "rows:LANE"})
    write(site, "second", {"odd": "rows:LANE"})
    config = GroupConfig(lanes=("odd", "socket", "torchrpc"))
    with pytest.raises(ConfigurationError, match=r"(first 0\.1|second 0\.1| and ){3} each declare"):
        plan(neighbours({}, {}), config)


def test_a_distribution_cannot_replace_a_lane_of_this_package(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(site, "impostor", {"socket": "rows:LANE", "odd": "rows:LANE"})
    with caplog.at_level(logging.WARNING):
        GroupConfig(lanes=("-odd",))
    assert "impostor 0.1 declares a lane 'socket'; raytorchrpc's own is used" in caplog.text
    assert registry.lane("socket") in LANES


@pytest.mark.usefixtures("own_lanes")
def test_a_factory_that_makes_something_else_is_an_error() -> None:
    row = registry.lane(MEMFD)
    for wrong in (
        registry.Lane(MEMFD, ("cpu",), row.rule, "builtins:id", out_of_band=True),
        registry.Lane("other", ("cpu",), row.rule, row.make, out_of_band=True),
        registry.Lane(MEMFD, ("cpu",), row.rule, row.make),
    ):
        setup = LaneSetup("a", Credentials(b"s" * 32), GroupConfig(), clusters.member)
        with pytest.raises(ConfigurationError, match=r"expected a (TensorLane|MessageLane) named"):
            setup.make(wrong)
