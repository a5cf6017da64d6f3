"""A group whose members use each other's queues, topics and weights, while faults strike the homes and the users."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from tests.faults.control import Remote
from tests.faults.faults import (
    MAY_END,
    PATTERNS_HOSTS_TABLE,
    PATTERNS_LONG_TABLE,
    PATTERNS_TABLE,
    Fault,
    ShortOfMemory,
    Stop,
    may_part,
    random_faults,
)
from tests.faults.hands import Hand
from tests.faults.pattern_judging import Life, judge
from tests.faults.pattern_plan import Plan, random_plan
from tests.faults.pattern_records import read
from tests.faults.pattern_worker import PatternWorker
from tests.faults.report import Report, Struck
from tests.faults.running import NAMES, NEAR, PATIENCE_S, Running, running
from tests.faults.worker import Worker

#: A role has that long to do what is asked of it between two steps of a round.
_STEP_S = 10.0
#: So long after its timeout a reader of weights holds a version (docs/weights.md).
LEASE_S = 60.0
#: And to come to its end once everything is closed.
_END_S = 30.0


class PatternRunning(Running):
    """Four members, all of them threaded."""

    names: ClassVar[Sequence[str]] = NAMES[:4]
    scale = 1
    """Of the weights."""
    deaf = False
    """Somebody was, after a round: what would come then tells nothing more."""

    @staticmethod
    def member(place: int) -> tuple[type[Worker], dict[str, Any]]:
        """See Running."""
        return PatternWorker, {"max_concurrency": 4}

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._lives: dict[tuple[str, int], Remote] = {}
        self._read = 0
        self.report.verdicts = Counter()

    def round(self, faults: Sequence[Fault], least: int = 12) -> list[Struck]:
        """Begin what is planned, strike in the middle of it, wait until the group is whole, end all streams, judge."""
        self._rounds += 1
        number, began = self._seed * 100_000 + self._rounds, time.monotonic()
        # The one that is never killed is seldom a home.
        homes = [*self.names[1:], *self.names[1:], self.names[0]]
        plan = random_plan(self._seed, self._rounds, self.names, homes, self.scale)
        struck, before = [Struck(fault) for fault in faults], dict(self.remotes)
        over = threading.Event()
        self._ask_all("begin", plan=plan)
        self._ask_all("more", least=least, seconds=_STEP_S)
        watchers = [
            threading.Thread(target=self._begin_again, args=(name, plan, over), daemon=True) for name in self.names
        ]
        with ExitStack() as healing:
            for thread in watchers:
                thread.start()
            strikers = [
                threading.Thread(target=self._strike_in_the_middle, args=(one, number, healing), daemon=True)
                for one in struck
            ]
            for striker in strikers:
                striker.start()
            for striker in strikers:
                striker.join(PATIENCE_S)
        self._gather(struck, before, number, began)
        over.set()
        for thread in watchers:
            thread.join(PATIENCE_S)
        self.report.struck += struck
        self._ask_all("more", least=least, seconds=_STEP_S)
        self._end(plan)
        known = len(self.report.violations)
        self.calm(number)
        if len(self.report.violations) > known:
            self.deaf = True
            self._violated("DEAF: a member that lives answers nobody, or is not heard by others; see above")
        else:
            self._ask_all("alarm", number=number)
        self._judge_patterns(plan, struck)
        self.report.seconds += time.monotonic() - began
        return struck

    def _ask_all(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Of the members that are there; what they answered."""
        asked = {name: (remote, remote.ask(command, **arguments)) for name, remote in self.remotes.items()}
        return {name: self.answered(future, f"{command} of {name}", remote) for name, (remote, future) in asked.items()}

    def _begin_again(self, name: str, plan: Plan, over: threading.Event) -> None:
        """Each new process makes what it is the home of at once, as the one before it had."""
        last: Remote = self.remotes[name]
        while not over.is_set():
            there = self.board.await_process(name, last, 0.3)
            if there is not None:
                last = there
                self.answered(there.ask("begin", plan=plan), f"{name} begins again", there)

    def _strike_in_the_middle(self, one: Struck, number: int, healing: ExitStack) -> None:
        """When a member has done some more; who stands still for so long that its lease ends does so in a pull."""
        with self._lock:
            observer, least = self._draw.choice(self.names), self._draw.randrange(1, 12)
        remote = self.remotes[observer]
        self.answered(remote.ask("more", least=least, seconds=2.0), f"{observer} goes on", remote)
        if isinstance(one.fault, Stop) and one.fault.seconds > LEASE_S:
            target, key = self.remotes[one.fault.member], f"{number}-{one.fault.member}-pulls"
            if self.answered(target.ask("tell_of_pull", key=key), f"{target.name} tells", target):
                self.board.await_moment(key, 5.0)
        self._strike(one, number, healing, [])

    _lock = threading.Lock()

    def _struck(self, one: Struck, number: int, healing: ExitStack, outcomes: list[list[Any]]) -> None:
        fault = one.fault
        if not isinstance(fault, MAY_END):
            super()._struck(one, number, healing, outcomes)
            return
        remote = self.remotes[fault.member]
        others = [other for name, other in self.remotes.items() if name != fault.member]
        spare = fault.spare if isinstance(fault, ShortOfMemory) else None
        starved = remote.ask("starve", seconds=fault.seconds, spare=spare)
        if isinstance(fault, ShortOfMemory):
            burden = {"target": fault.member, "size": 2 * fault.spare, "tensor": fault.tensor, "seconds": 3.0}
            asked = [(others[0], others[0].ask("burden", **burden))]
        else:
            asked = [(other, other.ask("many_calls", target=fault.member, count=40, seconds=3.0)) for other in others]
        for other, future in asked:
            self.answered(future, f"round {number}: {fault}: a call by {other.name}", other)
        self.answered(starved, f"round {number}: {fault}", remote)

    def _end(self, plan: Plan) -> None:
        for command, arguments in (
            ("stop_producing", {"seconds": _END_S}),
            ("closing", {}),
            ("close_streams", {"plan": plan}),
            ("end", {"seconds": _END_S}),
        ):
            for name, hung in self._ask_all(command, **arguments).items():
                if hung:
                    remote = self.remotes[name]
                    self._violated(f"HANG: {command}: {name} (pid {remote.pid}; see {self.log}.{name}.stacks): {hung}")
                    self.hand.signal(remote.host, remote.pid, 10)  # all stacks

    def _judge_patterns(self, plan: Plan, struck: Sequence[Struck]) -> None:
        for name, life in self._ask_all("life").items():
            if life is not None:
                self._lives[name, life] = self.remotes[name]
        records = read(Path(f"{self.log}.records"), self._read)
        self._read += len(records)
        self.report.verdicts.update(
            f"{record.op} {record.verdict if not record.verdict.startswith('other') else 'other'}" for record in records
        )
        found = judge(
            records,
            self._life_spans(),
            {of.name: of for of in plan.objects if of.kind == "weights"},
            starved=any(isinstance(one.fault, MAY_END) for one in struck),
            parted=any(may_part(one.fault) for one in struck),
        )
        self.report.violations += [f"round {self._rounds}: {text}" for text in found]

    def _life_spans(self) -> dict[tuple[str, int], Life]:
        """A life that is not known by its process was over when the next one began."""
        spans = {key: Life(remote.died) for key, remote in self._lives.items()}
        for name, life in list(spans):
            for earlier in range(1, life):
                if (name, earlier) not in spans:
                    spans[name, earlier] = Life(self._lives[name, life].born)
        return spans


def run_patterns(
    directory: Path,
    seed: int,
    count: int,
    lanes: str = "default",
    seconds: float = math.inf,
    loud: bool = False,
    hand: Hand | None = None,
    long: bool = False,
) -> Report:
    """As ``run_random``. ``long``: members also stand still for more than a minute, and weights are larger."""
    table = PATTERNS_TABLE if hand is None else PATTERNS_HOSTS_TABLE
    with running(directory, seed, lanes, hand, PatternRunning) as run:
        if long:
            table, run.scale = PATTERNS_LONG_TABLE, 100
        rounds = random_faults(seed, count, run.names, never_killed=run.names[0], always_on=NEAR, table=table)
        for number, faults in enumerate(rounds, 1):
            known, over = len(run.report.violations), False
            try:
                run.round(faults)
            except RuntimeError as error:
                over = True
                run.report.violations.append(f"ENDED EARLY: {error}")
            if loud:
                done = len(run.report.struck)
                print(f"{number:>4} {done:>4}/{count} {run.report.seconds:7.1f} s  {list(faults)}", flush=True)
                for text in run.report.violations[known:]:
                    print(f"      !! {text[:700]}", flush=True)
            if over or run.deaf or run.report.seconds > seconds:
                break
        return run.report
