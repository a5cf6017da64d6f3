"""Many calls of mixed kinds and sizes between four actors, and the resources that they leave in use.

Each actor calls the three others. After the first hundredth of the calls, and again at the end, all come to rest: every
Future is dropped, every late reply has arrived, garbage is collected. The run fails if a resource grew beyond the limit
of its pool, or if a single byte was wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

import raytorchrpc as rtr
from benchmarks._harness import Pick
from benchmarks._resources import Held
from benchmarks._soak_members import AsyncSoaker, Soaker
from raytorchrpc.bench.tables import Table, plain
from raytorchrpc.lanes.cuda_ipc.lane import MAPPINGS

OPTIONS = ("calls",)
#: Threads (or tasks) of each member that call.
THREADS = 2
SETTLE_S = 40.0  # longer than any deadline here
MIB = 1 << 20


@dataclass(frozen=True)
class Limit:
    """How much one resource may grow, and why."""

    what: str
    of: Callable[[Held], int]
    growth: int
    reason: str
    unit: int = 1


_OF_HEAP = "fragmentation that does not depend on calls; a leak of 35 bytes per call is as much"
_OF_THREADS = "as many workers as ran at once in the last 30 s; four listeners"
_AT_REST = "there are none at rest"
LIMITS = (
    Limit("anonymous memory, MiB", lambda held: held.anonymous, 8 * MIB, _OF_HEAP, unit=MIB),
    Limit("file descriptors", lambda held: held.fds, 0, "none is opened after the first calls"),
    Limit("threads", lambda held: held.threads, 16, _OF_THREADS),
    Limit("arena bytes out", lambda held: held.arena_used, 0, _AT_REST),
    Limit("calls in flight", lambda held: held.in_flight, 0, _AT_REST),
    Limit("results kept", lambda held: held.kept, 0, _AT_REST),
    Limit("deadlines", lambda held: held.deadlines, 64, "cancelled ones are removed when there are more than 64"),
    Limit("objects of the package", lambda held: held.objects, 0, "a call leaves none"),
    Limit("GPU segments mapped", lambda held: held.mapped, MAPPINGS, "one per segment of a peer's allocator"),
    Limit("GPU memory in use, MiB", lambda held: held.gpu_allocated, 0, _AT_REST, unit=MIB),
)
#: Shown, but allowed to grow.
UNLIMITED: dict[str, Callable[[Held], int]] = {
    "RSS": lambda held: held.rss,
    "PSS": lambda held: held.pss,
    "USS": lambda held: held.uss,
    "arena touched": lambda held: held.arena_pages,
    "GPU reserved": lambda held: held.gpu_reserved,
}


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
        for name, after in self.after.items():
            for limit in LIMITS:
                grew = limit.of(after) - limit.of(self.before[name])
                if grew > limit.growth:
                    text = f"{name}: {limit.what} grew by {grew / limit.unit:g}, {limit.growth / limit.unit:g} allowed"
                    if limit.what.startswith("objects"):
                        text += f" ({dict(after.by_class - self.before[name].by_class)})"
                    if limit.what == "threads":
                        text += f" ({sorted(set(after.python_threads) - set(self.before[name].python_threads))})"
                    found.append(text)
        return found

    @property
    def passed(self) -> bool:
        """True if nothing was wrong, remained in use, or grew."""
        return not (self.wrong or self.restless or self.grown)


def warm_up(calls: int) -> int:
    """Calls before the first measurement: a hundredth, but if possible enough for every kind of call."""
    return max(calls // 100, min(10_000, calls // 4))


@contextmanager
def members() -> Iterator[dict[str, Any]]:
    """A group of four actors: two plain ones, a threaded one and an async one."""
    share = min(1.0, ray.cluster_resources().get("GPU", 0) / 4)
    share = share if share == 1 else int(share * 100) / 100
    plain = ray.remote(num_cpus=0, num_gpus=share)
    made = {
        "first": plain(Soaker).remote(),
        "second": plain(Soaker).remote(),
        "threaded": plain(Soaker).options(max_concurrency=4).remote(),
        "async": plain(AsyncSoaker).remote(),
    }
    try:
        with rtr.init_group(made, name="soak", config=rtr.GroupConfig(shm_bytes=512 * MIB, rpc_timeout_s=30)):
            yield made
    finally:
        for actor in made.values():
            ray.kill(actor)


def soak(calls: int, seed: int = 1, rounds: int = 20, progress: Callable[[str], None] = lambda _: None) -> Verdict:
    """Make about that many calls in total, on an initialised Ray. Blocks for the whole soak."""
    first = warm_up(calls)
    with members() as made:
        started = time.monotonic()
        left = [*_round(made, first, 64 * seed)]
        before = _held(made)
        progress(_line(first, started, before, _scores(made)))
        each = (calls - first) // rounds
        for number in range(1, rounds + 1):
            left += _round(made, each, 64 * seed + number)
            after = _held(made)
            scores = _scores(made)
            progress(_line(first + number * each, started, after, scores))
        seconds = time.monotonic() - started
    return Verdict(
        calls=sum(score[0] for score in scores),
        seconds=seconds,
        wrong=sum(score[1] for score in scores),
        first_wrong=tuple(text for score in scores for text in score[2]),
        before=before,
        after=after,
        restless=tuple(left),
    )


def _round(made: dict[str, Any], calls: int, seed: int) -> Iterator[str]:
    """All members call each other, then come to rest. Yields those that do not."""
    ray.get([actor.drive.remote(calls // len(made), seed, THREADS) for actor in made.values()])
    settled = ray.get([actor.settle.remote(SETTLE_S) for actor in made.values()], timeout=2 * SETTLE_S)
    yield from (f"{name}: {text}" for name, text in zip(made, settled, strict=True) if text)


def _held(made: dict[str, Any]) -> dict[str, Held]:
    return dict(zip(made, ray.get([actor.held.remote() for actor in made.values()], timeout=SETTLE_S), strict=True))


def _scores(made: dict[str, Any]) -> list[tuple[int, int, list[str]]]:
    return ray.get([actor.score.remote() for actor in made.values()], timeout=SETTLE_S)


def _line(calls: int, started: float, now: dict[str, Held], scores: list[tuple[int, int, list[str]]]) -> str:
    def each(of: Callable[[Held], float]) -> str:
        return "/".join(f"{of(held):g}" for held in now.values())

    return (
        f"  {calls:>8} calls, {calls / (time.monotonic() - started):>6.0f}/s: "
        f"anonymous {each(lambda held: round(held.anonymous / MIB, 1))} MiB, "
        f"pss {each(lambda held: round(held.pss / MIB))} MiB, "
        f"fds {each(lambda held: held.fds)}, threads {each(lambda held: held.threads)}, "
        f"objects {each(lambda held: held.objects)}, wrong {sum(score[1] for score in scores)}"
    )


def table(verdict: Verdict) -> str:
    """What each member held after the first calls -> at the end."""

    def cells(of: Callable[[Held], int], unit: int) -> list[str]:
        both = zip(verdict.before.values(), verdict.after.values(), strict=True)
        return [f"{of(before) / unit:.4g} -> {of(after) / unit:.4g}" for before, after in both]

    rows = [
        (limit.what, *cells(limit.of, limit.unit), f"{limit.growth / limit.unit:g}", limit.reason) for limit in LIMITS
    ]
    rows += [(f"{what}, MiB", *cells(of, MIB), "", "") for what, of in UNLIMITED.items()]
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
    passed = verdict.passed or (pick(False, False, True) and not (verdict.wrong or verdict.restless))
    print(f"  wrong results: {verdict.wrong}; {'passed' if passed else 'FAILED'}")
    if not passed:
        raise SystemExit(1)
