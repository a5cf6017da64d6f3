"""What may happen to a group, as data: who is struck, how, and at which moment of which call.

``at`` names a moment of one call that is made for the purpose: the fault strikes when the member has told that the
moment has come, and never after a guess at how long something takes.

- ``idle``: no call, and before the others begin theirs.
- ``sending``: the member pickles the arguments of its own call. ``mid-transfer``: it has, and the bytes are leaving.
- ``receiving``: it takes a call's arguments apart. ``executing``: it is in the method.
- ``replying``: it has pickled the result, and the bytes are leaving.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Moment = Literal["idle", "sending", "mid-transfer", "receiving", "executing", "replying"]
MOMENTS: tuple[Moment, ...] = ("idle", "sending", "mid-transfer", "receiving", "executing", "replying")
#: At these the member is the one that makes the call.
AS_CALLER = ("sending", "mid-transfer")

KB, MB = 1_000, 1_000_000


@dataclass(frozen=True)
class Fault:
    """One. A member has one at a time."""

    member: str


@dataclass(frozen=True)
class Kill(Fault):
    """SIGKILL. Ray restarts the actor."""

    at: Moment = "idle"
    bytes: int = 8
    """Of the tensor in the call."""


@dataclass(frozen=True)
class Stop(Fault):
    """SIGSTOP, and SIGCONT after so many seconds, whatever happened meanwhile."""

    seconds: float
    at: Moment = "idle"
    bytes: int = 8


@dataclass(frozen=True)
class ArenaFull(Fault):
    """The others keep what this member has sent them, until its shared memory has no room left for their calls."""


@dataclass(frozen=True)
class FdLimit(Fault):
    """It may open so many more descriptors (RLIMIT_NOFILE), while the load runs."""

    spare: int


@dataclass(frozen=True)
class ShortOfMemory(Fault):
    """For so many seconds it may map ``spare`` more bytes (RLIMIT_AS), and a call brings it more than that."""

    seconds: float
    spare: int
    tensor: bool = False
    """It brings a tensor, which may go by torchrpc: TensorPipe ends a process that has no memory for it."""


@dataclass(frozen=True)
class ShortOfThreads(Fault):
    """For so many seconds it may map less than a thread's stack takes (RLIMIT_AS), so none can be started."""

    seconds: float


@dataclass(frozen=True)
class Garbage(Fault):
    """Bytes of no meaning, from so many connections to each socket it listens on."""

    connections: int
    seed: int


@dataclass(frozen=True)
class Silence(Fault):
    """So many connections to each socket it listens on that say nothing, while the load runs."""

    connections: int


@dataclass(frozen=True)
class Cable(Fault):
    """The cable of its host is pulled, and plugged in again after so many seconds; nobody is told."""

    seconds: float
    at: Moment = "idle"
    bytes: int = 8


@dataclass(frozen=True)
class Partition(Fault):
    """For so many seconds those on its host reach each other, and nobody else, nor do others reach them."""

    seconds: float
    at: Moment = "idle"
    bytes: int = 8


@dataclass(frozen=True)
class PowerOff(Fault):
    """Of its host, with all that run there. It boots again, and Ray has its actors run wherever there is room."""

    at: Moment = "idle"
    bytes: int = 8


Draw = Callable[[random.Random, str], Fault]


def _call_of(draw: random.Random) -> tuple[Moment, int]:
    moment = draw.choice(MOMENTS)
    large = moment in ("mid-transfer", "replying") or draw.random() < 0.3
    return moment, draw.choice((8 * MB, 40 * MB)) if large else draw.choice((8, 20 * KB, 300 * KB))


def _kill(draw: random.Random, member: str) -> Fault:
    return Kill(member, *_call_of(draw))


def _stop(draw: random.Random, member: str) -> Fault:
    return Stop(member, draw.choice((0.2, 0.8, 2.5)), *_call_of(draw))


#: How often in a hundred, and what.
TABLE: tuple[tuple[int, Draw], ...] = (
    (45, _kill),
    (20, _stop),
    (8, lambda draw, member: ArenaFull(member)),
    (9, lambda draw, member: FdLimit(member, draw.randrange(4))),
    (9, lambda draw, member: Garbage(member, draw.randrange(1, 20), draw.getrandbits(30))),
    (9, lambda draw, member: Silence(member, draw.randrange(1, 40))),
)
#: The same where there are several hosts; the last three strike a host.
HOSTS_TABLE: tuple[tuple[int, Draw], ...] = (
    (30, _kill),
    (15, _stop),
    (4, lambda draw, member: ArenaFull(member)),
    (4, lambda draw, member: FdLimit(member, draw.randrange(4))),
    (4, lambda draw, member: Garbage(member, draw.randrange(1, 20), draw.getrandbits(30))),
    (4, lambda draw, member: Silence(member, draw.randrange(1, 40))),
    (15, lambda draw, member: Cable(member, draw.choice(CUTS_S), *_call_of(draw))),
    (15, lambda draw, member: Partition(member, draw.choice(CUTS_S), *_call_of(draw))),
    (9, lambda draw, member: PowerOff(member, *_call_of(draw))),
)


def _short_of_memory(draw: random.Random, member: str) -> Fault:
    return ShortOfMemory(member, draw.choice((0.3, 1.0, 2.5)), draw.choice((24 * MB, 64 * MB)), draw.random() < 0.2)


def _short_of_threads(draw: random.Random, member: str) -> Fault:
    return ShortOfThreads(member, draw.choice((0.3, 1.0, 2.5)))


def _kill_between_calls(draw: random.Random, member: str) -> Fault:
    return Kill(member)


#: What strikes the homes and the users of queues, topics and weights.
PATTERNS_TABLE: tuple[tuple[int, Draw], ...] = (
    (45, _kill_between_calls),
    (5, _kill),
    (15, lambda draw, member: Stop(member, draw.choice((0.3, 1.5, 4.0)))),
    (15, _short_of_memory),
    (15, _short_of_threads),
    (5, lambda draw, member: FdLimit(member, draw.randrange(4))),
)
#: The same where there are several hosts.
PATTERNS_HOSTS_TABLE: tuple[tuple[int, Draw], ...] = (
    *PATTERNS_TABLE,
    (40, lambda draw, member: Partition(member, OUTLASTING_S)),
    (15, lambda draw, member: Cable(member, draw.choice((1.0, 3.0)))),
)
#: The same over minutes: members also stand still for longer than the lease of a reader of weights.
PATTERNS_LONG_TABLE: tuple[tuple[int, Draw], ...] = (
    *PATTERNS_TABLE,
    (20, lambda draw, member: Stop(member, draw.choice((70.0, 75.0)))),
)
OF_A_HOST = (Cable, Partition, PowerOff)
#: Below five seconds nobody is lost (docs/failure-model.md).
CUTS_S = (0.3, 1.0, 3.0)
#: After about fifteen they are, though they live (seconds).
OUTLASTING_S = 16.0
#: What may end the process, if Ray's own threads cannot bear it; then it is lost, and Ray restarts it.
MAY_END = (ShortOfMemory, ShortOfThreads)


def may_part(fault: Fault) -> bool:
    """Whether members that live may be lost to the others by it."""
    return isinstance(fault, (Cable, Partition)) and fault.seconds > max(CUTS_S)


def random_faults(
    seed: int,
    count: int,
    members: Sequence[str],
    never_killed: str = "",
    always_on: Sequence[str] = (),
    table: Sequence[tuple[int, Draw]] = TABLE,
) -> list[tuple[Fault, ...]]:
    """``count`` faults in rounds of one to three, which strike different members at once. The same for one seed.

    ``always_on``: whose hosts keep their power. No two hosts are struck in one round.
    """
    draw = random.Random(seed)
    rounds: list[tuple[Fault, ...]] = []
    while count > 0:
        struck: list[Fault] = []
        for member in draw.sample(members, min(count, draw.choice((1, 1, 2, 3)))):
            while True:
                (chosen,) = draw.choices([of for _, of in table], [weight for weight, _ in table])
                fault = chosen(draw, member)
                killed = isinstance(fault, Kill) and member == never_killed
                second = isinstance(fault, OF_A_HOST) and any(isinstance(one, OF_A_HOST) for one in struck)
                if not (killed or second or (isinstance(fault, PowerOff) and member in always_on)):
                    break
            struck.append(fault)
        rounds.append(tuple(struck))
        count -= len(struck)
    return rounds
