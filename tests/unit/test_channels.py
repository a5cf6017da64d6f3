"""Queues and topics between members of one process: order, what is given back, what cannot be unpickled."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import raytorchrpc as rtr
from raytorchrpc import member
from tests.unit.members import Members, in_thread

LONG = 20.0


@pytest.fixture
def members(request: Any) -> Iterator[Members]:
    """Parametrize indirectly with a GroupConfig for other settings."""
    made = Members(getattr(request, "param", rtr.GroupConfig(rpc_timeout_s=LONG)))
    try:
        yield made
    finally:
        member.set_local(None)
        made.close()


class Unloadable:
    """Can be pickled; unpickling it raises."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("no such class here")


def inversions(values: list[int]) -> int:
    return sum(after < before for before, after in itertools.pairwise(values))


# --- order ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2000])
def test_gathered_puts_come_out_in_the_order_of_the_calls(members: Members, count: int) -> None:
    async def put(queue: rtr.Queue) -> None:
        await asyncio.gather(*(queue.aput(number) for number in range(count)))

    with members.acting("a"):
        queue = rtr.Queue("q", home="home", maxsize=count)
        asyncio.run(put(queue))
        taken = queue.get_many(count)
    assert sorted(taken) == list(range(count))
    assert inversions(taken) == 0


# --- what is given back --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "members", [rtr.GroupConfig(rpc_timeout_s=20, when_full="reject", max_calls_in_flight=4)], indirect=True
)
def test_a_cancelled_get_loses_nothing_whatever_else_is_under_way(members: Members) -> None:
    count = 300

    async def take_and_cancel(queue: rtr.Queue, taken: list[Any]) -> None:
        async def take() -> None:
            taken.append(await queue.aget(timeout=LONG))

        while len(taken) < count:
            tasks = [asyncio.create_task(take()) for _ in range(4)]
            await asyncio.sleep(0)
            await asyncio.sleep(0.0005)
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert outcome is None or isinstance(outcome, (asyncio.CancelledError, rtr.PeerBusy)), outcome
            if not await asyncio.to_thread(left):
                break

    with members.acting("a"):
        queue = rtr.Queue("q", home="home", maxsize=count)
        queue.put_many(range(count))
        home = members.members["home"]
        store = home.services.find("queue", "q", None, "home")

        def left() -> bool:
            return store.numbers()["taken"] < count or store.numbers()["items"] > 0

        taken: list[Any] = []
        asyncio.run(take_and_cancel(queue, taken))
        with pytest.raises(rtr.Empty):
            while True:
                taken.append(queue.get(timeout=1.0))
    assert sorted(taken) == list(range(count))


# --- what cannot be unpickled --------------------------------------------------------------------------------


@pytest.mark.parametrize("consumer", ["home", "a"])
def test_an_item_that_cannot_be_unpickled_is_lost_alone(members: Members, consumer: str) -> None:
    with members.acting(consumer):
        queue = rtr.Queue("q", home="home")
        queue.put_many([0, [Unloadable()], 2, Unloadable(), Unloadable(), 5, (6, object), 7])
        queue.close()
        taken: list[Any] = []
        while True:
            try:
                taken.append(queue.get_many(8))
            except rtr.SerializationError as error:
                assert "no such class here" in str(error)
                taken.append("bad")
            except rtr.Closed:
                break
    assert taken == [[0], "bad", [2], "bad", "bad", [5, (6, object), 7]]
