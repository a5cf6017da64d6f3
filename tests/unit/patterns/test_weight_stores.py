"""Handles of weights between members of one process: what ``publish`` copies, and what ``pull`` brings."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import weakref

import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc.errors import NotFound, PeerLost
from tests.polling import wait_until
from tests.unit.members import TENSORS, Members, in_thread, spied
from tests.unit.patterns.weight_values import values

#: Bytes of each tensor.
SIZE = 400


def model(value: float, count: int = 5) -> dict[str, torch.Tensor]:
    return {f"layer{number}": torch.full((SIZE // 4,), value) for number in range(count)}


def publish(members: Members, value: float, keep: int = 1) -> int:
    with members.acting("home"):
        return rtr.WeightStore("w", keep=keep).publish(model(value))


def test_the_memory_of_a_store_ends_with_the_group(members: Members) -> None:
    publish(members, 1.0)
    memory = weakref.ref(members.served("weight store", "w")._versions[1].memory)
    with members.acting("a"):
        rtr.WeightStore.find("w").pull(model(0.0))
    assert memory() is not None
    members.close()
    assert wait_until(lambda: gc.collect() >= 0 and memory() is None, 20), "once its threads are done"


def test_clear_frees_all_memory_and_the_store_goes_on(members: Members) -> None:
    for value in (1.0, 2.0, 3.0):
        publish(members, value, keep=2)
    weights = members.served("weight store", "w")
    assert sum(weights.held.values()) >= 2 * 5 * SIZE
    with members.acting("home"):
        rtr.WeightStore("w", keep=2).clear()
        assert rtr.WeightStore("w", keep=2).version() == 0
    gc.collect()
    assert not weights.held
    with members.acting("a"):
        store = rtr.WeightStore.find("w")
        with pytest.raises(NotFound, match="version 3"):
            store.pull(model(0.0), 3)
        assert publish(members, 4.0, keep=2) == 4
        mine = model(0.0)
        assert store.pull(mine) == 4 and values(mine) == [4.0] * 5
        with pytest.raises(rtr.ConfigurationError, match="lives in member 'home'"):
            store.clear()
        with pytest.raises(rtr.ConfigurationError, match="several publishers"):
            rtr.WeightStore("s", publishers=["a", "b"]).clear()


@pytest.mark.parametrize("reader", ["home", "a"])
def test_a_module_is_filled_in_place(members: Members, reader: str) -> None:
    modules = [torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)) for _ in range(2)]
    with members.acting("home"):
        rtr.WeightStore("w").publish(modules[0])
    parameters = [(parameter, parameter.data_ptr()) for parameter in modules[1].parameters()]
    with members.acting(reader):
        assert rtr.WeightStore.find("w").pull(modules[1]) == 1
    assert [(parameter, parameter.data_ptr()) for parameter in modules[1].parameters()] == parameters
    assert all(parameter.requires_grad and parameter.is_leaf for parameter, _ in parameters)
    published, pulled = (module.state_dict() for module in modules)
    assert all(torch.equal(published[name], pulled[name]) for name in published)


@pytest.mark.parametrize("reader", ["home", "a"])
def test_what_is_published_may_be_changed_at_once(members: Members, reader: str) -> None:
    with members.acting("home"):
        given = model(1.0)
        assert rtr.WeightStore("w").publish(given) == 1
        for tensor in given.values():
            tensor.fill_(9.0)
    with members.acting(reader):
        mine = model(0.0)
        assert rtr.WeightStore.find("w").pull(mine) == 1
        assert values(mine) == [1.0] * 5


def test_a_handle_that_comes_with_each_call_plans_as_often_as_one_that_is_kept(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a copy, for another model, remembers its own pulls alone."""
    publish(members, 1.0)
    plans = spied(monkeypatch, "raytorchrpc.patterns.weights.model_pull.make_plan")
    with members.acting("a"):
        sent, target = pickle.dumps(rtr.WeightStore.find("w")), model(0.0)
        for _ in range(3):
            pickle.loads(sent).pull(target)
        assert values(target) == [1.0] * 5
        assert len(plans) == 1
        copy.copy(pickle.loads(sent)).pull(model(0.0))
        assert len(plans) == 2


def test_a_pull_that_has_tensors_sent_bounds_each_message(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a tensor that is larger than the bound goes alone."""
    publish(members, 1.0)
    sent: list[str] = []

    def note(method: str) -> bool:
        sent.append(method)
        return False

    members.lanes["a"].holds = note
    for bound, messages in ((2 * SIZE, 3), (5 * SIZE, 1), (1, 5)):
        sent.clear()
        monkeypatch.setattr("raytorchrpc.patterns.weights.source_pull.MESSAGE_BYTES", bound)
        with members.acting("a"):
            mine = model(0.0)
            rtr.WeightStore.find("w").pull(mine)
        assert (sent.count(TENSORS), values(mine)) == (messages, [1.0] * 5)


def test_since_brings_everything_after_a_pull_that_failed_in_the_middle(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytorchrpc.patterns.weights.source_pull.MESSAGE_BYTES", SIZE)
    for value in (1.0, 2.0):
        publish(members, value, keep=2)
    lane, sent = members.lanes["a"], []

    def fails_at_the_third(method: str) -> bool:
        if method == TENSORS:
            sent.append(method)
            if len(sent) == 3:
                raise PeerLost("home", "the test broke the connection", may_have_run=False)
        return False

    with members.acting("a"):
        store, mine = rtr.WeightStore.find("w"), model(0.0)
        assert store.pull(mine) == 2
        lane.holds = fails_at_the_third
        with pytest.raises(PeerLost):
            store.pull(mine, version=1)
        assert values(mine) == [1.0, 1.0, 2.0, 2.0, 2.0], "tensors of two versions"
        assert store.pull(mine, since=2) == 2
        assert values(mine) == [2.0] * 5


def test_since_counts_after_a_pull_that_failed_before_it_wrote(members: Members) -> None:
    publish(members, 1.0)
    with members.acting("a"):
        store, mine = rtr.WeightStore.find("w"), model(0.0)
        store.pull(mine)
        for error, wrong, options in (
            (NotFound, mine, {"version": 9}),
            (rtr.ConfigurationError, model(0.0, count=2), {}),
            (rtr.ConfigurationError, [], {}),
        ):
            with pytest.raises(error):
                store.pull(wrong, **options)
        mine["layer0"].fill_(7.0)
        assert store.pull(mine, since=1) == 1
    assert values(mine) == [7.0, 1.0, 1.0, 1.0, 1.0], "nothing was brought"


def test_waiting_for_versions(members: Members) -> None:
    async def follow() -> tuple[int, int]:
        return await store.apull(mine), await store.await_version(3)

    with members.acting("home"):
        home = rtr.WeightStore("w", keep=2)
    with members.acting("a"):
        store, mine = rtr.WeightStore.find("w"), model(0.0)
        with pytest.raises(rtr.Empty, match="had no version from 9 on"):
            store.wait(9, timeout=0.05)
        with pytest.raises(rtr.Empty):
            store.pull(mine, timeout=0.05)
        following, waiting = in_thread(lambda: asyncio.run(follow())), in_thread(lambda: store.wait(2))
        with members.acting("home"):
            home.publish(model(1.0))
            assert wait_until(lambda: all(tensor.eq(1).all() for tensor in mine.values()), 20)
            home.publish(model(2.0))
            assert waiting() == 2
            home.publish(model(3.0))
        assert following() == (1, 3)
        assert store.pull(mine, version=2) == 2 and values(mine) == [2.0] * 5


def test_what_does_not_fit_is_named_up_to_ten_tensors(members: Members) -> None:
    with members.acting("home"):
        rtr.WeightStore("w").publish(model(1.0, count=12))
    with members.acting("a"):
        mine: dict[str, torch.Tensor] = {f"layer{number}": torch.zeros(3) for number in range(12)}
        with pytest.raises(rtr.ConfigurationError) as error:
            rtr.WeightStore.find("w").pull(mine)
        said = str(error.value)
        assert all(f"'layer{number}' is (100,) as published, and (3,)" in said for number in range(10))
        assert "and 2 more" in said and values(mine) == [0.0] * 12


def test_publishers_are_members_names_outside_of_a_group() -> None:
    group = rtr.ProcessGroupInfo("gloo", 1, {"left": 0, "right": 1}, 60.0)
    for publishers in (["left", "right"], ("right", "left"), {"left", "right"}, group):
        store = rtr.WeightStore("policy", publishers=publishers)
        assert (store.home, store.publishers) == ("left", ("left", "right"))
    for wrong, message in (
        ([], "is a list of members"),
        ("left", "is a list of members"),
        (["left", "left"], "names a member twice: left, left"),
        ([0, 1], "publishers= takes members' names, not 0"),
    ):
        with pytest.raises(rtr.ConfigurationError, match=message):
            rtr.WeightStore("policy", publishers=wrong)
    with pytest.raises(rtr.ConfigurationError, match="not both"):
        rtr.WeightStore("policy", publishers=["left"], home="left")
