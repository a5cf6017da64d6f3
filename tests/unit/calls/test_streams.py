"""Streams: the items of generator methods, how far ahead they are made, and what ends the generator."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

import raytorchrpc as rtr
from tests.polling import wait_until
from tests.unit.callees import Exposed, Gate, exposed, in_turn
from tests.unit.members import Members, in_thread

LONG = 20.0
AHEAD = 3


class Actor:
    """The methods of all members. They share a gate that admits one at a time."""

    def __init__(self) -> None:
        self.made = 0
        self.log: list[str] = []
        self.go = threading.Event()
        self.go.set()
        self.started = threading.Event()

    def count(self, _: None, end: int, fail: type[BaseException] | None = None) -> Iterator[dict[str, Any]]:
        try:
            for number in range(end):
                self.go.wait(LONG)
                self.made += 1
                yield {"number": number, "tensor": torch.full((4,), number)}
            if fail is not None:
                raise fail("on purpose")
        finally:
            self.log.append("closed")

    async def acount(self, _: None, end: int, fail: type[BaseException] | None = None) -> AsyncIterator[dict[str, Any]]:
        try:
            for number in range(end):
                await asyncio.sleep(0)
                self.made += 1
                yield {"number": number, "tensor": torch.full((4,), number)}
            if fail is not None:
                raise fail("on purpose")
        finally:
            self.log.append("closed")

    async def stall(self, _: None) -> AsyncIterator[int]:
        yield 0
        try:
            self.started.set()
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise

    def bad(self, _: None) -> Iterator[Any]:
        try:
            yield 1
            yield threading.Lock()
        finally:
            self.log.append("closed")

    def nest(self, _: None, target: str) -> Iterator[Any]:
        """Takes longer than the call's timeout in all, but not for an item."""
        for number in range(7):
            time.sleep(0.2)
            yield rtr.rpc_sync(target).note(number)

    def note(self, _: None, what: Any = None) -> Any:
        return what

    def methods(self) -> dict[str, Exposed]:
        made = {"note": exposed(self.note, concurrent=False), "note_beside": exposed(self.note)}
        for function in (self.count, self.bad, self.nest, self.acount, self.stall):
            note = exposed(function, concurrent=function == self.nest, ahead=AHEAD)
            made[function.__name__] = note._replace(is_coroutine=inspect.isasyncgenfunction(function))
        return made


@pytest.fixture
def actor(gate: Gate, loop: asyncio.AbstractEventLoop) -> Actor:
    return Actor()


@pytest.fixture
def members(actor: Actor) -> Iterator[Members]:
    config = rtr.GroupConfig(rpc_timeout_s=LONG, max_calls_in_flight=1, when_full="reject")
    with Members(config, actor.methods()) as made, made.acting("a"):
        yield made
        actor.go.set()


BOTH = pytest.mark.parametrize("method", ["count", "acount"])


def opened(method: str, *args: Any, **options: Any) -> rtr.Stream[Any]:
    stream: rtr.Stream[Any] = getattr(rtr.rpc_sync("home", **options), method)(*args)
    assert isinstance(stream, rtr.Stream) and "open" in repr(stream)
    return stream


def numbers(stream: rtr.Stream[Any]) -> list[int]:
    return [item["number"] for item in stream]


def is_closed(members: Members, actor: Actor, gate: Gate) -> None:
    """The generator, and nothing is left of it."""
    assert wait_until(lambda: actor.log == ["closed"], LONG)
    assert wait_until(lambda: not gate._admitted, LONG), "other methods may run"
    assert wait_until(lambda: not members.members["home"].incoming.callee.streams, LONG)


# --- items ---------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("in_a_coroutine", [False, True])
@pytest.mark.parametrize("end", [0, 1, AHEAD, 20])
def test_items_arrive_in_order(
    members: Members, actor: Actor, gate: Gate, method: str, end: int, in_a_coroutine: bool
) -> None:
    async def read() -> list[Any]:
        return [item async for item in await getattr(rtr.rpc_async("home"), method)(end)]

    items = asyncio.run(read()) if in_a_coroutine else list(opened(method, end))
    assert [item["number"] for item in items] == list(range(end))
    assert all(item["tensor"].eq(item["number"]).all() for item in items)
    is_closed(members, actor, gate)


@BOTH
def test_the_generator_is_a_bounded_number_of_items_ahead(members: Members, actor: Actor, method: str) -> None:
    stream = opened(method, 100)
    for taken in range(5):
        assert wait_until(lambda taken=taken: actor.made == taken + AHEAD, LONG)  # type: ignore[misc]
        time.sleep(0.02)
        assert actor.made == taken + AHEAD
        assert next(stream)["number"] == taken
    stream.close()


def test_a_stream_does_not_count_as_a_call_in_flight(members: Members) -> None:
    stream = opened("count", 100)
    assert members.members["a"].outgoing.in_flight()["home"] == (0, 0)
    assert rtr.rpc_sync("home").note_beside(1) == 1 and next(stream)["number"] == 0
    stream.close()


@BOTH
def test_a_generator_keeps_its_turn_until_it_ends(members: Members, method: str) -> None:
    stream = opened(method, 5)
    with members.acting("b"):
        waiting = rtr.rpc_async("home").note("its turn")
    assert next(stream)["number"] == 0 and not waiting.done()
    assert numbers(stream) == [1, 2, 3, 4]
    assert waiting.result() == "its turn"


# --- errors --------------------------------------------------------------------------------------------------


@BOTH
def test_an_error_comes_after_the_items_before_it(members: Members, actor: Actor, gate: Gate, method: str) -> None:
    stream, seen = opened(method, 7, KeyError), []
    with pytest.raises(KeyError, match="on purpose") as raised:
        for item in stream:
            seen.append(item["number"])
    assert seen == list(range(7)) and str(raised.value.__cause__).startswith(f"on home.{method}:")
    assert list(stream) == [], "it is over"
    is_closed(members, actor, gate)


@BOTH
def test_a_generator_that_raises_stop_async_iteration_has_failed(members: Members, method: str) -> None:
    stream = opened(method, 1, StopAsyncIteration)
    assert next(stream)["number"] == 0
    with pytest.raises(RuntimeError, match="generator raised StopAsyncIteration"):
        next(stream)


def test_an_item_that_cannot_be_pickled_ends_the_stream(members: Members, actor: Actor, gate: Gate) -> None:
    stream = opened("bad")
    assert next(stream) == 1
    with pytest.raises(rtr.SerializationError, match=r"^an item of home\.bad \(_thread\.lock\) cannot be pickled: "):
        next(stream)
    is_closed(members, actor, gate)


def test_buffers_for_the_result_are_refused(members: Members, actor: Actor, gate: Gate) -> None:
    with pytest.raises(rtr.ConfigurationError, match="is a generator: into="):
        rtr.rpc_sync("home", into=[torch.zeros(4)]).count(3)
    assert wait_until(lambda: not gate._admitted, LONG) and actor.made == 0


def test_one_reader_at_a_time(members: Members, actor: Actor) -> None:
    actor.go.clear()
    stream = opened("count", 3)
    reading = in_thread(lambda: next(stream)["number"])
    assert wait_until(stream._reading.locked, LONG)
    with pytest.raises(rtr.RayTorchRpcError, match="another thread or task"):
        next(stream)
    actor.go.set()
    assert reading() == 0 and numbers(stream) == [1, 2]


# --- deadlines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_a_coroutine", [False, True])
def test_a_late_item_raises_and_can_be_awaited_again(members: Members, actor: Actor, in_a_coroutine: bool) -> None:
    actor.go.clear()
    late = pytest.raises(rtr.RpcTimeout, match=r"not yielded the next item within 0\.5 s")

    async def read() -> list[int]:
        stream = await rtr.rpc_async("home", timeout=0.5).count(2)
        with late:
            await stream.__anext__()
        actor.go.set()
        return [item["number"] async for item in stream]

    if in_a_coroutine:
        assert asyncio.run(read()) == [0, 1]
        return
    stream = opened("count", 2, timeout=0.5)
    for _ in range(2):
        with late:
            next(stream)
    actor.go.set()
    assert wait_until(lambda: actor.made == 2, LONG) and numbers(stream) == [0, 1]


@BOTH
def test_a_stream_that_is_not_read_by_the_deadline_is_closed(
    members: Members, actor: Actor, gate: Gate, method: str
) -> None:
    future = getattr(rtr.rpc_async("home", timeout=0.5), method)(3)
    assert wait_until(future.done, LONG)
    assert wait_until(lambda: not gate._admitted, LONG), "nobody took the result"
    with pytest.raises(rtr.RpcTimeout, match="did not begin to read it by the deadline"):
        next(future.result())
    assert actor.made == 0


def test_each_item_has_the_whole_timeout(members: Members) -> None:
    assert list(opened("nest", "b", timeout=1)) == list(range(7))


# --- what ends the generator ---------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("way", ["close", "drop", "lose the caller", "leave"])
def test_what_ends_the_stream_closes_the_generator(
    members: Members, actor: Actor, gate: Gate, method: str, way: str
) -> None:
    stream = opened(method, 100)
    assert next(stream)["number"] == 0
    if way == "close":
        stream.close()
        stream.close()
        assert "ended" in repr(stream) and list(stream) == []
    elif way == "drop":
        del stream
        gc.collect()
    elif way == "lose the caller":
        members.part("a")
    else:
        members.members["home"].leave()
    is_closed(members, actor, gate)


@BOTH
@pytest.mark.parametrize("cancels", [False, True])
def test_a_stream_that_nobody_takes_is_closed(
    members: Members, actor: Actor, gate: Gate, method: str, cancels: bool
) -> None:
    lane = members.lanes["a"]
    lane.delays = lambda kind: True
    future = getattr(rtr.rpc_async("home"), method)(3)
    assert wait_until(lambda: len(lane.answers) == 1, LONG) and gate._admitted, "its reply is on its way"
    if cancels:
        assert future.cancel()
    else:
        del future
        gc.collect()
    lane.deliver_answers()
    assert wait_until(lambda: not gate._admitted, LONG / 2) and actor.made == 0


def test_closing_the_stream_cancels_a_generator_that_awaits(members: Members, actor: Actor) -> None:
    stream = opened("stall")
    assert next(stream) == 0 and actor.started.wait(LONG)
    stream.close()
    assert wait_until(lambda: actor.log == ["cancelled"], LONG)
    assert rtr.rpc_sync("home").note(1) == 1


@pytest.mark.parametrize(("method", "arguments", "before"), [("count", [3], []), ("stall", [], [0])])
def test_an_iteration_that_waits_ends_when_its_stream_is_closed(
    members: Members, actor: Actor, method: str, arguments: list[int], before: list[int]
) -> None:
    actor.go.clear()
    stream = opened(method, *arguments)
    assert [next(stream) for _ in before] == before
    reading = in_thread(lambda: list(stream))
    assert wait_until(stream._reading.locked, LONG)
    stream.close()
    actor.go.set()
    assert reading() == []


@BOTH
def test_losing_the_callee_raises_after_the_items_that_have_arrived(
    members: Members, actor: Actor, method: str
) -> None:
    stream = opened(method, 100)
    assert next(stream)["number"] == 0
    assert wait_until(lambda: all(request.done() for request in stream._requests), LONG), "they have arrived"
    assert actor.made == 1 + AHEAD
    members.lanes["a"].break_connection()
    assert [next(stream)["number"] for _ in range(AHEAD)] == [1, 2, 3]
    with pytest.raises(rtr.PeerLost) as lost:
        next(stream)
    assert lost.value.may_have_run, "the generator has run, though this request did not"
    assert list(stream) == []


# --- called through Ray, or by another method of the actor ---------------------------------------------------


def test_a_generator_called_by_other_ways_keeps_its_turn_too(actor: Actor, gate: Gate) -> None:
    note = actor.methods()["count"]
    items = in_turn(note)(None, 3)
    assert not gate._admitted
    assert next(items)["number"] == 0 and len(gate._admitted) == 1
    assert [item["number"] for item in items] == [1, 2] and not gate._admitted
    items = in_turn(note)(None, 3)
    next(items)
    items.close()
    assert not gate._admitted and actor.log == ["closed", "closed"]

    async def on_a_loop() -> None:
        items = in_turn(actor.methods()["acount"])(None, 3)
        assert (await items.__anext__())["number"] == 0 and len(gate._admitted) == 1
        assert [item["number"] async for item in items] == [1, 2] and not gate._admitted

    asyncio.run(on_a_loop())


class Decorated:
    @rtr.method(ahead=2)
    def count(self, end: int) -> Iterator[int]:
        yield from range(end)

    @rtr.method
    async def acount(self, end: int) -> AsyncIterator[int]:
        for number in range(end):
            yield number


def test_the_decorator_keeps_generators_generators() -> None:
    assert inspect.isgeneratorfunction(Decorated.count) and inspect.isasyncgenfunction(Decorated.acount)
    assert list(Decorated().count(3)) == [0, 1, 2]

    async def run() -> list[int]:
        return [number async for number in Decorated().acount(3)]

    assert asyncio.run(run()) == [0, 1, 2]


def test_the_decorator_refuses_what_does_not_fit() -> None:
    def generator(self: Any) -> Iterator[int]:
        yield 1

    with pytest.raises(rtr.ConfigurationError, match="objectref= needs one result"):
        rtr.method(objectref=True)(generator)
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(rtr.ConfigurationError, match="whole number of at least 1"):
            rtr.method(ahead=wrong)(generator)  # type: ignore[arg-type]
    with pytest.raises(rtr.ConfigurationError, match="is for generators"):
        rtr.method(ahead=2)(lambda self: None)
