"""What waits in queues and topics, and who waits for it: without members and messages."""

from __future__ import annotations

import collections
import gc
import pickle
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from raytorchrpc.errors import NotAMember, NotFound
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
from raytorchrpc.patterns.queues.store import Buffer, Policy, Store
from raytorchrpc.tensors.codec import Codec
from tests.unit.callees import Deadlines, DeferredReply

LONG = 20.0


def items(*values: int, size: int = 1) -> list[Item]:
    return [Item(bytes([value]), (), 0, size) for value in values]


def soon() -> float:
    return time.monotonic() + LONG


def values(taken: Any) -> Any:
    return [item.payload[0] for item in taken] if isinstance(taken, list) else taken


def queue(deadlines: Deadlines, maxsize: int = 3, policy: Policy = "block", closes: int = 1) -> Store:
    store = Store(deadlines, closes)
    store.add_buffer("", Buffer(maxsize, 1000, policy))
    return store


def test_without_room_it_waits_first_come_first_served_and_in_time(deadlines: Deadlines) -> None:
    store = queue(deadlines)
    store.put(items(1, 2, 3), 0)
    assert store.put(items(4), 0) is None
    first, second = store.put(items(4, 5), soon()), store.put(items(6), soon())
    assert isinstance(first, DeferredReply) and isinstance(second, DeferredReply)
    assert values(store.take("", 1, 0)) == [1]
    assert not first.done() and not second.done(), "the smaller one is not let past"
    assert values(store.take("", 1, 0)) == [2]
    assert first.result(0) is True and not second.done()
    assert values(store.take("", 9, 0)) == [3, 4, 5]
    assert second.result(0) is True
    late = store.put(items(1, 2, 3), time.monotonic() + 0.3)
    assert isinstance(late, DeferredReply) and late.result(LONG) is None
    assert values(store.take("", 9, 0)) == [6]


def test_who_waits_for_an_item_gets_it(deadlines: Deadlines) -> None:
    store = queue(deadlines)
    first, second = store.take("", 2, soon()), store.take("", 2, soon())
    store.put(items(1, 2, 3), 0)
    assert (values(first.result(0)), values(second.result(0))) == ([1, 2], [3])
    assert store.take("", 1, time.monotonic() + 0.3).result(LONG) is None


def test_bytes_are_bounded_and_a_larger_item_goes_alone(deadlines: Deadlines) -> None:
    store = queue(deadlines, maxsize=100)
    assert store.put(items(1, size=5000), 0) is True
    assert store.put(items(2), 0) is None
    store.take("", 1, 0)
    assert store.put(items(2, 3, size=500), 0) is True
    assert store.put(items(4), 0) is None


def test_one_message_brings_no_more_bytes_than_it_should(deadlines: Deadlines) -> None:
    store = Store(deadlines)
    store.add_buffer("", Buffer(100, 1 << 40, "block"))
    store.put(items(1, 2, 3, size=MESSAGE_BYTES // 2), 0)
    assert values(store.take("", 9, 0)) == [1, 2]


def test_the_end(deadlines: Deadlines) -> None:
    store = queue(deadlines, closes=2)
    store.put(items(1, 2, 3), 0)
    waits = store.put(items(4), soon())
    store.end()
    assert store.put(items(5), 0) is None, "the other producer goes on"
    store.end()
    assert isinstance(waits, DeferredReply) and waits.result(0) is False
    assert store.put(items(5), soon()) is False
    assert values(store.take("", 9, soon())) == [1, 2, 3]
    assert store.take("", 1, soon()) is False
    other = queue(deadlines, closes=5)
    waiting = other.take("", 1, soon())
    other.end(force=True)
    assert waiting.result(0) is False


def test_who_gave_up_takes_nothing(deadlines: Deadlines) -> None:
    store = queue(deadlines)
    withdrawn, lost, cancelled = (store.take("", 1, soon(), rank, 7) for rank in (1, 2, None))
    store.withdraw("", 1, 7)
    store.lose(2)
    cancelled.cancel()
    assert withdrawn.result(0) is None and not lost.done()
    store.put(items(1), 0)
    taken = store.take("", 1, 0)
    assert values(taken) == [1]
    store.put(items(2), 0)
    store.put_back("", taken)
    assert values(store.take("", 9, 0)) == [1, 2]
    store.put(items(1, 2, 3), 0)
    given_up = store.put(items(4), soon())
    behind = store.put(items(5), soon())
    assert isinstance(given_up, DeferredReply) and given_up.cancel()
    store.take("", 1, 0)
    assert isinstance(behind, DeferredReply) and behind.result(0) is True


@pytest.mark.parametrize(("policy", "kept"), [("drop_oldest", [2, 3, 4]), ("latest", [4])])
def test_a_slow_subscriber_holds_nobody_up(deadlines: Deadlines, policy: Policy, kept: list[int]) -> None:
    store = Store(deadlines)
    store.put(items(0), 0)
    store.add_buffer("slow", Buffer(len(kept), 1000, policy, rank=1))
    store.add_buffer("quick", Buffer(10, 1000, "block", rank=2))
    for value in range(1, 5):
        assert store.put(items(value), 0) is True
    assert values(store.take("slow", 9, 0)) == kept
    assert values(store.take("quick", 9, 0)) == [1, 2, 3, 4]
    assert store.stats("slow")["dropped"] == 4 - len(kept)


def test_a_blocking_subscriber_holds_up_until_it_is_gone(deadlines: Deadlines) -> None:
    store = Store(deadlines)
    store.add_buffer("slow", Buffer(1, 1000, "block", rank=1))
    store.put(items(1), 0)
    waits = store.put(items(2), soon())
    assert isinstance(waits, DeferredReply) and not waits.done()
    store.keep_only(1, None)
    assert waits.result(0) is True
    assert store.stats()["buffers"] == 0
    with pytest.raises(NotFound, match="no such subscription any more; subscribe again"):
        store.take("slow", 1, soon())


def subscribed(deadlines: Deadlines, maxsize: int, policy: Policy = "block") -> Store:
    """By the process "old" of rank 1, which is away; 1 and 2 wait for it."""
    store = Store(deadlines)
    store.add_buffer("sub", Buffer(maxsize, 1000, policy, 1, "old"))
    store.put(items(1, 2), 0)
    store.lose(1)
    return store


def test_who_waits_for_room_goes_on_when_the_subscriber_is_away(deadlines: Deadlines) -> None:
    store = Store(deadlines)
    store.add_buffer("sub", Buffer(1, 1000, "block", 1, "old"))
    store.put(items(1), 0)
    waits = store.put(items(2), soon())
    store.lose(1)
    assert isinstance(waits, DeferredReply) and waits.result(0) is True
    store.keep_only(1, "old")
    with pytest.raises(NotFound, match="missed items"):
        store.take("sub", 1, 0)


def test_a_policy_that_drops_goes_on_while_its_subscriber_is_away(deadlines: Deadlines) -> None:
    store = subscribed(deadlines, maxsize=2, policy="drop_oldest")
    store.put(items(3), 0)
    store.keep_only(1, "old")
    assert values(store.take("sub", 9, 0)) == [2, 3] and store.stats("sub")["dropped"] == 1


def test_what_is_given_back_lies_where_it_was(deadlines: Deadlines) -> None:
    """Several batches, in any order, parts of them, also while others have taken what came after."""
    store = queue(deadlines, maxsize=20)
    store.put(items(*range(12)), 0)
    batches = [store.take("", 2, 0) for _ in range(5)]
    assert store.take("", 1, 0) == items(10)
    for place in (1, 4, 0, 3):
        store.put_back("", batches[place].part(1) if place == 3 else batches[place])
        store.put_back("", batches[place].part(1) if place == 3 else batches[place])  # the message came twice
    assert store.stats()["items"] == 8 and store.stats()["taken"] == 4
    left: list[Any] = []
    while store.stats()["items"]:
        left += values(store.take("", 3, 0))
    assert left == [0, 1, 2, 3, 7, 8, 9, 11]


def test_what_is_given_back_of_a_buffer_that_drops_is_its_oldest(deadlines: Deadlines) -> None:
    store = queue(deadlines, maxsize=3, policy="drop_oldest")
    store.put(items(1, 2, 3), 0)
    taken = store.take("", 2, 0)
    store.put(items(4), 0)
    store.put_back("", taken)
    assert values(store.take("", 9, 0)) == [2, 3, 4] and store.stats()["dropped"] == 1


def test_who_waited_too_long_is_not_handed_anything(deadlines: Deadlines) -> None:
    """As when this process stood still, and puts are served before the deadlines."""
    clock: Any = type("Stopped", (), {"at": lambda self, when, callback: lambda: None})()
    store = queue(clock)
    late, behind = store.take("", 1, time.monotonic() + 0.3), store.take("", 1, soon())
    time.sleep(0.3)
    store.put(items(1), 0)
    assert late.result(0) is None and values(behind.result(0)) == [1]


def test_leaving_the_group_ends_every_wait(deadlines: Deadlines) -> None:
    store, full = queue(deadlines), queue(deadlines, maxsize=1)
    full.put(items(1), 0)
    waiting = [store.take("", 1, soon()), full.put(items(2), soon())]
    for one in (store, full):
        one.close(NotAMember("left"))
    for later in waiting:
        with pytest.raises(NotAMember):
            later.result(0)
    with pytest.raises(NotAMember):
        store.put(items(1), 0)


def test_many_threads_lose_nothing_and_double_nothing(deadlines: Deadlines) -> None:
    store, taken, count = queue(deadlines, maxsize=5, closes=4), [], 500

    def produce(number: int) -> None:
        for value in range(count):
            outcome = store.put([Item(f"{number} {value}".encode(), (), 0, 1)], soon())
            assert (outcome.result(LONG) if isinstance(outcome, DeferredReply) else outcome) is True
        store.end()

    def consume() -> None:
        while True:
            got = store.take("", 3, soon())
            got = got.result(LONG) if isinstance(got, DeferredReply) else got
            if got is False:
                return
            taken.extend(item.payload for item in got)

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(4)]
    threads += [threading.Thread(target=consume) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert sorted(taken) == sorted(f"{number} {value}".encode() for number in range(4) for value in range(count))


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


def test_a_policy_that_drops_does_so_one_by_one() -> None:
    buffer = Buffer(5, 1 << 30, "drop_oldest")
    apart = runs_of(*range(100))
    buffer.append(apart, sum(item.size for item in apart))
    assert decode_items(Codec(), buffer.take(100)) == [95, 96, 97, 98, 99]
    assert (buffer.dropped, buffer.taken, buffer.count, buffer.bytes) == (95, 5, 0, 0)


def test_a_home_that_takes_a_run_apart_runs_nobodys_code() -> None:
    with pytest.raises(pickle.UnpicklingError, match="a run of items holds a"):
        split_run(Item(pickle.dumps([Path("/"), 2], 5), (), 0, 10, length=2))


def test_a_store_counts_the_items_of_runs(deadlines: Deadlines) -> None:
    store = queue(deadlines, maxsize=100)
    assert store.put(runs_of(*range(64)), soon()) is True
    assert store.put(runs_of(*range(64)), 0) is None, "no room for so many"
    assert store.put(runs_of(*range(36)), soon()) is True
    numbers = store.stats()
    assert (numbers["items"], numbers["put"], numbers["taken"]) == (100, 100, 0)
    taken = store.take("", 70, soon())
    assert decode_items(Codec(), taken) == [*range(64), *range(6)]
    store.put_back("", taken)
    assert store.stats()["items"] == 100 and store.stats()["taken"] == 0
    assert decode_items(Codec(), store.take("", 100, soon())) == [*range(64), *range(36)]
