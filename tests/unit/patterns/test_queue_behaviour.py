"""What users know of queue.Queue and of Ray's Queue, as far as a Queue promises it: at its home, and elsewhere."""

from __future__ import annotations

import asyncio
import pickle
import queue as standard
import threading
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest

import raytorchrpc as rtr
from tests.polling import wait_until
from tests.unit.members import Members, in_thread

LONG = 20.0
Raised = type[Exception] | tuple[type[Exception], ...]


def raises(error: Raised, use: Callable[[], Any], match: str = ".") -> float:
    """Returns how long it took."""
    began = time.monotonic()
    with pytest.raises(error, match=match):
        use()
    return time.monotonic() - began


def waits(queue: rtr.Queue, use: Callable[[], Any], what: str) -> Callable[[], Any]:
    """Begin something on a thread, which waits at the home; returns what joins it."""
    joins = in_thread(use)
    assert wait_until(lambda: queue.stats()[what] == 1, LONG)
    return joins


def first_in_first_out(queue: rtr.Queue) -> None:
    queue.put_many([1, 2])
    queue.put(3)
    assert (queue.qsize(), queue.get(), queue.get_nowait(), queue.get_many(5), queue.qsize()) == (3, 1, 2, [3], 0)


def what_is_false_is_an_item(queue: rtr.Queue) -> None:
    queue.put_many([None, 0, False])
    queue.put("")
    assert queue.get_many(9) == [None, 0, False, ""]


def full_is_told_at_once_or_in_time(queue: rtr.Queue) -> None:
    queue.put_many(range(4))
    raises(standard.Full, lambda: queue.put_nowait(5))
    assert raises(rtr.Full, lambda: queue.put(5, 0.2)) >= 0.2
    assert queue.get_many(9) == [0, 1, 2, 3]


def empty_is_told_at_once_or_in_time(queue: rtr.Queue) -> None:
    raises(standard.Empty, queue.get_nowait)
    assert raises(rtr.Empty, lambda: queue.get(timeout=0.2)) >= 0.2
    raises(rtr.Empty, lambda: queue.get_many(3, 0))


def a_put_waits_for_room(queue: rtr.Queue) -> None:
    queue.put_many(range(4))
    joins = waits(queue, lambda: queue.put(4) or "done", "waiting_to_put")
    assert queue.get() == 0 and joins() == "done" and queue.get_many(9) == [1, 2, 3, 4]


def a_get_waits_for_an_item(queue: rtr.Queue) -> None:
    joins = waits(queue, queue.get, "waiting_to_get")
    queue.put("x")
    assert joins() == "x"


def more_than_there_is_room_for_goes_in_parts(queue: rtr.Queue) -> None:
    with pytest.raises(rtr.Full) as full:
        queue.put_many(range(7), 0)
    assert full.value.accepted == 4 and queue.get_many(9) == [0, 1, 2, 3]


def closing_ends_it_after_what_waits(queue: rtr.Queue) -> None:
    queue.put_many([1, 2])
    queue.close()
    raises(rtr.Closed, lambda: queue.put(3), "is closed")
    assert queue.get() == 1 and list(queue) == [2]
    raises(rtr.Closed, queue.get, "has been taken")
    raises(rtr.Closed, queue.get_nowait)
    assert list(queue.items()) == list(queue.batches(2)) == []


def closing_ends_those_who_wait(queue: rtr.Queue) -> None:
    gets = waits(queue, lambda: raises(rtr.Closed, queue.get), "waiting_to_get")
    queue.close()
    assert gets() < LONG


def closing_ends_those_who_wait_for_room(queue: rtr.Queue) -> None:
    queue.put_many(range(4))
    puts = waits(queue, lambda: raises(rtr.Closed, lambda: queue.put(4)), "waiting_to_put")
    queue.close(force=True)
    assert puts() < LONG and list(queue) == [0, 1, 2, 3]


def each_item_comes_once(queue: rtr.Queue) -> None:
    """By four threads that put and three that take, each producer's in order."""
    taken: list[list[tuple[int, int]]] = [[], [], []]
    threads = [
        threading.Thread(target=lambda n=n: [queue.put((n, value)) for value in range(30)])  # type: ignore[misc]
        for n in range(4)
    ]
    takers = [threading.Thread(target=lambda into=into: into.extend(queue)) for into in taken]  # type: ignore[misc]
    for thread in [*threads, *takers]:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    queue.close()
    for thread in takers:
        thread.join(LONG)
    assert sorted(chain.from_iterable(taken)) == [(number, value) for number in range(4) for value in range(30)]
    assert all([v for n, v in one if n == p] == sorted(v for n, v in one if n == p) for one in taken for p in range(4))


def coroutines_put_and_get(queue: rtr.Queue) -> None:
    async def act() -> list[Any]:
        gets = [asyncio.create_task(queue.aget()) for _ in range(6)]
        await asyncio.gather(*(queue.aput(number) for number in range(4)))
        await queue.aput_many([4, 5])
        await queue.aclose()
        return sorted(await asyncio.gather(*gets)) + [item async for item in queue]

    assert asyncio.run(act()) == [0, 1, 2, 3, 4, 5]


def a_handle_can_be_sent(queue: rtr.Queue) -> None:
    pickle.loads(pickle.dumps(queue)).put(1)
    assert queue.get() == 1


def seconds_are_no_bool(queue: rtr.Queue) -> None:
    """The first arguments of queue.Queue.get are ``block`` and ``timeout``."""
    for use in (lambda: queue.get(True), lambda: queue.put(1, False), lambda: queue.get_many(1, timeout=True)):
        raises(rtr.ConfigurationError, use, r"timeout is a number of seconds up to 86400.*block=False pass timeout=0")
    uses: list[Any] = [queue.get, lambda **how: queue.put(1, **how), lambda **how: queue.put_many([1], **how)]
    for use in uses:
        raises(TypeError, lambda use=use: use(block=False), "takes no block=; for block=False pass timeout=0")  # type: ignore[misc]
    for wrong in (-1, "1", float("nan"), float("inf")):
        raises(rtr.ConfigurationError, lambda wrong=wrong: queue.get(wrong), "timeout is a number of seconds")  # type: ignore[misc]
    assert queue.qsize() == 0


def deleting_ends_it(queue: rtr.Queue) -> None:
    queue.put(1)
    queue.get()
    deleted = "queue 'q' in member 'home' was deleted"
    gets = waits(queue, lambda: raises(rtr.NotFound, queue.get, deleted), "waiting_to_get")
    queue.delete()
    assert gets() < LONG
    raises(rtr.NotFound, queue.get, "was deleted")
    raises(rtr.NotFound, queue.delete)
    new = rtr.Queue(queue.name, home="home", maxsize=7)
    assert new.qsize() == 0 and new.maxsize == 7
    raises(rtr.NotFound, queue.get, "is a new one")


BEHAVIOURS = [
    *(first_in_first_out, what_is_false_is_an_item, full_is_told_at_once_or_in_time, empty_is_told_at_once_or_in_time),
    *(a_put_waits_for_room, a_get_waits_for_an_item, more_than_there_is_room_for_goes_in_parts),
    *(closing_ends_it_after_what_waits, closing_ends_those_who_wait, closing_ends_those_who_wait_for_room),
    *(each_item_comes_once, coroutines_put_and_get, a_handle_can_be_sent, seconds_are_no_bool, deleting_ends_it),
]


@pytest.mark.parametrize("member", ["home", "a"])
@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.__name__)
def test_a_queue_behaves_as_others_do(members: Members, behaviour: Callable[[rtr.Queue], None], member: str) -> None:
    with members.acting(member):
        behaviour(rtr.Queue("q", home="home", maxsize=4))
