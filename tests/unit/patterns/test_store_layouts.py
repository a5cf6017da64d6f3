"""Stores that describe themselves to readers which have no model, between members of one process."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from tests.unit.members import LAYOUT, LEASE, TENSORS, Members, in_thread

READERS = pytest.mark.parametrize("reader", ["home", "a"])


def model(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"embed": torch.full((4, 3), value), "norm": torch.full((3,), value, dtype=torch.bfloat16)}


def publish(members: Members, tensors: Any = None, **settings: Any) -> int:
    with members.acting("home"):
        return rtr.WeightStore("w", **settings).publish(model() if tensors is None else tensors)


@READERS
def test_a_reader_without_a_model_builds_its_tensors_and_pulls(members: Members, reader: str) -> None:
    publish(members)
    with members.acting(reader):
        store = rtr.WeightStore.find("w")
        layout = store.layout()
        assert layout.version == 1 and list(layout) == ["embed", "norm"] and len(layout) == 2
        assert (layout["embed"].dtype, layout["embed"].shape, layout["norm"].dtype) == (
            torch.float32,
            (4, 3),
            torch.bfloat16,
        )
        assert layout["embed"].shards == (("home", (0, 0), (4, 3)),)
        assert layout.nbytes == 4 * 12 + 2 * 3 and layout["norm"].nbytes == 6
        mine = layout.empty()
        assert store.pull(mine, layout.version) == 1
    assert all(torch.equal(mine[name], tensor) for name, tensor in model().items())
    meta = layout.empty("meta")
    assert all(tensor.is_meta and tensor.dtype is model()[name].dtype for name, tensor in meta.items())


def test_a_layout_moves_no_tensors_and_keeps_no_version(members: Members) -> None:
    publish(members)
    sent: list[str] = []

    def note(method: str) -> bool:
        sent.append(method)
        return False

    members.lanes["a"].holds = note
    with members.acting("a"):
        rtr.WeightStore.find("w").layout()
    assert LAYOUT in sent and not {LEASE, TENSORS} & set(sent)
    assert members.served("weight store", "w").pool.readers == 0


@READERS
def test_versions_that_are_not_there(members: Members, reader: str) -> None:
    with members.acting("home"):
        rtr.WeightStore("w")
    with members.acting(reader):
        store = rtr.WeightStore.find("w")
        with pytest.raises(rtr.Empty):
            store.layout(timeout=0.05)
        with pytest.raises(rtr.NotFound, match=r"version 3 .* has none now"):
            store.layout(3)
        with pytest.raises(rtr.ConfigurationError, match="version= has to be the number of a version, not 'x'"):
            store.layout("x")  # type: ignore[arg-type]
        first = in_thread(store.layout)
        publish(members)
        assert first().version == 1
        publish(members, {"other": torch.zeros(2)})
        assert list(store.layout()) == ["other"]
        with pytest.raises(rtr.NotFound, match=r"version 1 .*\(there: 2\)"):
            store.layout(1)


def test_it_is_a_value(members: Members) -> None:
    publish(members)
    with members.acting("a"):
        store = rtr.WeightStore.find("w")
        one, other = store.layout(), store.layout()
    assert one == other and hash(one) == hash(other) and pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(AttributeError):
        one.version = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        one["embed"] = one["norm"]  # type: ignore[index]
    publish(members, {**model(), "norm": torch.zeros(4)})
    with members.acting("a"):
        assert store.layout() != one


PUBLISHERS = ("a", "b")


def sharded() -> rtr.WeightStore:
    return rtr.WeightStore("s", publishers=PUBLISHERS)


def publish_shards(members: Members, dtype: torch.dtype = torch.float32) -> None:
    for number, name in enumerate(PUBLISHERS):
        with members.acting(name):
            rows = rtr.Shard(
                torch.full((2, 3), float(number), dtype=(torch.float32, dtype)[number]), (4, 3), (2 * number, 0)
            )
            sharded().publish({"rows": rows, "both": torch.ones(5), f"own{number}": torch.ones(())})


@pytest.mark.parametrize("reader", ["home", "a"])
def test_shards_of_several_publishers(members: Members, reader: str) -> None:
    publish_shards(members)
    with members.acting(reader):
        layout = sharded().layout()
        assert list(layout) == ["rows", "both", "own0", "own1"]
        assert layout["rows"].shape == (4, 3)
        assert layout["rows"].shards == (("a", (0, 0), (2, 3)), ("b", (2, 0), (2, 3)))
        assert layout["both"].shards == (("a", (0,), (5,)), ("b", (0,), (5,)))
        assert layout["own1"].shards == (("b", (), ()),)
        mine = layout.empty()
        sharded().pull(mine, layout.version)
    assert mine["rows"][:, 0].tolist() == [0, 0, 1, 1]
    assert str(layout).splitlines() == [
        "version 1 of 's': 4 tensors, 76 bytes, published by a, b",
        "  rows  float32  (4, 3)  [0:2, 0:3] a, [2:4, 0:3] b",
        "  both  float32  (5,)    [0:5] a, [0:5] b",
        "  own0  float32  ()",
        "  own1  float32  ()",
    ]
    assert repr(layout) == "<raytorchrpc.StoreLayout of 's': version 1, 4 tensors, 76 bytes>"


def test_publishers_that_disagree_are_named(members: Members) -> None:
    publish_shards(members, torch.bfloat16)
    with (
        members.acting("home"),
        pytest.raises(
            rtr.ConfigurationError, match=r"'rows' differs between publishers: float32 \(4, 3\) .* by 'a', bfloat16"
        ),
    ):
        sharded().layout()
