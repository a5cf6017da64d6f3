"""What the threads of a member do in one round, until they are told to end; each notes all it did.

A thread keeps a handle for as long as the handle does not say that its object is gone: then it makes another one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import raytorchrpc as rtr
from tests.faults.control import start
from tests.faults.faults import KB, MB
from tests.faults.records import (
    Recorder,
    check_answer,
    crc,
    described,
    ends_of,
    layout,
    make_item,
    payload,
    weights,
)
from tests.faults.scenarios import COPIES, NEWER, PUBLISHERS, READERS, Object, Plan, Role

#: What is called for, how often in a hundred, and the bytes that go with it.
KINDS: dict[str, tuple[int, int]] = {
    "check empty": (28, 8), "check in band": (20, 100 * KB), "check beside": (16, 2 * MB), "check large": (1, 44 * MB),
    "relay": (12, 20 * KB), "give": (10, 1 * MB), "again": (13, 50 * KB),
}  # fmt: skip
#: The home of a queue answers so much later than its timeout, at most (docs/queues.md).
GRACE_S = 5.0
#: Of the group, see ``running``.
RPC_TIMEOUT_S = 10.0
#: Between two operations of a role, so that the processes and their Ray fit on two processors.
_PAUSE_S = 0.01
#: After one that failed.
_RETRY_S = 0.05
_MOST = 8
_ON_A_LOOP = ("aput", "gathered", "aget", "async for", "cancel", "apull")


class Roles:
    """Of one process, in one round. ``made``: the handles of what it is the home of, by name."""

    def __init__(self, notes: Recorder, plan: Plan, made: dict[str, Any]) -> None:
        self._notes, self._plan, self._made = notes, plan, made
        self._me, self._life = notes.member, notes.life
        self._producing_over, self._closing, self._over = threading.Event(), threading.Event(), threading.Event()
        self._pulling: Callable[[], None] | None = None
        self._done: dict[int, int] = {}
        """Operations of each role."""
        self._threads: dict[str, threading.Thread] = {}
        self._shards: rtr.WeightStore | None = None
        self._mine = [of for of in plan.objects if of.home == self._me]
        for of in self._mine:
            made[of.name] = make(of)
        for role in plan.roles:
            if role.member == self._me:
                of = next((one for one in plan.objects if one.name == role.object), Object("calls", role.object))
                self._done[role.number] = 0
                thread = start(lambda role=role, of=of: self._play(role, of), f"test-{role.does}")
                self._threads[f"{role.does} {role.how} {role.object} ({role.number})"] = thread

    # --- what the test commands ----------------------------------------------------------------------------------

    def more(self, least: int, seconds: float) -> list[str]:
        """Wait until each role has done so much more; those that have not after so many seconds."""
        until, before = time.monotonic() + seconds, dict(self._done)
        while missing := [number for number, count in before.items() if self._done[number] - count < least]:
            if time.monotonic() > until:
                return [name for name in self._threads if any(name.endswith(f"({number})") for number in missing)]
            time.sleep(0.02)
        return []

    def tell_of_pull(self, tell: Callable[[], None]) -> bool:
        """This moment has come when the next pull begins; whether this member pulls."""
        self._pulling = tell
        return any(name.startswith("read ") for name in self._threads)

    def stop_producing(self, seconds: float) -> list[str]:
        """Items are put no longer. Returns those that go on all the same after so many seconds."""
        self._producing_over.set()
        return self._still_there("produce", seconds)

    def close(self) -> None:
        """From now on streams may end; those of this home do, and what has no end of its own."""
        self._closing.set()

    def close_streams(self) -> None:
        for of in self._mine:
            if of.kind != "weights":
                made = self._made[of.name]
                self._notes.note("close", of, self._life, "", GRACE_S, lambda data, made=made: made.close(force=True))

    def end(self, seconds: float) -> list[str]:
        """Wait until all roles have come to their end. Returns those that have not after so many seconds."""
        self._closing.set()
        hung = self._still_there("", seconds)
        self._over.set()
        return hung

    def _still_there(self, what: str, seconds: float) -> list[str]:
        until = time.monotonic() + seconds
        threads = [(name, thread) for name, thread in self._threads.items() if name.startswith(what)]
        for _, thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return [name for name, thread in threads if thread.is_alive()]

    def alarm(self, number: int) -> None:
        """A wait for nothing, at this home: it ends in time."""
        of = Object("queue", f"alarm-{number}", self._me)
        self._notes.note("get", of, self._life, "", 0.3, lambda data: rtr.Queue(of.name, maxsize=1).get(0.3))

    # --- all of them -----------------------------------------------------------------------------------------------

    def _play(self, role: Role, of: Object) -> None:
        draw = random.Random(f"{self._plan.number} {self._me} {self._life} {role.number}")
        # The loop of a role has its descriptors before others run short.
        loop = asyncio.new_event_loop() if role.how in _ON_A_LOOP else None
        try:
            getattr(self, f"_{role.does}")(role, of, draw, loop)
        finally:
            if loop is not None:
                loop.close()

    def _did(self, role: Role, ok: bool = True) -> None:
        """One more; after one that failed it waits for a moment."""
        self._done[role.number] += 1
        time.sleep(_PAUSE_S if ok else _RETRY_S)

    # --- calls -----------------------------------------------------------------------------------------------------

    def _call(self, role: Role, of: Object, draw: random.Random, loop: Any) -> None:
        peers = [role.object] if role.object else [name for name in self._plan.names if name != self._me]
        kinds = list(KINDS)[: 2 if role.object else None]
        numbers = itertools.count(1)
        while not self._closing.is_set():
            window = []
            for _ in range(draw.choice((1, 1, 1, 6))):
                count = next(numbers)
                (kind,) = draw.choices(kinds, [KINDS[kind][0] for kind in kinds])
                size = KINDS[kind][1] * draw.randrange(1, 5) // 4
                call = f"{self._plan.number}-{self._me}.{self._life}-{role.number}-{count}"
                target, further = draw.choice(peers), draw.choice(peers)
                window.append(begin_call(self._notes, call, kind, target, further, draw.choice((1.0, 2.0, 4.0)), size))
            verdicts = [finish().verdict for finish in window]
            self._did(role, "ok" in verdicts)

    # --- handles ---------------------------------------------------------------------------------------------------

    def _open(self, of: Object, handed: bool) -> tuple[Any, int, str] | None:
        """A new handle, the life of its object, and its number; None if there is none now."""
        number = self._notes.handle()

        def find(data: dict[str, Any]) -> tuple[Any, int] | None:
            if of.home == self._me:
                made = make(of)
                _touch(made)
                return made, self._life
            home = rtr.rpc_sync(of.home, timeout=5)
            if handed:
                return home.hand(list(of))  # type: ignore[no-any-return]
            before = home.life_of()
            made = make(of)
            _touch(made)
            return (made, before) if home.life_of() == before else None

        _, found = self._notes.note("open", of, 0, number, 3 * 5.0 + RPC_TIMEOUT_S, find)
        return None if found is None else (*found, number)

    def _sessions(self, of: Object, role: Role, over: threading.Event) -> Iterator[tuple[Any, int, str]]:
        """One handle after another, until it is over."""
        while not over.is_set():
            found = self._open(of, role.handed)
            if found is not None:
                yield found
            time.sleep(_RETRY_S)

    # --- queues and topics -----------------------------------------------------------------------------------------

    def _produce(self, role: Role, of: Object, draw: random.Random, loop: Any) -> None:
        producer = f"{self._me}.{self._life}.{role.number} {role.how or 'publish'}"
        numbers = itertools.count(1)
        for handle, held, number in self._sessions(of, role, self._producing_over):
            verdict = "ok"
            while not self._producing_over.is_set() and verdict not in ("NotFound", "Closed"):
                count = 1 if role.how in ("", "put", "aput") else draw.randrange(2, _MOST)
                size = draw.choice((0, 0, 500, 40_000))
                mine = [next(numbers) for _ in range(count)]
                items = [make_item(of.name, held, producer, one, size) for one in mine]
                timeout = draw.choice((0.2, 1.0))

                def put(data: dict[str, Any], mine: Any = mine, items: Any = items, timeout: float = timeout) -> None:
                    data.update(producer=producer, ok=[], maybe=mine)
                    _put(role.how, loop, handle, items, mine, timeout, data)  # noqa: B023

                verdict, _ = self._notes.note("put", of, held, number, timeout + GRACE_S, put)
                self._did(role, verdict in ("ok", "Full"))

    def _consume(self, role: Role, of: Object, draw: random.Random, loop: Any) -> None:
        for handle, held, number in self._sessions(of, role, self._over):
            if self._take_all(role, of, held, number, handle, draw, loop):
                return

    def _subscribe(self, role: Role, of: Object, draw: random.Random, loop: Any) -> None:
        policy = role.how.split()[0]
        for topic, held, _ in self._sessions(of, role, self._over):
            number = self._notes.handle()

            def subscribe(data: dict[str, Any], policy: str = policy) -> Any:
                data["policy"] = policy
                return topic.subscribe(policy)  # noqa: B023

            verdict, subscription = self._notes.note("subscribe", of, held, number, RPC_TIMEOUT_S, subscribe)
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
        while not self._over.is_set():
            timeout = draw.choice((0.1, 0.5))

            def take(data: dict[str, Any], timeout: float = timeout) -> None:
                data["limit"] = batch
                taken = _take(how, handle, stream, loop, timeout, draw.random())
                data["items"] = [described(item) for item in taken or ()]
                data["cancelled"] = taken is None

            op, allowed = ("get", timeout + GRACE_S) if stream is None else ("next", None)
            verdict, _ = self._notes.note(op, of, held, number, allowed, take)
            self._did(role, verdict in ("ok", "Empty", "NotFound", "Closed", "end"))
            if verdict in ("NotFound", "Closed", "end"):
                return self._closing.is_set() and verdict != "NotFound"
        return True

    # --- weights ---------------------------------------------------------------------------------------------------

    def _publish(self, role: Role, of: Object, draw: random.Random, loop: Any) -> None:
        store = self._made[of.name]
        version = store.version()
        while not self._closing.is_set():
            version += 1
            new = weights(of, self._life, version)

            def publish(data: dict[str, Any], version: int = version, new: Any = new) -> None:
                data["version"] = store.publish(new, version)

            verdict, _ = self._notes.note("publish", of, self._life, "", None, publish)
            version -= verdict != "ok"
            self._did(role)

    def _read(self, role: Role, of: Object, draw: random.Random, loop: Any) -> None:
        for store, held, number in self._sessions(of, role, self._closing):
            model = {name: torch.zeros(size, dtype=torch.int64) for name, size in layout(of, held)}
            since: int | None = None
            verdict = "ok"
            while not self._closing.is_set() and verdict != "NotFound":
                timeout = 1.0 if "short" in role.how else draw.choice((2.0, 4.0))

                def pull(data: dict[str, Any], since: int | None = since, timeout: float = timeout) -> int:
                    data["since"] = since
                    pulling, self._pulling = self._pulling, None
                    if pulling is not None:
                        pulling()
                    if role.how == "apull":
                        version = loop.run_until_complete(store.apull(model, since=since, timeout=timeout))  # noqa: B023
                    else:
                        version = store.pull(model, since=since, timeout=timeout)  # noqa: B023
                    data.update(version=version, ends=ends_of(model.items()))  # noqa: B023
                    return int(version)

                verdict, version = self._notes.note("pull", of, held, number, timeout, pull)
                # After a pull that failed in the middle the model is of no version.
                since = version if verdict == "ok" and role.how != "pull" else None
                self._did(role, verdict == "ok")

    # --- shards of weights: every element of a version carries its number, so a torn version is visible ------------

    def _publish_shards(self, role: Role, of: Object, draw: random.Random, loop: Any) -> None:
        store, number, last = make(of), PUBLISHERS.index(self._me), 0
        rows = SHAPE[0] // len(PUBLISHERS)
        own: dict[str, Any] = {
            name: rtr.Shard(torch.empty(rows, SHAPE[1]), SHAPE, (number * rows, 0)) for name in SHARDED
        }
        own[COPIED] = torch.empty(SMALL)

        def publish(data: dict[str, Any]) -> None:
            nonlocal last
            version = max(last, store.version()) + 1
            for name in own:
                _tensor(own[name]).fill_(_value(name, version))
            last = version
            store.publish(own, version, timeout=SHARDS_S)
            data.update(memory=_memory(), kept=len(store.stats().versions))

        while not self._closing.is_set():
            verdict, _ = self._notes.note(role.does, of, 0, "", 2 * SHARDS_S + SHARDS_LATE_S, publish)
            self._did_with_shards(role, verdict == "ok")
            if verdict == "NotFound":
                store, last = make(of), 0

    def _read_shards(self, role: Role, of: Object, draw: random.Random, loop: Any) -> None:
        model, since = self._model(role.how), None
        wanted = {COPIED: model[COPIED]} if role.how == COPIES else model
        store = make(of)
        if role.how != COPIES:  # both threads by one handle
            store = self._shards = self._shards or store

        def pull(data: dict[str, Any]) -> bool:
            nonlocal since
            had = since or 0
            if role.how == NEWER:
                store.wait(had + 1, timeout=SHARDS_S)
            before = {name: _tensor(held).clone() for name, held in wanted.items()}
            try:
                only = COPIED if role.how == COPIES else None
                since = store.pull(model, since=since, only=only, timeout=SHARDS_S)
            except (rtr.NotFound, rtr.Empty):
                if not all(torch.equal(before[name], _tensor(held)) for name, held in wanted.items()):
                    raise AssertionError("something was written by a pull that says that nothing was") from None
                raise
            for name, held in wanted.items():
                found, value = _tensor(held).unique().tolist(), _value(name, since)
                if found != [value]:
                    raise AssertionError(f"version {since}: {name} has {found[:5]}, not {value}")
            data["memory"] = _memory()
            return since > had

        while not self._closing.is_set():
            verdict, is_new = self._notes.note(role.does, of, 0, role.how, 2 * SHARDS_S + SHARDS_LATE_S, pull)
            self._did_with_shards(role, verdict == "ok" and (is_new or role.how != NEWER))
            if verdict == "NotFound":
                store, since = make(of), None

    def _did_with_shards(self, role: Role, ok: bool) -> None:
        """Only what succeeds counts: each has to go on."""
        self._done[role.number] += ok
        time.sleep(5 * _PAUSE_S)

    def _model(self, how: str) -> dict[str, Any]:
        """Some columns, or some rows."""
        turn, by_columns, (rows, columns) = how == NEWER, self._me == READERS[0], SHAPE
        shape = (rows, columns // 2) if by_columns else (rows // 2, columns)
        begin = (0, turn * columns // 2) if by_columns else (turn * rows // 2, 0)
        model: dict[str, Any] = {name: rtr.Shard(torch.zeros(shape), SHAPE, begin) for name in SHARDED}
        model[COPIED] = torch.zeros(SMALL)
        return model


#: The rows and columns of the tensor that changes with each version, and of the one that changes with every fourth.
SHAPE = (384, 512)
#: The shape of the one that every publisher has whole.
SMALL = (64, 512)
SHARDED, COPIED = ("fast", "slow"), "copy"
#: Of every operation with shards, and how much later it answers, on a busy machine (seconds).
SHARDS_S, SHARDS_LATE_S = 3.0, 3.0


def _value(name: str, version: int) -> int:
    return version - version % 4 if name == "slow" else version


def _tensor(held: Any) -> torch.Tensor:
    return held.tensor if isinstance(held, rtr.Shard) else held


def _memory() -> int:
    """Bytes of memory that the process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- single operations -----------------------------------------------------------------------------------------------


def begin_call(
    notes: Recorder, call: str, kind: str, target: str, further: str, timeout: float, size: int
) -> Callable[[], Any]:
    """One call; what is returned waits for its answer, checks it, and returns its record."""
    method = kind.split()[0]
    sent = payload(len(call), size)
    args: tuple[Any, ...] = (sent, crc(sent))
    if method == "give":
        args = (len(call), size)
    elif method == "relay":
        args = (further, *args)
    if method == "again":
        call += "-again"
    data: dict[str, Any] = {"kind": kind}
    future, error, began = None, None, time.monotonic()
    try:
        future = getattr(rtr.rpc_async(target, timeout=timeout), method)(call, *args)
    except Exception as raised:
        error = raised
    begun = time.monotonic()

    def finish() -> Any:
        due, ended, problem = timeout, begun, error
        if future is not None:
            # An answer that was there before anybody looked is not late.
            due = max(timeout, time.monotonic() - began)
            try:
                back, data["life"], result = future.wait()
                check_answer(call, back, sent.bitwise_not_(), result)
            except Exception as raised:
                problem = raised
            ended = time.monotonic()
        data["may_have_run"] = getattr(problem, "may_have_run", None)
        return notes.write("call", call, target, began=began, ended=ended, allowed=due, error=problem, data=data)

    return finish


def make(of: Object) -> Any:
    """A handle to it; it is made if its home has none."""
    if of.kind == "queue":
        return rtr.Queue(of.name, home=of.home, maxsize=64)
    if of.kind == "topic":
        return rtr.Topic(of.name, home=of.home)
    if of.kind == "shards":
        return rtr.WeightStore(of.name, publishers=PUBLISHERS, keep=2, track=True)
    return rtr.WeightStore(of.name, home=of.home, track=of.track)


def _touch(made: Any) -> None:
    """An answer of the home's: from now on the handle leads to what is there."""
    if isinstance(made, rtr.WeightStore):
        made.version()
    else:
        made.stats()


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
