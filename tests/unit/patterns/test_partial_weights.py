"""Pulls of some tensors, between members of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from tests.unit.members import Members
from tests.unit.patterns.weight_values import values

NAMES = ("base.weight", "base.bias", "lora_a", "lora_b")


def model(value: float, names: tuple[str, ...] = NAMES) -> dict[str, torch.Tensor]:
    return {name: torch.full((3, 4), float(value)) for name in names}


def publish(members: Members, value: float, settings: dict[str, Any] | None = None, **options: Any) -> int:
    with members.acting("home"):
        return rtr.WeightStore("w", **settings or {}).publish(model(value), **options)


def pulled(members: Members, mine: dict[str, torch.Tensor] | None = None, **options: Any) -> list[float]:
    mine = model(0) if mine is None else mine
    with members.acting("a"):
        rtr.WeightStore.find("w").pull(mine, **options)
    return values(mine)


def test_a_pull_of_some_leaves_the_others(members: Members) -> None:
    publish(members, 1)
    assert pulled(members, only="lora_*") == [0, 0, 1, 1]
    assert pulled(members, only=["*_a", "*.bias"]) == [0, 1, 1, 0]
    assert pulled(members, model(0, ("base.weight", "lora_a")), only="*_a") == [0, 1]
    half = {"lora_a": torch.zeros(3, 4).bfloat16(), "base.weight": torch.zeros(3)}
    assert pulled(members, half, only="*_a", convert=True) == [1, 0]
    mapped = {"mine": torch.zeros(6, 4), "base.bias": torch.zeros(3, 4)}
    assert pulled(members, mapped, only="mine", mapping={"mine": ["lora_a", "lora_b"]}) == [1, 0]


def test_names_have_to_be_the_same_among_those(members: Members) -> None:
    publish(members, 1)
    with pytest.raises(rtr.ConfigurationError, match="the model has no 'lora_b', which was published") as error:
        pulled(members, model(0, ("lora_a",)), only="lora_*")
    assert "base" not in str(error.value)
    with pytest.raises(rtr.ConfigurationError, match="'lora_c' of the model was not published"):
        pulled(members, model(0, (*NAMES, "lora_c")), only="lora_*")
    assert pulled(members, model(0, ("lora_a", "lora_c")), only="lora_*", strict=False) == [1, 0]
    mine = model(0)
    with pytest.raises(rtr.ConfigurationError, match=r"only=\['lora_v'\] matches none of the 4 names .* are 'lora_b'"):
        pulled(members, mine, only=["lora_a", "lora_v"])
    with pytest.raises(rtr.ConfigurationError, match=r"'lora_b' is \(3, 4\) as published"):
        pulled(members, {**mine, "lora_b": torch.zeros(3)}, only=["lora_a", "lora_b"])
    assert values(mine) == [0, 0, 0, 0], "nothing is written unless all of those fit"
    assert pulled(members, mine, only=["lora_a", "lora_v"], strict=False) == [0, 0, 1, 0]
    with pytest.raises(rtr.ConfigurationError, match="nearest are 'lora_b', 'lora_a'"):
        pulled(members, only="loar*")
    for only in ((), 3, ["a", 3]):
        with pytest.raises(rtr.ConfigurationError, match="has to be a glob"):
            pulled(members, only=only)


def test_a_name_with_brackets_is_a_name(members: Members) -> None:
    names = ("layers[0].w", "layers0.w", "layers[1].w")
    with members.acting("home"):
        rtr.WeightStore("w").publish(model(1, names))
    assert pulled(members, model(0, names), only=names[0]) == [1, 1, 0], "as a glob, and as a name"
    assert pulled(members, model(0, names[2:]), only=names[2:]) == [1]


def test_since_counts_for_the_same_part(members: Members) -> None:
    """A model that has pulled some tensors of a version does not have that version."""
    publish(members, 1)
    with members.acting("a"):
        store, mine = rtr.WeightStore.find("w"), model(0)
        version = store.pull(mine, only="lora_*")
        mine["lora_a"].fill_(-1)
        store.pull(mine, since=version, only="lora_*")
        assert values(mine) == [0, 0, -1, 1], "it is there already"
        store.pull(mine, since=version)
        assert values(mine) == [1, 1, 1, 1]
        mine["base.bias"].fill_(-1)
        store.pull(mine, since=version, only="lora_*")
        assert values(mine) == [1, -1, 1, 1], "a pull of everything has brought the part"


def test_a_prefetch_of_some_swaps_these(members: Members) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("base", "lora_a", "lora_b"):
                self.register_parameter(name, torch.nn.Parameter(torch.zeros(3)))

    def swapped(**options: Any) -> list[float]:
        with members.acting("a"):
            store.prefetch(net, **options).swap()
        return values(dict(net.state_dict()))

    store, net = rtr.WeightStore("w", home="home"), Net()
    for value in (1.0, 2.0):
        with members.acting("home"):
            rtr.WeightStore("w").publish({name: torch.full((3,), value) for name in net.state_dict()})
        assert swapped(only="lora_*") == [value - 1, value, value]
        assert swapped(only="lora_b") == [value - 1, value, value]
        assert swapped() == [value] * 3
        assert swapped(strict=False, since=int(value)) == [value] * 3
