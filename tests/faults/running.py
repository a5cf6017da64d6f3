"""A group of six under load, the faults that strike it, and what must be true afterwards."""

from __future__ import annotations

import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import ray

import raytorchrpc as rtr
from tests.faults import garbage
from tests.faults.control import Board, Died, Remote
from tests.faults.faults import (
    AS_CALLER,
    MAY_END,
    MB,
    ArenaFull,
    Cable,
    Fault,
    FdLimit,
    Garbage,
    Kill,
    Partition,
    PowerOff,
    Silence,
    Stop,
    may_part,
)
from tests.faults.hands import Hand, Here
from tests.faults.judging import Rest, judge_calls, judge_rest, stood_still
from tests.faults.report import Change, Report, Struck
from tests.faults.worker import AsyncWorker, Worker

NAMES = ("c0", "c1", "c2", "c3", "c4", "c5")
#: Where there are several hosts, these are on the one of Ray's head, which keeps its power.
NEAR = ("c0", "c1")
#: The settings by which each lane carries the group's calls and tensors.
LANES: dict[str, dict[str, Any]] = {
    "default": {},
    "tcp": {"always_tcp": True},
    "torchrpc": {"lanes": ("torchrpc",)},
    "nng": {"lanes": ("nng",)},
    "nixl": {"lanes": ("socket", "nixl", "torchrpc")},
}
#: What errors of torchrpc's say, and of TCP between hosts that were parted.
_BROKEN = ("end of file", "broken pipe", "connection reset by peer", "[Errno 110] Connection timed out")
#: Nothing here is meant to last so long; what does, hangs (seconds).
PATIENCE_S = 90.0
REJOIN_S = 120.0
STAGED_S = 5.0


class Running:
    """The group. Use ``running``."""

    names: ClassVar[Sequence[str]] = NAMES

    @staticmethod
    def member(place: int) -> tuple[type[Worker], dict[str, Any]]:
        """Its class, and Ray's options for it: three run one method at a time, two have threads, one a loop."""
        return (AsyncWorker if place == 5 else Worker), ({"max_concurrency": 4} if place in (3, 4) else {})

    def __init__(
        self, group: rtr.Group, actors: dict[str, Any], board: Board, log: Path, seed: int, hand: Hand
    ) -> None:
        self.group, self.actors, self.board, self.log, self.hand = group, actors, board, log, hand
        self.report = Report()
        self.changes: list[Change] = []
        self._changed = threading.Condition()
        self._seed, self._rounds = seed, 0
        self._draw = random.Random(seed)
        self.remotes: dict[str, Remote] = {}
        self._rest: dict[Remote, Rest] = {}
        self.pooled = 0
        """What nixl may keep of memory that it has registered (bytes)."""
        self._silent = 0
        """Processes of members that have ended."""
        self._judged_lines = 0
        group.on_change(self._note)
        for name in actors:
            remote = board.await_process(name, None, PATIENCE_S)
            assert remote is not None, f"{name} never came up"
            self.remotes[name] = remote

    def _note(self, change: Any) -> None:
        with self._changed:
            self.changes.append(Change(time.monotonic(), change.kind, change.members))
            self._changed.notify_all()

    def _was_lost(self, member: str, since: float) -> bool:
        with self._changed:
            return any(c.at > since and c.kind == "lost" and member in c.members for c in self.changes)

    def _await_change(self, member: str, kinds: tuple[str, ...], since: float, seconds: float) -> float | None:
        """When it was told, or None."""

        def told() -> float | None:
            for change in self.changes:
                if change.at >= since and change.kind in kinds and member in change.members:
                    return change.at
            return None

        with self._changed:
            self._changed.wait_for(lambda: told() is not None, seconds)
            return told()

    # --- one round --------------------------------------------------------------------------------------------------

    def round(self, faults: Sequence[Fault], least: int = 12) -> list[Struck]:
        """Load, strike, wait until the group is whole, and judge. Violations are added to the report."""
        self._rounds += 1
        began = time.monotonic()
        number = self._seed * 100_000 + self._rounds
        struck = [Struck(fault) for fault in faults]
        before = dict(self.remotes)
        outcomes: list[list[Any]] = []
        lags: dict[str, list[Any]] = {}
        with ExitStack() as healing:
            early = [one for one in struck if getattr(one.fault, "at", "idle") == "idle"]
            for one in early:
                self._strike(one, number, healing, outcomes)
            loads = {
                name: remote.ask("load", seed=number, peers=[peer for peer in self.names if peer != name], least=least,
                                 threads=2)
                for name, remote in before.items()
            }  # fmt: skip
            strikers = [
                threading.Thread(target=self._strike, args=(one, number, healing, outcomes), daemon=True)
                for one in struck
                if one not in early
            ]
            for striker in strikers:
                striker.start()
            for striker in strikers:
                striker.join(PATIENCE_S)
                if striker.is_alive():
                    self._violated(f"round {number}: a fault could not be made: {faults}")
            for remote in before.values():
                remote.ask("enough", seed=number)
            for name, load in loads.items():
                answer = self.answered(load, f"round {number}: load of {name}", before[name])
                if answer is not None:
                    outcomes += [[name, *outcome] for outcome in answer["outcomes"]]
                    lags[name] = answer["lags"]
        for one in struck:
            if one.at is not None and one.caller_told is not None:
                one.caller_told -= stood_still(lags.get(one.caller, ()), one.at, one.at + one.caller_told)
        self._gather(struck, before, number, began)
        self.report.struck += struck
        self.calm(number)
        self._judge(outcomes, lags, number)
        self.report.seconds += time.monotonic() - began
        return struck

    def _violated(self, what: str) -> None:
        self.report.violations.append(what)

    def answered(self, future: Future[Any], what: str, remote: Remote, seconds: float = PATIENCE_S) -> Any:
        """Its result; None if the process ended. Neither in time: a hang, and all stacks are written."""
        try:
            return future.result(seconds)
        except Died:
            return None
        except TimeoutError:
            self._violated(f"HANG: {what} (pid {remote.pid}; see {self.log}.{remote.name}.stacks)")
            self.hand.signal(remote.host, remote.pid, signal.SIGUSR1)
        except AssertionError as error:
            self._violated(f"{what}: {error}")
        return None

    # --- striking ---------------------------------------------------------------------------------------------------

    def _strike(self, one: Struck, number: int, healing: ExitStack, outcomes: list[list[Any]]) -> None:
        try:
            self._struck(one, number, healing, outcomes)
        except Exception as error:
            self._violated(f"round {number}: {one.fault}: {error!r}")

    def _struck(self, one: Struck, number: int, healing: ExitStack, outcomes: list[list[Any]]) -> None:
        fault = one.fault
        remote = self.remotes[fault.member]
        peers = [name for name in self.names if name != fault.member]
        if isinstance(fault, (Kill, Stop, Cable, Partition, PowerOff)):
            if fault.at == "idle":
                self._signal(one, remote, healing)
                return
            call = f"{number}-staged-{fault.member}"
            other = self._draw.choice(peers)
            caller, callee = (fault.member, other) if fault.at in AS_CALLER else (other, fault.member)
            asked = self.remotes[caller].ask(
                "stage", call=call, target=callee, at=fault.at, size=fault.bytes, timeout=STAGED_S
            )
            if self.board.await_moment(call, STAGED_S + 2) is None:
                one.landed = False  # the call was struck by another fault before
            else:
                self._signal(one, remote, healing)
            self.board.remotes[fault.member].release(call)
            outcome = self.answered(asked, f"round {number}: {call} by {caller}", self.remotes[caller])
            if outcome is not None:
                outcomes.append([caller, *outcome])
                if isinstance(fault, (Kill, PowerOff)) and one.at is not None and outcome[6] == "PeerLost":
                    one.caller, one.caller_told = caller, outcome[4] - one.at
        elif isinstance(fault, ArenaFull):
            for peer in peers:
                healing.callback(lambda peer=peer: self.board.remotes[peer].ask("drop"))
            self.answered(remote.ask("fill", peers=peers, size=8 * MB), f"round {number}: {fault}", remote)
        elif isinstance(fault, FdLimit):
            self.answered(remote.ask("limit", spare=fault.spare), f"round {number}: {fault}", remote)
            healing.callback(lambda: self.answered(remote.ask("unlimit"), "unlimit", remote))
        elif isinstance(fault, Garbage):
            told = garbage.told_of(self.doors(fault.member)[0], garbage.credentials(self.group))
            garbage.throw_many(self.doors(fault.member), fault.seed, fault.connections, told)
        elif isinstance(fault, Silence):
            for door in self.doors(fault.member):
                for _ in range(fault.connections):
                    try:
                        healing.enter_context(door.dial())
                    except OSError:  # another host may be out of reach just now
                        if remote.host == socket.gethostname():
                            raise

    def doors(self, member: str) -> list[garbage.Door]:
        """Those that ask for the secret, and that can be reached from here."""
        near = self.remotes[member].host == socket.gethostname()
        doors = garbage.doors(self.group, member)
        return [door for door in doors if door.lane != "torchrpc" and (near or not isinstance(door.where, str))]

    def _signal(self, one: Struck, remote: Remote, healing: ExitStack) -> None:
        fault, hand, host = one.fault, self.hand, remote.host
        if isinstance(fault, Kill):
            one.at = hand.signal(host, remote.pid, signal.SIGKILL)
            self._await_end(remote)
        elif isinstance(fault, Stop):
            hand.signal(host, remote.pid, signal.SIGSTOP)
            self._later(fault.seconds, lambda: hand.signal(host, remote.pid, signal.SIGCONT), healing)
        elif isinstance(fault, Cable):
            hand.do("pull", host)
            self._later(fault.seconds, lambda: hand.do("plug in", host), healing)
        elif isinstance(fault, Partition):
            hand.do("part", host)
            self._later(fault.seconds, lambda: hand.do("join", host), healing)
        elif isinstance(fault, PowerOff):
            one.at = hand.do("power off", host)
            healing.callback(hand.do, "boot", host)
            self._await_end(remote)

    def _await_end(self, remote: Remote) -> None:
        if not self.board.await_end(remote, PATIENCE_S):
            self._violated(f"{remote.name} (pid {remote.pid} of {remote.host}) is still there")

    def _later(self, seconds: float, undo: Callable[[], object], healing: ExitStack) -> None:
        def heal() -> None:
            try:
                undo()
            except Exception as error:
                self._violated(f"could not be undone: {error!r}")

        timer = threading.Timer(seconds, heal)
        timer.start()
        healing.callback(timer.join)

    # --- afterwards -------------------------------------------------------------------------------------------------

    def _gather(self, struck: Sequence[Struck], before: dict[str, Remote], number: int, began: float) -> None:
        """Who was killed is back, and nobody else was lost."""
        killed: dict[str, Struck] = {}
        for one in struck:
            if isinstance(one.fault, PowerOff) and one.landed:
                host = before[one.fault.member].host
                killed.update({name: one for name, remote in before.items() if remote.host == host})
        killed.update({one.fault.member: one for one in struck if isinstance(one.fault, Kill) and one.landed})
        parted = {before[one.fault.member].host for one in struck if may_part(one.fault)}
        if socket.gethostname() in parted:  # all others are out of reach from here
            parted |= {remote.host for remote in before.values()}
        for name, remote in before.items():
            if name not in killed:
                starved = [one for one in struck if one.fault.member == name and isinstance(one.fault, MAY_END)]
                if remote.died is not None:
                    if not starved:
                        self._violated(f"round {number}: SURVIVOR LOST: {name} (pid {remote.pid}); {struck}")
                    killed[name] = starved[0] if starved else Struck(Kill(name))
                elif self._was_lost(name, began) and remote.host in parted:
                    if self._await_change(name, ("back",), began, REJOIN_S) is None:
                        self._violated(f"round {number}: {name} could be reached again, and is not back")
                elif self._was_lost(name, began):
                    self._violated(f"round {number}: {name} was said to be lost, and lived; {struck}")
                continue
            one = killed[name]
            died = one.at or remote.died or time.monotonic()
            lost = self._await_change(name, ("lost",), died, PATIENCE_S)
            if lost is None:
                self._violated(f"round {number}: nobody said that {name} was lost")
            else:
                one.detected = max(one.detected or 0.0, lost - died)
        # Without power nobody hangs up: what the lost ones connected is found to be silent after 15 s, later than this.
        self._silent += sum(isinstance(one.fault, PowerOff) for one in killed.values())
        for name, one in killed.items():
            remote = before[name]
            died = one.at or remote.died or time.monotonic()
            there = self.board.await_process(name, remote, REJOIN_S)
            back = self._await_change(name, ("back",), died, REJOIN_S)
            if there is None or back is None:
                self._violated(f"round {number}: {name} did not come back: {there} {back}")
                raise RuntimeError(f"{name} did not come back; {self.report.violations}")
            self.remotes[name] = there
            took = there.born - died, back - died
            if one.rejoined is None or one.born is None or took[1] - took[0] > one.rejoined - one.born:
                one.born, one.rejoined = took

    def calm(self, number: int) -> None:
        """The group is whole: everybody reaches everybody."""
        try:
            self.group.wait_ready(REJOIN_S)
        except rtr.RayTorchRpcError as error:
            self._violated(f"round {number}: {error}")
        failed = self._everybody(number, "calm", list(self.remotes))
        # A connection of TensorPipe's that broke, or one that a partition outlasted, shows with the next call on it,
        # and costs that one alone.
        broke = [one for one in failed if one[1][6] == "PeerLost" and any(text in one[1][8] for text in _BROKEN)]
        again = self._everybody(number, "calm-again", sorted({name for name, _ in broke}))
        for name, outcome in [*(one for one in failed if one not in broke), *again]:
            self._violated(f"round {number}: in the calm, {name}: {outcome}")

    def _everybody(self, number: int, label: str, names: Sequence[str]) -> list[tuple[str, list[Any]]]:
        """Each of these calls all others; who failed at what."""
        asked = {
            name: self.remotes[name].ask(
                "everybody",
                group=self.group.name,
                label=f"{number}-{label}",
                peers=[other for other in self.names if other != name],
                timeout=15,
            )
            for name in names
        }
        return [
            (name, outcome)
            for name, future in asked.items()
            for outcome in self.answered(future, f"round {number}: calm calls of {name}", self.remotes[name]) or ()
            if outcome[6] != "ok"
        ]

    def _judge(self, outcomes: list[list[Any]], lags: dict[str, list[Any]], number: int) -> None:
        lines = self.log.read_text().splitlines()
        fresh, self._judged_lines = lines[self._judged_lines :], len(lines)
        violations, verdicts, repeated, latest = judge_calls(outcomes, lags, fresh)
        self.report.latest = max(self.report.latest, latest)
        self.report.violations += [f"round {number}: {text}" for text in violations]
        self.report.verdicts.update(verdicts)
        self.report.repeated += repeated

    def rest(self) -> None:
        """Everybody comes to rest; survivors hold what they held before."""
        for name, remote in self.remotes.items():
            connected = remote.ask("connect", peers=[peer for peer in self.names if peer != name])
            self.answered(connected, f"torchrpc connections of {name}", remote)
        asked = {name: remote.ask("left", seconds=15) for name, remote in self.remotes.items()}
        for name, future in asked.items():
            remote = self.remotes[name]
            left = self.answered(future, f"rest of {name}", remote, 60)
            if left is None:
                continue
            first = self._rest.setdefault(remote, Rest(left, self._silent))
            self.report.violations += [
                f"{name} (pid {remote.pid}): {text}"
                for text in judge_rest(first, left, self._silent - first.silent, self.pooled)
            ]


R = TypeVar("R", bound=Running)


@contextmanager
def running(
    directory: Path, seed: int, route: str = "default", hand: Hand | None = None, kind: type[R] = Running, **config: Any
) -> Iterator[R]:
    """A group of restartable actors, those of ``kind``; Ray runs.

    ``route``: of ``LANES``; ``config``: other settings of the group. ``hand``: there are several hosts, and it strikes
    them; ``NEAR`` are here, and the others on hosts that have Ray's resource "away".
    """
    board = Board(directory / f"board-{seed}")
    log = directory / f"log-{seed}"
    log.touch()
    actors = {}
    for place, name in enumerate(kind.names):
        cls, own = kind.member(place)
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, **own}
        if hand is not None and name not in NEAR:
            options |= {"resources": {"away": 1}, "scheduling_strategy": "SPREAD"}
        elif hand is not None:
            options |= {"resources": {socket.gethostname(): 1}}
        actors[name] = ray.remote(cls).options(**options).remote(name, board.path, str(log))
    settings = {"shm_bytes": 80 << 20, "rpc_timeout_s": 10, **LANES[route], **config}
    try:
        with rtr.init_group(
            actors, name=f"faults-{seed}", config=rtr.GroupConfig(**settings), timeout=PATIENCE_S
        ) as group:
            run = kind(group, actors, board, log, seed, hand or Here())
            run.pooled = settings["shm_bytes"] if route == "nixl" else 0
            run.calm(0)
            run.rest()
            yield run
    finally:
        for actor in actors.values():
            ray.kill(actor)
        board.close()
