"""The options of a run, checked before anything starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NamedTuple

from raytorchrpc.bench.cases import DEVICES, Device, Size, show_size
from raytorchrpc.bench.contestants import CALLS, LINKS, PEERS, QUICK, Contestant, choose, matching
from raytorchrpc.bench.patterns import BESIDE_PEERS, Pattern, Turn, known_patterns
from raytorchrpc.bench.results import published_sizes
from raytorchrpc.errors import ConfigurationError
from raytorchrpc.text import size_in_bytes

MAX_SIZE = 64 * 10**9
#: Default limits of measuring (seconds) of sizes and of patterns, usually and with ``--quick``.
BUDGETS_S, PATTERN_BUDGETS_S = (300.0, 40.0), (900.0, 75.0)
_QUICK_SIZES = (1_250, 1_250_000, 40_000_000)
_PAYLOADS, _QUICK_PAYLOADS = (0, 1_250, 10_000_000), (0, 1_250)
#: Methods that a threaded Ray actor may run at once, so that members can be called while they call.
RAY_THREADS = 16


class Job(NamedTuple):
    """What a case measures."""

    device: Device
    name: str
    turns: dict[Size, Turn]
    """For each of its sizes; all need the same actors."""

    @property
    def unit(self) -> str:
        units = {turn.pattern.unit for turn in self.turns.values()}
        return units.pop() if len(units) == 1 else ""

    def actors(self, one: Contestant) -> tuple[str, Device, int, int]:
        """The actors that it needs: whose, for which tensors, how many, and the methods that each may run at once."""
        pattern = next(iter(self.turns.values())).pattern
        if one.alone:
            return one.name, self.device, 1, 1
        is_beside = pattern.busy is not None or pattern.is_together  # methods run while others of the actor run
        return one.name, self.device, pattern.members, RAY_THREADS if one.link == "ray" and is_beside else 1


def make_jobs(
    devices: Sequence[Device], patterns: Sequence[Pattern], sizes: Sequence[int], window_s: float
) -> list[Job]:
    """A case for each device and pattern, with turns of ``window_s`` seconds."""
    return [
        Job(device, one.name, {size: Turn(one, device, size, window_s) for size in ((0,) if one.is_idle else sizes)})
        for device in devices
        for one in patterns
    ]


class Options(NamedTuple):
    """What a run measures, before the limits of the machine apply."""

    contestants: Sequence[Contestant]
    jobs: Sequence[Job]
    budget_s: float
    hosts: Sequence[str] = ()
    rounds: int = 5


def make_options(
    *,
    pattern: Sequence[str] = (),
    rows: Sequence[str] = (),
    sizes: Sequence[str] = (),
    device: str = "all",
    quick: bool = False,
    budget_s: float | None = None,
    hosts: Sequence[str] = (),
    peers: Sequence[str] = (),
) -> Options:
    """Parse the user's options; items of lists may hold commas. Raises ConfigurationError with one line."""
    if device not in ("cpu", "cuda", "all"):
        raise ConfigurationError(f"device {device!r} is not one of cpu, cuda, all")
    if hosts and hosts[0] == hosts[1]:
        raise ConfigurationError("hosts must be two different Ray nodes, each given by id, address or host name")
    if peers and (pattern or rows or sizes or hosts or device == "cuda"):
        raise ConfigurationError("--peers measures rows of its own, with CPU tensors on one host; leave out the rest")
    devices: list[Device] = [each for each in DEVICES if device in (each, "all")]
    window_s = 0.1 if quick else 0.3 if pattern or peers else 0.05
    given = sorted({0 if pattern and text in ("0", "nothing") else parse_size(text) for text in _split(sizes)})
    if peers:
        contestants = choose(["raytorchrpc", "ray", *_split(peers)], PEERS)
        check_monarch()
        turns: dict[Size, Turn] = {name: Turn(*one, window_s) for name, one in BESIDE_PEERS.items()}
        jobs = [Job("cpu", "calls beside peers", turns)]
    elif pattern:
        contestants = choose(_split(rows) or "*", CALLS)
        variants, wanted = known_patterns(quick), ["*" if name == "all" else name for name in _split(pattern)]
        chosen = [one for name in matching("pattern", wanted, [*variants]) for one in variants[name]]
        jobs = make_jobs(devices, chosen, given or (_QUICK_PAYLOADS if quick else _PAYLOADS), window_s)
    else:
        contestants = choose(_split(rows) or (QUICK if quick else "*"), LINKS)
        usual = _QUICK_SIZES if quick else published_sizes()
        jobs = make_jobs(devices, [Pattern("tensors")], given or usual, window_s)
    if not any(job.device in one.devices for job in jobs for one in contestants):
        names = ", ".join(one.name for one in contestants)
        raise ConfigurationError(f"none of the rows {names} carries {device} tensors")
    if budget_s is None:
        budget_s = (PATTERN_BUDGETS_S if pattern or peers else BUDGETS_S)[quick]
    return Options(contestants, jobs, budget_s, hosts, rounds=3 if quick else 5)


def check_monarch() -> None:
    """Raises ConfigurationError, with the remedy, if Monarch cannot be imported here."""
    tried = subprocess.run([sys.executable, "-c", "import monarch.actor"], capture_output=True, text=True, check=False)
    if tried.returncode:
        why = (tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"])[-1]
        raise ConfigurationError(
            f"Monarch cannot be imported beside torch {version('torch')} ({why}); releases of both belong together: "
            "pip install '.[peers]' in a checkout, or 'torchmonarch==0.7.*' 'torch==2.13.*'"
        )


def _split(texts: Sequence[str]) -> list[str]:
    """The items of lists with commas."""
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def parse_size(text: str) -> int:
    """Bytes of ``1250``, ``1.25KB``, ``2.5 GB`` (powers of 1000) or ``8MiB`` (of 1024). Raises ConfigurationError."""
    size = size_in_bytes(text)
    if size is None or not 1 <= size <= MAX_SIZE:
        raise ConfigurationError(f"size {text!r} is not a number of bytes up to {show_size(MAX_SIZE)}, such as 1.25MB")
    return size
