"""Items of queues and topics as they are encoded, sent and stored; ``test_store_model`` has what becomes of them."""

from __future__ import annotations

import collections
import gc
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from raytorchrpc.patterns.queues.items import (
    MESSAGE_BYTES,
    Item,
    SharedMemoryBudget,
    decode_items,
    encode_item,
    encode_items,
    messages,
    pack,
    split_run,
    total_length,
    unpack,
)
from raytorchrpc.patterns.queues.store import Buffer
from raytorchrpc.tensors.codec import Codec

LONG = 20.0


def items(*values: int, size: int = 1) -> list[Item]:
    return [Item(bytes([value]), (), 0, size) for value in values]


def values(taken: Any) -> Any:
    return [item.payload[0] for item in taken] if isinstance(taken, list) else taken


# --- items ---------------------------------------------------------------------------------------------------


def test_items_cross_and_are_apart() -> None:
    codec, tensor = Codec(), torch.arange(6.0).view(2, 3)
    given = [1, None, {"a": tensor.T, "b": tensor}, [tensor], torch.nn.Parameter(tensor), "x", (), b""]
    apart = [encode_item(codec, value) for value in given]
    body = codec.encode(pack(apart), own=True)
    body = body._replace(tensors=[tensor.clone() for tensor in body.tensors])
    back = decode_items(codec, unpack(codec.decode(*body)))
    assert [type(value) for value in back] == [type(value) for value in given]
    assert torch.equal(back[2]["a"], tensor.T) and back[4].requires_grad
    back[3][0].zero_()
    assert torch.equal(back[2]["b"], tensor), "the same tensor in two items arrives twice"


def test_messages_are_cut_by_number_and_by_bytes() -> None:
    parts = [values(part) for part in map(list, messages(items(*range(7)), 3))]
    assert parts == [[0, 1, 2], [3, 4, 5], [6]]
    large = items(1, 2, size=MESSAGE_BYTES) + items(3, size=MESSAGE_BYTES * 3) + items(4, 5)
    assert [values(part) for part in map(list, messages(large, 10))] == [[1], [2], [3], [4, 5]]
    assert list(messages([], 3)) == []


def test_what_waits_in_a_senders_memory_is_bounded() -> None:
    tensor, codec = torch.ones(100_000), Codec()
    budget = SharedMemoryBudget(limit=1_000_000)

    def arrives() -> Item:
        (item,) = unpack(pack([encode_item(codec, tensor)]), 1, budget)
        return item

    waiting = [arrives(), arrives(), arrives()]
    lent = [item.tensors[0].data_ptr() == tensor.data_ptr() for item in waiting]
    assert lent == [True, True, False], "the third would be too much, and was copied"
    del waiting
    gc.collect()
    assert arrives().tensors[0].data_ptr() == tensor.data_ptr()


# --- runs ----------------------------------------------------------------------------------------------------


def runs_of(*given: Any, most: int = 1000) -> list[Item]:
    return encode_items(Codec(), given, most)


def crossed(given: Sequence[Item]) -> list[Item]:
    codec = Codec()
    return unpack(codec.decode(*codec.encode(pack(given), own=True)))


@pytest.mark.parametrize(
    "make",
    [
        lambda number: number,
        lambda number: {"step": number, "reward": 1.5, "done": None},
        lambda number: (number, "text", b"bytes", True),
        lambda number: [number] * (number % 3),
        lambda number: 5,
        lambda number: (1, 2),
        lambda number: {},
    ],
)
@pytest.mark.parametrize("limit", [1, 7, 64, 100, 1000])
def test_plain_items_cross_and_wait_as_runs_and_come_out_one_by_one(make: Any, limit: int) -> None:
    given = [make(number) for number in range(333)]
    apart = runs_of(*given)
    assert len(apart) == 6 and total_length(apart) == 333
    buffer = Buffer(1000, 1 << 30, "block")
    arrived = crossed(apart)
    buffer.append(arrived, sum(item.size for item in arrived))
    back: list[Any] = []
    while buffer.count:
        taken = buffer.take(limit)
        assert total_length(taken) == min(limit, 333 - len(back)), "as many as there are, up to the limit"
        back += decode_items(Codec(), crossed(taken))
    assert back == given
    assert (buffer.count, buffer.bytes, buffer.taken) == (0, 0, 333)
    if isinstance(given[0], (dict, list)):
        assert len(set(map(id, back))) == 333, "each is an object of its own"


@pytest.mark.parametrize(
    "odd", [1j, torch.ones(2), {"a": [1]}, {1: (2,)}, object(), collections.OrderedDict(a=1), "x" * 100_000, True]
)
def test_what_is_not_plain_breaks_no_run(odd: Any) -> None:
    given = [*range(100), odd, *range(100)]
    back = decode_items(Codec(), crossed(runs_of(*given)))
    assert [type(value) for value in back] == [type(value) for value in given]
    assert back[:100] == back[101:] == list(range(100))


def test_one_object_put_twice_arrives_as_two() -> None:
    same: dict[str, int] = {"a": 1}
    first, second = decode_items(Codec(), crossed(runs_of(same, same)))
    assert first == second == same and first is not second


def test_no_run_is_longer_than_what_there_is_room_for() -> None:
    apart = runs_of(*range(10), most=4)
    assert [item.length for item in apart] == [4, 4, 2]
    assert [total_length(part) for part in messages(apart, 4)] == [4, 4, 2]
    assert [item.length for item in runs_of(*range(3), most=1)] == [1, 1, 1]


def test_a_home_that_takes_a_run_apart_runs_nobodys_code() -> None:
    with pytest.raises(pickle.UnpicklingError, match="a run of items holds a"):
        split_run(Item(pickle.dumps([Path("/"), 2], 5), (), 0, 10, length=2))
