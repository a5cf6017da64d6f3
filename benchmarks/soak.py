"""Many calls of mixed kinds and sizes between four actors, and the resources that they leave in use.

Each actor calls the three others. After the first hundredth of the calls, and again at the end, all come to rest: every
Future is dropped, every late reply has arrived, garbage is collected. The run fails if a resource grew beyond the limit
of its pool, or if a single byte was wrong.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray

import raytorchrpc as rtr
from benchmarks._harness import Pick
from benchmarks._soak_members import AsyncSoaker, Soaker
from raytorchrpc.bench.reports import Table, plain
from raytorchrpc.lanes.cuda_ipc.lane import MAPPINGS

#: Threads (or tasks) of each member that call.
THREADS = 2
SETTLE_S = 40.0  # longer than any deadline here
MIB = 1 << 20


class Limit(NamedTuple):
    """How much one resource may grow, and why."""

    what: str
    growth: int
    reason: str
    unit: int = 1


_OF_HEAP = "fragmentation that does not depend on calls; a leak of 35 bytes per call is as much"
_AT_REST = "there are none at rest"
#: By the name in ``held``.
LIMITS = {
    "anonymous": Limit("anonymous memory, MiB", 8 * MIB, _OF_HEAP, MIB),
    "fds": Limit("file descriptors", 0, "none is opened after the first calls"),
    "threads": Limit("threads", 16, "as many workers as ran at once in the last 30 s; four listeners"),
    "arena": Limit("arena bytes out", 0, _AT_REST),
    "in flight": Limit("calls in flight", 0, _AT_REST),
    "kept": Limit("results kept", 0, _AT_REST),
    "deadlines": Limit("deadlines", 64, "cancelled ones are removed when there are more than 64"),
    "objects": Limit("objects of the package", 0, "a call leaves none"),
    "mapped": Limit("GPU segments mapped", MAPPINGS, "one per segment of a peer's allocator"),
    "gpu": Limit("GPU memory in use, MiB", 0, _AT_REST, MIB),
}
#: What a member holds, and details of some of it.
Held = tuple[dict[str, int], dict[str, Counter[str]]]


@dataclass(frozen=True)
class Verdict:
    """The result of a soak."""

    calls: int
    seconds: float
    wrong: int
    first_wrong: tuple[str, ...]
    before: dict[str, Held]
    after: dict[str, Held]
    restless: tuple[str, ...]
    """Members that did not come to rest, with what remained in use."""

    @property
    def grown(self) -> list[str]:
        """The resources that grew beyond their limits, as text."""
        found = []
        for name, (now, details) in self.after.items():
            before, known = self.before[name]
            for resource, (what, growth, _, unit) in LIMITS.items():
                if (grew := now[resource] - before[resource]) > growth:
                    text = f"{name}: {what} grew by {grew / unit:g}, {growth / unit:g} allowed"
                    more = f" ({dict(details[resource] - known[resource])})" if resource in details else ""
                    found.append(text + more)
        return found


@contextmanager
def members() -> Iterator[dict[str, Any]]:
    """A group of four actors: two plain ones, a threaded one and an async one."""
    share = min(1.0, ray.cluster_resources().get("GPU", 0) / 4)
    soaker = ray.remote(num_cpus=0, num_gpus=share if share == 1 else int(share * 100) / 100)
    made = {
        "first": soaker(Soaker).remote(),
        "second": soaker(Soaker).remote(),
        "threaded": soaker(Soaker).options(max_concurrency=4).remote(),
        "async": soaker(AsyncSoaker).remote(),
    }
    try:
        with rtr.init_group(made, name="soak", config=rtr.GroupConfig(shm_bytes=512 * MIB, rpc_timeout_s=30)):
            yield made
    finally:
        for actor in made.values():
            ray.kill(actor)


def soak(calls: int, seed: int = 1, rounds: int = 20, progress: Callable[[str], None] = lambda _: None) -> Verdict:
    """Make about that many calls in total, on an initialised Ray. Blocks for the whole soak."""
    # If possible enough for every kind of call.
    first = max(calls // 100, min(10_000, calls // 4))
    looks: list[dict[str, Held]] = []
    restless: list[str] = []
    with members() as made:

        def all_do(method: str, timeout: float | None, *args: Any) -> list[Any]:
            return ray.get([getattr(actor, method).remote(*args) for actor in made.values()], timeout=timeout)

        started = time.monotonic()
        for number in range(rounds + 1):
            each = (calls - first) // rounds if number else first
            all_do("drive", None, each // len(made), 64 * seed + number, THREADS)
            rest = all_do("settle", 2 * SETTLE_S, SETTLE_S)
            restless += [f"{name}: {text}" for name, text in zip(made, rest, strict=True) if text]
            looks.append(dict(zip(made, all_do("held", SETTLE_S), strict=True)))
            done, wrong, texts = zip(*all_do("score", SETTLE_S), strict=True)
            progress(_line(sum(done), time.monotonic() - started, looks[-1], sum(wrong)))
        seconds = time.monotonic() - started
    first_wrong = tuple(text for some in texts for text in some)
    return Verdict(sum(done), seconds, sum(wrong), first_wrong, looks[0], looks[-1], tuple(restless))


def _line(calls: int, seconds: float, now: dict[str, Held], wrong: int) -> str:
    figures = []
    for name in ("anonymous", "fds", "threads", "objects"):
        what, unit = LIMITS[name].what, LIMITS[name].unit
        figures.append(f"{what} " + "/".join(f"{held[name] / unit:.4g}" for held, _ in now.values()))
    return f"  {calls:>8} calls, {calls / seconds:>6.0f}/s: {', '.join(figures)}, wrong {wrong}"


def table(verdict: Verdict) -> str:
    """What each member held after the first calls -> at the end."""
    rows = []
    for name, (what, growth, reason, unit) in LIMITS.items():
        both = zip(verdict.before.values(), verdict.after.values(), strict=True)
        cells = (f"{before[name] / unit:.4g} -> {after[name] / unit:.4g}" for (before, _), (after, _) in both)
        rows.append((what, *cells, f"{growth / unit:g}", reason))
    heads = ("", *verdict.after, "may grow", "because")
    return plain(Table("Held after the first calls -> at the end", heads, tuple(rows)))


def main(pick: Pick, calls: int | None = None) -> None:
    """Raises SystemExit if something grew or was wrong; a tiny run is too short to tell what grew."""
    number, rounds = calls or pick(1_000_000, 20_000, 800), pick(20, 20, 1)
    verdict = soak(number, rounds=rounds, progress=lambda line: print(line, flush=True))
    print(f"\nSoak: {verdict.calls} calls in {verdict.seconds:.0f} s ({verdict.calls / verdict.seconds:.0f}/s)")
    print(table(verdict))
    for text in (*verdict.grown, *verdict.restless, *verdict.first_wrong):
        print(f"  {text}")
    failed = verdict.wrong or verdict.restless or (verdict.grown and not pick(False, False, True))
    print(f"  wrong results: {verdict.wrong}; {'FAILED' if failed else 'passed'}")
    if failed:
        raise SystemExit(1)
