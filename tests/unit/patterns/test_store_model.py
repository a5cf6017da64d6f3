"""The store of a queue or topic, operation by operation against a model that says in lists what has to come of each."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from raytorchrpc.errors import NotAMember, NotFound
from raytorchrpc.patterns.queues import store as stores
from raytorchrpc.patterns.queues.items import Item, decode_items, encode_items
from raytorchrpc.patterns.queues.store import ENDED, Buffer, Request, Store
from raytorchrpc.tensors.codec import Codec
from tests.unit.callees import DeferredReply

#: Bytes of one message in these tests.
MESSAGE = 40
PENDING, LOST = "pending", "lost"


class Clock:
    """Stands still until a test moves it. Calls back what is due, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, Callable[[], None]]] = []

    def at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        entry = when, callback
        self._due.append(entry)
        return lambda: self._due.remove(entry) if entry in self._due else None

    def call_back(self) -> None:
        while due := [entry for entry in self._due if entry[0] <= self.now]:
            entry = min(due, key=lambda one: one[0])
            self._due.remove(entry)
            entry[1]()


@dataclass(eq=False)
class Wait:
    """A put or a request: what the model expects of it, and the reply of the store."""

    until: float
    rank: int | None
    numbers: list[int] = field(default_factory=list)
    request: Request = field(default_factory=lambda: Request(1))
    request_id: int = 0
    outcome: Any = PENDING
    is_absent: bool = False
    reply: Any = None


@dataclass
class Line:
    """A buffer and those who wait at it. An item is its number; numbers ascend in the order of admission."""

    maxsize: int
    max_bytes: int
    policy: Any
    rank: int | None = None
    process: str | None = None
    items: list[int] = field(default_factory=list)
    getters: list[Wait] = field(default_factory=list)
    is_away: bool = False
    taken: int = 0
    dropped: int = 0

    @property
    def needed(self) -> int:
        return self.getters[0].request.least if self.getters else 1


class Model:
    def __init__(self, clock: Clock, sizes: dict[int, int], closes: int) -> None:
        self.clock, self.sizes, self.closes = clock, sizes, closes
        self.lines: dict[str, Line] = {}
        self.overrun: dict[str, int | None] = {}
        self.putters: list[Wait] = []
        self.admitted: dict[int, int] = {}  # number -> place in the order of admission
        self.returned: set[int] = set()

    def size(self, numbers: list[int]) -> int:
        return sum(self.sizes[number] for number in numbers)

    def has_room(self, line: Line, numbers: list[int]) -> bool:
        if line.policy != "block" or len(line.items) < line.needed:
            return True
        fits = len(line.items) + len(numbers) <= line.maxsize
        return fits and self.size(line.items) + self.size(numbers) <= line.max_bytes

    def is_room_for(self, numbers: list[int]) -> bool:
        return all(line.is_away or self.has_room(line, numbers) for line in self.lines.values())

    def admit(self, numbers: list[int]) -> None:
        for number in numbers:
            self.admitted[number] = len(self.admitted)
        for key, line in list(self.lines.items()):
            if line.is_away and not self.has_room(line, numbers):
                del self.lines[key]
                self.overrun[key] = line.rank
                continue
            line.items += numbers
            self.trim(line)

    def trim(self, line: Line) -> None:
        while line.policy != "block" and (
            len(line.items) > max(line.maxsize, line.needed)
            or (self.size(line.items) > line.max_bytes and len(line.items) > line.needed)
        ):
            del line.items[0]
            line.dropped += 1

    def take(self, line: Line, request: Request) -> list[int]:
        taken: list[int] = []
        while line.items and len(taken) < request.limit:
            if len(taken) >= request.least and self.size([*taken, line.items[0]]) > MESSAGE:
                break
            taken.append(line.items.pop(0))
        line.taken += len(taken)
        return taken

    def settle(self) -> None:
        changed = True
        while changed:
            changed = False
            while self.putters and self.is_room_for(self.putters[0].numbers):
                putter = self.putters.pop(0)
                putter.outcome = True
                self.admit(putter.numbers)
            for line in self.lines.values():
                while line.items and line.getters and self.serve(line, line.getters[0]):
                    changed = True
        if self.closes <= 0:
            for line in self.lines.values():
                self.drop(line, lambda waiting: True, False)

    def serve(self, line: Line, getter: Wait) -> bool:
        if getter.until <= self.clock.now:
            self.end(line, getter)
        elif getter.is_absent and self.closes > 0:
            return False
        elif getter.is_absent:
            line.getters.remove(getter)
        elif self.closes > 0 and len(line.items) < getter.request.least:
            return False
        else:
            line.getters.remove(getter)
            getter.outcome = self.take(line, getter.request)
        return True

    def end(self, line: Line, getter: Wait) -> None:
        """Its time is over."""
        if getter.request.iteration and not getter.is_absent:
            getter.is_absent, getter.outcome, getter.until = True, None, self.clock.now + stores._ASKS_AGAIN_S
        elif getter.is_absent:
            self.drop(line, getter.__eq__, None)
        else:
            is_first = getter is line.getters[0]
            getter.outcome = (is_first and getter.request.least > 1 and self.take(line, getter.request)) or None
            self.drop(line, getter.__eq__, getter.outcome)

    def drop(self, line: Line, chosen: Callable[[Wait], Any], outcome: Any) -> None:
        before = list(line.getters)
        line.getters = [getter for getter in before if chosen(getter) is not True]
        for getter in before:
            if getter not in line.getters and not getter.is_absent:
                getter.outcome = outcome
        if len(before) > len(line.getters):
            self.trim(line)

    def time_passes(self) -> None:
        """Ends what is over, first what was over first."""
        while True:
            over: list[tuple[float, Line | None, Wait]] = [
                (getter.until, line, getter) for line in self.lines.values() for getter in line.getters
            ]
            over += [(putter.until, None, putter) for putter in self.putters]
            over = [one for one in over if one[0] <= self.clock.now]
            if not over:
                return
            _, line, waiting = min(over, key=lambda one: one[0])
            if line is None:
                waiting.outcome = None
                self.putters.remove(waiting)
            else:
                self.end(line, waiting)
            self.settle()

    def remove(self, key: str) -> None:
        self.overrun.pop(key, None)
        if (line := self.lines.pop(key, None)) is not None:
            self.drop(line, lambda waiting: True, False)
            self.settle()


class Comparison:
    """Does the same to a store and to the model, at random, and compares what comes of it."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.random, self.clock = random.Random(seed), clock
        self.codec, self.waits, self.batches = Codec(), list[Wait](), list[tuple[str, Any, list[int]]]()
        self.sizes: dict[int, int] = {}
        self.in_runs = seed % 3 == 0
        closes = self.random.choice([1, 2, 1000])
        self.store, self.model = Store(clock, closes, "it"), Model(clock, self.sizes, closes)  # type: ignore[arg-type]
        self.ids = iter(range(1, 1 << 30))
        self.is_topic = seed % 2 == 1
        self.keys = ["never made"]
        if not self.is_topic:
            self.keys = []
            self.add("", "block", None)

    def add(self, key: str, policy: Any, rank: int | None) -> None:
        maxsize = 1 if policy == "latest" else self.random.randint(1, 6)
        settings = maxsize, 1 << 30 if self.in_runs else self.random.choice([30, 1000]), policy, rank, f"{rank}"
        self.store.add_buffer(key, Buffer(*settings))
        self.model.lines[key] = Line(*settings)
        self.keys = [*self.keys[-3:], key]

    # --- operations ----------------------------------------------------------------------------------------------

    def until(self) -> float:
        """At once, or at a time of its own."""
        return self.clock.now + self.random.choice([0, 0, 1, 3, 10]) * (1 + 1e-6 * next(self.ids))

    def put(self) -> None:
        numbers = [next(self.ids) for _ in range(self.random.randint(1, 5))]
        self.sizes.update((number, 0 if self.in_runs else self.random.randint(1, 30)) for number in numbers)
        items = [Item(pickle.dumps(number, 5), (), 0, self.sizes[number]) for number in numbers]
        if self.in_runs:
            items = encode_items(self.codec, numbers, 4)
        wait = Wait(self.until(), self.random.choice([None, 1, 2]), numbers, request_id=next(self.ids))
        self.begin(wait, self.store.put(items, wait.until, wait.rank))
        if self.model.closes <= 0:
            wait.outcome = False
        elif not self.model.putters and self.model.is_room_for(numbers):
            wait.outcome = True
            self.model.admit(numbers)
            self.model.settle()
        elif wait.until <= self.clock.now:
            wait.outcome = None
        else:
            self.model.putters.append(wait)

    def get(self) -> None:
        key = self.key()
        least = self.random.choice([1, 1, 2, 4, 8])
        request = Request(least + self.random.choice([0, 0, 3]), least, self.random.choice([0, 0, 1, 2]))
        line = self.model.lines.get(key)
        rank = self.random.choice([None, 1, 2]) if line is None or line.rank is None else line.rank
        wait = Wait(self.until(), rank, request=request, request_id=next(self.ids))
        if line is not None and line.is_away:
            return
        if line is None and self.model.closes <= 0 and key not in self.model.overrun:
            assert self.store.take(key, request, wait.until) is ENDED
            return
        if line is None:
            with pytest.raises(NotFound, match="missed items" if key in self.model.overrun else "subscribe again"):
                self.store.take(key, request, wait.until)
            return
        self.begin(wait, self.store.take(key, request, wait.until, rank, wait.request_id), key)
        in_time = wait.until > self.clock.now
        suffices = len(line.items) >= least or self.model.closes <= 0 or not (in_time or request.iteration)
        if line.items and not line.getters and suffices:
            wait.outcome = self.model.take(line, request)
        elif self.model.closes <= 0:
            wait.outcome = False
        elif not in_time:
            wait.outcome = None
            return
        else:
            same = [one for one in line.getters if one.is_absent and request.iteration]
            same = [one for one in same if (one.rank, one.request.iteration) == (rank, request.iteration)]
            if same:
                line.getters[line.getters.index(same[0])] = wait
            else:
                line.getters.append(wait)
            if not (line.items or self.model.putters):
                return
        self.model.settle()

    def begin(self, wait: Wait, result: Any, key: str = "") -> None:
        wait.reply = result
        self.waits.append(wait)
        if isinstance(result, list):
            self.batches.append((key, result, decode_items(self.codec, result)))
        elif isinstance(result, DeferredReply):
            result.add_done_callback(lambda done: self.arrived(key, None if done.cancelled() else done))

    def arrived(self, key: str, done: Any) -> None:
        result = None if done is None or done.exception() else done.result()
        if isinstance(result, list):
            self.batches.append((key, result, decode_items(self.codec, result)))

    def put_back(self) -> None:
        if not self.batches:
            return
        key, batch, _ = self.random.choice(self.batches[-5:])
        self.batches = [one for one in self.batches if one[1] is not batch]
        begin = self.random.randrange(len(batch))
        part = batch.part(begin, self.random.choice([None, begin + 1]))
        numbers = decode_items(self.codec, part)
        for _ in range(self.random.choice([1, 2])):  # the message may come twice
            self.store.put_back(key, part)
        line = self.model.lines.get(key)
        if line is not None:
            line.items = sorted(line.items + numbers, key=self.model.admitted.__getitem__)
            line.taken -= len(numbers)
            self.model.trim(line)
            self.model.settle()

    def pass_time(self) -> None:
        self.clock.now += self.random.choice([0.5, 1, 2])
        if self.random.random() < 0.8:  # else this process stands still, and puts are served before the deadlines
            self.model.time_passes()
            self.clock.call_back()

    def cancel(self) -> None:
        waiting = [wait for wait in self.waits if wait.outcome is PENDING]
        if waiting:
            wait = self.random.choice(waiting)
            assert wait.reply.cancel()
            wait.outcome = LOST
            self.model.putters = [putter for putter in self.model.putters if putter is not wait]
            for line in self.model.lines.values():
                self.model.drop(line, wait.__eq__, LOST)
            self.model.settle()

    def withdraw(self) -> None:
        key = self.key()
        wait = self.random.choice(self.waits or [Wait(0, None)])
        self.store.withdraw(key, wait.rank, wait.request_id)
        if (line := self.model.lines.get(key)) is not None and wait in line.getters:
            self.model.drop(line, wait.__eq__, None)
            self.model.settle()

    def lose(self) -> None:
        rank = self.random.choice([1, 2])
        self.store.lose(rank)
        for line in self.model.lines.values():
            self.model.drop(line, lambda waiting: waiting.rank == rank, LOST)
            line.is_away |= line.rank == rank
        self.model.settle()

    def come_back(self) -> None:
        rank, process = self.random.choice([1, 2]), self.random.choice(["1", "2", None])
        self.store.keep_only(rank, process)
        ended = [key for key, of in self.model.overrun.items() if of == rank and process != f"{rank}"]
        for key, line in self.model.lines.items():
            if line.rank == rank:
                line.is_away = False
                ended += [] if process == line.process else [key]
        for key in ended:
            self.model.remove(key)

    def subscribe(self) -> None:
        if self.is_topic:
            policy = self.random.choice(["block", "drop_oldest", "latest"])
            self.add(f"{next(self.ids)}", policy, self.random.choice([1, 2]))

    def unsubscribe(self) -> None:
        if self.is_topic:
            key = self.key()
            self.store.remove_buffer(key)
            self.model.remove(key)

    def close(self) -> None:
        force = self.random.random() < 0.05
        self.store.end(force)
        self.model.closes = 0 if force else self.model.closes - 1
        if self.model.closes <= 0:
            for putter in self.model.putters:
                putter.outcome = False
            self.model.putters.clear()
            self.model.settle()

    def key(self) -> str:
        return self.random.choice(self.keys)

    # --- comparing -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        for wait in self.waits:
            assert self.came(wait.reply, wait.outcome) == wait.outcome
        for key, line in self.model.lines.items():
            stats = self.store.stats(key)
            shown = [stats[name] for name in ("items", "taken", "dropped", "waiting_to_get", "waiting_to_put")]
            waiting = len(self.model.putters)
            assert shown == [len(line.items), line.taken, line.dropped, len(line.getters), waiting]
            if not self.in_runs:
                assert stats["bytes"] == self.model.size(line.items)
        assert self.store.stats()["closed"] == (self.model.closes <= 0)
        self.waits = [wait for wait in self.waits if wait.outcome is PENDING]

    def came(self, reply: Any, expected: Any) -> Any:
        if isinstance(reply, DeferredReply):
            if not reply.done() or reply.cancelled():
                return LOST if expected is LOST else PENDING
            reply = reply.result(0)
        return decode_items(self.codec, reply) if isinstance(reply, list) else reply


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stores, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


OPERATIONS = {
    **{"put": 8, "get": 8, "put_back": 2, "pass_time": 4, "cancel": 1, "withdraw": 1, "lose": 0.5, "come_back": 1},
    **{"subscribe": 2, "unsubscribe": 0.3, "close": 0.2},
}


@pytest.mark.parametrize("first", range(0, 120, 6))
def test_a_store_does_what_its_model_does(clock: Clock, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    for seed in range(first, first + 6):
        compared, done = Comparison(seed, clock), list[str]()
        monkeypatch.setattr(stores, "MESSAGE_BYTES", 1 << 30 if compared.in_runs else MESSAGE)
        for _ in range(150):
            done += compared.random.choices(list(OPERATIONS), list(OPERATIONS.values()))
            getattr(compared, done[-1])()
            try:
                compared.check()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, after {done}") from error
        compared.store.close(NotAMember("left"))
        for wait in compared.waits:
            with pytest.raises(NotAMember):
                wait.reply.result(0)
        with pytest.raises(NotAMember):
            compared.store.put([], 0)
