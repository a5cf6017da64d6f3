"""The members that the faults strike. In a module of its own, so that Ray's workers import it by name."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import resource
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import raytorchrpc as rtr
from benchmarks._resources import held, measurable_memory, settle
from tests import insides
from tests.faults.control import Control
from tests.faults.faults import MB
from tests.faults.records import Corrupt, Recorder, check_answer, crc, payload
from tests.faults.roles import KINDS, Roles, begin_call
from tests.faults.scenarios import Object, Plan

RETRIES = 3
_JOIN_S = 60.0
#: So little may be mapped that no thread's stack fits.
_NO_STACK = 3 * MB

_control: Control | None = None
_passed: set[str] = set()


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


class Worker:
    """``directory``: where every operation, and every run of a method, is noted."""

    def __init__(self, name: str, control: str, directory: str) -> None:
        global _control
        torch.set_num_threads(1)
        measurable_memory()
        self.name = name
        self._kept: list[torch.Tensor] = []
        self._made: dict[str, Any] = {}
        self._notes = Recorder(name, Path(directory))
        self._notes.write("start")
        self._joined = threading.Event()
        self._roles = Roles(self._notes, Plan(0, (), (), ()), self._made)
        # Where a hang or a crash is looked into: SIGUSR1 writes all stacks there, and what ends the process says why.
        self._stacks = Path(directory, f"{name}.stacks").open("a")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, self._stacks, all_threads=True)
        faulthandler.enable(self._stacks)
        os.dup2(self._stacks.fileno(), 2)
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        threading.Thread(target=self._notes.beat, name="test-beat", daemon=True).start()
        threading.Thread(target=self._await_membership, name="test-member", daemon=True).start()
        _control = Control(control, name, self._command)

    def _command(self, name: str) -> Any:
        return getattr(self if hasattr(self, name) else self._roles, name)

    def _await_membership(self) -> None:
        while not self._joined.is_set():
            with suppress(rtr.NotAMember):
                rtr.current_member()
                self._notes.write("member")
                self._joined.set()
            time.sleep(0.01)

    # --- for the other members -----------------------------------------------------------------------------------

    def _checked(self, call: str, tensor: torch.Tensor, check: int) -> tuple[str, int, torch.Tensor]:
        self._notes.write("ran", call)
        if crc(tensor) != check:
            raise Corrupt(f"{call}: the argument")
        return call, self._notes.life, tensor.bitwise_not_()

    @rtr.method
    def check(self, call: str, tensor: torch.Tensor, check: int) -> tuple[str, int, torch.Tensor]:
        return self._checked(call, tensor, check)

    @rtr.method(retry=RETRIES)
    def again(self, call: str, tensor: torch.Tensor, check: int) -> tuple[str, int, torch.Tensor]:
        return self._checked(call, tensor, check)

    @rtr.method(concurrent=True)
    def relay(self, call: str, further: str, tensor: torch.Tensor, check: int) -> tuple[str, int, torch.Tensor]:
        self._notes.write("ran", call)
        return call, self._notes.life, rtr.rpc_sync(further).check(f"{call}>", tensor, check)[2]

    @rtr.method(concurrent=True)
    def give(self, call: str, number: int, size: int) -> tuple[str, int, torch.Tensor]:
        self._notes.write("ran", call)
        return call, self._notes.life, payload(number, size).bitwise_not_()

    @rtr.method(concurrent=True)
    def staged(self, call: str, at: str, tensor: torch.Tensor, check: int, hook: Any) -> tuple[str, torch.Tensor, Any]:
        return self._staged(call, at, tensor, check)

    def _staged(self, call: str, at: str, tensor: torch.Tensor, check: int) -> tuple[str, torch.Tensor, Any]:
        _, _, back = self._checked(call, tensor, check)
        if at == "executing":
            tell(call, hold=True)
        return call, back, Hook(call, at) if at == "replying" else None

    @rtr.method(concurrent=True)
    def keep(self, tensor: torch.Tensor) -> None:
        self._kept.append(tensor)

    @rtr.method(concurrent=True)
    def life_of(self) -> int:
        """Of this process."""
        return self._notes.life

    @rtr.method(concurrent=True)
    def hand(self, of: list[Any]) -> tuple[Any, int] | None:
        """The handle that this home made, and the life of what it leads to; None before."""
        made = self._made.get(Object(*of).name)
        return None if made is None else (made, self._notes.life)

    @rtr.method(concurrent=True)
    def length(self, what: bytes | torch.Tensor) -> int:
        """Of what came."""
        return len(what)

    # --- what the test commands, beside ``Roles`` ------------------------------------------------------------------

    def begin(self, plan: list[Any]) -> None:
        """Make what this member is the home of, and play its roles, once it is in the group."""
        assert self._joined.wait(_JOIN_S), "this process is in no group"
        self._roles = Roles(self._notes, Plan.of(plan), self._made)

    def life(self) -> int:
        """As ``life_of``, when no member answers."""
        return self._notes.life

    def tell_of_pull(self, key: str) -> bool:
        """See Roles."""
        return self._roles.tell_of_pull(lambda: tell(key, hold=False))

    def stage(self, call: str, target: str, at: str, size: int, timeout: float) -> dict[str, Any]:
        """One call with a moment in it."""
        tensor, began = payload(1, size), time.monotonic()
        error: BaseException | None = None
        try:
            hook = None if at in ("executing", "replying") else Hook(call, at)
            back, result, _ = rtr.rpc_sync(target, timeout=timeout).staged(call, at, tensor, crc(tensor), hook)
            check_answer(call, back, tensor.bitwise_not_(), result)
        except Exception as raised:
            error = raised
        data = {"kind": f"staged {at}", "may_have_run": getattr(error, "may_have_run", None)}
        return self._notes.write("call", call, target, began=began, allowed=timeout, error=error, data=data)._asdict()

    def everybody(self, group: str, label: str, peers: list[str], timeout: float) -> list[dict[str, Any]]:
        """One small and one larger call to each peer: those that failed. First it waits until it knows that all are
        there: one that stood still while another came back is told again a moment after it goes on.
        """
        rtr.get_group(group).wait_ready(timeout)
        made = []
        for peer in peers:
            for kind in ("check empty", "check beside"):
                call = f"{label}-{self.name}-{peer}-{kind.replace(' ', '-')}"
                made.append(begin_call(self._notes, call, kind, peer, peer, timeout, KINDS[kind][1])())
        return [record._asdict() for record in made if record.verdict != "ok"]

    def connect(self, peers: list[str]) -> None:
        """Have a torchrpc connection to each, as when shared memory has no room."""
        for peer in peers:
            tensor, call = payload(1, 8), f"{self.name}-{peer}-connects-{time.monotonic_ns()}"
            with suppress(rtr.LaneUnavailable):
                rtr.remote(peer, timeout=15).check(call, tensor, crc(tensor)).to_here()

    def fill(self, peers: list[str], size: int) -> int:
        """Have the peers keep what they get from here, until it lies in shared memory no longer. Returns how many."""
        count = 0
        for count in range(1, 40):
            before = held()["arena"]
            try:
                rtr.rpc_sync(peers[count % len(peers)], timeout=5).keep(payload(count, size))
            except rtr.RayTorchRpcError:
                continue
            if held()["arena"] <= before:
                break
        return count

    def drop(self) -> None:
        """What was kept."""
        self._kept.clear()

    def limit(self, spare: int) -> None:
        """Allow so many more descriptors."""
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, self._limits[1]))

    def unlimit(self) -> None:
        """As it was."""
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)

    def starve(self, seconds: float, spare: int) -> None:
        """For so many seconds this process may map ``spare`` more bytes; 0: less than a thread's stack."""
        usual = resource.getrlimit(resource.RLIMIT_AS)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (spare or _NO_STACK), usual[1]))
        try:
            time.sleep(seconds)
        finally:
            while True:
                with suppress(MemoryError):
                    resource.setrlimit(resource.RLIMIT_AS, usual)
                    break

    def burden(self, target: str, size: int, tensor: bool, count: int, seconds: float) -> int:
        """So many calls at once, which need threads there, or memory of this size; how many came back."""
        came = 0
        try:
            what = torch.ones(size // 8, dtype=torch.int64) if tensor else bytes(size)
        except (MemoryError, RuntimeError):  # torch's; this process may be starved as well
            return came
        with suppress(rtr.RayTorchRpcError, MemoryError):
            peer = rtr.rpc_async(target, timeout=seconds)
            for future in [peer.length(what) for _ in range(count)]:
                with suppress(Exception):
                    future.wait()
                    came += 1
        return came

    def left(self, seconds: float) -> dict[str, Any]:
        """What this process holds, once it has come to rest."""
        restless = settle(seconds)
        now = held()
        names = sorted(each.name for each in threading.enumerate() if not each.name.startswith("test-"))
        return {
            "restless": restless, "fds": now["fds"], "threads": now["threads"], "arena": now["arena"],
            "under way": now["in flight"], "anonymous": now["anonymous"], "names": names,
            "far": insides.peers_elsewhere(),
        }  # fmt: skip


class AsyncWorker(Worker):
    """Its methods run on its loop."""

    @rtr.method
    async def check(self, call: str, tensor: torch.Tensor, check: int) -> tuple[str, int, torch.Tensor]:
        await asyncio.sleep(0)
        return self._checked(call, tensor, check)

    @rtr.method(concurrent=True)
    async def relay(self, call: str, further: str, tensor: torch.Tensor, check: int) -> tuple[str, int, torch.Tensor]:
        self._notes.write("ran", call)
        _, _, back = await rtr.rpc_async(further).check(f"{call}>", tensor, check)
        return call, self._notes.life, back

    @rtr.method(concurrent=True)
    async def staged(
        self, call: str, at: str, tensor: torch.Tensor, check: int, hook: Any
    ) -> tuple[str, torch.Tensor, Any]:
        return await asyncio.get_running_loop().run_in_executor(None, self._staged, call, at, tensor, check)
