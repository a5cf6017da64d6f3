"""Many calls of mixed kinds and sizes between four actors, and what is left of them: memory, descriptors, threads.

Each actor calls the three others all the while. After the first hundredth of the calls, and again at the end, they
come to rest: every Future is dropped, every late answer has come, garbage is collected. Then what each holds is
compared. What grew by more than a pool that has a limit fails the run, and so does one wrong byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

import raytorchrpc as rtr
from benchmarks._harness import start_ray
from benchmarks._held import Held
from benchmarks._soaking import AsyncSoaker, Soaker
from raytorchrpc.lanes.cuda_ipc.lane import MAPPINGS

CALLS, QUICK_CALLS = 1_000_000, 20_000
#: Threads (or tasks) of each member that call.
THREADS = 2
SETTLE_S = 40.0  # longer than any deadline here
MIB = 1 << 20


@dataclass(frozen=True)
class Limit:
    """How much one number may have grown, and why that much."""

    what: str
    of: Callable[[Held], int]
    growth: int
    reason: str
    unit: int = 1


LIMITS = (
    Limit(
        "anonymous memory, MiB",
        lambda held: held.anonymous,
        8 * MIB,
        "holes in the heap that follow no call; 35 bytes a call would be as much",
        unit=MIB,
    ),
    Limit("file descriptors", lambda held: held.fds, 0, "none is opened after the first calls"),
    Limit("threads", lambda held: held.threads, 16, "as many workers as ran at once in the last 30 s; four listeners"),
    Limit("arena bytes out", lambda held: held.arena_used, 0, "at rest nobody holds any"),
    Limit("calls under way", lambda held: held.in_flight, 0, "at rest there is none"),
    Limit("results kept", lambda held: held.kept, 0, "at rest there is none"),
    Limit("deadlines", lambda held: held.deadlines, 64, "cancelled ones are swept out when there are more than 64"),
    Limit("objects of the package", lambda held: held.objects, 0, "a call leaves none"),
    Limit("GPU segments mapped", lambda held: held.mapped, MAPPINGS, "one for each that a peer's allocator has made"),
    Limit("GPU memory in use, MiB", lambda held: held.gpu_allocated, 0, "at rest nobody holds any", unit=MIB),
)


@dataclass(frozen=True)
class Verdict:
    """What a soak found."""

    calls: int
    seconds: float
    wrong: int
    first_wrong: tuple[str, ...]
    before: dict[str, Held]
    after: dict[str, Held]
    restless: tuple[str, ...]
    """Members that did not come to rest, and with what."""

    @property
    def grown(self) -> list[str]:
        """What grew more than it may, in words."""
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
        """Nothing wrong, nothing left, nothing grown."""
        return not (self.wrong or self.restless or self.grown)


def warm_up(calls: int) -> int:
    """Calls before the first measurement: a hundredth, but enough to have seen every kind, as far as that goes."""
    return max(calls // 100, min(10_000, calls // 4))


@contextmanager
def members() -> Iterator[dict[str, Any]]:
    """Four actors that are in a group: two that run a method at a time, a threaded one, an async one."""
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
    """Make about that many calls in all; Ray runs already. Blocks for the whole soak."""
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
    """All call all; then all come to rest. Yields who does not."""
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
    names = list(verdict.after)
    lines = [f"  {'':<24}" + "".join(f"{name:>18}" for name in names) + f"{'may grow':>10}   because"]
    for limit in LIMITS:
        cells = (
            f"{limit.of(verdict.before[name]) / limit.unit:.4g} -> {limit.of(verdict.after[name]) / limit.unit:.4g}"
            for name in names
        )
        grown = any(limit.of(verdict.after[name]) - limit.of(verdict.before[name]) > limit.growth for name in names)
        lines.append(
            f"  {limit.what:<24}" + "".join(f"{cell:>18}" for cell in cells) + f"{limit.growth / limit.unit:>10g}"
            f"   {'GROWN: ' if grown else ''}{limit.reason}"
        )
    for what, of in (
        ("RSS, MiB", lambda held: held.rss),
        ("PSS, MiB", lambda held: held.pss),
        ("USS, MiB", lambda held: held.uss),
        ("arena touched, MiB", lambda held: held.arena_pages),
        ("GPU reserved, MiB", lambda held: held.gpu_reserved),
    ):
        cells = (f"{of(verdict.before[name]) / MIB:.4g} -> {of(verdict.after[name]) / MIB:.4g}" for name in names)
        lines.append(f"  {what:<24}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def main(quick: bool = False, calls: int | None = None) -> None:
    """Raises SystemExit where something grew or was wrong."""
    start_ray()
    try:
        verdict = soak(calls or (QUICK_CALLS if quick else CALLS), progress=lambda line: print(line, flush=True))
    finally:
        ray.shutdown()
    print(f"\nSoak: {verdict.calls} calls in {verdict.seconds:.0f} s ({verdict.calls / verdict.seconds:.0f}/s)")
    print(table(verdict))
    for text in (*verdict.grown, *verdict.restless, *verdict.first_wrong):
        print(f"  {text}")
    print(f"  wrong results: {verdict.wrong}; {'passed' if verdict.passed else 'FAILED'}")
    if not verdict.passed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
