"""``python -m tests.faults.strangers --messages 1000000``: so many messages from processes that do not have the secret,
to every socket that the members of a working group listen on; prints what became of the group.

Each message has a connection of its own. Exits with 1 where a member ended, served one of them, kept anything, or
failed a call of its own group.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import garbage
from tests.faults.garbage import Door
from tests.faults.judging import judge_calls
from tests.faults.ray_here import ray_here
from tests.faults.running import NAMES, Running, running

#: Groups whose members together have every socket that asks for the secret, each by Unix sockets and by TCP.
GROUPS: dict[str, dict[str, Any]] = {
    "socket": {"lanes": ("socket", "shm", "torchrpc"), "always_tcp": True},
    "nng": {"lanes": ("nng",), "always_tcp": True},
}
_PROVED = 64  # bytes: all that a member says before the other end has proved itself
_RESET = struct.pack("ii", 1, 0)
LISTENS_TO = 0.1


def send(doors: Sequence[Door], seed: int, count: int, told: bytes, until: float = math.inf) -> dict[str, Any]:
    """``count`` messages, each to a drawn door, as fast as it goes; what was sent by then, and what was not."""
    draw = random.Random(seed)
    kinds = list(garbage.SAID)
    sent: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    most_heard = 0
    for _ in range(count):
        if time.monotonic() > until:
            break
        door, kind = draw.choice(doors), draw.choice(kinds)
        try:
            sock = door.dial(20)
        except OSError as error:
            failed[f"{door.kind}: {error}"] += 1
            continue
        with sock:
            if not isinstance(door.where, str):  # a closed connection would keep its port for a minute
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sent[f"{door.kind}: {kind}"] += 1
            with suppress(OSError):
                sock.sendall(garbage.SAID[kind](draw, told))
                if draw.random() < LISTENS_TO:
                    sock.shutdown(socket.SHUT_WR)
                    heard = 0
                    while data := sock.recv(4096):
                        heard += len(data)
                    most_heard = max(most_heard, heard)
    return {"sent": dict(sent), "failed": dict(failed), "heard": most_heard}


@dataclass
class Siege:
    """What one group went through."""

    sent: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    quiet_ms: list[float] = field(default_factory=list)
    """Of empty calls before."""
    loud_ms: list[float] = field(default_factory=list)
    """Of empty calls meanwhile."""
    verdicts: Counter[str] = field(default_factory=Counter)
    most_fds: int = 0
    most_threads: int = 0
    rss: tuple[int, int] = (0, 0)
    """Of the largest member, before and at most meanwhile, in bytes."""
    violations: list[str] = field(default_factory=list)


def besiege(
    run: Running, doors: Sequence[Door], messages: int, seed: int, processes: int, seconds: float = math.inf
) -> Siege:
    """The group works, and the strangers send; blocks until all is sent and the group is at rest."""
    siege = Siege()
    told = garbage.told_of(doors[0], garbage.credentials(run.group))
    siege.quiet_ms = _empty_ms(_load(run, seed, None, siege))
    pids = {name: remote.pid for name, remote in run.remotes.items()}
    over = threading.Event()
    before = max(_rss(pid) for pid in pids.values())
    watcher = threading.Thread(target=_watch, args=(list(pids.values()), over, siege, before))
    watcher.start()
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        until = time.monotonic() + seconds
        share = [(doors, seed * 1000 + place, -(-messages // processes), told, until) for place in range(processes)]
        sending = pool.starmap_async(send, share)
        outcomes = _load(run, seed + 1, lambda: sending.wait(), siege)
        reports = sending.get(1)
    siege.seconds = time.monotonic() - began
    over.set()
    watcher.join()
    siege.loud_ms = _empty_ms(outcomes)
    for report in reports:
        siege.sent.update(report["sent"])
        siege.failed.update(report["failed"])
        if report["heard"] > _PROVED + 32 and not any(door.lane in ("nng", "torchrpc") for door in doors):
            siege.violations.append(f"a stranger was told {report['heard']} bytes")
    for name, remote in run.remotes.items():
        if remote.died is not None:
            siege.violations.append(f"{name} (pid {remote.pid}) ended")
    known = len(run.report.violations)
    run.calm(999)
    run.rest()
    siege.violations += run.report.violations[known:]
    return siege


def _load(run: Running, seed: int, until: Any, siege: Siege) -> list[list[Any]]:
    """All call all, until ``until`` returns; what is wrong with that goes to the siege."""
    lines = len(run.log.read_text().splitlines())
    most = 1_000_000 if until else 100
    loads = {
        name: remote.ask(
            "load", seed=seed, peers=[peer for peer in NAMES if peer != name], least=100, most=most, threads=1
        )
        for name, remote in run.remotes.items()
    }
    if until:
        until()
    for remote in run.remotes.values():
        remote.ask("enough", seed=seed)
    outcomes: list[list[Any]] = []
    lags: dict[str, Any] = {}
    for name, load in loads.items():
        answer = run.answered(load, f"load of {name}", run.remotes[name], 120)
        if answer is not None:
            outcomes += [[name, *outcome] for outcome in answer["outcomes"]]
            lags[name] = answer["lags"]
    fresh = run.log.read_text().splitlines()[lines:]
    violations, verdicts, _, _ = judge_calls(outcomes, lags, fresh)
    ours = {outcome[1] for outcome in outcomes}
    violations += [f"{line}: a stranger's call ran" for line in fresh if line.split()[0].rstrip(">") not in ours]
    siege.violations += violations
    if until:
        siege.verdicts.update(verdicts)
    return outcomes


def _empty_ms(outcomes: Sequence[Sequence[Any]]) -> list[float]:
    return sorted(1000 * (out[5] - out[4]) for out in outcomes if out[2] == "check empty" and out[7] == "ok")


def _rss(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _watch(pids: Sequence[int], over: threading.Event, siege: Siege, before: int) -> None:
    most = before
    while not over.wait(0.2):
        with suppress(OSError):
            for pid in pids:
                siege.most_fds = max(siege.most_fds, len(os.listdir(f"/proc/{pid}/fd")))
                siege.most_threads = max(siege.most_threads, len(os.listdir(f"/proc/{pid}/task")))
                most = max(most, _rss(pid))
    siege.rss = (before, most)


def doors_of(run: Running, lanes: Sequence[str]) -> list[Door]:
    """Of all members."""
    return [door for name in NAMES for door in garbage.doors(run.group, name) if door.lane in lanes]


def told_about(name: str, siege: Siege) -> str:
    """In words."""

    def at(values: list[float], share: float) -> float:
        return values[min(len(values) - 1, int(len(values) * share))] if values else float("nan")

    by_door: Counter[str] = Counter()
    for kind, count in siege.sent.items():
        by_door[kind.partition(":")[0]] += count
    total = sum(siege.sent.values())
    latency = (
        f"{at(values, 0.5):.2f} / {at(values, 0.95):.1f} / {at(values, 0.99):.1f} ms"
        for values in (siege.quiet_ms, siege.loud_ms)
    )
    return "\n".join([
        f"{name}: {total} messages in {siege.seconds:.0f} s ({total / siege.seconds:.0f}/s): {dict(by_door)}",
        f"  not sent: {dict(siege.failed)}",
        f"  empty calls, median / 95 % / 99 %: before {next(latency)}, meanwhile {next(latency)}",
        f"  calls meanwhile: {dict(siege.verdicts)}",
        f"  most descriptors {siege.most_fds}, most threads {siege.most_threads}, "
        f"largest member {siege.rss[0] >> 20} -> {siege.rss[1] >> 20} MiB",
        f"  violations: {len(siege.violations)}",
        *(f"    {text}" for text in siege.violations[:20]),
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.strangers", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=math.inf, help="send no longer than this, in each group")
    parser.add_argument("--groups", default="socket,nng", help="socket, nng, torchrpc (whose listener asks nobody)")
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="strangers-"))
    groups = given.groups.split(",")
    failed = False
    with ray_here():
        for place, name in enumerate(groups):
            config = GROUPS.get(name, {"lanes": ("torchrpc",)})
            with running(directory, given.seed + place, **config) as run:
                messages = -(-given.messages // len(groups))
                siege = besiege(run, doors_of(run, [name]), messages, given.seed, given.processes, given.seconds)
            print(told_about(name, siege), flush=True)
            print(json.dumps({"kinds": dict(siege.sent)}), flush=True)
            failed |= bool(siege.violations)
    sys.exit(failed)


if __name__ == "__main__":
    main()
