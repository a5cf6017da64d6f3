"""What one small call costs in Python: the functions that it runs through at both ends, and the locks that it takes."""

from __future__ import annotations

import statistics
import sys
import threading
from collections import Counter
from types import FrameType
from typing import Any

import torch

import raytorchrpc as rtr
from benchmarks._harness import End, Pick, compare, group_of, on
from raytorchrpc.bench.cases import Figure
from raytorchrpc.bench.tables import Table
from raytorchrpc.process.locks import Lock

#: Arguments, by the name of the size.
SIZES = {"empty": (), "1.25 KB": (torch.ones(312),)}
BOTH = "both ends"
ENDS = "caller", "callee"
#: What a thread calls again and again while it waits, or every two milliseconds: how often depends on the machine.
WAITING = {
    *("AnyReadable.__call__", "Connection.read_until.<locals>.read_reply", "Selector._poll.<locals>.poll_now"),
    *("Selector._follow", "Selector._follow.<locals>.<genexpr>", "Selector._take_over"),
    *("Timer.set", "Timer.clear", "_setting"),
}


class Steps:
    """Counts what the threads of this process do that were started since it was made, and the one that made it."""

    def __init__(self) -> None:
        self.functions: Counter[str] = Counter()
        self.locks: Counter[str] = Counter()
        enter = Lock.__enter__

        def counted(lock: Lock) -> bool:
            self._take(sys._getframe(1))
            return enter(lock)

        Lock.__enter__ = counted  # type: ignore[method-assign]  # `with` calls it where no profiler sees it
        threading.setprofile(self.note)

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if "/raytorchrpc/" not in code.co_filename:
            return
        name = _named(frame)
        if event == "call" and name not in WAITING:
            self.functions[name] += 1
        elif event == "c_call" and argument.__name__ == "acquire":
            self._take(frame)

    def _take(self, frame: FrameType) -> None:
        if (name := _named(frame)) not in WAITING:
            self.locks[name] += 1


def _named(frame: FrameType) -> str:
    code = frame.f_code
    if sys.version_info >= (3, 11):
        return code.co_qualname
    return code.co_name


class Echo(End):
    """Counts from its start, so that the threads of its member are counted too."""

    def __init__(self) -> None:
        self.steps = Steps()

    @rtr.method
    def echo(self, *values: Any) -> Any:
        return values


def call(end: Any, size: str, count: int) -> tuple[Counter[str], Counter[str]]:
    """What so many calls take at this end, which makes them."""
    arguments = SIZES[size]
    take(end)
    sys.setprofile(end.steps.note)
    try:
        for _ in range(count):
            rtr.rpc_sync("callee").echo(*arguments)
    finally:
        sys.setprofile(None)
    return take(end)


def take(end: Any) -> tuple[Counter[str], Counter[str]]:
    """What has been counted since the last time."""
    steps = end.steps
    counted = steps.functions, steps.locks
    steps.functions, steps.locks = Counter(), Counter()
    return counted


def call_steps(pick: Pick) -> list[Figure]:
    """Medians over batches of calls; also prints how often a call of 1.25 KB runs each function, at either end."""
    batches, count = pick(15, 7, 1), pick(50, 20, 5)
    turns: dict[tuple[str, str], list[Counter[str]]] = {}
    figures: list[Figure] = []
    with group_of(*reversed(ENDS), cls=Echo) as (_, members):
        callee, caller = members.values()
        for place, kind in enumerate(("functions", "locks")):

            def one_batch(contestant: str, size: str, place: int = place, kind: str = kind) -> float:
                made = on(caller, call, size, count)
                ends = dict(zip(ENDS, (made[place], on(callee, take)[place]), strict=True))
                for end, counted in ends.items():
                    turns.setdefault((size, f"{kind} of the {end}"), []).append(counted)
                return sum(sum(counted.values()) for end, counted in ends.items() if contestant in (BOTH, end)) / count

            figures += compare(f"{kind} of a call", one_batch, (BOTH, *ENDS), [*SIZES], batches, unit="per call")
    rows = []
    for (size, side), counted in turns.items():
        if size == "1.25 KB":
            names = {name for turn in counted for name in turn}
            medians = {name: statistics.median(turn[name] / count for turn in counted) for name in names}
            rows += [(name, f"{times:.2g}", side) for name, times in sorted(medians.items(), key=lambda one: -one[1])]
    table = Table("a call of 1.25 KB", ("function", "times", "what"), [row for row in rows if float(row[1]) >= 0.1])
    print(f"\n{table.text()}")
    return figures
