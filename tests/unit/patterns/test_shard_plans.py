"""Which regions a pull of shards moves, by global indices alone."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch

from raytorchrpc.errors import ConfigurationError
from raytorchrpc.patterns.weights.model_tensors import shards_of
from raytorchrpc.patterns.weights.plan import Transfer, plan
from raytorchrpc.patterns.weights.shards import Box, Shard, strides_of
from raytorchrpc.patterns.weights.slices import KnownLayout, Options, Request


def divided(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    """The boxes of a grid: ``cuts`` has the inner borders in each dimension."""
    axes = [list(itertools.pairwise([0, *sorted(inner), extent])) for extent, inner in zip(shape, cuts, strict=True)]
    return [
        Box(tuple(first for first, _ in box), tuple(last - first for first, last in box))
        for box in itertools.product(*axes)
    ]


def at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(first, last) for first, last in zip(box.offset, box.end, strict=True))]


def layouts(shape: tuple[int, ...], boxes: Sequence[Box]) -> list[KnownLayout]:
    """As if each box had a publisher of its own."""
    return [KnownLayout(1, [("w", "float64", box.shape, (shape, box.offset))]) for box in boxes]


def request(box: Box, shape: tuple[int, ...], publishers: int) -> Request:
    target = torch.full(box.shape, -1.0, dtype=torch.float64)
    names = [f"trainer{number}" for number in range(publishers)]
    return Request("store", {"w": Shard(target, shape, box.offset)}, Options.of(), names)


def move(transfers: list[list[Transfer]], whole: torch.Tensor, boxes: Sequence[Box], target: torch.Tensor) -> int:
    """Make the transfers; returns how many elements they have."""
    moved = 0
    for box, its in zip(boxes, transfers, strict=True):
        held = at(whole, box).clone(memory_format=torch.contiguous_format)
        for one in its:
            first, shape, strides = one.region
            assert (one.offset, one.nbytes) == (8 * first, 8 * math.prod(shape))
            source = held.as_strided(shape, strides_of(shape) if strides is None else strides, first)
            at(target, Box(one.begin or (0,) * len(shape), shape)).copy_(source)
            moved += math.prod(shape)
    return moved


@pytest.mark.parametrize("seed", range(40))
def test_every_element_arrives_once_whatever_the_layouts(seed: int) -> None:
    chance = random.Random(seed)
    shape = tuple(chance.randint(1, 9) for _ in range(chance.randint(0, 3)))
    whole = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)

    def cuts() -> list[list[int]]:
        return [[chance.randint(0, extent) for _ in range(chance.randint(0, 2))] for extent in shape]

    boxes = [box for box in divided(shape, cuts()) for _ in range(chance.randint(1, 3))]  # some have several holders
    for box in divided(shape, cuts()):
        asked = request(box, shape, len(boxes))
        moves = plan(asked, layouts(shape, boxes), [chance.randint(0, 1) for _ in boxes], chance.randint(0, 9))
        target = asked.targets["w"].tensor
        assert move(moves, whole, boxes, target) == box.size
        assert torch.equal(target, at(whole, box))


def test_readers_spread_over_equal_holders_and_prefer_near_ones() -> None:
    whole = Box((0,), (8,))

    def sources(near: Sequence[int]) -> list[int]:
        found = []
        for turn in range(6):
            moves = plan(request(whole, (8,), 3), layouts((8,), [whole] * 3), near, turn)
            found += [number for number, its in enumerate(moves) if its]
        return found

    assert sorted(sources([1, 1, 1])) == [0, 0, 1, 1, 2, 2]
    assert set(sources([1, 0, 1])) == {1}


def test_what_nobody_has_is_named() -> None:
    boxes = [Box((0, 0), (2, 4)), Box((0, 0), (2, 4))]
    missing = r"'w': \[2:4, 0:4\] of \(4, 4\) were not published .* by 'trainer0', .*\[0:2, 0:4\] by 'trainer1'"
    with pytest.raises(ConfigurationError, match=missing):
        plan(request(Box((0, 0), (4, 4)), (4, 4), 2), layouts((4, 4), boxes), [0, 0], 0)


def test_publishers_that_disagree_are_named() -> None:
    known = [*layouts((4,), [Box((0,), (2,))]), *layouts((5,), [Box((2,), (3,))])]
    differ = r"'w' differs between publishers: .*\(4,\) \[0:2\] by 'trainer0', .*\(5,\) \[2:5\] by 'trainer1'"
    with pytest.raises(ConfigurationError, match=differ):
        plan(request(Box((0,), (4,)), (4,), 2), known, [0, 0], 0)


def test_a_share_of_a_fused_tensor_that_is_no_whole_number_of_rows_is_named() -> None:
    known = KnownLayout(1, [("q", "float32", (8,), None), ("k", "float32", (4,), None)])

    def planned(rows: int) -> list[list[Transfer]]:
        targets = {"qk": Shard(torch.zeros(rows), (12,), (12 - rows,))}
        return plan(Request("store", targets, Options.of({"qk": ["q", "k"]}), ["trainer"]), [known], [0], 0)

    assert [one.nbytes for its in planned(3) for one in its] == [8, 4]
    with pytest.raises(ConfigurationError, match=r"'qk' has 2 rows from 10 on of 12, .* number of rows of 'q'"):
        planned(2)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (
            Shard(torch.ones(3), (4,), (2,)),
            r"shape \(3,\) at \(2,\), which does not lie in a global tensor of shape \(4,\)",
        ),
        (Shard(torch.ones(3), (4, 4), (0,)), "does not lie in a global tensor"),
        (Shard(torch.ones(3), (4,), (-1,)), "does not lie in a global tensor"),
        (Shard("text", (4,), (0,)), "a Shard of a str, not of a tensor"),  # type: ignore[arg-type]
        ("text", "is a str, not a tensor: leave it out"),
    ],
)
def test_a_shard_lies_in_its_global_tensor(shard: Shard, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        shards_of({"w": shard}, "store")
