"""Models in which two names are one tensor: what is published for both has to be equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc.patterns.weights.model_tensors import ties_of
from tests.unit.members import EQUAL, Members

DIFFER = r"'embed' and 'head' are one tensor in the model, but differ as published: .* mapping=\{'head': 'embed'\}"
Tensors = dict[str, Any]


def untied(embed: float, head: float) -> Tensors:
    return {"embed": torch.full((4, 2), embed), "norm": torch.ones(3), "head": torch.full((4, 2), head)}


def tied(value: float) -> Tensors:
    made = untied(value, value)
    return made | {"head": made["embed"]}


def half(model: Tensors, number: int) -> Tensors:
    """Half of the rows of both; the same tensor twice if it is one."""
    shards = {name: model[name][2 * number : 2 * number + 2] for name in ("embed", "head")}
    return model | {name: rtr.Shard(shard, (4, 2), (2 * number, 0)) for name, shard in shards.items()}


def publish_whole(model: Tensors, members: Members, **options: Any) -> None:
    with members.acting("home"):
        rtr.WeightStore("w").publish(model, **options)


def publish_halves(model: Tensors, members: Members, **options: Any) -> None:
    for number, name in enumerate(("a", "home")):
        with members.acting(name):
            rtr.WeightStore("w", publishers=("a", "home")).publish(half(model, number), **options)


def handle(members: Members) -> rtr.WeightStore:
    with members.acting("b"):
        return rtr.WeightStore.find("w")


def comparisons(members: Members) -> Callable[[], int]:
    """How often the reader has asked publishers to compare."""
    asked: list[str] = []

    def note(method: str) -> bool:
        asked.append(method)
        return False

    members.lanes["b"].holds = note
    return lambda: asked.count(EQUAL)


def pull(members: Members, store: rtr.WeightStore, model: Tensors, **options: Any) -> list[float]:
    """Returns the values of both names."""
    with members.acting("b"):
        store.pull(model, **options)
    return [float(model[name].unique()) for name in ("embed", "head")]


publishing = pytest.mark.parametrize("publish", [publish_whole, publish_halves])


@publishing
def test_two_tensors_that_differ_do_not_go_into_one(members: Members, publish: Any) -> None:
    publish(untied(1.0, 2.0), members)
    store, mine = handle(members), tied(-1.0)
    for _ in range(2):
        with pytest.raises(rtr.ConfigurationError, match=DIFFER):
            pull(members, store, mine)
        with members.acting("b"), pytest.raises(rtr.ConfigurationError, match=DIFFER):
            store.prefetch(mine).wait(20)
        assert mine["embed"].tolist() == [[-1.0] * 2] * 4 and mine["norm"].tolist() == [1.0] * 3
    assert pull(members, store, untied(0.0, 0.0)) == [1.0, 2.0]
    remedy = {"mapping": {"head": "embed"}, "strict": False}
    assert pull(members, store, mine, **remedy) == [1.0, 1.0]


@publishing
def test_a_tied_model_into_a_tied_model_asks_nothing_more(members: Members, publish: Any) -> None:
    asked, store, mine = comparisons(members), None, tied(-1.0)
    for value in (1.0, 2.0, 3.0):
        publish(tied(value), members)
        store = store or handle(members)
        assert pull(members, store, mine) == [value] * 2
    assert asked() == 0
    publish(untied(4.0, 5.0), members)
    with pytest.raises(rtr.ConfigurationError, match=DIFFER):
        pull(members, handle(members), mine)
    assert mine["embed"].unique().tolist() == [3.0]


@publishing
def test_copies_are_compared_in_each_version(members: Members, publish: Any) -> None:
    """As with ``{name: tensor.cpu()}`` of a tied model."""
    asked, mine = comparisons(members), tied(-1.0)
    publish(untied(1.0, 1.0), members)
    store = handle(members)
    assert [pull(members, store, mine) for _ in range(2)] == [[1.0, 1.0]] * 2
    assert asked() > 0
    publish(untied(2.0, 3.0), members)
    with pytest.raises(rtr.ConfigurationError, match=DIFFER):
        pull(members, store, mine)
    assert mine["embed"].unique().tolist() == [1.0]


@publishing
def test_a_model_that_is_tied_later_is_found(members: Members, publish: Any) -> None:
    """The tensors are the same, and their memory is another."""
    publish(untied(1.0, 2.0), members)
    store, mine = handle(members), untied(0.0, 0.0)
    assert [pull(members, store, mine) for _ in range(3)] == [[1.0, 2.0]] * 3
    own = mine["head"].data
    mine["head"].data = mine["embed"].data
    with pytest.raises(rtr.ConfigurationError, match=DIFFER):
        pull(members, store, mine)
    with pytest.raises(rtr.ConfigurationError, match=DIFFER):
        pull(members, store, tied(0.0))
    mine["head"].data = own
    assert pull(members, store, mine) == [1.0, 2.0]


@publishing
def test_a_version_in_part_is_tied_as_the_one_before(members: Members, publish: Any) -> None:
    publish(tied(1.0), members)
    publish({"norm": torch.zeros(3), "embed": torch.zeros(4, 2), "head": torch.zeros(4, 2)}, members, only="norm")
    asked, mine = comparisons(members), tied(-1.0)
    assert pull(members, handle(members), mine) == [1.0, 1.0] and mine["norm"].tolist() == [0.0] * 3
    assert asked() == 0
    publish(untied(1.0, 2.0), members, only="head")
    with pytest.raises(rtr.ConfigurationError, match=DIFFER):
        pull(members, handle(members), mine)


def test_names_that_no_publisher_has_together_cannot_be_compared(members: Members) -> None:
    for name, part in (("a", "embed"), ("home", "head")):
        with members.acting(name):
            rtr.WeightStore("w", publishers=("a", "home")).publish({part: torch.ones(4, 2)})
    mine = {name: tensor for name, tensor in tied(0.0).items() if name != "norm"}
    with pytest.raises(
        rtr.ConfigurationError, match="'embed' and 'head' are one tensor in the model, and no publisher"
    ):
        pull(members, handle(members), mine)
    assert not mine["embed"].any()
    assert pull(members, handle(members), mine, mapping={"head": "embed"}, strict=False) == [1.0, 1.0]


def test_fused_and_converted_tensors_that_are_one(members: Members) -> None:
    parts = {name: torch.full((2, 2), value) for name, value in (("q", 1.0), ("k", 2.0), ("q2", 1.0), ("k2", 3.0))}
    publish_whole(parts, members)
    fused = torch.zeros(4, 2, dtype=torch.bfloat16)
    options: Any = {"convert": True, "mapping": {"qk": ["q", "k"], "qk2": ["q2", "k2"]}}
    with members.acting("b"), pytest.raises(rtr.ConfigurationError, match=r"'qk' and 'qk2' .*\{'qk2': \['q', 'k'\]\}"):
        rtr.WeightStore.find("w").pull({"qk": fused, "qk2": fused}, **options)
    assert not fused.any()
    publish_whole(parts | {"k2": parts["k"]}, members)
    with members.acting("b"):
        rtr.WeightStore.find("w").pull({"qk": fused, "qk2": fused}, **options)
    assert fused.tolist() == [[1.0, 1.0]] * 2 + [[2.0, 2.0]] * 2


def test_what_is_one_tensor() -> None:
    one = torch.zeros(4, 4)
    others = {"rows": one[:2], "turned": one.t(), "bits": one.view(torch.int32), "empty": torch.empty(0)}
    assert ties_of({"one": one, **others, "again": one.view(4, 4), "nothing": torch.empty(0)}) == [("one", "again")]
