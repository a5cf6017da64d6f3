"""Models in which two names are one tensor: the last one stays, as by ``load_state_dict``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc.patterns.weights.model_tensors import shadowed, ties_of
from tests.unit.members import Members

Tensors = dict[str, Any]
ROWS = 1 << 10


def untied(embed: float, head: float) -> Tensors:
    return {"embed": torch.full((ROWS, 2), embed), "norm": torch.ones(3), "head": torch.full((ROWS, 2), head)}


def tied(value: float) -> Tensors:
    made = untied(value, value)
    return made | {"head": made["embed"]}


def half(model: Tensors, number: int) -> Tensors:
    """Half of the rows of both."""
    many = ROWS // 2
    shards = {name: model[name][many * number : many * (number + 1)] for name in ("embed", "head")}
    return model | {name: rtr.Shard(shard, (ROWS, 2), (many * number, 0)) for name, shard in shards.items()}


def publish_whole(model: Tensors, members: Members) -> None:
    with members.acting("home"):
        rtr.WeightStore("w").publish(model)


def publish_halves(model: Tensors, members: Members) -> None:
    for number, name in enumerate(("a", "home")):
        with members.acting(name):
            rtr.WeightStore("w", publishers=("a", "home")).publish(half(model, number))


def handle(members: Members) -> rtr.WeightStore:
    with members.acting("b"):
        return rtr.WeightStore.find("w")


def pull(members: Members, store: rtr.WeightStore, model: Tensors, **options: Any) -> list[float]:
    """Returns the values of both names."""
    with members.acting("b"):
        store.pull(model, **options)
    return [float(model[name].unique()) for name in ("embed", "head")]


publishing = pytest.mark.parametrize("publish", [publish_whole, publish_halves])


@publishing
def test_the_last_of_the_names_that_are_one_tensor_stays(members: Members, publish: Any) -> None:
    publish(untied(1.0, 2.0), members)
    store, model = handle(members), tied(-1.0)
    assert [pull(members, store, model) for _ in range(2)] == [[2.0, 2.0]] * 2
    with members.acting("b"):
        size = sum(tensor.nbytes for tensor in (model["embed"], model["norm"]))
        assert store.stats().bytes_in == 2 * size, "one of the two crosses"
    assert pull(members, store, untied(0.0, 0.0)) == [1.0, 2.0]
    assert pull(members, store, model, mapping={"head": "embed"}, strict=False) == [1.0, 1.0]
    assert pull(members, store, model, only=("embed", "norm")) == [1.0, 1.0]
    assert pull(members, store, dict(reversed(model.items()))) == [1.0, 1.0], "the last by the order of the model"


@publishing
def test_a_model_that_is_tied_later_is_found(members: Members, publish: Any) -> None:
    """The tensors are the same, and their memory is another."""
    publish(untied(1.0, 2.0), members)
    store, model = handle(members), untied(0.0, 0.0)
    assert [pull(members, store, model) for _ in range(3)] == [[1.0, 2.0]] * 3
    own = model["head"].data
    model["head"].data = model["embed"].data
    assert pull(members, store, model) == [2.0, 2.0]
    model["head"].data = own
    assert pull(members, store, model) == [1.0, 2.0]


def test_a_name_that_was_not_published_hides_no_other(members: Members) -> None:
    publish_whole({"embed": torch.ones(ROWS, 2)}, members)
    assert pull(members, handle(members), tied(0.0), strict=False) == [1.0, 1.0]


def test_what_is_one_tensor() -> None:
    one = torch.zeros(4, 4)
    others = {"rows": one[:2], "turned": one.t(), "bits": one.view(torch.int32), "empty": torch.empty(0)}
    tensors = {"one": one, **others, "again": one.view(4, 4), "nothing": torch.empty(0), "last": one}
    assert ties_of(tensors) == [("one", "again"), ("one", "last")]
    assert shadowed(tensors, tensors) == {"one", "again"} and shadowed(tensors, ["one", "again"]) == {"one"}
