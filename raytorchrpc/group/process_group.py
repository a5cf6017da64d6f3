"""A torch.distributed process group, which the supervisor has members create together.

Collectives are the job of NCCL and gloo. This module starts them: ranks, network interface, store (see ``rendezvous``),
deadlines, and the end of the process group when a member is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from raytorchrpc._compat import torch_internals
from raytorchrpc.calls.client.future import Future
from raytorchrpc.calls.member import LocalMember, process_member
from raytorchrpc.calls.options import MAX_TIMEOUT_S, CallOptions, checked_timeout, takes_timeout
from raytorchrpc.calls.scope import Limit, Scope, current_scope
from raytorchrpc.calls.server.exposed import service
from raytorchrpc.errors import BootstrapError, ConfigurationError, ProcessGroupLost
from raytorchrpc.group.control_connections import ControlConnections
from raytorchrpc.group.rendezvous import KeyTable, MemberStore
from raytorchrpc.process import fork, guard, tcp, threads
from raytorchrpc.process.fan_out import Answers
from raytorchrpc.process.locks import Lock, Turn
from raytorchrpc.process.this_process import reserve_descriptors
from raytorchrpc.process.workers import Deadlines
from raytorchrpc.topology import nccl_env
from raytorchrpc.topology.endpoint import Endpoint

if TYPE_CHECKING:
    from raytorchrpc.group.roster import Roster  # members do not load it

BACKENDS = ("gloo", "nccl")

#: How long others wait for the end of a process group (seconds).
_END_S = 5.0
#: For members to learn that others have a process group, or that an attempt was given up (seconds).
_NOTIFY_S = 1.0
#: The home answers in time that a key is missing; a request waits so much longer for that answer (seconds).
_ANSWER_S = 5.0
#: NCCL publishes an id of this length, with the address of a listener of its own. What gloo publishes is longer.
_NCCL_ID_BYTES = 128
#: Up to so many members, gloo connects all pairs when it starts. Of more, that would take too long: it connects two
#: when they first exchange something, where even ``isend`` blocks until both take part, up to five times its deadline.
_ALL_PAIRS = 8
_STORE = "raytorchrpc.process_group_store"
#: What a member without a process group may do.
_AGAIN = "call Group.process_group() again in the process that formed the group"


@dataclass(frozen=True)
class ProcessGroupInfo:
    """The members of a process group and their ranks. Picklable.

    Examples:
        >>> info = rtr.get_group().process_group("gloo", members=["learner", "collector"])
        >>> info.backend, dict(info.ranks)
        ('gloo', {'learner': 0, 'collector': 1})
    """

    backend: str
    """``gloo`` or ``nccl``."""
    number: int
    """1 for the first one of a group; each call of ``Group.process_group`` creates the next."""
    ranks: Mapping[str, int]
    """torch's rank by member name: without gaps, in the order of the members' ranks in the group."""
    timeout_s: float
    """Deadline of a collective, in seconds."""

    @property
    def world_size(self) -> int:
        """The number of members."""
        return len(self.ranks)


def _home_of(info: ProcessGroupInfo) -> str:
    """The member that holds the keys of its store: torch's rank 0."""
    return next(iter(info.ranks))


class Meeting(NamedTuple):
    """What a member needs in order to create a process group with the others."""

    info: ProcessGroupInfo
    interface: str | None
    """This member's network interface, for gloo and NCCL. None: unknown, they choose one."""
    endpoint: Endpoint
    """This member's evidence, from which NCCL's environment is derived."""
    timeout_s: float
    """Deadline of this step, in seconds."""


class _Made(NamedTuple):
    info: ProcessGroupInfo
    group: dist.ProcessGroup
    store: Store
    """Kept alive: torch's threads call its methods."""
    end: Callable[[], None]
    """Undoes the changes to this process outside torch."""


class Collectives:
    """One per membership. Thread-safe. Everything that blocks has a deadline; nothing here runs on a lane's thread."""

    def __init__(self, name: str, deadlines: Deadlines) -> None:
        """``name``: of this member."""
        self._name, self._deadlines = name, deadlines
        self._changed = threading.Condition()
        self._making = Turn()
        """Held while torch creates one, which nothing can interrupt."""
        self._wanted: ProcessGroupInfo | None = None
        """The one that exists or is being created; None after its end."""
        self._oldest = 0
        """Attempts with lower numbers are over. Their requests may be carried out late, beside those of the next."""
        self._made: _Made | None = None
        self._former: Store | None = None
        """The previous one's store, which its user may be about to call: it says that its process group has ended."""
        self._keys: dict[int, KeyTable] = {}
        """The keys of the latest one, by its number, if this member is its home."""
        self._ending: threading.Thread | None = None
        self._cause = "none was created: call Group.process_group() in the process that formed the group"
        self._closed = False

    # --- for the member's own code ---------------------------------------------------------------------------------

    def get(self, timeout_s: float) -> tuple[dist.ProcessGroup, ProcessGroupInfo]:
        """The current one. Blocks for it, at most ``timeout_s``. Raises ProcessGroupLost, with the cause, if there is
        none.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._made is not None or self._closed, timeout_s)
            if self._made is None:
                raise ProcessGroupLost(f"member {self._name!r} has no process group: {self._cause}")
            if dist.group.WORLD is not self._made.group:
                raise ProcessGroupLost(f"member {self._name!r} has no process group: it was destroyed here; {_AGAIN}")
            return self._made.group, self._made.info

    # --- for the supervisor ------------------------------------------------------------------------------------------

    def prepare(self, info: ProcessGroupInfo, timeout_s: float) -> None:
        """End the previous one, and check that this process can create one. At its home, hold the store's keys.

        Raises ConfigurationError, BootstrapError.
        """
        with self._changed:
            self._refuse_late(info)
            self._oldest = info.number
            self._end(f"process group {info.number} replaces it")
        if (ending := self._ending) is not None:
            ending.join(min(timeout_s, _END_S))
            if ending.is_alive():
                raise BootstrapError(f"the previous process group is still ending in {self._name!r}")
        if not self._making.once("a process group").acquire(timeout=min(timeout_s, _END_S)):
            raise BootstrapError(
                f"an earlier process group is still being created in {self._name!r}; it ends by itself"
            )
        self._making.release()
        if dist.is_initialized():
            raise ConfigurationError(
                f"torch.distributed is initialised in {self._name!r} already, and not by this group: call "
                f"torch.distributed.destroy_process_group() there first, or keep using that process group"
            )
        if info.backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise ConfigurationError(f"backend 'nccl': {self._name!r} has no NCCL or no GPU; use backend='gloo'")
        if info.backend == "gloo" and not dist.is_gloo_available():
            raise ConfigurationError(f"backend 'gloo': torch in {self._name!r} was built without gloo")
        if info.backend == "gloo":  # which ends the process where it lacks one; some are held twice while they are made
            reserve_descriptors(2 * info.world_size, f"a process group of {info.world_size} members over gloo")
        with self._changed:
            if self._closed:
                raise BootstrapError(f"{self._name!r} has left the group")
            self._refuse_late(info)
            self._wanted = info
            self._keys = {info.number: KeyTable(self._deadlines)} if _home_of(info) == self._name else {}
            self._cause = f"process group {info.number} is being created"

    def _refuse_late(self, info: ProcessGroupInfo) -> None:
        """Under the lock: raise BootstrapError if it was given up, or another one was begun after it."""
        if info.number < self._oldest:
            raise BootstrapError(f"process group {info.number} was given up: {self._cause}")

    def keys(self, number: int) -> KeyTable:
        """The keys of that process group. Raises ProcessGroupLost if this member does not, or no longer, hold them."""
        if (keys := self._keys.get(number)) is None:
            raise ProcessGroupLost(f"its process group has ended in its home {self._name!r}: {self._cause}")
        return keys

    def make(self, meeting: Meeting, store: MemberStore, listeners: GuardedListeners) -> None:
        """Create it together with the others. Blocks, at most ``meeting.timeout_s`` or the deadline of a collective,
        whichever is later. Raises BootstrapError.
        """
        info = meeting.info
        with self._making:
            with self._changed:
                if self._wanted != info:
                    raise BootstrapError(f"process group {info.number} was given up: {self._cause}")
            made = self._start(meeting, store, listeners)
            atexit.unregister(self._end_at_exit)
            atexit.register(self._end_at_exit)
            with self._changed:
                if self._wanted == info:
                    self._made = made
                    self._changed.notify_all()
                    return
            _abort(made, None, self._cause)
            raise BootstrapError(f"process group {info.number} was given up: {self._cause}")

    def _start(self, meeting: Meeting, store: MemberStore, listeners: GuardedListeners) -> _Made:
        """Have torch create it."""
        info = meeting.info
        end, hook = contextlib.ExitStack(), sys.excepthook
        end.callback(listeners.close)
        end.callback(_environment(info, meeting))
        try:
            store.set_timeout(timedelta(seconds=meeting.timeout_s))
            store.shortest_wait_s = meeting.timeout_s
            torch_internals.number_process_groups_anew()
            # An actor sees the GPUs that Ray gave it. With one, NCCL connects at once, not at the first collective.
            has_one_gpu = info.backend == "nccl" and torch.cuda.device_count() == 1
            dist.init_process_group(
                info.backend,
                store=store,
                rank=info.ranks[self._name],
                world_size=info.world_size,
                timeout=timedelta(seconds=info.timeout_s),
                device_id=torch.device("cuda", 0) if has_one_gpu else None,
            )
        except Exception as error:  # torch's own are RuntimeError and ValueError, NCCL's DistBackendError
            end.close()
            with contextlib.suppress(Exception):  # the others need not wait for this member
                store.give_up(f"{self._name}: {_first_line(error)}")
            raise BootstrapError(f"{info.backend} could not start in {self._name!r}: {_first_line(error)}") from error
        finally:
            sys.excepthook = hook  # torch wraps it each time
            store.shortest_wait_s = 0.0
        group = dist.group.WORLD
        assert group is not None
        return _Made(info, group, store, end.close)

    def stay_out(self, info: ProcessGroupInfo) -> None:
        """Others create one without this member: end the one that they leave. Does not block."""
        with self._changed:
            if self._wanted is not None and self._wanted.ranks.keys().isdisjoint(info.ranks):
                return
            cause = f"process group {info.number} has other members: {', '.join(info.ranks)}"
            self._end(cause)
            self._cause = cause

    def give_up(self, number: int, cause: str) -> None:
        """End an attempt that failed elsewhere. Idempotent, does not block."""
        with self._changed:
            self._oldest = max(self._oldest, number + 1)
            if self._wanted is not None and self._wanted.number == number:
                self._end(cause)

    # --- for membership changes --------------------------------------------------------------------------------------

    def lose(self, member: str, cause: str) -> None:
        """End the process group if it includes this member, which was lost or replaced. Does not block."""
        with self._changed:
            if self._wanted is None or member not in self._wanted.ranks:
                return
        self._end(f"member {member!r} was lost ({cause}); {_AGAIN}")

    def close(self) -> None:
        """End with the membership. Idempotent; blocks a few seconds at most."""
        with self._changed:
            self._closed = True
        self._end("the group was shut down")
        self._former = None
        if (ending := self._ending) is not None:
            ending.join(_END_S)
        atexit.unregister(self._end_at_exit)

    def _end_at_exit(self) -> None:
        """Stop NCCL's threads: one that called the store while the interpreter ends would crash the process."""
        if not fork.forked():
            self.close()

    def _end(self, cause: str) -> None:
        with self._changed:
            made, self._made = self._made, None
            keys = next(iter(self._keys.values()), None)
            if self._wanted is not None or made is not None:
                self._cause = cause
            self._wanted = None
            self._changed.notify_all()
            if made is not None:
                self._former = made.store
                # NCCL may wait for the device. The keys go last: NCCL's own threads use them.
                name = f"raytorchrpc-{self._name}-process-group"
                self._ending = threads.start(_abort, made, keys, cause, name=name)
        if made is None and keys is not None:
            keys.close(cause)  # fails the waits for a key


def _environment(info: ProcessGroupInfo, meeting: Meeting) -> Callable[[], None]:
    """Set what gloo and NCCL read when they start, and again for every subgroup, unless the user set it. Without it
    gloo takes the address of the host's own name, which is often 127.0.1.1, and connects all pairs of members before
    the first collective, which needs a few of them. Returns a function that undoes it.
    """
    wanted = {"TORCH_GLOO_LAZY_INIT": "1"} if info.world_size > _ALL_PAIRS else {}
    if meeting.interface is not None:
        wanted["GLOO_SOCKET_IFNAME"] = meeting.interface
    if info.backend == "nccl":
        nccl_env.apply(meeting.endpoint, interface=meeting.interface)  # stays: NCCL reads it once
        # By default torch ends the whole process when a collective fails; with this it raises.
        wanted["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    ours = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(ours)

    def undo() -> None:
        for name, value in ours.items():
            if os.environ.get(name) == value:
                del os.environ[name]

    return undo


def _abort(made: _Made, keys: KeyTable | None, cause: str) -> None:
    """End it and all its subgroups. Pending collectives fail; one that gloo is sending just then, at its deadline."""
    made.end()  # first, as the guard must not use descriptors that gloo has closed
    with contextlib.suppress(Exception):
        if dist.group.WORLD is made.group:  # else it was destroyed already
            torch_internals.abort_process_groups()
    if keys is not None:
        keys.close(cause)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or repr(error)


# --- gloo's listeners ------------------------------------------------------------------------------------------------


class GuardedListeners:
    """The listeners of one process group and its subgroups over gloo, which believes anybody who names a member.

    gloo publishes the address of a listener in the store before any member can connect there.
    """

    def __init__(self, members: Sequence[str]) -> None:
        """``members``: of the process group, by rank."""
        self._members = members
        self._doors: dict[fork.Address, guard.Takeover] = {}
        self._is_over = False

    def look_at(self, published: bytes) -> bool:
        """Guard the listeners whose addresses are published; returns whether there are any. Raises BootstrapError if
        one cannot be guarded, or if a stranger was faster.
        """
        if self._is_over or len(published) <= _NCCL_ID_BYTES:
            return False
        for name, door in [*self._doors.items()]:
            if not door.is_used:  # its subgroup was destroyed
                self._doors.pop(name, None)
                _close(door)
        published_here = False
        for fd in tcp.listening().values():
            try:
                with fork.borrowed(fd) as listener:
                    name = guard.address(listener.getsockname())
            except OSError:  # it was closed just now
                continue
            if _as_sent(name) in published:
                published_here = True
                if name not in self._doors:
                    self._guard(fd, name)
        return published_here

    def _guard(self, fd: int, name: fork.Address) -> None:
        try:
            door = guard.Takeover(fd, guard.registered().get(fd))
        except OSError as error:
            raise BootstrapError(
                f"gloo's listener, which authenticates nobody, cannot be guarded on this kernel: {error}"
            ) from error
        self._doors[name] = door
        guard.process_guard().watch(door.public, door.deliver, lambda head: 8, self._maker)
        strangers = [
            f"{each.there[0]}:{each.there[1]}" for each in guard.process_guard().own_connections() if each.here == name
        ]
        if strangers:
            raise BootstrapError(
                f"gloo accepted a connection from {', '.join(strangers)} before any member could connect: another "
                f"process connects to members' ports; try again, or keep it out (firewall, GroupConfig(interface=...))"
            )

    def _maker(self, head: bytes) -> str | None:
        """gloo begins with the rank of who connects: in a subgroup its rank there, and before torch 2.8 a number."""
        rank = int.from_bytes(head, sys.byteorder)
        return self._members[rank] if rank < len(self._members) else None

    def close(self) -> None:
        """End the connections too, which gloo itself keeps open for collectives that wait. Idempotent."""
        self._is_over = True
        for door in [*self._doors.values()]:  # a thread that makes a subgroup may change them
            _close(door)


def _close(door: guard.Takeover) -> None:
    guard.process_guard().close(door.public)
    door.close(disconnect=True)


def _as_sent(name: fork.Address) -> bytes:
    """An address as the kernel has it, and as gloo publishes it."""
    host, port = name
    if ":" in host:
        return struct.pack("!HI16s", port, 0, socket.inet_pton(socket.AF_INET6, host))
    return struct.pack("!H4s", port, socket.inet_aton(host))


# --- the process groups of this process ------------------------------------------------------------------------------

_lock = Lock()
_collectives: weakref.WeakKeyDictionary[LocalMember, Collectives] = weakref.WeakKeyDictionary()


def collectives_of(local: LocalMember) -> Collectives:
    """The process groups of this membership; they end with it."""
    with _lock:
        collectives = _collectives.get(local)
        if collectives is None:
            collectives = _collectives[local] = Collectives(local.me.name, local.deadlines)
            local.at_end.append(collectives.close)
        return collectives


@takes_timeout
def process_group(*, timeout: float = 0.0, group: str | None = None) -> dist.ProcessGroup:
    """This member's torch.distributed process group, created by ``Group.process_group``.

    It is torch's default one (``torch.distributed.group.WORLD``), so DDP, FSDP and ``init_device_mesh`` find it by
    themselves. Waits ``timeout`` seconds for one, as after the loss of a member; 0 does not wait.

    Pass it to collectives. Without ``group=``, torch uses the default one of that moment, which may be the next one,
    where the other members are elsewhere in their program.

    Raises ProcessGroupLost, with the cause, if there is none, and NotAMember outside a group.

    Examples:
        >>> def train(self):  # in each member, after Group.process_group("gloo")
        ...     torch.distributed.all_reduce(self.gradient, group=rtr.process_group())
    """
    return collectives_of(process_member(group=group)).get(checked_timeout(timeout))[0]


@takes_timeout
def process_group_info(*, timeout: float = 0.0, group: str | None = None) -> ProcessGroupInfo:
    """Who is in this member's process group, and as which rank. Waits and raises as ``process_group``.

    Examples:
        >>> def rank(self):
        ...     return rtr.process_group_info().ranks[rtr.current_member().name]
    """
    return collectives_of(process_member(group=group)).get(checked_timeout(timeout))[1]


# --- the supervisor calls these two, on a thread of the member's own -------------------------------------------------


def call_collectives(local: LocalMember, method: Callable[..., Any], *args: Any) -> Any:
    return method(collectives_of(local), *args)


def make_process_group(local: LocalMember, meeting: Meeting) -> None:
    listeners = GuardedListeners(list(meeting.info.ranks))
    store = MemberStore(partial(_send_to_home, local, meeting.info), listeners.look_at)
    collectives_of(local).make(meeting, store, listeners)


def _operate(
    local: LocalMember, caller: int, number: int, seconds: float, operation: str, args: tuple[Any, ...]
) -> Any:
    """At the home: run an operation of the store. A wait is answered after so many seconds at the latest."""
    return collectives_of(local).keys(number).operate(seconds, operation, *args)


SERVICES = {_STORE: service(_operate)}


def _send_to_home(
    local: LocalMember, info: ProcessGroupInfo, seconds: float, operation: str, args: tuple[Any, ...]
) -> Any:
    """See MemberStore. Waits only for the home: neither for an admission to the actor nor for calls in flight."""
    budget = min(MAX_TIMEOUT_S, seconds + _ANSWER_S)
    # A scope of its own: torch's timeout counts here, and what the caller has sent to the home does not hold this up.
    before = current_scope.set(Scope(limit=Limit(time.monotonic() + budget)))
    try:
        with torch_internals.autograd_context(torch_internals.NO_CONTEXT):
            request = (info.number, seconds, operation, args)
            return Future(local.outgoing.call(_home_of(info), _STORE, request, {}, CallOptions(budget, retry=0))).wait()
    finally:
        current_scope.reset(before)


# --- the supervisor's part -------------------------------------------------------------------------------------------


def check_backend(backend: Any, endpoints: Mapping[str, Endpoint]) -> None:
    """Raise ConfigurationError for what cannot work, from what the members published when they joined."""
    if backend not in BACKENDS:
        raise ConfigurationError(f"process_group(backend=...) is 'gloo' or 'nccl', not {backend!r}")
    if backend == "gloo":
        return
    without = [name for name, endpoint in endpoints.items() if not endpoint.gpus]
    if without:
        raise ConfigurationError(
            f"backend 'nccl' needs a GPU in every member; none in {', '.join(without)} (an actor gets one with "
            f"num_gpus=1 and a torch build with CUDA): use backend='gloo', or name those that have one in members="
        )
    owners: dict[str, str] = {}
    for name, endpoint in endpoints.items():
        if len(endpoint.gpus) > 1:
            continue  # which one it will use is not known
        gpu = endpoint.gpus[0].uuid
        if gpu and gpu in owners:
            raise ConfigurationError(
                f"backend 'nccl': {owners[gpu]} and {name} are on one GPU, and NCCL takes one process for each: give "
                f"each num_gpus=1, or use backend='gloo'"
            )
        owners[gpu] = name


def check_encryption(backend: str, endpoints: Mapping[str, Endpoint]) -> None:
    """For a group with ``tls=True``: raise ConfigurationError if the backend would send in the clear over a network."""
    (first, one), *others = endpoints.items()
    for name, other in others:
        if not one.same_network(other):
            raise ConfigurationError(
                f"backend {backend!r} does not encrypt, the group has tls=True, and {first} and {name} share no "
                f"network namespace: name members of one host in members=, or form a group without tls"
            )


def create_process_group(
    roster: Roster,
    connections: ControlConnections,
    number: int,
    backend: str,
    timeout_s: float,
    collective_s: float,
    names: Sequence[str] | None = None,
) -> ProcessGroupInfo:
    """Create a process group across these members (None: all). Blocks until all of them have it.

    Raises ConfigurationError and BootstrapError, naming the members that failed; then no member has one.
    """
    deadline = time.monotonic() + timeout_s
    records = {name: record for name, record in roster.records.items() if names is None or name in names}
    if gone := sorted(set(names or ()) - roster.records.keys()):
        raise BootstrapError(f"{', '.join(gone)} left the group meanwhile", members=tuple(gone))
    endpoints = {name: record.probe.endpoint for name, record in records.items()}
    check_backend(backend, endpoints)
    if roster.config.tls:
        check_encryption(backend, endpoints)
    info = ProcessGroupInfo(backend, number, {name: rank for rank, name in enumerate(records)}, collective_s)

    def notify(names: Iterable[str], *request: Any) -> None:
        connections.call_all(call_collectives, dict.fromkeys(names, request), time.monotonic() + _NOTIFY_S)

    # A member that does not learn of it in time keeps at most the previous one, which the others have left.
    notify([name for name in roster.records if name not in records], Collectives.stay_out, info)
    try:
        remaining_s = max(1.0, deadline - time.monotonic())
        prepare = dict.fromkeys(records, (Collectives.prepare, info, remaining_s))
        _check(roster.name, connections.call_all(call_collectives, prepare, deadline))
        remaining_s = max(1.0, deadline - time.monotonic())
        meetings = {
            name: (Meeting(info, roster.plan.kind(name).agent.interface, endpoint, remaining_s),)
            for name, endpoint in endpoints.items()
        }
        _check(roster.name, connections.call_all(make_process_group, meetings, deadline))
    except BaseException as error:
        notify(records, Collectives.give_up, number, f"it could not be made: {error}")
        raise
    return info


def _check(group: str, answers: Answers) -> None:
    """Raise the first ConfigurationError, or BootstrapError naming all that failed."""
    _, failures = answers
    for error in failures.values():
        if isinstance(error, ConfigurationError):
            raise error
    if failures:
        reasons = "; ".join(f"{name}: {error}" for name, error in failures.items())
        raise BootstrapError(f"group {group!r}: no process group was created: {reasons}", members=tuple(failures))
