"""Queues and topics between members of one process: order, what is given back, what cannot be unpickled."""

from __future__ import annotations

import asyncio
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from raytorchrpc.errors import LaneUnavailable, PeerLost
from raytorchrpc.patterns.queues.items import encode_items
from raytorchrpc.tensors.codec import Codec
from tests.polling import wait_until
from tests.unit.members import PUT, PUT_BACK, SUBSCRIBE, TAKE, WITHDRAW, Members, in_thread, serving

LONG = 20.0
REJECT = rtr.GroupConfig(rpc_timeout_s=LONG, when_full="reject", max_calls_in_flight=1)


def at_home(members: Members, kind: str = "queue") -> Any:
    """The object called "q"."""
    return members.served(kind, "q")


def made(**settings: Any) -> rtr.Queue:
    """A handle of the queue called "q", which is there."""
    queue = rtr.Queue("q", home="home", **settings)
    assert queue.qsize() == 0
    return queue


async def until(condition: Callable[[], bool]) -> None:
    assert await asyncio.to_thread(wait_until, condition, LONG)


class Unloadable:
    """Can be pickled; unpickling it raises."""

    def __init__(self, error: type[BaseException] = ValueError, number: int | None = None) -> None:
        self.error, self.number = error, number

    def __reduce__(self) -> Any:
        return _refuse, (self.error, self.number)


def _refuse(error: type[BaseException], number: int | None) -> None:
    raise error("no such class here" if number is None else number)


# --- at random -----------------------------------------------------------------------------------------------


class Disorder:
    """Lets requests and answers of one member arrive in any order, and some puts and gets not at all."""

    def __init__(self, lane: Any, chance: random.Random, loses: Collection[str]) -> None:
        """``loses``: the methods of which some requests do not arrive."""
        self.lane, self.chance, self.loses = lane, chance, loses
        lane.holds = lambda method: chance.random() < 0.5
        lane.delays = lambda method: chance.random() < 0.3

    async def go_on(self) -> None:
        while True:
            await asyncio.sleep(0.0005)
            for waiting in (self.lane.held, self.lane.answers):
                for _ in range(self.chance.randint(0, 2)):
                    if waiting:
                        self.let_go(waiting, self.chance.randrange(len(waiting)))

    def let_go(self, waiting: list[Any], number: int) -> None:
        if waiting is self.lane.answers:
            waiting.pop(number)()
        elif waiting[number][0].args[1].header[3] in self.loses and self.chance.random() < 0.1:
            self.lane.lose(number)
        else:
            self.lane.release(number)


async def act_at_random(queue: rtr.Queue, chance: random.Random, count: int, cancels: bool) -> None:
    """Puts of which some fail or are cancelled (``cancels``), and gets of all kinds of which some are cancelled.

    Everything that was put for certain comes once and in order, all else once or never.
    """
    taken, refused = list[Any](), list[int]()
    puts, number = list[tuple[range, asyncio.Task[None]]](), 0
    while number < count:
        part = range(number, number + chance.choice([1, 1, 1, 7]))
        items = [Unloadable(number=item) if item % 11 == 5 else item for item in part]
        patience = chance.choice([LONG, LONG, LONG, 0.01])
        put = queue.aput(items[0], patience) if len(items) == 1 else queue.aput_many(items, patience)
        puts.append((part, asyncio.create_task(put)))
        number += len(part)
    iteration: Any = chance.choice([None, queue.items(batch=3), queue.batches(3, collate=list)])

    async def take() -> None:
        singly = chance.random() < 0.5
        if iteration is not None:
            step = iteration.__anext__()
        else:
            step = queue.aget(LONG) if singly else queue.aget_many(6, LONG, min=chance.choice([1, 2, 6]))
        try:
            got = await (asyncio.wait_for(step, chance.choice([0.0005, 0.003])) if chance.random() < 0.4 else step)
            taken.extend(got if isinstance(got, list) else [got])
        except (asyncio.TimeoutError, PeerLost):
            pass
        except rtr.SerializationError as error:
            refused.append(int(str(error.__cause__)))

    async def end() -> None:
        for _, put in puts:
            if cancels and chance.random() < 0.1:
                await asyncio.sleep(0.001)
                put.cancel()
        await asyncio.gather(*(put for _, put in puts), return_exceptions=True)
        while True:
            try:
                return await queue.aclose(force=True)
            except PeerLost:
                pass

    ending = asyncio.create_task(end())
    with suppress(rtr.Closed, StopAsyncIteration):
        while True:
            await take()
    await ending
    certain = [item for part, put in puts if not put.cancelled() and put.exception() is None for item in part]
    assert len(certain) > count / 5, "much went well"
    assert [item for item in taken if item in set(certain)] == [item for item in certain if item % 11 != 5]
    assert len(taken + refused) == len({*taken, *refused})


@pytest.mark.parametrize("seed", range(16))
def test_whatever_happens_items_come_once_and_in_order(members: Members, seed: int) -> None:
    chance, cancels = random.Random(seed), seed % 2 == 0

    async def act() -> None:
        disorder = asyncio.create_task(Disorder(members.lanes["a"], chance, [TAKE] if cancels else [TAKE, PUT]).go_on())
        try:
            await asyncio.wait_for(act_at_random(queue, chance, 80, cancels), 3 * LONG)
        finally:
            assert not disorder.done(), disorder.exception()
            disorder.cancel()

    with members.acting("home" if seed % 4 == 0 else "a"):
        queue = rtr.Queue("q", home="home", maxsize=chance.choice([2, 4, 100]))
        asyncio.run(act())


# --- order ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [rtr.GroupConfig(), REJECT], indirect=True)
@pytest.mark.parametrize("producer", ["home", "a"])
def test_puts_that_do_not_wait_for_room_wait_for_their_turn(members: Members, producer: str) -> None:
    lane, full = members.lanes["a"], list[int]()

    async def put(number: int) -> None:
        try:
            await queue.aput(number, timeout=0)
        except rtr.Full:
            full.append(number)

    async def act() -> None:
        lane.holds = lambda method: method == PUT
        puts = asyncio.gather(*map(put, range(6)))
        await asyncio.sleep(0.05)
        lane.release()
        await puts
        waiting = asyncio.create_task(queue.aput(6, LONG))
        await until(lambda: at_home(members).stats()["waiting_to_put"] == 1)
        await put(7)
        waiting.cancel()

    with members.acting(producer):
        queue = made(maxsize=4)
        asyncio.run(act())
    with members.acting("b"):
        assert full == [4, 5, 7] and queue.get_many(9) == [0, 1, 2, 3]


def test_a_put_whose_time_is_over_hears_at_once_that_another_waits_for_room(members: Members) -> None:
    lane = members.lanes["a"]

    async def act() -> None:
        lane.holds = lambda method: method == PUT
        first = asyncio.create_task(queue.aput(1, LONG))
        await until(lambda: lane.held)
        late = asyncio.create_task(queue.aput(2, timeout=0))
        await until(lambda: len(at_home(members)._until_full) == 1)
        assert not late.done(), "the put before it has not arrived: there may be room"
        lane.release()
        with pytest.raises(rtr.Full):
            await late
        assert [await queue.aget(LONG), await queue.aget(LONG)] == [0, 1]
        await first
        assert len(at_home(members)._until_full) == 0

    with members.acting("a"):
        queue = made(maxsize=1)
        queue.put(0)
        asyncio.run(act())


def test_puts_whose_time_is_over_hear_that_the_home_does_not_answer(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, and not one after the other."""
    monkeypatch.setattr("raytorchrpc.patterns.handle._ANSWER_NOW_S", 0.5)
    monkeypatch.setattr("raytorchrpc.patterns.handle.ANSWER_S", 0.5)
    lane = members.lanes["a"]

    async def act() -> None:
        lane.holds = lambda method: True
        began = time.monotonic()
        errors = await asyncio.gather(*(queue.aput(number, timeout=0) for number in range(20)), return_exceptions=True)
        assert all(isinstance(error, rtr.RpcTimeout) for error in errors)
        assert time.monotonic() - began < 5

    with members.acting("a"):
        queue = made()
        asyncio.run(act())


# --- what is given back --------------------------------------------------------------------------------------


def test_a_cancelled_get_does_not_hold_its_loop_up_while_the_connection_takes_no_data(members: Members) -> None:
    lane = members.lanes["a"]

    async def act() -> None:
        waiting = asyncio.create_task(queue.aget(timeout=10 * LONG))
        await until(lambda: at_home(members).stats()["waiting_to_get"] == 1)
        lane.jammed = threading.Event()
        waiting.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert time.monotonic() - began < LONG, "the request to withdraw it may take a minute"
        lane.jammed.set()
        await until(lambda: at_home(members).stats()["waiting_to_get"] == 0)

    with members.acting("a"):
        queue = made()
        asyncio.run(act())


def put_at_home(members: Members, *values: Any) -> None:
    """Whoever else acts here meanwhile."""
    made = encode_items(Codec(), values, 1)
    assert at_home(members).put(made, 0) is True


@pytest.mark.parametrize("members", [REJECT], indirect=True)
def test_an_item_that_comes_for_a_cancelled_get_goes_back_whatever_flow_control_says(members: Members) -> None:
    lane = members.lanes["a"]

    async def act() -> None:
        waiting = asyncio.create_task(queue.aget())
        await until(lambda: at_home(members).stats()["waiting_to_get"] == 1)
        lane.holds = lambda method: method == WITHDRAW
        waiting.cancel()
        await until(lambda: len(lane.held) == 1)
        local = members.members["a"]
        # As soon as there is leave for one more call, somebody else has it.
        window = local.credit.by_rank[local.peers.route("home").member.rank]
        lane.when_over = lambda: lane.taken.append(window.take(-1, 0))
        put_at_home(members, 1, 2)

    with members.acting("a"):
        queue = made()
        lane.taken = []  # type: ignore[attr-defined]
        asyncio.run(act())
        assert wait_until(lambda: at_home(members).stats()["items"] == 2, LONG)
        assert any(lane.taken)  # type: ignore[attr-defined]
    with members.acting("b"):
        assert queue.get_many(9) == [1, 2]


async def cancel_a_get(members: Members, queue: Any, holds: Callable[[str], bool]) -> None:
    """Cancel one that waits at the home. ``holds``: for the lane of ``a`` from then on; it holds the withdrawal too."""
    lane = members.lanes["a"]
    waiting = asyncio.create_task(queue.aget())
    await until(lambda: at_home(members).stats()["waiting_to_get"] == 1)
    lane.holds = holds
    waiting.cancel()
    await until(lambda: len(lane.held) == 1)


def test_an_item_goes_back_as_soon_as_its_home_can_be_reached(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytorchrpc.calls.peers.UNREPORTED_LOSS_S", 0.05)
    lane, failed = members.lanes["a"], []

    def fails_twice(method: str) -> bool:
        if method == PUT_BACK and len(failed) < 2:
            failed.append(method)
            raise PeerLost("home", "the test broke the connection", may_have_run=False)
        return method == WITHDRAW

    async def act() -> None:
        await cancel_a_get(members, queue, fails_twice)
        put_at_home(members, 1, 2)
        await until(lambda: at_home(members).stats()["items"] == 2)

    with members.acting("a"):
        queue = made()
        asyncio.run(act())
        lane.holds = lambda method: False
        assert failed and queue.get_many(9) == [1, 2]


@pytest.mark.parametrize("left_s", [0.4, 60.0])
def test_in_a_served_call_an_operation_waits_for_its_timeout_or_nearly_as_long_as_the_call_has_left(
    members: Members, left_s: float
) -> None:
    with members.acting("a"):
        queue = made()
        began = time.monotonic()
        with serving(left_s), pytest.raises(rtr.Empty):
            queue.get(timeout=0.4)
        assert time.monotonic() - began > 0.85 * 0.4


@pytest.mark.parametrize("how", ["get", "aget", "cancelled"])
def test_an_item_that_comes_too_late_goes_back(members: Members, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the consumer's time is over."""
    monkeypatch.setattr("raytorchrpc.patterns.handle.ANSWER_S", 0.3)
    lane = members.lanes["a"]

    async def cancelled() -> None:
        waiting = asyncio.create_task(queue.aget(0.05))
        await until(lambda: len(lane.answers) == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0.4)  # longer than the call may take

    with members.acting("a"):
        queue = made()
        queue.put(1)
        lane.delays = lambda method: method == TAKE
        if how == "cancelled":
            asyncio.run(cancelled())
        else:
            with pytest.raises(rtr.RpcTimeout, match=r"it may still run there \(it is the home of queue 'q'\)"):
                queue.get(0.05) if how == "get" else asyncio.run(queue.aget(0.05))
        assert wait_until(lambda: len(lane.answers) == 1, LONG)
        assert at_home(members).stats()["items"] == 0
        lane.deliver_answers()
        assert queue.get(LONG) == 1


# --- what cannot be unpickled --------------------------------------------------------------------------------

MIXED = [0, [Unloadable()], 2, Unloadable(SystemExit), Unloadable(), 5, (6, object), 7]


def outcomes(take: Callable[[], list[Any]]) -> list[Any]:
    """Of taking up to the end."""
    taken: list[Any] = []
    while True:
        try:
            taken.append(take())
        except rtr.SerializationError as error:
            assert "no such class here" in str(error) and "'q' in 'home' cannot be unpickled here" in str(error)
            taken.append("bad")
        except (rtr.Closed, StopIteration):
            return taken


@pytest.mark.parametrize("consumer", ["home", "a"])
@pytest.mark.parametrize("kind", ["queue", "topic"])
def test_an_item_that_cannot_be_unpickled_is_lost_alone(members: Members, consumer: str, kind: str) -> None:
    with members.acting(consumer):
        source: Any
        if kind == "queue":
            source = queue = made()
            queue.put_many(MIXED)
            queue.close()
        else:
            topic = rtr.Topic("q", home="home")
            source = topic.subscribe()
            topic.publish_many(MIXED)
            topic.close()
        assert outcomes(lambda: source.get_many(8)) == [[0], "bad", [2], "bad", "bad", [5, (6, object), 7]]


def test_an_item_that_cannot_reach_the_consumer_is_lost_alone(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(route: Any, tensors: Any) -> None:
        if any(len(tensor) == 3 for tensor in tensors):
            raise LaneUnavailable("lane", "it is on a GPU that has no mapping")

    monkeypatch.setattr(members.members["home"].payloads, "check_reply", check)
    with members.acting("a"):
        queue = made()
        queue.put_many([torch.ones(length) for length in (1, 3, 2, 3, 4, 5)])
        taken = [len(tensor) for tensor in queue.get_many(9)]
        for _ in range(2):
            with pytest.raises(LaneUnavailable, match="no mapping"):
                queue.get_many(9)
            taken += [len(tensor) for tensor in queue.get_many(9)]
        assert taken == [1, 2, 4, 5]


# --- what waits ----------------------------------------------------------------------------------------------


def test_a_queue_is_found_by_its_name(members: Members) -> None:
    with members.acting("b"):
        made = rtr.Queue("q", maxsize=3)
        assert made.home == "b" and pickle.loads(pickle.dumps(made)).name == "q"
    with members.acting("a"):
        found = rtr.Queue.find("q")
        assert (found.home, found.maxsize) == ("b", 3)
        found.put_many([1, 2, 3])
        with pytest.raises(rtr.ConfigurationError, match="maxsize=3, not maxsize=4"):
            rtr.Queue("q", home="b", maxsize=4).put(4)
        with pytest.raises(rtr.NotFound, match="no member of group 'group' has a queue 'nowhere'"):
            rtr.Queue.find("nowhere")
    with members.acting("b"):
        assert made.get_many(9) == [1, 2, 3]


def test_what_waits_keeps_no_threads(members: Members) -> None:
    count, longer = 100, 10 * LONG

    async def few_threads() -> None:
        """Idle threads end after half a minute, if there have come many; those that wait would stay."""
        assert await asyncio.to_thread(wait_until, lambda: threading.active_count() < before + count // 2, longer / 2)

    async def act() -> None:
        gets = [asyncio.create_task(queue.aget(longer)) for _ in range(count)]
        await until(lambda: at_home(members).stats()["waiting_to_get"] == count)
        await few_threads()
        for number in range(count):
            await queue.aput(number)
        assert sorted(await asyncio.gather(*gets)) == list(range(count))
        await queue.aput(0)
        puts = [asyncio.create_task(queue.aput(number, longer)) for number in range(1, count)]
        await until(lambda: at_home(members).stats()["waiting_to_put"] == 1)
        await few_threads()
        assert await queue.aget_many(1) == [0]
        taken = [await queue.aget() for _ in puts]
        assert taken == list(range(1, count))
        await asyncio.gather(*puts)

    with members.acting("a"):
        queue = made(maxsize=1)
        before = threading.active_count()
        asyncio.run(act())


@pytest.mark.parametrize("members", [rtr.GroupConfig(rpc_timeout_s=0.4)], indirect=True)
@pytest.mark.parametrize("consumer", ["home", "a"])
def test_without_a_timeout_a_get_waits_as_long_as_a_call_and_an_iteration_longer(
    members: Members, consumer: str
) -> None:
    with members.acting(consumer):
        queue = made()
        began = time.monotonic()
        with pytest.raises(rtr.Empty):
            queue.get()
        assert 0.35 < time.monotonic() - began < LONG / 2
        taking = in_thread(lambda: list(queue))
        ended = time.monotonic() + 0.6
        while time.monotonic() < ended:  # more than one call of the iteration
            assert wait_until(lambda: at_home(members).stats()["waiting_to_get"] == 1, LONG)
            time.sleep(0.02)
        queue.put("late")
        queue.close()
        assert taking() == ["late"]


def test_an_item_that_holds_an_rref_is_refused(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    with members.acting("a") as local:
        queue = made()
        encode = local.codec.encode
        monkeypatch.setattr(local.codec, "encode", lambda *args, **how: encode(*args, **how)._replace(rrefs=[None]))
        with pytest.raises(rtr.SerializationError, match=r"'q' \(type\) cannot be pickled: an item holds an RRef"):
            queue.put(object)
        monkeypatch.undo()
        assert queue.qsize() == 0


# --- members that are away for a while -----------------------------------------------------------------------


def lost(use: Callable[[], Any]) -> str:
    with pytest.raises(PeerLost) as error:
        use()
    return str(error.value)


def test_a_subscriber_that_was_away_goes_on_where_it_was(members: Members) -> None:
    """Also one that waited for an item just then: it is told that it was cut off."""
    with members.acting("b"):
        topic = rtr.Topic("q", home="home")
        quick, slow = topic.subscribe(), topic.subscribe()
        topic.publish(1)
        assert quick.get() == 1
        waiting = in_thread(lambda: lost(quick.get))
        assert wait_until(lambda: at_home(members, "topic").stats()["waiting_to_get"] == 1, LONG)
        members.part("b")
        assert "an item that was on its way may be lost" in waiting()
        with members.acting("a"):
            rtr.Topic("q", home="home").publish_many([2, 3])
        with pytest.raises(PeerLost):
            slow.get()
        members.reunite("b")
        topic.publish(4)
        topic.close()
        assert list(slow) == [1, 2, 3, 4] and list(quick) == [2, 3, 4]


def test_a_subscriber_that_missed_something_while_it_was_away_is_told_so(members: Members) -> None:
    with members.acting("b"):
        topic = rtr.Topic("q", home="home")
        small, large = topic.subscribe(maxsize=2), topic.subscribe(maxsize=9)
        topic.publish_many([1, 2])
        members.part("b")
        with members.acting("a"):
            rtr.Topic("q", home="home").publish_many([3, 4], timeout=0)
        members.reunite("b")
        topic.close()
        with pytest.raises(rtr.NotFound, match=r"topic 'q' in member 'home'.*it has missed items; subscribe again"):
            list(small)
        assert list(large) == [1, 2, 3, 4]
        small.cancel()
        assert list(small) == [], "it was cancelled here"


def test_an_item_on_its_way_to_a_consumer_that_is_lost_comes_to_nobody_else(members: Members) -> None:
    """Rather lost than taken twice: the consumer may have it."""
    lane = members.lanes["b"]
    with members.acting("b"):
        queue = made()
        queue.put_many([1, 2])
        lane.delays = lambda method: method == TAKE
        taking = in_thread(lambda: lost(queue.get))
        assert wait_until(lambda: len(lane.answers) == 1, LONG)
        members.part("b")
        assert "an item that was on its way may be lost" in taking()
        members.reunite("b", incarnation=1)
    with members.acting("a"):
        assert rtr.Queue.find("q").get_many(9) == [2]


def test_an_item_crosses_to_the_home_once_for_all_subscribers(members: Members) -> None:
    lane, sent = members.lanes["a"], []
    with members.acting("a"):
        topic = rtr.Topic("q", home="home")
        subscriptions = [topic.subscribe(policy) for policy in ("block", "drop_oldest", "latest")]
    with members.acting("b"):
        subscriptions.append(rtr.Topic("q", home="home").subscribe())
    lane.holds = lambda method: bool(sent.append(method)) if method == PUT else False
    with members.acting("a"):
        topic.publish(1)
        assert [subscription.get() for subscription in subscriptions[:3]] == [1] * 3
    with members.acting("b"):
        assert subscriptions[3].get() == 1
    assert sent == [PUT]


def test_a_queue_and_its_handles_outlast_a_partition(members: Members) -> None:
    with members.acting("b"):
        queue = made(maxsize=2)
        queue.put_many([1, 2])
        waiting = in_thread(lambda: lost(lambda: queue.put(3)))
        assert wait_until(lambda: at_home(members).stats()["waiting_to_put"] == 1, LONG)
        members.part("b")
        waiting()
        with pytest.raises(PeerLost):
            queue.get()
        members.reunite("b")
        assert [queue.get() for _ in range(3)] == [1, 2, 3], "what had arrived stays"
        waits = in_thread(lambda: lost(queue.get))
        assert wait_until(lambda: at_home(members).stats()["waiting_to_get"] == 1, LONG)
        members.part("b")
        waits()
        put_at_home(members, 4)
        members.reunite("b")
        assert queue.get() == 4, "the one that was cut off took nothing"


@pytest.mark.parametrize("members", [REJECT], indirect=True)
def test_no_buffer_is_left_of_a_subscription_that_failed_or_was_cancelled(members: Members) -> None:
    """Whatever flow control says; it would hold publishers up for ever."""
    lane = members.lanes["a"]

    def subscribers() -> int:
        return at_home(members, "topic").stats()["buffers"]

    async def act() -> None:
        lane.delays = lambda method: method == SUBSCRIBE
        subscribing = asyncio.create_task(topic.asubscribe())
        await until(lambda: len(lane.answers) == 1)
        assert subscribers() == 1
        subscribing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await subscribing
        lane.deliver_answers()
        await until(lambda: subscribers() == 0)
        subscription = await topic.asubscribe()
        waiting = asyncio.create_task(subscription.aget(10 * LONG))  # as many calls as there may be
        await until(lambda: at_home(members, "topic").stats()["waiting_to_get"] == 1)
        subscription.cancel()
        with pytest.raises(rtr.Closed):
            await waiting
        await until(lambda: subscribers() == 0)

    with members.acting("a"):
        topic = rtr.Topic("q", home="home")
        assert topic.stats()["subscribers"] == 0
        asyncio.run(act())


def test_a_subscription_that_is_cancelled_while_the_home_is_away_ends(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytorchrpc.calls.peers.UNREPORTED_LOSS_S", 0.05)
    with members.acting("b"):
        subscription = rtr.Topic("q", home="home").subscribe()
        members.part("b")
        subscription.cancel()
        assert list(subscription) == []
        members.reunite("b")
        assert wait_until(lambda: at_home(members, "topic").stats()["buffers"] == 0, LONG)


# --- on an event loop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("member", ["home", "a"])
def test_what_would_block_an_event_loop_is_refused_and_changes_nothing(members: Members, member: str) -> None:
    async def use(queue: rtr.Queue, topic: rtr.Topic, news: rtr.Subscription) -> None:
        at_the_home = member == "home"
        for blocks in (queue.get, lambda: queue.get(1), lambda: next(queue.batches(2)), news.get):
            with pytest.raises(rtr.RayTorchRpcError, match="would block this thread's event loop: use a coroutine"):
                blocks()
        for sends in (lambda: queue.put(0), queue.qsize, queue.close, lambda: topic.publish(0)):
            if not at_the_home:
                with pytest.raises(rtr.RayTorchRpcError, match=r"would block .* `aput`.*to_thread"):
                    sends()
        with pytest.raises(rtr.RayTorchRpcError, match=r"to_thread\(raytorchrpc.Queue.find, 'q'\)"):
            rtr.Queue.find("q")
        await queue.aput(1)
        if at_the_home:
            assert queue.get_nowait() == 1, "it has nothing to wait for"
            queue.put(2)
            with pytest.raises(rtr.RayTorchRpcError, match="would block"):
                queue.put(3)  # there is no room
        stats = await asyncio.to_thread(queue.stats)
        assert stats["items"] == 1 and not stats["waiting_to_put"] and not stats["waiting_to_get"]
        news.cancel()
        await until(lambda: at_home(members, "topic").stats()["buffers"] == 0)

    with members.acting(member):
        topic = rtr.Topic("q", home="home")
        asyncio.run(use(made(maxsize=1), topic, topic.subscribe()))


def test_cells_of_a_notebook_may_block(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run on the event loop of IPython."""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))

    async def cell() -> Any:
        queue = rtr.Queue("q", home="home")
        queue.put(1)
        return queue.get()

    with members.acting("a"):
        assert asyncio.run(cell()) == 1


# --- batches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consumer", ["home", "a"])
def test_get_many_waits_for_as_many_as_it_needs(members: Members, consumer: str) -> None:
    with members.acting("home"):
        at_the_home = rtr.Queue("q")
        at_the_home.put_many([0, 1, 2])

    def put_later() -> None:
        assert wait_until(lambda: bool(at_home(members).stats()["waiting_to_get"]), LONG), "three items do not suffice"
        at_home(members).put(encode_items(members.members["home"].codec, range(3, 9), 6), 0)

    with members.acting(consumer):
        queue = rtr.Queue("q", home="home")
        putting = in_thread(put_later)
        taken = queue.get_many(6, min=5)
        putting()
        assert taken == [0, 1, 2, 3, 4, 5]
        assert queue.get_many(9, 0.3, min=9) == [6, 7, 8], "after the timeout, what there is"
        with pytest.raises(rtr.Empty):
            queue.get_many(9, 0, min=9)
        with pytest.raises(rtr.ConfigurationError, match="min=3 exceeds limit=2"):
            queue.get_many(2, min=3)
        queue.put("last")
        queue.close()
        assert queue.get_many(2, min=2) == ["last"], "at the end of the stream, what there is"


@pytest.mark.parametrize("producer", ["home", "a"])
@pytest.mark.parametrize("consumer", ["home", "a"])
def test_items_that_are_put_together_share_no_memory(members: Members, producer: str, consumer: str) -> None:
    """Whoever takes one may write to it."""
    tensor = torch.ones(3)
    with members.acting(producer):
        made().put_many([tensor, {"x": tensor, "again": tensor}, tensor, tensor])
    with members.acting(consumer):
        queue = rtr.Queue("q", home="home")
        queue.get().zero_()
        second, third = queue.get_many(2, min=2)
        assert second["x"] is second["again"]
        second["x"].zero_()
        assert third.tolist() == [1, 1, 1]
        third.zero_()
    with members.acting("b"):
        assert queue.get().tolist() == [1, 1, 1]


@pytest.mark.parametrize("members", [rtr.GroupConfig(rpc_timeout_s=0.3)], indirect=True)
@pytest.mark.parametrize("consumer", ["home", "a"])
def test_an_iteration_keeps_its_place_from_request_to_request(
    members: Members, consumer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its batch takes: others that want less do not take what has come for it."""
    monkeypatch.setattr("raytorchrpc.patterns.queues.store._ASKS_AGAIN_S", LONG)
    with members.acting(consumer):
        queue = made()
        large, single = queue.batches(4, collate=list), queue.items()
        taking = in_thread(lambda: next(large))
        assert wait_until(lambda: at_home(members).stats()["waiting_to_get"] == 1, LONG)
        small = in_thread(lambda: next(single))
        for number in range(5):
            time.sleep(0.2)  # the requests of both end meanwhile
            put_at_home(members, number)
        assert taking() == [0, 1, 2, 3] and small() == 4


# --- what is over --------------------------------------------------------------------------------------------


def kept(members: Members) -> tuple[int, int]:
    """How many objects the home has, and of how many it remembers the end."""
    services = members.members["home"].services
    return len([kind for kind, _ in services._served if kind in ("queue", "topic")]), len(services._ended)


@pytest.mark.parametrize("member", ["home", "a"])
def test_closed_and_empty_queues_are_freed_and_answer_as_before(
    members: Members, member: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytorchrpc.calls.server.services.ENDED_KEPT", 10)
    with members.acting("a"):
        unused = rtr.Queue("q9", home="home")
    with members.acting(member):
        for number in range(30):
            queue = rtr.Queue(f"q{number % 20}{'' if number < 20 else ' again'}", home="home", producers=9)
            queue.put("x")
            queue.close(force=True)
            assert kept(members)[0] == 1, "somebody may come for the item"
            assert queue.get() == "x"
        assert kept(members) == (0, 10)
        for one in (queue, rtr.Queue(queue.name, home="home", producers=9), rtr.Queue.find(queue.name)):
            with pytest.raises(rtr.Closed):
                one.put(1)
            for take in (one.get, lambda one=one: one.get_many(4, min=2)):  # type: ignore[misc]
                with pytest.raises(rtr.Closed):
                    take()
            assert list(one) == []
            stats = one.stats()
            assert (stats["closed"], stats["put"], stats["taken"], stats["items"]) == (True, 1, 1, 0)
        with pytest.raises(rtr.ConfigurationError, match="producers=9, not producers=1"):
            rtr.Queue(queue.name, home="home").qsize()
        assert kept(members) == (0, 10)
        assert unused.qsize() == 0, "so many others have ended since that nothing is known of it"


def test_an_item_returns_to_a_queue_that_was_freed_and_comes_once(members: Members) -> None:
    """Also if it is sent twice, before and after somebody else took it."""
    lane = members.lanes["a"]
    with members.acting("a"):
        queue = made()
        queue.put(1)
        queue.close()
        lane.delays = lambda method: method == TAKE
        with pytest.MonkeyPatch.context() as patch, pytest.raises(rtr.RpcTimeout):
            patch.setattr("raytorchrpc.patterns.handle._ANSWER_NOW_S", 0.1)
            queue.get(0)
        assert kept(members) == (0, 1)
        lane.holds = lambda method: method == PUT_BACK
        lane.deliver_answers()
        assert wait_until(lambda: len(lane.held) == 1, LONG)
        lane.held.append(lane.held[0])  # the message comes twice
        lane.release(0)
        assert wait_until(lambda: kept(members) == (1, 0), LONG)
        assert queue.get(LONG) == 1
        lane.release()
        with pytest.raises(rtr.Closed):
            queue.get()
        assert kept(members) == (0, 1)


@pytest.mark.parametrize("subscriber", ["home", "a"])
def test_a_closed_topic_is_freed_once_all_subscribers_have_everything(members: Members, subscriber: str) -> None:
    with members.acting(subscriber):
        topic = rtr.Topic("q", home="home")
        first, second = topic.subscribe(), topic.subscribe("drop_oldest")
        topic.publish_many([1, 2])
        topic.close()
        assert list(first) == [1, 2] and kept(members) == (1, 0)
        assert list(second) == [1, 2] and kept(members) == (0, 1)
        assert list(first) == list(topic.subscribe()) == [] and second.stats()["taken"] == 2
        with pytest.raises(rtr.Closed):
            topic.publish(3)
        first.cancel()
        assert kept(members) == (0, 1) and topic.stats()["subscribers"] == 1


def test_a_subscription_to_a_closed_topic_is_over_also_once_an_item_came_back(members: Members) -> None:
    lane = members.lanes["a"]
    with members.acting("a"):
        topic = rtr.Topic("q", home="home")
        early = topic.subscribe()
        topic.publish(1)
        topic.close()
        lane.delays = lambda method: method == TAKE
        with pytest.MonkeyPatch.context() as patch, pytest.raises(rtr.RpcTimeout):
            patch.setattr("raytorchrpc.patterns.handle._ANSWER_NOW_S", 0.1)
            early.get(0)
        late = topic.subscribe()
        lane.deliver_answers()
        assert wait_until(lambda: kept(members) == (1, 0), LONG)
        assert list(late) == [] and list(early) == [1]


@pytest.mark.parametrize("how", ["for", "async for"])
@pytest.mark.parametrize("kind", ["queue", "topic"])
def test_batches_are_of_one_size_and_collated(members: Members, kind: str, how: str) -> None:
    async def collected(batches: Any) -> list[Any]:
        return [batch async for batch in batches]

    with members.acting("home"):
        channel: Any = rtr.Queue("q") if kind == "queue" else rtr.Topic("q")
    with members.acting("a"):
        there = rtr.Queue("q", home="home") if kind == "queue" else rtr.Topic("q", home="home").subscribe()
    with members.acting("home"):
        put = channel.put if kind == "queue" else channel.publish
        for number in range(7):
            put({"x": torch.full((2, 3), float(number)), "pair": (number, torch.tensor(number)), "name": f"n{number}"})
        channel.close()
    with members.acting("a"):
        batches = there.batches(3)
        first, second, last = list(batches) if how == "for" else asyncio.run(collected(batches))
    assert first["x"].shape == second["x"].shape == (3, 2, 3) and last["x"].shape == (1, 2, 3)
    assert first["x"][:, 0, 0].tolist() == [0, 1, 2] and last["name"] == ["n6"]
    assert second["pair"][0].tolist() == second["pair"][1].tolist() == [3, 4, 5]


def test_how_items_become_a_batch_can_be_chosen(members: Members) -> None:
    with members.acting("home"):
        queue = rtr.Queue("q")
        queue.put_many([torch.ones(2), torch.ones(3), "a", None, "b"])
        queue.close()
        batches = queue.batches(2)
        with pytest.raises(rtr.ConfigurationError, match=r"these 2 items do not collate.*collate=list"):
            next(batches)
        batches = queue.batches(2, collate=list, drop_last=True)
        assert list(batches) == [["a", None]]
        with pytest.raises(rtr.ConfigurationError, match="size= must be a whole number"):
            queue.batches(0)
