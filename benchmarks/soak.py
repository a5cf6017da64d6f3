"""Many calls of mixed kinds and sizes between four actors, and the resources that they leave in use.

Each actor calls the three others. After the first calls, and again at the end, all come to rest: every Future is
dropped, every late reply has arrived, garbage is collected. The run fails if a resource grew beyond its limit, or if a
result was wrong.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ray
import torch

import raytorchrpc as rtr
from benchmarks._harness import Pick, compare
from benchmarks._resources import held, measurable_memory, settle
from raytorchrpc.bench.cases import Figure, Size

#: Threads of each member that call.
THREADS = 2
SETTLE_S = 40.0  # longer than any deadline here
MIB = 1 << 20
#: By how much each of ``held`` may grow. Memory fragments by as much, whatever the number of calls; workers end after
#: 30 s without work; cancelled deadlines are removed when there are more than 64. There is none of the others at rest.
LIMITS = {"anonymous": 8 * MIB, "threads": 16, "deadlines": 64, "mapped": 64}
#: Elements of int64 tensors.
SMALL, LARGE = 2_500, 125_000


class SoakError(Exception):
    """Raised on purpose."""


class Kind(NamedTuple):
    """A kind of call: how often in a hundred, how it is made, and whether its result is right."""

    often: int
    call: Callable[[str, int], Any]
    is_right: Callable[[Any, int], bool]


def stamped(count: int, number: int) -> torch.Tensor:
    """A tensor that no other call sends."""
    return torch.full((count,), number)


def _late(peer: str, number: int) -> None:
    """A call that takes longer than its timeout."""
    try:
        rtr.rpc_sync(peer, timeout=0.002).late(0.004, number)
    except rtr.RpcTimeout:
        return


def _failing(peer: str, number: int) -> str:
    try:
        return str(rtr.rpc_sync(peer).fail(str(number), stamped(SMALL, number)))
    except SoakError as error:
        return str(error)


def _window(peer: str, number: int) -> list[Any]:
    futures = [rtr.rpc_async(peer).negate(stamped(SMALL, number)) for _ in range(16)]
    return [future.wait() for future in futures]


def _negated(value: Any, number: int) -> bool:
    return bool((value == -number).all())


KINDS = {
    "empty": Kind(40, lambda peer, number: rtr.rpc_sync(peer).echo(None), lambda value, _: value is None),
    "small": Kind(20, lambda peer, number: rtr.rpc_sync(peer).echo({"n": number}), lambda value, n: value == {"n": n}),
    "tensor": Kind(15, lambda peer, number: rtr.rpc_sync(peer).negate(stamped(SMALL, number)), _negated),
    "large": Kind(3, lambda peer, number: rtr.rpc_sync(peer).negate(stamped(LARGE, number)), _negated),
    "array": Kind(4, lambda peer, number: rtr.rpc_sync(peer).negate(stamped(LARGE, number).numpy()), _negated),
    "window": Kind(3, _window, lambda values, number: all(_negated(value, number) for value in values)),
    "abandoned": Kind(
        4, lambda peer, number: rtr.rpc_async(peer, timeout=1.0).echo(number) and None, lambda value, _: value is None
    ),
    "late": Kind(2, _late, lambda value, _: True),
    "error": Kind(5, _failing, lambda value, number: value == str(number)),
    "chain": Kind(3, lambda peer, number: rtr.rpc_sync(peer).relay(number), _negated),
    "rref": Kind(
        1, lambda peer, number: rtr.remote(peer).echo(number).to_here(), lambda value, number: value == number
    ),
}


class Soaker:
    """A member: methods that the others call, and methods that make its own calls."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # else every computing thread starts OpenMP threads
        measurable_memory()
        self.wrong: list[str] = []
        self._numbers = itertools.count(1)

    @rtr.method
    def echo(self, value: Any) -> Any:
        return value

    @rtr.method(concurrent=True)
    def negate(self, value: Any) -> Any:
        """In place, because arguments belong to the receiver."""
        value *= -1
        return value

    @rtr.method
    def fail(self, text: str, _value: Any) -> None:
        raise SoakError(text)

    @rtr.method(concurrent=True)
    def late(self, seconds: float, number: int) -> torch.Tensor:
        time.sleep(seconds)
        return stamped(LARGE, number)

    @rtr.method(concurrent=True)
    def relay(self, number: int) -> Any:
        """Calls the next member."""
        me, members = rtr.current_member(), rtr.get_group("soak").members
        return rtr.rpc_sync(members[(me.rank + 1) % len(members)]).negate(stamped(SMALL, number))

    def drive(self, calls: int, seed: int) -> None:
        """Make about that many calls."""
        with ThreadPoolExecutor(THREADS) as pool, rtr.allow_calls():  # the others call this actor meanwhile
            list(pool.map(lambda thread: self._drive(calls // THREADS, seed * THREADS + thread), range(THREADS)))

    def _drive(self, calls: int, seed: int) -> None:
        me, draw = rtr.current_member(), random.Random(seed)
        peers = [member.name for member in rtr.get_group("soak").members if member != me]
        first = [(peer, kind) for peer in peers for kind in KINDS]  # opens connections before the first look
        rest = [(draw.choice(peers), draw.choices([*KINDS], [kind.often for kind in KINDS.values()])[0])
                for _ in range(calls - len(first))]  # fmt: skip
        for peer, name in first[:calls] + rest:
            number = next(self._numbers)
            try:
                value = KINDS[name].call(peer, number)
                if not KINDS[name].is_right(value, number):
                    self.wrong.append(f"{name} {number} of {peer} returned {value!r:.200}")
            except Exception as error:  # any exception is a wrong result
                self.wrong.append(f"{name} {number} of {peer} raised {error!r:.200}")

    def rest(self) -> tuple[str, dict[str, int], list[str]]:
        """What is still in use after a while, what is held, and the wrong results."""
        return settle(SETTLE_S), held(), self.wrong


def soak_calls(calls: int, rounds: int, seed: int = 1) -> tuple[dict[str, list[dict[str, int]]], list[str]]:
    """Make about that many calls on an initialised Ray; returns what members held after each round, and complaints."""
    kind = ray.remote(num_cpus=0)(Soaker)
    members = {"first": kind.remote(), "second": kind.remote(), "third": kind.remote()}
    members["threaded"] = kind.options(max_concurrency=4).remote()
    looks: dict[str, list[dict[str, int]]] = {name: [] for name in members}
    complaints: list[str] = []
    try:
        with rtr.init_group(members, name="soak", config=rtr.GroupConfig(shm_bytes=512 * MIB, rpc_timeout_s=30)):
            for number in range(rounds + 1):
                count = calls // (rounds + 1) // len(members)
                ray.get([actor.drive.remote(count, seed + number) for actor in members.values()])
                for name, actor in members.items():
                    restless, holds, wrong = ray.get(actor.rest.remote(), timeout=2 * SETTLE_S)
                    looks[name].append(holds)
                    complaints += [f"{name}: {text}" for text in filter(None, [restless, *wrong])]
    finally:
        for actor in members.values():
            ray.kill(actor)
    for name, (before, *_, after) in looks.items():
        for resource, count in after.items():
            if (growth := count - before[resource]) > LIMITS.get(resource, 0):
                complaints.append(f"{name}: {resource} grew by {growth:,}")
    return looks, complaints


def soak(pick: Pick, calls: int | None = None) -> list[Figure]:
    """Raises SystemExit if something grew or was wrong; a tiny run is too short to tell what grew."""
    looks, complaints = soak_calls(calls or pick(1_000_000, 20_000, 800), rounds=pick(10, 3, 1))
    figures = []
    for name, (before, *_, after) in looks.items():
        ends = {"after the first calls": before, "at the end": after}
        body: Callable[[str, Size], float] = lambda when, resource, ends=ends: float(ends[when][str(resource)])  # noqa: E731
        figures += compare(f"what {name!r} holds", body, [*ends], [*after], 1, unit="bytes or pieces")
    for text in complaints:
        print(f"  {text}")
    if complaints and not pick(False, False, all("grew" in text for text in complaints)):
        raise SystemExit("soak: FAILED")
    return figures
