"""What the threads of a member do with queues, topics and weights, until they are told to end; each notes all it did.

A thread keeps a handle for as long as the handle does not say that its object is gone: then it makes another one.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import raytorchrpc as rtr
from tests.faults.judging import stood_still
from tests.faults.pattern_plan import Object, Role
from tests.faults.pattern_records import (
    Journal,
    Record,
    described,
    ends_of,
    layout,
    make_item,
    stamp,
    verdict_of,
)

#: The home of a queue answers so much later than its timeout, at most (docs/queues.md).
GRACE_S = 5.0
#: Of the group, see ``running``.
RPC_TIMEOUT_S = 10.0
#: Between two operations of a role, so that four processes and their Ray fit on two processors.
_PAUSE_S = 0.01
#: After one that failed.
_RETRY_S = 0.05
_MOST = 8
_ON_A_LOOP = ("aput", "gathered", "aget", "async for", "cancel", "apull")


class Roles:
    """Of one process. ``lags``: when it stood still; see ``worker.Worker``."""

    def __init__(
        self, member: str, life: int, journal: Journal, lags: list[tuple[float, float]], beat_s: float
    ) -> None:
        self.member, self.life = member, life
        self._journal, self._lags, self._beat_s = journal, lags, beat_s
        self.producing_over, self.over = threading.Event(), threading.Event()
        self.closing = False
        """The home has closed everything, or is about to."""
        self.pulling: Callable[[], None] | None = None
        """To be called once, when the next pull begins."""
        self.counts: dict[int, int] = {}
        """Operations of each role."""
        self._numbers = itertools.count(1)

    # --- notes ---------------------------------------------------------------------------------------------------

    def note(
        self, op: str, of: Object, held: int, handle: str, allowed: float | None, act: Callable[[dict[str, Any]], Any]
    ) -> tuple[str, Any]:
        """Do it and write down what came of it: the verdict, and its result."""
        data: dict[str, Any] = {}
        result, error, began = None, None, time.monotonic()
        try:
            result = act(data)
        except Exception as raised:
            error = raised
        ended = time.monotonic()
        if allowed is not None and ended - began > allowed:
            time.sleep(3 * self._beat_s)  # whether the process stood still is known a moment later
        still = stood_still(list(self._lags), began, ended)
        verdict = verdict_of(error)
        text = "" if verdict in ("ok", "end", "Empty") else str(error)[:200]
        self._journal.write(
            Record(self.member, self.life, op, of.name, of.home, held, handle, began, ended, allowed, still, verdict,
                   text, data)
        )  # fmt: skip
        return verdict, result

    def handle_number(self) -> str:
        """For a new handle."""
        return f"{self.member}.{self.life}.{next(self._numbers)}"

    # --- handles -------------------------------------------------------------------------------------------------

    def open(self, of: Object, handed: bool) -> tuple[Any, int, str] | None:
        """A new handle, the life of its object, and its number; None if there is none now."""
        number = self.handle_number()

        def find(data: dict[str, Any]) -> tuple[Any, int] | None:
            if of.home == self.member:
                made = make(of)
                _touch(made)
                data["life"] = self.life
                return made, self.life
            home = rtr.rpc_sync(of.home, timeout=5)
            if handed:
                there = home.hand(list(of))
                data["life"] = there and there[1]
                return there  # type: ignore[no-any-return]
            before = home.life_of()
            made = make(of)
            _touch(made)
            data["life"] = before
            return (made, before) if home.life_of() == before else None

        _, found = self.note("open", of, 0, number, 3 * 5.0 + RPC_TIMEOUT_S, find)
        return None if found is None else (*found, number)

    def _sessions(self, of: Object, role: Role, over: Callable[[], bool]) -> Iterator[tuple[Any, int, str]]:
        """One handle after another, until it is over."""
        while not over():
            found = self.open(of, role.handed)
            if found is None:
                time.sleep(_RETRY_S)
                continue
            yield found
            time.sleep(_RETRY_S)

    # --- the roles -----------------------------------------------------------------------------------------------

    def play(self, role: Role, of: Object) -> None:
        """Until the role is over."""
        self.counts[role.number] = 0
        draw = random.Random(f"{self.member} {self.life} {role.number}")
        acts: dict[str, Callable[[Role, Object, random.Random, Any], None]] = {
            "produce": self._produce,
            "publish": self._produce,
            "consume": self._consume,
            "subscribe": self._subscribe,
            "read": self._read,
            "call": self._call,
        }
        with self._loop(role) as loop:
            acts[role.does](role, of, draw, loop)

    @contextmanager
    def _loop(self, role: Role) -> Iterator[asyncio.AbstractEventLoop | None]:
        """For the coroutines of a role; none for a role without. It has its descriptors before others run short."""
        loop = asyncio.new_event_loop() if role.how in _ON_A_LOOP else None
        try:
            yield loop
        finally:
            if loop is not None:
                loop.close()

    def _did(self, role: Role) -> None:
        self.counts[role.number] += 1
        time.sleep(_PAUSE_S)

    def _produce(self, role: Role, of: Object, draw: random.Random, loop: Any) -> None:
        producer = f"{self.member}.{self.life}.{role.number} {role.how or 'publish'}"
        numbers = itertools.count(1)
        for handle, held, number in self._sessions(of, role, self.producing_over.is_set):
            verdict = "ok"
            while not self.producing_over.is_set() and verdict not in ("NotFound", "Closed"):
                count = 1 if role.how in ("", "put", "aput") else draw.randrange(2, _MOST)
                size = draw.choice((0, 0, 500, 40_000))
                mine = [next(numbers) for _ in range(count)]
                items = [make_item(of.name, held, producer, one, size) for one in mine]
                timeout = draw.choice((0.2, 1.0))

                def put(data: dict[str, Any], mine: Any = mine, items: Any = items, timeout: float = timeout) -> None:
                    data.update(producer=producer, ok=[], maybe=mine)
                    _put(role.how, loop, handle, items, mine, timeout, data)  # noqa: B023

                verdict, _ = self.note("put", of, held, number, timeout + GRACE_S, put)
                self._did(role)
                if verdict not in ("ok", "Full"):
                    time.sleep(_RETRY_S)

    def _consume(self, role: Role, of: Object, draw: random.Random, loop: Any) -> None:
        for handle, held, number in self._sessions(of, role, self.over.is_set):
            if self._take_all(role, of, held, number, handle, draw, loop):
                return

    def _subscribe(self, role: Role, of: Object, draw: random.Random, loop: Any) -> None:
        policy = role.how.split()[0]
        for topic, held, _ in self._sessions(of, role, self.over.is_set):
            number = self.handle_number()

            def subscribe(data: dict[str, Any], policy: str = policy) -> Any:
                data["policy"] = policy
                return topic.subscribe(policy)  # noqa: B023

            verdict, subscription = self.note("subscribe", of, held, number, RPC_TIMEOUT_S, subscribe)
            if verdict == "ok":
                how = "items" if "items" in role.how else draw.choice(("get", "get_many"))
                if self._take_all(role._replace(how=how), of, held, number, subscription, draw, loop):
                    return

    def _take_all(
        self, role: Role, of: Object, held: int, number: str, handle: Any, draw: random.Random, loop: Any
    ) -> bool:
        """Until the handle says that its object is gone, or that the stream has ended. Returns whether the role has."""
        how = role.how
        batch = _MOST if how in ("items 8", "get_many") else 1
        stream = handle.items(batch=batch) if how.startswith("items") or how == "async for" else None
        while not self.over.is_set():
            timeout = draw.choice((0.1, 0.5))

            def take(data: dict[str, Any], timeout: float = timeout) -> None:
                data["limit"] = batch
                taken = _take(how, handle, stream, loop, timeout, draw.random())
                data["items"] = [described(item) for item in taken or ()]
                data["cancelled"] = taken is None

            op, allowed = ("get", timeout + GRACE_S) if stream is None else ("next", None)
            verdict, _ = self.note(op, of, held, number, allowed, take)
            self._did(role)
            if verdict in ("NotFound", "Closed", "end"):
                return self.closing and verdict != "NotFound"
            if verdict not in ("ok", "Empty"):
                time.sleep(_RETRY_S)
        return True

    def _read(self, role: Role, of: Object, draw: random.Random, loop: Any) -> None:
        for store, held, number in self._sessions(of, role, self._reading_over):
            model = {name: torch.zeros(size, dtype=torch.int64) for name, size in layout(of.shape, held, of.scale)}
            since: int | None = None
            verdict = "ok"
            while not self._reading_over() and verdict != "NotFound":
                timeout = 1.0 if "short" in role.how else draw.choice((2.0, 4.0))

                def pull(data: dict[str, Any], since: int | None = since, timeout: float = timeout) -> int:
                    data["since"] = since
                    pulling, self.pulling = self.pulling, None
                    if pulling is not None:
                        pulling()
                    if role.how == "apull":
                        version = loop.run_until_complete(store.apull(model, since=since, timeout=timeout))  # noqa: B023
                    else:
                        version = store.pull(model, since=since, timeout=timeout)  # noqa: B023
                    data.update(version=version, ends=ends_of(list(model.items())))  # noqa: B023
                    return int(version)

                verdict, version = self.note("pull", of, held, number, timeout, pull)
                # After a pull that failed in the middle the model is of no version.
                since = version if verdict == "ok" and role.how != "pull" else None
                self._did(role)
                if verdict != "ok":
                    time.sleep(_RETRY_S)

    def _reading_over(self) -> bool:
        return self.closing or self.over.is_set()

    def _call(self, role: Role, of: Object, draw: random.Random, loop: Any) -> None:
        for count in itertools.count(1):
            if self.closing or self.over.is_set():
                return
            tensor = torch.full((draw.choice((1, 1, 50_000)),), count)

            def call(data: dict[str, Any], count: int = count, tensor: torch.Tensor = tensor) -> None:
                life, number, back = rtr.rpc_sync(of.home, timeout=2).echo(count, tensor)
                data.update(life=life, good=number == count and bool((back == count + life).all()))

            verdict, _ = self.note("call", of, 0, "", 2.0, call)
            self._did(role)
            if verdict != "ok":
                time.sleep(_RETRY_S)


def make(of: Object) -> Any:
    """A handle to it; it is made if its home has none."""
    if of.kind == "queue":
        return rtr.Queue(of.name, home=of.home, maxsize=64)
    if of.kind == "topic":
        return rtr.Topic(of.name, home=of.home)
    return rtr.WeightStore(of.name, home=of.home, track=of.track)


def _touch(made: Any) -> None:
    """An answer of the home's: from now on the handle leads to what is there."""
    if isinstance(made, rtr.WeightStore):
        made.version()
    else:
        made.stats()


def new_weights(of: Object, life: int, version: int) -> dict[str, torch.Tensor]:
    """What is published."""
    return {
        name: torch.full((size,), stamp(life, version, name, of.track))
        for name, size in layout(of.shape, life, of.scale)
    }


def _put(
    how: str, loop: Any, handle: Any, items: list[Any], numbers: list[int], timeout: float, data: dict[str, Any]
) -> None:
    """``data``: gets the numbers that are in, and those that may be."""
    if how == "":
        handle.publish(items[0], timeout)
    elif how == "put":
        handle.put(items[0], timeout)
    elif how == "aput":
        loop.run_until_complete(handle.aput(items[0], timeout))
    elif how == "put_many":
        try:
            handle.put_many(items, timeout)
        except (rtr.Full, rtr.Closed) as error:
            data.update(ok=numbers[: error.accepted], maybe=[])
            raise
    else:
        came = loop.run_until_complete(_gathered([handle.aput(item, timeout) for item in items]))
        failed = [error for error in came if error is not None]
        sure = (rtr.Full, rtr.Closed, rtr.PeerBusy)
        data["ok"] = [number for number, error in zip(numbers, came, strict=True) if error is None]
        data["maybe"] = [number for number, e in zip(numbers, came, strict=True) if e and not isinstance(e, sure)]
        if failed:
            raise next((error for error in failed if not isinstance(error, sure)), failed[0])
        return
    data.update(ok=numbers, maybe=[])


async def _gathered(puts: list[Any]) -> list[Any]:
    return await asyncio.gather(*puts, return_exceptions=True)


def _take(how: str, handle: Any, stream: Any, loop: Any, timeout: float, chance: float) -> list[Any] | None:
    """What came; None: the request was cancelled. ``chance``: from 0 to 1, of what is left to it."""
    if how == "get":
        return [handle.get(timeout)]
    if how == "get_many":
        return list(handle.get_many(_MOST, timeout))
    if how == "aget":
        return [loop.run_until_complete(handle.aget(timeout))]
    if how == "async for":
        return [loop.run_until_complete(anext_of(stream))]
    if how == "cancel":
        return loop.run_until_complete(_or_cancelled(handle, timeout, 0.02 * chance))  # type: ignore[no-any-return]
    return [next(stream)]


async def anext_of(stream: Any) -> Any:
    """As anext, a coroutine."""
    return await stream.__anext__()


async def _or_cancelled(queue: rtr.Queue, timeout: float, patience_s: float) -> list[Any] | None:
    """What comes within so much; else the request is taken back."""
    getting = asyncio.ensure_future(queue.aget(timeout))
    await asyncio.wait([getting], timeout=patience_s)
    if not getting.done():
        getting.cancel()
    try:
        return [await getting]
    except asyncio.CancelledError:
        return None
