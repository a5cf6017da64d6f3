"""Runs a scenario, strikes it with faults, waits until the group is whole again, and judges what was noted."""

from __future__ import annotations

import os
import random
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

# Read by Ray when it starts; nothing here may report anything to anybody.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray

import raytorchrpc as rtr
from tests.faults import strangers
from tests.faults.control import Board, Died, Remote
from tests.faults.faults import Fault, Kill, PowerOff, Siege, Strike, random_faults
from tests.faults.hands import Hand, Here
from tests.faults.judging import SLACK_S, Life, judge, judge_memory, judge_rest
from tests.faults.records import Record, read
from tests.faults.report import Change, Report, Struck, survivals
from tests.faults.roles import RPC_TIMEOUT_S
from tests.faults.scenarios import NEAR, SCENARIOS, Plan, Scenario
from tests.faults.worker import AsyncWorker, Worker
from tests.polling import allowed
from tests.ray.local_ray import local_ray

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
#: A role has that long to do what is asked of it between two steps of a round; in a lasting scenario it has to.
_STEP_S, _GO_ON_S = 10.0, 30.0
#: How often a role does something between two steps.
_LEAST = 6
#: And to come to its end once everything is closed.
_END_S = 30.0
#: Rounds between two looks at what the processes hold.
_REST_EVERY = 5


class Running:
    """The group. Use ``running``."""

    def __init__(
        self,
        scenario: Scenario,
        group: rtr.Group,
        actors: dict[str, Any],
        board: Board,
        directory: Path,
        seed: int,
        hand: Hand,
        pooled: int,
    ) -> None:
        self.scenario, self.group, self.board, self.directory, self.hand = scenario, group, board, directory, hand
        self.report = Report()
        self.records: list[Record] = []
        """Of the last round."""
        self.deaf = False
        """Somebody was, after a round: what would come then tells nothing more."""
        self.draw = random.Random(seed)
        self.began = time.monotonic()
        """When the last round did."""
        self._changes: list[Change] = []
        self._changed = threading.Condition()
        self._seed, self._rounds, self._read, self._pooled = seed, 0, 0, pooled
        self.remotes: dict[str, Remote] = {}
        self._lives: dict[tuple[str, int], Remote] = {}
        self._rest: dict[Remote, tuple[dict[str, Any], int]] = {}
        """What each held when it was first looked at, and ``_silent`` at that time."""
        self._memory: dict[tuple[str, int], int] = {}
        self._silent = 0
        """Processes of members whose host has lost its power."""
        group.on_change(self._note)
        for name in actors:
            remote = board.await_process(name, None, PATIENCE_S)
            assert remote is not None, f"{name} never came up"
            self.remotes[name] = remote

    def others(self, member: str) -> list[str]:
        return [name for name in self.scenario.names if name != member]

    def violated(self, what: str) -> None:
        self.report.violations.append(f"round {self._rounds}: {what}")

    def _note(self, change: Any) -> None:
        with self._changed:
            self._changes.append(Change(time.monotonic(), change.kind, change.members))
            self._changed.notify_all()

    def await_change(self, member: str, kind: str, since: float, seconds: float) -> float | None:
        """When the group told it, or None."""

        def told() -> float | None:
            return next((c.at for c in self._changes if c.at >= since and c.kind == kind and member in c.members), None)

        with self._changed:
            self._changed.wait_for(lambda: told() is not None, seconds)
            return told()

    def await_end(self, remote: Remote) -> None:
        """Of its process."""
        if not self.board.await_end(remote, PATIENCE_S):
            self.violated(f"{remote.name} (pid {remote.pid} of {remote.host}) is still there")

    def answered(self, future: Future[Any], what: str, remote: Remote) -> Any:
        """Its result; None if the process ended. Neither in time: a hang, and all stacks are written."""
        try:
            return future.result(PATIENCE_S)
        except Died:
            return None
        except TimeoutError:
            self._hung(what, remote)
        except AssertionError as error:
            self.violated(f"{what}: {error}")
        return None

    def _hung(self, what: str, remote: Remote) -> None:
        self.violated(f"HANG: {what} (pid {remote.pid}; see {self.directory / remote.name}.stacks)")
        self.hand.signal(remote.host, remote.pid, signal.SIGUSR1)

    def _ask_all(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Of the members that are there; what they answered."""
        asked = {name: (remote, remote.ask(command, **arguments)) for name, remote in self.remotes.items()}
        return {name: self.answered(future, f"{command} of {name}", remote) for name, (remote, future) in asked.items()}

    def doors(self, member: str) -> list[strangers.Door]:
        """Those that ask for the secret, and that can be reached from here."""
        near = self.remotes[member].host == socket.gethostname()
        doors = strangers.doors(self.group, member)
        return [door for door in doors if door.lane != "torchrpc" and (near or not isinstance(door.where, str))]

    def undo_later(self, when: float, undo: Callable[[], object], healing: ExitStack) -> None:
        """At this time; ``healing`` waits for it."""

        def heal() -> None:
            try:
                undo()
            except Exception as error:
                self.violated(f"could not be undone: {error!r}")

        timer = threading.Timer(max(0.0, when - time.monotonic()), heal)
        timer.start()
        healing.callback(timer.join)

    # --- one round --------------------------------------------------------------------------------------------------

    def round(self, faults: Sequence[Fault]) -> list[Struck]:
        """Load, strike, wait until the group is whole, and judge. Violations are added to the report."""
        self._rounds += 1
        self.began, scenario = time.monotonic(), self.scenario
        number = self._seed * 100_000 + self._rounds
        plan = scenario.plan(scenario, self._seed, self._rounds)._replace(number=number)
        struck, before = [Struck(fault) for fault in faults], dict(self.remotes)
        first = [one for one in struck if scenario.idle_first and one.fault.at == "idle"]
        over = threading.Event()
        with ExitStack() as healing:
            for one in first:
                self._strike(one, number, healing)
            if not scenario.lasting or self._rounds == 1:
                self._ask_all("begin", plan=plan)
            watchers = [
                threading.Thread(target=self._begin_again, args=(name, plan, over), daemon=True) for name in before
            ]
            strikers = [
                threading.Thread(target=self._strike_in_the_middle, args=(one, number, healing), daemon=True)
                for one in struck
                if one not in first
            ]
            for thread in (*watchers, *strikers):
                thread.start()
            for thread, one in zip(strikers, [one for one in struck if one not in first], strict=True):
                thread.join(PATIENCE_S + getattr(one.fault, "seconds", 0.0))
                if thread.is_alive():
                    self.violated(f"the fault could not be made: {one}")
            if not scenario.lasting:
                self._ask_all("more", least=_LEAST, seconds=_STEP_S)
        self._gather(struck, before)
        over.set()
        for thread in watchers:
            thread.join(PATIENCE_S)
        for name, missing in self._ask_all("more", least=2, seconds=_GO_ON_S if scenario.lasting else _STEP_S).items():
            if missing and scenario.lasting:
                self.violated(f"{name} did not go on within {_GO_ON_S} s: {missing}")
        if not scenario.lasting:
            self._end()
        self.report.struck += struck
        self.calm()
        self._judge(plan, struck)
        self.report.seconds += time.monotonic() - self.began
        return struck

    def _begin_again(self, name: str, plan: Plan, over: threading.Event) -> None:
        """Each new process makes what it is the home of at once, as the one before it had, and plays its roles."""
        last: Remote = self.remotes[name]
        while not over.is_set():
            there = self.board.await_process(name, last, 0.3)
            if there is not None:
                last = there
                self.answered(there.ask("begin", plan=plan), f"{name} begins again", there)

    def _strike_in_the_middle(self, one: Struck, number: int, healing: ExitStack) -> None:
        """When a member has done some more, or at once if the fault has a time of its own."""
        if not one.fault.absent:
            with self._changed:
                observer, least = self.draw.choice(self.scenario.names), self.draw.randrange(1, 8)
            remote = self.remotes[observer]
            self.answered(remote.ask("more", least=least, seconds=0.5), f"{observer} goes on", remote)
        self._strike(one, number, healing)

    def _strike(self, one: Struck, number: int, healing: ExitStack) -> None:
        try:
            one.fault.strike(Strike(self, one, number, healing))
        except Exception as error:
            self.violated(f"{one.fault}: {error!r}")

    def _end(self) -> None:
        """Of all roles: streams are closed once nothing is put any more."""
        for command, arguments in (
            ("stop_producing", {"seconds": _END_S}),
            ("close", {}),
            ("close_streams", {}),
            ("end", {"seconds": _END_S}),
        ):
            for name, hung in self._ask_all(command, **arguments).items():
                if hung:
                    self._hung(f"{command}: {name}: {hung}", self.remotes[name])

    # --- afterwards -------------------------------------------------------------------------------------------------

    def _gather(self, struck: Sequence[Struck], before: dict[str, Remote]) -> None:
        """Who was killed is back, and nobody else was lost."""
        killed: dict[str, Struck] = {}
        for one in struck:
            if isinstance(one.fault, PowerOff) and one.landed:
                host = before[one.fault.member].host
                killed.update({name: one for name, remote in before.items() if remote.host == host})
        killed.update({one.fault.member: one for one in struck if isinstance(one.fault, Kill) and one.landed})
        parted = {before[one.fault.member].host for one in struck if one.fault.may_part}
        if socket.gethostname() in parted:  # all others are out of reach from here
            parted |= {remote.host for remote in before.values()}
        for name, remote in before.items():
            if name in killed:
                died = killed[name].at or remote.died or time.monotonic()
                lost = self.await_change(name, "lost", died, PATIENCE_S)
                if lost is None:
                    self.violated(f"nobody said that {name} was lost")
                else:
                    killed[name].detected = max(killed[name].detected or 0.0, lost - died)
            elif remote.died is not None:
                starved = [one for one in struck if one.fault.member == name and one.fault.may_kill]
                if not starved:
                    self.violated(f"SURVIVOR LOST: {name} (pid {remote.pid}); {struck}")
                killed[name] = starved[0] if starved else Struck(Kill(name))
            elif self.await_change(name, "lost", self.began, 0) is None:
                pass
            elif remote.host not in parted:
                self.violated(f"{name} was said to be lost, and lived; {struck}")
            elif self.await_change(name, "back", self.began, REJOIN_S) is None:
                self.violated(f"{name} could be reached again, and is not back")
        # Without power nobody hangs up: what the lost ones connected is found to be silent after 15 s, later than this.
        self._silent += sum(isinstance(one.fault, PowerOff) for one in killed.values())
        for name, one in killed.items():
            remote = before[name]
            died = one.at or remote.died or time.monotonic()
            there = self.board.await_process(name, remote, REJOIN_S)
            back = self.await_change(name, "back", died, REJOIN_S)
            if there is None or back is None:
                raise RuntimeError(f"{name} did not come back: {there} {back}; {self.report.violations}")
            self.remotes[name] = there
            took = there.born - died, back - died
            if one.rejoined is None or one.born is None or took[1] - took[0] > one.rejoined - one.born:
                one.born, one.rejoined = took

    def calm(self) -> None:
        """The group is whole: everybody reaches everybody, and waits end in time."""
        known = len(self.report.violations)
        try:
            self.group.wait_ready(REJOIN_S)
        except rtr.RayTorchRpcError as error:
            self.violated(str(error))
        failed = self._everybody("calm", list(self.remotes))
        # A connection of TensorPipe's that broke, or one that a partition outlasted, shows with the next call on it,
        # and costs that one alone.
        broke = [one for one in failed if one["verdict"] == "PeerLost" and any(text in one["text"] for text in _BROKEN)]
        again = self._everybody("calm-again", sorted({one["member"] for one in broke}))
        for one in [*(one for one in failed if one not in broke), *again]:
            self.violated(f"in the calm: {one}")
        if len(self.report.violations) > known:
            self.deaf = True
            self.violated("DEAF: a member that lives answers nobody, or is not heard by others; see above")
        else:
            self._ask_all("alarm", number=self._rounds)

    def _everybody(self, label: str, names: Sequence[str]) -> list[dict[str, Any]]:
        """Each of these calls all others; the calls that failed."""
        asked = {
            name: self.remotes[name].ask(
                "everybody",
                group=self.group.name,
                label=f"{self._seed}-{self._rounds}-{label}",
                peers=self.others(name),
                timeout=15,
            )
            for name in names
        }
        return [
            outcome
            for name, future in asked.items()
            for outcome in self.answered(future, f"calm calls of {name}", self.remotes[name]) or ()
        ]

    def _judge(self, plan: Plan, struck: Sequence[Struck]) -> None:
        for name, life in self._ask_all("life").items():
            if life is not None:
                self._lives[name, life] = self.remotes[name]
        self.records, self._read = read(self.directory / "records", self._read)
        self.report.count(self.records)
        if self.scenario.lasting:
            self.report.went_on += survivals(struck, self.records)
        found = judge(
            self.records,
            self._life_spans(),
            {of.name: of for of in plan.objects if of.kind == "weights"},
            starved=any(one.fault.may_kill for one in struck),
            parted=any(one.fault.may_part for one in struck),
            besieged=any(isinstance(one.fault, Siege) for one in struck),
            slack_s=allowed(SLACK_S),
        )
        for text in (*found, *judge_memory(self.records, self._memory)):
            self.violated(text)

    def _life_spans(self) -> dict[tuple[str, int], Life]:
        """A life that is not known by its process was over when the next one began."""
        spans = {key: Life(remote.died, remote.killed) for key, remote in self._lives.items()}
        for name, life in list(spans):
            for earlier in range(1, life):
                if (name, earlier) not in spans:
                    spans[name, earlier] = Life(self._lives[name, life].born)
        return spans

    def rest(self) -> None:
        """Everybody comes to rest; survivors hold what they held before."""
        if not self.scenario.rests:
            return
        for name, remote in self.remotes.items():
            connected = remote.ask("connect", peers=self.others(name))
            self.answered(connected, f"torchrpc connections of {name}", remote)
        for name, left in self._ask_all("left", seconds=15).items():
            remote = self.remotes[name]
            if left is not None:
                first, silent = self._rest.setdefault(remote, (left, self._silent))
                for text in judge_rest(first, left, self._silent - silent, self._pooled):
                    self.violated(f"{name} (pid {remote.pid}): {text}")


@contextmanager
def running(
    scenario: Scenario, directory: Path, seed: int, route: str = "default", hand: Hand | None = None, **config: Any
) -> Iterator[Running]:
    """A group of restartable actors; Ray runs.

    ``route``: of ``LANES``; ``config``: other settings of the group. ``hand``: there are several hosts, and it strikes
    them; ``NEAR`` are here, and the others on hosts that have Ray's resource "away".
    """
    directory.mkdir(exist_ok=True)
    board = Board(directory / "board")
    actors = {}
    for name in scenario.names:
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1}
        if name in scenario.threaded:
            options["max_concurrency"] = 4
        if hand is not None and name not in NEAR:
            options |= {"resources": {"away": 1}, "scheduling_strategy": "SPREAD"}
        elif hand is not None:
            options |= {"resources": {socket.gethostname(): 1}}
        cls = AsyncWorker if name in scenario.on_loops else Worker
        actors[name] = ray.remote(cls).options(**options).remote(name, board.path, str(directory))
    settings = {"shm_bytes": 80 << 20, "rpc_timeout_s": RPC_TIMEOUT_S, **LANES[route], **config}
    try:
        with rtr.init_group(
            actors, name=f"faults-{seed}", config=rtr.GroupConfig(**settings), timeout=PATIENCE_S
        ) as group:
            pooled = settings["shm_bytes"] if route == "nixl" else 0  # of memory that it has registered
            run = Running(scenario, group, actors, board, directory, seed, hand or Here(), pooled)
            run.calm()
            run.rest()
            yield run
            if scenario.lasting:
                run._end()
    finally:
        for actor in actors.values():
            ray.kill(actor)
        board.close()


def run_faults(
    name: str,
    faults: Sequence[Sequence[Fault]] | int,
    seed: int,
    route: str = "default",
    seconds: float = float("inf"),
    *,
    directory: Path | None = None,
    hand: Hand | None = None,
    loud: bool = False,
    **config: Any,
) -> Report:
    """Run a scenario, and strike it in rounds with these faults, or with so many random ones; Ray runs already.

    ``route``, ``hand`` and ``config``: see ``running``. Stops early where the group cannot go on, and after so many
    seconds.
    """
    scenario = SCENARIOS[name]
    directory = directory or Path(tempfile.mkdtemp(prefix="faults-"))
    if isinstance(faults, int):
        table = scenario.faults.here if hand is None else scenario.faults.on_hosts
        spared = "" if scenario.kills_all else scenario.names[0]
        faults = random_faults(seed, faults, scenario.names, table, spared, NEAR, scenario.at_once)
    with running(scenario, directory, seed, route, hand, **config) as run:
        report = run.report
        for number, struck in enumerate(faults, 1):
            known, over = len(report.violations), number == len(faults)
            try:
                run.round(struck)
                over = over or run.deaf or report.seconds > seconds
                if over or number % _REST_EVERY == 0:
                    run.rest()
            except RuntimeError as error:
                over = True
                run.violated(f"ENDED EARLY: {error}")
            if loud:
                print(f"{number:>4} {len(report.struck):>4} {report.seconds:7.1f} s  {list(struck)}", flush=True)
                for text in report.violations[known:]:
                    print(f"      !! {text[:700]}", flush=True)
            if over:
                break
        return report


@contextmanager
def ray_here(among_hosts: bool = False) -> Iterator[None]:
    """A Ray. One that runs already is used, and left as it is. ``among_hosts``: there is one over several hosts."""
    if ray.is_initialized():
        yield
    elif among_hosts:
        ray.init("auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
        try:
            yield
        finally:
            ray.shutdown()
    else:
        with local_ray():
            yield
