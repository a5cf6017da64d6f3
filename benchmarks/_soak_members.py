"""The actors of the soak: each calls the others with a seeded mix, and verifies every byte of the results."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed.rpc as rpc

import raytorchrpc as rtr
from benchmarks._resources import held, measurable_memory, objects, settle

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


class Call(NamedTuple):
    """What to send, and the expected result."""

    method: str
    args: tuple[Any, ...]
    right: Callable[[Any], bool]
    timeout: float | None = None
    raises: type[BaseException] | tuple[()] = ()
    """Accepted as well as the right result."""
    by_rref: bool = False


def make_call(kind: str, number: int, peers: list[str]) -> Call:
    """A call of that kind; ``number`` distinguishes it from all others."""
    name, _, size = kind.partition(" ")
    turn = number // MANY
    if kind == "empty":
        return Call("null", (), lambda back: back is None)
    if kind == "small":
        payload = {"number": number, "text": str(number) * 8, "list": [number, None, 0.5], "flag": True}
        return Call("echo", (payload,), lambda back: back == payload)
    if name == "many":
        many = [stamped("20 KB", number + place, size) for place in range(MANY)]
        return Call("negate_all", (many, number), lambda back: len(back) == MANY and all(
            is_stamped(value, "20 KB", number + place, -1) for place, value in enumerate(back)
        ))  # fmt: skip
    if name in ("tensor", "array", "cuda"):
        tensor = stamped(size, number, "cuda" if name == "cuda" else "cpu")
        sent = tensor.numpy() if name == "array" else tensor
        return Call("negate", (sent, size, number), lambda back: is_stamped(back, size, number, -1))
    if kind == "grad":
        weight = torch.nn.Parameter(torch.full((300,), float(number % 1000)))
        return Call("echo", (weight,), lambda back: back.requires_grad and torch.equal(back, weight))
    if kind == "error":  # some with a tensor that the traceback keeps alive
        ballast = stamped("1 MB", number) if turn % 16 == 0 else None
        return Call("fail", (f"number {number}", ballast), lambda _: False, raises=SoakError)
    if kind == "late":
        size = ("1 MB", "20 KB")[turn % 2]
        args = (0.004, size, number)
        return Call("late", args, lambda back: is_stamped(back, size, number), 0.002, rtr.RpcTimeout)
    size = "20 KB"
    if kind == "no time":
        timeout, args = (0.0, 1e-5, 1e-4, 5e-4)[turn % 4], (stamped(size, number), size, number)
        return Call("negate", args, lambda back: is_stamped(back, size, number, -1), timeout, rtr.RpcTimeout)
    if kind == "chain":
        return Call("relay", (peers[number % len(peers)], number), lambda back: is_stamped(back, size, number))
    if kind == "rref":
        return Call("give", (size, number), lambda back: is_stamped(back, size, number), by_rref=True)
    assert kind == "kept", kind
    return Call("own", (number,), lambda rref: rref.to_here() == number)


class Tally:
    """The counters of one member."""

    def __init__(self) -> None:
        self.calls = self.callbacks_due = self.wrong_ones = 0
        self.first_wrong: list[str] = []
        self.lock = threading.Lock()

    def wrong(self, what: str) -> None:
        """Count a wrong result."""
        with self.lock:
            self.wrong_ones += 1
            if len(self.first_wrong) < 3:
                self.first_wrong.append(what[:400])

    def expect_callbacks(self, change: int) -> None:
        """Count a callback that must run, or -1 that did."""
        with self.lock:
            self.callbacks_due += change


class Caller:
    """Calls the peers from one thread or task, and counts wrong results."""

    def __init__(self, peers: list[str], seed: int, tally: Tally, cuda: bool) -> None:
        self._peers, self._tally = peers, tally
        self._random = random.Random(seed)
        self._kinds = {**KINDS, **(CUDA_KINDS if cuda else {})}
        self._number = seed << 40
        self._kept: deque[tuple[Call, Any]] = deque()

    def drive(self, calls: int) -> None:
        """Make that many calls."""
        for then, round_of in self._rounds(calls):
            for call, result in self._begun(then, round_of, rtr.rpc_sync if then in ALONE else rtr.rpc_async):
                with self._judging(call):
                    self._check(call, result.wait() if isinstance(result, rtr.Future) else result(), then)
        self._drop_kept(0)

    async def drive_on_loop(self, calls: int) -> None:
        """The same, with ``await``."""
        for then, round_of in self._rounds(calls):
            for call, result in self._begun(then, round_of, rtr.rpc_async):
                with self._judging(call):
                    self._check(call, await result if isinstance(result, rtr.Future) else result(), then)
            await asyncio.sleep(0)
        self._drop_kept(0)

    def _rounds(self, calls: int) -> Iterator[tuple[str, list[tuple[str, Call]]]]:
        """Yields what to do with the results, and (peer, call) of each, until that number of calls is reached."""
        if not self._tally.calls:  # opens connections and the like before the first measurement
            for peer, kind in itertools.product(self._peers, self._kinds):
                calls -= 1
                self._tally.calls += 1
                yield "wait", [(peer, self._call(kind))]
        while calls > 0:
            then = self._pick(WAITS)
            count = min(calls, {"window": WINDOW, "abandon": ABANDONED}.get(then, 1))
            calls -= count
            self._tally.calls += count
            kinds = [self._pick(self._kinds) for _ in range(count)]
            if then not in ALONE:
                kinds = ["empty" if kind == "rref" or "10 MB" in kind else kind for kind in kinds]
            yield then, [(self._random.choice(self._peers), self._call(kind)) for kind in kinds]

    def _call(self, kind: str) -> Call:
        self._number += MANY
        return make_call(kind, self._number, self._peers)

    def _pick(self, weights: dict[str, int]) -> str:
        return self._random.choices(list(weights), list(weights.values()))[0]

    def _begun(self, then: str, round_of: list[tuple[str, Call]], verb: Any) -> list[tuple[Call, Any]]:
        """Send the calls; returns those to wait for, neither abandoned ones nor those with a callback.

        Each has its Future, or else a function that makes the whole call.
        """
        begun: list[tuple[Call, Any]] = []
        for peer, call in round_of:
            # The callee keeps the result of an abandoned call until the deadline.
            timeout = ABANDON_S if then == "abandon" else call.timeout
            with self._judging(call):
                if call.by_rref:  # torch's RRefs cannot be awaited
                    begun.append((call, lambda peer=peer, call=call: _by_rref(peer, call)))
                    continue
                method = getattr(verb(peer, timeout=timeout), call.method)
                begun.append(
                    (call, functools.partial(method, *call.args) if verb is rtr.rpc_sync else method(*call.args))
                )
        for call, future in begun if then == "callback" else ():
            self._tally.expect_callbacks(1)
            future.add_done_callback(functools.partial(self._called_back, call))
        return [] if then in ("abandon", "callback") else begun

    def _called_back(self, call: Call, future: Any) -> None:
        with self._judging(call):
            self._check(call, future.wait())
        self._tally.expect_callbacks(-1)

    @contextmanager
    def _judging(self, call: Call) -> Iterator[None]:
        """Count an exception that the call should not raise."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, call.raises):
                self._tally.wrong(f"{call.method}: {error!r}")

    def _check(self, call: Call, value: Any, then: str = "wait") -> None:
        """Verify a result; with "keep", hold it for a while, and verify it again when it is dropped."""
        if not call.right(value):
            self._tally.wrong(f"{call.method} returned {value!r}")
        if then == "keep" and value is not None:
            self._kept.append((call, value))
            self._drop_kept(KEPT)

    def _drop_kept(self, most: int) -> None:
        while len(self._kept) > most:
            self._check(*self._kept.popleft())


def _by_rref(peer: str, call: Call) -> Any:
    return getattr(rtr.remote(peer), call.method)(*call.args).to_here()


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
        return settle(seconds) or (f"callbacks: {self.tally.callbacks_due}" if self.tally.callbacks_due else "")

    def held(self) -> tuple[dict[str, int], dict[str, Counter[str]]]:
        """As ``held``, and what the objects and threads are."""
        return held(), {"objects": objects(), "threads": Counter(thread.name for thread in threading.enumerate())}

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
