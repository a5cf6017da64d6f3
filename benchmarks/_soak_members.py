"""The actors of the soak: each calls the others with a seeded mix, and verifies every byte of the results."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed.rpc as rpc

import raytorchrpc as rtr
from benchmarks._resources import Held, held, measurable_memory, settle

#: Elements of the int64 tensors and arrays.
SIZES = {"20 KB": 2_500, "32 KB": 4_000, "1 MB": 125_000, "10 MB": 1_250_000}
#: Kinds of calls, and their frequency in a thousand.
KINDS = {
    "empty": 400, "small": 230, "tensor 20 KB": 120, "tensor 1 MB": 25, "tensor 10 MB": 2, "array 32 KB": 60,
    "array 1 MB": 10, "many cpu": 12, "grad": 10, "error": 60, "late": 12, "no time": 15, "chain": 20, "rref": 8,
    "kept": 6,
}  # fmt: skip
CUDA_KINDS = {"cuda 20 KB": 40, "cuda 1 MB": 20, "cuda 10 MB": 4, "many cuda": 4}
#: What the caller does with the results, and the frequency in a thousand.
WAITS = {"wait": 880, "window": 30, "abandon": 40, "keep": 40, "callback": 10}
ALONE = ("wait", "keep")
"""Of these each is one call, which may be large."""
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
        found = _bases[size, device] = torch.randint(1, 1 << 60, (SIZES[size],), generator=generator).to(device)
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


class Case(NamedTuple):
    """One call: what to send, and the expected result."""

    method: str
    args: tuple[Any, ...]
    right: Callable[[Any], bool]
    timeout: float | None = None
    raises: type[BaseException] | None = None
    may_answer: bool = False
    """The right result is accepted as well as the exception."""
    by_rref: bool = False


def make_case(kind: str, number: int, peers: list[str]) -> Case:
    """A call of that kind; ``number`` distinguishes it from all others."""
    name, _, size = kind.partition(" ")

    def negated(back: Any) -> bool:
        return is_stamped(back, size, number, -1)

    def given(back: Any) -> bool:
        return is_stamped(back, "20 KB", number)

    if kind == "empty":
        return Case("null", (), lambda back: back is None)
    if kind == "small":
        payload = {"number": number, "text": str(number) * 8, "list": [number, None, 0.5], "flag": True}
        return Case("echo", (payload,), lambda back: back == payload)
    if name == "many":
        many = [stamped("20 KB", number + place, size) for place in range(MANY)]
        return Case("negate_all", (many, number), lambda back: len(back) == MANY and all(
            is_stamped(value, "20 KB", number + place, -1) for place, value in enumerate(back)
        ))  # fmt: skip
    if name in ("tensor", "array", "cuda"):
        tensor = stamped(size, number, "cuda" if name == "cuda" else "cpu")
        return Case("negate", (tensor.numpy() if name == "array" else tensor, size, number), negated)
    if kind == "grad":
        weight = torch.nn.Parameter(torch.full((300,), float(number % 1000)))
        return Case("echo", (weight,), lambda back: back.requires_grad and torch.equal(back, weight))
    if kind == "error":  # some with a tensor that the traceback keeps alive
        ballast = stamped("1 MB", number) if number // MANY % 16 == 0 else None
        return Case("fail", (f"number {number}", ballast), lambda _: False, raises=SoakError)
    if kind == "late":
        size = ("1 MB", "20 KB")[number // MANY % 2]
        right = functools.partial(is_stamped, size=size, number=number)
        return Case("late", (0.004, size, number), right, 0.002, rtr.RpcTimeout, may_answer=True)
    if kind == "no time":
        size = "20 KB"
        timeout = (0.0, 1e-5, 1e-4, 5e-4)[number // MANY % 4]
        return Case("negate", (stamped(size, number), size, number), negated, timeout, rtr.RpcTimeout, True)
    if kind == "chain":
        return Case("relay", (peers[number % len(peers)], number), given)
    if kind == "rref":
        return Case("give", ("20 KB", number), given, by_rref=True)
    assert kind == "kept", kind
    return Case("own", (number,), lambda rref: rref.to_here() == number)


class Caller:
    """Calls the peers from one thread or task, and counts wrong results."""

    def __init__(self, peers: list[str], seed: int, tally: Tally, cuda: bool) -> None:
        self._peers, self._tally = peers, tally
        self._random = random.Random(seed)
        self._kinds = {**KINDS, **(CUDA_KINDS if cuda else {})}
        self._number = seed << 40
        self._kept: deque[tuple[Case, Any]] = deque()

    def drive(self, calls: int) -> None:
        """Make that many calls."""
        for wait, drawn in self._draws(calls):
            if wait in ALONE:
                self._at_once(wait, *drawn[0])
                continue
            for call, future in self._begin(wait, drawn):
                with self._judging(call):
                    self._check(call, future.wait())
        self._drop_kept(0)

    async def drive_on_loop(self, calls: int) -> None:
        """The same, with ``await``."""
        for wait, drawn in self._draws(calls):
            if drawn[0][1].by_rref:  # torch's RRefs cannot be awaited
                self._at_once(wait, *drawn[0])
                continue
            for call, future in self._begin(wait, drawn):
                with self._judging(call):
                    self._check(call, await future, wait)
            await asyncio.sleep(0)
        self._drop_kept(0)

    def _draws(self, calls: int) -> Iterator[tuple[str, list[tuple[str, Case]]]]:
        """Yields (wait, [(peer, case)]) until that number of calls is reached."""
        if not self._tally.calls:  # opens connections and the like before the first measurement
            for peer, kind in itertools.product(self._peers, self._kinds):
                calls -= 1
                self._tally.calls += 1
                yield "wait", [(peer, self._case(kind))]
        while calls > 0:
            wait = self._pick(WAITS)
            count = min(calls, {"window": WINDOW, "abandon": ABANDONED}.get(wait, 1))
            calls -= count
            self._tally.calls += count
            drawn = [self._draw(alone=wait in ALONE) for _ in range(count)]
            if wait == "abandon":  # the callee keeps the result until the deadline
                drawn = [(peer, call._replace(timeout=ABANDON_S)) for peer, call in drawn]
            yield wait, drawn

    def _draw(self, alone: bool) -> tuple[str, Case]:
        kind = self._pick(self._kinds)
        if not alone and (kind == "rref" or "10 MB" in kind):
            kind = "empty"
        return self._random.choice(self._peers), self._case(kind)

    def _case(self, kind: str) -> Case:
        self._number += MANY
        return make_case(kind, self._number, self._peers)

    def _pick(self, weights: dict[str, int]) -> str:
        return self._random.choices(list(weights), list(weights.values()))[0]

    def _at_once(self, wait: str, peer: str, call: Case) -> None:
        with self._judging(call):
            if call.by_rref:
                value = getattr(rtr.remote(peer), call.method)(*call.args).to_here()
            else:
                value = getattr(rtr.rpc_sync(peer, timeout=call.timeout), call.method)(*call.args)
            self._check(call, value, wait)

    def _begin(self, wait: str, drawn: list[tuple[str, Case]]) -> Iterator[tuple[Case, Any]]:
        """Send the calls; returns those to wait for: neither abandoned ones, nor those with a callback."""
        begun = []
        for peer, call in drawn:
            with self._judging(call):
                begun.append((call, getattr(rtr.rpc_async(peer, timeout=call.timeout), call.method)(*call.args)))
        if wait == "callback":
            for call, future in begun:
                self._tally.promised += 1
                future.add_done_callback(functools.partial(self._called_back, call))
        return iter(() if wait in ("abandon", "callback") else begun)

    def _called_back(self, call: Case, future: Any) -> None:
        with self._judging(call):
            self._check(call, future.wait())
        with self._tally.lock:
            self._tally.kept_promises += 1

    @contextmanager
    def _judging(self, call: Case) -> Iterator[None]:
        """Count an exception that the call should not raise."""
        try:
            yield
        except Exception as error:
            if call.raises is None or not isinstance(error, call.raises):
                self._tally.wrong(f"{call.method}: {error!r}")

    def _check(self, call: Case, value: Any, wait: str = "wait") -> None:
        """Verify a result; with "keep", hold it for a while, and verify it again when it is dropped."""
        if (call.raises is not None and not call.may_answer) or not call.right(value):
            self._tally.wrong(f"{call.method} returned {value!r}")
        if wait == "keep" and value is not None:
            self._kept.append((call, value))
            self._drop_kept(KEPT)

    def _drop_kept(self, most: int) -> None:
        while len(self._kept) > most:
            self._check(*self._kept.popleft())


class Tally:
    """The counters of one member."""

    def __init__(self) -> None:
        self.calls = self.promised = self.kept_promises = self.wrong_ones = 0
        self.first_wrong: list[str] = []
        self.lock = threading.Lock()

    def wrong(self, what: str) -> None:
        """Count a wrong result."""
        with self.lock:
            self.wrong_ones += 1
            if len(self.first_wrong) < 3:
                self.first_wrong.append(what[:400])


class Soaker:
    """A member: methods that the others call, and methods that make its own calls."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # else every computing thread starts OpenMP threads
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
        return self._negated(value, size, number)

    @rtr.method
    def negate_all(self, values: list[Any], number: int) -> list[Any]:
        return [self._negated(value, "20 KB", number + place) for place, value in enumerate(values)]

    def _negated(self, value: Any, size: str, number: int) -> Any:
        """Negates in place, because arguments belong to the receiver."""
        if not is_stamped(value, size, number):
            self.tally.wrong(f"argument {number} of {size} arrived as {value!r}")
        return numpy.negative(value, out=value) if isinstance(value, numpy.ndarray) else value.neg_()

    @rtr.method
    def fail(self, text: str, _value: Any) -> None:
        raise SoakError(text)

    @rtr.method(concurrent=True)
    def late(self, seconds: float, size: str, number: int) -> torch.Tensor:
        """Takes longer than its caller's timeout."""
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
        """Returns an RRef, which the socket lane cannot carry: the caller fetches it over torchrpc."""
        return rpc.RRef(number)

    # Called by the driver of the soak, through Ray.

    def drive(self, calls: int, seed: int, threads: int) -> None:
        """Make that many calls from ``threads`` threads."""
        with ThreadPoolExecutor(threads) as pool, rtr.allow_calls():  # the others call this actor meanwhile
            list(pool.map(lambda caller: caller.drive(calls // threads), self._callers(seed, threads)))

    def _callers(self, seed: int, count: int) -> list[Caller]:
        me, group = rtr.current_member(), rtr.get_group("soak")
        peers = [member.name for member in group.members if member != me]
        cuda = all(group.device_map(me.name, peer) for peer in peers)
        return [Caller(peers, 64 * seed + 8 * me.rank + place, self.tally, cuda) for place in range(count)]

    def settle(self, seconds: float) -> str:
        """As ``settle``, but also waits for callbacks."""
        left = settle(seconds)
        missing = self.tally.promised - self.tally.kept_promises
        return left or (f"callbacks: {missing}" if missing else "")

    def held(self) -> Held:
        return held()

    def score(self) -> tuple[int, int, list[str]]:
        """(calls, wrong results, the first of those)."""
        return self.tally.calls, self.tally.wrong_ones, self.tally.first_wrong


class AsyncSoaker(Soaker):
    """A member whose methods run on its event loop, and which awaits its calls."""

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
        """The same from ``threads`` tasks."""
        callers = self._callers(seed, threads)
        await asyncio.gather(*(caller.drive_on_loop(calls // threads) for caller in callers))

    async def settle(self, seconds: float) -> str:  # type: ignore[override]
        return await asyncio.get_running_loop().run_in_executor(None, super().settle, seconds)
