"""The members whose queues, topics and weights the faults strike: each is a home, and uses what the others have."""

from __future__ import annotations

import resource
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import raytorchrpc as rtr
from tests.faults.control import start
from tests.faults.faults import MB
from tests.faults.pattern_plan import Object, Plan
from tests.faults.pattern_records import Journal, next_life
from tests.faults.pattern_roles import GRACE_S, Roles, make, new_weights
from tests.faults.worker import BEAT_S, Worker, tell

_JOIN_S = 60.0
#: Between two versions of weights.
_PUBLISH_S = 0.02
#: So little may be mapped that no thread's stack fits.
_NO_STACK = 3 * MB


class PatternWorker(Worker):
    """``log``: as for Worker; files beside it tell how often this member has begun, and what it did."""

    def __init__(self, name: str, control: str, log: str) -> None:
        self._life = next_life(f"{log}.{name}.lives")
        self._journal = Journal(f"{log}.records")
        self._lock = threading.Lock()
        self._made: dict[str, Any] = {}
        self._roles: Roles | None = None
        self._threads: dict[str, threading.Thread] = {}
        self._producers: list[threading.Thread] = []
        super().__init__(name, control, log)

    # --- for the other members -----------------------------------------------------------------------------------

    @rtr.method(concurrent=True)
    def life_of(self) -> int:
        """Of this process."""
        return self._life

    @rtr.method(concurrent=True)
    def hand(self, of: list[Any]) -> tuple[Any, int] | None:
        """The handle that this home made, and the life of what it leads to; None before."""
        made = self._made.get(Object(*of).name)
        return None if made is None else (made, self._life)

    @rtr.method(concurrent=True)
    def echo(self, number: int, tensor: torch.Tensor) -> tuple[int, int, torch.Tensor]:
        """What came, and the life added to the tensor."""
        return self._life, number, tensor.add_(self._life)

    @rtr.method(concurrent=True)
    def length(self, text: bytes) -> int:
        """Of what came."""
        return len(text)

    # --- what the test commands ----------------------------------------------------------------------------------

    def life(self) -> int:
        """As ``life_of``, when no member answers."""
        return self._life

    def begin(self, plan: list[Any]) -> None:
        """Make what this member is the home of, and play its roles, once it is in the group."""
        given = Plan.of(plan)
        self._await_membership()
        with self._lock:
            roles = self._roles = Roles(self.name, self._life, self._journal, self._lags, BEAT_S)
            self._threads, self._producers = {}, []
            for of in given.objects:
                if of.home == self.name:
                    self._made[of.name] = make(of)
                    if of.kind == "weights":
                        self._threads[f"publish {of.name}"] = start(
                            lambda of=of: self._publish(of, roles), "test-publish"
                        )
            for role in given.roles:
                if role.member == self.name:
                    of = next((one for one in given.objects if one.name == role.object), None)
                    of = of or Object("queue", "calls", role.object)
                    thread = start(lambda role=role, of=of: roles.play(role, of), f"test-{role.does}")
                    self._threads[f"{role.does} {role.how} {role.object} ({role.number})"] = thread
                    if role.does in ("produce", "publish"):
                        self._producers.append(thread)

    def _await_membership(self) -> None:
        until = time.monotonic() + _JOIN_S
        while True:
            try:
                rtr.current_member()
                return
            except rtr.NotAMember:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)

    def _publish(self, of: Object, roles: Roles) -> None:
        store = self._made[of.name]
        version = store.version()
        while not roles.closing:
            version += 1
            weights = new_weights(of, self._life, version)

            def publish(data: dict[str, Any], version: int = version, weights: Any = weights) -> None:
                data["version"] = store.publish(weights, version)

            verdict, _ = roles.note("publish", of, self._life, "", None, publish)
            version -= verdict != "ok"
            time.sleep(_PUBLISH_S)

    def more(self, least: int, seconds: float) -> bool:
        """Wait until each role has done so much more, at most so long; whether they have."""
        until = time.monotonic() + seconds
        roles = self._roles
        before = dict(roles.counts) if roles else {}
        while time.monotonic() < until:
            if roles and all(roles.counts.get(number, 0) - count >= least for number, count in before.items()):
                return True
            time.sleep(0.02)
        return False

    def tell_of_pull(self, key: str) -> bool:
        """This moment has come when the next pull begins; whether this member pulls."""
        roles = self._roles
        if roles is None or not any(name.startswith("read") for name in self._threads):
            return False
        roles.pulling = lambda: tell(key, hold=False)
        return True

    def stop_producing(self, seconds: float) -> list[str]:
        """Items are put no longer. Returns those that go on all the same after so many seconds."""
        roles = self._roles
        if roles is None:
            return []
        roles.producing_over.set()
        return _still_there({thread.name: thread for thread in self._producers}, seconds)

    def closing(self) -> None:
        """From now on streams may end, and what has no end of its own does."""
        if self._roles is not None:
            self._roles.closing = True

    def close_streams(self, plan: list[Any]) -> None:
        """Of the queues and topics that this member is the home of."""
        roles = self._roles
        assert roles is not None
        for of in Plan.of(plan).objects:
            if of.home == self.name and of.kind != "weights":
                made = self._made[of.name]
                roles.note("close", of, self._life, "", GRACE_S, lambda data, made=made: made.close(force=True))

    def end(self, seconds: float) -> list[str]:
        """Wait until all roles have come to their end. Returns those that have not after so many seconds."""
        hung = _still_there(self._threads, seconds)
        if self._roles is not None:
            self._roles.over.set()
        return hung

    def alarm(self, number: int) -> None:
        """A wait for nothing, at this home: it ends in time."""
        of = Object("queue", f"alarm-{number}", self.name)
        roles = self._roles or Roles(self.name, self._life, self._journal, self._lags, BEAT_S)
        roles.note("get", of, self._life, "", 0.3, lambda data: rtr.Queue(of.name, maxsize=1).get(0.3))

    # --- faults --------------------------------------------------------------------------------------------------

    def starve(self, seconds: float, spare: int | None) -> None:
        """For so many seconds this process may map ``spare`` more bytes; None: less than a thread's stack."""
        usual = resource.getrlimit(resource.RLIMIT_AS)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (_NO_STACK if spare is None else spare), usual[1]))
        try:
            time.sleep(seconds)
        finally:
            while True:
                with suppress(MemoryError):
                    resource.setrlimit(resource.RLIMIT_AS, usual)
                    break

    def burden(self, target: str, size: int, tensor: bool, seconds: float) -> str:
        """One large call; returns what came of it."""
        try:
            peer = rtr.rpc_sync(target, timeout=seconds)
            if tensor:
                peer.echo(1, torch.ones(size // 8, dtype=torch.int64))
            else:
                peer.length(bytes(size))
        except Exception as error:
            return type(error).__name__
        return "ok"

    def many_calls(self, target: str, count: int, seconds: float) -> int:
        """At once, so that more threads are needed there; how many came back."""
        futures = [rtr.rpc_async(target, timeout=seconds).life_of() for _ in range(count)]
        came = 0
        for future in futures:
            with suppress(Exception):
                came += bool(future.wait())
        return came


def _still_there(threads: dict[str, threading.Thread], seconds: float) -> list[str]:
    until = time.monotonic() + seconds
    for thread in threads.values():
        thread.join(max(0.0, until - time.monotonic()))
    return [name for name, thread in threads.items() if thread.is_alive()]
