"""The members that the faults strike: each calls all others, checks every byte, and notes what it runs.

In a module of its own, so that Ray's workers import it by name.
"""

from __future__ import annotations

import asyncio
import faulthandler
import ipaddress
import os
import random
import resource
import signal
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import raytorchrpc as rtr
from benchmarks._resources import held, measurable_memory, settle
from raytorchrpc.calls.member import process_member
from tests.faults.control import Control
from tests.faults.faults import KB, MB

#: What is called for, how often in a hundred, and the bytes that go with it.
KINDS: dict[str, tuple[int, int]] = {
    "check empty": (28, 8), "check in band": (20, 100 * KB), "check beside": (16, 2 * MB), "check large": (1, 44 * MB),
    "relay": (12, 20 * KB), "give": (10, 1 * MB), "again": (13, 50 * KB),
}  # fmt: skip
RETRIES = 3
BEAT_S = 0.05

_control: Control | None = None
_passed: set[str] = set()


class Corrupt(Exception):
    """What arrived is not what was sent."""


class Hook:
    """Travels in a call's arguments or result, and tells when it is pickled and when it has arrived."""

    def __init__(self, key: str, at: str) -> None:
        self.key, self.at = key, at

    def __reduce__(self) -> Any:
        if self.at in ("sending", "mid-transfer", "replying"):
            tell(self.key, hold=self.at == "sending")
        return _arrived, (self.key, self.at)


def _arrived(key: str, at: str) -> str:
    if at == "receiving":
        tell(key, hold=True)
    return at


def tell(key: str, hold: bool) -> None:
    """The moment has come, for the first time."""
    if key not in _passed:
        _passed.add(key)
        assert _control is not None
        _control.moment(key, hold)


def payload(number: int, size: int) -> torch.Tensor:
    """Int64, like no other."""
    return torch.arange(number, number + size // 8)


def crc(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.numpy().data)


class Worker:
    """``log``: where every run of a method is noted, in one write, so that it outlives the process."""

    def __init__(self, name: str, control: str, log: str) -> None:
        global _control
        torch.set_num_threads(1)
        measurable_memory()
        self.name = name
        self._kept: list[torch.Tensor] = []
        self._log = os.open(log, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        # Where a hang or a crash is looked into: SIGUSR1 writes all stacks there, and what ends the process says why.
        self._stacks = Path(f"{log}.{name}.stacks").open("a")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, self._stacks, all_threads=True)
        faulthandler.enable(self._stacks)
        os.dup2(self._stacks.fileno(), 2)
        self._over: set[int] = set()
        """Loads that may end; the word may come before the load has begun."""
        self._lags: list[tuple[float, float]] = []
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        threading.Thread(target=self._beat, name="test-beat", daemon=True).start()
        _control = Control(control, name, self)

    def _beat(self) -> None:
        """Notes when this process stood still: stopped, or short of processors."""
        pause = threading.Event()
        while True:
            before = time.monotonic()
            pause.wait(BEAT_S)
            now = time.monotonic()
            if now - before > 3 * BEAT_S:
                self._lags.append((before, now))
                del self._lags[:-200]

    # --- for the other members -------------------------------------------------------------------------------

    def _ran(self, call: str) -> None:
        os.write(self._log, f"{call} {os.getpid()}\n".encode())

    def _checked(self, call: str, tensor: torch.Tensor, check: int) -> torch.Tensor:
        self._ran(call)
        if crc(tensor) != check:
            raise Corrupt(f"{call}: the argument")
        return tensor.bitwise_not_()

    @rtr.method
    def check(self, call: str, tensor: torch.Tensor, check: int) -> tuple[str, torch.Tensor]:
        return call, self._checked(call, tensor, check)

    @rtr.method(retry=RETRIES)
    def again(self, call: str, tensor: torch.Tensor, check: int) -> tuple[str, torch.Tensor]:
        return call, self._checked(call, tensor, check)

    @rtr.method(concurrent=True)
    def relay(self, call: str, further: str, tensor: torch.Tensor, check: int) -> tuple[str, torch.Tensor]:
        self._ran(call)
        return call, rtr.rpc_sync(further).check(f"{call}>", tensor, check)[1]

    @rtr.method(concurrent=True)
    def give(self, call: str, number: int, size: int) -> tuple[str, torch.Tensor]:
        self._ran(call)
        return call, payload(number, size).bitwise_not_()

    @rtr.method(concurrent=True)
    def staged(self, call: str, at: str, tensor: torch.Tensor, check: int, hook: Any) -> tuple[str, torch.Tensor, Any]:
        return self._staged(call, at, tensor, check)

    def _staged(self, call: str, at: str, tensor: torch.Tensor, check: int) -> tuple[str, torch.Tensor, Any]:
        back = self._checked(call, tensor, check)
        if at == "executing":
            tell(call, hold=True)
        return call, back, Hook(call, at) if at == "replying" else None

    @rtr.method(concurrent=True)
    def keep(self, tensor: torch.Tensor) -> None:
        self._kept.append(tensor)

    # --- what the test commands --------------------------------------------------------------------------------

    def load(self, seed: int, peers: list[str], least: int, threads: int, most: int = 2000) -> dict[str, Any]:
        """Call the peers until it is enough, at least and at most so often; what became of each call."""
        outcomes: list[list[Any]] = []
        began = time.monotonic()
        callers = [
            threading.Thread(target=self._call_on, args=(seed, place, peers, (least, most), outcomes))
            for place in range(threads)
        ]
        for caller in callers:
            caller.start()
        with rtr.allow_calls():
            for caller in callers:
                caller.join()
        return {"outcomes": outcomes, "lags": [lag for lag in self._lags if lag[1] > began]}

    def enough(self, seed: int) -> None:
        """That load may end."""
        self._over.add(seed)

    def _call_on(
        self, seed: int, place: int, peers: list[str], bounds: tuple[int, int], outcomes: list[list[Any]]
    ) -> None:
        label = f"{seed}-{self.name}-{place}"
        draw = random.Random(label)
        count, (least, most) = 0, bounds
        while count < most and (count < least or seed not in self._over):
            window = []
            for _ in range(draw.choice((1, 1, 1, 6))):
                count += 1
                (kind,) = draw.choices(list(KINDS), [weight for weight, _ in KINDS.values()])
                target, further = draw.sample(peers, 2)
                timeout = draw.choice((1.0, 2.0, 4.0))
                size = KINDS[kind][1] * draw.randrange(1, 5) // 4
                call = f"{label}-{count}" + ("-again" if kind == "again" else "")
                window.append(self._begin(call, kind, target, further, timeout, size, count))
            outcomes += [finish() for finish in window]

    def _begin(
        self, call: str, kind: str, target: str, further: str, timeout: float, size: int, number: int
    ) -> Callable[[], list[Any]]:
        method = kind.split()[0]
        tensor = payload(number, 0 if method == "give" else size)
        args: tuple[Any, ...] = (tensor, crc(tensor))
        if method == "give":
            args = (number, size)
        elif method == "relay":
            args = (further, *args)
        began = time.monotonic()
        try:
            future = getattr(rtr.rpc_async(target, timeout=timeout), method)(call, *args)
        except Exception as error:
            outcome = _outcome(call, kind, target, began, timeout, error)
            return lambda: outcome

        def finish() -> list[Any]:
            # An answer that was there before anybody looked is not late.
            due = max(timeout, time.monotonic() - began)
            try:
                back, result = future.wait()
            except Exception as error:
                return _outcome(call, kind, target, began, due, error)
            sent = tensor if method != "give" else payload(number, size)
            wrong = _difference(call, back, sent.bitwise_not_(), result)
            return _outcome(call, kind, target, began, due, Corrupt(wrong) if wrong else None)

        return finish

    def stage(self, call: str, target: str, at: str, size: int, timeout: float) -> list[Any]:
        """One call with a moment in it."""
        tensor, began = payload(1, size), time.monotonic()
        error: BaseException | None = None
        try:
            hook = None if at in ("executing", "replying") else Hook(call, at)
            proxy = rtr.rpc_sync(target, timeout=timeout)
            _, result, _ = proxy.staged(call, at, tensor, crc(tensor), hook)
            if not torch.equal(result, tensor.bitwise_not_()):
                error = Corrupt(f"{call}: the result")
        except Exception as raised:
            error = raised
        return _outcome(call, f"staged {at}", target, began, timeout, error)

    def everybody(self, group: str, label: str, peers: list[str], timeout: float) -> list[list[Any]]:
        """One small and one larger call to each peer: what became of them. First it waits until it knows that all are
        there: one that stood still while another came back is told again a moment after it goes on.
        """
        rtr.get_group(group).wait_ready(timeout)
        outcomes = []
        for peer in peers:
            for kind in ("check empty", "check beside"):
                call = f"{label}-{self.name}-{peer}-{kind.replace(' ', '-')}"
                outcomes.append(self._begin(call, kind, peer, peer, timeout, KINDS[kind][1], 7)())
        return outcomes

    def connect(self, peers: list[str]) -> None:
        """Have a torchrpc connection to each, as when shared memory has no room."""
        for peer in peers:
            tensor = payload(1, 8)
            with suppress(rtr.LaneUnavailable):
                rtr.remote(peer, timeout=15).check(
                    f"{self.name}-{peer}-connects-{time.monotonic_ns()}", tensor, crc(tensor)
                ).to_here()

    def fill(self, peers: list[str], size: int) -> int:
        """Have the peers keep what they get from here, until it lies in shared memory no longer. Returns how many."""
        count = 0
        for count in range(1, 40):
            before = held().arena_used
            try:
                rtr.rpc_sync(peers[count % len(peers)], timeout=5).keep(payload(count, size))
            except rtr.RayTorchRpcError:
                continue
            if held().arena_used <= before:
                break
        return count

    def drop(self) -> None:
        """What was kept."""
        self._kept.clear()

    def limit(self, spare: int) -> int:
        """Allow so many more descriptors; returns the limit."""
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, self._limits[1]))
        return free + spare

    def unlimit(self) -> None:
        """As it was."""
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)

    def left(self, seconds: float) -> dict[str, Any]:
        """What this process holds, once it has come to rest."""
        restless = settle(seconds)
        now = held()
        names = sorted(name for name in now.python_threads if not name.startswith("test-"))
        local = process_member()
        far = sum(route.member.node_id != local.me.node_id for route in local.peers.routes)
        return {
            "restless": restless, "fds": now.fds, "threads": now.threads, "arena": now.arena_used,
            "under way": now.in_flight, "anonymous": now.anonymous, "objects": now.objects, "names": names,
            "by class": dict(now.by_class), "open": _descriptors(), "far": far,
        }  # fmt: skip


class AsyncWorker(Worker):
    """Its methods run on its loop."""

    @rtr.method
    async def check(self, call: str, tensor: torch.Tensor, check: int) -> tuple[str, torch.Tensor]:
        await asyncio.sleep(0)
        return call, self._checked(call, tensor, check)

    @rtr.method(concurrent=True)
    async def relay(self, call: str, further: str, tensor: torch.Tensor, check: int) -> tuple[str, torch.Tensor]:
        self._ran(call)
        _, back = await rtr.rpc_async(further).check(f"{call}>", tensor, check)
        return call, back

    @rtr.method(concurrent=True)
    async def staged(
        self, call: str, at: str, tensor: torch.Tensor, check: int, hook: Any
    ) -> tuple[str, torch.Tensor, Any]:
        return await asyncio.get_running_loop().run_in_executor(None, self._staged, call, at, tensor, check)


def _difference(call: str, back: str, expected: torch.Tensor, result: torch.Tensor) -> str:
    """Empty if it is the right answer; else what tells where the wrong one comes from: see ``payload``."""
    if back == call and torch.equal(result, expected):
        return ""
    if back != call or result.shape != expected.shape:
        return f"{call}: the answer to {back}, {tuple(result.shape)} instead of {tuple(expected.shape)}"
    wrong = (result != expected).nonzero()[:, 0]
    first, last = int(wrong[0]), int(wrong[-1])
    return (
        f"{call}: {len(wrong)} of {len(result)} wrong, from {first} to {last}: {(~result[wrong[:2]]).tolist()} ... "
        f"{(~result[wrong[-2:]]).tolist()} instead of {(~expected[wrong[:1]]).tolist()} on"
    )


def _outcome(call: str, kind: str, target: str, began: float, timeout: float, error: BaseException | None) -> list[Any]:
    verdict, lost = "ok", None
    if error is not None:
        ours = isinstance(error, rtr.RayTorchRpcError) and not isinstance(error, rtr.RemoteError)
        verdict = type(error).__name__ if ours else f"other: {error!r:.300}"
        lost = getattr(error, "may_have_run", None)
    return [call, kind, target, began, time.monotonic(), timeout, verdict, lost, str(error or "")[:200]]


def _descriptors() -> dict[str, int]:
    """How many of each kind are open."""
    found: dict[str, int] = {}
    connections = _connections()
    for fd in os.listdir("/proc/self/fd"):
        try:
            kind, _, number = os.readlink(f"/proc/self/fd/{fd}").partition(":[")
        except OSError:
            continue
        kind = connections.get(number.rstrip("]"), kind)
        found[kind] = found.get(kind, 0) + 1
    return found


def _connections() -> dict[str, str]:
    """Each TCP socket of this host by its inode: what it is connected to, and in which state."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, state, *_, inode = line.split()[:10]
        address = ipaddress.ip_address(bytes.fromhex(remote.split(":")[0])[::-1])
        found[inode] = f"TCP {address} in state {int(state, 16)}"
    return found
