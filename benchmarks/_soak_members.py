"""The actors of the soak: each calls the others with a seeded mix, and checks every byte that comes back."""

from __future__ import annotations

import asyncio
import functools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed.rpc as rpc

import raytorchrpc as rtr
from benchmarks._resources import Held, held, measurable_memory, settle

#: Elements of the int64 tensors and arrays that are sent.
SIZES = {"20 KB": 2_500, "32 KB": 4_000, "1 MB": 125_000, "10 MB": 1_250_000}
#: What is called for, and how often in a thousand.
ERRANDS = {
    "empty": 400, "small": 230, "tensor 20 KB": 120, "tensor 1 MB": 25, "tensor 10 MB": 2, "array 32 KB": 60,
    "array 1 MB": 10, "many cpu": 12, "grad": 10, "error": 60, "late": 12, "no time": 15, "chain": 20, "rref": 8,
    "kept": 6,
}  # fmt: skip
CUDA_ERRANDS = {"cuda 20 KB": 40, "cuda 1 MB": 20, "cuda 10 MB": 4, "many cuda": 4}
#: How its result is waited for, and how often in a thousand.
WAYS = {"wait": 880, "window": 30, "abandon": 40, "keep": 40, "callback": 10}
WINDOW, ABANDONED, KEPT = 16, 8, 24
ABANDON_S = 1.0
MANY = 40


class SoakError(Exception):
    """Raised on purpose."""


_bases: dict[tuple[str, str], torch.Tensor] = {}


def base(size: str, device: str = "cpu") -> torch.Tensor:
    """The same random numbers in every process."""
    found = _bases.get((size, device))
    if found is None:
        generator = torch.Generator().manual_seed(SIZES[size])
        found = torch.randint(1, 1 << 60, (SIZES[size],), generator=generator).to(device)
        _bases[size, device] = found
    return found


def stamped(size: str, number: int, device: str = "cpu") -> torch.Tensor:
    """A tensor that no other call sends."""
    made = base(size, device).clone()
    made[0] = number
    return made


def is_stamped(value: Any, size: str, number: int, sign: int = 1) -> bool:
    """Whether it is that tensor (or array), times ``sign``, in every element."""
    tensor = torch.from_numpy(value) if isinstance(value, numpy.ndarray) else value.detach()
    expected = base(size, str(tensor.device))
    first = int(tensor[0]) == sign * number
    return first and torch.equal(tensor[1:], expected[1:] if sign == 1 else -expected[1:])


class Errand(NamedTuple):
    """One call: what to send, what has to come back."""

    method: str
    args: tuple[Any, ...]
    right: Callable[[Any], bool]
    timeout: float | None = None
    raises: type[BaseException] | None = None
    may_answer: bool = False
    """The right answer will do as well as the exception."""
    by_rref: bool = False


def errand(kind: str, number: int, peers: list[str]) -> Errand:
    """Make a call of that kind; ``number`` tells it from all others."""
    name, _, size = kind.partition(" ")

    def negated(back: Any) -> bool:
        return is_stamped(back, size, number, -1)

    def given(back: Any) -> bool:
        return is_stamped(back, "20 KB", number)

    if kind == "empty":
        return Errand("null", (), lambda back: back is None)
    if kind == "small":
        payload = {"number": number, "text": str(number) * 8, "list": [number, None, 0.5], "flag": True}
        return Errand("echo", (payload,), lambda back: back == payload)
    if name == "many":
        many = [stamped("20 KB", number + place, size) for place in range(MANY)]
        return Errand("negate_all", (many, number), lambda back: len(back) == MANY and all(
            is_stamped(value, "20 KB", number + place, -1) for place, value in enumerate(back)
        ))  # fmt: skip
    if name in ("tensor", "array", "cuda"):
        tensor = stamped(size, number, "cuda" if name == "cuda" else "cpu")
        return Errand("negate", (tensor.numpy() if name == "array" else tensor, size, number), negated)
    if kind == "grad":
        weight = torch.nn.Parameter(torch.full((300,), float(number % 1000)))
        return Errand("echo", (weight,), lambda back: back.requires_grad and torch.equal(back, weight))
    if kind == "error":  # some with a tensor that the method's frame holds, and so the traceback
        ballast = stamped("1 MB", number) if number // MANY % 16 == 0 else None
        return Errand("fail", (f"number {number}", ballast), lambda _: False, raises=SoakError)
    if kind == "late":
        size = ("1 MB", "20 KB")[number // MANY % 2]
        right = functools.partial(is_stamped, size=size, number=number)
        return Errand("late", (0.004, size, number), right, 0.002, rtr.RpcTimeout, may_answer=True)
    if kind == "no time":
        size = "20 KB"
        timeout = (0.0, 1e-5, 1e-4, 5e-4)[number // MANY % 4]
        return Errand("negate", (stamped(size, number), size, number), negated, timeout, rtr.RpcTimeout, True)
    if kind == "chain":
        return Errand("relay", (peers[number % len(peers)], number), given)
    if kind == "rref":
        return Errand("give", ("20 KB", number), given, by_rref=True)
    assert kind == "kept", kind
    return Errand("own", (number,), lambda rref: rref.to_here() == number)


class Driver:
    """Calls the peers from one thread, or one task, and keeps the score."""

    def __init__(self, peers: list[str], seed: int, tally: Tally, cuda: bool) -> None:
        self._peers, self._tally = peers, tally
        self._random = random.Random(seed)
        self._errands = {**ERRANDS, **(CUDA_ERRANDS if cuda else {})}
        self._number = seed << 40
        self._kept: deque[tuple[Errand, Any]] = deque()

    def drive(self, calls: int) -> None:
        """Make that many calls."""
        for way, drawn in self._draws(calls):
            if way in ("wait", "keep"):
                ((peer, call),) = drawn
                value = self._at_once(peer, call)
                if way == "keep":
                    self._keep(call, value)
                continue
            begun = [(call, self._begin(peer, call)) for peer, call in drawn]
            if way == "window":
                for call, future in begun:
                    if future is not None:
                        self._judged(call, future.wait)
            elif way == "callback":
                self._call_back(*begun[0])
        self._drop_all()

    async def drive_on_loop(self, calls: int) -> None:
        """As ``drive``, with ``await``."""
        for way, drawn in self._draws(calls):
            if drawn[0][1].by_rref:  # torch's RRefs know no await
                self._at_once(*drawn[0])
                continue
            begun = [(call, self._begin(peer, call)) for peer, call in drawn]
            if way == "callback":
                self._call_back(*begun[0])
            elif way != "abandon":
                for call, future in begun:
                    value = None if future is None else await self._awaited(call, future)
                    if way == "keep":
                        self._keep(call, value)
            await asyncio.sleep(0)
        self._drop_all()

    def _draws(self, calls: int) -> Iterator[tuple[str, list[tuple[str, Errand]]]]:
        """(way, [(peer, errand)]): as many as make that number of calls."""
        if not self._tally.calls:  # what is made once, such as connections, is to be there before anything is measured
            for peer in self._peers:
                for kind in self._errands:
                    calls -= 1
                    self._tally.calls += 1
                    yield "wait", [(peer, self._errand(kind))]
        while calls > 0:
            way = self._pick(WAYS)
            count = min(calls, {"window": WINDOW, "abandon": ABANDONED}.get(way, 1))
            calls -= count
            self._tally.calls += count
            drawn = [self._draw(alone=way in ("wait", "keep")) for _ in range(count)]
            if way == "abandon":  # what the callee keeps for us, it keeps until the deadline
                drawn = [(peer, call._replace(timeout=ABANDON_S)) for peer, call in drawn]
            yield way, drawn

    def _draw(self, alone: bool) -> tuple[str, Errand]:
        kind = self._pick(self._errands)
        if not alone and (kind == "rref" or "10 MB" in kind):
            kind = "empty"
        return self._random.choice(self._peers), self._errand(kind)

    def _errand(self, kind: str) -> Errand:
        self._number += MANY
        return errand(kind, self._number, self._peers)

    def _pick(self, weights: dict[str, int]) -> str:
        return self._random.choices(list(weights), list(weights.values()))[0]

    # One call.

    def _at_once(self, peer: str, call: Errand) -> Any:
        if call.by_rref:
            return self._judged(call, lambda: getattr(rtr.remote(peer), call.method)(*call.args).to_here())
        return self._judged(call, lambda: getattr(rtr.rpc_sync(peer, timeout=call.timeout), call.method)(*call.args))

    def _begin(self, peer: str, call: Errand) -> Any:
        """A Future, or None if the call failed at once (and that was counted if it should not)."""
        try:
            return getattr(rtr.rpc_async(peer, timeout=call.timeout), call.method)(*call.args)
        except Exception as error:
            self._judge_error(call, error)
            return None

    def _judged(self, call: Errand, wait: Callable[[], Any]) -> Any:
        try:
            value = wait()
        except Exception as error:
            self._judge_error(call, error)
            return None
        self._judge_value(call, value)
        return value

    async def _awaited(self, call: Errand, future: Any) -> Any:
        try:
            value = await future
        except Exception as error:
            self._judge_error(call, error)
            return None
        self._judge_value(call, value)
        return value

    def _judge_error(self, call: Errand, error: Exception) -> None:
        if call.raises is None or not isinstance(error, call.raises):
            self._tally.wrong(f"{call.method}: {error!r}")

    def _judge_value(self, call: Errand, value: Any) -> None:
        if (call.raises is not None and not call.may_answer) or not call.right(value):
            self._tally.wrong(f"{call.method} returned {value!r}")

    def _call_back(self, call: Errand, future: Any) -> None:
        """Judge it on whatever thread it is done."""
        if future is None:
            return
        self._tally.promised += 1

        def done(future: Any) -> None:
            self._judged(call, future.wait)
            self._tally.called_back()

        future.add_done_callback(done)

    def _keep(self, call: Errand, value: Any) -> None:
        """Hold a result for a while; nothing may have changed it when it is dropped."""
        if value is not None:
            self._kept.append((call, value))
        if len(self._kept) > KEPT:
            self._judge_value(*self._kept.popleft())

    def _drop_all(self) -> None:
        while self._kept:
            self._judge_value(*self._kept.popleft())


class Tally:
    """What the drivers of one member counted."""

    def __init__(self) -> None:
        self.calls = self.promised = self.kept_promises = self.wrong_ones = 0
        self.first_wrong: list[str] = []
        self._lock = threading.Lock()

    def wrong(self, what: str) -> None:
        """A result was not what it should be."""
        with self._lock:
            self.wrong_ones += 1
            if len(self.first_wrong) < 3:
                self.first_wrong.append(what[:400])

    def called_back(self) -> None:
        """A callback ran to its end."""
        with self._lock:
            self.kept_promises += 1


class Soaker:
    """A member: what the others call, and what drives its own calls."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # else every thread that computes brings a team of OpenMP's
        measurable_memory()
        self.tally = Tally()

    @rtr.method
    def null(self) -> None:
        return None

    @rtr.method
    def echo(self, value: Any) -> Any:
        return value

    @rtr.method
    def negate(self, value: Any, size: str, number: int) -> Any:
        """In place: what arrives is the receiver's own."""
        return self._negated(value, size, number)

    @rtr.method
    def negate_all(self, values: list[Any], number: int) -> list[Any]:
        return [self._negated(value, "20 KB", number + place) for place, value in enumerate(values)]

    def _negated(self, value: Any, size: str, number: int) -> Any:
        if not is_stamped(value, size, number):
            self.tally.wrong(f"argument {number} of {size} arrived as {value!r}")
        return numpy.negative(value, out=value) if isinstance(value, numpy.ndarray) else value.neg_()

    @rtr.method
    def fail(self, text: str, _value: Any) -> None:
        raise SoakError(text)

    @rtr.method(concurrent=True)
    def late(self, seconds: float, size: str, number: int) -> torch.Tensor:
        """Longer than its caller waits: the work that it stands for takes time."""
        time.sleep(seconds)
        return stamped(size, number)

    @rtr.method(concurrent=True)
    def give(self, size: str, number: int) -> torch.Tensor:
        return stamped(size, number)

    @rtr.method(concurrent=True)
    def relay(self, peer: str, number: int) -> Any:
        return rtr.rpc_sync(peer).give("20 KB", number)

    @rtr.method(concurrent=True)
    def own(self, number: int) -> Any:
        """An RRef cannot travel by socket: the result is kept here, and fetched over torchrpc."""
        return rpc.RRef(number)

    # For the driver of the soak, through Ray.

    def drive(self, calls: int, seed: int, threads: int) -> None:
        """Make that many calls from so many threads."""
        drivers = self._drivers(seed, threads)
        shares = [threading.Thread(target=driver.drive, args=(calls // threads,)) for driver in drivers]
        for share in shares:
            share.start()
        for share in shares:
            share.join()

    def _drivers(self, seed: int, count: int) -> list[Driver]:
        me = rtr.current_member()
        group = rtr.get_group("soak")
        peers = [member.name for member in group.members if member != me]
        cuda = all(group.device_map(me.name, peer) for peer in peers)
        rank = me.rank
        return [Driver(peers, 64 * seed + 8 * rank + place, self.tally, cuda) for place in range(count)]

    def settle(self, seconds: float) -> str:
        """See ``settle``; callbacks have run then too."""
        left = settle(seconds)
        missing = self.tally.promised - self.tally.kept_promises
        return left or (f"callbacks: {missing}" if missing else "")

    def held(self) -> Held:
        return held()

    def score(self) -> tuple[int, int, list[str]]:
        """(calls, wrong ones, the first of those)."""
        return self.tally.calls, self.tally.wrong_ones, self.tally.first_wrong


class AsyncSoaker(Soaker):
    """Its methods run on its loop, and it awaits its calls."""

    @rtr.method
    async def null(self) -> None:
        return None

    @rtr.method
    async def echo(self, value: Any) -> Any:
        await asyncio.sleep(0)
        return value

    @rtr.method
    async def negate(self, value: Any, size: str, number: int) -> Any:
        return self._negated(value, size, number)

    @rtr.method(concurrent=True)
    async def relay(self, peer: str, number: int) -> Any:
        return await rtr.rpc_async(peer).give("20 KB", number)

    async def drive(self, calls: int, seed: int, threads: int) -> None:  # type: ignore[override]
        """From so many tasks."""
        drivers = self._drivers(seed, threads)
        await asyncio.gather(*(driver.drive_on_loop(calls // threads) for driver in drivers))

    async def settle(self, seconds: float) -> str:  # type: ignore[override]
        return await asyncio.get_running_loop().run_in_executor(None, super().settle, seconds)

    async def held(self) -> Held:  # type: ignore[override]
        return held()

    async def score(self) -> tuple[int, int, list[str]]:  # type: ignore[override]
        return super().score()
