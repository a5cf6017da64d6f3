"""An engine's model follows a store: through new stores of the same name, and updates that fail midway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc.integrations.engines import Progress
from raytorchrpc.integrations.follower import Follower
from tests.unit.members import Members

NAMES = ("one", "two")


class Model:
    """Pulls one tensor after the other. ``between``: what happens between the two, once."""

    def __init__(self, members: Members, gather: Callable[[Any], list[Any]] | None = None) -> None:
        self.weights = {name: torch.zeros(2) for name in NAMES}
        self.members, self.between = members, lambda: None
        self.brought: list[int] = []
        options = {} if gather is None else {"gather": gather}
        self.follower = Follower("the engine", "policy", self.write, timeout=5, **options)

    def write(self, store: rtr.WeightStore, version: int, progress: Progress) -> None:
        for name, tensor in self.weights.items():
            store.pull({name: tensor}, version, only=name, timeout=progress.left())
            progress.has_written = True
            between, self.between = self.between, lambda: None
            between()
        self.brought.append(version)

    def update(self, *args: Any, **options: Any) -> int:
        with self.members.acting("a"):
            return self.follower.update(*args, **options)

    def ensure(self) -> list[float]:
        with self.members.acting("a"):
            self.follower.ensure()
        return self.values()

    def values(self) -> list[float]:
        return [float(tensor[0]) for tensor in self.weights.values()]


class Home:
    def __init__(self, members: Members) -> None:
        self.members = members

    def publish(self, value: float, **options: Any) -> int:
        with self.members.acting("home"):
            store = rtr.WeightStore("policy", **{"keep": 2, **options})
            return store.publish({name: torch.full((2,), float(value)) for name in NAMES})

    def end(self) -> None:
        """As a restart of the home does."""
        with self.members.acting("home"):
            rtr.WeightStore("policy", keep=2).delete()

    def restart(self, value: float) -> None:
        self.end()
        self.publish(value)


@pytest.fixture
def members() -> Any:
    with Members(rtr.GroupConfig(rpc_timeout_s=20)) as made:
        yield made


@pytest.fixture
def home(members: Members) -> Home:
    return Home(members)


@pytest.fixture
def model(members: Members) -> Model:
    return Model(members)


def test_a_version_of_the_next_life_is_another_one(model: Model, home: Home) -> None:
    home.publish(1)
    assert model.update(1) == 1 and model.values() == [1, 1]
    home.restart(2)
    assert model.update(1) == 1 and model.values() == [2, 2]
    home.restart(3)
    assert model.update() == 1 and model.values() == [3, 3]
    with pytest.raises(rtr.NotFound, match="version 7"):
        model.update(7)
    assert not model.follower.is_torn and model.ensure() == [3, 3]


def test_an_update_that_fails_midway_is_repeated_with_the_newest(model: Model, home: Home) -> None:
    home.publish(1)
    home.publish(2)

    def lose() -> None:
        raise rtr.PeerLost("home", "the test says so")

    model.between = lose
    assert model.update(1) == 2 and model.values() == [2, 2]
    model.between = lambda: home.restart(3)
    assert model.update(2) == 1 and model.values() == [3, 3]


def test_a_version_that_is_not_kept_any_more_is_not_asked_for_again(model: Model, home: Home) -> None:
    home.publish(1, keep=1)
    model.between = lambda: [home.publish(value, keep=1) for value in (2, 3)]  # type: ignore[assignment, return-value]
    assert model.update(1) == 3 and model.values() == [3, 3]


def test_a_model_that_is_torn_is_not_used(model: Model, home: Home) -> None:
    home.publish(1)

    def fail() -> None:
        raise ZeroDivisionError

    model.between = fail
    with pytest.raises(rtr.RayTorchRpcError, match=r"the engine's model to version 1 failed midway.*ZeroDivision"):
        model.update(1)
    model.between = fail
    with pytest.raises(rtr.RayTorchRpcError, match="failed midway"):
        model.ensure()
    home.publish(2)
    assert model.update(1) == 2, "a torn model takes the newest"
    assert model.ensure() == [2, 2] and model.brought == [2]


def test_a_model_is_brought_the_newest_before_it_is_used_first(members: Members, model: Model, home: Home) -> None:
    home.publish(1)
    assert model.ensure() == [1, 1] and model.brought == [1]
    home.publish(2)
    assert model.ensure() == [1, 1], "later versions come by updates"
    loaded = Model(members)
    home.end()
    with members.acting("home"):
        rtr.WeightStore("policy", keep=2).version()
    assert loaded.ensure() == [0, 0] == loaded.ensure(), "as it was loaded: there is no version"
    assert loaded.brought == []


def test_a_model_is_not_used_with_a_part_of_a_loan_that_has_ended(members: Members, model: Model, home: Home) -> None:
    home.publish(1)

    def take_back() -> None:
        with members.acting("home"):
            rtr.WeightStore("policy", keep=2).clear()
        raise rtr.RpcTimeout("the home has taken it back")

    model.between, model.follower._timeout = take_back, 0.5
    with pytest.raises(rtr.RayTorchRpcError, match="failed midway"):
        model.ensure()
    home.publish(2)
    assert model.ensure() == [2, 2]


def test_all_processes_of_an_engine_repeat_what_failed_in_one(members: Members, home: Home) -> None:
    """The other one has brought version 1 meanwhile, and this one the newest."""
    others = [(1, None, False, 5.0), ((0, 1), None, True, 5.0), (2, None, True, 5.0), None]
    model = Model(members, lambda own: [own, others.pop(0) or own])
    home.publish(1)
    home.publish(2)
    assert model.update(1) == 2 and model.values() == [2, 2] and not others
    others = [(2, None, False, 5.0), (None, rtr.PeerLost("home", "the test says so"), True, 5.0)]
    others += [(2, None, True, 5.0), (None, rtr.ConfigurationError("the test says so"), True, 5.0)]
    with pytest.raises(rtr.RayTorchRpcError, match="failed midway"):
        model.update(2)
    assert model.follower.is_torn and not others
