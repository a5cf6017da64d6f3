"""What may happen to a group: which member is struck, how, and at which moment of which call.

``at`` names a moment of one call that is made for the purpose: the fault strikes when the member has told that the
moment has come, and never after a guess at how long something takes.

- ``idle``: no such call. ``sending``: the member pickles the arguments of its own call. ``mid-transfer``: it has, and
  the bytes are leaving.
- ``receiving``: it takes a call's arguments apart. ``executing``: it is in the method.
- ``replying``: it has pickled the result, and the bytes are leaving.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tests.faults import strangers

if TYPE_CHECKING:
    from tests.faults.control import Remote
    from tests.faults.report import Struck
    from tests.faults.running import Running

MOMENTS = ("idle", "sending", "mid-transfer", "receiving", "executing", "replying")
#: At these the member is the one that makes the call.
AS_CALLER = ("sending", "mid-transfer")
STAGED_S = 5.0
KB, MB = 1_000, 1_000_000
#: Below five seconds no member is lost (docs/failure-model.md).
CUTS_S = (0.3, 1.0, 3.0)
#: After about fifteen one is, though it lives (seconds).
OUTLASTING_S = 16.0
#: So long after its timeout a reader of weights holds a version (docs/weights.md).
LEASE_S = 60.0


class Strike(NamedTuple):
    """One fault in one round of a running group. ``healing`` undoes it."""

    run: Running
    struck: Struck
    number: int
    """Of the round."""
    healing: ExitStack

    @property
    def remote(self) -> Remote:
        return self.run.remotes[self.struck.fault.member]

    def ask(self, remote: Remote, command: str, **arguments: Any) -> Any:
        """What this process answers."""
        return self.run.answered(remote.ask(command, **arguments), f"round {self.number}: {self.struck.fault}", remote)


@dataclass(frozen=True)
class Fault:
    """One. A member has one at a time."""

    member: str

    at: ClassVar[str] = "idle"
    absent: ClassVar[str] = ""
    kills: ClassVar[bool] = False
    may_kill: ClassVar[bool] = False
    """It may end the process, if Ray's own threads cannot bear it; then it is lost, and Ray restarts it."""
    of_host: ClassVar[bool] = False
    """It strikes the member's host."""
    may_part: ClassVar[bool] = False
    """Members that live may be lost to the others by it."""

    def strike(self, on: Strike) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Staged(Fault):
    """Strikes at a moment of a call."""

    at: str = "idle"  # type: ignore[misc]
    bytes: int = 8
    """Of the tensor in the call."""

    def strike(self, on: Strike) -> None:
        if self.at == "idle":
            self.hit(on)
            return
        run, call = on.run, f"{on.number}-staged-{self.member}"
        other = run.draw.choice(run.others(self.member))
        caller, callee = (self.member, other) if self.at in AS_CALLER else (other, self.member)
        calling = run.remotes[caller]
        asked = calling.ask("stage", call=call, target=callee, at=self.at, size=self.bytes, timeout=STAGED_S)
        if run.board.await_moment(call, STAGED_S + 2) is None:
            on.struck.landed = False  # the call was struck by another fault before
        else:
            self.hit(on)
        run.board.remotes[self.member].release(call)
        told = run.answered(asked, f"round {on.number}: {call} by {caller}", calling)
        if told is not None and self.kills and on.struck.at is not None and told["verdict"] == "PeerLost":
            on.struck.caller_told = told["ended"] - on.struck.at - told["still"]

    def hit(self, on: Strike) -> None:
        """Strike now."""
        raise NotImplementedError


@dataclass(frozen=True)
class Kill(Staged):
    """SIGKILL. Ray restarts the actor."""

    kills = True

    def hit(self, on: Strike) -> None:
        remote = on.remote
        on.struck.at = remote.killed = on.run.hand.signal(remote.host, remote.pid, signal.SIGKILL)
        on.run.await_end(remote)


@dataclass(frozen=True)
class Stop(Staged):
    """SIGSTOP, and SIGCONT after so many seconds, whatever happened meanwhile."""

    seconds: float = 1.0
    absent: str = field(default="", kw_only=True)  # type: ignore[misc]
    """It begins when this member is said to be lost, and ends when it is back, or after the seconds."""

    def hit(self, on: Strike) -> None:
        run, remote = on.run, on.remote
        lost = run.await_change(self.absent, "lost", run.began, 10.0) if self.absent else 0.0
        if self.seconds > LEASE_S:  # it stands still in a pull, if it pulls
            key = f"{on.number}-{self.member}-pulls"
            if on.ask(remote, "tell_of_pull", key=key):
                run.board.await_moment(key, 5.0)
        on.struck.landed = lost is not None
        on.struck.at = run.hand.signal(remote.host, remote.pid, signal.SIGSTOP)
        until = on.struck.at + self.seconds
        if self.absent:
            run.await_change(self.absent, "back", lost or on.struck.at, self.seconds)
            until = time.monotonic()
        run.undo_later(until, lambda: run.hand.signal(remote.host, remote.pid, signal.SIGCONT), on.healing)


@dataclass(frozen=True)
class Cable(Staged):
    """The cable of its host is pulled, and plugged in again after so many seconds; nobody is told."""

    seconds: float = 1.0
    of_host = True
    deeds: ClassVar[tuple[str, str]] = ("pull", "plug in")

    @property
    def may_part(self) -> bool:  # type: ignore[override]
        return self.seconds > max(CUTS_S)

    def hit(self, on: Strike) -> None:
        run, host, (do, undo) = on.run, on.remote.host, self.deeds
        run.hand.do(do, host)
        run.undo_later(time.monotonic() + self.seconds, lambda: run.hand.do(undo, host), on.healing)


@dataclass(frozen=True)
class Partition(Cable):
    """For so many seconds those on its host reach each other, and nobody else, nor do others reach them."""

    deeds = ("part", "join")


@dataclass(frozen=True)
class PowerOff(Staged):
    """Of its host, with all that run there. It boots again, and Ray has its actors run wherever there is room."""

    kills = of_host = True

    def hit(self, on: Strike) -> None:
        remote = on.remote
        on.struck.at = on.run.hand.do("power off", remote.host)
        on.healing.callback(on.run.hand.do, "boot", remote.host)
        on.run.await_end(remote)


@dataclass(frozen=True)
class ArenaFull(Fault):
    """The others keep what this member has sent them, until its shared memory has no room left for their calls."""

    def strike(self, on: Strike) -> None:
        peers = on.run.others(self.member)
        for peer in peers:
            on.healing.callback(lambda peer=peer: on.run.board.remotes[peer].ask("drop"))
        on.ask(on.remote, "fill", peers=peers, size=8 * MB)


@dataclass(frozen=True)
class FdLimit(Fault):
    """It may open so many more descriptors (RLIMIT_NOFILE), while the load runs."""

    spare: int

    def strike(self, on: Strike) -> None:
        remote = on.remote
        on.ask(remote, "limit", spare=self.spare)
        on.healing.callback(on.ask, remote, "unlimit")


@dataclass(frozen=True)
class Shortage(Fault):
    """For so many seconds it may map ``spare`` more bytes (RLIMIT_AS), and calls need more than that there: a message
    that it has no memory for fails its call, and what lacks less than that ends it.

    0 spare bytes: less than a thread's stack takes, so no thread can be started.
    """

    seconds: float
    spare: int = 0
    tensor: bool = False
    """A call brings it a tensor, which may go by torchrpc."""
    may_kill = True

    def strike(self, on: Strike) -> None:
        starved = on.remote.ask("starve", seconds=self.seconds, spare=self.spare)
        callers = [on.run.remotes[name] for name in on.run.others(self.member)][: 1 if self.spare else None]
        load = {"size": 2 * self.spare, "tensor": self.tensor, "count": 1 if self.spare else 40}
        asked = [(caller, caller.ask("burden", target=self.member, seconds=3.0, **load)) for caller in callers]
        for caller, future in [*asked, (on.remote, starved)]:
            on.run.answered(future, f"round {on.number}: {self}: {caller.name}", caller)


@dataclass(frozen=True)
class Garbage(Fault):
    """Bytes of no meaning, from so many connections to each socket it listens on that asks for the secret."""

    connections: int
    seed: int

    def strike(self, on: Strike) -> None:
        doors = on.run.doors(self.member)
        told = strangers.told_of(doors[0], strangers.credentials(on.run.group))
        strangers.send(doors, self.seed, self.connections * len(doors), told)


@dataclass(frozen=True)
class Silence(Fault):
    """So many connections to each socket it listens on that say nothing, while the load runs."""

    connections: int

    def strike(self, on: Strike) -> None:
        for door in on.run.doors(self.member):
            for _ in range(self.connections):
                try:
                    on.healing.enter_context(door.dial())
                except OSError:  # another host may be out of reach just now
                    if on.remote.host == socket.gethostname():
                        raise


@dataclass(frozen=True)
class Siege(Fault):
    """So many messages from processes without the secret, to every socket of this lane of every member."""

    lane: str
    messages: int
    seed: int
    processes: int = 2
    seconds: float = float("inf")
    """They send no longer than this."""

    def strike(self, on: Strike) -> None:
        doors = [door for name in on.run.remotes for door in strangers.doors(on.run.group, name)]
        doors = [door for door in doors if door.lane == self.lane]
        told = strangers.told_of(doors[0], strangers.credentials(on.run.group))
        share, until = -(-self.messages // self.processes), time.monotonic() + self.seconds
        with multiprocessing.get_context("spawn").Pool(self.processes) as pool:
            seeds = range(self.seed * 1000, self.seed * 1000 + self.processes)
            reports = pool.starmap(strangers.send, [(doors, seed, share, told, until) for seed in seeds])
        on.struck.sent, on.struck.unsent = Counter[str](), Counter[str]()
        for sent, unsent, heard in reports:
            on.struck.sent.update(sent)
            on.struck.unsent.update(unsent)
            if heard > strangers.PROVED + 32 and self.lane not in ("nng", "torchrpc"):
                on.run.violated(f"a stranger was told {heard} bytes")


# --- which faults, and how often -----------------------------------------------------------------------------------

Draw = Callable[[random.Random, str], Fault]
#: How often in a hundred or so, and what.
Table = tuple[tuple[int, Draw], ...]


class Faults(NamedTuple):
    """What strikes a group on one host, and one on several."""

    here: Table
    on_hosts: Table = ()


def _call_of(draw: random.Random) -> dict[str, Any]:
    moment = draw.choice(MOMENTS)
    large = moment in ("mid-transfer", "replying") or draw.random() < 0.3
    return {"at": moment, "bytes": draw.choice((8 * MB, 40 * MB)) if large else draw.choice((8, 20 * KB, 300 * KB))}


def _kill(draw: random.Random, member: str) -> Fault:
    return Kill(member, **_call_of(draw))


def _kill_between_calls(draw: random.Random, member: str) -> Fault:
    return Kill(member)


def _stop(*seconds: float, staged: bool = False) -> Draw:
    return lambda draw, member: Stop(member, seconds=draw.choice(seconds), **(_call_of(draw) if staged else {}))


def _of_sockets(weight: int) -> Table:
    """What strikes a process between calls."""
    return (
        (weight, lambda draw, member: ArenaFull(member)),
        (weight, lambda draw, member: FdLimit(member, draw.randrange(4))),
        (weight, lambda draw, member: Garbage(member, draw.randrange(1, 20), draw.getrandbits(30))),
        (weight, lambda draw, member: Silence(member, draw.randrange(1, 40))),
    )


def _shortage(*spare: int) -> Draw:
    return lambda draw, member: Shortage(
        member, draw.choice((0.3, 1.0, 2.5)), draw.choice(spare), any(spare) and draw.random() < 0.2
    )


CALL_FAULTS = Faults(
    ((45, _kill), (20, _stop(0.2, 0.8, 2.5, staged=True)), *_of_sockets(9)),
    (
        (30, _kill),
        (15, _stop(0.2, 0.8, 2.5, staged=True)),
        *_of_sockets(4),
        (15, lambda draw, member: Cable(member, seconds=draw.choice(CUTS_S), **_call_of(draw))),
        (15, lambda draw, member: Partition(member, seconds=draw.choice(CUTS_S), **_call_of(draw))),
        (9, lambda draw, member: PowerOff(member, **_call_of(draw))),
    ),
)
_PATTERN_TABLE: Table = (
    (45, _kill_between_calls),
    (5, _kill),
    (15, _stop(0.3, 1.5, 4.0)),
    (15, _shortage(24 * MB, 64 * MB)),
    (15, _shortage(0)),
    (5, lambda draw, member: FdLimit(member, draw.randrange(4))),
)
_PATTERNS_ON_HOSTS: Table = (
    *_PATTERN_TABLE,
    (40, lambda draw, member: Partition(member, seconds=OUTLASTING_S)),
    (15, lambda draw, member: Cable(member, seconds=draw.choice((1.0, 3.0)))),
)
#: Over minutes: members also stand still for longer than the lease of a reader of weights.
_LONG: Table = ((20, _stop(70.0, 75.0)),)
PATTERN_FAULTS = Faults(_PATTERN_TABLE, _PATTERNS_ON_HOSTS)
LONG_FAULTS = Faults((*_PATTERN_TABLE, *_LONG), (*_PATTERNS_ON_HOSTS, *_LONG))
SHARD_FAULTS = Faults(((65, _kill_between_calls), (35, _stop(0.05, 0.5, 1.5))))


def random_faults(
    seed: int,
    count: int,
    members: Sequence[str],
    table: Table,
    never_killed: str = "",
    always_on: Sequence[str] = (),
    at_once: Sequence[int] = (1, 1, 2, 3),
) -> list[tuple[Fault, ...]]:
    """``count`` faults in rounds, which strike different members at once. The same for one seed.

    ``always_on``: members whose hosts keep their power. No two hosts are struck in one round.
    """
    draw = random.Random(seed)
    rounds: list[tuple[Fault, ...]] = []
    while count > 0:
        struck: list[Fault] = []
        for member in draw.sample(members, min(count, draw.choice(at_once))):
            while True:
                (chosen,) = draw.choices([of for _, of in table], [weight for weight, _ in table])
                fault = chosen(draw, member)
                spared = (isinstance(fault, Kill) and member == never_killed) or (
                    isinstance(fault, PowerOff) and member in always_on
                )
                if not spared and not (fault.of_host and any(one.of_host for one in struck)):
                    break
            struck.append(fault)
        rounds.append(tuple(struck))
        count -= len(struck)
    return rounds
