"""Versions whose tensors an iterator makes one at a time, between members of one process."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from tests.unit.members import Members
from tests.unit.patterns.weight_values import values

NAMES = tuple(f"layer{number}" for number in range(5))
SHAPE = (3, 4)


def pairs(value: float, names: tuple[str, ...] = NAMES) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        yield name, torch.full(SHAPE, float(value))


def publish(members: Members, given: Any, settings: dict[str, Any] | None = None, **options: Any) -> int:
    with members.acting("home"):
        return rtr.WeightStore("w", **settings or {}).publish(given, **options)


def pulled(members: Members, names: tuple[str, ...] = NAMES, **options: Any) -> list[float]:
    mine = {name: torch.zeros(SHAPE) for name in names}
    with members.acting("a"):
        rtr.WeightStore.find("w").pull(mine, **options)
    return values(mine)


def test_each_tensor_is_made_when_it_is_copied_and_none_is_kept(members: Members) -> None:
    """Of the first version, of others like it, and of those with another layout."""
    most = 0

    def counted(value: float, names: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        made: list[weakref.ref[torch.Tensor]] = []
        for name in names:
            tensor = torch.full(SHAPE, value)
            made.append(weakref.ref(tensor))
            pair = name, tensor
            del tensor
            yield pair
            del pair
            most = max(most, sum(ref() is not None for ref in made))

    for value, names in enumerate((NAMES, NAMES, NAMES[::-1], NAMES[1:], (*NAMES, "more")), 1):
        assert publish(members, counted(float(value), names)) == value
        assert pulled(members, names) == [value] * len(names)
    assert most == 0, "tensors that were given are alive when the next is made"


def test_a_later_version_takes_its_own_memory_alone(members: Members) -> None:
    size, count = 8 << 20, 32
    for version in (1, 2):
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")  # begins to measure again
        before = resident("VmRSS")
        publish(members, ((f"layer{number}", torch.ones(size // 4)) for number in range(count)))
        grown, whole = resident("VmHWM") - before, size * count
        assert whole * 3 / 4 < grown <= (3 - version) * whole + (64 << 20), "at most, while it was published"


def resident(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


@pytest.mark.parametrize("before", [0, 1, 2])
def test_an_iterator_that_raises_makes_no_version(members: Members, before: int) -> None:
    for value in range(1, before + 1):
        publish(members, pairs(value))
    is_closed = False

    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal is_closed
        try:
            yield from pairs(8, NAMES[:3])
            raise ValueError("no more")
        finally:
            is_closed = True

    held = members.served("weight store", "w").pool.held if before else 0
    with pytest.raises(ValueError, match="no more"):
        publish(members, breaks())
    assert is_closed
    assert not before or (pulled(members) == [before] * 5 and members.served("weight store", "w").kept == (before,))
    if before == 2:
        assert members.served("weight store", "w").pool.held == held, "its memory is that of the next version"
    assert publish(members, pairs(9)) == before + 1
    assert pulled(members) == [9] * 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("layer0", torch.zeros(SHAPE)), "have 'layer0' twice"),
        (("more", 3), "'more' of the weights for 'w' is a int, not a tensor"),
        (("more", torch.zeros(SHAPE, device="meta")), "'more' of the weights for 'w' is not a dense tensor"),
        (("more", rtr.Shard(torch.zeros(SHAPE), (6, 4), (0, 0))), "'more' .* is a shard: name all members"),
        ((torch.zeros(SHAPE), "more"), "have a tuple where a pair"),
        (torch.zeros(2, 3), "have a Tensor where a pair"),
        ("ab", "have a str where a pair"),
    ],
)
def test_what_is_no_tensor_under_a_name_of_its_own_is_refused(members: Members, wrong: Any, message: str) -> None:
    publish(members, pairs(1))
    is_closed = False

    def given() -> Iterator[Any]:
        nonlocal is_closed
        try:
            yield from pairs(2)
            yield wrong
            raise AssertionError("nothing more is asked for")
        finally:
            is_closed = True

    with pytest.raises(rtr.ConfigurationError, match=message):
        publish(members, given())
    assert is_closed, "the generator ends at once, not when the error is forgotten"
    assert pulled(members) == [1] * 5


def test_an_iterator_that_was_used_before_is_no_empty_version(members: Members) -> None:
    once = pairs(1)
    publish(members, once)
    with pytest.raises(rtr.ConfigurationError, match="has no tensors: was the iterator used before"):
        publish(members, once)
    assert pulled(members) == [1] * 5


def test_a_number_that_is_too_low_is_refused_before_any_tensor_is_made(members: Members) -> None:
    publish(members, pairs(1), version=7)

    def unasked() -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError
        yield

    with pytest.raises(rtr.ConfigurationError, match=r"version 7 of weight store '.*' is not newer than 7"):
        publish(members, unasked(), version=7)


def test_other_members_and_other_threads_go_on_meanwhile(members: Members) -> None:
    """Also if the iterator itself publishes or pulls."""
    with members.acting("home"), ThreadPoolExecutor(1) as pool:
        store, mine = rtr.WeightStore("w", keep=3), {name: torch.zeros(SHAPE) for name in NAMES}
        store.publish(pairs(1))

        def nested() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in pairs(4):
                if name == NAMES[2]:
                    assert pool.submit(store.publish, dict(pairs(2))).result(20) == 2
                    assert store.publish(pairs(3)) == 3
                    assert store.pull(mine) == 3
                yield name, tensor

        assert store.publish(nested()) == 4
        for version in (2, 3, 4):
            assert store.pull(mine, version) == version and values(mine) == [version] * 5


def test_what_is_given_may_be_written_again_for_the_next(members: Members) -> None:
    def reused(first: float) -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.zeros(SHAPE)
        for value, name in enumerate(NAMES):
            yield name, buffer.fill_(first + value)

    for first in (1.0, 10.0):
        publish(members, reused(first))
        assert pulled(members) == [first + value for value in range(5)]


def test_modules_and_lists_of_pairs(members: Members) -> None:
    layer, mine = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    publish(members, layer.named_parameters())
    with members.acting("a"):
        rtr.WeightStore.find("w").pull(mine)
    assert torch.equal(mine.weight, layer.weight)
    publish(members, list(pairs(2)))
    assert pulled(members) == [2] * 5


def test_since_brings_what_has_changed(members: Members) -> None:
    settings = {"track": True}
    publish(members, pairs(1), settings)
    mine = {name: torch.zeros(SHAPE) for name in NAMES}
    with members.acting("a"):
        store = rtr.WeightStore.find("w")
        assert store.pull(mine) == 1
    mine["layer0"].fill_(-1)  # it would be brought if it counted as changed
    publish(members, iter([*pairs(1, NAMES[:1]), *pairs(2, NAMES[1:])]), settings)
    with members.acting("a"):
        assert store.pull(mine, since=1) == 2
    assert values(mine) == [-1, 2, 2, 2, 2]


def test_readers_convert_it(members: Members) -> None:
    weight = torch.randn(8, 8)
    publish(members, iter([("weight", weight)]))
    mine = {"weight": torch.zeros(8, 8, dtype=torch.float8_e4m3fn), "weight_scale_inv": torch.zeros(1, 1)}
    with members.acting("a"):
        store = rtr.WeightStore.find("w")
        store.pull(mine, convert=rtr.BlockFp8())
        half = {"weight": torch.zeros(8, 8, dtype=torch.bfloat16)}
        store.pull(half, convert=True)
    assert torch.allclose(mine["weight"].float() * mine["weight_scale_inv"], weight, rtol=0.07, atol=0.02)
    assert torch.equal(half["weight"], weight.bfloat16())


# --- several publishers ---------------------------------------------------------------------------------------------

PUBLISHERS = ("a", "b")


def halves(number: int, value: float) -> Iterator[tuple[str, Any]]:
    yield "rows", rtr.Shard(torch.full((2, 3), value), (4, 3), (2 * number, 0))
    yield "both", torch.full((3,), value)


def sharded() -> rtr.WeightStore:
    return rtr.WeightStore("s", publishers=PUBLISHERS)


def pulled_rows(members: Members) -> tuple[int, list[float]]:
    mine = torch.zeros(4, 3)
    with members.acting("home"):
        version = sharded().pull({"rows": mine}, only="rows")
    return version, mine[:, 0].tolist()


def test_shards_of_several_publishers(members: Members) -> None:
    for value in (1.0, 2.0, 3.0):
        for number, name in enumerate(PUBLISHERS):
            with members.acting(name):
                assert sharded().publish(halves(number, value)) == value
        assert pulled_rows(members) == (value, [value] * 4)


def test_only_members_that_publish_ask_for_tensors(members: Members) -> None:
    def unasked() -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError
        yield

    with members.acting("home"), pytest.raises(rtr.ConfigurationError, match="is published by a, b, not by 'home'"):
        sharded().publish(unasked())
    with members.acting("a"), pytest.raises(rtr.ConfigurationError, match="lives in member 'home': publish there"):
        rtr.WeightStore("w", home="home").publish(unasked())
