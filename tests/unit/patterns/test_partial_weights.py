"""Versions of which only some tensors are published, and pulls of some tensors, between members of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from tests.unit.members import Members, spied
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


@pytest.mark.parametrize("track", [False, True])
def test_the_others_are_those_of_the_version_before(members: Members, track: bool) -> None:
    settings = {"track": track, "keep": 3}
    assert publish(members, 1, settings) == 1
    for value in (2, 3, 4, 5):
        assert publish(members, value, settings, only="lora_*") == value
        assert pulled(members) == [1, 1, value, value]
        assert value < 3 or pulled(members, version=value - 1) == [1, 1, value - 1 or 1, value - 1]
    publish(members, 6, settings, only=["*.bias", "lora_b"])
    assert pulled(members) == [1, 6, 5, 6]
    publish(members, 7, settings)
    assert pulled(members) == [7, 7, 7, 7]


def test_only_these_are_copied(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each of the two pieces of memory has the others."""
    copies = spied(monkeypatch, "raytorchrpc.patterns.weights.published.copy_tensors")
    publish(members, 1)
    for value in range(2, 6):
        publish(members, value, only="lora_*")
    assert [len(targets) for targets, *_ in copies] == [4, 4, 2, 2, 2]


def test_since_brings_what_has_changed_without_track(members: Members) -> None:
    publish(members, 1)
    with members.acting("a"):
        store, mine = rtr.WeightStore.find("w"), model(0)
        version = store.pull(mine)
    mine["base.weight"].fill_(-1)
    for value in (2, 3):
        publish(members, value, only="lora_*")
    with members.acting("a"):
        assert store.pull(mine, since=version) == 3
        assert values(mine) == [-1, 1, 3, 3]
    publish(members, 4)
    with members.acting("a"):
        store.pull(mine, since=3)
    assert values(mine) == [4, 4, 4, 4]


def test_what_cannot_be_published_in_part_is_named(members: Members) -> None:
    with pytest.raises(rtr.ConfigurationError, match="takes the other tensors from the version before"):
        publish(members, 1, only="lora_*")
    publish(members, 1)
    with pytest.raises(rtr.ConfigurationError, match=r"matches none of the 4 names.*nearest are 'lora_b', 'lora_a'"):
        publish(members, 1, only="loar_*")
    with members.acting("home"):
        store = rtr.WeightStore("w")
        with pytest.raises(rtr.ConfigurationError, match="'lora_c' is not in the version before"):
            store.publish(model(2, ("lora_c",)), only="lora_*")
        with pytest.raises(
            rtr.ConfigurationError, match=r"'lora_a' is float32 \(2,\) on cpu, and float32 \(3, 4\) on cpu"
        ):
            store.publish({"lora_a": torch.ones(2)}, only="lora_*")
        for only in ((), 3, ["a", 3]):
            with pytest.raises(rtr.ConfigurationError, match="has to be a glob"):
                store.publish(model(2), only=only)  # type: ignore[arg-type]
    assert pulled(members) == [1, 1, 1, 1]


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


def test_a_name_with_brackets_is_a_name(members: Members) -> None:
    names = ("layers[0].w", "layers0.w", "layers[1].w")
    with members.acting("home"):
        rtr.WeightStore("w").publish(model(1, names))
    assert pulled(members, model(0, names), only=names[0]) == [1, 1, 0], "as a glob, and as a name"
    assert pulled(members, model(0, names[2:]), only=names[2:]) == [1]


def test_what_other_tensors_of_the_model_take_is_not_lacking(members: Members) -> None:
    with members.acting("home"):
        rtr.WeightStore("w").publish({"a": torch.ones(3), "b": torch.full((3,), 2.0), "d": torch.full((3,), 4.0)})
    mine = {"a": torch.zeros(3), "b": torch.zeros(3), "d": torch.zeros(3)}
    with members.acting("a"):
        store = rtr.WeightStore.find("w")
        store.pull(mine, only=["a", "d"], mapping={"a": "b", "b": "a"})
        assert [float(tensor[0]) for tensor in mine.values()] == [2.0, 0.0, 4.0]
        with pytest.raises(rtr.ConfigurationError, match="the model has no 'a', which was published"):
            store.pull(mine, only=["a", "d"], mapping={"a": "b"})


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


def test_the_scales_come_with_their_weights(members: Members) -> None:
    publish(members, 448)
    mine = {"lora_a": torch.zeros(3, 4, dtype=torch.float8_e4m3fn), "lora_a_scale_inv": torch.zeros(1, 1)}
    with members.acting("a"):
        rtr.WeightStore.find("w").pull(mine, only="lora_a", convert=rtr.BlockFp8())
    assert bool((mine["lora_a"].float() == 448).all()) and float(mine["lora_a_scale_inv"]) == 1


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


def test_publishers_give_the_same_part(members: Members) -> None:
    """Each has the other tensors from its own version before; some may have none of those that are published."""

    def publish_all(value: float, only: str | None) -> None:
        halves = {"lora": torch.full((4, 2), float(value)), "base": torch.full((4, 2), float(value))}
        for name, first in (("home", 0), ("a", 2)):
            shards: dict[str, Any] = {
                key: rtr.Shard(tensor[first : first + 2], (4, 2), (first, 0)) for key, tensor in halves.items()
            }
            shards[f"stage.{name}"] = torch.full((2,), float(value))
            with members.acting(name):
                store.publish(shards, only=only)

    def pull(mine: dict[str, torch.Tensor], **options: Any) -> list[float]:
        with members.acting("b"):
            store.pull(mine, **options)
        return values(mine)

    def empty() -> dict[str, torch.Tensor]:
        whole = {name: torch.zeros(4, 2) for name in ("lora", "base")}
        return {**whole, **{f"stage.{name}": torch.zeros(2) for name in ("home", "a")}}

    store = rtr.WeightStore("w", publishers=["home", "a"])
    publish_all(1, None)
    mine = empty()
    assert pull(mine) == [1, 1, 1, 1]
    mine["base"].fill_(-1)
    publish_all(2, "lora")
    assert pull(empty()) == [2, 1, 1, 1] and pull(mine, since=1) == [2, -1, 1, 1]
    publish_all(3, "stage.a")
    assert pull(empty()) == [2, 1, 1, 3] and pull(empty(), only="stage.*") == [0, 0, 1, 3]
    assert pull(mine, since=2) == [2, -1, 1, 3]
